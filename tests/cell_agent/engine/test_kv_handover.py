"""Live hand-over between two real SGLang engines on a tiny random model, and what happens when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import uuid
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest

from services.cell_agent.engine import kv_client
from services.cell_agent.engine.kv import pulse
from services.cell_agent.engine.kv.errors import KvRefused, KvStale, KvTransferFailed, KvUnreachable
from services.cell_agent.engine.kv.wire import Lease, Status
from services.cell_agent.engine.kv_client import KvClient
from services.cell_agent.engine.server import Engine, EngineSpec, members_of
from tests.cell_agent.trainer.forest import Sizes, write_model

SECRET = "the secret of this run"
PAGE = 16
VOCAB = Sizes().vocab


def spec(model: Path, cell: int, stale: str) -> EngineSpec:
    return EngineSpec(
        cell=cell,
        model_path=str(model),
        dtype="float32",
        context=4096,
        capacity=8,
        tokens=16384,
        page=PAGE,
        threads=1,
        device="cpu",
        seed=1 + cell,
        kv_secret=SECRET,
        kv_stale=stale,
    )


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(4, VOCAB) for _ in range(length)]


async def post(url: str, path: str, body: dict) -> dict:
    async with aiohttp.ClientSession() as http:
        async with http.post(url + path, json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            return json.loads(text) if text.startswith("{") else {}


class Call:
    """A streamed call; `gaps`: seconds between its events."""

    def __init__(self, url: str, ids: list[int], tokens: int, extra_key: str = "") -> None:
        self.ids, self.rid, self.output, self.gaps, self.meta = ids, uuid.uuid4().hex, [], [], {}
        self.started = asyncio.Event()
        self._body = {
            "input_ids": ids,
            "rid": self.rid,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        } | ({"extra_key": extra_key} if extra_key else {})
        self.done = asyncio.create_task(self._run(url))

    async def _run(self, url: str) -> list[int]:
        last = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=280)) as http:
            async with http.post(url + "/generate", json=self._body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        self.gaps.append(now - last)
                        last = now
                        chunk = json.loads(line[6:])
                        self.output, self.meta = chunk["output_ids"], chunk["meta_info"]
                        if len(self.output) >= 20:
                            self.started.set()
        self.started.set()
        return self.output

    @property
    def logprobs(self) -> list[float]:
        return [value for value, _, _ in self.meta["output_token_logprobs"]]


async def goes_on(whole: Call, call: Call, url: str, extra_key: str = "") -> Call:
    """The rest of `call` at `url`: with what it had, the same tokens and log-probabilities as the unmoved `whole`."""
    ids = call.ids + call.output
    rest = Call(url, ids, len(whole.output) - len(call.output), extra_key)
    assert call.output + await rest.done == whole.output
    assert call.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    return rest


async def at_rest(kv: KvClient, url: str, within_s: float = 20.0) -> Status:
    deadline = time.monotonic() + within_s
    while not (status := await kv.status(url)).at_rest:
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.1)
    return status


async def cut(kv: KvClient, source: Engine, call: Call, ttl_s: float = 60.0) -> Lease | None:
    """Lease of a call that has begun; its output is complete."""
    await call.started.wait()
    lease = await kv.cut(source.url, call.rid, uuid.uuid4().hex, ttl_s)
    await call.done
    return lease


async def stopped(kv: KvClient, source: Engine, ids: list[int], tokens: int = 500, ttl_s: float = 60.0):
    """A call that was cut before its end, and its lease. On a busy machine one may end before the cut arrives."""
    for _ in range(5):
        call = Call(source.url, ids, tokens)
        lease = await cut(kv, source, call, ttl_s)
        if lease is not None and call.meta["finish_reason"]["type"] == "abort":
            return call, lease
        if lease is not None:
            await kv.drop(source.url, lease.id)
    raise AssertionError("every call ended before it could be cut")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_live_calls_change_engines(tmp_path: Path) -> None:
    """One pair of engines for all of it: starting them takes longest. The source drops stale pages, the other keeps."""
    model = write_model(tmp_path / "model")
    a, b = await asyncio.gather(
        Engine.start(spec(model, 0, "drop"), tmp_path / "a.log"),
        Engine.start(spec(model, 1, "keep"), tmp_path / "b.log"),
    )
    kv = KvClient(SECRET, always=True)
    try:
        await a_moved_call_goes_on_as_if_nothing_had_happened(kv, a, b)
        await calls_that_share_a_prompt_move_together(kv, a, b)
        await a_waiting_call_moves_with_what_is_cached_of_it(kv, a, b)
        await a_call_without_pages_has_no_lease(kv, a)
        await strangers_are_refused(a)
        await a_lease_that_ran_out_is_told_at_the_acknowledgement(kv, a, b)
        await a_flush_ends_leases(kv, a)
        await the_faster_way_is_chosen_by_what_was_measured(a, b)
        await pages_of_other_weights_are_never_passed_off_as_fresh(kv, a, b)
        await new_calls_never_hit_pages_of_older_weights(kv, b)
        await a_call_that_is_recomputed_under_new_weights_is_of_the_new_version(kv, a, b)
        await a_stopped_source_stalls_nobody(kv, a, b)
        await a_source_that_stops_during_the_transfer_stalls_nobody(kv, a, b)
        await a_killed_destination_frees_the_source(kv, a, b)
    finally:
        await kv.close()
        await a.stop()
        await b.stop()
    assert members_of(a.pid) == []


async def a_moved_call_goes_on_as_if_nothing_had_happened(kv: KvClient, a: Engine, b: Engine) -> None:
    for length in (200, 1500):
        ids = prompt(length, length)
        whole = Call(a.url, ids, 500)
        await whole.done
        call, lease = await stopped(kv, a, ids)
        have = ids + call.output
        assert list(lease.tokens) == have[: len(lease.tokens)]
        assert len(have) - 1 - PAGE < len(lease.tokens) <= len(have)
        moved = await kv.move(a.url, b.url, lease)
        assert moved.reason == ""
        assert moved.tokens == len(lease.tokens)
        rest = await goes_on(whole, call, b.url, moved.extra_key)
        assert rest.meta["cached_tokens"] == len(lease.tokens)
        share = rest.meta["cached_tokens"] / ((len(have) - 1) // PAGE * PAGE)  # the newest token has no KV yet
        assert share == 1.0
        print(
            f"MOVED {len(have)} tokens, {moved.nbytes} bytes in {moved.seconds * 1e3:.0f} ms, share {share:.4f},",
            f"first token {rest.gaps[0] * 1e3:.0f} ms, steps",
            {k: round(v * 1e3, 1) for k, v in moved.steps.items()},
        )
        status = await at_rest(kv, b.url)
        assert status.counts["used"] >= 1
        await at_rest(kv, a.url)


async def calls_that_share_a_prompt_move_together(kv: KvClient, a: Engine, b: Engine) -> None:
    shared = prompt(7, 160)
    prompts = [shared + prompt(70 + i, 24) for i in range(3)]
    wholes = [Call(a.url, ids, 500) for ids in prompts]
    await asyncio.gather(*(whole.done for whole in wholes))
    calls, leases = zip(*await asyncio.gather(*(stopped(kv, a, ids) for ids in prompts)), strict=True)
    assert len((await kv.status(a.url)).leases) == 3
    results = await asyncio.gather(*(kv.move(a.url, b.url, lease) for lease in leases))
    assert [r.reason for r in results] == [""] * 3
    for call, whole, lease in zip(calls, wholes, leases, strict=True):
        rest = await goes_on(whole, call, b.url)
        assert rest.meta["cached_tokens"] == len(lease.tokens)
    await at_rest(kv, a.url)
    await at_rest(kv, b.url)


async def a_waiting_call_moves_with_what_is_cached_of_it(kv: KvClient, a: Engine, b: Engine) -> None:
    """Retracted calls hold nothing themselves; the pages of their prompt may still be in the cache."""
    ids = prompt(9, 200)
    whole = Call(a.url, ids, 1200)
    await whole.done
    call = Call(a.url, ids, 1200)
    await call.started.wait()
    await post(a.url, "/pause_generation", {"mode": "retract"})
    lease = await cut(kv, a, call)
    await post(a.url, "/continue_generation", {})
    assert lease is not None
    assert len(lease.tokens) >= len(ids) // PAGE * PAGE
    moved = await kv.move(a.url, b.url, lease)
    assert moved.reason == ""
    rest = await goes_on(whole, call, b.url)
    assert rest.meta["cached_tokens"] >= len(lease.tokens)
    await at_rest(kv, a.url)
    await at_rest(kv, b.url)


async def a_call_without_pages_has_no_lease(kv: KvClient, a: Engine) -> None:
    assert await kv.cut(a.url, "nobody", "L-nobody", 5.0) is None
    ended = Call(a.url, prompt(3, 20), 4)
    await ended.done
    assert await kv.cut(a.url, ended.rid, "L-ended", 5.0) is None
    await at_rest(kv, a.url)


async def strangers_are_refused(a: Engine) -> None:
    stranger = KvClient("another secret")
    for command in (stranger.status(a.url), stranger.cut(a.url, "x", "L", 1.0)):
        with pytest.raises(KvRefused, match="secret"):
            await command
    await stranger.close()


async def a_lease_that_ran_out_is_told_at_the_acknowledgement(kv: KvClient, a: Engine, b: Engine) -> None:
    _, lease = await stopped(kv, a, prompt(11, 300), ttl_s=2.0)
    await kv.adopt(b.url, lease)
    await asyncio.sleep(4.0)
    assert not await kv.acknowledge(a.url, lease.id)
    assert (await at_rest(kv, a.url)).counts["expired"] >= 1
    await kv.drop(b.url, lease.id)
    with pytest.raises(KvTransferFailed, match="absent"):
        await kv.commit(b.url, lease.id)
    await at_rest(kv, b.url)
    moved = await kv.move(a.url, b.url, lease)  # nobody can read the pages any more
    assert moved.tokens == 0
    assert moved.reason
    await at_rest(kv, b.url)


async def a_flush_ends_leases(kv: KvClient, a: Engine) -> None:
    _, lease = await stopped(kv, a, prompt(12, 300))
    await post(a.url, "/flush_cache", {})
    assert not await kv.acknowledge(a.url, lease.id)
    await at_rest(kv, a.url)


async def the_faster_way_is_chosen_by_what_was_measured(a: Engine, b: Engine) -> None:
    """A link that turned out slow is not used, but tried again at times; where computing is slow, pages move."""
    kv = KvClient(SECRET)
    await Call(b.url, prompt(15, 500), 1).done  # an engine that has computed no prompt yet has no rate to tell
    _, first = await stopped(kv, a, prompt(13, 1000))
    assert (await kv.move(a.url, b.url, first)).tokens == len(first.tokens), "nothing is measured yet"
    await kv.drop(b.url, first.id)
    measured = kv.rates
    print("measured", measured)
    assert measured.transfer_bytes_s is not None
    assert measured.prefill_tokens_s is not None
    slow_link, slow_engine = measured, measured
    for _ in range(30):
        slow_link = slow_link.after_transfer(1000, 1.0, 1.0)
        slow_engine = slow_engine.after_prefill(1, 1.0)
    for declined, rates, reason in (
        (0, slow_link, "recompute_faster"),
        (0, slow_engine, ""),
        (kv_client.DECLINED_MOST, slow_link, ""),
    ):
        _, lease = await stopped(kv, a, prompt(14, 300))
        kv.rates, kv._declined = rates, declined
        moved = await kv.move(a.url, b.url, lease)
        assert (moved.reason, moved.tokens > 0) == (reason, not reason)
        await kv.drop(b.url, lease.id)
    for engine in (a, b):
        await at_rest(kv, engine.url)
    await kv.close()


async def pages_of_other_weights_are_never_passed_off_as_fresh(kv: KvClient, a: Engine, b: Engine) -> None:
    """The version changes under a call on `b`, which keeps its pages; `a` has the new version and drops stale ones."""
    ids = prompt(21, 200)
    whole = Call(b.url, ids, 1500)
    await whole.done
    call = Call(b.url, ids, 1500)
    await call.started.wait()
    for url in (a.url, b.url):
        await post(url, "/update_weight_version", {"new_version": "1", "abort_all_requests": False})
    lease = await cut(kv, b, call)
    assert (lease.oldest, lease.newest) == ("0", "1")
    with pytest.raises(KvStale, match=r"0\.\.1"):
        await kv.adopt(a.url, lease)
    await at_rest(kv, a.url)
    moved = await kv.move(b.url, b.url, lease)  # to an engine that keeps: here to itself
    assert moved.reason == ""
    assert moved.extra_key
    have = ids + call.output
    other = Call(b.url, have, 8)
    await other.done
    assert other.meta["cached_tokens"] == 0
    rest = await goes_on(whole, call, b.url, moved.extra_key)
    assert rest.meta["cached_tokens"] == len(lease.tokens)
    await at_rest(kv, b.url)


async def new_calls_never_hit_pages_of_older_weights(kv: KvClient, b: Engine) -> None:
    ids = prompt(22, 200)
    await Call(b.url, ids, 4).done
    again = Call(b.url, ids, 4)
    await again.done
    assert again.meta["cached_tokens"] > 0
    await post(b.url, "/update_weight_version", {"new_version": "2", "abort_all_requests": False})
    after = Call(b.url, ids, 4)
    await after.done
    assert after.meta["cached_tokens"] == 0


async def a_call_that_is_recomputed_under_new_weights_is_of_the_new_version(kv: KvClient, a: Engine, b: Engine) -> None:
    """What trainer/engine_push.py does at a refit, without the weights."""
    call = Call(b.url, prompt(25, 200), 2000)
    await call.started.wait()
    await post(b.url, "/pause_generation", {"mode": "retract"})
    for url in (a.url, b.url):
        await post(url, "/update_weight_version", {"new_version": "3", "abort_all_requests": False})
    await post(b.url, "/flush_cache", {})
    made = len(call.output)
    await post(b.url, "/continue_generation", {})
    while len(call.output) < made + 5:  # until it is computed again, it has no pages
        assert not call.done.done()
        await asyncio.sleep(0.01)
    lease = await cut(kv, b, call)
    assert (lease.oldest, lease.newest) == ("3", "3")
    assert len(lease.tokens) > 200
    moved = await kv.move(b.url, a.url, lease)
    assert moved.reason == ""
    following = Call(a.url, call.ids + call.output, 4)
    await following.done
    assert following.meta["cached_tokens"] == len(lease.tokens)
    await at_rest(kv, a.url)
    await at_rest(kv, b.url)


async def a_stopped_source_stalls_nobody(kv: KvClient, a: Engine, b: Engine) -> None:
    _, lease = await stopped(kv, a, prompt(31, 1200))
    other = Call(b.url, prompt(32, 50), 4000)
    await other.started.wait()
    before = list(other.gaps)
    os.killpg(a.pid, signal.SIGSTOP)
    started = time.monotonic()
    moved = await kv.move(a.url, b.url, lease, timeout_s=20.0)
    waited = time.monotonic() - started
    during = other.gaps[len(before) :]
    os.killpg(a.pid, signal.SIGCONT)
    assert moved.tokens == 0
    assert waited < 8.0
    assert len(during) > 10
    assert max(during) < 1.0
    print(
        f"STOPPED source noticed after {waited:.1f} s; gaps: before {max(before[2:]):.3f} s, during {max(during):.3f} s"
    )
    await post(b.url, "/abort_request", {"rid": other.rid})
    await other.done
    await at_rest(kv, b.url)
    await at_rest(kv, a.url)


async def a_source_that_stops_during_the_transfer_stalls_nobody(kv: KvClient, a: Engine, b: Engine) -> None:
    """A scripted pulse answers for the stopped source, so that the destination's transfer itself hangs."""
    _, lease = await stopped(kv, a, prompt(33, 1200), ttl_s=20.0)
    answering = pulse.PulseServer("127.0.0.1", SECRET, lease.ranks[0].session)
    hanging = msgspec.structs.replace(
        lease, ranks=tuple(msgspec.structs.replace(r, pulse=answering.address) for r in lease.ranks)
    )
    other = Call(b.url, prompt(34, 50), 4000)
    await other.started.wait()
    before = len(other.gaps)
    os.killpg(a.pid, signal.SIGSTOP)
    moved = await kv.move(a.url, b.url, hanging, timeout_s=2.0)
    during = other.gaps[before:]
    assert moved.tokens == 0
    assert "did not arrive" in moved.reason
    assert max(during) < 1.0
    await post(b.url, "/abort_request", {"rid": other.rid})
    await other.done
    status = await kv.status(b.url)
    assert status.abandoned == (lease.id,)  # its slots may still be written
    assert status.in_flight_tokens >= 1200
    await post(b.url, "/flush_cache", {})
    assert (await kv.status(b.url)).in_flight_tokens == status.in_flight_tokens
    print(f"HANGING transfer given up after {moved.seconds:.1f} s; longest gap meanwhile {max(during):.3f} s")
    await asyncio.sleep(6.0)  # the transfer has been given up, too
    assert (await kv.status(b.url)).abandoned == (lease.id,)
    os.killpg(a.pid, signal.SIGCONT)
    await at_rest(kv, b.url)
    answering.close()
    fills = [Call(b.url, prompt(50 + i, 3900), 20) for i in range(4)]  # 15,680 of 16,384 slots
    assert [len(await call.done) for call in fills] == [20] * 4
    await at_rest(kv, a.url, within_s=40.0)  # by its ttl, if the drop was lost while it was stopped


