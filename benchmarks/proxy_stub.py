"""The engine's counterpart for measurements of the proxy, as a process. NOT an engine: every answer is the same text.

It speaks SGLang's /generate (streamed, with ids and log-probabilities) and OpenAI's /v1/chat/completions, both over a
bare asyncio protocol, so that it costs little beside what is measured. An answer starts after a delay that depends on
the request's id alone: the same body sent twice waits as long twice. The latest /generate body of each execution can
be fetched at /body/<execution>.

`python -m benchmarks.proxy_stub PORT LOW HIGH IDS`: delays from LOW to HIGH seconds; IDS is a JSON list of token ids.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import orjson
import uvloop

TEXT = "ok done"


class Answers:
    def __init__(self, low: float, high: float, ids: list[int]) -> None:
        self.low, self.high = low, high
        rows = [[-0.5, token, None] for token in ids]
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": rows, "weight_version": "v1"}
        self.generated = b"data: " + orjson.dumps({"meta_info": meta}) + b"\n\ndata: [DONE]\n\n"
        choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
        self.completed = orjson.dumps({**head, "choices": [choice], "usage": usage})
        self.bodies: dict[bytes, bytes] = {}

    def delay(self, rid: bytes) -> float:
        return random.Random(rid).uniform(self.low, self.high) if rid else random.uniform(self.low, self.high)

    def answer(self, path: bytes, body: bytes) -> tuple[float, bytes]:
        """(seconds to wait, the whole response)."""
        if path == b"/generate":
            rid = rid_of(body)
            self.bodies[rid.partition(b"a")[0]] = body
            return self.delay(rid), _response(b"text/event-stream", self.generated)
        if path.endswith(b"/chat/completions"):
            return self.delay(b""), _response(b"application/json", self.completed)
        return 0.0, _response(b"application/json", self.bodies.get(path.rpartition(b"/")[2], b"{}"))


def rid_of(body: bytes) -> bytes:
    """The request's id, which stands behind the prompt's ids."""
    at = body.rfind(b'"rid":"')
    return body[at + 7 : body.index(b'"', at + 7)] if at >= 0 else b""


def _response(kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


class Connection(asyncio.Protocol):
    """HTTP/1.1 with content-length, one request after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parts: list[bytes] = []
        self._missing = 0
        self._path = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing:
            self._missing -= len(data)
        else:
            self._begin(b"".join(self._parts))
        if self._missing == 0 and self._parts:
            body, self._parts = b"".join(self._parts), []
            delay, response = self._answers.answer(self._path, body)
            asyncio.get_running_loop().call_later(delay, self._send, response)

    def _begin(self, data: bytes) -> None:
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            self._parts = [data]
            self._missing = 0
            return
        lines = head.split(b"\r\n")
        self._path = lines[0].split(b" ")[1]
        lengths = [line.partition(b":")[2] for line in lines[1:] if line.lower().startswith(b"content-length:")]
        self._missing = (int(lengths[0]) if lengths else 0) - len(body)
        self._parts = [body]

    def _send(self, response: bytes) -> None:
        if self._transport is not None:
            self._transport.write(response)


async def serve(port: int, answers: Answers) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answers), "127.0.0.1", port, backlog=4096
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Answers(float(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))))
