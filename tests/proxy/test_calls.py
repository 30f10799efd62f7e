"""Calls through the real service and bus, on a scripted engine: what is recorded, continued, retried, refused."""

import asyncio

import numpy as np

from shared.codec import unpack_floats, unpack_ids
from shared.events import CellRoleChanged, ExecutionFinished, ExecutionMoved, Sampling
from tests.proxy.support import EXECUTION, TOOLS, ScriptedEngine, Turn, call_text

USER = {"role": "user", "content": "write the file"}
SYSTEM = {"role": "system", "content": "the task"}


def tool(message, text="ok", which=0):
    return {"role": "tool", "tool_call_id": message["tool_calls"][which]["id"], "content": text}


async def test_the_next_prompt_is_the_exact_ids_so_far_plus_what_is_new(world, renderer):
    run, engine = world
    engine.turns = [Turn(call_text("bash", '{"command":  "ls"}')), Turn("done<|im_end|>")]
    first = await run.chat([SYSTEM, USER])
    assert first["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":  "ls"}'}
    second = await run.chat([SYSTEM, USER, first, tool(first)])
    assert second == {"role": "assistant", "content": "done"}
    one, two = await run.records()
    assert (one.parent, two.parent, two.keep, two.diverged) == ("", one.call, -1, False)
    tree = await run.tree()
    assert engine.requests[1]["input_ids"] == tree.prompt_ids(two.call).tolist()
    assert engine.requests[1]["input_ids"][: len(tree.ids(one.call))] == tree.ids(one.call).tolist()
    assert unpack_floats(one.output_logprobs)[0] == np.float32(-0.5)
    assert [(s.version, s.start) for s in one.versions] == [(3, 0)]


async def test_reformatted_arguments_still_continue_the_call(world):
    run, engine = world
    engine.turns = [Turn(call_text("bash", '{"b": 1.0, "a": "\\u00e9"}', "look")), Turn("done<|im_end|>")]
    first = await run.chat([SYSTEM, USER])
    first["tool_calls"][0]["function"]["arguments"] = '{"a":"é","b":1}'
    first["content"] = [{"type": "text", "text": "look ", "cache_control": {"type": "ephemeral"}}]
    await run.chat([SYSTEM, USER, first, tool(first)])
    one, two = await run.records()
    assert (two.parent, two.diverged) == (one.call, False)


async def test_changed_arguments_continue_by_id_and_are_flagged(world):
    run, engine = world
    engine.turns = [Turn(call_text("bash", '{"command": "ls"}')), Turn("a<|im_end|>"), Turn("b<|im_end|>")]
    first = await run.chat([SYSTEM, USER])
    first["tool_calls"][0]["function"]["arguments"] = '{"command": "ls -l"}'
    history = [SYSTEM, USER, first, tool(first)]
    second = await run.chat(history)
    await run.chat([*history, second, USER])
    one, two, three = await run.records()
    assert (two.parent, two.diverged) == (one.call, True)
    assert (three.parent, three.diverged) == (two.call, False)


async def test_a_rewritten_turn_makes_a_branch(world):
    run, engine = world
    engine.turns = [Turn("one<|im_end|>"), Turn("two<|im_end|>"), Turn("three<|im_end|>")]
    first = await run.chat([SYSTEM, USER])
    second = await run.chat([SYSTEM, USER, first, USER])
    await run.chat([SYSTEM, USER, first, USER, {**second, "content": "not what I said"}, USER])
    one, two, three = await run.records()
    assert two.parent == one.call
    assert (three.parent, three.diverged) == (one.call, True)
    tree = await run.tree()
    assert sorted(tree.leaves()) == [two.call, three.call]


async def test_malformed_calls_reach_the_harness_and_the_record_keeps_the_tokens(world, tokenizer):
    run, engine = world
    bad = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call><|im_end|>'
    engine.turns = [Turn(bad), Turn("<tool_call>\nnothing\n</tool_call><|im_end|>"), Turn("done<|im_end|>")]
    first = await run.chat([SYSTEM, USER])
    broken = '{"name": "bash", "arguments": {"command": "ls"}'
    assert first["tool_calls"][0]["function"] == {"name": "bash", "arguments": broken}
    second = await run.chat([SYSTEM, USER, first, tool(first)])
    assert second["content"] == "nothing"
    await run.chat([SYSTEM, USER, first, tool(first), second, USER])
    one, two, three = await run.records()
    assert tokenizer.decode(unpack_ids(one.output_ids).tolist()) == bad
    assert (two.parent, three.parent) == (one.call, two.call)


