"""Who reads which chunk from whom: cells with links that carry one chunk a tick each way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from services.cell_agent.transfer.fanout import ORIGIN_READERS, PEER_READERS
from services.cell_agent.transfer.swarm import ORIGIN, Swarm

TICK_S = 0.05
READERS = [True] * ORIGIN_READERS + [False] * PEER_READERS  # which begin with the origin


@dataclass
class SimulatedCell:
    swarm: Swarm
    starts: int = 0
    reading: list[tuple[int, int] | None] = field(default_factory=lambda: [None] * len(READERS))
    done_at: int = -1


class SimulatedLinks:
    """Each tick every source sends one chunk and every cell receives one; reads wait their turn in order of asking."""

    def __init__(self, cells: int, chunks: int, late: int = 0) -> None:
        self.cells = [SimulatedCell(Swarm(k, chunks), starts=k * late) for k in range(1, cells + 1)]
        self.sent: dict[int, int] = dict.fromkeys([ORIGIN, *range(1, cells + 1)], 0)
        self.queue: list[tuple[int, int, int, int, int]] = []  # source, cell's index, reader, chunk, tick
        self.dead: set[int] = set()
        self.tick = 0

    def run(self, limit: int) -> None:
        while any(not c.swarm.complete for c in self.cells if c.swarm.cell not in self.dead):
            assert self.tick < limit, "the pull does not end"
            self.step()

    def step(self) -> None:
        self._announce()
        for index, cell in enumerate(self.cells):
            if cell.swarm.cell in self.dead or self.tick < cell.starts:
                continue
            for reader, origin_first in enumerate(READERS):
                if cell.reading[reader] is None:
                    found = cell.swarm.next(self.tick * TICK_S, origin_first=origin_first)
                    if found is not None:
                        cell.reading[reader] = found
                        self.queue.append((found[0], index, reader, found[1], self.tick))
        self._carry()
        self.tick += 1

    def _carry(self) -> None:
        sending: set[int] = set()
        receiving: set[int] = set()
        for read in list(self.queue):
            source, index, reader, chunk, asked = read
            cell = self.cells[index]
            if source in self.dead:
                self.queue.remove(read)
                cell.swarm.failure(source)
                cell.swarm.again(chunk)
                cell.reading[reader] = None
            elif source not in sending and index not in receiving and cell.swarm.cell not in self.dead:
                sending.add(source)
                receiving.add(index)
                self.queue.remove(read)
                self.sent[source] += 1
                assert not cell.swarm.has[chunk], "read twice"
                cell.swarm.got(source, chunk, (self.tick - asked + 1) * TICK_S)
                cell.reading[reader] = None
                if cell.swarm.complete:
                    cell.done_at = self.tick + 1

    def _announce(self) -> None:
        for cell in self.cells:
            for other in self.cells:
                if other is not cell and other.swarm.cell not in self.dead and self.tick > other.starts:
                    cell.swarm.peer_has(other.swarm.cell, other.swarm.has.copy(), not other.swarm.complete)


@pytest.mark.parametrize("cells", [1, 2, 4, 8])
def test_many_pull_in_little_more_than_the_time_of_one(cells: int) -> None:
    chunks = 256
    world = SimulatedLinks(cells, chunks)
    world.run(3 * chunks)
    assert max(c.done_at for c in world.cells) <= 1.3 * chunks
    assert world.sent[ORIGIN] <= 1.2 * chunks, "the core sends about one snapshot, however many pull"


def test_one_that_comes_late_is_served_by_those_that_hold_it() -> None:
    world = SimulatedLinks(2, 64, late=100)
    world.cells[0].starts = 0
    world.run(500)
    assert world.sent[ORIGIN] == 64
    assert world.cells[1].done_at <= 200 + 64 + 5


def test_when_a_source_dies_the_others_go_on() -> None:
    world = SimulatedLinks(4, 128)
    for _ in range(60):
        world.step()
    world.dead.add(2)
    for cell in world.cells:
        cell.swarm.peer_gone(2)
    world.run(400)
    assert all(c.swarm.complete for c in world.cells if c.swarm.cell != 2)
    assert max(c.done_at for c in world.cells) <= 1.3 * 128


def test_what_an_owner_never_gets_is_read_from_the_origin() -> None:
    """A peer says that it pulls and makes no progress."""
    swarm = Swarm(1, 10)
    swarm.peer_has(2, np.zeros(10, dtype=np.bool_), True)
    got, now = 0, 100.0
    while not swarm.complete:
        found = swarm.next(now, origin_first=True)
        if found is None:
            now += 0.05
            assert now < 110
            continue
        assert found[0] == ORIGIN
        swarm.got(*found, 0.01)
        got += 1
    assert got == 10


def test_a_source_that_failed_is_not_asked_again() -> None:
    swarm = Swarm(1, 4)
    whole = np.ones(4, dtype=np.bool_)
    swarm.peer_has(2, whole, False)
    found = swarm.next(1.0, origin_first=False)
    assert found is not None
    assert found[0] == 2
    swarm.failure(found[0])
    swarm.again(found[1])
    swarm.peer_has(2, whole, False)
    assert swarm.peers == {}
    found = [swarm.next(1.0, origin_first=True) for _ in range(3)]
    assert [f and f[0] for f in found] == [ORIGIN, ORIGIN, None]
