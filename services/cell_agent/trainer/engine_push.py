"""Puts a snapshot into a running SGLang server and proves that it arrived.

Live calls survive, and no new call ever uses a key/value entry of old weights. What the live ones do with theirs is the
run's choice (cells.kv_stale). How, from SGLang 0.5.23's source (managers/tokenizer_manager.py, scheduler.py,
scheduler_components/weight_updater.py):

- Outside a pause, every weight call waits for the writer lock, that is until all running calls have ended: hours here.
- `pause_generation` mode "abort" ends all calls and polls once a second; "in_place" keeps the running batch and its
  KV between two forward passes, so a flush is refused and old KV stays in the prefix cache, unmarked; "retract" puts
  running calls back into the waiting queue, gives their KV back, and answers at once. Both answer weight calls while
  they pause.
- While paused, waiting calls don't count as busy, so `flush_cache` inside update_weights_from_tensor succeeds and
  empties the prefix cache and the KV pool. After `continue_generation` each retracted call prefills its prompt plus
  what it had generated under the new weights and goes on; its tokens carry the version they were sampled under
  (weight_versions).

So for `drop`: pause(retract) -> begin -> update(flush_cache, weight_version) -> end -> verify -> continue. For `keep`:
the same with pause(in_place) and without the flush; that is allowed only where the engine itself keeps new calls off
old entries (engine/kv/versions.py), which it is asked first. If anything fails after the weights may have changed, the
engine is left paused, so that no token is sampled from unknown weights: restart it.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import time
import urllib.parse
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from services.cell_agent.engine.kv.wire import STALE_ROUTE
from services.cell_agent.transfer.weights import Snapshot

TIMEOUT_S = 120.0
VOCAB_PADDING = 64  # SGLang rounds the embedding's rows up to a multiple of this


class RefitError(Exception):
    """The engine did not take the weights. Unless the message says otherwise it is paused and must be restarted."""


def refit(engine_url: str, snapshot: Snapshot, on_cpu: bool, stale: str = "drop") -> dict[str, float]:
    """Load `snapshot` into the engine as weight version str(version). `stale`: "drop" or "keep" the KV of live calls.

    Returns the seconds of its steps: copy_s (the bytes go to shared memory), pause_s (calls are put aside, the update
    is opened), load_s (the engine takes the bytes), check_s (they are compared), resume_s. Raises RefitError."""
    times = [time.perf_counter()]
    keep = stale == "keep"
    if keep:
        _require_namespaces(engine_url)
    tensor_ranks = int(_call(engine_url, "GET", "/server_info", None).get("tp_size") or 1)
    weights = {name: tensor.clone() for name, tensor in snapshot.views().items()}
    body = {
        "serialized_named_tensors": [serialize(list(weights.items())) for _ in range(tensor_ranks)],
        "flush_cache": not keep,
        "weight_version": str(snapshot.version),
    }
    times.append(time.perf_counter())
    _call(engine_url, "POST", "/pause_generation", {"mode": "in_place" if keep else "retract"})
    try:
        _open_session(engine_url)
    except RefitError:
        _call(engine_url, "POST", "/continue_generation", {})  # nothing has changed yet
        raise
    times.append(time.perf_counter())
    _call(engine_url, "POST", "/update_weights_from_tensor", body)
    _call(engine_url, "POST", "/end_weight_update", {})
    times.append(time.perf_counter())
    if on_cpu and tensor_ranks == 1:
        verify_checksums(engine_url, weights)
    else:
        verify_samples(engine_url, weights)
    times.append(time.perf_counter())
    _call(engine_url, "POST", "/continue_generation", {})
    times.append(time.perf_counter())
    return dict(zip(("copy_s", "pause_s", "load_s", "check_s", "resume_s"), np.diff(times).tolist(), strict=True))


def _require_namespaces(engine_url: str) -> None:
    """Nothing has changed yet when this refuses."""
    status, answer = _request(engine_url, "GET", STALE_ROUTE, None)
    policy = answer.get("policy") if status == 200 and isinstance(answer, dict) else None
    if policy != "keep":
        raise RefitError(
            f"the engine at {engine_url} was not started to keep KV of older weights (its policy: {policy}), so new "
            "calls would use it; nothing was changed. Start it with GYRE_KV_STALE=keep, or set cells.kv_stale to drop"
        )


def serialize(named: list[tuple[str, Tensor]]) -> str:
    """What SGLang's tensor endpoint takes: torch's inter-process pickle (handles to shared memory), base64. Files
    rather than descriptors, because the reader is not a child of this process."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    data = io.BytesIO()
    ForkingPickler(data).dump(named)
    return base64.b64encode(data.getvalue()).decode()


