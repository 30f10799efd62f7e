from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.trajectory.selection import TRAINABLE_CLASSES, Selected, select, training_leaves
from shared.tree import Tree
from tests.trajectory.worlds import random_records, record, tree_of

worlds = st.tuples(st.integers(0, 2**32), st.integers(0, 14))


def _random_tree(world: tuple[int, int]) -> Tree:
    return tree_of(*random_records(Random(world[0]), "g000000x00", 1, world[1]))


def _trainable(tree: Tree, leaf: str) -> set[tuple[str, int]]:
    """(call, offset in its output) of every trainable token of the path, from the tree's own provenance."""
    path, generated = tree.path(leaf), tree.generated(leaf)
    found = set()
    for position in np.flatnonzero(generated.mask):
        node = path[generated.owner[position]]
        if position:
            found.add((node.call, int(position) - node.prompt_length))
    return found


def _trained(tree: Tree, chosen: Selected) -> list[tuple[str, int]]:
    path, generated = tree.path(chosen.leaf), tree.generated(chosen.leaf)
    nodes = [path[generated.owner[p]] for p in chosen.positions]
    return [(n.call, int(p) - n.prompt_length) for n, p in zip(nodes, chosen.positions, strict=True)]


@given(worlds, st.integers(0, 2**32), st.integers(1, 6))
def test_each_token_is_trained_by_one_path_with_what_was_recorded(world, seed: int, j_max: int) -> None:
    tree = _random_tree(world)
    chosen = select(tree, "g000000x00", seed=seed, j_max=j_max)
    assert len(chosen) <= j_max
    seen: set[tuple[str, int]] = set()
    for path in chosen:
        ids, generated = tree.ids(path.leaf), tree.generated(path.leaf)
        assert np.array_equal(path.ids, ids[: len(path.ids)])
        assert len(path.ids) == path.positions[-1] + 1
        assert generated.mask[path.positions].all()
        assert np.array_equal(path.logprobs, generated.logprobs[path.positions])
        assert (np.diff(path.positions) > 0).all()
        assert path.positions[0] >= 1
        trained = _trained(tree, path)
        # exactly what the path has and no earlier path had
        assert set(trained) == _trainable(tree, path.leaf) - seen
        assert len(trained) == len(set(trained))
        seen.update(trained)


@given(worlds, st.integers(0, 2**32))
def test_without_a_cap_every_kept_generation_is_trained(world, seed: int) -> None:
    tree = _random_tree(world)
    chosen = select(tree, "g000000x00", seed=seed, j_max=10_000)
    everything = {token for path in chosen for token in _trained(tree, path)}
    expected = set()
    for node in tree.nodes.values():
        if len(node.output_ids) and not node.discarded and node.call_class != "auxiliary":
            expected |= _trainable(tree, node.call)
    assert everything == expected


@given(worlds, st.integers(0, 2**32), st.integers(1, 6))
def test_the_highest_class_with_unmasked_tokens_is_drawn_first(world, seed: int, j_max: int) -> None:
    tree = _random_tree(world)
    leaves = training_leaves(tree)
    masked: set[tuple[str, int]] = set()
    chosen = select(tree, "g000000x00", seed=seed, j_max=j_max)
    for path in chosen:
        open_classes = {tree.nodes[leaf].call_class for leaf in leaves if _trainable(tree, leaf) - masked}
        assert path.call_class == next(name for name in TRAINABLE_CLASSES if name in open_classes)
        assert path.call_class == tree.nodes[path.leaf].call_class
        masked |= _trainable(tree, path.leaf)
    if len(chosen) < j_max:
        assert not any(_trainable(tree, leaf) - masked for leaf in leaves)


@given(worlds)
def test_leaves_are_kept_generations_that_no_other_leaf_contains(world) -> None:
    tree = _random_tree(world)
    leaves = training_leaves(tree)
    for leaf in leaves:
        node = tree.nodes[leaf]
        assert not node.discarded
        assert node.call_class != "auxiliary"
        last = (leaf, len(node.output_ids) - 1)
        holders = [other for other in leaves if last in _trainable(tree, other) or other == leaf]
        assert holders == [leaf]


