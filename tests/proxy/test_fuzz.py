"""Malformed bodies: each gets an answer of its dialect, none a 500, and each reply has exactly one record.

The long run (100,000 bodies) is `python -m benchmarks.proxy_fuzz 100000`."""

import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.proxy_fuzz import SEEDS, damaged, fuzz, mutated
from services.proxy.bodies import decode_json
from services.proxy.dialects import anthropic, openai_chat, openai_responses
from services.proxy.dialects.base import ApiError, Request

DIALECTS = {
    "/v1/chat/completions": openai_chat,
    "/v1/messages": anthropic,
    "/v1/responses": openai_responses,
}


def answered(work: Callable[[], Any]) -> Any:
    """What `work` gives, or the ApiError that it raises; anything else that it raises is a fault."""
    try:
        return work()
    except ApiError as error:
        return error


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(DIALECTS)), st.integers(0, 2**32), values, st.data())
def test_a_dialect_reads_a_body_or_says_what_is_wrong(path, seed, value, data):
    body = mutated(random.Random(seed), dict(SEEDS)[path])
    if isinstance(body, dict) and body and data.draw(st.booleans()):
        body = body | {data.draw(st.sampled_from(sorted(body))): value}
    dialect = DIALECTS[path]
    outcome = answered(lambda: dialect.parse(body, {}))
    if isinstance(outcome, ApiError):
        assert 400 <= outcome.status < 500
        assert dialect.error(outcome)
    else:
        assert isinstance(outcome, Request)
        assert outcome.messages
        hash(outcome.messages)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.integers(0, 2**32).map(lambda n: damaged(random.Random(n))[1])))
def test_bytes_are_json_or_refused(data):
    outcome = answered(lambda: decode_json(data))
    assert not isinstance(outcome, ApiError) or outcome.status == 400


async def test_a_thousand_damaged_bodies_through_the_whole_application():
    answers = await fuzz(1000, seed=7)
    assert set(answers) <= {200, 400}
    assert answers[200] > 50
