"""Malformed bodies through the whole application of the proxy, without sockets: no answer may be a 500, and each reply
has exactly one record.

`python -m benchmarks.proxy_fuzz [COUNT] [--json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.proxy_inside import Inside
from benchmarks.proxy_world import shown
from tests.proxy.support import TOOLS

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
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    answers = asyncio.run(fuzz(options.count))
    result = {"bodies": options.count, "answers": {str(k): v for k, v in sorted(answers.items())}}
    shown({**result, "seconds": round(time.monotonic() - begun, 1)}, options.json)


if __name__ == "__main__":
    main()
