"""The Responses dialect as the official client sees it."""

import json

import openai
import pytest

from tests.proxy.support import Turn, call_text

TOOLS = [{"type": "function", "name": "bash", "description": "Run.", "parameters": {"type": "object"}}]
CUSTOM = [*TOOLS, {"type": "custom", "name": "patch", "description": "d"}, {"type": "web_search"}]
SPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]}
TWO = call_text("bash", '{"command": "ls"}', "look\n").removesuffix("<|im_end|>") + call_text("bash", '{"a": 1}')


@pytest.fixture
def client(world):
    return openai.AsyncOpenAI(base_url=world[0].ready.url + "/v1", api_key="secret", max_retries=0)


async def test_a_tool_loop_plain_and_streamed_is_one_line(world, client):
    run, engine = world
    engine.turns = [Turn(TWO), Turn("<think>\nhm\n</think>\n\ndone<|im_end|>"), Turn("bye<|im_end|>")]
    history = [{"role": "user", "content": "do it"}]
    first = await client.responses.create(model="m", input=history, tools=TOOLS, instructions="the task")
    assert [o.type for o in first.output] == ["message", "function_call", "function_call"]
    assert first.output_text == "look"
    assert json.loads(first.output[1].arguments) == {"command": "ls"}
    history += [o.model_dump(exclude_none=True) for o in first.output]
    history += [
        {"type": "function_call_output", "call_id": o.call_id, "output": f"of {o.name}"}
        for o in reversed(first.output[1:])
    ]
    kinds, last = [], None
    async for event in await client.responses.create(
        model="m", input=history, tools=TOOLS, instructions="the task", stream=True
    ):
        kinds.append(event.type)
        assert event.sequence_number == len(kinds) - 1
        last = event
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    assert [o.type for o in last.response.output] == ["reasoning", "message"]
    assert last.response.output_text == "done"
    history += [o.model_dump(exclude_none=True) for o in last.response.output] + [{"role": "user", "content": "more"}]
    await client.responses.create(model="m", input=history, tools=TOOLS, instructions="the task")
    one, two, three = await run.records()
    assert (two.parent, three.parent) == (one.call, two.call)
    assert not two.diverged
    assert not three.diverged


async def test_custom_and_namespaced_tools(world, client):
    run, engine = world
    engine.turns = [
        Turn(call_text("patch", '{"input": "a\\nb"}')),
        Turn(call_text("spawn", "{}")),
        Turn("ok<|im_end|>"),
    ]
    ask = {"model": "m", "tools": [*CUSTOM, SPACE]}
    history = [{"role": "user", "content": "do it"}]
    status, first, _ = await run.post("/v1/responses", {**ask, "input": history})
    assert status == 200, first
    (item,) = first["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a\nb")
    history += [item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}]
    _, second, _ = await run.post("/v1/responses", {**ask, "input": history})
    assert (second["output"][0]["namespace"], second["output"][0]["name"]) == ("agents", "spawn")
    history += [*second["output"]]
    history += [{"type": "function_call_output", "call_id": second["output"][0]["call_id"], "output": "done"}]
    await run.post("/v1/responses", {**ask, "input": history})
    records = await run.records()
    assert [r.parent for r in records] == ["", records[0].call, records[1].call]
    assert not any(r.diverged for r in records)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"previous_response_id": "x"}, "keeps no responses"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not served here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "reads text only"),
        ({"text": {"format": {"type": "odd"}}}, "json_schema"),
        ({"input": []}, "must not be empty"),
        ({"input": 3}, "must be a list"),
    ],
)
async def test_what_is_not_served_is_refused_clearly(world, fields, part):
    run, _ = world
    status, answer, _ = await run.post("/v1/responses", {"model": "m", "input": "x"} | fields)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert part in answer["error"]["message"]


async def test_a_context_that_is_too_long_is_told_inside_the_stream(world):
    run, _ = world
    events = await run.stream("/v1/responses", {"model": "m", "input": "file " * 3000, "stream": True})
    assert events[-1][0] == "response.failed"
    assert events[-1][1]["response"]["error"]["code"] == "context_length_exceeded"


async def test_structured_output_is_asked_for_in_words(world, tokenizer):
    run, engine = world
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    body = {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "t", "schema": schema}}}
    assert (await run.post("/v1/responses", body))[0] == 200
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
    assert (await run.post("/v1/chat/completions", chat))[0] == 200
    message = {"model": "m", "max_tokens": 5, "messages": chat["messages"]}
    message["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    assert (await run.post("/v1/messages", message))[0] == 200
    for request in engine.requests:
        assert "must fit this JSON schema" in tokenizer.decode(request["input_ids"])
