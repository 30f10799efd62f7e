"""The tree gives back exactly the ids, log-probabilities and versions that were recorded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import pack_floats, pack_ids
from shared.events import ModelCallRecorded, Sampling, VersionSpan
from shared.tree import Tree, TreeError


def record(call, parent="", keep=-1, inputs=(), outputs=(), attempt=1, **kw):
    fields = {
        "call_class": "main_task",
        "versions": (VersionSpan(version=3, start=0, end=len(outputs)),),
        "output_logprobs": pack_floats([-0.01 * (t % 97) for t in outputs]),
    } | kw
    return ModelCallRecorded(
        call=call,
        execution="g000001x00",
        attempt=attempt,
        cell=0,
        parent=parent,
        keep=keep,
        input_ids=pack_ids(inputs),
        output_ids=pack_ids(outputs),
        finish_reason="stop",
        sampling=Sampling(),
        **fields,
    )


@st.composite
def executions(draw):
    """Records of a random tree, with a plain-Python model of each call's (ids, generated-by) beside it."""
    model, records = {}, []
    for number in range(draw(st.integers(1, 12))):
        call = f"c{number}"
        parent = draw(st.sampled_from(["", *model])) if model else ""
        inherited = model[parent] if parent else []
        keep = draw(st.one_of(st.just(-1), st.integers(0, len(inherited))))
        inputs = draw(st.lists(st.integers(0, 151_000), max_size=6))
        outputs = draw(st.lists(st.integers(0, 151_000), max_size=6))
        cut = draw(st.integers(0, len(outputs)))
        spans = (VersionSpan(version=1, start=0, end=cut), VersionSpan(version=2, start=cut, end=len(outputs)))
        records.append(record(call, parent, keep, inputs, outputs, versions=spans))
        kept = inherited if keep < 0 else inherited[:keep]
        own = [(t, call, -0.01 * (t % 97), 1 if i < cut else 2) for i, t in enumerate(outputs)]
        model[call] = kept + [(t, None, 0.0, -1) for t in inputs] + own
    return records, model


@settings(max_examples=300, deadline=None)
@given(executions())
def test_a_path_gives_back_what_was_recorded(execution):
    records, model = execution
    tree = Tree()
    for r in records:
        tree.add(r)
    for call, tokens in model.items():
        assert tree.ids(call).tolist() == [t for t, _, _, _ in tokens]
        generated, path = tree.generated(call), tree.path(call)
        assert generated.mask.tolist() == [who is not None for _, who, _, _ in tokens]
        owners = [path[i].call if i >= 0 else None for i in generated.owner]
        assert owners == [who for _, who, _, _ in tokens]
        np.testing.assert_array_equal(generated.logprobs, np.asarray([lp for *_, lp, _ in tokens], np.float32))
        assert tree.token_versions(call).tolist() == [v for *_, v in tokens]
        assert path[-1].call == call
        assert path[0].parent == ""


@settings(max_examples=100, deadline=None)
@given(executions())
def test_every_generated_token_is_in_one_node_and_leaves_have_no_children(execution):
    records, _ = execution
    tree = Tree()
    for r in records:
        tree.add(r)
        assert tree.add(r) is None  # a redelivered record changes nothing
    assert tree.tokens()["generated"] == sum(len(r.output_ids) // 4 for r in records)
    parents = {r.parent for r in records}
    assert tree.leaves() == [r.call for r in records if r.call not in parents]


def test_a_discarded_call_is_no_leaf_and_hides_no_leaf():
    tree = Tree()
    tree.add(record("a", inputs=[1], outputs=[2]))
    tree.add(record("b", "a", inputs=[3], outputs=[4], discarded=True))
    assert tree.leaves() == ["a"]
    assert tree.leaves(discarded=True) == ["b"]
    tree.add(record("c", "b", keep=3, outputs=[5]))  # the harness went on with a part of it
    assert tree.leaves() == ["c"]
    assert tree.ids("c").tolist() == [1, 2, 3, 5]


def test_leaves_by_class_come_in_selection_order():
    tree = Tree()
    tree.add(record("a", outputs=[1], call_class="auxiliary"))
    tree.add(record("b", outputs=[1], call_class="sub_task"))
    tree.add(record("c", outputs=[1], call_class="main_task"))
    assert list(tree.leaves_by_class().items()) == [("main_task", ["c"]), ("sub_task", ["b"]), ("auxiliary", ["a"])]


def test_a_later_attempt_replaces_the_earlier_one():
    tree = Tree()
    tree.add(record("a", outputs=[1]))
    tree.add(record("b", outputs=[2], attempt=2))
    assert list(tree.nodes) == ["b"]
    assert tree.add(record("a", outputs=[1])) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record("b", "nowhere"), "not in the tree"),
        (record("b", "a", keep=9), "keeps 9 ids"),
        (record("b", "a", outputs=[1], output_logprobs=b""), "log-probabilities"),
    ],
)
def test_records_that_fit_nowhere_are_refused(bad, reason):
    tree = Tree()
    tree.add(record("a", inputs=[1], outputs=[2]))
    with pytest.raises(TreeError, match=reason):
        tree.add(bad)
    assert list(tree.nodes) == ["a"]
