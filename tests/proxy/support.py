"""Parts that the proxy's tests share: a tiny model folder, a run on the bus, the proxy's service, an engine stub."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from services.proxy.service import serve
from shared.bus import Bus
from shared.config import ModelConfig, ProxyConfig, RunConfig, TasksConfig, to_plain
from shared.events import (
    CellEngineReady,
    CellStarted,
    ExecutionPlaced,
    ExecutionStarted,
    ModelCallRecorded,
    ProxyReady,
    RunStarted,
    Sampling,
)
from shared.service import open_context
from shared.tree import Tree

# transformers imports torchvision if it is there, and fails where that was built for another torch.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

EXECUTION = "g000001x00"
RUN_PROXY = """
import sys
from services.proxy.service import serve
from shared.service import run_service
args = {"instance": sys.argv[3]} if len(sys.argv) > 3 else {}
sys.exit(run_service("proxy", sys.argv[1], sys.argv[2], serve, args))
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
    for name in ("bash", "delegate")
]
TEXT = "the a write file run list of to and is done task code test error ok one two three result output"


def make_tokenizer(folder: Path) -> Any:
    """Byte-level BPE with Qwen3's special tokens, as a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    added = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make_trainer: Any = trainers.BpeTrainer
    trainer = make_trainer(
        vocab_size=512 - len(added), special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = [TEXT, '{"name": "bash", "arguments": {"command": "ls"}}', "assistant\n user\n system\n"]
    tokenizer.train_from_iterator(corpus * 200, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    return fast


def make_model(folder: Path, *, seed: int = 0, context: int = 2048) -> Any:
    """A random two-layer Qwen3 in fp32 with its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=10000.0,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32).eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


# ----------------------------------------------------------------------------------------------------- scripted engine


@dataclass
class Turn:
    """What ScriptedEngine does with one request."""

    text: str = "ok<|im_end|>"
    status: int = 200
    cut_after: int | None = None  # tokens; then the connection breaks
    abort_after: int | None = None  # tokens; then finish_reason abort, as at a drain
    finish: str = "stop"
    delay_s: float = 0.0
    versions: tuple[tuple[str, int, int], ...] = ()
    message: str = ""  # of an error
    bad_logprob: float | None = None  # reported for every token
    pause_s: float = 0.0  # before every report but the first
    end_s: float = 0.0  # between the last report and the end of the answer


