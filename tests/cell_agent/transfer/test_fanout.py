"""Cells that pull one snapshot pass on what they have: real Transfer Engines, real offers, sources that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

from services.cell_agent.transfer import fanout
from services.cell_agent.transfer.chunks import Chunks
from services.cell_agent.transfer.fanout import Report
from services.cell_agent.transfer.mooncake import PeerUnreachable, Piece, TransferSession
from services.cell_agent.transfer.offers import Listener, Offer, Offers
from services.cell_agent.transfer.weights import DigestMismatch, Snapshot, Snapshots
from shared.events import WeightsPublished
from tests.cell_agent.transfer.test_weights import told

MIB = 1 << 20
SHAPES: dict[str, tuple[int, ...]] = {"w": (12 * MIB // 4,)}  # twelve chunks


class Cell:
    """A cell's session, offers and snapshots, in this process."""

    def __init__(self, number: int) -> None:
        self.session = TransferSession("127.0.0.1")
        self.offers = Offers("127.0.0.1", number, self.session.address)
        self.snapshots = Snapshots(self.session, number, self.offers)
        self.read_from: list[str] = []

    def publish(self, version: int, seed: int = 0) -> tuple[Snapshot, WeightsPublished]:
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        snapshot = self.snapshots.publish(version, SHAPES, torch.float32, values.items())
        return snapshot, told(snapshot, self.session.address)

    def pull(
        self, source: WeightsPublished, *peers: Cell | str, before: Callable[[str], None] | None = None
    ) -> tuple[Snapshot, Report]:
        def read(peer: str, pieces: Sequence[Piece]) -> int:
            if before is not None:
                before(peer)
            self.read_from.append(peer)
            return self.session.read_pieces(peer, pieces)

        return self.snapshots.pull(source, [p if isinstance(p, str) else p.offers.address for p in peers], read)


@pytest.fixture(scope="module")
def core() -> Cell:
    return Cell(0)


def only_when_offered(core: Cell) -> Callable[[str], None]:
    """Reads of the core wait, so that what peers offer is known first."""

    def before(peer: str) -> None:
        if peer == core.session.address:
            time.sleep(0.3)

    return before


def test_who_comes_later_reads_from_those_that_hold_it(core: Cell) -> None:
    source, weights = core.publish(1)
    first, second = Cell(1), Cell(2)
    _, alone = first.pull(weights, second)
    assert (alone.origin_bytes, alone.peer_bytes, alone.sources) == (source.buffer.nbytes, 0, 1)
    pulled, shared = second.pull(weights, first, before=only_when_offered(core))
    assert torch.equal(pulled.buffer, source.buffer)
    assert shared.peer_bytes >= source.buffer.nbytes - 2 * MIB, "the core sends at most what was asked of it first"
    assert shared.origin_bytes + shared.peer_bytes == source.buffer.nbytes