async def test_classes_of_scout(world):
    run, engine = world
    engine.turns = [Turn(f"t{i}<|im_end|>") for i in range(6)]
    sub_tools = [t for t in TOOLS if t["function"]["name"] != "delegate"]
    first = await run.chat([SYSTEM, USER])
    sub = [SYSTEM, {"role": "user", "content": "a part of it"}]
    answer = await run.chat(sub, tools=sub_tools)
    await run.chat([*sub, answer, {"role": "user", "content": "Summarize the work so far."}], tools=sub_tools)
    await run.chat([SYSTEM, USER, first, {"role": "user", "content": "Summarize the work so far."}])
    await run.chat([SYSTEM, {"role": "user", "content": USER["content"] + "\n\nSummary of the work so far:\nx"}])
    classes = [r.call_class for r in await run.records()]
    assert classes == ["main_task", "sub_task", "sub_summary", "main_summary", "main_task"]


async def test_a_retry_after_a_broken_connection_gets_the_same_generation(world):
    run, engine = world
    engine.gate = asyncio.Event()
    engine.turns = [Turn("first<|im_end|>"), Turn("second<|im_end|>"), Turn("third<|im_end|>")]
    lost = asyncio.create_task(run.chat([SYSTEM, USER]))
    while not engine.requests:
        await asyncio.sleep(0.01)
    lost.cancel()
    await asyncio.sleep(0.1)
    retried = asyncio.create_task(run.chat([SYSTEM, USER]))
    await asyncio.sleep(0.1)
    engine.gate.set()
    assert (await retried)["content"] == "first"
    assert len(engine.requests) == 1
    assert (await run.chat([SYSTEM, USER]))["content"] == "second"  # delivered before: a new sample
    assert [r.discarded for r in await run.records()] == [False, False]


async def test_a_generation_nobody_waits_for_is_recorded_and_given_to_a_retry(world):
    run, engine = world
    engine.gate = asyncio.Event()
    engine.turns = [Turn("first<|im_end|>"), Turn("second<|im_end|>")]
    lost = asyncio.create_task(run.chat([SYSTEM, USER]))
    while not engine.requests:
        await asyncio.sleep(0.01)
    lost.cancel()
    await asyncio.sleep(0.1)
    engine.gate.set()
    while not await run.records():
        await asyncio.sleep(0.02)
    assert (await run.records())[0].discarded
    assert (await run.chat([SYSTEM, USER]))["content"] == "first"
    assert len(engine.requests) == 1


async def test_two_equal_requests_at_once_are_two_samples(world):
    run, engine = world
    engine.gate = asyncio.Event()
    engine.turns = [Turn("first<|im_end|>"), Turn("second<|im_end|>")]
    both = [asyncio.create_task(run.chat([SYSTEM, USER])) for _ in range(2)]
    await asyncio.sleep(0.3)
    engine.gate.set()
    assert sorted(m["content"] for m in await asyncio.gather(*both)) == ["first", "second"]
    assert len({r.call for r in await run.records()}) == 2


async def test_a_restarted_proxy_continues_the_tree_and_serves_a_retry(world):
    run, engine = world
    engine.turns = [Turn(call_text("bash", '{"command": "ls"}')), Turn("done<|im_end|>")]
    first = await run.chat([SYSTEM, USER])
    socket, url = run.ready.socket, run.ready.url
    await run.stop_proxy()
    await run.start_proxy()
    assert (run.ready.socket, run.ready.url) == (socket, url)
    again = await run.chat([SYSTEM, USER])  # as if the answer had been lost in the restart
    assert again == first
    assert len(engine.requests) == 1
    first["tool_calls"][0]["function"]["arguments"] = '{"command" :"ls"}'
    await run.chat([SYSTEM, USER, first, tool(first)])
    one, two = await run.records()
    assert (two.parent, two.diverged) == (one.call, False)


