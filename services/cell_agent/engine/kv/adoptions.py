"""The receiver's side: pages of a peer's lease on their way into this engine's cache.

States of an adoption: pulling (own slots, nobody else's) -> pulled -> committed: in the prefix cache and locked
("kept") until the moved call holds them itself or time is up. An adoption that is dropped while its transfer still
runs is abandoned: its slots come back when the transfer has ended on every rank. Invariant: slots that a transfer may
still write are in no free list and in no prefix, not even after a flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.cell_agent.engine.kv import pages, versions
from services.cell_agent.engine.kv.cache import Prefix, PrefixCache
from services.cell_agent.engine.kv.errors import KvError, KvMismatch, KvRefused, KvStale
from services.cell_agent.engine.kv.exposure import joined
from services.cell_agent.engine.kv.pages import Pool
from services.cell_agent.engine.kv.pull import Pull
from services.cell_agent.engine.kv.wire import Adopting, Committed, Lease, Pulled, RankPages
from services.cell_agent.transfer.mooncake import TransferSession


@dataclass
class Adoption:
    lease: Lease
    extra_key: str
    held: Prefix  # what this engine had already
    lock: Any  # on it
    slots: torch.Tensor
    pull: Pull
    ttl: float
    until: float


@dataclass
class Kept:
    lock: Any
    tokens: tuple[int, ...]
    extra_key: str
    until: float


class Adoptions:
    def __init__(
        self,
        cache: PrefixCache,
        pool: Pool,
        session: TransferSession,
        secret: str,
        ranks: Sequence[RankPages],
        rank: int,
        policy: str,
        count: Any,
    ) -> None:
        self.cache, self.pool, self.policy = cache, pool, policy
        self._session, self._secret, self._ranks, self._rank, self._count = session, secret, ranks, rank, count
        self.adoptions: dict[str, Adoption] = {}
        self.abandoned: list[Adoption] = []
        self.kept: dict[str, Kept] = {}

    @property
    def in_flight_tokens(self) -> int:
        """Slots that neither the allocator nor the cache nor a call owns."""
        return sum(int(a.slots.numel()) for a in (*self.adoptions.values(), *self.abandoned))

    def adopt(self, lease: Lease, ttl: float, now: float) -> Adopting:
        """Take slots and start pulling into them. Raises KvStale, KvMismatch, KvNoRoom, KvRefused."""
        if lease.id in self.adoptions or lease.id in self.kept:
            raise KvRefused(f"lease {lease.id} is being adopted here already")
        extra_key = self._namespace(lease)
        self._fits(lease)
        held = self.cache.find(lease.tokens, extra_key)
        missing = len(lease.tokens) - held.length
        lock = self.cache.lock(held.node)
        slots = self.cache.slots(held)[:0].to(torch.int64)
        try:
            slots = self.cache.allocate(missing) if missing else slots
            pull = self._pull(lease, held, slots)
        except KvError:
            self.cache.free(slots)
            self.cache.unlock(lock)
            raise
        self.adoptions[lease.id] = Adoption(lease, extra_key, held, lock, slots, pull, ttl, now + ttl)
        return Adopting(have=held.length, pulling=missing)

    def _pull(self, lease: Lease, held: Prefix, slots: torch.Tensor) -> Pull:
        page = self.pool.page
        local = joined(pages.starts(slots, page), page)
        return Pull(
            session=self._session,
            secret=self._secret,
            peer=lease.ranks[self._rank],
            pool=self.pool,
            runs=local,
            matches=pages.matched(lease.runs, local, held.length // page, page),
            events=self.cache.device_events(),
        )

    def _namespace(self, lease: Lease) -> str:
        own = self.cache.version
        return versions.adopted(lease.oldest, lease.newest, own, self.policy, lease.id, lease.rest)

    def _fits(self, lease: Lease) -> None:
        ours = [r.layout for r in self._ranks]
        theirs = [r.layout for r in lease.ranks]
        if ours != theirs or any(r.strides != o.strides for r, o in zip(lease.ranks, self._ranks, strict=True)):
            raise KvMismatch(f"pages of layout {theirs} do not fit into {ours}; recompute")
        if sum(count for _, count in lease.runs) * lease.page != len(lease.tokens):
            raise KvMismatch("the lease's runs do not hold as many tokens as it names")

    def pulled(self, lease: str) -> Pulled:
        adoption = self.adoptions.get(lease)
        if adoption is None:
            return Pulled("absent")
        pull = adoption.pull
        done, fine = self.cache.agree([pull.done.is_set(), pull.done.is_set() and not pull.error])
        if not done:
            return Pulled("running")
        error = "" if fine else pull.error or "the transfer failed on another rank"
        nbytes = pull.nbytes * self.cache.world  # every rank pulls as much
        return Pulled("done" if fine else "failed", nbytes, pull.seconds, error)

    def commit(self, lease: str, now: float) -> Committed:
        """Hand the pages to the prefix cache. To be called only after the source said that they were held."""
        state = self.pulled(lease)
        if state.state in ("absent", "running"):
            return Committed(state.state)
        adoption = self.adoptions[lease]
        try:
            if state.state == "failed":
                raise KvError(state.error)
            if self._namespace(adoption.lease) != adoption.extra_key:
                raise KvStale("this engine's weights changed while the pages were on their way; recompute")
        except KvError as error:
            self.drop(lease)
            return Committed("dropped", error=str(error))
        del self.adoptions[lease]
        tokens = adoption.lease.tokens
        placed = self.cache.insert(tokens, adoption.extra_key, adoption.held, adoption.slots)
        lock = self.cache.lock(placed.node)
        self.cache.unlock(adoption.lock)
        self.kept[lease] = Kept(lock, tokens, adoption.extra_key, now + adoption.ttl)
        self._count("committed")
        private = (versions.parts(adoption.extra_key) or ("", "", ""))[1]
        return Committed("committed", len(tokens), adoption.extra_key if private else "")

    def drop(self, lease: str) -> bool:
        """Give up what is held under that name; True if anything was."""
        kept = self.kept.pop(lease, None)
        if kept is not None:
            self.cache.unlock(kept.lock)
        adoption = self.adoptions.pop(lease, None)
        if adoption is not None:
            self.cache.unlock(adoption.lock)
            self.abandoned.append(adoption)
            self.reap()
        return kept is not None or adoption is not None

    def reap(self) -> None:
        """Free the slots of abandoned adoptions whose transfer ended on every rank."""
        over = self.cache.agree([a.pull.quiet.is_set() for a in self.abandoned])
        for adoption, is_over in zip(list(self.abandoned), over, strict=True):
            if is_over:
                self.abandoned.remove(adoption)
                if adoption.slots.numel():
                    self.cache.free(adoption.slots)

    @property
    def reapable(self) -> bool:
        """Whether a transfer of an abandoned adoption ended on this rank."""
        return any(a.pull.quiet.is_set() for a in self.abandoned)

    def call_checkpointed(self, request: Any) -> None:
        """A call holds its pages itself now: what was kept for it is kept no longer."""
        for lease, kept in list(self.kept.items()):
            size = len(kept.tokens)
            ids = request.full_untruncated_fill_ids
            if request.extra_key == kept.extra_key and len(ids) >= size and tuple(ids[:size]) == kept.tokens:
                self.drop(lease)
                self._count("used")

    def expired(self, now: float) -> list[str]:
        held = {lease: a.until for lease, a in self.adoptions.items()}
        held |= {lease: k.until for lease, k in self.kept.items()}
        return [lease for lease, until in held.items() if until < now]

    def forget(self) -> None:
        """The cache is about to be emptied: locks are void; slots under transfer must be taken back afterwards."""
        self.kept.clear()
        self.abandoned += self.adoptions.values()
        self.adoptions.clear()

    def take_back(self) -> None:
        """The allocator was cleared and thinks that it owns every slot."""
        slots = [a.slots for a in self.abandoned if a.slots.numel()]
        if slots:
            self.cache.take_back(torch.cat(slots))
