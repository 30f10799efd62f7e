"""The Transfer Engine behind its wrapper: real engines in two processes over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.cell_agent.transfer import mooncake
from services.cell_agent.transfer.mooncake import (
    NotRegistered,
    PeerUnreachable,
    Piece,
    TransferSession,
    TransferUnavailable,
)

OWNER = """
import sys, torch
from services.cell_agent.transfer.mooncake import TransferSession
session = TransferSession("127.0.0.1")
buffer = torch.arange(int(sys.argv[1]), dtype=torch.int64).to(torch.uint8)
session.register(buffer)
print("OWNER", session.address, buffer.data_ptr(), flush=True)
sys.stdin.read()
"""
SIZE = 9 * (1 << 20) + 123  # three requests, the last one short


class Owner:
    """A process that offers SIZE bytes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        words: list[str] = []
        while words[:1] != ["OWNER"]:
            line = self.process.stdout.readline()
            assert line, "the owner process ended"
            words = line.split()
        self.address, self.pointer = words[1], int(words[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def lasting_owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.kill()


def test_all_bytes_arrive_in_order(lasting_owner: Owner) -> None:
    session = TransferSession("127.0.0.1")
    buffer = torch.zeros(SIZE, dtype=torch.uint8)
    session.register(buffer)
    session.read(lasting_owner.address, lasting_owner.pointer, buffer, SIZE)
    assert torch.equal(buffer, torch.arange(SIZE, dtype=torch.int64).to(torch.uint8))
    session.close()


def test_scattered_pieces_arrive_where_they_belong_and_neighbours_are_read_at_once(
    lasting_owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "REQUESTS_AT_ONCE", 3)
    session = TransferSession("127.0.0.1")
    one, other = torch.zeros(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    session.register(one)
    session.register(other)
    at = lasting_owner.pointer
    pieces = [Piece(at + 100 * k, one, 100 * k, 100) for k in range(10)]  # neighbours
    pieces += [Piece(at + 100 * k, other, 4900 - 100 * k, 100) for k in range(20)]  # in another order
    assert session.read_pieces(lasting_owner.address, pieces) == 3000
    bytes_of_owner = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    assert torch.equal(one[:1000], bytes_of_owner[:1000])
    for piece in pieces[10:]:
        assert torch.equal(other[piece.offset : piece.offset + 100], bytes_of_owner[piece.address - at :][:100])
    assert not one[1000:].any()
    assert not other[:3000].any()
    assert [(p.address - at, p.offset, p.nbytes) for p in mooncake._joined(pieces)[:2]] == [
        (0, 0, 1000),
        (0, 4900, 100),
    ]
    session.close()


def test_reading_into_memory_that_is_not_registered_is_refused(lasting_owner: Owner) -> None:
    session = TransferSession("127.0.0.1")
    buffer = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(NotRegistered):
        session.read(lasting_owner.address, lasting_owner.pointer, buffer, 1000)
    session.register(buffer)
    with pytest.raises(NotRegistered, match="1001"):
        session.read(lasting_owner.address, lasting_owner.pointer, buffer, 1001)
    session.read(lasting_owner.address, lasting_owner.pointer, buffer, 1000)
    session.unregister(buffer)
    with pytest.raises(NotRegistered):
        session.unregister(buffer)
    with pytest.raises(NotRegistered):
        session.register(torch.zeros(4, 4, dtype=torch.uint8).t())


def test_an_owner_that_hangs_or_is_dead_is_given_up(owner: Owner) -> None:
    """Own process: the limit is read from the environment when the engine starts."""
    program = f"""
import torch, time
from services.cell_agent.transfer.mooncake import TransferSession, PeerUnreachable
session = TransferSession("127.0.0.1", timeout_s=5)
buffer = torch.zeros(1000, dtype=torch.uint8)
session.register(buffer)
session.read({owner.address!r}, {owner.pointer}, buffer, 1000)
print("READY", flush=True)
input()
started = time.monotonic()
try:
    session.read({owner.address!r}, {owner.pointer}, buffer, 1000)
except PeerUnreachable as error:
    print("GAVE UP", len(error.late), time.monotonic() - started, flush=True)
    input()
    session.until_quiet(error.late)
    print("QUIET", int(buffer.count_nonzero()), flush=True)
"""
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    assert reader.stdout is not None

    def told(word: str) -> list[str]:
        assert reader.stdout is not None
        while word not in (line := reader.stdout.readline()):
            assert line, "the reader ended"
        return line.partition(word)[2].split()

    told("READY")
    os.kill(owner.process.pid, signal.SIGSTOP)
    reader.stdin.write("\n")
    reader.stdin.flush()
    late, seconds = told("GAVE UP")
    assert int(late) == 1
    assert float(seconds) < 20
    os.kill(owner.process.pid, signal.SIGCONT)  # what it was asked for may arrive only now
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert int(told("QUIET")[0]) in (0, 996)
    reader.wait(20)
    owner.kill()
    session = TransferSession("127.0.0.1")
    buffer = torch.zeros(SIZE, dtype=torch.uint8)
    session.register(buffer)
    with pytest.raises(PeerUnreachable, match=owner.address):
        session.read(owner.address, owner.pointer, buffer, SIZE)


def test_rdma_without_an_adapter_is_refused(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine itself reports success there."""
    if mooncake.INFINIBAND.is_dir() and any(mooncake.INFINIBAND.iterdir()):
        pytest.skip("this machine has an RDMA adapter")
    with pytest.raises(TransferUnavailable, match="use tcp"):
        TransferSession("127.0.0.1", "rdma")


@given(st.integers(1, 1 << 36))
def test_requests_cover_the_size(nbytes: int) -> None:
    sizes = mooncake._requests(nbytes)
    assert sum(sizes) == nbytes
    assert all(size == mooncake.REQUEST_BYTES for size in sizes[:-1])
    assert 0 < sizes[-1] <= mooncake.REQUEST_BYTES
