"""Weights for an engine that has no trainer: `python -m services.cell_agent.receiver ...` (started by launcher.py).

The one process that a standalone engine has beside it. It pulls the core's snapshots over the Transfer Engine and puts
them into the engine, by the same two commands of the same protocol as training workers do (Pull, Refit), so that the
agent need not know the difference. It holds two snapshots and nothing else: no model, no Megatron.

Invariants: every command gets one reply, in order; a snapshot is put into the engine only after its digest was
verified; the process does not outlive its agent. What fails for an outside reason is answered and changes nothing here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from services.cell_agent.trainer import engine_push, protocol
from services.cell_agent.trainer.child import connect, end_with_parent, parser, read_frame, show_life, write_frame
from services.cell_agent.transfer.mooncake import TransferError
from services.cell_agent.transfer.weights import SnapshotError, Snapshots
from shared.config import RunConfig

OUTSIDE = (engine_push.RefitError, TransferError, SnapshotError)


class NotForReceivers(Exception):
    """A command of training: the agent takes this engine for a cell that trains."""


class Receiver:
    def __init__(self, snapshots: Snapshots, on_cpu: bool, kv_stale: str) -> None:
        self._snapshots, self._on_cpu, self._kv_stale = snapshots, on_cpu, kv_stale

    def run(self, agent: socket.socket) -> None:
        """Commands from the agent until Exit, or until it is gone."""
        while (data := read_frame(agent)) is not None:
            command: protocol.Command = msgspec.msgpack.decode(data, type=protocol.Command)
            if isinstance(command, protocol.Exit):
                write_frame(agent, protocol.Done(id=command.id))
                return
            try:
                metrics = self._execute(command)
            except OUTSIDE as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
                write_frame(agent, protocol.Failed(id=command.id, reason=reason, fatal=False))
            else:
                write_frame(agent, protocol.Done(id=command.id, metrics=metrics))

    def _execute(self, command: protocol.Command) -> dict[str, float]:
        match command:
            case protocol.Pull(load=False):
                return self._snapshots.pull(command, command.peers)[1].metrics()
            case protocol.Refit():
                snapshot = self._snapshots.get(command.version)
                return engine_push.refit(command.engine_url, snapshot, self._on_cpu, self._kv_stale)
        raise NotForReceivers(f"{type(command).__name__} was sent to an engine that does not train")


def main() -> None:
    arguments = parser("receives weights for an engine without a trainer").parse_args()
    end_with_parent()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s receiver %(message)s")
    config = msgspec.json.decode(Path(arguments.config).read_bytes(), type=RunConfig)
    torch.set_num_threads(config.cells.threads)
    agent = connect(arguments.socket)
    try:
        snapshots = Snapshots.of_cell(arguments.cell, arguments.host, arguments.transfer)
    except TransferError as error:
        write_frame(agent, protocol.Failed(id=0, reason=f"{type(error).__name__}: {error}"))
        raise
    write_frame(agent, protocol.Hello(id=0, pid=os.getpid(), world_size=1, offers=snapshots.offers_address))
    show_life(agent)
    Receiver(snapshots, arguments.device == "cpu", config.cells.kv_stale).run(agent)
    sys.stdout.flush()
    os._exit(0)  # orderly teardown of Transfer Engine threads has nothing left to protect


if __name__ == "__main__":
    main()
