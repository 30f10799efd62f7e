"""The dialects as the official Python clients see them, and by hand where those hide something."""

import asyncio
import json

import anthropic
import openai
import pytest

from services.proxy import delivery
from tests.proxy.support import TOOLS, Turn, call_text

USER = {"role": "user", "content": "write the file"}
TWO_CALLS = (
    "two things\n"
    + call_text("bash", '{"command": "ls"}').removesuffix("<|im_end|>")
    + "\n"
    + call_text("bash", '{"command": "cat é"}')
)
ANTHROPIC_TOOLS = [
    {"name": t["function"]["name"], "description": "d", "input_schema": t["function"]["parameters"]} for t in TOOLS
]


@pytest.fixture
def openai_client(world):
    return openai.AsyncOpenAI(base_url=world[0].ready.url + "/v1", api_key="secret", max_retries=0)


@pytest.fixture
def anthropic_client(world):
    return anthropic.AsyncAnthropic(base_url=world[0].ready.url, api_key="secret", max_retries=0)


async def test_openai_sdk_parallel_calls_plain_and_streamed(world, openai_client):
    _, engine = world
    engine.turns = [Turn(TWO_CALLS), Turn(TWO_CALLS), Turn("<think>\nhm\n</think>\n\ndone<|im_end|>")]
    plain = await openai_client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
    choice = plain.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "two things")
    arguments = [json.loads(c.function.arguments)["command"] for c in choice.message.tool_calls]
    assert arguments == ["ls", "cat é"]
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens

    text, calls, usage = "", {}, None
    options = {"include_usage": True}
    async for chunk in await openai_client.chat.completions.create(
        model="m", messages=[USER], tools=TOOLS, stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for c in chunk.choices:
            text += c.delta.content or ""
            for part in c.delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.id or ""
                call[1] += part.function.arguments or ""
    assert text == "two things"
    assert [json.loads(c[1])["command"] for c in calls.values()] == ["ls", "cat é"]
    assert len({c[0] for c in calls.values()} | {c.id for c in choice.message.tool_calls}) == 4
    assert usage.completion_tokens == plain.usage.completion_tokens

    thinking = await openai_client.chat.completions.create(model="m", messages=[USER])
    assert thinking.choices[0].message.content == "done"
    assert thinking.choices[0].message.reasoning_content == "hm"


async def test_anthropic_sdk_a_tool_loop_plain_and_streamed(world, anthropic_client):
    run, engine = world
    engine.turns = [Turn(TWO_CALLS), Turn(TWO_CALLS), Turn("done<|im_end|>")]
    ask = {"model": "m", "max_tokens": 64, "tools": ANTHROPIC_TOOLS, "system": [{"type": "text", "text": "the task"}]}
    first = await anthropic_client.messages.create(messages=[USER], **ask)
    assert first.stop_reason == "tool_use"
    assert [b.type for b in first.content] == ["text", "tool_use", "tool_use"]
    assert first.content[2].input == {"command": "cat é"}
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": b.input["command"]}]}
        for b in reversed(first.content[1:])  # completion order, not call order
    ]
    turn = {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]}
    history = [USER, turn, {"role": "user", "content": [*results, {"type": "text", "text": "a reminder"}]}]
    async with anthropic_client.messages.stream(messages=history, **ask) as stream:
        second = await stream.get_final_message()
    assert [b.input for b in second.content if b.type == "tool_use"] == [{"command": "ls"}, {"command": "cat é"}]
    assert second.usage.output_tokens > 0
    one, two = await run.records()
    assert two.parent == one.call
    new = engine.tokenizer.decode(engine.requests[1]["input_ids"][len(engine.requests[0]["input_ids"]) :])
    assert new.index("\nls\n") < new.index("\ncat é\n") < new.index("a reminder")
    counted = await anthropic_client.messages.count_tokens(messages=history, model="m", tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens > 10
    assert [m.id async for m in await anthropic_client.models.list()] == ["gyre-policy"]


async def test_malformed_arguments_on_the_anthropic_wire(world, anthropic_client):
    run, engine = world
    engine.turns = [Turn(call_text("bash", '{"command": ')), Turn("done<|im_end|>")]
    ask = {"model": "m", "max_tokens": 50, "tools": ANTHROPIC_TOOLS}
    first = await anthropic_client.messages.create(messages=[USER], **ask)
    (block,) = first.content
    assert set(block.input) == {"malformed_arguments"}
    turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True)]}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "bad input", "is_error": True}
    await anthropic_client.messages.create(messages=[USER, turn, {"role": "user", "content": [result]}], **ask)
    one, two = await run.records()
    assert (two.parent, two.diverged) == (one.call, False)


