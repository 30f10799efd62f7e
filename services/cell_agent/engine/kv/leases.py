"""The source's side: pages that are held still for calls that leave.

States of a lease: intent (the call is being stopped) -> held -> gone, by acknowledgement, drop, time-out or flush. The
pin is taken in the scheduler step in which the call stops, before the call gives up its own hold, so no page is free
in between. Invariant: `release` answers True only if the pages were pinned without a break since the lease was
published; a lease that ended in any other way is unknown by then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.cell_agent.engine.kv import pages, versions
from services.cell_agent.engine.kv.cache import Prefix, PrefixCache
from services.cell_agent.engine.kv.errors import KvError, KvRefused
from services.cell_agent.engine.kv.exposure import Exposure
from services.cell_agent.engine.kv.wire import Lease, LeaseState, RankPages
from services.cell_agent.transfer.mooncake import TransferError

log = logging.getLogger("gyre.kv")


@dataclass
class Intent:
    lease: str
    ttl: float
    until: float


@dataclass
class Pin:
    lock: Any
    tokens: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    extra_key: str
    newest: str
    ttl: float
    until: float
    events: list[Any]


class Leases:
    """`ranks`: where every rank's pages are, this one's among them."""

    def __init__(self, cache: PrefixCache, exposure: Exposure, ranks: Sequence[RankPages], count: Any) -> None:
        self.cache, self.exposure, self.ranks = cache, exposure, tuple(ranks)
        self.intents: dict[str, Intent] = {}  # by rid
        self.pins: dict[str, Pin] = {}
        self.lingering: dict[str, Any] = {}  # locks of ended leases whose pages others still lease
        self._count = count

    @property
    def pinned_tokens(self) -> int:
        return sum(len(p.tokens) for p in self.pins.values())

    def cut(self, scheduler: Any, lease: str, rid: str, ttl: float, now: float) -> bool:
        """Stop call `rid` and pin what it has. False if the engine does not know it."""
        from sglang.srt.managers.io_struct import AbortReq

        if lease in self.pins or any(i.lease == lease for i in self.intents.values()):
            raise KvRefused(f"lease {lease} exists; use a new id for every hand-over")
        running, waiting = _live_calls(scheduler)
        longer = [r for r in (*running, *waiting) if r != rid and r.startswith(rid)]
        if longer:
            raise KvRefused(f"stopping {rid} would stop {longer}, too: SGLang matches prefixes; use rids of one length")
        if rid in running:
            self.intents[rid] = Intent(lease, ttl, now + ttl)
        elif rid in waiting:
            request = waiting[rid]
            tokens = [*request.origin_input_ids, *request.output_ids]
            found = self.cache.find(tokens, request.extra_key, request.cache_salt)
            self._try_pin(Intent(lease, ttl, now + ttl), found, tokens, request.extra_key)
        else:
            return False
        scheduler.abort_request(AbortReq(rid=rid))
        return True

    def call_checkpointed(self, request: Any) -> None:
        """SGLang has put the pages of `request` into its cache; if it ended, it gives up its hold right after this."""
        if self.intents and request.finished() and (intent := self.intents.pop(request.rid, None)) is not None:
            found = Prefix(request.last_node, int(request.kv.cache_protected_len))
            self._try_pin(intent, found, request.full_untruncated_fill_ids, request.extra_key)

    def _try_pin(self, intent: Intent, found: Prefix, tokens: Sequence[int], extra_key: str | None) -> None:
        """A pin that fails costs a recomputation, not the engine."""
        length = found.length // self.cache.page * self.cache.page
        if length == 0:
            return
        lock = self.cache.lock(found.node)
        try:
            first_slots = pages.starts(self.cache.slots(Prefix(found.node, length)), self.cache.page)
            runs = self.exposure.expose(intent.lease, first_slots)
        except (KvError, TransferError):
            log.exception("lease %s could not be made readable", intent.lease)
            self._count("pin_failed")
            self.cache.unlock(lock)
            return
        self.pins[intent.lease] = Pin(
            lock=lock,
            tokens=tuple(tokens[:length]),
            runs=tuple(runs),
            extra_key=extra_key or "",
            newest=self.cache.version,
            ttl=intent.ttl,
            until=intent.until,
            events=self.cache.device_events(),
        )
        self._count("leased")

    def describe(self, scheduler: Any, lease: str, now: float) -> LeaseState:
        pin = self.pins.get(lease)
        if pin is None:
            rid = next((r for r, i in self.intents.items() if i.lease == lease), None)
            if rid is None:
                return LeaseState("absent")
            if rid in _live_calls(scheduler)[0]:
                return LeaseState("pending")
            del self.intents[rid]  # it ended without pages
            return LeaseState("absent")
        if pin.events and not self.cache.agree([all(e.query() for e in pin.events)])[0]:
            return LeaseState("pending")
        origin = versions.parts(pin.extra_key)
        return LeaseState(
            "held",
            Lease(
                id=lease,
                tokens=pin.tokens,
                page=self.cache.page,
                runs=pin.runs,
                ranks=self.ranks,
                oldest=origin[0] if origin else "",
                newest=pin.newest,
                rest=origin[2] if origin else pin.extra_key,
                ttl_s=pin.ttl,
                left_s=pin.until - now,
            ),
        )

    def release(self, lease: str) -> bool:
        """Let go. True if the pages were held until now."""
        for rid in [r for r, i in self.intents.items() if i.lease == lease]:
            del self.intents[rid]
        pin = self.pins.pop(lease, None)
        if pin is None:
            return False
        self.lingering[lease] = pin.lock
        for over in self.exposure.hide(lease):
            if over in self.lingering:
                self.cache.unlock(self.lingering.pop(over))
        return True

    def expired(self, now: float) -> list[str]:
        old = [lease for lease, pin in self.pins.items() if pin.until < now]
        return old + [i.lease for i in self.intents.values() if i.until < now]

    def forget(self) -> None:
        """The cache is about to be emptied: nothing is held any more."""
        self.exposure.hide_all()
        self.pins.clear()
        self.lingering.clear()


def _live_calls(scheduler: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(running, waiting) by rid. Running calls put their pages into the cache when they are stopped; a call in the
    middle of a chunked prefill does not, so it counts as waiting: its finished chunks are in the cache."""
    chunked = scheduler.chunked_req
    running = {r.rid: r for r in scheduler.collect_inflight_reqs() if not r.finished() and r is not chunked}
    waiting = {r.rid: r for r in scheduler.waiting_queue}
    if chunked is not None:
        waiting[chunked.rid] = chunked
    return running, waiting
