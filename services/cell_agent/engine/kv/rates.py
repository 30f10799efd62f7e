"""Move the pages or compute them again: whichever the measured rates say is faster. Pure."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.3  # of the newest measurement


@dataclass(frozen=True)
class Rates:
    """None = not measured yet. fixed_s: what a hand-over costs beside moving bytes (commands, registration)."""

    transfer_bytes_s: float | None = None
    prefill_tokens_s: float | None = None
    fixed_s: float = 0.01

    def after_transfer(self, nbytes: int, wire_s: float, whole_s: float) -> Rates:
        """After a hand-over that moved `nbytes` in `wire_s` out of `whole_s`."""
        if nbytes <= 0 or wire_s <= 0:
            return self
        return Rates(
            transfer_bytes_s=_blend(self.transfer_bytes_s, nbytes / wire_s),
            prefill_tokens_s=self.prefill_tokens_s,
            fixed_s=_blend(self.fixed_s, max(0.0, whole_s - wire_s)),
        )

    def after_prefill(self, tokens: int, seconds: float) -> Rates:
        if tokens <= 0 or seconds <= 0:
            return self
        return Rates(self.transfer_bytes_s, _blend(self.prefill_tokens_s, tokens / seconds), self.fixed_s)


@dataclass(frozen=True)
class Choice:
    """transfer_s and recompute_s: what each way is expected to take; None = unknown."""

    transfer: bool
    transfer_s: float | None
    recompute_s: float | None


def choose(prefix_tokens: int, bytes_per_token: int, rates: Rates) -> Choice:
    """Transfer unless recomputing is expected to be faster. What was not measured is tried."""
    if prefix_tokens <= 0:
        return Choice(False, None, 0.0)
    transfer_s = recompute_s = None
    if rates.transfer_bytes_s is not None:
        transfer_s = rates.fixed_s + prefix_tokens * bytes_per_token / rates.transfer_bytes_s
    if rates.prefill_tokens_s is not None:
        recompute_s = prefix_tokens / rates.prefill_tokens_s
    known = transfer_s is not None and recompute_s is not None
    return Choice(not known or transfer_s <= recompute_s, transfer_s, recompute_s)  # type: ignore[operator]


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
