"""The open batch's accounts: which groups it took, which micro-steps are trained by whom.

Invariant: a micro-step counts as trained exactly while its gradient is in the buffer of a cell incarnation that is
alive, in the batch's current attempt. The reduction is ordered once per attempt, when all listed micro-steps count.
"""

from __future__ import annotations

from services.scheduler.state import Batch, Cell
from shared.events import BatchSealed, GroupAssigned, MicroStepReady, MicroStepTrained


def assign(batch: Batch, event: GroupAssigned) -> None:
    batch.assigned += 1
    if any(event.paths.values()):
        batch.untrained.setdefault(event.group, 0)


def add_work(batch: Batch, event: MicroStepReady) -> None:
    if event.micro_step in batch.work:
        return
    batch.work[event.micro_step] = event.groups
    _add_untrained(batch, event.micro_step)


def seal(batch: Batch, event: BatchSealed) -> None:
    batch.sealed = True
    batch.groups = len(event.groups)
    batch.executions = event.executions
    batch.listed = event.micro_steps
    batch.remaining = sum(m not in batch.trained for m in event.micro_steps)


def train(batch: Batch, event: MicroStepTrained) -> None:
    """Note one trained micro-step; the caller checked that the cell's incarnation is alive."""
    micro_step, cell = event.micro_step, event.cell
    holder = batch.trained.get(micro_step)
    if holder is not None:
        # Two live cells hold the same gradient (a claim was given out twice): only a new attempt takes it out again.
        batch.restart = batch.restart or holder != cell
        return
    batch.trained[micro_step] = cell
    batch.by_cell.setdefault(cell, {})[micro_step] = True
    if batch.sealed:
        batch.remaining -= 1
    for group in batch.work.get(micro_step, ()):
        left = batch.untrained.get(group, 0) - 1
        if left > 0:
            batch.untrained[group] = left
        else:
            batch.untrained.pop(group, None)


def lose_cell(batch: Batch, cell: int) -> None:
    """A cell's buffer is gone: what only it had trained must be trained again. Without the core, or once the
    reduction with that cell is under way, the attempt as a whole is lost."""
    for micro_step in batch.by_cell.pop(cell, {}):
        del batch.trained[micro_step]
        if batch.sealed:
            batch.remaining += 1
        _add_untrained(batch, micro_step)
    if cell == 0 or cell in batch.reduce:
        batch.restart = True


def next_attempt(batch: Batch) -> None:
    """Nothing is trained any more; groups, micro-steps and seal stand."""
    batch.attempt += 1
    for micro_step in batch.trained:
        _add_untrained(batch, micro_step)
    batch.trained = {}
    batch.by_cell = {}
    batch.remaining = len(batch.listed)
    batch.reduce = ()
    batch.restart = False


def ready_to_reduce(batch: Batch, core: Cell) -> bool:
    """All work is done, and the core holds the snapshot (it may have joined after an empty batch was sealed)."""
    return (
        batch.sealed
        and batch.remaining == 0
        and not batch.reduce
        and not batch.restart
        and core.joined == (batch.number, batch.attempt)
    )


def contributors(batch: Batch) -> tuple[int, ...]:
    return (0, *sorted(cell for cell in batch.by_cell if cell != 0))


def _add_untrained(batch: Batch, micro_step: str) -> None:
    for group in batch.work.get(micro_step, ()):
        batch.untrained[group] = batch.untrained.get(group, 0) + 1
