"""Calls that are cut because their cell leaves rollout, and calls that are cancelled: no token is lost or repeated."""

import asyncio
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.proxy.core import ProxyCore
from services.proxy.handover import Continued, Cuts
from shared import events as ev
from shared.codec import unpack_floats, unpack_ids
from shared.config import TelemetryConfig
from shared.telemetry import Telemetry, Trail
from tests.proxy.support import EXECUTION, ScriptedEngine, Turn

USER = {"role": "user", "content": "write the file"}
TEXT = "one two three result output error task<|im_end|>"
RID = f"{EXECUTION}a1c0001-1"


def cut(lease: str = "", rid: str = RID, to_cell: int = 1) -> ev.CallCut:
    call, execution = rid.rpartition("-")[0], EXECUTION
    fields = {"rid": rid, "call": call, "execution": execution, "lease": lease}
    return ev.CallCut(**fields, from_cell=0, to_cell=to_cell, incarnation="i0", order=1)


def adopted(outcome: str, rid: str = RID, extra_key: str = "") -> ev.CallAdopted:
    fields = {"rid": rid, "call": rid.rpartition("-")[0], "execution": EXECUTION, "extra_key": extra_key}
    return ev.CallAdopted(**fields, cell=1, incarnation="i1", lease="l", outcome=outcome)


def moved(to_cell: int = 1) -> ev.ExecutionMoved:
    return ev.ExecutionMoved(execution=EXECUTION, from_cell=0, to_cell=to_cell, reason="test")


async def live_at(engine: ScriptedEngine) -> None:
    while not engine.requests:
        await asyncio.sleep(0.005)


def whole(record: ev.ModelCallRecorded, ids: list[int]) -> None:
    """Every token once, with what its engine said of it."""
    assert unpack_ids(record.output_ids).tolist() == ids
    expected = [-0.5 - i / 100 for i in [*range(5), *range(len(ids) - 5)]]
    np.testing.assert_array_equal(unpack_floats(record.output_logprobs), np.asarray(expected, np.float32))
    assert [(s.version, s.start, s.end) for s in record.versions] == [(3, 0, 5), (4, 5, len(ids))]


@pytest.fixture
def ids(tokenizer):
    return tokenizer.encode(TEXT, add_special_tokens=False)


def second(tokenizer, ids) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, default=Turn(tokenizer.decode(ids[5:]), versions=(("v4", 0, 99),)))


async def test_a_cut_call_waits_for_its_pages_and_goes_on_there(world, tokenizer, ids):
    run, engine = world
    engine.turns = [Turn(TEXT, abort_after=5)]
    async with second(tokenizer, ids).running() as other:
        await run.cell(1, other.url, version=4)
        call = asyncio.create_task(run.chat([USER]))
        await live_at(engine)
        await run.publish("scheduler", moved())
        await run.publish("cell_agent", cut(lease="l"))
        await asyncio.sleep(0.4)
        assert not other.requests
        await run.publish("cell_agent", adopted("pages", extra_key="ns"))
        assert (await call)["content"] == TEXT.removesuffix("<|im_end|>")
        (request,) = other.requests
        assert request["input_ids"] == engine.requests[0]["input_ids"] + ids[:5]
        assert request["extra_key"] == "ns"
    (record,) = await run.records()
    whole(record, ids)
    assert record.queued_s > 0.3


@pytest.mark.parametrize("word", ["no lease", "failed", "moved on"])
async def test_a_call_whose_pages_do_not_come_goes_on_at_once(world, tokenizer, ids, word):
    run, engine = world
    engine.turns = [Turn(TEXT, abort_after=5)]
    async with second(tokenizer, ids).running() as other:
        await run.cell(1, other.url, version=4)
        await run.cell(2, other.url, version=4)
        call = asyncio.create_task(run.chat([USER]))
        await live_at(engine)
        await run.publish("scheduler", moved())
        await run.publish("cell_agent", cut(lease="" if word == "no lease" else "l"))
        if word == "failed":
            await run.publish("cell_agent", adopted("failed"))
        elif word == "moved on":
            await run.publish("scheduler", moved(2))
        began = time.monotonic()
        await call
        assert time.monotonic() - began < 1.5
        assert "extra_key" not in other.requests[0]
    whole((await run.records())[0], ids)


async def test_a_cut_of_which_nobody_tells_delays_the_call_a_little(world, tokenizer, ids):
    run, engine = world
    engine.turns = [Turn(TEXT, abort_after=5), Turn(tokenizer.decode(ids[5:]), versions=(("v4", 0, 99),))]
    await run.chat([USER])
    (record,) = await run.records()
    whole(record, ids)
    assert 1.5 < record.queued_s < 4


