"""Weights from a real trainer into a real SGLang engine while a call runs there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from services.cell_agent.engine.server import Engine, EngineSpec
from services.cell_agent.trainer import engine_push, protocol
from services.cell_agent.trainer.engine_push import RefitError
from services.cell_agent.trainer.launcher import TrainerFailed
from services.cell_agent.transfer.weights import Snapshot
from tests.cell_agent.trainer import cells
from tests.cell_agent.trainer.forest import VOCAB, Sizes, random_step, run_config, write_model
from tests.cell_agent.trainer.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.megatron]

PROMPT = [(7 * i) % 90 + 3 for i in range(40)]


async def generate(url: str, ids: list[int], tokens: int) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def largest_error(reference: Reference, ids: list[int], answer: dict[str, Any], start: int = 0) -> float:
    """Between the engine's log-probabilities of its output from `start` on and the reference's."""
    whole = ids + answer["output_ids"]
    found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    with torch.no_grad():
        wanted = reference.logp(whole, list(range(len(ids) + start, len(whole)))).tolist()
    return float(np.abs(np.array(found[start:]) - wanted).max())


async def test_live_calls_survive_a_refit_and_no_old_cache_is_used(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", sizes=Sizes(vocab=VOCAB + 1))  # a vocabulary that the engine has to pad
    config = run_config(model, learning_rate=0.02)
    spec = EngineSpec(
        cell=0, model_path=str(model), dtype="float32", context=2048, capacity=4, tokens=4096, page=1, threads=1,
        device="cpu", seed=1,
    )  # fmt: skip
    starting = asyncio.create_task(Engine.start(spec, tmp_path / "engine.log"))
    async with cells.cell(config, tmp_path) as trainer:
        await cells.load(trainer, config)
        await cells.train(trainer, [random_step("m", np.random.default_rng(1))], 0)
        await cells.step(trainer, 1, 1)
        await cells.publish(trainer, 1)
        await trainer.call(protocol.Export(id=0, path=str(tmp_path / "new"), hf_path=str(model)))
        engine = await starting
        try:
            await refit_under_load(engine.url, trainer, Reference(model, config.training), tmp_path)
        finally:
            await engine.stop()


async def refit_under_load(url: str, trainer: Any, old: Reference, folder: Path) -> None:
    await generate(url, PROMPT, 4)
    warm = await generate(url, PROMPT, 4)
    assert warm["meta_info"]["cached_tokens"] > 0
    live = asyncio.create_task(generate(url, PROMPT, 900))
    await asyncio.sleep(0.7)
    done = await trainer.call(protocol.Refit(id=0, engine_url=url, version=1))
    assert done.metrics.keys() == {"copy_s", "pause_s", "load_s", "check_s", "resume_s"}
    print("refit", done.metrics)
    assert not live.done(), "the call should have been running during the refit"
    fresh = await generate(url, PROMPT, 8)
    answer = await live
    new = Reference(folder / "new", old.training)
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    switch = spans[1]["start"]
    assert 0 < switch < 900
    assert len(answer["output_ids"]) == 900
    before = dict(answer, output_ids=answer["output_ids"][:switch])
    before["meta_info"] = {"output_token_logprobs": answer["meta_info"]["output_token_logprobs"][:switch]}
    assert largest_error(old, PROMPT, before) < 1e-4
    assert largest_error(new, PROMPT, answer, switch) < 1e-4, "the call went on with old keys and values"
    assert largest_error(new, PROMPT, fresh) < 1e-4, "a new call used old keys and values"
    with pytest.raises(TrainerFailed, match="version 5"):
        await trainer.call(protocol.Refit(id=0, engine_url=url, version=5))
    nothing = Snapshot(6, torch.zeros(0, dtype=torch.uint8), (), "", 1, b"")
    with pytest.raises(RefitError, match="nothing was changed"):  # this engine has no namespaces for older pages
        await asyncio.to_thread(engine_push.refit, url, nothing, True, "keep")
    assert len((await generate(url, PROMPT, 4))["output_ids"]) == 4
