"""Preparing micro-steps: each entry on exactly one context rank, and refusal of what contradicts itself."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cell_agent.trainer.microsteps import MicroStepError, prepare
from shared.microstep import MicroStep
from tests.cell_agent.trainer.forest import VOCAB, encode, random_step


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 100_000), st.integers(1, 4))
def test_every_entry_is_computed_by_one_rank_from_its_parent(seed: int, ranks: int) -> None:
    step = random_step("m", np.random.default_rng(seed))
    tokens = np.frombuffer(step.tokens, "<i4")
    wanted = sorted(
        zip(
            np.frombuffer(step.entry_logprob, "<f4").tolist(),
            tokens[np.frombuffer(step.entry_token, "<i4")].tolist(),
            np.frombuffer(step.entry_sequence, "<i4").tolist(),
            strict=True,
        )
    )
    found = []
    for rank in range(ranks):
        part = prepare(encode(step), VOCAB, ranks, rank)
        assert part.size == len(tokens)
        assert len(part.tokens) * ranks >= len(tokens)
        assert ((part.rows >= 0) & (part.rows < len(part.tokens))).all()
        found += zip(
            part.behaviour.tolist(), part.targets[part.entry_row].tolist(), part.sequences.of.tolist(), strict=True
        )
    assert sorted(found) == wanted


def change(step: MicroStep, **fields: object) -> bytes:
    return encode(msgspec.structs.replace(step, **fields))


def test_contradictions_are_refused() -> None:
    step = random_step("m", np.random.default_rng(1))
    entries = len(step.entry_token) // 4
    logprobs = np.frombuffer(step.entry_logprob, "<f4").copy()
    logprobs[0] = np.nan
    first_only = np.zeros(entries, "<i4").tobytes()
    cases = {
        "decoded": b"no micro-step",
        "vocabulary": change(step, tokens=(np.frombuffer(step.tokens, "<i4") + VOCAB).astype("<i4").tobytes()),
        "outside the tokens": change(step, entry_token=np.full(entries, 10_000, "<i4").tobytes()),
        "nothing predicts it": change(step, entry_token=first_only),
        "what the sequences say": change(step, entry_sequence=first_only),
        "finite": change(step, entry_logprob=logprobs.tobytes()),
        "log-probabilities": change(step, entry_logprob=logprobs[1:].tobytes()),
    }
    for message, payload in cases.items():
        with pytest.raises(MicroStepError, match=message):
            prepare(payload, VOCAB)


def test_a_token_trained_by_several_sequences_is_computed_once() -> None:
    for seed in range(50):
        step = random_step("m", np.random.default_rng(seed))
        entry_token = np.frombuffer(step.entry_token, "<i4")
        if len(set(entry_token)) < len(entry_token):
            part = prepare(encode(step), VOCAB)
            assert len(part.rows) == len(set(entry_token))
            assert len(part.entry_row) == len(entry_token)
            return
    raise AssertionError("no forest with a shared trained token in 50 draws")
