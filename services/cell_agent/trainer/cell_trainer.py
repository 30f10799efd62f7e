"""One rank's training state and what each command does to it. All ranks of a cell execute the same commands in order.

Invariants: micro-steps are accepted only between BeginBatch and the first Reduce or Step of the batch; gradients are
finalized inside the cell (tied embeddings, context ranks) exactly once per batch; only the control rank talks to the
Transfer Engine, the engine and the agent.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from services.cell_agent.trainer import checkpoint, engine_push, hf_map, losses, optimizer, protocol
from services.cell_agent.trainer.groups import CellGroups
from services.cell_agent.trainer.losses import LossRule, gspo_loss
from services.cell_agent.trainer.microsteps import Prepared, prepare
from services.cell_agent.trainer.model import DTYPES, build_model, load_local, local_weights
from services.cell_agent.trainer.model_spec import read_spec
from services.cell_agent.trainer.parallel import Parallel
from services.cell_agent.trainer.shards import gather_weights, scatter_bytes
from services.cell_agent.trainer.stream_1f1b import Stream
from services.cell_agent.transfer.weights import Snapshot, Snapshots, manifest, view
from shared.config import RunConfig

REPORT_TAG = 7
SUMS = 7


class OutOfOrder(Exception):
    """A command that does not fit the state: the agent's and the worker's views of the batch differ."""


class CellTrainer:
    """`snapshots` are on the control rank, None on the others."""

    def __init__(self, config: RunConfig, parallel: Parallel, snapshots: Snapshots | None) -> None:
        self.config, self.parallel = config, parallel
        self.spec = read_spec(config.model.path)
        self.dtype = DTYPES[config.model.dtype]
        self.model = build_model(self.spec, parallel, self.dtype)
        self.place = parallel.place(self.spec.layers)
        self.optimizer: Any = None
        self.version = -1  # no weights yet
        training = config.training
        self.rule = LossRule(training.token_weight_cap, training.sequence_clip_low, training.sequence_clip_high)
        self.groups = CellGroups(parallel.rank, parallel.device)
        self.snapshots = snapshots
        self._open = False  # a batch takes micro-steps
        self._finalized = True
        self._sums: dict[int, Tensor] = {}
        self._sent: list[Any] = []

    @property
    def session_address(self) -> str:
        return self.snapshots.session_address if self.snapshots is not None else ""

    # ------------------------------------------------------------------------------------------------- weights

    def load(self, hf_path: str, checkpoint_path: str) -> dict[str, float]:
        """Core: weights and optimizer, from scratch (version 0) or exactly as a checkpoint left them."""
        started = time.perf_counter()
        if not checkpoint_path:
            weights = hf_map.read_folder(self.spec, hf_path)
            load_local(self.model, hf_map.to_local(self.spec, self.place, weights))
            self.optimizer = optimizer.build_optimizer(self.model, self.config.training, self.dtype)
            self.version = 0
        else:
            state, version = checkpoint.load(Path(checkpoint_path), dataclasses.asdict(self.spec), self.parallel)
            load_local(self.model, state["weights"])
            self.optimizer = optimizer.build_optimizer(self.model, self.config.training, self.dtype)
            if version > 0:
                self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.version = version
        self._open, self._finalized = False, True
        return {"version": float(self.version), "load_s": time.perf_counter() - started}

    def publish(self, version: int) -> Snapshot | None:
        """Core: freeze the weights as `version` on the control rank."""
        if version != self.version:
            raise OutOfOrder(f"Publish of version {version}, but the weights are version {self.version}")
        shards = gather_weights(self.spec, self.parallel, local_weights(self.model), self.dtype)
        if self.snapshots is None:
            return None
        tensors = hf_map.assemble(self.spec, shards)
        return self.snapshots.publish(version, hf_map.hf_shapes(self.spec), self.dtype, tensors)

    def pull(self, command: protocol.Pull) -> dict[str, float]:
        """Fetch and verify a snapshot on the control rank; with `load` spread it over the cell's ranks."""
        slots, nbytes = manifest(hf_map.hf_shapes(self.spec), self.dtype)
        if (command.tensors, command.nbytes) != (slots, nbytes):
            raise hf_map.WeightsError(
                f"snapshot {command.version} has another layout than this cell's model; all cells need the same model"
            )
        times: dict[str, float] = {"load_s": 0.0}
        buffer: Tensor | None = None
        if self.snapshots is not None:
            snapshot, report = self.snapshots.pull(command, command.peers)
            buffer = snapshot.buffer
            times |= report.metrics()
        if command.load:
            started = time.perf_counter()
            buffer = scatter_bytes(self.parallel, buffer, nbytes)
            full = {slot.name: view(buffer, slot) for slot in slots}
            load_local(self.model, hf_map.to_local(self.spec, self.place, full))
            self.version = command.version
            self._open, self._finalized = False, True
            times["load_s"] = time.perf_counter() - started
        return times

    def save(self, path: str) -> dict[str, float]:
        if self.optimizer is None:
            raise OutOfOrder(
                "Save on a cell without an optimizer; only the core, after Load, has a checkpoint to write"
            )
        started = time.perf_counter()
        state = {
            "weights": {name: tensor.cpu() for name, tensor in local_weights(self.model).items()},
            "optimizer": self.optimizer.state_dict() if self.version > 0 else {},
            "rng": torch.get_rng_state(),
        }
        checkpoint.save(Path(path), state, self.version, dataclasses.asdict(self.spec), self.parallel)
        return {"save_s": time.perf_counter() - started}

    def export(self, path: str, hf_path: str) -> None:
        """A Hugging Face folder: config and tokenizer files of `hf_path` with the current weights."""
        shards = gather_weights(self.spec, self.parallel, local_weights(self.model), self.dtype)
        if not self.parallel.is_control:
            return
        from safetensors.torch import save_file

        target = Path(path)
        aside = target.with_name(target.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for file in sorted(Path(hf_path).iterdir()):
            if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt")):
                shutil.copy2(file, aside / file.name)
        tensors = {name: tensor.contiguous().clone() for name, tensor in hf_map.assemble(self.spec, shards)}
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)

    def refit(self, engine_url: str, version: int) -> dict[str, float]:
        if self.snapshots is None:
            return {}
        on_cpu, stale = self.parallel.device.type == "cpu", self.config.cells.kv_stale
        return engine_push.refit(engine_url, self.snapshots.get(version), on_cpu, stale)

    # ------------------------------------------------------------------------------------------------- batches

    def begin_batch(self, version: int) -> None:
        if version != self.version:
            raise OutOfOrder(f"BeginBatch on version {version}, but the weights are version {self.version}; Pull first")
        self.model.zero_grad_buffer()
        self._open, self._finalized = True, False

    def train(
        self,
        payload: bytes,
        take: Callable[[], bytes | None],
        done: Callable[[Prepared, float, dict[str, float]], None],
    ) -> int:
        """Stream micro-steps: `payload`, then what `take` yields until None. `done` reports each on the control
        rank."""
        if not self._open:
            raise OutOfOrder("Train outside of a batch; BeginBatch comes first, and Reduce or Step end it")

        def following() -> Prepared | None:
            data = take()
            return None if data is None else self._prepare(data)

        def finished(step: Prepared, seconds: float) -> None:
            sums = self._collect(step)
            if sums is not None:
                done(step, seconds, losses.metrics(sums))

        stream = Stream(self.model, self.model.config, self._forward, following, finished)
        count = stream.run(self._prepare(payload))
        for work in self._sent:
            work.wait()
        self._sent.clear()
        return count

    def _prepare(self, payload: bytes) -> Prepared:
        p = self.parallel
        return prepare(payload, self.spec.vocab, p.context, p.context_rank, p.device)

    def _forward(self, step: Prepared, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        output = model(step.tokens, step.positions, step.mask, step.rows)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logp = -vocab_parallel_cross_entropy(logits.contiguous(), step.targets[:, None])[:, 0]
            across = self._add_over_context if self.parallel.context > 1 else None
            value, sums = gspo_loss(logp[step.entry_row], step.behaviour, step.sequences, self.rule, across)
            if self.parallel.context > 1:
                if self.parallel.context_rank > 0:
                    sums[-2:] = 0  # per-sequence counts are the same on all context ranks
                sums = self._add_over_context(sums)
            self._sums[id(step)] = sums.detach().to("cpu", torch.float64)
            return value, torch.tensor(0, dtype=torch.int, device=value.device), {}

        return output, loss

    def _add_over_context(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    def _collect(self, step: Prepared) -> Tensor | None:
        """Bring the sums of a micro-step from the last stage to the control rank."""
        p = self.parallel
        source = (p.pipeline - 1) * p.tensor * p.context
        sums = self._sums.pop(id(step), None)
        if source == 0:
            return sums if p.is_control else None
        if p.rank == source:
            self._sent.append(dist.isend(sums, 0, p.control, REPORT_TAG))
        if p.is_control:
            sums = torch.empty(SUMS, dtype=torch.float64)
            dist.recv(sums, source, p.control, REPORT_TAG)
            return sums
        return None

    def reduce(self, command: protocol.Reduce) -> dict[str, float]:
        """Add this cell's gradients to the core's."""
        started = time.perf_counter()
        self._finalize()
        buffers = optimizer.gradient_buffers(self.model)
        self.groups.reduce(command.group, command.rank, command.size, command.store, buffers)
        return {"reduce_s": time.perf_counter() - started}

    def step(self, executions: int, version: int) -> dict[str, float]:
        if self.optimizer is None or version != self.version + 1:
            raise OutOfOrder(f"Step to version {version} on a cell at version {self.version} (only the core steps)")
        started = time.perf_counter()
        self._finalize()
        result = optimizer.step(self.model, self.optimizer, self.config.training, executions, version)
        self.version = version
        return result | {"step_s": time.perf_counter() - started}

    def _finalize(self) -> None:
        if not self._finalized:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            finalize_model_grads([self.model], None, pg_collection=groups)
            self._finalized = True
        self._open = False