async def test_a_call_can_be_cut_again_and_again(world, tokenizer, ids):
    run, engine = world

    def one_token_more(body) -> Turn:
        rest = tokenizer.decode(ids[len(body["input_ids"]) - len(engine.requests[0]["input_ids"]) :])
        return Turn(rest, abort_after=1) if len(rest) > len("<|im_end|>") else Turn(rest)

    engine.choose = one_token_more
    call = asyncio.create_task(run.chat([USER]))
    for tries in range(1, len(ids)):
        await run.publish("cell_agent", cut(rid=f"{EXECUTION}a1c0001-{tries}"))
    assert (await call)["content"] == TEXT.removesuffix("<|im_end|>")
    (record,) = await run.records()
    assert unpack_ids(record.output_ids).tolist() == ids
    assert len(engine.requests) == len(ids)


def finished() -> ev.ExecutionFinished:
    fields = {"execution": EXECUTION, "group": "g000001", "task": "t", "attempt": 1, "ending": "harness_timeout"}
    return ev.ExecutionFinished(**fields, exit_code=None, artifact=None, seconds=1.0, cpu_seconds=1.0)


def assessed() -> ev.ExecutionAssessed:
    fields = {
        "execution": EXECUTION,
        "group": "g000001",
        "attempt": 1,
        "artifact": "",
        "branch": "",
        "status": "scored",
    }
    return ev.ExecutionAssessed(**fields, score=0.0, tries=1, seconds=0.1)


async def test_the_end_of_the_execution_records_what_its_engine_had(world, ids):
    run, engine = world
    engine.turns = [Turn(TEXT, pause_s=0.3)]
    call = asyncio.create_task(run.post("/v1/chat/completions", {"model": "m", "messages": [USER]}))
    await live_at(engine)
    await asyncio.sleep(0.1)  # three tokens are reported
    await run.publish("harness", finished())
    await run.publish("evaluator", assessed())  # the engine needs longer than that for its last word
    assert (await call)[0] == 410
    while not (records := await run.records()):
        await asyncio.sleep(0.05)
    assert engine.aborted == [RID]
    (record,) = records
    assert unpack_ids(record.output_ids).tolist() == ids[:6], "those that came with the abort as well"
    assert (record.finish_reason, record.discarded) == ("abort", True)


async def test_a_proxy_that_stops_with_its_run_records_what_its_engines_had(world, ids):
    run, engine = world
    engine.turns = [Turn(TEXT, pause_s=0.3)]
    call = asyncio.create_task(run.post("/v1/chat/completions", {"model": "m", "messages": [USER]}))
    await live_at(engine)
    await asyncio.sleep(0.1)
    await run.publish("control", ev.StopRequested(reason="test"))
    await asyncio.sleep(0.1)
    await run.stop_proxy()
    assert (await call)[0] == 503
    (record,) = await run.records()
    assert unpack_ids(record.output_ids).tolist() == ids[:6]
    assert (record.finish_reason, record.discarded) == ("abort", True)


EVENTS = st.lists(
    st.sampled_from(
        [cut(), cut("l"), cut("l", f"{EXECUTION}a1c0002-1"), adopted("pages"), adopted("failed"), moved(1), moved(2)]
    ),
    max_size=12,
)


@given(EVENTS)
def test_what_is_known_of_cuts_is_a_function_of_the_events_and_ends_with_the_execution(events):
    core = ProxyCore()
    for i, event in enumerate(events):
        core.handle(event, float(i))
    again = ProxyCore.restore(core.snapshot())
    assert again.cuts == core.cuts
    found = core.cuts.find(EXECUTION, RID)
    told = [e for e in events if isinstance(e, ev.CallCut) and e.rid == RID]
    assert (found is None) == (not told)
    if told and not told[-1].lease:
        assert found is not None
        assert found.settled
    for event in (finished(), adopted("pages")):
        core.handle(event, 100.0)
    assert core.cuts == Cuts()


def test_the_span_of_a_moved_call_is_in_the_trace_of_the_change_of_role(tmp_path):
    telemetry, trail = Telemetry.start("proxy", tmp_path, TelemetryConfig()), Trail()
    headers: dict[str, str] = {}
    with telemetry.span("adopt call"):
        telemetry.inject(headers)
    continued = Continued(telemetry, trail)
    continued.token()  # before it was cut
    continued.cut(RID)
    trail.note(RID, headers)
    time.sleep(0.05)
    continued.token()
    continued.token()
    telemetry.shutdown()
    lines = (tmp_path / "traces-proxy.jsonl").read_text().splitlines()
    scopes = [scope for line in lines for r in json.loads(line)["resourceSpans"] for scope in r["scopeSpans"]]
    spans = {span["name"]: span for scope in scopes for span in scope["spans"]}
    assert spans.keys() == {"adopt call", "continue call"}
    adopt, span = spans["adopt call"], spans["continue call"]
    assert (span["traceId"], span["parentSpanId"]) == (adopt["traceId"], adopt["spanId"])
    assert 0.04 < (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9 < 2
