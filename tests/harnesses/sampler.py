"""A scripted sampler inside a real SGLang engine (plugin entry point sglang.srt.plugins).

Asks the test process once per request what the policy shall say, and raises the logit of the next scripted token far
above the others before SGLang samples. The engine still computes, samples, counts and reports every token itself.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

ABOVE_ALL = 40.0
_scripts: dict[str, tuple[int, list[int]]] = {}  # rid -> (prompt length, tokens to come)


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.handle_generate_request", _ask, HookType.BEFORE)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.sample", _force, HookType.BEFORE)


def _ask(_scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    if "HEALTH" in str(request.rid):
        return
    ids = [int(t) for t in request.input_ids]
    body = json.dumps({"rid": request.rid, "ids": ids}).encode()
    with urllib.request.urlopen(os.environ["GYRE_TEST_SCRIPT"], body, timeout=60) as response:
        _scripts[request.rid] = (len(ids), json.loads(response.read()))


def _force(_runner: Any, logits_output: Any, batch: Any) -> None:
    logits = logits_output.next_token_logits
    for row, (rid, length) in enumerate(zip(batch.rids, batch.seq_lens.tolist(), strict=True)):
        prompt, tokens = _scripts.get(rid, (length, []))
        position = length - prompt
        if 0 <= position < len(tokens):
            logits[row, tokens[position]] = logits[row].max() + ABOVE_ALL
