"""The engine as a child process. Tests with the mark `engine` start a real SGLang server on a tiny random model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from services.cell_agent.engine.launch import other_model_modules
from services.cell_agent.engine.server import (
    REPOSITORY,
    Engine,
    EngineFailed,
    EngineSpec,
    free_ports,
    members_of,
    resolve_device,
    server_arguments,
    shared_memory_of,
    sweep,
)
from tests.cell_agent.trainer.forest import write_model

PROMPT = [5, 17, 23, 42, 8]


def spec_for(model: Path, **changes: object) -> EngineSpec:
    values: dict = {
        "cell": 0,
        "model_path": str(model),
        "dtype": "float32",
        "context": 4096,
        "capacity": 4,
        "tokens": 8192,
        "page": 1,
        "threads": 1,
        "device": "cpu",
        "seed": 1,
        "start_timeout_s": 120.0,
    }
    return EngineSpec(**{**values, **changes})


def test_a_cpu_engine_is_asked_to_sleep_and_a_gpu_engine_is_not(tmp_path):
    cpu = server_arguments(spec_for(tmp_path), 1, 2)
    gpu = server_arguments(spec_for(tmp_path, device="cuda", tokens=0, extra_args=("--x",)), 1, 2)
    assert {"--sleep-on-idle", "--skip-tokenizer-init"} <= set(cpu)
    assert "--sleep-on-idle" not in gpu
    assert "--max-total-tokens" not in gpu
    assert gpu[-1] == "--x"


def test_a_gpu_engine_that_keeps_older_kv_counts_every_token_to_the_weights_that_made_it(tmp_path):
    keep = server_arguments(spec_for(tmp_path, device="cuda", kv_stale="keep"), 1, 2)
    drop = server_arguments(spec_for(tmp_path, device="cuda"), 1, 2)
    assert "--disable-overlap-schedule" in keep
    assert "--disable-overlap-schedule" not in drop


def test_free_ports_are_all_different():
    assert len(set(free_ports("127.0.0.1", 20))) == 20


def test_a_named_device_is_taken_as_it_is():
    assert resolve_device("cuda") == "cuda"
    assert resolve_device("auto") in ("cpu", "cuda")


def test_only_the_model_s_own_module_is_imported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    others = other_model_modules(str(tmp_path))
    assert "qwen3" not in others
    assert "llama" in others
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyKnowsThisForCausalLM"]}))
    assert other_model_modules(str(tmp_path)) == []


def test_sweep_removes_what_a_killed_agent_left(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "socket").touch()
    report = tmp_path / "report.shm"
    report.touch()
    notes = tmp_path / "notes.json"
    notes.write_text(json.dumps({"scratch": str(scratch), "shared_memory": [str(report)]}))
    sweep(notes)
    assert not scratch.exists()
    assert not report.exists()
    assert not notes.exists()
    sweep(notes)


def test_shared_memory_of_a_group_that_does_not_exist():
    assert shared_memory_of(2**22 - 1) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


async def generate(engine: Engine, **body: object) -> dict:
    async with aiohttp.ClientSession() as http:
        body = {"input_ids": PROMPT, "return_logprob": True, **body}
        async with http.post(engine.url + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()


async def stream(engine: Engine, **body: object) -> list[dict]:
    chunks = []
    async with aiohttp.ClientSession() as http:
        body = {"input_ids": PROMPT, "return_logprob": True, "stream": True, **body}
        async with http.post(engine.url + "/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    chunks.append(json.loads(line[6:]))
    return chunks


@pytest.mark.engine
async def test_one_engine_from_start_to_the_last_trace(model, tmp_path):
    engine = await Engine.start(spec_for(model), tmp_path / "logs" / "engine-0.log")
    group = engine.pid
    try:
        await answers_with_tokens_and_logprobs(engine)
        await streams_what_it_answers(engine)
        await stops_at_the_given_ids(engine)
        await counts_and_aborts_live_calls(engine)
        left = shared_memory_of(group)
    finally:
        await engine.stop()
    assert members_of(group) == []
    assert not any(path.exists() for path in left)
    assert not engine._scratch.exists()
    assert not engine._notes.exists()


async def answers_with_tokens_and_logprobs(engine: Engine) -> None:
    answer = await generate(engine, sampling_params={"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True})
    meta = answer["meta_info"]
    assert [int(token) for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert meta["finish_reason"]["type"] == "length"


async def streams_what_it_answers(engine: Engine) -> None:
    """Chunks are cumulative; the last one carries the versions."""
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    whole = await generate(engine, sampling_params=greedy)
    chunks = await stream(engine, sampling_params=greedy)
    for chunk in chunks:
        ids = chunk["output_ids"]
        assert ids == whole["output_ids"][: len(ids)]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(ids)
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]


async def stops_at_the_given_ids(engine: Engine) -> None:
    """The stop token is the last output id, and is named."""
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    ids = (await generate(engine, sampling_params=greedy))["output_ids"]
    stop = ids[4]
    answer = await generate(engine, sampling_params={**greedy, "stop_token_ids": [stop], "ignore_eos": False})
    assert answer["output_ids"] == ids[: ids.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def counts_and_aborts_live_calls(engine: Engine) -> None:
    endless = {"temperature": 1.0, "max_new_tokens": 2600, "ignore_eos": True}
    calls = [asyncio.create_task(generate(engine, sampling_params=endless, rid=f"r{i}")) for i in range(3)]
    async with asyncio.timeout(10):
        while await engine.live_calls() != 3:
            await asyncio.sleep(0.01)
    await engine.abort_all()
    answers = await asyncio.gather(*calls)
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
    assert all(len(a["output_ids"]) == len(a["meta_info"]["output_token_logprobs"]) for a in answers)
    async with asyncio.timeout(10):  # the engine's report of its load follows a moment later
        while await engine.live_calls() != 0:
            await asyncio.sleep(0.05)


@pytest.mark.engine
async def test_an_engine_that_cannot_start_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    with pytest.raises(EngineFailed, match="exit code") as failure:
        await Engine.start(spec_for(tmp_path), tmp_path / "engine.log")
    assert failure.value.log_tail
    assert not (tmp_path / ".engine-0.json").exists()


AGENT = """
import asyncio, sys
from pathlib import Path
from services.cell_agent.engine.server import Engine, EngineSpec
async def main():
    spec = EngineSpec(cell=0, model_path=sys.argv[1], dtype="float32", context=1024, capacity=4, tokens=8192, page=1,
                      threads=1, device="cpu", seed=1)
    engine = await Engine.start(spec, Path(sys.argv[2]) / "engine.log")
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.engine
def test_an_engine_dies_with_its_agent(model, tmp_path):
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(model), str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    group = int(agent.stdout.readline())
    assert len(members_of(group)) >= 2
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    deadline = time.monotonic() + 5.0
    while members_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members_of(group) == []
    notes = tmp_path / ".engine-0.json"
    left = json.loads(notes.read_text())
    assert Path(left["scratch"]).exists()
    sweep(notes)
    assert not Path(left["scratch"]).exists()
    assert not any(Path(p).exists() for p in left["shared_memory"])
