"""The trajectory service's core: groups in, micro-steps out.

Owns: the ready queue (order of readiness) and the open batches. Invariants: every ready group is assigned to exactly
one batch, first ready first; a batch gets exactly B groups, then is sealed; every selected path of its groups is in
exactly one of its micro-steps, and all of them are published before BatchSealed lists them. A reopened batch (attempt
+ 1) keeps groups and micro-steps: they are in the stream already, so nothing is published again.

MicroStepReady leaves the core with its payload inline, however large: the core touches no store. The shell moves large
payloads into the blob store before the event is published (service.Externalised).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from services.trajectory import groups as buffer
from services.trajectory.advantages import group_advantages
from services.trajectory.groups import Group, Groups
from services.trajectory.packing import Bin, TrainPath, micro_step, pack, release
from services.trajectory.selection import Selected, select
from shared import ids, microstep
from shared.actor import Effect, Publish, Wake
from shared.codec import pack_floats, pack_ids
from shared.config import RunConfig, from_plain
from shared.events import (
    BatchOpened,
    BatchSealed,
    Event,
    ExecutionAssessed,
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    GroupAssigned,
    GroupReady,
    MicroStepReady,
    ModelCallMarked,
    ModelCallRecorded,
    PathSelected,
    RunStarted,
    TimerFired,
)

SERVICE = "trajectory"
ASSIGN = "assign"
"""Timer key: go on assigning ready groups."""

HOLD_BELOW = 0.5
"""A bin emptier than this waits for the next group's paths ..."""
HOLD_BELOW_QUEUED = 0.9
"""... and one emptier than this, if another ready group follows at once."""
HOLD_MOST = 8
"""So many bins wait at most: what a new group's paths are compared with stays small."""
TOKENS_PER_EVENT = 4_000_000
"""One event assigns groups until their paths pass this; the rest follows on a timer, which bounds memory and delay."""


class NotStarted(RuntimeError):
    """An event that needs the run's configuration came before RunStarted: the stream is not that of a run."""


class BadSnapshot(ValueError):
    """Bytes that are no snapshot of this core (of another version, or damaged): play the stream from its beginning."""


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """What the core takes from the run file."""

    seed: int
    executions_per_group: int
    paths_per_execution: int
    micro_step_tokens: int
    advantage_std: bool

    @classmethod
    def of(cls, config: RunConfig) -> Settings:
        return cls(
            config.seed,
            config.scheduler.executions_per_group,
            config.training.paths_per_execution,
            config.training.micro_step_tokens,
            config.training.advantage_std,
        )


class Batch(msgspec.Struct, array_like=True):
    """A batch between BatchOpened and BatchSealed."""

    batch: int
    base_version: int
    want: int  # B
    groups: list[str] = []
    rewards: list[float] = []  # of every counted execution
    staleness: list[int] = []  # per group
    micro_steps: list[str] = []
    bins: list[Bin] = []  # held back


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    settings: Settings | None
    groups: buffer.SavedGroups
    ready: tuple[str, ...]
    batches: tuple[Batch, ...]
    last_batch: int