@dataclass
class ScriptedEngine:
    """NOT an engine: answers SGLang's /generate with the next scripted turn, log-probs -0.5 - position/100.

    For error paths that a real engine can't be brought to on demand."""

    tokenizer: Any
    default: Turn = field(default_factory=Turn)
    turns: list[Turn] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)  # the client's ends of those that requests came through
    choose: Callable[[dict[str, Any]], Turn] | None = None
    interval: int = 3
    url: str = ""
    gate: asyncio.Event | None = None
    hung: bool = False  # takes requests and never answers, not even about its health
    aborted: list[str] = field(default_factory=list)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)  # rid -> what engine/kept.py would tell of it
    live: set[str] = field(default_factory=set)
    forgets: bool = False  # as an engine that was restarted

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedEngine]:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/gyre/calls/take", self._take)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _take(self, request: web.Request) -> web.Response:
        call = (await request.json())["call"]
        rids = [rid for rid in self.kept if rid.rpartition("-")[0] == call]
        self.aborted += rids
        while self.live & set(rids):
            await asyncio.sleep(0.01)
        return web.json_response({"tries": [] if self.forgets else [self.kept[rid] for rid in rids]})

    async def _health(self, request: web.Request) -> web.Response:
        await self._hang()
        return web.Response()

    async def _hang(self) -> None:
        while self.hung:
            await asyncio.sleep(0.02)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if request.transport is not None:
            self.connections.add(request.transport.get_extra_info("peername"))
        prompt = base64.b64encode(np.asarray(body["input_ids"], "<i4").tobytes()).decode()
        nothing = {"output_token_logprobs": [], "output_token_logprobs_length": 0, "finish_reason": {"type": "abort"}}
        self.kept[body["rid"]] = {"rid": body["rid"], "prompt": prompt, "meta_info": nothing}
        self.live.add(body["rid"])
        try:
            return await self._generated(request, body)
        except ConnectionError:  # its client has gone
            return web.Response()
        finally:
            self.live.discard(body["rid"])

    async def _generated(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self._hang()
        turn = self.choose(body) if self.choose else (self.turns.pop(0) if self.turns else self.default)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(turn.delay_s)
        if turn.status != 200:
            return web.json_response({"error": {"message": turn.message}}, status=turn.status)
        ids = self.tokenizer.encode(turn.text, add_special_tokens=False)[: body["sampling_params"]["max_new_tokens"]]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        stop = min(len(ids), *(n for n in (turn.cut_after, turn.abort_after) if n is not None), len(ids))
        for end in [*range(self.interval, stop, self.interval), stop]:
            finish = None
            await asyncio.sleep(turn.pause_s if end > self.interval else 0.0)
            gone = request.transport is None or request.transport.is_closing()
            if gone or body["rid"] in self.aborted:
                await response.write(self._chunk(body, ids[:end], {"type": "abort", "message": "asked"}, turn))
                return response
            if end == stop:
                cut = stop < len(ids) or turn.abort_after is not None
                finish = {"type": "abort", "message": turn.message} if cut else {"type": turn.finish}
                if turn.cut_after is not None:
                    finish = None
            await response.write(self._chunk(body, ids[:end], finish, turn))
        if turn.cut_after is not None:
            if request.transport is not None:
                request.transport.close()
            return response
        await asyncio.sleep(turn.end_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, body: dict[str, Any], ids: list[int], finish: dict[str, Any] | None, turn: Turn) -> bytes:
        rows = [[-0.5 - i / 100 if turn.bad_logprob is None else turn.bad_logprob, t, None] for i, t in enumerate(ids)]
        versions = turn.versions or (("v3", 0, len(ids)),)
        meta = {
            "finish_reason": finish,
            "output_token_logprobs": rows,
            "output_token_logprobs_length": len(rows),
            "cached_tokens": 0,
            "weight_versions": [
                {"version": v, "start": s, "end": min(e, len(ids))} for v, s, e in versions if s < len(ids) or s == 0
            ],
        }
        self.kept[body["rid"]]["meta_info"] = meta if finish else meta | {"finish_reason": {"type": "abort"}}
        return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


# ----------------------------------------------------------------------------------------------------------- the run


class World:
    """A run on a real bus with a real proxy service in this process. The test plays scheduler, cell and harness."""

    def __init__(self, nats_url: str, run: str, folder: Path, model: Path, context: int) -> None:
        self.nats_url, self.run, self.folder, self.model, self.context = nats_url, run, folder, model, context
        self.control: Bus = None  # type: ignore[assignment]
        self.ready: ProxyReady = None  # type: ignore[assignment]
        self.http: aiohttp.ClientSession = None  # type: ignore[assignment]
        self._ctx: Any = None
        self._task: asyncio.Task[None] | None = None
        self._buses: dict[str, Bus] = {}

    async def begin(self, progress_tokens: int = 512) -> None:
        self.control = await Bus.connect(self.nats_url, self.run, "control")
        await self.control.create_stream()
        config = RunConfig(
            name="test",
            model=ModelConfig(path=str(self.model), context=self.context),
            tasks=TasksConfig(train="tasks"),
            proxy=ProxyConfig(call_timeout_s=20.0, progress_tokens=progress_tokens),
        )
        await self.control.publish(
            RunStarted(
                run=self.run,
                config=to_plain(config),
                run_dir=str(self.folder),
                train_tasks=(),
                eval_tasks={},
                started_at=0.0,
            )
        )
        self.http = aiohttp.ClientSession()

    async def start_proxy(self, instance: str = "") -> None:
        after = await self.control.last_sequence()
        args = {"instance": instance} if instance else {}
        self._ctx = await open_context("proxy", self.nats_url, self.run, args)
        self._task = asyncio.create_task(serve(self._ctx))
        reading = asyncio.create_task(self._next_ready(after))
        await asyncio.wait({self._task, reading}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if self._task.done():
            self._task.result()
        self.ready = await reading

    async def _next_ready(self, after: int) -> ProxyReady:
        async for message in self.control.read(after + 1):
            if isinstance(message.event, ProxyReady):
                return message.event
        raise AssertionError

    async def stop_proxy(self) -> None:
        if self._task is not None:
            self._ctx.stop.set()
            await asyncio.wait_for(self._task, 20)
            self._task = None
            self._ctx.telemetry.shutdown()
            await self._ctx.bus.close()

    async def end(self) -> None:
        await self.stop_proxy()
        await self.http.close()
        for bus in (self.control, *self._buses.values()):
            await bus.close()

    async def publish(self, service: str, event: Any) -> None:
        if service not in self._buses:
            self._buses[service] = await Bus.connect(self.nats_url, self.run, service)
        await self._buses[service].publish(event)

    async def cell(self, cell: int, url: str, version: int = 3) -> None:
        await self.publish("cell_agent", CellStarted(cell=cell, incarnation=f"i{cell}"))
        await self.publish(
            "cell_agent",
            CellEngineReady(cell=cell, incarnation=f"i{cell}", url=url, version=version, capacity=8),
        )

    async def execution(
        self,
        name: str = EXECUTION,
        *,
        cell: int = 0,
        key: str = "secret",
        attempt: int = 1,
        harness: str = "scout",
        sampling: Sampling | None = None,
    ) -> str:
        placed = ExecutionPlaced(
            execution=name,
            group=name.partition("x")[0],
            task="t",
            cell=cell,
            sampling=sampling or Sampling(max_new_tokens=64),
            policy_version=0,
        )
        await self.publish("scheduler", placed)
        started = ExecutionStarted(execution=name, attempt=attempt, key_hash=hash_of(key), harness=harness)
        await self.publish("harness", started)
        return key

    async def records(self) -> list[ModelCallRecorded]:
        end = await self.control.last_sequence()
        return [m.event async for m in self.control.read_until(end) if isinstance(m.event, ModelCallRecorded)]

    async def tree(self) -> Tree:
        tree = Tree()
        for record in await self.records():
            tree.add(record)
        return tree

    # ------------------------------------------------------------------------------------------------- the harness

    async def post(self, path: str, body: Any, key: str = "secret", **headers: str) -> tuple[int, Any, Any]:
        """(status, decoded JSON, headers)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {key}", "content-type": "application/json"} | headers
        async with self.http.post(self.ready.url + path, data=data, headers=sent) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def chat(self, messages: list[Any], key: str = "secret", **fields: Any) -> dict[str, Any]:
        """One chat completion; returns the assistant message."""
        body = {"model": "m", "messages": messages, "tools": TOOLS} | fields
        status, answer, _ = await self.post("/v1/chat/completions", body, key)
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def stream(self, path: str, body: Any, key: str = "secret") -> list[tuple[str, Any]]:
        """(event name, data) of a streamed answer."""
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.post(self.ready.url + path, json=body, headers=headers) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
        return parse_events(text)


def parse_events(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = "", ""
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        events.append((name, data if data == "[DONE]" else json.loads(data)))
    return events


def hash_of(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=32).hexdigest()


def call_text(name: str, arguments: str, text: str = "") -> str:
    """A turn of the policy with one tool call."""
    return f'{text}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
