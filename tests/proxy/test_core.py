"""The proxy's core: keys, attempts, routes, and that a snapshot or a replay gives the same state."""

import pytest

from services.proxy.core import AbortCalls, Ended, ProxyCore, Unknown
from shared.actor import Do
from shared.codec import pack_floats, pack_ids
from shared.events import (
    CellEngineReady,
    CellFailed,
    CellRoleChanged,
    CellStarted,
    ExecutionAssessed,
    ExecutionFinished,
    ExecutionMoved,
    ExecutionPlaced,
    ExecutionStarted,
    ModelCallRecorded,
    Sampling,
)

NAME = "g000001x00"


def placed(cell=0):
    return ExecutionPlaced(
        execution=NAME, group="g000001", task="t", cell=cell, sampling=Sampling(temperature=0.5), policy_version=0
    )


def started(attempt, key):
    return ExecutionStarted(execution=NAME, attempt=attempt, key_hash=key, harness="scout")


def ready(cell=0, incarnation="i", url="http://e"):
    return CellEngineReady(cell=cell, incarnation=incarnation, url=url, version=4, capacity=8)


def role(name, incarnation="i"):
    return CellRoleChanged(cell=0, incarnation=incarnation, order=1, role=name, previous="", seconds=0.0, version=4)


def recorded(number=1, attempt=1, parent=""):
    return ModelCallRecorded(
        call=f"{NAME}a{attempt}c{number:04d}",
        execution=NAME,
        attempt=attempt,
        cell=0,
        parent=parent,
        keep=-1,
        call_class="main_task",
        input_ids=pack_ids([1, 2]),
        output_ids=pack_ids([3]),
        output_logprobs=pack_floats([-1.0]),
        versions=(),
        finish_reason="stop",
        sampling=Sampling(),
        context="aa",
        request="bb",
        opening="1:x",
    )


def finished(attempt=1):
    return ExecutionFinished(
        execution=NAME,
        group="g000001",
        task="t",
        attempt=attempt,
        ending="completed",
        exit_code=0,
        artifact=None,
        seconds=1.0,
        cpu_seconds=1.0,
    )


def played(*events):
    core = ProxyCore()
    effects = [list(core.handle(e, float(i))) for i, e in enumerate(events)]
    return core, effects


def test_a_key_lives_from_start_to_end():
    core, _ = played(placed(), started(1, "k1"))
    with pytest.raises(Unknown):
        core.identify("k0")
    assert core.identify("k1").sampling.temperature == 0.5
    assert core.handle(finished(), 9.0) == (Do(AbortCalls(NAME, 1, "the execution has finished")),)
    with pytest.raises(Ended):
        core.identify("k1")


def test_a_new_attempt_ends_the_key_and_the_tree_of_the_one_before():
    core, effects = played(placed(), started(1, "k1"), recorded(), started(2, "k2"), recorded(attempt=2), finished(1))
    assert effects[3] == [Do(AbortCalls(NAME, 1, "a new attempt replaced this one"))]
    with pytest.raises(Ended):
        core.identify("k1")
    assert not core.identify("k2").finished
    assert list(core.executions[NAME].contexts.tree.nodes) == [f"{NAME}a2c0001"]
    assert len(core.executions[NAME].records) == 1


def test_routes_follow_moves_roles_and_incarnations():
    core, _ = played(placed(), CellStarted(cell=0, incarnation="i"))
    assert core.route(NAME) is None
    core.handle(ready(), 1.0)
    assert core.route(NAME) == (0, "http://e", 4)
    for name, served in [("training", False), ("returning", False), ("rollout", True), ("draining", True)]:
        core.handle(role(name), 1.0)
        assert (core.route(NAME) is not None) == served
    core.handle(role("training", incarnation="older"), 1.0)
    assert core.route(NAME) is not None
    core.handle(ExecutionMoved(execution=NAME, from_cell=0, to_cell=1, reason=""), 1.0)
    assert core.route(NAME) is None
    core.handle(CellStarted(cell=1, incarnation="j"), 1.0)
    core.handle(ready(1, "j", "http://f"), 1.0)
    assert core.route(NAME) == (1, "http://f", 4)
    core.handle(CellFailed(cell=1, incarnation="j", part="trainer", reason="", log_tail=""), 1.0)
    assert core.route(NAME) is not None
    core.handle(CellFailed(cell=1, incarnation="j", part="engine", reason="", log_tail=""), 1.0)
    assert core.route(NAME) is None


def test_memory_is_freed_at_the_assessment():
    assessed = ExecutionAssessed(
        execution=NAME,
        group="g000001",
        attempt=1,
        artifact="",
        branch="",
        status="scored",
        score=1.0,
        tries=1,
        seconds=1.0,
    )
    core, _ = played(placed(), started(1, "k1"), recorded(), finished(), assessed, recorded(2, parent="gone"))
    assert core.executions == {}
    with pytest.raises(Ended):
        core.identify("k1")


def test_a_record_told_early_and_its_echo_are_one():
    core, _ = played(placed(), started(1, "k1"))
    core.learn(recorded())
    core.handle(recorded(), 1.0)
    assert len(core.executions[NAME].records) == len(core.executions[NAME].contexts.tree.nodes) == 1


def test_a_snapshot_holds_everything():
    first = f"{NAME}a1c0001"
    core, _ = played(placed(), CellStarted(cell=0, incarnation="i"), ready(), started(1, "k1"), recorded())
    core.handle(recorded(2, parent=first), 2.0)
    again = ProxyCore.restore(core.snapshot())
    assert again.snapshot() == core.snapshot()
    assert again.route(NAME) == core.route(NAME)
    contexts = again.identify("k1").contexts
    assert (contexts.opening, contexts.latest_number) == ("1:x", 2)
    assert contexts.tree.ids(f"{NAME}a1c0002").tolist() == [1, 2, 3, 1, 2, 3]