@dataclass(eq=False)
class TrajectoryCore:
    settings: Settings | None = None
    groups: Groups = field(default_factory=lambda: Groups(0))
    ready: deque[str] = field(default_factory=deque)
    batches: deque[Batch] = field(default_factory=deque)  # opened, not yet sealed, oldest first
    last_batch: int = 0

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        match event:
            case RunStarted() if self.settings is None:
                self.settings = Settings.of(from_plain(event.config))
                self.groups = Groups(self.settings.executions_per_group)
            case ExecutionDispatched():
                self.groups.dispatched(event)
            case ExecutionStarted():
                self.groups.started(event)
            case ModelCallRecorded():
                self.groups.recorded(event)
            case ModelCallMarked():
                self.groups.marked(event)
            case ExecutionFinished():
                return self._became_ready(self.groups.finished(event), now)
            case ExecutionAssessed():
                return self._became_ready(self.groups.assessed(event), now)
            case BatchOpened():
                return self._opened(event, now)
            case TimerFired(service="trajectory", key="assign"):
                return self._assign(now)
        return ()

    def snapshot(self) -> bytes:
        saved = Snapshot(
            self.settings, buffer.save(self.groups), tuple(self.ready), tuple(self.batches), self.last_batch
        )
        return msgspec.msgpack.encode(saved)

    @classmethod
    def restore(cls, data: bytes) -> TrajectoryCore:
        try:
            saved = msgspec.msgpack.decode(data, type=Snapshot)
        except msgspec.DecodeError as error:
            raise BadSnapshot(f"not a snapshot of the trajectory core: {error}") from error
        return cls(
            saved.settings, buffer.load(saved.groups), deque(saved.ready), deque(saved.batches), saved.last_batch
        )

    # ------------------------------------------------------------------------------------------------- transitions

    def _became_ready(self, group: Group | None, now: float) -> list[Effect]:
        if group is None:
            return []
        self.ready.append(group.group)
        ready = GroupReady(
            group=group.group,
            policy_version=group.policy_version,
            rewards=tuple(e.score for e in group.counted),
            excluded=len(group.of(buffer.EXCLUDED)),
            placeholders=len(group.of(buffer.PLACEHOLDER)),
            tokens_generated=sum(e.generated for e in group.executions),
        )
        return [Publish(ready), *self._assign(now)]

    def _opened(self, event: BatchOpened, now: float) -> list[Effect]:
        if event.batch <= self.last_batch:  # reopened: what it was given stands in the stream
            return []
        self.last_batch = event.batch
        self.batches.append(Batch(event.batch, event.base_version, event.groups))
        return self._assign(now)

    def _assign(self, now: float) -> list[Effect]:
        """Give ready groups to the oldest open batch, first ready first; seal what is full."""
        effects: list[Effect] = []
        work = 0
        while self.batches:
            batch = self.batches[0]
            if len(batch.groups) >= batch.want:
                effects += self._seal(batch)
            elif not self.ready:
                break
            elif work > TOKENS_PER_EVENT:
                effects.append(Wake(now, ASSIGN))
                break
            else:
                paths = self._assign_next(batch, effects)
                work += sum(path.length for path in paths)
        return effects

    def _assign_next(self, batch: Batch, effects: list[Effect]) -> list[TrainPath]:
        if self.settings is None:
            raise NotStarted("no RunStarted before the first group; read the run's stream from its beginning")
        group = self.groups.consume(self.ready.popleft())
        assigned, paths = _prepare(group, batch.batch, self.settings)
        effects.append(Publish(assigned))
        batch.groups.append(group.group)
        batch.rewards += [e.score for e in group.counted]
        batch.staleness.append(batch.base_version - group.policy_version)
        budget = self.settings.micro_step_tokens
        queued = bool(self.ready) and len(batch.groups) < batch.want
        below = HOLD_BELOW_QUEUED if queued else HOLD_BELOW
        full, batch.bins = release(pack(batch.bins, paths, budget), budget, below=below, at_most=HOLD_MOST)
        effects += [_emit(batch, packed) for packed in full]
        return paths

    def _seal(self, batch: Batch) -> list[Effect]:
        effects: list[Effect] = [_emit(batch, packed) for packed in batch.bins]
        self.batches.popleft()
        sealed = BatchSealed(
            batch=batch.batch,
            groups=tuple(batch.groups),
            executions=len(batch.rewards),
            micro_steps=tuple(batch.micro_steps),
            mean_reward=math.fsum(batch.rewards) / len(batch.rewards) if batch.rewards else 0.0,
            mean_staleness=sum(batch.staleness) / len(batch.staleness) if batch.staleness else 0.0,
        )
        return [*effects, Publish(sealed)]


# ------------------------------------------------------------------------------------------------ one group, one bin


def _prepare(group: Group, batch: int, settings: Settings) -> tuple[GroupAssigned, list[TrainPath]]:
    """Advantages and selected paths of a group. Executions with advantage 0 have no gradient, so no paths."""
    advantages = group_advantages(
        {e.execution: e.score for e in group.of(buffer.SCORED)},
        tuple(e.execution for e in group.of(buffer.PLACEHOLDER)),
        std=settings.advantage_std,
    )
    chosen: dict[str, list[Selected]] = {name: [] for name in advantages}
    for execution in group.of(buffer.SCORED):
        name = execution.execution
        if advantages[name]:
            chosen[name] = select(execution.tree, name, seed=settings.seed, j_max=settings.paths_per_execution)
    assigned = GroupAssigned(
        group=group.group,
        batch=batch,
        policy_version=group.policy_version,
        advantages=advantages,
        paths={
            name: tuple(PathSelected(s.leaf, s.call_class, len(s.positions)) for s in some)
            for name, some in chosen.items()
        },
    )
    paths = [path for name, some in chosen.items() for path in _train_paths(group.group, name, advantages[name], some)]
    return assigned, paths


def _train_paths(group: str, execution: str, advantage: float, chosen: Sequence[Selected]) -> list[TrainPath]:
    trained = sum(len(s.positions) for s in chosen)
    return [
        TrainPath(
            group=group,
            execution=execution,
            leaf=s.leaf,
            advantage=advantage,
            weight=1.0 / trained,
            ids=pack_ids(s.ids),
            positions=pack_ids(s.positions),
            logprobs=pack_floats(s.logprobs),
        )
        for s in chosen
    ]


def _emit(batch: Batch, packed: Bin) -> Publish:
    name = ids.micro_step_id(batch.batch, len(batch.micro_steps))
    batch.micro_steps.append(name)
    step = micro_step(packed, name, batch.batch)
    return Publish(
        MicroStepReady(
            micro_step=name,
            batch=batch.batch,
            groups=tuple(sorted({path.group for path in packed.paths})),
            tokens=packed.tokens,
            path_tokens=sum(path.length for path in packed.paths),
            trained_tokens=sum(path.trained for path in packed.paths),
            payload=microstep.encode(step),
            blob=None,
        )
    )
