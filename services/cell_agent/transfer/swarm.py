"""Which chunk a cell reads next, and from whom, when several cells pull one snapshot. Pure.

Every link is to be used once: each cell reads its own share of the chunks from the origin (the core), and the rest from
the cells whose share they are, while these still read theirs. So the origin sends about one snapshot however many cells
pull, and nobody waits for a whole copy. Invariants: a chunk is read by one reader of this cell at a time; a source that
failed is not asked again in this pull; a chunk that no peer has, or whose owner does not get it, comes from the origin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

ORIGIN = -1
LEAST_PATIENCE_S = 0.1
GOLDEN = 0.618034  # multiples of it lie far apart modulo 1

Flags = npt.NDArray[np.bool_]


@dataclass
class Peer:
    """`has`: its verified chunks; `reads`: ours from it; `pulling`: it is filling its copy now; `met`: it has delivered
    before. The first contact is made by one reader alone: with a process that was just stopped it takes minutes."""

    has: Flags
    pulling: bool = False
    reads: int = 0
    met: bool = False


@dataclass
class Swarm:
    """`cell`: this one; `count`: of chunks; `origin_reads`: at once, at most."""

    cell: int
    count: int
    origin_reads: int = 2
    peers: dict[int, Peer] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.has: Flags = np.zeros(self.count, dtype=np.bool_)
        self.asked: Flags = np.zeros(self.count, dtype=np.bool_)
        self._at_origin = 0
        self._turn = self.cell  # the peer that was read from last
        self._origin_read_s = 0.0
        self._found_at = -1.0  # time at which there was something to read, or of the first question

    @property
    def complete(self) -> bool:
        return bool(self.has.all())

    # ------------------------------------------------------------------------------------------- what others say

    def peer_has(self, peer: int, has: Flags, pulling: bool) -> None:
        if peer not in self.failed:
            known = self.peers.setdefault(peer, Peer(has))
            known.has, known.pulling = has, pulling

    def peer_gone(self, peer: int) -> None:
        self.peers.pop(peer, None)

    # -------------------------------------------------------------------------------------------------- choosing

    def next(self, now: float, *, origin_first: bool) -> tuple[int, int] | None:
        """(source, chunk) to read now; None: nothing for now. `origin_first`: of a reader that keeps the link of the
        origin busy."""
        order = [self._own_share, self._from_peers] if origin_first else [self._from_peers]
        for choose in (*order, self._rest):
            found: tuple[int, int] | None = choose(now)
            if found is not None:
                source, chunk = found
                self.asked[chunk] = True
                self._count(source, 1)
                self._found_at = now
                return found
        self._found_at = now if self._found_at < 0 else self._found_at
        return None

    def _own_share(self, now: float) -> tuple[int, int] | None:
        """The next chunk that nobody but us is to get from the origin."""
        if self._at_origin >= self.origin_reads:
            return None
        pulling = sorted([self.cell, *(c for c, p in self.peers.items() if p.pulling)])
        place, cells = pulling.index(self.cell), len(pulling)
        mine = ~self.asked & ~self._held_by_peers()
        mine[np.arange(self.count) % cells != place] = False
        return (ORIGIN, self._first(mine)) if mine.any() else None

    def _from_peers(self, now: float) -> tuple[int, int] | None:
        """From the peer of which we read least (in turn, if there are several), what fewest others have."""
        offered = {c: p.has & ~self.asked for c, p in self.peers.items() if p.met or p.reads == 0}
        useful = sorted(c for c, flags in offered.items() if flags.any())
        if not useful:
            return None
        turn = [c for c in useful if c > self._turn] + useful
        source = self._turn = min(turn, key=lambda c: self.peers[c].reads)
        holders = np.sum([p.has for p in self.peers.values()], axis=0)
        rarity = np.where(offered[source], holders, np.iinfo(np.int64).max)
        return source, self._first(rarity == rarity.min())

    def _rest(self, now: float) -> tuple[int, int] | None:
        """What others should have got from the origin, if they take their time."""
        patience = max(LEAST_PATIENCE_S, 2 * self._origin_read_s)
        if self.asked.all() or self._at_origin >= self.origin_reads or not 0 <= self._found_at < now - patience:
            return None
        return ORIGIN, int(np.flatnonzero(~self.asked)[-1])  # last first: owners begin at the front

    def _first(self, flags: Flags) -> int:
        """The first chunk whose flag is set, counted from a place that differs from cell to cell: cells that begin at
        once don't know of each other yet, and are not to read the same ones."""
        start = int(self.cell * GOLDEN * self.count) % self.count
        return int((np.roll(flags, -start).argmax() + start) % self.count)

    def _held_by_peers(self) -> Flags:
        result = np.zeros(self.count, dtype=np.bool_)
        for peer in self.peers.values():
            result |= peer.has
        return result

    # ---------------------------------------------------------------------------------------------------- results

    def got(self, source: int, chunk: int, seconds: float) -> None:
        """The chunk is here, verified."""
        self._count(source, -1)
        self.has[chunk] = True
        if source == ORIGIN:
            self._origin_read_s = seconds
        elif source in self.peers:
            self.peers[source].met = True

    def again(self, chunk: int) -> None:
        """Nobody reads the chunk any more."""
        self.asked[chunk] = False

    def failure(self, peer: int) -> None:
        """It did not deliver, or not the right bytes."""
        self.failed.add(peer)
        self.peer_gone(peer)

    def _count(self, source: int, change: int) -> None:
        if source == ORIGIN:
            self._at_origin += change
        elif source in self.peers:
            self.peers[source].reads += change
