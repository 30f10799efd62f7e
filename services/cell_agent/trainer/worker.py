"""One rank of a cell's training workers: `python -m services.cell_agent.trainer.worker ...` (see launcher.py).

Reads a command, carries it out on all ranks, replies from the control rank. Invariants: every command gets one reply,
in order, and all Trained replies of a stream precede the reply to the command that ended it; the process does not
outlive the agent that started it.

Failures of Pull, Refit and Export come from outside and change nothing here: they are answered with Failed(fatal=False)
and the worker stays. Any other failure is answered with Failed and the worker exits.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch

from services.cell_agent.trainer import parallel as parallel_module
from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.child import end_with_parent, parser
from services.cell_agent.trainer.parallel import Parallel
from services.cell_agent.trainer.relay import DRAIN, Relay
from shared.config import RunConfig

DRAIN_AFTER_S = 0.2
log = logging.getLogger("trainer")


class Worker:
    """Carries commands out. `trainer` is a CellTrainer (imported late: Megatron needs the CPU shim first)."""

    def __init__(self, trainer: Any, relay: Relay, parallel: Parallel) -> None:
        self.trainer, self.relay, self.parallel = trainer, relay, parallel

    def run(self) -> None:
        while True:
            command = self.relay.next()
            if isinstance(command, protocol.Exit):
                self.relay.reply(protocol.Done(id=command.id)) if command.id else None
                return
            try:
                self._execute(command)
            except Exception as error:  # boundary: whatever it is, the agent must hear of it
                fatal = not self._harmless(command, error)
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
                self.relay.reply(protocol.Failed(id=command.id, reason=reason, fatal=fatal))
                if fatal:
                    raise SystemExit(1) from error

    def _harmless(self, command: protocol.Command, error: Exception) -> bool:
        """Whether the other ranks are still in step: those commands fail on the control rank before ranks meet."""
        from services.cell_agent.trainer.engine_push import RefitError
        from services.cell_agent.transfer.mooncake import TransferError
        from services.cell_agent.transfer.weights import SnapshotError

        outside = isinstance(error, RefitError | TransferError | SnapshotError)
        alone = self.parallel.world == 1 or isinstance(command, protocol.Refit)
        return outside and alone and isinstance(command, protocol.Pull | protocol.Refit)

    def _execute(self, command: protocol.Command) -> None:
        trainer, number = self.trainer, command.id
        metrics: dict[str, float] = {}
        match command:
            case protocol.Train():
                self._stream(command)
                return
            case protocol.Publish():
                self._published(number, trainer.publish(command.version))
                return
            case protocol.Load():
                metrics = trainer.load(command.hf_path, command.checkpoint)
            case protocol.Pull():
                metrics = trainer.pull(command)
            case protocol.BeginBatch():
                trainer.begin_batch(command.version)
            case protocol.Reduce():
                metrics = trainer.reduce(command)
            case protocol.Step():
                metrics = trainer.step(command.executions, command.version)
            case protocol.Save():
                metrics = trainer.save(command.path)
            case protocol.Export():
                trainer.export(command.path, command.hf_path)
            case protocol.Refit():
                metrics = trainer.refit(command.engine_url, command.version)
        self.relay.reply(protocol.Done(id=number, metrics=metrics))

    def _stream(self, first: protocol.Train) -> None:
        """Train commands until another command arrives; that one is executed after the pipeline has drained. Stages
        keep micro-steps in flight until more arrive; when none does for DRAIN_AFTER_S, they are finished without
        waiting."""
        idle_s = DRAIN_AFTER_S if self.parallel.pipeline > 1 else None
        numbers = [first.id]  # of micro-steps in flight, oldest first

        def take() -> bytes | None:
            command = self.relay.next(idle_s)
            if isinstance(command, protocol.Train):
                numbers.append(command.id)
                return command.payload
            if command != DRAIN:
                self.relay.push_back(command)
            return None

        def done(step: Any, seconds: float, metrics: dict[str, float]) -> None:
            self.relay.reply(
                protocol.Trained(
                    id=numbers.pop(0), micro_step=step.micro_step, tokens=step.size, seconds=seconds, metrics=metrics
                )
            )

        self.trainer.train(first.payload, take, done)

    def _published(self, number: int, snapshot: Any) -> None:
        if snapshot is None:
            return
        self.relay.reply(
            protocol.Published(
                id=number,
                version=snapshot.version,
                session=self.trainer.session_address,
                address=snapshot.buffer.data_ptr(),
                nbytes=snapshot.buffer.nbytes,
                tensors=snapshot.tensors,
                digest=snapshot.digest,
                chunk_bytes=snapshot.chunk_bytes,
                chunks=snapshot.chunks,
            )
        )


def main() -> None:
    arguments = parser("one rank of a cell's training workers").parse_args()
    end_with_parent()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {arguments.rank} %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    config = msgspec.json.decode(Path(arguments.config).read_bytes(), type=RunConfig)
    cells = config.cells
    torch.set_num_threads(cells.threads)
    parallel = parallel_module.start(
        rank=arguments.rank,
        world=arguments.world,
        tensor=cells.tensor_parallel,
        pipeline=cells.pipeline_parallel,
        context=cells.context_parallel,
        device=arguments.device,
        port=arguments.master_port,
    )
    relay = Relay(parallel, arguments.socket)
    try:
        worker, store, address, offers = _stand_up(config, parallel, relay, arguments)
    except Exception as error:
        relay.reply(protocol.Failed(id=0, reason=f"{type(error).__name__}: {error}"))
        raise
    relay.reply(protocol.Hello(id=0, pid=os.getpid(), world_size=parallel.world, store=address, offers=offers))
    relay.live()
    worker.run()
    del store
    sys.stdout.flush()
    os._exit(0)  # orderly teardown of gloo and Transfer Engine threads has nothing left to protect


def _stand_up(
    config: RunConfig, parallel: Parallel, relay: Relay, arguments: argparse.Namespace
) -> tuple[Worker, Any, str, str]:
    from services.cell_agent.trainer.cell_trainer import CellTrainer
    from services.cell_agent.trainer.groups import serve_store
    from services.cell_agent.transfer.weights import Snapshots

    store, address, snapshots, offers = None, "", None, ""
    if parallel.is_control:
        snapshots = Snapshots.of_cell(arguments.cell, arguments.host, arguments.transfer)
        offers = snapshots.offers_address
        if arguments.cell == 0:
            store, address = serve_store(arguments.host)
    return Worker(CellTrainer(config, parallel, snapshots), relay, parallel), store, address, offers


if __name__ == "__main__":
    main()
