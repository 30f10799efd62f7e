"""Pages between two processes over the real Transfer Engine, without SGLang: what is readable, what a pull proves."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from services.cell_agent.engine.kv import pages, pulse
from services.cell_agent.engine.kv.errors import KvTransferFailed
from services.cell_agent.engine.kv.pull import Pull
from services.cell_agent.engine.kv.routes import authorized
from services.cell_agent.engine.kv.secret import run_secret
from services.cell_agent.engine.kv.wire import RankPages
from services.cell_agent.transfer.mooncake import NotRegistered, PeerUnreachable, Piece, TransferSession

SOURCE = """
import sys, torch
from services.cell_agent.engine.kv import pages
from services.cell_agent.engine.kv.pulse import PulseServer
from services.cell_agent.transfer.mooncake import TransferSession
buffers = [torch.arange(64 * 8, dtype=torch.float32).view(64, 8) + 1000 * b for b in range(3)]
pool = pages.pool(buffers, 4, 0, 1)
session = TransferSession("127.0.0.1")
pulse = PulseServer("127.0.0.1", "secret", session.address)
opened = pool.slices(8, 2) + pool.slices(40, 1)
for piece in opened:
    session.register(piece)
print("SOURCE", session.address, pulse.address, *pool.bases, flush=True)
for line in sys.stdin:
    for piece in opened:
        session.unregister(piece)
    print("CLOSED", flush=True)
"""
RUNS = ((40, 1), (8, 2))


class Source:
    """A process that leases slots 40..43 and 8..15 of three buffers."""

    def __init__(self) -> None:
        environment = os.environ | {"MC_FORCE_TCP": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.session, self.pulse, *bases = self.told("SOURCE")
        strides = (32, 32, 32)
        self.pages = RankPages(self.session, self.pulse, tuple(int(b) for b in bases), strides, "")

    def told(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        while not (words := self.process.stdout.readline().split()) or words[0] != word:
            assert self.process.poll() is None
        return words[1:]

    def close_lease(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        self.told("CLOSED")


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def session() -> TransferSession:
    os.environ["MC_FORCE_TCP"] = "1"
    return TransferSession("127.0.0.1", timeout_s=5)


def pulled(
    session: TransferSession, peer: RankPages, secret: str = "secret", wait_s: float = 30.0
) -> tuple[Pull, list]:
    buffers = [torch.zeros(64, 8) for _ in range(3)]
    pool = pages.pool(buffers, 4, 0, 1)
    local = ((20, 2), (4, 1))
    pull = Pull(session, secret, peer, pool, local, pages.matched(RUNS, local, 0, 4), [])
    assert pull.done.wait(wait_s)
    return pull, buffers


def test_pages_arrive_in_token_order_and_nowhere_else(source: Source, session: TransferSession) -> None:
    pull, buffers = pulled(session, source.pages)
    assert pull.error == ""
    assert pull.nbytes == 3 * 12 * 32
    for b, buffer in enumerate(buffers):
        whole = torch.arange(64 * 8, dtype=torch.float32).view(64, 8) + 1000 * b
        assert torch.equal(buffer[20:24], whole[40:44])
        assert torch.equal(buffer[24:28], whole[8:12])
        assert torch.equal(buffer[4:8], whole[12:16])
        assert int((buffer != 0).any(1).sum()) == 12


def test_only_leased_pages_are_readable_and_only_while_they_are_leased(
    source: Source, session: TransferSession
) -> None:
    into = torch.zeros(128, dtype=torch.uint8)
    session.register(into)
    base = source.pages.bases[0]
    assert session.read_pieces(source.session, [Piece(base + 8 * 32, into, 0, 128)]) == 128
    for slot in (4, 16, 36, 44):  # neighbours of leased pages
        with pytest.raises(PeerUnreachable):
            session.read_pieces(source.session, [Piece(base + slot * 32, into, 0, 128)])
    with pytest.raises(NotRegistered):
        session.read_pieces(source.session, [Piece(base + 8 * 32, into, 64, 128)])
    source.close_lease()
    with pytest.raises(PeerUnreachable):
        session.read_pieces(source.session, [Piece(base + 8 * 32, into, 0, 128)])
    session.unregister(into)
    pull, _ = pulled(session, source.pages)
    assert pull.error
    assert session._registered == {}


def test_a_stopped_source_is_noticed_before_it_can_stall_other_transfers(session: TransferSession) -> None:
    stopped, healthy = Source(), Source()
    try:
        os.kill(stopped.process.pid, signal.SIGSTOP)
        started = time.monotonic()
        pull, _ = pulled(session, stopped.pages)
        assert "sign of life" in pull.error
        assert time.monotonic() - started < 3 * pulse.TIMEOUT_S
        started = time.monotonic()
        assert pulled(session, healthy.pages)[0].error == ""
        assert time.monotonic() - started < 3.0
    finally:
        for one in (stopped, healthy):
            one.process.kill()
            one.process.wait()


def test_a_source_that_is_gone_or_not_ours_is_refused(source: Source, session: TransferSession) -> None:
    assert "not the lease's source" in pulled(session, source.pages, secret="other")[0].error
    with pytest.raises(KvTransferFailed, match="not the lease's source"):
        pulse.check(source.pulse, "secret", "127.0.0.1:1")
    source.process.kill()
    source.process.wait()
    assert "sign of life" in pulled(session, source.pages)[0].error


def test_the_secret_is_made_once_and_is_the_owner_s_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("GYRE_KV_SECRET", raising=False)
    first = run_secret(tmp_path)
    assert len(first) == 64
    assert run_secret(tmp_path) == first
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("GYRE_KV_SECRET", "given")
    assert run_secret(tmp_path) == "given"


def test_a_request_needs_the_secret() -> None:
    assert authorized("Bearer s3cret", "s3cret")
    for header in ("", "Bearer", "s3cret", "Bearer s3cre", "bearer s3cret", "Bearer s3cret "):
        assert not authorized(header, "s3cret")
