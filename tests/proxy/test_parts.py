"""Prompts that are too long for one event, and that a match costs new messages only."""

import numpy as np

from services.proxy import canonical
from services.proxy.context import Contexts
from services.proxy.core import ProxyCore
from services.proxy.dialects.base import Message
from services.proxy.generation import Generation
from services.proxy.plans import Plan
from services.proxy.recorder import ROOM_FOR_FIELDS, Recorder
from shared.codec import encode
from shared.events import ExecutionPlaced, Sampling
from tests.proxy.test_matching import EXECUTION, record


async def test_an_oversized_prompt_is_recorded_in_parts_and_reads_as_one():
    core, stream = ProxyCore(), []
    core.handle(
        ExecutionPlaced(execution=EXECUTION, group="g", task="t", cell=0, sampling=Sampling(), policy_version=0), 0.0
    )

    async def publish(event, _msg_id):
        stream.append(event)
        return len(stream)

    largest = ROOM_FOR_FIELDS + 400
    recorder = Recorder(core, publish, largest=largest)
    for number, parent in ((1, ""), (2, f"{EXECUTION}a1c0001")):
        ids = np.arange(250, dtype=np.int32) + 1000 * number
        plan = Plan(
            call=f"{EXECUTION}a1c{number:04d}",
            execution=EXECUTION,
            attempt=1,
            parent=parent,
            keep=-1,
            call_class="main_task",
            input_ids=ids,
            sampling=Sampling(),
            request=f"{number:032x}",
            opening="",
            diverged=False,
            dialect="",
        )
        generation = Generation((), 9, ids=[7, 8], logprobs=[-1.0, -2.0], finish="stop")
        await recorder.record(plan, generation, context=f"{number + 8:032x}", discarded=False, seconds=0.0)
    assert len(stream) == 6
    assert all(len(encode(event)) <= largest for event in stream)
    contexts = core.executions[EXECUTION].contexts
    expected = [*range(1000, 1250), 7, 8, *range(2000, 2250), 7, 8]
    assert contexts.tree.ids(f"{EXECUTION}a1c0002").tolist() == expected
    assert contexts.latest_number == 2
    assert contexts.tree.leaves() == [f"{EXECUTION}a1c0002"]
    assert contexts.by_request(f"{1:032x}").call == f"{EXECUTION}a1c0001"


def test_old_messages_are_not_put_into_canonical_form_again(monkeypatch):
    contexts, written = Contexts(EXECUTION), []
    original = canonical.message
    monkeypatch.setattr(canonical, "message", lambda m, *a, **k: written.append(m) or original(m, *a, **k))
    messages: tuple[Message, ...] = (Message("user", "x"),)
    for number in range(1, 30):
        match = contexts.match(messages, (), lambda call: ())
        said = Message("assistant", f"said {number}")
        contexts.add(record(number, match.call, match.request, said))
        written.clear()
        messages = (*messages, said, Message("user", f"y {number}"))
        assert contexts.match(messages, (), lambda call: ()).call
        assert len(written) == 2 or number == 1  # the first record begins the attempt: nothing before it counts
