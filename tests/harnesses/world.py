"""What the harness tests share: a small real model with a large vocabulary, an engine that follows a script, and the
checks that hold for every run of every harness."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sysconfig
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from services.cell_agent.engine.server import Engine, EngineSpec
from services.proxy.dialects.base import Request
from shared.codec import unpack_ids
from tests import from_scratch
from tests.proxy.support import World

CONTEXT = 65_536
ROOT = Path(__file__).parents[2]
END = "<|im_end|>"


def make_model(folder: Path) -> Any:
    """A Qwen3 of one tiny layer, whose tokenizer knows enough English and code for prompts of 100 kB to stay short."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    added = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [str(p) for p in sorted(library.glob("*.py")) if p.stat().st_size < 60_000][:80]
    tokenizer.train(files, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.float32).eval().save_pretrained(folder, safe_serialization=True)
    return fast


# ------------------------------------------------------------------------------------------------------- the script


@dataclass
class Seen:
    """One call as the policy sees it: its prompt as turns (role, text)."""

    ids: list[int]
    turns: list[tuple[str, str]]

    @property
    def last(self) -> str:
        """The newest text that is not the policy's own."""
        return next((text for role, text in reversed(self.turns) if role != "assistant"), "")

    @property
    def users(self) -> str:
        return "\n".join(text for role, text in self.turns if role == "user")

    @property
    def results(self) -> int:
        """How many turns with tool results there are."""
        return sum("<tool_response>" in text for role, text in self.turns if role == "user")


Policy = Callable[[Seen], str]


@dataclass
class Script:
    """Answers the sampler in the engine: what the policy of the running test says to each prompt."""

    tokenizer: Any
    policy: Policy = lambda _seen: "ok"
    engine_url: str = ""
    prompts: dict[str, list[int]] = field(default_factory=dict)  # call id -> prompt of its first try
    said: dict[str, list[int]] = field(default_factory=dict)  # call id -> tokens of the whole turn
    problems: list[str] = field(default_factory=list)
    asked: dict[str, Request] = field(default_factory=dict)  # call id -> what the harness sent

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        call, ids = body["rid"].rpartition("-")[0], body["ids"]
        if call not in self.said:
            try:
                text = self.policy(self.see(ids))
            except Exception as error:  # noqa: BLE001  (told by `check`; the harness gets an answer meanwhile)
                self.problems.append(f"{call}: {error!r}")
                text = "the script failed"
            self.prompts[call] = ids
            self.said[call] = self.tokenizer.encode(text + END, add_special_tokens=False)
        return web.json_response(self.said[call][len(ids) - len(self.prompts[call]) :])

    def see(self, ids: list[int]) -> Seen:
        text = self.tokenizer.decode(ids)
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", text, re.S)
        return Seen(ids, turns)


@contextlib.asynccontextmanager
async def scripted_engine(model: Path, script_url: str, folder: Path) -> AsyncIterator[Engine]:
    """A real SGLang server with the sampler plugin."""
    plugin = folder / "plugins" / "gyre_test_sampler-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: gyre-test-sampler\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.plugins]\ngyre_test = tests.harnesses.sampler:load\n")
    spec = EngineSpec(
        cell=0,
        model_path=str(model),
        dtype="float32",
        context=CONTEXT,
        capacity=4,
        tokens=3 * CONTEXT,
        page=1,
        threads=1,
        device="cpu",
        seed=1,
        extra_args=(
            *("--chunked-prefill-size", str(CONTEXT), "--max-prefill-tokens", str(CONTEXT)),
            *("--mem-fraction-static", "0.5"),  # SGLang's own guess falls with the size of a prefill, below 0 here
        ),
    )
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin.parent), str(ROOT), before.get("PYTHONPATH", "")])
    os.environ["GYRE_TEST_SCRIPT"] = script_url
    try:
        engine = await Engine.start(spec, folder / "engine.log")
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield engine
    finally:
        await engine.stop()


# ------------------------------------------------------------------------------------------------------ the harness


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"


async def run_program(command: list[str], env: dict[str, str], folder: Path, timeout_s: float = 200.0) -> Ran:
    """A harness program in `folder`, with an environment of its own and no terminal."""
    path = f"{os.environ['PATH']}:{ROOT}/.venvs/node/bin"  # where deploy/harnesses.sh puts Node.js if there is none
    base = {"PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "HOME": str(folder.parent / "home")}
    (folder.parent / "home").mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=base | env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        os.killpg(process.pid, 9)
        out, err = await process.communicate()
        return Ran(-9, out.decode("utf-8", "replace"), err.decode("utf-8", "replace") + "\n[killed: too slow]")
    return Ran(process.returncode or 0, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def calls_text(*calls: tuple[str, dict[str, Any]], text: str = "") -> str:
    """A turn of the policy with tool calls."""
    parts = [text] if text else []
    for name, arguments in calls:
        body = json.dumps({"name": name, "arguments": arguments})
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------------- the checks


async def check_exact(run: World, script: Script) -> list[Any]:
    """Whatever the harness did: each generated token is in exactly one node, and each prompt the engine got is what the
    records alone give, and what the conversation gives when it is written down from scratch. Returns the records in
    order."""
    assert script.problems == []
    records = await run.records()
    ids: dict[str, list[int]] = {}
    for record in records:
        inherited = ids[record.parent] if record.parent else []
        kept = inherited if record.keep < 0 else inherited[: record.keep]
        prompt = kept + unpack_ids(record.input_ids).tolist()
        output = unpack_ids(record.output_ids).tolist()
        assert record.call not in ids
        assert prompt == script.prompts[record.call]
        assert output == script.said[record.call][: len(output)]
        assert record.finish_reason != "stop" or output == script.said[record.call]
        assert len(record.output_logprobs) == len(record.output_ids)
        ids[record.call] = prompt + output
    from_scratch.check(records, script.asked, script.prompts, script.tokenizer)
    return records


def roots(records: list[Any]) -> int:
    return sum(not r.parent for r in records)