def verify_checksums(engine_url: str, weights: Mapping[str, Tensor]) -> None:
    """Compare the engine's checksum of every parameter with that of the snapshot (CPU engines, one tensor rank)."""
    answer = _call(engine_url, "POST", "/weights_checker", {"action": "checksum"})
    found: dict[str, str] = answer["ranks"][0]["checksums"]
    wanted = {name: checksum(tensor) for name, tensor in engine_layout(weights, found).items()}
    wrong = sorted(name for name in wanted if found.get(name) != wanted[name])
    if wrong:
        raise RefitError(f"the engine at {engine_url} holds other weights than were sent: {wrong[:5]}; restart it")


def verify_samples(engine_url: str, weights: Mapping[str, Tensor]) -> None:
    """Compare the leading values of some tensors (GPU or tensor-parallel engines: their checksums use another hash or
    cover slices). Unchecked: no such engine was at hand."""
    names = list(weights)
    for name in {names[0], names[len(names) // 2], names[-1]}:
        answer = _call(engine_url, "POST", "/get_weights_by_name", {"name": name, "truncate_size": 16})
        flat = torch.tensor(answer, dtype=torch.float32).flatten()
        ours = weights[name].flatten().float()[: flat.numel()]
        if flat.numel() == 0 or not torch.allclose(flat[: ours.numel()], ours, rtol=1e-6, atol=0.0):
            raise RefitError(f"the engine at {engine_url} holds another {name} than was sent; restart it")


def engine_layout(weights: Mapping[str, Tensor], names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The snapshot as the engine stores it: fused qkv and gate/up, embeddings padded with zero rows."""
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
            name = name.replace(f".{part}_proj.", f".{whole}_proj.")
        fused.setdefault(name, []).append(tensor)
    result = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in fused.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in result:
            missing = -result[name].shape[0] % VOCAB_PADDING
            result[name] = torch.nn.functional.pad(result[name], (0, 0, 0, missing))
    unknown = sorted(set(result) - set(names))
    if unknown:
        raise RefitError(f"the engine has no parameters called {unknown[:5]}; is it another model? Restart it")
    return result


def checksum(tensor: Tensor) -> str:
    """SGLang's CPU tensor hash: the first 8 bytes of SHA-256 over the tensor's bytes, in hexadecimal."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


def _open_session(engine_url: str) -> None:
    """A session that an updater left open when it died is closed first."""
    status, _ = _request(engine_url, "POST", "/begin_weight_update", {})
    if status == 200:
        return
    _call(engine_url, "POST", "/end_weight_update", {})
    _call(engine_url, "POST", "/begin_weight_update", {})


def _call(engine_url: str, method: str, path: str, body: dict[str, Any] | None) -> Any:
    status, answer = _request(engine_url, method, path, body)
    if status != 200:
        raise RefitError(f"{engine_url}{path} answered {status}: {str(answer)[:400]}")
    return answer


def _request(engine_url: str, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    parts = urllib.parse.urlsplit(engine_url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RefitError(f"the engine at {engine_url} does not answer {path}: {error!r}") from error
    finally:
        connection.close()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text.decode("utf-8", "replace")
