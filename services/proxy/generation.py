"""What an engine has generated for one call, as it grows.

Invariant: one log-probability per token, finite, in order; versions are spans over the whole output. A report that
breaks this is refused whole (BadReport), and what was there before stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.proxy.pieces import Pieces
from shared.events import VersionSpan

_VERSION = re.compile(r"v?(\d+)\Z")


class BadReport(Exception):
    """An engine's report that cannot be true: the engine is broken."""


@dataclass
class Generation:
    """The output so far; the lists have one entry per generated token."""

    prompt: Pieces
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""  # stop, length; "" while it is not finished
    cell: int = -1
    cached_tokens: int = 0
    queued_s: float = 0.0
    interval: int = 64  # tokens between two reports of an engine: what a dying engine can lose
    reported: Callable[[list[int]], bool] | None = None
    """Told the new ids of each report; true: the text holds a stop sequence, no more is wanted."""
    stopped: bool = False

    def begin_with(self, ids: list[int], logprobs: list[float], spans: list[VersionSpan]) -> None:
        """Output that another process got for this call; for a generation that is empty so far."""
        self.ids, self.logprobs, self.spans = ids, logprobs, spans
        if ids and self.reported is not None:
            self.stopped = self.reported(ids)

    def take(self, base: int, meta: dict[str, Any], version: int) -> None:
        """Add what is new in one report of a request that began at token `base`. Reports are cumulative, or hold only
        the new tokens; the length tells which. `version`: of the policy, if the engine does not say."""
        rows = meta.get("output_token_logprobs") or []
        total = int(meta.get("output_token_logprobs_length") or len(rows))
        fresh = total - (len(self.ids) - base)
        if fresh > len(rows):
            raise BadReport(f"the engine reported {total} tokens but showed only {len(rows)}")
        new = rows[-fresh:] if fresh > 0 else []
        for row in new:
            if not isinstance(row[0], int | float) or not math.isfinite(row[0]) or row[1] < 0:
                raise BadReport(f"token {row[1]!r} came with the log-probability {row[0]!r}")
        self.logprobs += [row[0] for row in new]
        self.ids += [row[1] for row in new]
        self.cached_tokens = max(self.cached_tokens, meta.get("cached_tokens") or 0)
        self._take_versions(base, meta, version)
        if new and self.reported is not None and not self.stopped:
            self.stopped = self.reported([row[1] for row in new])

    def _take_versions(self, base: int, meta: dict[str, Any], fallback: int) -> None:
        end = len(self.ids)
        whole: list[dict[str, Any]] = [{"version": meta.get("weight_version"), "start": 0, "end": end - base}]
        spans = []
        for span in meta.get("weight_versions") or whole:
            found = _VERSION.match(str(span["version"]))
            number = int(found[1]) if found else fallback
            spans.append((number, base + span["start"], min(base + span["end"], end)))
        self.replace_spans(base, spans)

    def replace_spans(self, base: int, spans: list[tuple[int, int, int]]) -> None:
        """From token `base` on the versions are those of `spans` (version, start, end), as last reported."""
        kept = [VersionSpan(s.version, s.start, min(s.end, base)) for s in self.spans if s.start < base]
        for version, start, end in spans:
            if end <= start:
                continue
            if kept and kept[-1].version == version:
                kept[-1] = VersionSpan(version, kept[-1].start, end)
            else:
                kept.append(VersionSpan(version, start, end))
        self.spans = kept
