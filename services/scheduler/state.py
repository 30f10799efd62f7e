"""What the scheduler knows of a run: counters, cells, executions, the open batch. Plain data.

Invariants: `dispatched - finished` is the waterlevel and equals `len(executions)`; an execution is either waiting or
in exactly one cell's `executions`; the totals (`capacity`, `reading`, `ready_cells`, `live_capacity`, `hope`, `pool`)
are the sums of the cells' own contributions, kept up to date by `refresh`, so that no event costs a walk over cells or
executions. Everything here is encodable, so a snapshot is one call.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import msgspec

from services.scheduler.notes import Notes
from shared.config import RunConfig
from shared.events import RunStarted, Sampling

ROLLOUT = "rollout"
TRAINING = "training"
OFFLINE = "offline"

IN_TRAINING = frozenset({"joining", "training"})


@dataclass(frozen=True)
class Settings:
    """The few values of the run file that scheduling depends on."""

    seed: int
    cells: int  # that may train
    standalone: int  # engines that never train; they are numbered after the cells
    mode: str
    mu: int
    phi: float
    groups_per_batch: int  # B
    executions_per_group: int  # N
    steps: int
    supply_fraction: float
    supply_hold_s: float
    async_training_cells: int
    streaming: bool

    @classmethod
    def of(cls, config: RunConfig) -> Settings:
        s = config.scheduler
        return cls(
            seed=config.seed,
            cells=config.cells.count,
            standalone=config.cells.standalone,
            mode=s.mode,
            mu=s.mu,
            phi=s.phi,
            groups_per_batch=s.groups_per_batch,
            executions_per_group=s.executions_per_group,
            steps=config.training.steps,
            supply_fraction=s.supply_fraction,
            supply_hold_s=s.supply_hold_s,
            async_training_cells=s.async_training_cells,
            streaming=s.streaming,
        )


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one cell adds to the totals of the state."""

    capacity: int = 0  # room for executions: serving, with the published weights
    reading: int = -1  # version of the snapshot that a refit under way may be reading, -1 = none
    ready: int = 0  # 1 = engine and trainer stand (a standalone engine: it stands)
    live_capacity: int = 0  # capacity of a standing engine, whatever its role
    hope: int = 0  # 1 = meant for rollout, and not lost for good
    pool: int = 0  # `capacity`, of a cell that never trains


NOTHING = Share()


class Cell(msgspec.Struct):
    """One cell as the scheduler sees it. `incarnation` "" = lost, until CellStarted."""

    index: int
    standalone: bool = False  # an engine without a trainer: always in rollout
    incarnation: str = ""
    gone: bool = False  # its agent is not started again
    capacity: int = 0
    engine_ready: bool = False
    engine_version: int = -1
    trainer_ready: bool = False
    trainer_version: int = -1
    role: str = OFFLINE  # as last reported
    desired: str = ROLLOUT  # as the scheduler wants it
    order: int = 0  # last order given
    ordered: bool = False  # an order was given to this incarnation; reports of older orders are of the past
    joined: tuple[int, int] | None = None  # (batch, attempt)
    refit_to: int = -1  # newest weights that it was told to load
    reading: int = -1  # the oldest that it may still be loading, -1 = none
    executions: dict[str, int] = {}  # reserved here -> dispatch number
    share: Share = NOTHING

    @property
    def serving(self) -> bool:
        """Its engine may be given executions: meant to and reported to, or fresh from the start."""
        if self.desired != ROLLOUT or not self.engine_ready:
            return False
        return self.role == ROLLOUT or (self.role == OFFLINE and not self.ordered)

    @property
    def in_training(self) -> bool:
        return self.desired == TRAINING and (self.role in IN_TRAINING or self.joined is not None)


class Execution(msgspec.Struct):
    """A dispatched, unfinished execution."""

    number: int  # dispatch order; policy_version never falls as it rises
    group: str
    task: str
    policy_version: int
    sampling: Sampling
    evaluation: bool
    cell: int = -1  # where room is reserved, or was last; -1 = never placed
    waiting: bool = True
    started: bool = False
    started_at: float = 0.0  # kept with `State.notes` only


