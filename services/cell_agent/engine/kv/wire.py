"""What engines and agents tell each other about a hand-over. Plain data, JSON over HTTP."""

from __future__ import annotations

import msgspec

ROUTE = "/gyre/kv"
STALE_ROUTE = "/gyre/kv-stale"  # GET: the policy for KV of older weights, {"policy": "drop" or "keep"}
CONTROL = "gyre.kv."  # prefix of the control requests that carry the commands to the scheduler processes

SECRET_ENV = "GYRE_KV_SECRET"  # shared by all engines and agents of a run; without it the plugin stays off
HOST_ENV = "GYRE_KV_HOST"  # address that peers reach this machine at
PROTOCOL_ENV = "GYRE_KV_PROTOCOL"  # "tcp" or "rdma"
STALE_ENV = "GYRE_KV_STALE"  # "drop" or "keep": see versions.py


class RankPages(msgspec.Struct, frozen=True):
    """Where one tensor-parallel rank keeps its pages.

    session: its Transfer Engine; pulse: where it proves that it is alive; bases: address of slot 0 in each KV buffer;
    strides: bytes per slot in each of them; layout: two ranks with equal layouts have interchangeable pages.
    """

    session: str
    pulse: str
    bases: tuple[int, ...]
    strides: tuple[int, ...]
    layout: str


class Lease(msgspec.Struct, frozen=True):
    """Pages that a source engine holds still for one call.

    tokens: the token ids the pages stand for (a multiple of `page`). runs: (first slot, pages), in token order; no run
    crosses a registered region. oldest, newest: weight versions between which the pages were computed. rest: the part
    of the call's cache namespace that the caller had chosen. left_s: time until the source lets go, when this was told.
    """

    id: str
    tokens: tuple[int, ...]
    page: int
    runs: tuple[tuple[int, int], ...]
    ranks: tuple[RankPages, ...]
    oldest: str
    newest: str
    rest: str
    ttl_s: float
    left_s: float

    @property
    def nbytes(self) -> int:
        return len(self.tokens) * sum(sum(r.strides) for r in self.ranks)


class LeaseState(msgspec.Struct, frozen=True):
    """state: "held" (with lease), "pending" (the call has not stopped yet), "absent" (no page to move)."""

    state: str
    lease: Lease | None = None


class Adopting(msgspec.Struct, frozen=True):
    """have: tokens the receiver had already; pulling: tokens on their way. prefilled, prefill_s: prompt tokens this
    engine has computed since it started, and the seconds that took."""

    have: int
    pulling: int
    prefilled: int = 0
    prefill_s: float = 0.0


class Pulled(msgspec.Struct, frozen=True):
    """state: "running", "done", "failed", "absent"."""

    state: str
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""


class Committed(msgspec.Struct, frozen=True):
    """state: "committed", "running", "absent", "dropped". extra_key: what the moved call must send as `extra_key` to
    find its pages; empty when it needs nothing."""

    state: str
    tokens: int = 0
    extra_key: str = ""
    error: str = ""


class Status(msgspec.Struct, frozen=True):
    """What an engine holds for hand-overs. All lists are empty and both token counts zero at rest."""

    version: str
    stale_policy: str
    ranks: int
    page: int
    bytes_per_token: int
    intents: tuple[str, ...]
    leases: tuple[str, ...]
    lingering: tuple[str, ...]
    adoptions: tuple[str, ...]
    abandoned: tuple[str, ...]
    kept: tuple[str, ...]
    pinned_tokens: int
    in_flight_tokens: int
    exposed_bytes: int
    counts: dict[str, int]

    @property
    def at_rest(self) -> bool:
        lists = (self.intents, self.leases, self.lingering, self.adoptions, self.abandoned, self.kept)
        return not any(lists) and not (self.pinned_tokens or self.in_flight_tokens or self.exposed_bytes)
