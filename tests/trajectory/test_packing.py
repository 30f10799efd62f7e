from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.trajectory.packing import Bin, TrainPath, common_prefix, micro_step, pack, release
from shared import microstep
from shared.codec import pack_floats, pack_ids, unpack_floats, unpack_ids
from shared.microstep import MicroStep

seeds = st.integers(0, 2**32)


def _path(rng: Random, name: str, stem: list[int], longest: int) -> TrainPath:
    kept = stem[: rng.randint(0, len(stem))]
    ids = kept + [rng.randrange(2) for _ in range(rng.randint(2, longest))]
    positions = [*sorted(rng.sample(range(1, len(ids) - 1), rng.randint(0, len(ids) - 2))), len(ids) - 1]
    logprobs = [-rng.random() for _ in positions]
    return TrainPath(
        group=name[:2],
        execution=name,
        leaf=f"{name}c",
        advantage=rng.uniform(-1, 1),
        weight=1 / len(positions),
        ids=pack_ids(ids),
        positions=pack_ids(positions),
        logprobs=pack_floats(logprobs),
    )


def _paths(rng: Random, group: int, most: int = 12) -> list[TrainPath]:
    stem = [rng.randrange(2) for _ in range(12)]
    return [_path(rng, f"g{group}x{i:02d}", stem, 12) for i in range(rng.randint(0, most))]


def _trie_size(paths: list[TrainPath]) -> int:
    return len({tuple(unpack_ids(p.ids)[: n + 1]) for p in paths for n in range(p.length)})


def _depths_and_prefixes(step: MicroStep) -> list[list[int]]:
    """For each packed token the ids from its root down to it: the layout read from its description alone."""
    tokens = unpack_ids(step.tokens).tolist()
    prefixes: list[list[int] | None] = [None] * len(tokens)
    for i, segment in enumerate(step.segments):
        assert segment.length > 0
        assert segment.parent < i
        above: list[int] = []
        if segment.parent >= 0:
            parent = step.segments[segment.parent]
            last = prefixes[parent.start + parent.length - 1]
            assert last is not None, "a parent comes before its children"
            above = last
        for t in range(segment.start, segment.start + segment.length):
            assert prefixes[t] is None, "segments do not overlap"
            above = [*above, tokens[t]]
            prefixes[t] = above
    assert all(prefix is not None for prefix in prefixes), "segments cover all tokens"
    return [prefix for prefix in prefixes if prefix is not None]


def _check(step: MicroStep, packed: Bin) -> None:
    prefixes = _depths_and_prefixes(step)
    assert len(prefixes) == packed.tokens == _trie_size(packed.paths)
    assert len({tuple(p) for p in prefixes}) == len(prefixes), "equal prefixes are merged"
    where, which = unpack_ids(step.entry_token), unpack_ids(step.entry_sequence)
    logprobs = unpack_floats(step.entry_logprob)
    by_leaf = {path.leaf: path for path in packed.paths}
    assert len(step.sequences) == len(packed.paths) == len(by_leaf)
    for number, sequence in enumerate(step.sequences):
        path = by_leaf[sequence.leaf]
        mine = which == number
        assert sequence.entries == path.trained == mine.sum()
        assert (sequence.execution, sequence.advantage, sequence.weight) == (
            path.execution,
            path.advantage,
            path.weight,
        )
        ids = unpack_ids(path.ids).tolist()
        found = [prefixes[t] for t in where[mine]]
        assert found == [ids[: p + 1] for p in unpack_ids(path.positions)]
        assert found[-1] == ids
        assert np.array_equal(logprobs[mine], unpack_floats(path.logprobs))


@given(seeds, st.integers(8, 60))
def test_micro_steps_hold_every_path_once_within_budget(seed: int, budget: int) -> None:
    paths = _paths(Random(seed), 0)
    bins = pack([], paths, budget)
    assert sorted(p.leaf for b in bins for p in b.paths) == sorted(p.leaf for p in paths)
    for number, packed in enumerate(bins):
        assert packed.tokens <= budget or len(packed.paths) == 1
        step = micro_step(packed, f"m{number}", 1)
        _check(step, packed)
        assert microstep.decode(microstep.encode(step)) == step


