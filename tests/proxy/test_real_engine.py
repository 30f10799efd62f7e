"""The proxy on a real SGLang engine: what is recorded is what the engine reported, and what a plain forward gives."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch

from services.cell_agent.engine.server import Engine, EngineSpec
from services.proxy.dialects.base import Message
from services.proxy.rendering import load
from shared.codec import unpack_floats, unpack_ids
from shared.events import Sampling
from tests.proxy.support import World, make_model
from tests.proxy.test_handover import finished
from tests.proxy.test_takeover import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
CONTEXT = 2048
USER = {"role": "user", "content": "write the file"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, make_model(folder, context=CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model, tmp_path_factory):
    folder, _ = model
    spec = EngineSpec(
        cell=0,
        model_path=str(folder),
        dtype="float32",
        context=CONTEXT,
        capacity=8,
        tokens=16384,
        page=1,
        threads=1,
        device="cpu",
        seed=1,
    )
    engine = await Engine.start(spec, tmp_path_factory.mktemp("engine") / "engine.log")
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def world(nats_url, fresh_run, tmp_path, model, engine):
    folder, _ = model
    run = World(nats_url, fresh_run, tmp_path, folder, CONTEXT)
    await run.begin()
    await run.cell(0, engine.url, version=0)
    await run.start_proxy()
    yield run, engine.url
    await run.end()


def forward_logprobs(model, ids):
    """log p(ids[t] | ids[:t]) for t >= 1 in fp32."""
    with torch.no_grad():
        logits = model(torch.tensor([ids.tolist()], dtype=torch.long)).logits[0].float()
    rows = torch.log_softmax(logits[:-1], dim=-1)
    return rows.gather(1, torch.tensor(ids[1:].tolist()).long()[:, None])[:, 0].numpy()


async def test_records_equal_the_engine_and_a_plain_forward(world, model):
    run, url = world
    await run.execution(key="sampled", sampling=Sampling(temperature=1.0, max_new_tokens=150))
    await run.execution("g000001x01", key="greedy", sampling=Sampling(temperature=0.0, max_new_tokens=40))
    history = [USER]
    for turn in range(4):
        message = await run.chat(history, key="sampled")
        history.append(message)
        for call in message.get("tool_calls", []):
            history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        history.append({"role": "user", "content": f"go on {turn}"})
    await run.chat([USER, {"role": "user", "content": "another branch"}], key="sampled")
    await run.chat([USER], key="greedy")

    records = await run.records()
    tree = await run_tree(run, "g000001x00")
    assert len(tree.nodes) == 5
    for call in tree.nodes:
        generated = tree.generated(call)
        expected = forward_logprobs(model[1], tree.ids(call))
        np.testing.assert_allclose(generated.logprobs[1:][generated.mask[1:]], expected[generated.mask[1:]], atol=1e-4)
        assert set(tree.token_versions(call)[generated.mask].tolist()) == {0}
    assert sum(len(r.output_ids) // 4 for r in records) > 200
    assert any(r.cached_tokens > 20 for r in records)

    greedy = records[-1]
    async with aiohttp.ClientSession() as http:
        body = {
            "input_ids": unpack_ids(greedy.input_ids).tolist(),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 40,
                "stop_token_ids": list(load(str(model[0])).stop_ids),
            },
            "return_logprob": True,
        }
        async with http.post(url + "/generate", json=body) as response:
            answer = await response.json()
    assert answer["output_ids"] == unpack_ids(greedy.output_ids).tolist()
    reported = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(unpack_floats(greedy.output_logprobs), reported, atol=1e-5)


async def test_calls_cut_at_the_engine_are_whole_in_the_record(world, model):
    run, url = world
    await run.execution(sampling=Sampling(temperature=1.0, max_new_tokens=1500))
    calls = [asyncio.create_task(run.chat([USER, {"role": "user", "content": str(i)}])) for i in range(4)]
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            await asyncio.sleep(0.15)
            async with http.post(url + "/abort_request", json={"rid": "", "abort_all": True}) as response:
                assert response.status == 200
    await asyncio.gather(*calls)
    tree = await run_tree(run, "g000001x00")
    assert len(tree.nodes) == 4
    assert any(r.queued_s > 0 for r in await run.records())  # at least one was cut and went on
    for call, node in tree.nodes.items():
        assert node.finish_reason in ("stop", "length")
        ids, generated = tree.ids(call), tree.generated(call)
        expected = forward_logprobs(model[1], ids)
        np.testing.assert_allclose(generated.logprobs[1:][generated.mask[1:]], expected[generated.mask[1:]], atol=1e-4)


async def test_calls_of_a_killed_proxy_are_whole_in_the_record_and_the_engine_agrees(world, model, engine):
    run, _ = world
    await run.execution(sampling=Sampling(temperature=1.0, max_new_tokens=1500))
    before = await engine.generated_tokens()
    other = await Proxy(run, "2").start()
    asked = [{"model": "m", "messages": [USER, {"role": "user", "content": str(i)}]} for i in range(6)]
    calls = [asyncio.create_task(other.chat(body)) for body in asked]
    async with asyncio.timeout(60):
        while len(await engine.calls()) + sum(call.done() for call in calls) < 6:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    await other.kill()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    cut = [body for body, answer in zip(asked, answers, strict=True) if isinstance(answer, Exception)]
    assert len(cut) >= 2, answers  # the model may end a call by itself before
    statuses = await asyncio.gather(*(run.post("/v1/chat/completions", body) for body in cut[1:]))
    assert {status for status, _, _ in statuses} == {200}
    await run.publish("harness", finished())  # nobody asks for the first one again
    async with asyncio.timeout(30):
        while len(records := await run.records()) < 6:
            await asyncio.sleep(0.1)
    tree = await run_tree(run, "g000001x00")
    assert sorted(node.discarded for node in tree.nodes.values()) == [False] * 5 + [True]
    assert all(r.versions[-1].end == len(r.output_ids) // 4 for r in records)
    for call, node in tree.nodes.items():
        ids, generated = tree.ids(call), tree.generated(call)
        expected = forward_logprobs(model[1], ids)
        np.testing.assert_allclose(generated.logprobs[1:][generated.mask[1:]], expected[generated.mask[1:]], atol=1e-4)
        assert len(node.output_ids) > 0
    assert await engine.generated_tokens() - before == sum(len(r.output_ids) // 4 for r in records)


async def test_prompts_up_to_the_limit_are_served_and_longer_ones_refused(world, model):
    run, _ = world
    await run.execution(sampling=Sampling(temperature=1.0, max_new_tokens=50))
    renderer = load(str(model[0]))
    short = len(renderer.fresh((Message("user", " a" * 1000),), ()))
    words = 1000 + CONTEXT - 8 - 1 - short
    assert len(renderer.fresh((Message("user", " a" * words),), ())) == CONTEXT - 8 - 1
    for extra, expected in ((0, 200), (1, 400)):
        body = {"model": "m", "messages": [{"role": "user", "content": " a" * (words + extra)}]}
        status, answer, _ = await run.post("/v1/chat/completions", body)
        assert status == expected, answer
    (record,) = await run.records()
    assert (len(record.output_ids) // 4, record.finish_reason) in ((1, "length"), (1, "stop"))


async def run_tree(run, execution):
    from shared.tree import Tree

    tree = Tree()
    for record in await run.records():
        if record.execution == execution:
            tree.add(record)
    return tree
