"""What the cell's core asks its shell to do. Types only.

Every command names the incarnation it was meant for; the shell drops those of an incarnation that is over. What came of
a command is told by an event on the stream, never by a return value.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.events import CallCut, WeightsPublished


@dataclass(frozen=True, kw_only=True)
class Command:
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class BringUp(Command):
    """Start engine and trainer; on the core, load `checkpoint` ("" = the model folder) and publish its weights.

    -> CellTrainerReady, on the core also WeightsPublished; of a standalone engine, which has no trainer, neither"""

    version: int
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class Admit(Command):
    """When the engine stands, bring it to `weights` (None: the model folder is current). -> CellEngineReady"""

    weights: WeightsPublished | None


@dataclass(frozen=True, kw_only=True)
class Drain(Command):
    """Clear the engine of live calls: cut them, or wait for them (cells.handover). -> CallCut, many; CellDrained"""

    order: int


@dataclass(frozen=True, kw_only=True)
class CancelDrain(Command):
    """The cell is to serve calls again: cut none any more."""


@dataclass(frozen=True, kw_only=True)
class Adopt(Command):
    """Take in the pages of a call that was cut elsewhere. -> CallAdopted"""

    cut: CallCut


@dataclass(frozen=True, kw_only=True)
class Release(Command):
    """Nobody needs the pages of our lease any more. -> CallReleased"""

    rid: str
    execution: str
    lease: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Join(Command):
    """Zeroed gradients on the snapshot `version` (from `weights`; None on the core). -> CellJoinedBatch"""

    batch: int
    attempt: int
    version: int
    weights: WeightsPublished | None


@dataclass(frozen=True, kw_only=True)
class Claim(Command):
    """Take and train micro-steps of the batch until told otherwise. -> MicroStepTrained, many"""

    batch: int
    attempt: int
    sealed: bool


@dataclass(frozen=True, kw_only=True)
class Seal(Command):
    """No more micro-steps follow: what waits in the pipeline for a successor must be drained."""


@dataclass(frozen=True, kw_only=True)
class Reduce(Command):
    """Stop claiming and sum the gradients of `cells` into the core's; `group` names their incarnations.

    `ours`: the micro-steps that this cell is credited with; its buffer must hold these and nothing else."""

    batch: int
    attempt: int
    group: str
    rank: int
    cells: tuple[int, ...]
    store: str
    ours: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Commit(Reduce):
    """As Reduce, on the core, which then steps, saves and publishes. -> WeightsPublished, BatchCommitted"""

    executions: int
    version: int
    micro_steps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settle(Command):
    """The batch is committed: acknowledge the claimed micro-steps."""

    batch: int
    micro_steps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Abandon(Command):
    """The attempt is void, or the cell leaves it: stop claiming and give back what was claimed."""

    batch: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Refit(Command):
    """Put `weights` into the engine, which may be serving. -> CellRefitted"""

    weights: WeightsPublished


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write the policy as a Hugging Face folder. -> PolicyExported"""

    version: int


@dataclass(frozen=True, kw_only=True)
class Count(Command):
    """Publish the engine's own count of generated tokens. -> EngineCounted"""


@dataclass(frozen=True, kw_only=True)
class LostMember(Command):
    """`cell` died although the reduction of this attempt needs it: give it up, unless it is through already."""

    cell: int
    batch: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Restart(Command):
    """The cell's state can't be trusted any more: fail it, with this reason, and start it again."""

    reason: str
