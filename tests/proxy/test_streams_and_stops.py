"""Stop sequences, early text, silent and broken engines, and what the record says about delivery."""

import asyncio
import math

import pytest

from services.proxy import delivery, engine_client
from services.proxy.profiles import Profile
from services.proxy.reading import Reading
from services.proxy.service import Plans
from shared.codec import unpack_ids
from shared.events import ModelCallMarked, ModelCallUnclassified, Sampling
from tests.proxy.support import EXECUTION, TOOLS, ScriptedEngine, Turn, World, call_text

USER = {"role": "user", "content": "write the file"}
ASK = {"model": "m", "messages": [USER], "tools": TOOLS}


async def events_of(run, kind):
    end = await run.control.last_sequence()
    return [m.event async for m in run.control.read_until(end) if isinstance(m.event, kind)]


async def test_a_stop_sequence_ends_the_generation_and_is_not_continued(world, tokenizer):
    run, engine = world
    engine.turns = [Turn("one STOP two three result output error task<|im_end|>", pause_s=0.05), Turn("ok<|im_end|>")]
    first = await run.chat([USER], stop=["STOP"])
    assert first["content"] == "one "
    await run.chat([USER, first, USER])
    one, two = await run.records()
    assert engine.aborted == [one.call + "-1"]
    text = tokenizer.decode(unpack_ids(one.output_ids).tolist())
    assert "STOP" in text  # all that was generated is recorded ...
    assert "task" not in text  # ... but not all was generated
    assert (two.parent, one.finish_reason) == (one.call, "stop")
    prompt = tokenizer.decode(engine.requests[1]["input_ids"])
    assert "one" in prompt
    assert "STOP" not in prompt
    tree = await run.tree()
    assert tree.prompt_ids(two.call).tolist() == engine.requests[1]["input_ids"]


async def test_text_is_sent_early_only_where_the_profile_allows_it(world, monkeypatch):
    run, engine = world
    text = "one two three result output error task code<|im_end|>"
    times = []

    async def read_stream():
        loop, start = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        headers = {"authorization": "Bearer secret"}
        url = run.ready.url + "/v1/chat/completions"
        async with run.http.post(url, json=ASK | {"stream": True}, headers=headers) as response:
            data = b""
            async for part in response.content.iter_any():
                data += part
                times.append((loop.time() - start, part.count(b'"content"')))
        return data.decode()

    engine.turns = [Turn(text, pause_s=0.1)]
    await read_stream()
    assert len([t for t, n in times if n and t > 0.1]) == 1  # all at once, at the end
    monkeypatch.setattr(Plans, "profile", lambda _self, harness: Profile(name="x", early_text=True))
    times.clear()
    engine.turns = [Turn(text, pause_s=0.1)]
    data = await read_stream()
    assert len([t for t, n in times if n]) >= 3
    contents = [line.split('"content":"')[1].split('"')[0] for line in data.split("\n") if '"content":"' in line]
    assert "".join(contents) == "one two three result output error task code"
    engine.turns = [Turn("see " + call_text("bash", '{"command": "ls"}'), pause_s=0.05)]
    data = await read_stream()
    assert data.index('"content":"see') < data.index('"tool_calls"')
    assert data.count('"content":"see') == 1


async def test_an_engine_that_hangs_is_left_for_another(world, tokenizer, monkeypatch):
    run, engine = world
    monkeypatch.setattr(engine_client, "SILENCE_S", 0.2)
    monkeypatch.setattr(engine_client, "HEALTH_S", 0.2)
    engine.hung = True
    async with ScriptedEngine(tokenizer, default=Turn("from the other<|im_end|>")).running() as other:
        call = asyncio.create_task(run.chat([USER]))
        while not engine.requests:
            await asyncio.sleep(0.01)
        await run.cell(0, other.url, version=4)
        assert (await asyncio.wait_for(call, 20))["content"] == "from the other"
    engine.hung = False


async def test_a_slow_engine_that_is_well_is_waited_for(world, monkeypatch):
    run, engine = world
    monkeypatch.setattr(engine_client, "SILENCE_S", 0.1)
    engine.turns = [Turn("slow<|im_end|>", delay_s=0.6)]
    assert (await run.chat([USER]))["content"] == "slow"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