@given(seeds, st.integers(8, 60), st.floats(0, 1))
def test_held_bins_are_filled_up_and_never_taken_apart(seed: int, budget: int, below: float) -> None:
    rng = Random(seed)
    held: list[Bin] = []
    emitted: list[Bin] = []
    everything: list[TrainPath] = []
    for group in range(4):
        paths = _paths(rng, group, 6)
        everything += paths
        bins = pack(held, paths, budget)
        for old, new in zip(held, bins, strict=False):
            assert {p.leaf for p in old.paths} <= {p.leaf for p in new.paths}
        full, held = release(bins, budget, below=below, at_most=3)
        assert len(held) <= 3
        assert all(b.tokens < below * budget for b in held)
        emitted += full
    emitted += held
    assert sorted(p.leaf for b in emitted for p in b.paths) == sorted(p.leaf for p in everything)
    for packed in emitted:
        assert packed.tokens <= budget or len(packed.paths) == 1
        _check(micro_step(packed, "m", 1), packed)


@given(seeds, st.integers(8, 60))
def test_the_order_of_the_input_does_not_matter(seed: int, budget: int) -> None:
    rng = Random(seed)
    paths = _paths(rng, 0)
    shuffled = rng.sample(paths, len(paths))
    assert pack([], paths, budget) == pack([], shuffled, budget)


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def _plain(name: str, ids: list[int]) -> TrainPath:
    last = [len(ids) - 1]
    return TrainPath("g", name, f"{name}c", 1.0, 1.0, pack_ids(ids), pack_ids(last), pack_floats([-1.0]))


def test_a_prefix_shared_by_two_executions_is_computed_once() -> None:
    (packed,) = pack([], [_plain("a", [1, 2, 3, 4, 5]), _plain("b", [1, 2, 3, 9, 9])], 100)
    step = micro_step(packed, "m", 1)
    assert packed.tokens == 7
    assert [(s.start, s.length, s.parent) for s in step.segments] == [(0, 3, -1), (3, 2, 0), (5, 2, 0)]
    assert unpack_ids(step.tokens).tolist() == [1, 2, 3, 4, 5, 9, 9]


def test_two_executions_that_generated_the_same_tokens_have_an_entry_each_on_one_token() -> None:
    (packed,) = pack([], [_plain("a", [1, 2, 3]), _plain("b", [1, 2, 3]), _plain("c", [1, 2])], 100)
    step = micro_step(packed, "m", 1)
    assert packed.tokens == 3
    assert sorted(unpack_ids(step.entry_token).tolist()) == [1, 2, 2]


def test_equal_tokens_after_different_prefixes_are_not_merged() -> None:
    (packed,) = pack([], [_plain("a", [1, 7, 7, 7]), _plain("b", [2, 7, 7, 7])], 100)
    assert packed.tokens == 8


def test_a_path_longer_than_the_budget_is_alone() -> None:
    long, short = _plain("a", [1] * 20), _plain("b", [1] * 5)
    bins = pack([], [long, short], 10)
    assert sorted((b.tokens, len(b.paths)) for b in bins) == [(5, 1), (20, 1)]


def test_bins_are_chosen_by_what_a_path_adds() -> None:
    """Two trees, each of which just fits: filling by length alone would mix them and compute both stems twice."""
    stem_a, stem_b = [1] * 6, [2] * 6
    paths = [_plain(f"a{i}", [*stem_a, 3 + i]) for i in range(4)] + [
        _plain(f"b{i}", [*stem_b, 3 + i]) for i in range(4)
    ]
    assert [b.tokens for b in pack([], paths, 10)] == [10, 10]


def test_a_path_joins_the_held_bin_that_shares_most_with_it() -> None:
    held = [Bin([_plain("a", [1] * 9)], 9), Bin([_plain("b", [2] * 9)], 9)]
    assert [b.tokens for b in pack(held, [_plain("c", [2] * 8 + [3])], 100)] == [9, 10]