class Batch(msgspec.Struct):
    """The open training batch. `trained` holds only work of live incarnations in the current attempt."""

    number: int
    base_version: int
    attempt: int = 1
    assigned: int = 0  # groups
    work: dict[str, tuple[str, ...]] = {}  # micro-step -> its groups
    untrained: dict[str, int] = {}  # group with work left -> its micro-steps known and not trained
    trained: dict[str, int] = {}  # micro-step -> cell
    by_cell: dict[int, dict[str, bool]] = {}
    sealed: bool = False
    groups: int = 0  # as sealed
    executions: int = 0
    listed: tuple[str, ...] = ()  # micro-steps as sealed
    remaining: int = 0  # of `listed`, not trained
    reduce: tuple[int, ...] = ()  # cells of the reduction ordered
    restart: bool = False  # gradients of this attempt are lost


class State(msgspec.Struct):
    """The whole scheduler."""

    started: RunStarted
    cells: list[Cell]
    phase: str = "starting"
    failed_in: str = ""  # the phase that failed
    failure: str = ""  # the reason that the scheduler itself gave
    stopped: bool = False

    dispatched: int = 0  # d(t)
    finished: int = 0  # f(t)
    begun: int = 0  # p(t)
    executions: dict[str, Execution] = {}
    waiting: list[tuple[int, str]] = []  # heap: dispatch number, execution

    groups_dispatched: int = 0
    groups_consumed: int = 0
    ready: dict[str, bool] = {}  # ready groups that no batch has taken
    version: int = 0  # committed batches
    published: int = 0  # version that rollout is given: the one at the last burst's end
    burst: int = 1
    burst_batches: int = 0  # committed in this burst
    burst_open: bool = False  # groups of this burst are dispatched
    batch: Batch | None = None
    training: int = 0  # cells [0, training) are meant for training; never a standalone engine
    supply_since: float | None = None
    ask_at: float | None = None
    switches: int = 0  # role orders given

    eval_running: int = 0
    eval_unassessed: dict[str, bool] = {}

    capacity: int = 0  # C_R(t)
    reading: dict[int, int] = {}  # snapshot version -> cells that may be reading it
    ready_cells: int = 0
    live_capacity: int = 0
    hope: int = 0
    pool: int = 0  # places of standalone engines, out of `capacity`

    notes: Notes | None = None  # of the lookahead policy; None in the other modes

    @property
    def waterlevel(self) -> int:
        return self.dispatched - self.finished

    @property
    def outstanding(self) -> int:
        """Groups dispatched and not yet consumed by a committed batch."""
        return self.groups_dispatched - self.groups_consumed


def new_state(started: RunStarted, settings: Settings) -> State:
    engines = settings.cells + settings.standalone
    state = State(started=started, cells=[Cell(index=k, standalone=k >= settings.cells) for k in range(engines)])
    for cell in state.cells:
        refresh(state, cell)
    return state


def share_of(state: State, cell: Cell) -> Share:
    fresh = cell.engine_version >= state.published
    capacity = cell.capacity if cell.serving and fresh else 0
    return Share(
        capacity=capacity,
        reading=cell.reading,
        ready=int(cell.engine_ready and (cell.trainer_ready or cell.standalone)),
        live_capacity=cell.capacity if cell.engine_ready else 0,
        hope=int(cell.desired == ROLLOUT and not cell.gone),
        pool=capacity if cell.standalone else 0,
    )


def refresh(state: State, cell: Cell) -> None:
    """Bring the totals in line after `cell` (or the published version) changed. O(1)."""
    old, new = cell.share, share_of(state, cell)
    if old == new:
        return
    cell.share = new
    state.capacity += new.capacity - old.capacity
    if new.reading != old.reading:
        _count(state.reading, old.reading, -1)
        _count(state.reading, new.reading, 1)
    state.ready_cells += new.ready - old.ready
    state.live_capacity += new.live_capacity - old.live_capacity
    state.hope += new.hope - old.hope
    state.pool += new.pool - old.pool


def _count(counts: dict[int, int], key: int, change: int) -> None:
    if key < 0:
        return
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]


def wait(state: State, execution_id: str, execution: Execution) -> None:
    """Queue an execution for a place, in dispatch order (one that lost its cell goes before later ones)."""
    execution.waiting = True
    heapq.heappush(state.waiting, (execution.number, execution_id))


def supply(state: State, batches: int, groups_per_batch: int) -> int:
    """Ready groups whose work no cell has trained, of those that the burst's next `batches` batches (the open one
    included) can take."""
    batch = state.batch
    untrained = len(batch.untrained) if batch is not None else 0
    assigned = batch.assigned if batch is not None else 0
    return untrained + min(len(state.ready), max(0, batches * groups_per_batch - assigned))
