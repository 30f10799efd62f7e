"""Pulls of a weight snapshot: one against a raw read of the Transfer Engine, and several at once against one.

    python benchmarks/weight_fanout.py [--json] [--size-mb 256] [--cells 4] [--link-mbit 100]

Two parts, each with the real Transfer Engine over TCP and the real transfer code, every cell a process of its own:

- over loopback, where the processor is the limit: seconds of Mooncake's own blocking read of so many bytes, of a plain
  read by our wrapper (which does not spin), and of a pull (chunks read, verified, offered), in turn; `pull_vs_raw` and
  `pull_vs_read` are ratios of the medians;
- over links: every cell in a Linux network namespace of its own, on one bridge, behind a veth whose two directions are
  limited by token buckets (tc tbf). A single pull against all cells pulling at once; `fanout` is the ratio of the
  medians (of the slowest cell). A plain read is measured there as well. On one machine only this shows what links do:
  over loopback N pulls share two processors, whatever they read from whom.

The second part needs root and the programs ip and tc. Namespaces, bridge and veths are gone when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MIB = 1 << 20
LINK_MIB = 64  # sent over the limited links, which are slow
REPEATS = 5
BURST, QUEUE_MS = "64kb", 250
NETWORK = "10.213.77"


class CannotMeasure(RuntimeError):
    """What the machine lacks, or what broke."""


# ----------------------------------------------------------------------------------------------- one cell's process


def cell_process(number: int, host: str, nbytes: int) -> None:
    """Commands on stdin, one JSON line each, one JSON line as answer: publish, raw, read, pull."""
    import msgspec
    import torch
    from mooncake.engine import TransferEngine

    from services.cell_agent.transfer.mooncake import REQUEST_BYTES, TransferSession
    from services.cell_agent.transfer.offers import Offers
    from services.cell_agent.transfer.weights import Snapshots
    from shared.events import WeightsPublished

    torch.set_num_threads(1)
    session = TransferSession(host)
    offers = Offers(host, number, session.address)
    snapshots = Snapshots(session, number, offers)
    plain: Any = None  # buffer of reads that are no pulls
    mooncake: Any = None  # the engine alone, without our wrapper

    def say(**fields: Any) -> None:
        print("CELL " + json.dumps(fields), flush=True)

    say(offers=offers.address)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "publish":
            version = int(command["version"])
            values = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(version))
            snapshot = snapshots.publish(version, {"w": (nbytes,)}, torch.uint8, [("w", values)])
            told = WeightsPublished(
                version=version,
                cell=0,
                incarnation="i",
                session=session.address,
                address=snapshot.buffer.data_ptr(),
                nbytes=nbytes,
                tensors=snapshot.tensors,
                digest=snapshot.digest,
                chunk_bytes=snapshot.chunk_bytes,
                chunks=snapshot.chunks,
            )
            say(weights=msgspec.json.encode(told).decode())
            continue
        weights = msgspec.json.decode(command["weights"], type=WeightsPublished)
        if plain is None and command["do"] != "pull":
            plain, mooncake = torch.zeros(nbytes, dtype=torch.uint8), TransferEngine()
            session.register(plain)
            if mooncake.initialize(host, "P2PHANDSHAKE", "tcp", "") or mooncake.register_memory(
                plain.data_ptr(), nbytes
            ):
                raise CannotMeasure("Mooncake's Transfer Engine does not start")
        if command["do"] == "raw":
            offsets = range(0, nbytes, REQUEST_BYTES)
            sizes = [min(REQUEST_BYTES, nbytes - o) for o in offsets]
            into, source = ([base + o for o in offsets] for base in (plain.data_ptr(), weights.address))
            started = time.perf_counter()
            if mooncake.batch_transfer_sync_read(weights.session, into, source, sizes):
                raise CannotMeasure("Mooncake's blocking read failed")
            say(seconds=time.perf_counter() - started)
        elif command["do"] == "read":
            started = time.perf_counter()
            session.read(weights.session, weights.address, plain, nbytes)
            say(seconds=time.perf_counter() - started)
        else:
            started = time.perf_counter()
            _, report = snapshots.pull(weights, command["peers"])
            say(seconds=time.perf_counter() - started, **report.metrics())


class CellProcess:
    """`inside`: command prefix that puts it into its namespace."""

    def __init__(self, number: int, host: str, nbytes: int, inside: list[str]) -> None:
        command = [*inside, sys.executable, __file__, "--cell-process", str(number), host, str(nbytes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"MC_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("CELL "):
            if not line:
                raise CannotMeasure(f"a cell's process ended with {self._process.wait()}")
        return dict(json.loads(line[5:]))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


# -------------------------------------------------------------------------------------------------------- measuring


class Cells:
    """The core and satellites; each repetition pulls a new version."""

    def __init__(self, count: int, nbytes: int, namespaces: bool) -> None:
        self.all = [
            CellProcess(k, *((f"{NETWORK}.{k + 1}", nbytes, inside(k)) if namespaces else ("127.0.0.1", nbytes, [])))
            for k in range(count + 1)
        ]
        self.offers = [cell.answer()["offers"] for cell in self.all]
        self.version = 0

    def end(self) -> None:
        for cell in self.all:
            cell.end()

    def publish(self) -> str:
        self.version += 1
        self.all[0].ask(do="publish", version=self.version)
        return str(self.all[0].answer()["weights"])

    def plain(self, how: str, weights: str) -> float:
        self.all[1].ask(do=how, weights=weights)
        return float(self.all[1].answer()["seconds"])

    def pull(self, weights: str, count: int) -> list[dict[str, Any]]:
        """By the first `count` satellites at once, each of which knows all others."""
        for k in range(1, count + 1):
            peers = [o for j, o in enumerate(self.offers) if j not in (0, k)]
            self.all[k].ask(do="pull", weights=weights, peers=peers)
        return [self.all[k].answer() for k in range(1, count + 1)]


def over_loopback(size_mb: int, repeats: int) -> dict[str, float]:
    cells = Cells(1, size_mb * MIB, namespaces=False)
    raw, read, pulls = [], [], []
    try:
        for repeat in range(3 + repeats):  # each buffer's first use costs its pages
            weights = cells.publish()
            took = cells.plain("raw", weights), cells.plain("read", weights), cells.pull(weights, 1)[0]["seconds"]
            if repeat >= 3:
                for seconds, kind in zip(took, (raw, read, pulls), strict=True):
                    kind.append(seconds)
    finally:
        cells.end()
    raw_s, read_s, pull_s = map(statistics.median, (raw, read, pulls))
    rate = size_mb * MIB / 1e9
    return {
        "size_mb": size_mb,
        "raw_gb_s": rate / raw_s,
        "read_gb_s": rate / read_s,
        "pull_gb_s": rate / pull_s,
        "pull_vs_raw": raw_s / pull_s,
        "pull_vs_read": read_s / pull_s,
    }


def over_links(count: int, size_mb: int, link_mbit: float, repeats: int) -> dict[str, float]:
    with links(count + 1, link_mbit):
        cells = Cells(count, size_mb * MIB, namespaces=True)
        raw, alone, together, from_core = [], [], [], []
        try:
            cells.pull(cells.publish(), count)  # all have met
            for _ in range(repeats):
                weights = cells.publish()
                raw.append(cells.plain("raw", weights))
                alone.append(cells.pull(weights, 1)[0]["seconds"])
                pulled = cells.pull(cells.publish(), count)
                together.append(max(p["seconds"] for p in pulled))
                from_core.append(sum(p["core_bytes"] for p in pulled) / (size_mb * MIB))
        finally:
            cells.end()
    raw_s, alone_s, together_s = map(statistics.median, (raw, alone, together))
    return {
        "size_mb": size_mb,
        "link_mbit": link_mbit,
        "cells": count,
        "raw_s": raw_s,
        "pull_s_one": alone_s,
        "pull_s_all": together_s,
        "pull_vs_raw": raw_s / alone_s,
        "fanout": together_s / alone_s,
        "copies_sent_by_core": statistics.median(from_core),
    }


# -------------------------------------------------------------------------------------------------------- the links


def inside(number: int) -> list[str]:
    return ["ip", "netns", "exec", f"gyre-bench-{number}"]


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotMeasure(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def links(cells: int, mbit: float) -> Iterator[None]:
    """Namespaces gyre-bench-0.. with addresses NETWORK.1.., joined by a bridge in one more namespace."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise CannotMeasure("limited links need root and the programs ip and tc (Debian: iproute2)")
    hub = f"gyre-bench-{cells}"
    made: list[str] = []
    shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", f"{QUEUE_MS}ms"]
    try:
        for k in range(cells + 1):
            sh("ip", "netns", "add", f"gyre-bench-{k}")
            made.append(f"gyre-bench-{k}")
        sh("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", hub, "link", "set", "bridge", "up")
        for k in range(cells):
            name = f"gyre-bench-{k}"
            sh("ip", "-n", name, "link", "add", "wire", "type", "veth", "peer", "name", f"port{k}", "netns", hub)
            sh("ip", "-n", hub, "link", "set", f"port{k}", "master", "bridge", "up")
            sh("ip", "-n", name, "addr", "add", f"{NETWORK}.{k + 1}/24", "dev", "wire")
            sh("ip", "-n", name, "link", "set", "wire", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("tc", "-n", name, "qdisc", "add", "dev", "wire", *shape)  # what the cell sends
            sh("tc", "-n", hub, "qdisc", "add", "dev", f"port{k}", *shape)  # what it receives
        yield
    finally:
        for name in made:
            sh("ip", "netns", "del", name)


def measure(size_mb: int, cells: int, link_mbit: float, repeats: int = REPEATS) -> dict[str, Any]:
    return {
        "loopback": over_loopback(size_mb, repeats),
        "links": over_links(cells, min(size_mb, LINK_MIB), link_mbit, repeats),
    }


def main() -> None:
    if sys.argv[1:2] == ["--cell-process"]:
        cell_process(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the namespaces go in any case
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-mb", type=int, default=256, help="of a snapshot (limited links: 64 at most)")
    parser.add_argument("--cells", type=int, default=4, help="that pull at once")
    parser.add_argument("--link-mbit", type=float, default=100.0, help="of each cell's link, each way")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    found = measure(args.size_mb, args.cells, args.link_mbit, args.repeats)
    if args.json:
        print(json.dumps(found))
        return
    for part, values in found.items():
        print(part + ": " + ", ".join(f"{k} {v:.3g}" for k, v in values.items()))


if __name__ == "__main__":
    main()