async def test_context_too_long_in_both_forms(world, openai_client, anthropic_client):
    long = {"role": "user", "content": "file " * 3000}
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.chat.completions.create(model="m", messages=[long])
    assert refused.value.code == "context_length_exceeded"
    assert "1016 tokens" in str(refused.value)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1016 maximum"):
        await anthropic_client.messages.create(model="m", max_tokens=5, messages=[long])


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "no valid JSON"),
        (b"[]", "must be an object"),
        (b'{"messages": []}', "must not be empty"),
        (b'{"messages": 3}', "must be a list"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "reads text only"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n must be 1"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (
            b'{"messages": [{"role": "user", "content": "x"}],'
            b' "tool_choice": {"type": "function", "function": {"name": "fly"}}}',
            "not among the tools",
        ),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    ],
)
async def test_bad_requests_get_the_dialects_own_400(world, body, part):
    run, engine = world
    status, answer, _ = await run.post("/v1/chat/completions", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert part in answer["error"]["message"]
    assert not engine.requests


async def test_keys(world):
    run, _ = world
    ask = {"model": "m", "messages": [USER], "max_tokens": 4}
    status, answer, _ = await run.post("/v1/chat/completions", ask, key="wrong")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    status, answer, _ = await run.post("/v1/messages", ask, **{"authorization": "", "x-api-key": "wrong"})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, _, _ = await run.post("/v1/messages", ask, **{"authorization": "", "x-api-key": "secret"})
    assert status == 200
    await run.execution("g000003x00", key="new")  # still on its way through the stream when the call comes
    status, _, _ = await run.post("/v1/chat/completions", ask, key="new")
    assert status == 200
    status, answer, _ = await run.post("/v1/nothing", ask)
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_probes_and_the_unix_socket(world):
    import aiohttp

    run, _ = world
    async with run.http.head(run.ready.url + "/") as response:
        assert response.status == 200
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(run.ready.socket)) as http:
        headers = {"authorization": "Bearer secret"}
        body = {"model": "m", "messages": [USER]}
        async with http.post("http://proxy/v1/chat/completions", json=body, headers=headers) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "ok"
        async with http.get("http://proxy/v1/models", headers=headers) as response:
            assert (await response.json())["data"][0]["id"] == "gyre-policy"


async def test_silent_streams_and_bodies_are_kept_alive(world, monkeypatch):
    run, engine = world
    monkeypatch.setattr(delivery, "KEEP_ALIVE_S", 0.1)
    engine.default = Turn("slow<|im_end|>", delay_s=0.55)
    ask = {"model": "m", "messages": [USER], "max_tokens": 9, "stream": True}
    chunks = await run.stream("/v1/chat/completions", ask)
    silent = [c for _, c in chunks if c != "[DONE]" and c["choices"] and c["choices"][0]["delta"] == {"content": ""}]
    assert len(silent) >= 3
    assert chunks[-1][1] == "[DONE]"
    events = await run.stream("/v1/messages", ask)
    names = [name for name, _ in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 1
    texts = [e["delta"]["text"] for name, e in events if name == "content_block_delta"]
    assert texts.count("") >= 3
    assert "".join(texts) == "slow"
    async with run.http.post(
        run.ready.url + "/v1/chat/completions",
        json=ask | {"stream": False},
        headers={"authorization": "Bearer secret"},
    ) as response:
        data = await response.read()
    assert data.startswith(b"   ")
    assert json.loads(data)["choices"][0]["message"]["content"] == "slow"


async def test_an_engine_error_after_the_stream_began_is_an_event(world):
    run, engine = world
    engine.default = Turn(status=400, message="no such thing")
    chunks = await run.stream("/v1/chat/completions", {"model": "m", "messages": [USER], "stream": True})
    assert "refused the call" in chunks[-1][1]["error"]["message"]
    engine.default = Turn(status=400, message="The input (9 tokens) is longer than the model's context length")
    events = await run.stream("/v1/messages", {"model": "m", "messages": [USER], "stream": True, "max_tokens": 4})
    assert events[-1][0] == "error"
    assert "prompt is too long" in events[-1][1]["error"]["message"]


async def test_stop_sequences_and_forbidden_tools(world):
    run, engine = world
    engine.turns = [Turn("one STOP two<|im_end|>"), Turn(call_text("bash", "{}"))]
    message = await run.chat([USER], stop=["STOP"])
    assert message["content"] == "one "
    message = await run.chat([USER, message, USER], tool_choice="none")
    assert "tool_calls" not in message
    assert message["content"].startswith("<tool_call>")
    one, two = await run.records()
    assert two.parent == one.call


async def test_lone_surrogates_are_served(world):
    run, _ = world
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a\\udc80b"}]}'
    status, _, _ = await run.post("/v1/chat/completions", body)
    assert status == 200


async def test_a_harness_that_hangs_up_while_sending_harms_nobody(world):
    run, _ = world
    reader, writer = await asyncio.open_unix_connection(run.ready.socket)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n")
    writer.write(b"content-length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    del reader
    assert (await run.chat([USER]))["content"] == "ok"
