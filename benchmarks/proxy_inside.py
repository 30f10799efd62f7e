"""The proxy's own work without sockets: core, matching, encoding, recording, on a counterpart that is no engine.

`python -m benchmarks.proxy_inside curve` plays executions of 100, 200, 400 and 800 calls (2,000 new tokens each) and
prints CPU seconds by part; `fuzz N` sends N malformed bodies through the whole application and counts the answers;
`memory` records one execution of a million tokens. Every figure is measured in the run that prints it.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import random
import resource
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import orjson

from services.proxy import rendering
from services.proxy.app import ProxyApp
from services.proxy.bodies import Bodies
from services.proxy.calls import Calls
from services.proxy.core import Execution, ProxyCore
from services.proxy.dialects import openai_chat
from services.proxy.generating import Generating, Limits
from services.proxy.plans import Plans
from services.proxy.prompts import Prompts
from services.proxy.recorder import Recorder
from services.proxy.settling import Settling
from services.proxy.takeover import Takeover
from services.proxy.watch import Watch
from shared.codec import encode
from shared.events import (
    CellEngineReady,
    CellStarted,
    Event,
    ExecutionPlaced,
    ExecutionStarted,
    ModelCallRecorded,
    Sampling,
)
from tests.proxy.support import TEXT, TOOLS, hash_of, make_tokenizer

WORDS = tuple(TEXT.split())


class ScriptedEngineClient:
    """NOT an engine: gives every call the same 100 tokens, log-probability -0.5."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, generation: Any, *_: Any) -> None:
        count = min(len(self.ids), generation.limit)
        generation.ids += self.ids[:count]
        generation.logprobs += [-0.5] * count
        generation.finish, generation.cell = "stop", 0


class Inside:
    """A proxy without network: records go to a list as encoded events."""

    def __init__(self, folder: Path, context: int) -> None:
        tokenizer = make_tokenizer(folder)
        said = '<tool_call>\n{"name": "bash", "arguments": {"command": "run the test"}}\n</tool_call>'
        text = " ".join(random.Random(0).choices(WORDS, k=60)) + said + "<|im_end|>"
        self.core, self.watch = ProxyCore(), Watch()
        self.renderer = rendering.load(str(folder))
        self.stored = 0
        self.records = 0
        engine: Any = ScriptedEngineClient(tokenizer.encode(text, add_special_tokens=False))
        recorder = Recorder(self.core, self._publish)
        plans = Plans("", lambda _event: None)
        self.prompts = Prompts(self.renderer, plans.profile)
        generating = Generating(
            self.core, self.renderer, self.prompts, engine, recorder, self.watch, Limits(context, 60.0)
        )
        takeover = Takeover(self.core, engine, self._publish, self.watch, "proxy", "i")
        settling = Settling(self.core, generating, recorder, takeover)
        self.calls = Calls(self.core, self.prompts, plans, generating, recorder, takeover, settling)
        self.bodies = Bodies()
        self.refused: collections.Counter[str] = collections.Counter()
        self.app = ProxyApp(
            self.core,
            self.calls,
            self.bodies,
            self.watch,
            self._last,
            lambda _e, error: self.refused.update([error.kind]),
            "m",
        )
        self._tell(CellStarted(cell=0, incarnation="i"))
        self._tell(CellEngineReady(cell=0, incarnation="i", url="http://none", version=1, capacity=8))

    def _tell(self, event: Event) -> None:
        self.core.handle(event, 0.0)

    async def _publish(self, event: Event, _msg_id: str) -> int:
        self.stored += len(encode(event))
        self.records += isinstance(event, ModelCallRecorded)
        return 1

    async def _last(self) -> int:
        return 0

    def execution(self, name: str, key: str) -> Execution:
        sampling = Sampling(max_new_tokens=4000)
        self._tell(ExecutionPlaced(execution=name, group="g", task="t", cell=0, sampling=sampling, policy_version=0))
        self._tell(ExecutionStarted(execution=name, attempt=1, key_hash=hash_of(key), harness="mini-swe-agent"))
        return self.core.executions[name]


def cpu() -> float:
    return time.process_time()


async def play(inside: Inside, name: str, calls: int) -> dict[str, float]:
    """One execution; CPU seconds of reading bodies (JSON and dialect) and of everything behind it."""
    execution = inside.execution(name, name)
    rng = random.Random(1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "write the file"}]
    reading = working = 0.0
    for _ in range(calls):
        body = orjson.dumps({"model": "m", "messages": messages, "tools": TOOLS})
        begun = cpu()
        request = inside.bodies.read(name, openai_chat, body, {})
        read = cpu()
        call = await inside.calls.open(execution, request)
        reply = await call.reply
        inside.calls.delivered(call)
        working += cpu() - read
        reading += read - begun
        message = orjson.loads(openai_chat.reply(request, reply))["choices"][0]["message"]
        messages.append(message)
        for made in message.get("tool_calls", []):
            result = " ".join(rng.choices(WORDS, k=1300))
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})
    tokens = sum(len(n.input_ids) + len(n.output_ids) for n in execution.contexts.tree.nodes.values())
    return {"calls": calls, "tokens": tokens, "reading_s": reading, "working_s": working}