@given(worlds, st.integers(0, 2**32))
def test_the_draw_depends_on_seed_and_execution_only(world, seed: int) -> None:
    once = select(_random_tree(world), "g000000x00", seed=seed, j_max=5)
    again = select(_random_tree(world), "g000000x00", seed=seed, j_max=5)
    assert [p.leaf for p in once] == [p.leaf for p in again]


def test_a_leaf_is_drawn_in_proportion_to_its_unmasked_tokens() -> None:
    tree = tree_of(
        record("a", inputs=(1,), outputs=(1,) * 30),
        record("b", inputs=(2,), outputs=(1,) * 10),
    )
    first = [select(tree, "x", seed=seed, j_max=1)[0].leaf for seed in range(4000)]
    assert abs(first.count("a") / len(first) - 0.75) < 0.03
    executions = [select(tree, f"x{i}", seed=0, j_max=1)[0].leaf for i in range(4000)]
    assert abs(executions.count("a") / len(executions) - 0.75) < 0.03


def test_turns_repeated_after_a_compaction_are_context() -> None:
    tree = tree_of(
        record("c1", inputs=(1, 2), outputs=(3, 4)),
        record("c2", parent="c1", inputs=(5,), outputs=(6,), call_class="main_summary"),
        record("c3", inputs=(1, 6, 3, 4, 7), outputs=(8, 9)),  # the summary, then the turn (3, 4) kept word for word
    )
    chosen = select(tree, "x", seed=0, j_max=5)
    assert [(p.leaf, p.ids[p.positions].tolist()) for p in chosen] == [("c3", [8, 9]), ("c2", [3, 4, 6])]


def test_a_reply_that_the_harness_changed_is_still_trained_in_its_own_context() -> None:
    tree = tree_of(
        record("c1", inputs=(1,), outputs=(2, 3, 4)),
        record("c2", parent="c1", keep=2, inputs=(9, 5), outputs=(6,), diverged=True),
    )
    chosen = {p.leaf: p for p in select(tree, "x", seed=0, j_max=5)}
    assert set(chosen) == {"c1", "c2"}
    trained = sorted(t for path in chosen.values() for t in path.ids[path.positions].tolist())
    assert trained == [2, 3, 4, 6]


def test_a_discarded_generation_is_trained_only_below_a_kept_one() -> None:
    lost = tree_of(record("c1", inputs=(1,), outputs=(2,)), record("c2", parent="c1", outputs=(3,), discarded=True))
    assert [(p.leaf, p.ids.tolist()) for p in select(lost, "x", seed=0, j_max=5)] == [("c1", [1, 2])]
    kept = tree_of(
        record("c1", inputs=(1,), outputs=(2, 3), discarded=True),
        record("c2", parent="c1", keep=2, inputs=(5,), outputs=(6,)),  # a partial turn that the harness went on from
    )
    chosen = select(kept, "x", seed=0, j_max=5)
    assert [(p.leaf, p.ids[p.positions].tolist()) for p in chosen] == [("c2", [2, 6])]


def test_an_auxiliary_call_covers_nothing() -> None:
    tree = tree_of(
        record("c1", inputs=(1,), outputs=(2,)),
        record("c2", parent="c1", inputs=(3,), outputs=(4,), call_class="auxiliary"),
    )
    assert [p.leaf for p in select(tree, "x", seed=0, j_max=5)] == ["c1"]


def test_the_first_token_of_an_empty_prompt_is_never_trained() -> None:
    tree = tree_of(record("c1", outputs=(2, 3)), record("c2", outputs=(4,)))
    assert [(p.leaf, p.positions.tolist()) for p in select(tree, "x", seed=0, j_max=5)] == [("c1", [1])]