async def test_log_probabilities_that_are_no_numbers_are_refused(world, logprob):
    run, engine = world
    engine.default = Turn("one two three<|im_end|>", bad_logprob=logprob)
    status, answer, _ = await run.post("/v1/chat/completions", ASK)
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert len(engine.requests) == engine_client.BAD_REPORTS
    assert await run.records() == []


async def test_a_reply_that_reaches_a_retry_loses_the_discarded_mark(world):
    run, engine = world
    engine.gate = asyncio.Event()
    engine.turns = [Turn("first<|im_end|>")]
    lost = asyncio.create_task(run.chat([USER]))
    while not engine.requests:
        await asyncio.sleep(0.01)
    lost.cancel()
    await asyncio.sleep(0.1)
    engine.gate.set()
    while not await run.records():
        await asyncio.sleep(0.02)
    (record,) = await run.records()
    assert record.discarded
    await run.stop_proxy()
    await run.start_proxy()
    assert (await run.chat([USER]))["content"] == "first"
    (mark,) = await events_of(run, ModelCallMarked)
    assert (mark.call, mark.discarded) == (record.call, False)


async def test_a_reply_that_was_lost_on_its_last_way_is_marked(world, monkeypatch):
    run, engine = world
    reached, go_on = asyncio.Event(), asyncio.Event()
    whole = delivery.send_body

    async def slow_send(send, *arguments):
        reached.set()
        await go_on.wait()
        await whole(send, *arguments)

    monkeypatch.setattr(delivery, "send_body", slow_send)
    engine.turns = [Turn("first<|im_end|>")]
    lost = asyncio.create_task(run.chat([USER]))
    await reached.wait()
    lost.cancel()
    await asyncio.sleep(0.2)
    go_on.set()
    while not await events_of(run, ModelCallMarked):
        await asyncio.sleep(0.02)
    assert (await run.chat([USER]))["content"] == "first"
    marks = await events_of(run, ModelCallMarked)
    assert [m.discarded for m in marks] == [True, False]
    assert [r.discarded for r in await run.records()] == [False]


async def test_two_proxies_share_an_execution_without_a_collision(world, nats_url, model_folder):
    run, engine = world
    other = World(nats_url, run.run, run.folder, model_folder, run.context)
    other.control, other.http = run.control, run.http
    await other.start_proxy("2")
    try:
        engine.turns = [Turn(call_text("bash", '{"command": "ls"}')) for _ in range(2)] + [Turn("ok<|im_end|>")] * 9
        both = await asyncio.gather(run.chat([USER]), other.chat([USER, USER]))
        assert len({r.call for r in await run.records()}) == 2
        history = [USER, both[0]]
        for i in range(4):  # turn by turn, now here, now there
            for call in history[-1].get("tool_calls", []):
                history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
            history.append({"role": "user", "content": f"go on {i}"})
            history.append(await (other if i % 2 == 0 else run).chat(history))
    finally:
        await other.stop_proxy()
    records = await run.records()
    tree = await run.tree()
    assert len(tree.path(records[-1].call)) == 5
    assert sorted({r.call.removeprefix(EXECUTION)[2:] for r in records if r.call.endswith("p2")})


async def test_what_no_rule_knows_is_told_once(world):
    run, _ = world
    await run.execution("g000005x00", key="odd", harness="nobody-knows", sampling=Sampling(max_new_tokens=8))
    for text in ("first", "other", "another"):
        await run.chat([{"role": "user", "content": text}], key="odd")
    (told,) = await events_of(run, ModelCallUnclassified)
    assert (told.harness, told.call_class) == ("nobody-knows", "auxiliary")
    assert "bash,delegate" in told.fingerprint


@pytest.mark.parametrize("size", [1, 2, 5, 50])
def test_reading_shows_a_growing_beginning_of_the_text(size, tokenizer):
    text = "  é one two STOP three"
    ids = tokenizer.encode(text, add_special_tokens=False)
    reading = Reading(tokenizer.decode, frozenset([tokenizer.eos_token_id]), ("STOP",))
    shown = ""
    for i in range(0, len(ids), size):
        reading.feed(ids[i : i + size])
        assert reading.text.startswith(shown)
        assert "é one two".startswith(reading.text)
        shown = reading.text
    assert (shown, reading.stopped) == ("é one two", True)
