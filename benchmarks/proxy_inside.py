"""The proxy's own work without sockets: core, matching, encoding, recording, on a counterpart that is no engine.

`python -m benchmarks.proxy_inside curve [--json]` plays executions of 100, 200, 400, 500 and 800 calls (2,000 new
tokens each) and prints CPU seconds: `reading_s` is JSON and dialect, `working_s` matching, encoding, recording and
putting the engine's ids together, `tokenizer_s` what the tokenizer library alone takes for the same texts (`own_` is
without it). `memory` gives what one live execution of a million recorded tokens holds: its tree, ids, latest body and
messages.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import random
import resource
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import orjson

from benchmarks.proxy_world import conditions, shown
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
from services.proxy.tokenizer import load_tokenizer
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
from shared.telemetry import Telemetry, Trail
from tests.proxy.support import TEXT, TOOLS, hash_of, make_tokenizer

WORDS = tuple(TEXT.split())
WORDS_PER_RESULT = 1750  # with call and scaffolding 2,000 tokens


class ScriptedEngineClient:
    """NOT an engine: gives every call the same 100 tokens, log-probability -0.5."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.sent = ids, 0

    async def generate(self, generation: Any, *_: Any) -> None:
        count = min(len(self.ids), generation.limit)
        generation.ids += self.ids[:count]
        generation.logprobs += [-0.5] * count
        generation.finish, generation.cell = "stop", 0
        self.sent = sum(map(len, generation.prompt))  # sent as they are, piece by piece


class Inside:
    """A proxy without network: records go to a list as encoded events."""

    def __init__(self, folder: Path, context: int) -> None:
        tokenizer = make_tokenizer(folder)
        self.tokenizer = load_tokenizer(str(folder))
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
            self.core,
            self.renderer,
            self.prompts,
            engine,
            recorder,
            self.watch,
            Limits(context, 60.0),
            Telemetry.off(),
            Trail(),
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
    """One execution; CPU seconds of reading bodies (JSON and dialect), of everything behind it, and of the tokenizer
    library alone for the same new texts."""
    execution = inside.execution(name, name)
    rng = random.Random(1)
    messages = [orjson.dumps({"role": "user", "content": "write the file"})]
    results = []
    reading = working = 0.0
    for _ in range(calls):
        body = b'{"model":"m","tools":%b,"messages":[%b]}' % (orjson.dumps(TOOLS), b",".join(messages))
        begun = cpu()
        request = inside.bodies.read(name, openai_chat, body, {})
        read = cpu()
        call = await inside.calls.open(execution, request)
        reply = await call.reply
        inside.calls.delivered(call)
        working += cpu() - read
        reading += read - begun
        message = orjson.loads(openai_chat.reply(request, reply))["choices"][0]["message"]
        messages.append(orjson.dumps(message))
        for made in message.get("tool_calls", []):
            results.append(" ".join(rng.choices(WORDS, k=WORDS_PER_RESULT)))
            wire = {"role": "tool", "tool_call_id": made["id"], "content": results[-1]}
            messages.append(orjson.dumps(wire))
    tokens = sum(len(n.input_ids) + len(n.output_ids) for n in execution.contexts.tree.nodes.values())
    begun = cpu()
    for result in results:
        inside.tokenizer.encode(result, add_special_tokens=False)
    library = cpu() - begun
    return {
        "calls": calls,
        "tokens": tokens,
        "working_s": round(working, 3),
        "reading_s": round(reading, 3),
        "tokenizer_s": round(library, 3),
        "us_per_token": round((working + reading) / tokens * 1e6, 3),
        "own_us_per_token": round((working + reading - library) / tokens * 1e6, 3),
    }


async def curve(lengths: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        inside = Inside(Path(folder), 4_000_000)
        await play(inside, "g000000x00", 20)  # warm
        rows = [await play(inside, f"g{n:06d}x00", calls) for n, calls in enumerate(lengths, 1)]
    cost = {key: [(row["calls"], row[key]) for row in rows] for key in ("us_per_token", "own_us_per_token")}
    growth = {key: round(max(values)[1] / min(values)[1], 2) for key, values in cost.items()}
    return {
        "cpu_s": {row["calls"]: round(row["working_s"] + row["reading_s"], 3) for row in rows},
        "tokens": {row["calls"]: row["tokens"] for row in rows},
        "cost_per_token_longest_over_shortest": growth["us_per_token"],
        "own_cost_per_token_longest_over_shortest": growth["own_us_per_token"],
        "curve": rows,
        **conditions(),
    }


async def memory() -> dict[str, Any]:
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
    return {
        "memory_mb_per_million_tokens": round(live / again["tokens"] * 1e6, 1),
        "in_use_mb": round(live, 1),
        "process_grew_mb": round(grown, 1),
        "tokens": row["tokens"],
        **conditions(),
    }


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curve", "memory"))
    parser.add_argument("--calls", type=int, nargs="+", default=[100, 200, 400, 500, 800], help="of the curve")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shown(asyncio.run(curve(options.calls) if options.what == "curve" else memory()), options.json)


if __name__ == "__main__":
    main()
