"""Reading a generation while it grows: text that can be shown early, and stop sequences that end it.

Invariant: `text` only ever grows, and is the beginning of the text that the finished reply has, as long as the output
holds plain text alone. Reading ends at the first token with a meaning of its own (a tool call, reasoning, the end of
the turn) and at the first stop sequence; what comes then is told only by the finished, recorded reply.
"""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"  # what a cut character decodes to


class Reading:
    """`special`: ids that end reading. `stops`: sequences that end it, too."""

    def __init__(self, decode: Decode, special: frozenset[int], stops: tuple[str, ...]) -> None:
        self._decode, self._special, self._stops = decode, special, stops
        self._pending: list[int] = []
        self._whole = ""  # all that was decoded
        self.ended = False
        self.stopped = False

    def feed(self, ids: list[int]) -> bool:
        """Take new ids in; true if a stop sequence is complete."""
        for token in ids:
            if self.ended:
                break
            if token in self._special:
                self.ended = True
                break
            self._pending.append(token)
        if self._pending:
            text = self._decode(self._pending)
            if self.ended or not text.endswith(UNFINISHED):
                self._append(text)
                self._pending = []
        return self.stopped

    def _append(self, text: str) -> None:
        longest = max((len(s) for s in self._stops), default=1)
        start = max(0, len(self._whole) - longest + 1)
        self._whole += text
        found = [at for s in self._stops if (at := self._whole.find(s, start)) >= 0]
        if found:
            self._whole, self.ended, self.stopped = self._whole[: min(found)], True, True

    @property
    def text(self) -> str:
        """What can be shown: without blanks at the ends, which the reply has not, and without what may yet turn out to
        be the beginning of a stop sequence."""
        shown = self._whole.lstrip()
        if not self.ended and self._stops:
            held = max(len(s) for s in self._stops) - 1
            shown = shown[: max(0, len(shown) - held)]
        return shown.rstrip()
