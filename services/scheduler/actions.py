"""Everything the scheduler does of its own accord, whenever the state allows it: phases, dispatch, role orders,
opening and reducing batches, ending bursts, placing.

Invariant: `advance` is level-triggered. It looks at the state only, never at what just happened, so work put off by a
stop, a lost cell or a refit under way is done as soon as nothing stands against it. When nothing is to be done it
costs O(1).
"""

from __future__ import annotations

from services.scheduler import batches
from services.scheduler.dispatch import TaskOrder, evaluation, execution_seed
from services.scheduler.handover import Room, move_all, place_waiting
from services.scheduler.policy import Policy
from services.scheduler.state import (
    OFFLINE,
    ROLLOUT,
    TRAINING,
    Batch,
    Cell,
    Execution,
    Settings,
    State,
    refresh,
    wait,
)
from shared import events as ev
from shared.actor import Effect, Publish, Wake
from shared.config import EvalSetConfig, RunConfig
from shared.events import Event, Sampling
from shared.ids import execution_id, group_id

SUPPLY = "supply"
OVER = ("failed", "finished")


class Actions:
    """Acts on one State; effects are collected in `out`."""

    def __init__(self, state: State, config: RunConfig, settings: Settings, policy: Policy) -> None:
        self.state = state
        self.settings = settings
        self.policy = policy
        self.room = Room(state, policy.spread)
        self.out: list[Effect] = []
        self._config = config
        self._tasks = TaskOrder(config.seed, state.started.train_tasks)
        self._sampling = Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            max_new_tokens=config.sampling.max_new_tokens,
        )

    def publish(self, event: Event) -> None:
        self.out.append(Publish(event))

    def advance(self, now: float) -> None:
        s = self.state
        if s.phase in OVER:
            return
        self._reduce()
        if s.stopped:
            return
        self._advance_phase()
        if s.phase == "training":
            self._dispatch_groups()
            self._open_batch()
            self._change_membership(now)
        if s.hope == 0 and s.waterlevel > 0 and any(c.gone for c in s.cells):
            self.fail("no cell is left for rollout; see the logs of the cell agents, then resume the run")
        if s.waiting and s.phase != "failed":
            self.out.extend(place_waiting(s, self.room))

    # --------------------------------------------------------------------------------------------------- phases

    def enter(self, phase: str, reason: str = "") -> None:
        self.state.phase = phase
        self.publish(ev.RunPhaseChanged(phase=phase, reason=reason))

    def fail(self, reason: str) -> None:
        s = self.state
        if s.phase not in OVER:
            s.failed_in, s.failure = s.phase, reason
            self.enter("failed", reason)

    def _advance_phase(self) -> None:
        s = self.state
        if s.phase == "starting" and s.ready_cells == len(s.cells):
            self.enter("eval_before")
            self._dispatch_evaluation("before")
        if s.phase == "eval_before" and s.eval_running == 0:
            self.enter("training")
        if s.phase == "training" and s.batch is None and self.policy.burst_is_over(s):
            if s.burst_batches:
                self._end_burst()
            if s.version >= self.settings.steps:
                self.enter("eval_after")
                self._dispatch_evaluation("after")
        if s.phase == "eval_after" and s.eval_running == 0 and not s.eval_unassessed:
            self.enter("finished")

    # ------------------------------------------------------------------------------------------------- dispatch

    def _eval_sets(self, when: str) -> list[EvalSetConfig]:
        tasks = self.state.started.eval_tasks
        return [e for e in self._config.evaluation.sets if when in e.when and e.executions and tasks.get(e.name)]

    def _dispatch_evaluation(self, phase: str) -> None:
        s = self.state
        for config in self._eval_sets(phase):
            sampling = Sampling(
                temperature=config.temperature, top_p=self._sampling.top_p, max_new_tokens=self._sampling.max_new_tokens
            )
            for e in evaluation(self.settings.seed, phase, config, s.started.eval_tasks[config.name]):
                execution = Execution(
                    number=s.dispatched,
                    group=e.group,
                    task=e.task,
                    policy_version=s.published,
                    sampling=sampling,
                    evaluation=True,
                )
                self._dispatch(execution, e.index, e.seed, config.name, phase)

    def _dispatch_groups(self) -> None:
        s, settings = self.state, self.settings
        left = settings.steps * settings.groups_per_batch - s.groups_dispatched
        count = min(self.policy.groups_to_dispatch(s), left)
        s.burst_open = True
        for number in range(s.groups_dispatched, s.groups_dispatched + count):
            group = group_id(number)
            task = self._tasks.task(number)
            for index in range(settings.executions_per_group):
                execution = Execution(
                    number=s.dispatched,
                    group=group,
                    task=task,
                    policy_version=s.published,
                    sampling=self._sampling,
                    evaluation=False,
                )
                self._dispatch(execution, index, execution_seed(settings.seed, f"{group}/{index}"))
        if count > 0:
            s.groups_dispatched += count
            if s.notes is not None:
                s.notes.dispatched(count, s.version - s.published)

    def _dispatch(self, e: Execution, index: int, seed: int, eval_set: str = "", eval_phase: str = "") -> None:
        s = self.state
        name = execution_id(e.group, index)
        s.executions[name] = e
        s.dispatched += 1
        if e.evaluation:
            s.eval_running += 1
            s.eval_unassessed[name] = True
        wait(s, name, e)
        self.publish(
            ev.ExecutionDispatched(
                execution=name,
                group=e.group,
                index=index,
                task=e.task,
                purpose="eval" if e.evaluation else "train",
                eval_set=eval_set,
                eval_phase=eval_phase,
                policy_version=e.policy_version,
                burst=0 if e.evaluation else s.burst,
                sampling=e.sampling,
                seed=seed,
            )
        )

    # ----------------------------------------------------------------------------------------------- cell roles

    def touch(self, cell: Cell) -> None:
        """The cell changed: bring totals and room in line."""
        refresh(self.state, cell)
        self.room.offer(cell)

    def order(self, cell: Cell, role: str, reason: str) -> None:
        """Give the role to the cell now; to one that is lost or coming up, when it is ready (`catch_up`).

        A new incarnation comes up in rollout by itself, so it needs an order to train, and none not to."""
        s = self.state
        cell.desired = role
        cell.joined = None
        if cell.ordered if role == ROLLOUT else cell.share.ready:
            cell.order += 1
            cell.ordered = True
            cell.role = "returning" if role == ROLLOUT else "draining"  # until the cell reports
            s.switches += 1
            if role == ROLLOUT:
                self._reads_newest(cell)
            self.publish(
                ev.CellRoleOrdered(
                    cell=cell.index, order=cell.order, role=role, burst=s.burst, version=s.version, reason=reason
                )
            )
        elif role == ROLLOUT:
            self.refit(cell)
        self.touch(cell)

    def catch_up(self, cell: Cell) -> None:
        """A cell that belongs to training was lost or late, and is ready now."""
        if cell.desired == TRAINING and cell.share.ready and not cell.ordered and not self.state.stopped:
            self.order(cell, TRAINING, "ready for the training that the cell belongs to")

    def refit(self, cell: Cell) -> None:
        """Have a cell load the newest weights while it serves."""
        if cell.engine_ready:
            self._reads_newest(cell)
            self.publish(ev.RefitOrdered(cell=cell.index, version=self.state.version))
            self.touch(cell)

    def _reads_newest(self, cell: Cell) -> None:
        cell.refit_to = self.state.version
        if cell.reading < 0:
            cell.reading = cell.refit_to

    def lose(self, cell: Cell) -> None:
        """Whatever ran in the cell is gone: executions wait for another place, gradients are to be made again."""
        s = self.state
        if not cell.incarnation:
            return
        cell.incarnation = ""
        cell.engine_ready = cell.trainer_ready = False
        cell.engine_version = cell.trainer_version = -1
        cell.role = OFFLINE
        cell.ordered = False
        cell.joined = None
        cell.refit_to = cell.reading = -1
        for name in cell.executions:
            wait(s, name, s.executions[name])
        cell.executions.clear()
        if s.batch is not None:
            batches.lose_cell(s.batch, cell.index)
        self.touch(cell)

    def _change_membership(self, now: float) -> None:
        s = self.state
        if not self.policy.supplied(s):
            s.supply_since = None
        elif s.supply_since is None:
            s.supply_since = now
        wanted = self.policy.training_cells(s, now)
        leaving = s.cells[s.training : min(wanted.cells, self.settings.cells)]
        for cell in leaving:
            cell.desired = TRAINING
            self.touch(cell)  # offers no room any more: of several that leave together none takes another's executions
        s.training += len(leaving)
        for cell in leaving:
            reason = f"waterlevel {s.waterlevel} <= capacity {s.capacity} of the others"
            self.out.extend(move_all(s, self.room, cell, f"cell {cell.index} goes to training"))
            self.order(cell, TRAINING, reason)
        if wanted.ask_at is not None and wanted.ask_at != s.ask_at:
            s.ask_at = wanted.ask_at
            self.out.append(Wake(wanted.ask_at, SUPPLY))

    # -------------------------------------------------------------------------------------------------- batches

    def _open_batch(self) -> None:
        """The next batch once the core is in training, or the open one again if its gradients were lost."""
        s, core = self.state, self.state.cells[0]
        if not core.ordered or core.desired != TRAINING or core.trainer_version != s.version:
            return
        if s.batch is not None:
            if not s.batch.restart:
                return
            batches.next_attempt(s.batch)
        else:
            if not core.in_training or self.policy.burst_is_over(s) or not self._may_fill(s):
                return
            # A snapshot is kept until the version after the next is published: let refits finish that read it.
            if any(version < s.version for version in s.reading):
                return
            s.batch = Batch(number=s.version + 1, base_version=s.version)
        self.publish(
            ev.BatchOpened(
                batch=s.batch.number,
                attempt=s.batch.attempt,
                base_version=s.batch.base_version,
                groups=self.settings.groups_per_batch,
                burst=s.burst,
            )
        )

    def _may_fill(self, s: State) -> bool:
        """Without streaming a batch opens only when it is complete."""
        return self.settings.streaming or len(s.ready) >= self.settings.groups_per_batch

    def _reduce(self) -> None:
        batch = self.state.batch
        if batch is None or not batches.ready_to_reduce(batch, self.state.cells[0]):
            return
        batch.reduce = batches.contributors(batch)
        self.publish(
            ev.BatchReduceOrdered(
                batch=batch.number,
                attempt=batch.attempt,
                cells=batch.reduce,
                executions=max(1, batch.executions),  # a divisor, also where every execution was excluded
            )
        )

    def _end_burst(self) -> None:
        """Rollout gets the new weights: returning cells with their order, the others while they serve."""
        s = self.state
        last = s.version >= self.settings.steps
        self.publish(ev.BurstEnded(burst=s.burst, version=s.version))
        s.published = s.version
        stay = 0 if last else min(self.policy.cells_that_stay(s), s.training)
        was_training, s.training = s.training, stay
        if not last or self._eval_sets("after"):  # else nothing will run on the new weights
            for cell in s.cells[stay:was_training]:
                self.order(cell, ROLLOUT, f"burst {s.burst} ended")
            for cell in s.cells[was_training:]:
                self.refit(cell)
        for cell in s.cells:
            self.touch(cell)
        s.burst += 1
        s.burst_batches = 0
        s.burst_open = False
        s.supply_since = None
