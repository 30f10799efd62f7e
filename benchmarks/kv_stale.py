"""What live calls notice of new weights: `cells.kv_stale` keep against drop, on two equal engines in one run.

Streams some calls with long prompts, puts new weights into the engine while they generate (the same numbers under a new
version: the cost does not depend on them), and takes the longest gap between two stream events of a call from then on.

    python benchmarks/kv_stale.py [--calls 4] [--context 3000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch

from services.cell_agent.engine.server import Engine, EngineSpec
from services.cell_agent.trainer import engine_push, hf_map
from services.cell_agent.trainer.model_spec import read_spec
from services.cell_agent.transfer.weights import Snapshot, digest, manifest, view

MODEL = Path(__file__).parents[1] / "examples/minirepo/model"
WARM = 30  # tokens of every call before the weights come
PAGE = 16


def snapshot(folder: Path, version: int) -> Snapshot:
    """As the core publishes it."""
    spec = read_spec(str(folder))
    weights = hf_map.read_folder(spec, str(folder))
    slots, nbytes = manifest(hf_map.hf_shapes(spec), torch.float32)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    for slot in slots:
        view(buffer, slot).copy_(weights[slot.name])
    return Snapshot(version, buffer, slots, digest(buffer))


class Stream:
    """One call; `at`: when its events came."""

    def __init__(self, url: str, ids: list[int], tokens: int) -> None:
        self.at: list[float] = []
        self.warm, self.meta = asyncio.Event(), {"completion_tokens": 0}
        self.done = asyncio.create_task(self._run(url, ids, tokens))

    async def _run(self, url: str, ids: list[int], tokens: int) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.post(f"{url}/generate", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self.at.append(time.monotonic())
                    self.meta = json.loads(line[6:])["meta_info"]
                    if self.meta["completion_tokens"] >= WARM:
                        self.warm.set()


async def measure(stale: str, calls: int, context: int, tokens: int, folder: Path) -> dict[str, Any]:
    spec = EngineSpec(
        cell=0, model_path=str(MODEL), dtype="float32", context=4096, capacity=calls, tokens=calls * 4096, page=PAGE,
        threads=1, device="cpu", seed=1, kv_secret="benchmark", kv_stale=stale,
    )  # fmt: skip
    engine = await Engine.start(spec, folder / f"{stale}.log")
    try:
        prompts = [[(7 * i + 13 * k) % 250 + 4 for i in range(context)] for k in range(calls)]
        streams = [Stream(engine.url, ids, tokens) for ids in prompts]
        await asyncio.gather(*(s.warm.wait() for s in streams))
        started = time.monotonic()
        new = await asyncio.to_thread(snapshot, MODEL, 1)
        refit = await asyncio.to_thread(engine_push.refit, engine.url, new, True, stale)
        await asyncio.gather(*(s.done for s in streams))
        if not all(len(s.meta["weight_versions"]) == 2 for s in streams):
            raise SystemExit("a call ended before the weights came: give --tokens a larger number")
        gaps = [[b - a for a, b in zip(s.at, s.at[1:], strict=False) if b >= started] for s in streams]
        before = [b - a for s in streams for a, b in zip(s.at[1:], s.at[2:], strict=False) if b < started]
        return {
            "gap_s": max(max(g) for g in gaps),
            "steady_s": statistics.median(before),
            "refit_s": refit["push_s"] + refit["verify_s"],
        }
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--context", type=int, default=3000, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="tokens that each call generates")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-kv-stale-") as folder:
        found = {
            stale: asyncio.run(measure(stale, args.calls, args.context, args.tokens, Path(folder)))
            for stale in ("drop", "keep")
        }
    answer = {f"{key}_{stale}": round(value, 3) for stale, of in found.items() for key, value in of.items()}
    answer["drop_vs_keep"] = round(found["drop"]["gap_s"] / found["keep"]["gap_s"], 2)
    if args.json:
        print(json.dumps(answer))
        return
    print(f"{args.calls} live calls of {args.context} prompt tokens each, refitted while they generate")
    for stale, of in found.items():
        print(f"{stale}: longest gap {of['gap_s']:.2f} s (usual {of['steady_s']:.3f} s), refit {of['refit_s']:.2f} s")
    print(f"drop / keep: {answer['drop_vs_keep']}")


if __name__ == "__main__":
    main()
