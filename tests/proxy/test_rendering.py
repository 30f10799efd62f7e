"""Rendering never encodes old ids again, and what it adds is what a whole rendering would have added."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy.dialects.base import Message, Tool, ToolCall
from services.proxy.rendering import TAIL, RenderingUnavailable, load
from services.proxy.tokenizer import load_tokenizer

TOOLS = (Tool("bash", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}}),)
texts = st.text("abc xyz\n<é>1", min_size=1, max_size=200).map(lambda s: "t" + s.strip())
results = st.lists(texts, min_size=1, max_size=3).map(
    lambda ts: tuple(Message("tool", t, tool_call_id="x") for t in ts)
)
users = texts.map(lambda t: (Message("user", t),))


def ids(values):
    return np.asarray(values, dtype=np.int32)


@settings(max_examples=100, deadline=None)
@given(texts, texts, st.one_of(results, users), st.booleans())
def test_an_extension_is_what_a_whole_rendering_adds(renderer, tokenizer, user, said, new, ended):
    conversation = (Message("system", "s" * 2 * TAIL), Message("user", user))
    prompt = renderer.fresh(conversation, TOOLS)
    output = tokenizer.encode(said, add_special_tokens=False) + ([renderer.stop_ids[0]] if ended else [])
    extension = renderer.extend(ids(prompt), ids(output), new, TOOLS)
    assert extension.keep == len(prompt) + len(output)
    whole = renderer.fresh((*conversation, Message("assistant", said), *new), TOOLS)
    assert prompt + output + extension.ids == whole


@settings(max_examples=100, deadline=None)
@given(texts, texts, texts, st.one_of(results, users), users)
def test_turns_the_policy_never_wrote_are_rendered_as_in_a_whole_conversation(
    renderer, tokenizer, user, said, foreign, new, last
):
    conversation = (Message("user", user),)
    prompt = renderer.fresh(conversation, TOOLS)
    output = [*tokenizer.encode(said, add_special_tokens=False), renderer.stop_ids[0]]
    call = ToolCall("x", "bash", '{"command": "ls"}')
    added = (*new, Message("assistant", foreign, "", (call,)), *new, *last)
    extension = renderer.extend(ids(prompt), ids(output), added, TOOLS)
    whole = renderer.fresh((*conversation, Message("assistant", said), *added), TOOLS)
    assert prompt + output + extension.ids == whole


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.lists(st.integers(0, 511), max_size=30))
def test_the_light_tokenizer_equals_transformers(model_folder, tokenizer, text, some_ids):
    light = load_tokenizer(str(model_folder))
    for sample in (text, f"<|im_start|>{text}<tool_call>"):
        assert light.encode(sample, add_special_tokens=False) == tokenizer.encode(sample, add_special_tokens=False)
    for skip in (False, True):
        assert light.decode(some_ids, skip_special_tokens=skip) == tokenizer.decode(some_ids, skip_special_tokens=skip)
    tokens = ["<|im_end|>", "</think>", text]
    assert light.convert_tokens_to_ids(tokens) == tokenizer.convert_tokens_to_ids(tokens)
    assert (light.eos_token_id, light.unk_token_id) == (tokenizer.eos_token_id, tokenizer.unk_token_id)


def test_text_after_the_stop_token_is_not_kept(renderer, tokenizer):
    prompt = renderer.fresh((Message("user", "x"),), TOOLS)
    output = [*tokenizer.encode("said", add_special_tokens=False), renderer.stop_ids[0], 5, 6]
    extension = renderer.extend(ids(prompt), ids(output), (Message("user", "y"),), TOOLS)
    assert extension.keep == len(prompt) + len(output) - 2


def test_with_thinking_a_new_user_turn_renders_anew_and_tool_results_continue(model_folder, tokenizer):
    """Qwen3's template drops old reasoning at a user turn, so nothing can be continued there."""
    renderer = load(str(model_folder), thinking=True)
    prompt = renderer.fresh((Message("user", "x"),), TOOLS)
    output = tokenizer.encode("<think>\nhm\n</think>\n\nsaid<|im_end|>", add_special_tokens=False)
    assert renderer.extend(ids(prompt), ids(output), (Message("user", "y"),), TOOLS) is None
    assert renderer.extend(ids(prompt), ids(output), (Message("assistant", "z"), Message("user", "y")), TOOLS) is None
    assert renderer.extend(ids(prompt), ids(output), (Message("tool", "ok", tool_call_id="x"),), TOOLS).ids
    assert renderer.parse(ids(output), ids(prompt), TOOLS).reasoning == "hm"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "bash", "arguments": {"a": 1}}', ("", (("bash", '{"a": 1}'),))),
        ('{"name": "bash", "arguments":  {"a":  1.0}}', ("", (("bash", '{"a":  1.0}'),))),
        ('{"name": "bash"}', ("", (("bash", "{}"),))),
        ('{"name": "bash", "arguments": {"a": }}', ("", (("bash", '{"a": }}'),))),
        ('{"name": "bash", "arguments": {"a": 1}', ("", (("bash", '{"name": "bash", "arguments": {"a": 1}'),))),
        ('{"arguments": {"a": 1}}', ('{"arguments": {"a": 1}}', ())),
        ("no call", ("no call", ())),
    ],
)
def test_what_becomes_of_a_tool_call(renderer, tokenizer, text, expected):
    output = tokenizer.encode(f"<tool_call>\n{text}\n</tool_call><|im_end|>", add_special_tokens=False)
    prompt = renderer.fresh((Message("user", "x"),), TOOLS)
    parsed = renderer.parse(ids(output), ids(prompt), TOOLS)
    assert (parsed.text, parsed.calls) == expected


def test_a_model_without_a_renderer_is_named(tmp_path, model_folder):
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "qwen3"}')
    with pytest.raises(RenderingUnavailable, match="NewForCausalLM"):
        load(str(tmp_path))
    with pytest.raises(RenderingUnavailable, match="nonsense"):
        load(str(tmp_path), "nonsense")
