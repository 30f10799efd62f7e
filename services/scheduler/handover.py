"""Where executions have room: placing those that wait, moving those whose cell leaves rollout.

Invariant: room is reserved in the cell's `executions` before the route is announced, never beyond its capacity, and
only at a cell that serves the published weights (so never older ones than the execution's policy version). Cost:
O(log cells) per placement, whatever the number of executions.
"""

from __future__ import annotations

import heapq

from services.scheduler.state import Cell, State
from shared.actor import Publish
from shared.events import ExecutionMoved, ExecutionPlaced


class NoRoom(RuntimeError):
    """A cell was told to leave although the others cannot hold its executions: a fault of the policy."""


class Room:
    """A lazy heap of cells with room. `spread`: the emptiest first; else the highest-numbered: standalone engines,
    which never leave, then the cells that leave last."""

    def __init__(self, state: State, spread: bool) -> None:
        self._cells = state.cells
        self._spread = spread
        self._heap: list[tuple[int, int]] = []
        self._listed: set[int] = set()
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap.clear()
        self._listed.clear()
        for cell in self._cells:
            self.offer(cell)

    def offer(self, cell: Cell) -> None:
        """The cell's room or load changed."""
        load = len(cell.executions)
        if load >= cell.share.capacity:
            return
        if not self._spread:
            if cell.index not in self._listed:
                self._listed.add(cell.index)
                heapq.heappush(self._heap, (0, -cell.index))
        elif len(self._heap) > 4 * len(self._cells) + 64:
            self._rebuild()
        else:
            heapq.heappush(self._heap, (load, -cell.index))

    def best(self) -> Cell | None:
        """The cell to use next; None if there is no room anywhere."""
        while self._heap:
            load, negative = self._heap[0]
            cell = self._cells[-negative]
            now = len(cell.executions)
            if now < cell.share.capacity and (not self._spread or now == load):
                return cell
            heapq.heappop(self._heap)
            self._listed.discard(cell.index)
        return None


def reserve(state: State, room: Room, execution_id: str, cell: Cell) -> None:
    execution = state.executions[execution_id]
    execution.cell = cell.index
    execution.waiting = False
    cell.executions[execution_id] = execution.number
    room.offer(cell)


def release(state: State, room: Room, execution_id: str) -> None:
    """Give the execution's place back, if it has one."""
    execution = state.executions[execution_id]
    if not execution.waiting:
        cell = state.cells[execution.cell]
        del cell.executions[execution_id]
        room.offer(cell)


def place_waiting(state: State, room: Room) -> list[Publish]:
    """Give every waiting execution a place, in dispatch order, while there is room."""
    out: list[Publish] = []
    while state.waiting:
        execution_id = state.waiting[0][1]
        execution = state.executions.get(execution_id)
        if execution is None or not execution.waiting:  # it finished meanwhile
            heapq.heappop(state.waiting)
            continue
        cell = room.best()
        if cell is None:
            break
        heapq.heappop(state.waiting)
        before = execution.cell
        reserve(state, room, execution_id, cell)
        if before < 0:
            out.append(
                Publish(
                    ExecutionPlaced(
                        execution=execution_id,
                        group=execution.group,
                        task=execution.task,
                        cell=cell.index,
                        sampling=execution.sampling,
                        policy_version=execution.policy_version,
                    )
                )
            )
        else:
            reason = f"cell {before} was lost"
            out.append(_moved(execution_id, before, cell.index, reason))
    return out


def move_all(state: State, room: Room, source: Cell, reason: str) -> list[Publish]:
    """Reserve room elsewhere for every execution of `source`, which offers none itself any more.

    The capacity rule makes sure that there is room; raises NoRoom otherwise."""
    out: list[Publish] = []
    for execution_id in list(source.executions):
        cell = room.best()
        if cell is None:
            raise NoRoom(
                f"cell {source.index} cannot leave: no room for {execution_id} (waterlevel {state.waterlevel}, "
                f"capacity of the others {state.capacity}); the policy must check capacity first"
            )
        del source.executions[execution_id]
        reserve(state, room, execution_id, cell)
        out.append(_moved(execution_id, source.index, cell.index, reason))
    return out


def _moved(execution_id: str, source: int, target: int, reason: str) -> Publish:
    return Publish(ExecutionMoved(execution=execution_id, from_cell=source, to_cell=target, reason=reason))
