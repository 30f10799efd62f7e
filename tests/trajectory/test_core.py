from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trajectory.core import TrajectoryCore
from services.trajectory.groups import BadAssessment, GroupFull
from shared import microstep
from shared.actor import Effect, Publish, Wake
from shared.codec import encode, unpack_floats, unpack_ids
from shared.events import (
    BatchOpened,
    BatchSealed,
    Event,
    ExecutionAssessed,
    ExecutionStarted,
    GroupAssigned,
    GroupReady,
    MicroStepReady,
    ModelCallRecorded,
    TimerFired,
)
from shared.tree import Tree, TreeError
from tests.trajectory.worlds import (
    assessed,
    dispatched,
    finished,
    opened,
    random_records,
    random_stream,
    record,
    run_started,
    started,
)

seeds = st.integers(0, 2**32)


def _feed(core: TrajectoryCore, events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for number, event in enumerate(events):
        out += _published(core.handle(event, float(number)))
    return out


def _published(effects: list[Effect]) -> list[Event]:
    assert all(isinstance(effect, Publish) for effect in effects)
    return [effect.event for effect in effects if isinstance(effect, Publish)]


def _of(kind: type, events: list[Event]) -> list:
    return [event for event in events if isinstance(event, kind)]


def _trees(events: list[Event]) -> dict[str, Tree]:
    """The final attempt's tree of each execution, straight from the recorded stream."""
    latest: dict[str, int] = {}
    for event in events:
        if isinstance(event, ExecutionStarted):
            latest[event.execution] = max(latest.get(event.execution, 0), event.attempt)
    trees: dict[str, Tree] = {}
    for event in events:
        if isinstance(event, ModelCallRecorded) and event.attempt == latest[event.execution]:
            trees.setdefault(event.execution, Tree()).add(event)
    return trees


def _scores(events: list[Event]) -> dict[str, ExecutionAssessed]:
    return {e.execution: e for e in events if isinstance(e, ExecutionAssessed)}  # the last one stands


def _world(seed: int) -> list[Event]:
    rng = Random(seed)
    n, per_batch = rng.randint(2, 4), rng.randint(1, 3)
    return random_stream(
        rng,
        groups=rng.randint(1, 7),
        n=n,
        batches=rng.randint(1, 3),
        per_batch=per_batch,
        budget=rng.choice((12, 40, 400)),
        j_max=rng.randint(1, 5),
        seed=rng.randint(0, 9),
        std=rng.randint(0, 1),
    )


@settings(deadline=None, max_examples=60)
@given(seeds)
def test_every_selected_token_is_one_entry_of_one_micro_step(seed: int) -> None:
    events = _world(seed)
    out = _feed(TrajectoryCore(), events)
    trees, scores = _trees(events), _scores(events)
    assigned = {name: g for g in _of(GroupAssigned, out) for name in g.advantages}
    selected = {(e, p.leaf): p for g in _of(GroupAssigned, out) for e, some in g.paths.items() for p in some}
    weights: Counter[str] = Counter()
    packed: set[tuple[str, str]] = set()
    tokens_seen: set[tuple[str, str, int]] = set()
    for ready in _of(MicroStepReady, out):
        step = microstep.decode(ready.payload)
        assert (step.micro_step, step.batch) == (ready.micro_step, ready.batch)
        where, which = unpack_ids(step.entry_token), unpack_ids(step.entry_sequence)
        logprobs, prefixes = unpack_floats(step.entry_logprob), _prefixes(step)
        for number, sequence in enumerate(step.sequences):
            key = (sequence.execution, sequence.leaf)
            assert key not in packed, "a path is packed once"
            packed.add(key)
            tree = trees[sequence.execution]
            ids, generated = tree.ids(sequence.leaf), tree.generated(sequence.leaf)
            path = tree.path(sequence.leaf)
            entries = np.flatnonzero(which == number)
            assert len(entries) == selected[key].tokens == sequence.entries
            for e in entries:
                prefix = prefixes[where[e]]
                depth = len(prefix) - 1
                assert np.array_equal(prefix, ids[: depth + 1])
                assert generated.mask[depth], "only what the policy generated"
                assert logprobs[e] == generated.logprobs[depth]
                owner = path[generated.owner[depth]]
                token = (sequence.execution, owner.call, depth - owner.prompt_length)
                assert token not in tokens_seen
                tokens_seen.add(token)
            group = assigned[sequence.execution]
            assert sequence.advantage == group.advantages[sequence.execution] != 0.0
            weights[sequence.execution] += sequence.weight * sequence.entries
            assert scores[sequence.execution].status == "scored"
    sealed = {group for batch in _of(BatchSealed, out) for group in batch.groups}
    assert {key for key in selected if key[0][:7] in sealed} <= packed <= set(selected)
    assert all(abs(weight - 1.0) < 1e-9 for name, weight in weights.items() if name[:7] in sealed)


def _prefixes(step: microstep.MicroStep) -> dict[int, np.ndarray]:
    tokens = unpack_ids(step.tokens)
    prefixes: dict[int, np.ndarray] = {}
    for segment in step.segments:
        above = np.empty(0, np.int32)
        if segment.parent >= 0:
            parent = step.segments[segment.parent]
            above = prefixes[parent.start + parent.length - 1]
        for t in range(segment.start, segment.start + segment.length):
            above = prefixes[t] = np.append(above, tokens[t])
    return prefixes


@settings(deadline=None, max_examples=60)
@given(seeds)
def test_groups_are_consumed_once_first_ready_first(seed: int) -> None:
    events = _world(seed)
    out = _feed(TrajectoryCore(), events)
    wanted = {e.batch: e.groups for e in events if isinstance(e, BatchOpened)}
    scores = _scores(events)
    ready = [g.group for g in _of(GroupReady, out)]
    assigned = _of(GroupAssigned, out)
    assert [g.group for g in assigned] == ready[: len(assigned)]
    assert len(set(ready)) == len(ready)
    assert len(assigned) == min(len(ready), sum(wanted.values()))
    assert [g.batch for g in assigned] == sorted(g.batch for g in assigned)
    for sealed in _of(BatchSealed, out):
        at = out.index(sealed)
        mine = [g for g in assigned if g.batch == sealed.batch]
        assert sealed.groups == tuple(g.group for g in mine)
        assert len(mine) == wanted[sealed.batch]
        steps = [m for m in _of(MicroStepReady, out) if m.batch == sealed.batch]
        assert sealed.micro_steps == tuple(m.micro_step for m in steps)
        assert all(out.index(m) < at for m in steps), "a sealed batch gets nothing more"
        names = [name for g in mine for name in g.advantages]
        assert sealed.executions == len(names)
        rewards = [scores[name].score if scores[name].status == "scored" else 0.0 for name in names]
        assert sealed.mean_reward == pytest.approx(np.mean(rewards) if rewards else 0.0)
        assert sealed.mean_staleness == np.mean([sealed.batch - 1 - g.policy_version for g in mine])
    for group in assigned:
        assert abs(sum(group.advantages.values())) < 1e-6


@settings(deadline=None, max_examples=40)
@given(seeds, st.data())
def test_replay_and_restart_give_the_same_bytes(seed: int, data: st.DataObject) -> None:
    events = _world(seed)
    whole = [encode(e) for e in _feed(TrajectoryCore(), events)]
    assert [encode(e) for e in _feed(TrajectoryCore(), events)] == whole
    cut = data.draw(st.integers(0, len(events)))
    core = TrajectoryCore()
    first = _feed(core, events[:cut])
    saved = core.snapshot()
    restored = TrajectoryCore.restore(saved)
    assert restored.snapshot() == saved
    assert [encode(e) for e in first + _feed(restored, events[cut:])] == whole
    assert restored.snapshot() == _after(events).snapshot()


def _after(events: list[Event]) -> TrajectoryCore:
    core = TrajectoryCore()
    _feed(core, events)
    return core


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_a_stream_delivered_twice_changes_nothing(seed: int) -> None:
    """Late duplicates of all but the assessments: redelivery, a resumed run that dispatches again."""
    events = _world(seed)
    core = TrajectoryCore()
    once = _feed(core, events)
    state = core.snapshot()
    again = _feed(core, [e for e in events if not isinstance(e, ExecutionAssessed)])
    assert core.groups.groups.keys().isdisjoint(core.groups.consumed)
    assert _of(GroupAssigned, again) == []
    assert _of(MicroStepReady, again) == []
    assert len({g.group for g in _of(GroupReady, once + again)}) == len(_of(GroupReady, once + again))
    if len(_of(GroupAssigned, once)) == len(core.groups.consumed) and not core.groups.groups:
        assert core.snapshot() == state


def _life(group: int, index: int, score: float, outputs: tuple[int, ...] = (5, 6)) -> list[Event]:
    first = dispatched(group, index)
    name = first.execution
    call = record(f"{name}a1c0000", execution=name, inputs=(1, 2, 3), outputs=outputs)
    return [first, started(name), call, finished(name), assessed(name, score)]


def test_a_group_flows_into_the_open_batch_as_it_becomes_ready() -> None:
    core = TrajectoryCore()
    _feed(core, [run_started(n=2, budget=10), opened(1, 2)])
    first = _feed(core, [*_life(0, 0, 1.0, (4, 5, 6)), *_life(0, 1, 0.0, (7, 8, 9))])
    assert [type(e) for e in first] == [GroupReady, GroupAssigned, MicroStepReady]
    assert first[2].tokens == 9
    assert first[2].path_tokens == 12
    second = _feed(core, [*_life(1, 0, 1.0), *_life(1, 1, 1.0)])
    assert [type(e) for e in second] == [GroupReady, GroupAssigned, BatchSealed]
    assert second[1].advantages == {"g000001x00": 0.0, "g000001x01": 0.0}
    assert second[1].paths == {"g000001x00": (), "g000001x01": ()}
    assert second[2].executions == 4
    assert second[2].micro_steps == ("b00001m0000",)
    assert core.groups.groups == {}
    assert core.groups.executions == {}


def test_a_half_empty_micro_step_waits_for_the_next_group() -> None:
    core = TrajectoryCore()
    _feed(core, [run_started(n=2, budget=100), opened(1, 2)])
    first = _feed(core, [*_life(0, 0, 1.0), *_life(0, 1, 0.0)])
    assert [type(e) for e in first] == [GroupReady, GroupAssigned]
    second = _feed(core, [*_life(1, 0, 1.0), *_life(1, 1, 0.0)])
    assert [type(e) for e in second] == [GroupReady, GroupAssigned, MicroStepReady, BatchSealed]
    assert second[2].groups == ("g000000", "g000001")
    assert second[2].tokens == 5  # all four executions have the same ids here
    assert second[2].trained_tokens == 8


def test_a_micro_step_is_filled_further_if_the_next_group_is_there_already() -> None:
    lives = [
        event for group in range(2) for index in range(2) for event in _life(group, index, index, (7 + group,) * 6)
    ]
    waiting = TrajectoryCore()
    _feed(waiting, [run_started(n=2, budget=16), *lives])
    assert [e.tokens for e in _of(MicroStepReady, _feed(waiting, [opened(1, 2)]))] == [15]
    streaming = TrajectoryCore()
    out = _feed(streaming, [run_started(n=2, budget=16), opened(1, 2), *lives])
    assert [e.tokens for e in _of(MicroStepReady, out)] == [9, 9]


def test_a_reopened_batch_publishes_nothing_again() -> None:
    core = TrajectoryCore()
    _feed(core, [run_started(n=2), *_life(0, 0, 1.0), *_life(0, 1, 0.0), opened(1, 2)])
    assert _feed(core, [opened(1, 2, attempt=2)]) == []
    sealed = _feed(core, [*_life(1, 0, 1.0), *_life(1, 1, 0.0)])[-1]
    assert sealed.groups == ("g000000", "g000001")
    assert _feed(core, [opened(1, 2, attempt=3)]) == []


def test_evaluation_executions_are_not_kept() -> None:
    core = TrajectoryCore()
    first = dispatched(0, 0, purpose="eval")
    name = first.execution
    _feed(core, [run_started(n=1), first, started(name), record("c", execution=name, outputs=(1,)), finished(name)])
    assert _feed(core, [assessed(name, 1.0)]) == []
    assert core.groups.executions == {}


def test_the_latest_attempt_replaces_what_the_earlier_ones_recorded() -> None:
    core = TrajectoryCore()
    life = _life(0, 0, 1.0)
    name = life[0].execution
    late = record(f"{name}a1c0001", execution=name, inputs=(1,), outputs=(9,))
    new = record(f"{name}a2c0000", execution=name, attempt=2, inputs=(1, 2), outputs=(7, 8))
    _feed(core, [run_started(n=2), opened(1, 1), *life[:4], started(name, 2), late, assessed(name, 1.0, 1), new])
    assert list(core.groups.executions[name].tree.nodes) == [f"{name}a2c0000"]
    out = _feed(core, [finished(name, 2), assessed(name, 0.5, 2), *_life(0, 1, 0.0)])
    assert out[0].rewards == (0.5, 0.0)
    assert out[0].tokens_generated == 4
    assert [p.leaf for p in out[1].paths[name]] == [f"{name}a2c0000"]


def test_what_comes_after_the_assessment_changes_nothing() -> None:
    core = TrajectoryCore()
    life = _life(0, 0, 1.0)
    name = life[0].execution
    _feed(core, [run_started(n=2), *life])
    state = core.snapshot()
    late = record(f"{name}a2c0000", execution=name, attempt=2, outputs=(1,))
    _feed(core, [started(name, 2), late, finished(name, 2), assessed(name, 0.0, 2)])
    assert core.snapshot() == state


def test_excluded_and_placeholder_executions() -> None:
    core = TrajectoryCore()
    events: list[Event] = [run_started(n=4, std=False), opened(1, 1), *_life(0, 0, 1.0), *_life(0, 1, 0.5)]
    gone, never = dispatched(0, 2), dispatched(0, 3)
    events += [*_life(0, 2, 0.0)[:4], assessed(gone.execution, 0.0, 1, "excluded")]
    events += [never, assessed(never.execution, 0.9, 1, "placeholder")]
    ready, assigned, _, sealed = _feed(core, events)
    assert (ready.rewards, ready.excluded, ready.placeholders) == ((1.0, 0.5, 0.0), 1, 1)
    assert ready.tokens_generated == 6
    assert assigned.advantages == {"g000000x00": 0.5, "g000000x01": 0.0, "g000000x03": -0.5}
    assert [name for name, some in assigned.paths.items() if some] == ["g000000x00"]
    assert sealed.executions == 3
    assert sealed.mean_reward == 0.5


def test_a_group_of_excluded_executions_is_consumed_with_no_weight() -> None:
    core = TrajectoryCore()
    events: list[Event] = [run_started(n=1), opened(1, 1), *_life(0, 0, 0.0)[:4]]
    out = _feed(core, [*events, assessed("g000000x00", 0.0, 1, "excluded")])
    assert (out[-1].executions, out[-1].micro_steps, out[-1].groups) == (0, (), ("g000000",))


def test_events_that_fit_nowhere_are_refused_and_harm_nothing() -> None:
    core = TrajectoryCore()
    _feed(core, [run_started(n=2), dispatched(0, 0), started("g000000x00")])
    state = core.snapshot()
    with pytest.raises(TreeError, match="nowhere"):
        core.handle(record("c1", parent="nowhere", outputs=(1,)), 0.0)
    with pytest.raises(TreeError, match="known are"):
        core.handle(record("c1", call_class="poem", outputs=(1,)), 0.0)
    core.handle(dispatched(0, 1), 0.0)
    state = core.snapshot()
    with pytest.raises(GroupFull, match="one more than the 2"):
        core.handle(dispatched(0, 2), 0.0)
    with pytest.raises(BadAssessment, match="placeholder"):
        core.handle(assessed("g000000x00", 1.0, 1, "great"), 0.0)
    assert core.snapshot() == state


def test_much_work_is_spread_over_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trajectory.core.TOKENS_PER_EVENT", 8)
    core = TrajectoryCore()
    events: list[Event] = [run_started(n=2)]
    for group in range(4):
        events += [*_life(group, 0, 1.0), *_life(group, 1, 0.0)]
    _feed(core, events)
    effects = list(core.handle(opened(1, 4), 1.0))
    rounds = 0
    while isinstance(effects[-1], Wake):
        wake = effects.pop()
        assert (wake.at, wake.key) == (1.0, "assign")
        effects += core.handle(TimerFired(service="trajectory", key="assign"), 1.0)
        rounds += 1
    assert rounds == 3
    out = _published(effects)
    assert len(_of(GroupAssigned, out)) == 4
    assert isinstance(out[-1], BatchSealed)


def test_random_records_reach_every_branch_of_the_rules() -> None:
    """The generator of these worlds makes what the properties are about."""
    records = [r for seed in range(50) for r in random_records(Random(seed), "g000000x00", 1, 10)]
    assert {r.call_class for r in records} >= {"main_task", "main_summary", "sub_task", "sub_summary", "auxiliary"}
    assert any(r.discarded for r in records)
    assert any(r.keep >= 0 for r in records)
    assert any(not r.output_ids for r in records)