async def curve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inside = Inside(Path(folder), 4_000_000)
        await play(inside, "g000000x00", 20)  # warm
        print(f"{'calls':>6} {'tokens':>9} {'matching+encoding+recording, CPU s':>36} {'JSON+dialect, CPU s':>20}")
        for number, calls in enumerate((100, 200, 400, 500, 800), 1):
            row = await play(inside, f"g00000{number}x00", calls)
            print(f"{row['calls']:>6} {row['tokens']:>9} {row['working_s']:>36.3f} {row['reading_s']:>20.3f}")


async def memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inside = Inside(Path(folder), 4_000_000)
        await play(inside, "g000000x00", 20)
        gc.collect()
        before = resident()
        row = await play(inside, "g000001x00", 500)
        gc.collect()
        grown = (resident() - before) / 2**20
        tracemalloc.start()
        again = await play(inside, "g000002x00", 500)
        gc.collect()
        live = tracemalloc.get_traced_memory()[0] / 2**20
        print(f"one execution of {row['tokens']:.0f} recorded tokens: the process grew by {grown:.1f} MB")
        print(f"one more of {again['tokens']:.0f}: {live:.1f} MB are in use for it")


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# ------------------------------------------------------------------------------------------------------------ fuzzing

SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "call_a1c0001t0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "call_a1c0001t0", "content": "ok"},
            ],
            "tools": TOOLS,
            "stop": ["x"],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
            "tool_choice": "auto",
            "max_tokens": 5,
            "stream": False,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "toolu_a1c0001t0", "name": "bash", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "toolu_a1c0001t0", "content": "r"}],
                },
            ],
            "tools": [{"name": "bash", "description": "d", "input_schema": {"type": "object"}}],
            "stop_sequences": ["x"],
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
    ),
    (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "s",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "function_call", "call_id": "call_a1c0001t0", "name": "bash", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_a1c0001t0", "output": "ok"},
            ],
            "tools": [
                {"type": "function", "name": "bash", "parameters": {}},
                {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "p"}]},
            ],
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 5,
        },
    ),
]
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"type": None},
    {"a": [{}]},
    "😀" * 9,
]


def mutated(rng: random.Random, value: Any) -> Any:
    """`value` with one place replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.15:
            return {(k + "x" if k == key else k): v for k, v in value.items()}
        return {k: (mutated(rng, v) if k == key else v) for k, v in value.items()}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:at] + value[at : at + 1] * 2 + value[at + 1 :]
        return [mutated(rng, v) if i == at else v for i, v in enumerate(value)]
    return rng.choice(ODD)


def damaged(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(SEEDS)
    for _ in range(rng.choice((1, 1, 2, 4))):
        body = mutated(rng, body)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(data) or 1)
        data = data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + data[at + rng.randrange(3) :]
    return path, data


async def ask(app: Any, path: str, data: bytes) -> tuple[int, bytes]:
    """One POST straight into the application."""
    sent: list[Any] = []
    body = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer key"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1)}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


async def fuzz(count: int, seed: int = 0) -> collections.Counter[int]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        inside = Inside(Path(folder), 100_000)
        inside.execution("g000001x00", "key")
        app = inside.app.asgi()
        answers: collections.Counter[int] = collections.Counter()
        for _ in range(count):
            path, data = damaged(rng)
            status, text = await ask(app, path, data)
            answers[status] += 1
            if status == 500 or b'"internal_error"' in text or b'"api_error"' in text:
                raise AssertionError(f"{path} answered {status} {text[:300]!r} to {data[:2000]!r}")
        nodes = inside.core.executions["g000001x00"].contexts.tree.nodes
        if inside.records != len(nodes) or answers[200] != inside.records:
            raise AssertionError(f"{answers[200]} replies, {inside.records} records, {len(nodes)} nodes")
        return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("curve", "memory", "fuzz"))
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    arguments = parser.parse_args()
    if arguments.what == "curve":
        asyncio.run(curve())
    elif arguments.what == "memory":
        asyncio.run(memory())
    else:
        begun = time.monotonic()
        answers = asyncio.run(fuzz(arguments.count))
        shown = ", ".join(f"{status}: {count}" for status, count in sorted(answers.items()))
        print(f"{arguments.count} malformed bodies in {time.monotonic() - begun:.0f} s, answers {shown}; no 500")


if __name__ == "__main__":
    main()