async def test_an_engine_that_is_cut_goes_on_elsewhere_with_all_tokens_once(world, tokenizer):
    run, engine = world
    text = "one two three result output error task<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    rest = tokenizer.decode(ids[5:])
    engine.turns = [Turn(text, abort_after=5, message="drain")]
    async with ScriptedEngine(tokenizer, default=Turn(rest, versions=(("v4", 0, 99),))).running() as other:
        await run.cell(1, other.url, version=4)
        call = asyncio.create_task(run.chat([SYSTEM, USER]))
        while not engine.requests:
            await asyncio.sleep(0.005)
        await run.publish("scheduler", ExecutionMoved(execution=EXECUTION, from_cell=0, to_cell=1, reason="test"))
        assert (await call)["content"] == text.removesuffix("<|im_end|>")
        assert other.requests[0]["input_ids"] == engine.requests[0]["input_ids"] + ids[:5]
        left = engine.requests[0]["sampling_params"]["max_new_tokens"] - 5
        assert other.requests[0]["sampling_params"]["max_new_tokens"] == left
    (record,) = await run.records()
    assert unpack_ids(record.output_ids).tolist() == ids
    expected = [-0.5 - i / 100 for i in range(5)] + [-0.5 - i / 100 for i in range(len(ids) - 5)]
    np.testing.assert_array_equal(unpack_floats(record.output_logprobs), np.asarray(expected, np.float32))
    assert [(s.version, s.start, s.end) for s in record.versions] == [(3, 0, 5), (4, 5, len(ids))]
    assert (record.cell, record.finish_reason) == (1, "stop")


async def test_an_engine_that_dies_or_refuses_is_tried_again(world, tokenizer):
    run, engine = world
    text = "one two three result output<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.turns = [Turn(status=503), Turn(text, cut_after=4), Turn(tokenizer.decode(ids[4:]))]
    assert (await run.chat([SYSTEM, USER]))["content"] == text.removesuffix("<|im_end|>")
    (record,) = await run.records()
    assert unpack_ids(record.output_ids).tolist() == ids
    assert len(engine.requests) == 3


async def test_calls_one_after_the_other_share_a_connection_to_the_engine(world):
    run, engine = world
    engine.default = Turn(end_s=0.05)
    messages = [SYSTEM, USER]
    for _ in range(4):
        messages = [*messages, await run.chat(messages), USER]
        await asyncio.sleep(0.3)
    assert len(engine.requests) == 4
    assert len(engine.connections) == 1


async def test_calls_wait_while_the_cell_trains(world):
    run, engine = world

    async def role(name):
        event = CellRoleChanged(cell=0, incarnation="i0", order=1, role=name, previous="", seconds=0.0, version=3)
        await run.publish("cell_agent", event)

    await role("training")
    await asyncio.sleep(0.1)
    call = asyncio.create_task(run.chat([SYSTEM, USER]))
    await asyncio.sleep(0.3)
    assert not engine.requests
    await role("rollout")
    assert (await call)["content"] == "ok"
    (record,) = await run.records()
    assert record.queued_s > 0.2


async def test_the_end_of_the_execution_cuts_its_calls(world):
    run, engine = world
    engine.gate = asyncio.Event()
    call = asyncio.create_task(run.post("/v1/chat/completions", {"model": "m", "messages": [USER]}))
    while not engine.requests:
        await asyncio.sleep(0.01)
    finished = ExecutionFinished(
        execution=EXECUTION,
        group="g000001",
        task="t",
        attempt=1,
        ending="harness_timeout",
        exit_code=None,
        artifact=None,
        seconds=1.0,
        cpu_seconds=1.0,
    )
    await run.publish("harness", finished)
    assert (await call)[0] == 410
    status, answer, _ = await run.post("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [USER]})
    assert (status, answer["type"], answer["error"]["type"]) == (410, "error", "permission_error")


async def test_the_runs_sampling_rules_and_limits_are_the_smallest(world):
    run, engine = world
    await run.execution("g000002x00", key="other", sampling=Sampling(temperature=0.7, top_p=0.9, max_new_tokens=40))
    await run.chat([USER], key="other", temperature=0, max_tokens=500)
    await run.chat([USER, {"role": "assistant", "content": "x"}, USER], key="other", max_tokens=7)
    params = [r["sampling_params"] for r in engine.requests]
    assert [(p["temperature"], p["top_p"], p["max_new_tokens"]) for p in params] == [(0.7, 0.9, 40), (0.7, 0.9, 7)]
    assert [r.sampling.max_new_tokens for r in await run.records()] == [40, 7]
