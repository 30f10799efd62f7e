"""Whatever a harness does with its conversations, each prompt is what the conversation gives from scratch."""

import random

import pytest

from services.proxy.plans import Plans
from tests import from_scratch
from tests.proxy.support import Turn, call_text

SYSTEM = {"role": "system", "content": "the task code"}
WORDS = ("write", "the file", "run list", "done and one", "two\nthree", "é ü", "")


def answers(history):
    """Results of the tool calls of the newest turn."""
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": "ok output"} for c in history[-1].get("tool_calls", [])
    ]


def said(draw):
    """A turn of the policy: text, calls, both, a broken call, or cut by its length."""
    text = draw.choice(WORDS)
    kind = draw.randrange(5)
    if kind == 0:
        return Turn(f"{text} ok<|im_end|>")
    if kind == 1:
        return Turn(call_text("bash", '{"command":  "ls"}', text=f"{text}\n" if text else ""))
    if kind == 2:
        one = call_text("bash", '{"command": "a"}').removesuffix("<|im_end|>")
        return Turn(f"{one}\n{call_text('delegate', '{}')}")
    if kind == 3:
        return Turn(call_text("bash", '{"command": }'))
    return Turn("one two three result output error", finish="length")


def changed(draw, history):
    """The next conversation: continued, gone back, compacted with a kept turn, with a turn of its own or a reworded."""
    kind = draw.randrange(8)
    user = {"role": "user", "content": draw.choice(WORDS) + " go on"}
    whole = [*history, *answers(history)]
    if kind == 5 and len(whole) > 3:
        return [SYSTEM, {"role": "user", "content": "the task, in short"}, *whole[-2:], user]
    if kind == 6:
        return [*whole, {"role": "assistant", "content": "No response requested."}, user]
    if kind == 7:
        turns = [i for i, m in enumerate(whole) if m["role"] == "assistant" and not m.get("tool_calls")]
        if turns:
            at = draw.choice(turns)
            return [*whole[:at], {"role": "assistant", "content": "something else"}, *whole[at + 1 :], user]
    if kind == 4 and len(history) > 4:
        before = [i for i, m in enumerate(history) if m["role"] == "assistant"]
        return [*history[: before[len(before) // 2]], user]
    return [*whole, user] if whole[-1]["role"] != "tool" or draw.random() < 0.5 else whole


@pytest.mark.parametrize("seed", range(4))
async def test_prompts_equal_a_reconstruction_from_scratch(world, tokenizer, monkeypatch, seed):
    run, engine = world
    asked = {}
    monkeypatch.setattr(Plans, "make", from_scratch.watch(asked))
    draw = random.Random(seed)
    engine.choose = lambda _body: said(draw)
    history = [SYSTEM, {"role": "user", "content": "write the file"}]
    for _ in range(40):
        history = changed(draw, [*history, await run.chat(history)])
        if len(history) > 15:
            history = [SYSTEM, {"role": "user", "content": "again"}]
    records = await run.records()
    prompts = {r["rid"].rpartition("-")[0]: r["input_ids"] for r in engine.requests}
    assert len(records) == len(prompts) == 40
    assert sum(bool(r.parent) for r in records) > 15
    from_scratch.check(records, asked, prompts, tokenizer)
