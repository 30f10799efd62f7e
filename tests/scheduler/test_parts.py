"""Room, dispatch order and the policies' arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.dispatch import TaskOrder, evaluation
from services.scheduler.handover import Room
from services.scheduler.policy import depth
from services.scheduler.state import Cell, Settings, Share, new_state
from shared.config import EvalSetConfig
from tests.scheduler.world import Plan, run_config, run_started


@given(
    spread=st.booleans(),
    cells=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from("+-c"), st.integers(0, 4), st.integers(0, 3)), max_size=400),
)
def test_room_is_always_what_a_full_search_finds(spread: bool, cells: int, steps: list[tuple[str, int, int]]) -> None:
    plan = Plan(cells=cells)
    state = new_state(run_started(plan, config := run_config(plan)), Settings.of(config))
    room = Room(state, spread)
    for what, index, value in steps:
        cell = state.cells[index % cells]
        if what == "c":
            cell.share = Share(capacity=value)
        elif what == "-" and cell.executions:
            cell.executions.popitem()
        elif what == "+" and (best := room.best()):
            cell = best
            cell.executions[f"e{len(cell.executions)}"] = 0
        room.offer(cell)
        assert room.best() is full_search(state.cells, spread)


def full_search(cells: list[Cell], spread: bool) -> Cell | None:
    free = [c for c in cells if len(c.executions) < c.share.capacity]
    return min(free, key=lambda c: (len(c.executions) if spread else 0, -c.index), default=None)


@given(seed=st.integers(0, 99), tasks=st.integers(1, 20), epoch=st.integers(0, 5))
def test_every_epoch_has_every_task_once(seed: int, tasks: int, epoch: int) -> None:
    names = tuple(f"/t/{i}" for i in range(tasks))
    order = TaskOrder(seed, names)
    got = [order.task(epoch * tasks + i) for i in range(tasks)]
    assert sorted(got) == sorted(names)
    assert got == [TaskOrder(seed, names).task(epoch * tasks + i) for i in range(tasks)]


@given(seed=st.integers(0, 99), executions=st.integers(0, 60), tasks=st.integers(1, 20))
def test_evaluation_tasks_are_repeated_evenly(seed: int, executions: int, tasks: int) -> None:
    config = EvalSetConfig(name="held", tasks="x", executions=executions)
    plan = list(evaluation(seed, "before", config, tuple(f"/t/{i}" for i in range(tasks))))
    assert len(plan) == executions
    assert len({(e.group, e.index) for e in plan}) == executions
    counts = [sum(e.task == f"/t/{i}" for e in plan) for i in range(tasks)]
    assert max(counts) - min(counts) <= 1


def test_depth_rounds_half_a_group_up() -> None:
    def of(mu: int, phi: float, groups: int) -> int:
        return depth(Settings.of(run_config(Plan(mu=mu, phi=phi, groups=groups))))

    assert of(3, 0.5, 32) == 112
    assert of(1, 1.5, 3) == 8
    assert of(4, 0.0, 5) == 20