async def a_killed_destination_frees_the_source(kv: KvClient, a: Engine, b: Engine) -> None:
    _, lease = await stopped(kv, a, prompt(41, 300), ttl_s=4.0)
    await kv.adopt(b.url, lease)
    os.killpg(b.pid, signal.SIGKILL)
    with pytest.raises(KvUnreachable):
        await kv.commit(b.url, lease.id)
    await at_rest(kv, a.url)
    again = await Call(a.url, prompt(42, 100), 20).done
    assert len(again) == 20


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_every_rank_of_a_tensor_parallel_engine_moves_its_part(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # SGLang asks for a set of cores per rank
    model = write_model(tmp_path / "model")
    two = [spec(model, cell, "drop") for cell in (0, 1)]
    a, b = await asyncio.gather(*(Engine.start(replace(s, tensor_parallel=2), tmp_path / f"{s.cell}.log") for s in two))
    kv = KvClient(SECRET, always=True)
    try:
        assert (await kv.status(a.url)).ranks == 2
        await a_moved_call_goes_on_as_if_nothing_had_happened(kv, a, b)
        await calls_that_share_a_prompt_move_together(kv, a, b)
        await a_lease_that_ran_out_is_told_at_the_acknowledgement(kv, a, b)
    finally:
        await kv.close()
        await a.stop()
        await b.stop()
