"""Calls in flight as the stream tells them, and putting together what engines kept of one."""

import base64

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.proxy.core import ProxyCore
from services.proxy.flights import Flight, Flights
from services.proxy.takeover import put_together
from shared import events as ev
from shared.codec import pack_floats, pack_ids, unpack_floats, unpack_ids
from tests.proxy.support import EXECUTION

CALL = f"{EXECUTION}a1c0001"
PROMPT = [7, 8, 9]
PROXIES = ("a", "b", "c")


def begun(proxy="a", take=0, call=CALL, request="r"):
    return ev.ModelCallBegun(
        call=call,
        execution=EXECUTION,
        attempt=1,
        proxy=proxy,
        incarnation=f"i{proxy}",
        take=take,
        parent="",
        keep=-1,
        call_class="main_task",
        prompt_tokens=len(PROMPT),
        sampling=ev.Sampling(max_new_tokens=100),
        request=request,
    )


def progressed(take, start, ids):
    return ev.ModelCallProgressed(
        call=CALL,
        execution=EXECUTION,
        attempt=1,
        take=take,
        start=start,
        output_ids=pack_ids(ids),
        output_logprobs=pack_floats([-float(i) for i in ids]),
        versions=(ev.VersionSpan(1, 0, start + len(ids)),),
    )


def dropped():
    return ev.ModelCallDropped(call=CALL, execution=EXECUTION, attempt=1, tokens=0, reason="")


def output_of(flight):
    return unpack_ids(flight.ids).tolist()


EVENTS = st.lists(
    st.one_of(
        st.builds(begun, st.sampled_from(PROXIES), st.integers(0, 3)),
        st.builds(progressed, st.integers(0, 3), st.integers(0, 6), st.lists(st.integers(0, 9), max_size=4)),
        st.just(ev.ModelCallLeft(call=CALL, execution=EXECUTION, attempt=1)),
        st.just(dropped()),
    ),
    max_size=20,
)


@given(EVENTS)
def test_a_flight_has_one_owner_and_an_output_without_gaps_whatever_is_said(events):
    core = ProxyCore()
    owner, output = None, []
    for i, event in enumerate(events):
        core.handle(event, float(i))
        match event:
            case ev.ModelCallBegun():
                next_take = 0 if owner is None else owner[1] + 1
                if event.take == next_take:
                    owner = (event.proxy, event.take)
            case ev.ModelCallProgressed() if owner is not None and event.take == owner[1]:
                if event.start <= len(output):
                    output = output[: event.start] + unpack_ids(event.output_ids).tolist()
            case ev.ModelCallDropped():
                owner, output = None, []
        flight = core.flights.find(EXECUTION, CALL)
        assert (flight is None) == (owner is None)
        if flight is not None:
            assert (flight.begun.proxy, flight.begun.take) == owner
            assert output_of(flight) == output
            assert len(flight.ids) == len(flight.logprobs)
    assert ProxyCore.restore(core.snapshot()).flights == core.flights


def test_numbers_of_calls_that_ever_began_are_remembered_and_forgotten_with_the_execution():
    flights = Flights()
    flights.handle(begun())
    flights.handle(dropped())
    assert flights.latest_number(EXECUTION, 1) == 1
    assert flights.latest_number(EXECUTION, 2) == 0
    flights.handle(
        ev.ExecutionAssessed(
            execution=EXECUTION,
            group="g",
            attempt=1,
            artifact="",
            branch="",
            status="scored",
            score=0.0,
            tries=1,
            seconds=0.0,
        )
    )
    assert flights == Flights()


def test_the_same_request_is_found_while_it_is_in_flight():
    flights = Flights()
    flights.handle(begun())
    flights.handle(begun(call=f"{EXECUTION}a1c0002", request="other"))
    assert [f.begun.call for f in flights.of_request(EXECUTION, 1, "r")] == [CALL]
    assert flights.of_request(EXECUTION, 2, "r") == []
    flights.handle(dropped())
    assert flights.of_request(EXECUTION, 1, "r") == []


def kept(before, ids, logprobs, finish, cell=0, version="v1"):
    """What an engine tells of a request that had `before` as the beginning of the output and generated `ids`."""
    rows = [[p, t, None] for p, t in zip(logprobs, ids, strict=True)]
    meta = {
        "output_token_logprobs": rows,
        "output_token_logprobs_length": len(rows),
        "finish_reason": {"type": finish},
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
    }
    prompt = base64.b64encode(np.asarray(PROMPT + before, "<i4").tobytes()).decode()
    return {"rid": "x-1", "prompt": prompt, "meta_info": meta, "cell": cell}


@given(st.data())
def test_output_is_put_together_with_each_token_once(data):
    ids = data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=30))
    logprobs = [-i / 8 for i in range(len(ids))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=3)) | {0})
    ends = [*cuts[1:], len(ids)]
    finished = data.draw(st.booleans())
    tries = [
        kept(
            ids[:a], ids[a:b], logprobs[a:b], "stop" if finished and b == len(ids) else "abort", cell=n, version=f"v{n}"
        )
        for n, (a, b) in enumerate(zip(cuts, ends, strict=True))
    ]
    noted = data.draw(st.integers(0, len(ids)))
    flight = Flight(
        begun(), pack_ids(ids[:noted]), pack_floats(logprobs[:noted]), (ev.VersionSpan(9, 0, noted),) if noted else ()
    )
    missing = data.draw(st.integers(-1, len(tries) - 1))  # an engine that is gone
    if missing >= 0 and ends[missing] > noted:
        left = put_together(flight, [t for n, t in enumerate(tries) if n != missing])
        assert left.generation.ids == ids[: max(noted, cuts[missing])]
        assert not left.generation.finish
    else:
        left = put_together(flight, data.draw(st.permutations(tries)))
        assert left.generation.ids == ids
        assert left.generation.finish == ("stop" if finished else "")
        assert left.generation.cell == (len(tries) - 1 if noted < len(ids) else -1)
    n = len(left.generation.ids)
    assert left.generation.logprobs == logprobs[:n]
    assert [s.start for s in left.generation.spans] + [n] == [0] + [s.end for s in left.generation.spans]
    assert left.prompt is None or left.prompt.tolist() == PROMPT
    assert unpack_floats(pack_floats(left.generation.logprobs)).tolist() == logprobs[:n]
