"""One rank's part in hand-overs: the commands, each carried out on all ranks in the same order, and what it holds."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from services.cell_agent.engine.kv import versions
from services.cell_agent.engine.kv.adoptions import Adoptions
from services.cell_agent.engine.kv.cache import PrefixCache
from services.cell_agent.engine.kv.errors import KvRefused, KvUnknown
from services.cell_agent.engine.kv.exposure import Exposure
from services.cell_agent.engine.kv.leases import Leases
from services.cell_agent.engine.kv.pages import Pool
from services.cell_agent.engine.kv.pulse import PulseServer
from services.cell_agent.engine.kv.wire import Lease, RankPages, Status
from services.cell_agent.transfer.mooncake import TransferError, TransferSession

log = logging.getLogger("gyre.kv")

MAX_TTL_S = 600.0


class Handover:
    """`group`: the process group (CPU) of the tensor-parallel ranks, None if there is one rank only."""

    def __init__(
        self, cache: PrefixCache, pool: Pool, session: TransferSession, secret: str, policy: str, rank: int, group: Any
    ) -> None:
        self.cache, self.pool, self.policy = cache, pool, policy
        self.counts: Counter[str] = Counter()
        self.prefilled, self.prefill_s = (
            0,
            0.0,
        )  # tokens of prefill batches; seconds from their launch to their result
        self._session = session
        self._version = cache.version
        self.pulse = PulseServer(session.address.rpartition(":")[0], secret, session.address)
        mine = RankPages(session.address, self.pulse.address, pool.bases, pool.strides, pool.layout)
        ranks: list[Any] = [mine]
        if cache.world > 1:
            ranks = [None] * cache.world
            torch.distributed.all_gather_object(ranks, mine, group=group)
        self.exposure = Exposure(pool.page, self._register, self._unregister)
        self.leases = Leases(cache, self.exposure, ranks, self._count)
        self.adoptions = Adoptions(cache, pool, session, secret, ranks, rank, policy, self._count)
        self._open: dict[int, list[torch.Tensor]] = {}  # registered pieces of a region, by its first slot
        self.commands: dict[str, Callable[..., Any]] = {
            "cut": self._cut,
            "lease": self._lease,
            "acknowledge": self._acknowledge,
            "adopt": self._adopt,
            "pulled": self._pulled,
            "commit": self._commit,
            "drop": self._drop,
            "status": self._status,
        }

    def _count(self, what: str) -> None:
        self.counts[what] += 1

    # -------------------------------------------------------------------------------------------------- commands

    def perform(self, scheduler: Any, command: str, body: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; the answer is plain JSON data. Raises KvError."""
        handler = self.commands.get(command)
        if handler is None:
            raise KvUnknown(f"no command {command}; there are {sorted(self.commands)}")
        answer = handler(scheduler, time.monotonic(), body)
        return answer if isinstance(answer, dict) else msgspec.to_builtins(answer)

    def _cut(self, scheduler: Any, now: float, body: dict[str, Any]) -> dict[str, Any]:
        return {"live": self.leases.cut(scheduler, body["lease"], body["rid"], _ttl(body), now)}

    def _lease(self, scheduler: Any, now: float, body: dict[str, Any]) -> Any:
        return self.leases.describe(scheduler, body["lease"], now)

    def _acknowledge(self, scheduler: Any, now: float, body: dict[str, Any]) -> dict[str, Any]:
        held = self.leases.release(body["lease"])
        self._count("acknowledged" if held else "acknowledged_too_late")
        return {"held": held}

    def _adopt(self, scheduler: Any, now: float, body: dict[str, Any]) -> Any:
        lease = msgspec.convert(body["lease"], Lease)
        begun = self.adoptions.adopt(lease, _ttl(body), now)
        return msgspec.structs.replace(begun, prefilled=self.prefilled, prefill_s=self.prefill_s)

    def _pulled(self, scheduler: Any, now: float, body: dict[str, Any]) -> Any:
        return self.adoptions.pulled(body["lease"])

    def _commit(self, scheduler: Any, now: float, body: dict[str, Any]) -> Any:
        return self.adoptions.commit(body["lease"], now)

    def _drop(self, scheduler: Any, now: float, body: dict[str, Any]) -> dict[str, Any]:
        here = self.leases.release(body["lease"])
        there = self.adoptions.drop(body["lease"])
        return {"dropped": here or there}

    def _status(self, scheduler: Any, now: float, body: dict[str, Any]) -> Status:
        leases, adoptions = self.leases, self.adoptions
        return Status(
            version=self.cache.version,
            stale_policy=self.policy,
            ranks=self.cache.world,
            page=self.pool.page,
            bytes_per_token=sum(sum(r.strides) for r in leases.ranks),
            intents=tuple(i.lease for i in leases.intents.values()),
            leases=tuple(leases.pins),
            lingering=tuple(leases.lingering),
            adoptions=tuple(adoptions.adoptions),
            abandoned=tuple(a.lease.id for a in adoptions.abandoned),
            kept=tuple(adoptions.kept),
            pinned_tokens=leases.pinned_tokens,
            in_flight_tokens=adoptions.in_flight_tokens,
            exposed_bytes=self.exposure.pages * self.pool.page * sum(self.pool.strides),
            counts=dict(self.counts),
        )

    # ---------------------------------------------------------------------------------------------------- events

    def call_checkpointed(self, request: Any) -> None:
        self.leases.call_checkpointed(request)
        if self.adoptions.kept:
            self.adoptions.call_checkpointed(request)

    def due(self) -> list[tuple[str, dict[str, Any]]]:
        """On the first rank: commands that time asks for, to be carried out by all ranks in step."""
        now = time.monotonic()
        late = [*self.leases.expired(now), *self.adoptions.expired(now)]
        commands = [("expire", {"lease": lease}) for lease in late]
        if self.adoptions.reapable:
            commands.append(("reap", {}))
        return commands

    def internal(self, command: str, body: dict[str, Any]) -> None:
        if command == "expire":
            self._drop(None, 0.0, body)
            self._count("expired")
        else:
            self.adoptions.reap()

    def computed(self, tokens: int, seconds: float) -> None:
        """A batch of prompts (or of their chunks) was computed."""
        self.prefilled += tokens
        self.prefill_s += seconds

    def version_changed(self, scheduler: Any) -> None:
        """New weights. Calls that hold no pages move to the new namespace; prefixes that no call holds go."""
        if self.cache.version == self._version:
            return
        self._version = self.cache.version
        for request in scheduler.waiting_queue:
            if not request.kv.holds_kv:
                request.extra_key = versions.renewed(request.extra_key, self.cache.version)
        holding = [r for r in scheduler.collect_inflight_reqs() if not r.finished()]
        if holding:
            self.counts["calls_on_older_pages"] += len(holding)
        self.cache.drop_unused()

    def cache_resets(self) -> None:
        self._count("flushed")
        self.leases.forget()
        self.adoptions.forget()

    def cache_was_flushed(self) -> None:
        self.adoptions.take_back()
        self.adoptions.reap()

    # ---------------------------------------------------------------------------------------------- registration

    def _register(self, first: int, pages: int) -> None:
        done: list[torch.Tensor] = []
        try:
            for piece in self.pool.slices(first, pages):
                self._session.register(piece)
                done.append(piece)
        except BaseException:
            for piece in done:
                self._session.unregister(piece)
            raise
        self._open[first] = done

    def _unregister(self, first: int, pages: int) -> None:
        for piece in self._open.pop(first):
            try:
                self._session.unregister(piece)
            except TransferError:  # it is not registered, so nobody reads it: no reason to stop serving
                log.exception("closing a region failed")
                self._count("close_failed")


def _ttl(body: dict[str, Any]) -> float:
    ttl = float(body["ttl"])
    if not 0 < ttl <= MAX_TTL_S:
        raise KvRefused(f"a ttl of {ttl} s is not between 0 and {MAX_TTL_S:.0f} s")
    return ttl