def test_cells_that_pull_at_once_share_the_core_s_link(core: Cell) -> None:
    source, weights = core.publish(2)
    cells = [Cell(k) for k in range(1, 5)]
    link = threading.Lock()

    def one_at_a_time(peer: str) -> None:
        if peer == core.session.address:  # its link carries a chunk in 50 ms, whoever asks
            with link:
                time.sleep(0.05)

    reports: dict[int, Report] = {}

    def pull(index: int) -> None:
        others = [c for c in cells if c is not cells[index]]
        _, reports[index] = cells[index].pull(weights, *others, before=one_at_a_time)

    threads = [threading.Thread(target=pull, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(c.snapshots.get(2).buffer, source.buffer) for c in cells)
    assert sum(r.origin_bytes for r in reports.values()) < 2.5 * source.buffer.nbytes, "of four copies"
    assert all(r.peer_bytes > 0 for r in reports.values())


def test_a_core_that_does_not_deliver_is_asked_once(core: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "ALONE", 3)
    _, weights = core.publish(5)
    reads: list[float] = []

    def failing(_peer: str, _pieces: Sequence[Piece]) -> int:
        reads.append(time.monotonic())
        time.sleep(0.2)
        raise PeerUnreachable("it does not answer")

    with pytest.raises(PeerUnreachable):
        Cell(1).snapshots.pull(weights, [], failing)
    assert len(reads) == 1


def test_a_read_that_may_still_write_decides_what_is_told(core: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged bytes alone would let the buffer be used again."""
    monkeypatch.setattr(fanout, "ALONE", 3)
    _, weights = core.publish(6)
    second = threading.Event()
    original = fanout.digest_of

    def after_the_second_began(*arguments: Any) -> bytes:
        assert second.wait(10)
        return original(*arguments)

    monkeypatch.setattr(fanout, "digest_of", after_the_second_began)
    reads: list[str] = []

    def damaged_then_late(peer: str, _pieces: Sequence[Piece]) -> int:
        reads.append(peer)
        if len(reads) == 1:
            return 0  # nothing was written
        second.set()
        time.sleep(0.3)
        raise PeerUnreachable("it hangs")

    with pytest.raises(PeerUnreachable):
        Cell(1).snapshots.pull(weights, [], damaged_then_late)
    assert len(reads) == 2


def test_what_is_held_is_not_pulled_again(core: Cell) -> None:
    _, weights = core.publish(3)
    cell = Cell(1)
    cell.pull(weights)
    reads = len(cell.read_from)
    assert cell.pull(weights)[1] == Report()
    assert len(cell.read_from) == reads


def test_a_peer_with_wrong_bytes_is_left_for_the_core(core: Cell) -> None:
    source, weights = core.publish(4)
    liar, cell = Cell(1), Cell(2)
    held, _ = liar.pull(weights)
    held.buffer.add_(1)
    pulled, report = cell.pull(weights, liar, before=only_when_offered(core))
    assert torch.equal(pulled.buffer, source.buffer)
    assert (report.lost_sources, report.peer_bytes) == (1, 0)
    assert liar.session.address in cell.read_from


def test_a_peer_that_holds_another_version_has_nothing_to_offer(core: Cell) -> None:
    """Equal bytes do not make it the same snapshot."""
    _, old = core.publish(5, seed=7)
    peer, cell = Cell(1), Cell(2)
    peer.pull(old)
    _, new = core.publish(6, seed=7)
    _, report = cell.pull(new, peer, before=only_when_offered(core))
    assert report.peer_bytes == 0
    assert peer.session.address not in cell.read_from


def test_a_peer_that_went_on_to_newer_versions_offers_the_old_one_no_more(core: Cell) -> None:
    _, weights = core.publish(7)
    peer = Cell(1)
    peer.pull(weights)
    assert offered(peer, weights).any()
    for version in (8, 9):
        peer.pull(core.publish(version)[1])
    assert not offered(peer, weights).any()


def offered(peer: Cell, weights: WeightsPublished) -> object:
    heard: list[Offer] = []
    there = threading.Event()

    def on_offer(offer: Offer) -> None:
        heard.append(offer)
        there.set()

    listener = Listener(peer.offers.address, weights.digest, on_offer, lambda cell: None)
    assert there.wait(5)
    listener.close()
    return heard[-1].flags(Chunks(weights.nbytes, weights.chunk_bytes).count)


def test_a_digest_that_names_other_chunks_or_another_version_is_refused(core: Cell) -> None:
    _, weights = core.publish(10)
    damaged = weights.chunks[:-1] + bytes([weights.chunks[-1] ^ 1])
    for wrong in ({"chunks": damaged}, {"version": 11}, {"digest": "0" * 64}):
        with pytest.raises(DigestMismatch):
            Cell(1).pull(msgspec.structs.replace(weights, **wrong))


def test_a_peer_that_is_not_there_is_done_without(core: Cell) -> None:
    source, weights = core.publish(12)
    pulled, report = Cell(1).pull(weights, "127.0.0.1:1")
    assert report.origin_bytes == source.buffer.nbytes
    assert torch.equal(pulled.buffer, source.buffer)


PEER = """
import sys, time
import msgspec
from services.cell_agent.transfer.mooncake import TransferSession
from services.cell_agent.transfer.offers import Offers
from services.cell_agent.transfer.weights import Snapshots
from shared.events import WeightsPublished
session = TransferSession("127.0.0.1")
offers = Offers("127.0.0.1", 1, session.address)
snapshots = Snapshots(session, 1, offers)
print("PEER", offers.address, session.address, flush=True)
snapshots.pull(msgspec.json.decode(sys.stdin.readline(), type=WeightsPublished))
print("HOLDS", flush=True)
sys.stdin.read()
"""


@contextmanager
def peer_process(weights: WeightsPublished) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A cell in a process of its own that holds the snapshot: process, offers' address, session."""
    process = subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        words = line_with(process, "PEER")
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(weights).decode() + "\n")
        process.stdin.flush()
        line_with(process, "HOLDS")
        yield process, words[1], words[2]
    finally:
        process.kill()
        process.wait()


def line_with(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        assert line, "the peer ended"
        if line.split()[:1] == [word]:
            return line.split()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops_in_the_middle_is_replaced_by_the_core(core: Cell, signum: signal.Signals) -> None:
    source, weights = core.publish(13)
    cell = Cell(2)
    with peer_process(weights) as (process, offers, session):
        reads: list[str] = []

        def before(peer: str) -> None:
            only_when_offered(core)(peer)
            reads.append(peer)
            if reads.count(session) == 3:  # the first one is through
                os.kill(process.pid, signum)

        started = time.monotonic()
        pulled, report = cell.pull(weights, offers, before=before)
        assert time.monotonic() - started < 60, "four minutes, were it the first contact"
    assert torch.equal(pulled.buffer, source.buffer)
    assert reads.count(session) >= 3
    assert report.origin_bytes > 0
    assert report.origin_bytes + report.peer_bytes == source.buffer.nbytes
