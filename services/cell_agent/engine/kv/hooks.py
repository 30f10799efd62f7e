"""Where the plugin takes hold of SGLang 0.5.23, and nothing else. Invariant: `state` is set once, before the scheduler
process takes its first request, or `unsupported` says why not.

Version namespaces (versions.py) are set for every engine with the plugin, also where pages cannot be moved.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from services.cell_agent.engine.kv import pages, versions, wire
from services.cell_agent.engine.kv.cache import PrefixCache
from services.cell_agent.engine.kv.errors import KvError, KvUnsupported
from services.cell_agent.engine.kv.handover import Handover
from services.cell_agent.transfer.mooncake import TransferError, TransferSession

log = logging.getLogger("gyre.kv")

state: Handover | None = None  # of this scheduler process
unsupported = "the cache is not built yet"
INTERNAL = ("expire", "reap")
LEAST_MEASURED = 64  # tokens

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_COMPONENTS = "sglang.srt.managers.scheduler_components."
_OBSERVER = _COMPONENTS + "pool_stats_observer.SchedulerPoolStatsObserver."
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."


class KvHookMissing(RuntimeError):
    """SGLang has not applied a hook (it only logs that). The engine must not start: pages could be freed too soon."""


class KvKeepImpossible(RuntimeError):
    """The engine was asked to keep KV of older weights, and cannot tell it from fresh. It must not start."""


# ------------------------------------------------------------------------------------------------------- start


def after_create_tree_cache(cache: Any, ctx: Any, *_: Any, **__: Any) -> None:
    """The prefix cache and the KV pool exist: become able to hand over."""
    global state, unsupported
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(TARGETS) - HookRegistry._patched)
    if missing:
        raise KvHookMissing(f"SGLang did not apply the hooks on {missing}; the plugin is written for 0.5.23")
    try:
        state = _handover(cache, ctx)
        unsupported = ""
        log.info("KV hand-over is on: %s", state.pool.layout)
    except (KvError, TransferError) as error:
        if stale_policy() == "keep":  # without a state, waiting calls would be computed onto pages of older weights
            reason = f"KV of older weights cannot be kept here: {error}; set cells.kv_stale to drop"
            raise KvKeepImpossible(reason) from error
        unsupported = str(error)
        log.warning("KV hand-over is off: %s", error)


def _handover(cache: Any, ctx: Any) -> Handover:
    import torch
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_parallel

    params = ctx.params
    if type(cache) is not UnifiedRadixCache or cache.disable or len(cache.components) != 1:
        raise KvUnsupported("only a plain, enabled prefix cache of full attention can be handed over")
    if params.is_eagle or params.pp_size > 1 or params.attn_cp_size > 1 or get_parallel().attn_dp_enabled:
        raise KvUnsupported("speculative decoding, pipeline, context and data parallel attention are not supported")
    if cache.cache_controller is not None or cache.linker is not None:
        raise KvUnsupported("hierarchical caches and external linkers are not supported beside it")
    group = params.attn_tp_cache_group or params.tp_cache_group
    world, rank = 1, 0
    if torch.distributed.is_initialized() and group is not None:
        world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    page, allocator = int(params.page_size), params.token_to_kv_pool_allocator
    pool = pages.pool_of(allocator.get_kvcache(), page, rank, world)
    session = TransferSession(os.environ.get(wire.HOST_ENV, "127.0.0.1"), os.environ.get(wire.PROTOCOL_ENV, "tcp"))
    stream = getattr(ctx.tp_worker.model_runner, "forward_stream", None)
    prefixes = PrefixCache(cache, allocator, page, world, group, stream)
    return Handover(prefixes, pool, session, os.environ[wire.SECRET_ENV], stale_policy(), rank, group)


def stale_policy() -> str:
    policy = os.environ.get(wire.STALE_ENV, "drop")
    if policy not in versions.POLICIES:
        raise ValueError(f"{wire.STALE_ENV}={policy}: choose one of {versions.POLICIES}")
    return policy


# ---------------------------------------------------------------------------------------------------- commands


def around_control(original: Any, scheduler: Any, request: Any) -> Any:
    """Commands come as SGLang's free-form control request, which reaches all ranks in order."""
    if not request.method.startswith(wire.CONTROL):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    command = request.method.removeprefix(wire.CONTROL)
    if command in INTERNAL:
        if state is not None:
            state.internal(command, request.body)
        return None
    try:
        if state is None:
            raise KvUnsupported(unsupported)
        answer = DumperControlReqOutput(success=True, response=[state.perform(scheduler, command, request.body)])
    except KvError as error:
        answer = _failure(error.kind, str(error))
    except (KeyError, TypeError, ValueError) as error:  # msgspec.ValidationError is a ValueError
        answer = _failure("KvRefused", f"{command}: {type(error).__name__}: {error}")
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
    return None


def _failure(kind: str, message: str) -> Any:
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    return DumperControlReqOutput(success=False, response=[], error=json.dumps({"kind": kind, "message": message}))


def after_pull_raw_reqs(requests: Any, *_: Any, **__: Any) -> Any:
    """On the first rank, once per scheduler step: what time asks for joins the requests that all ranks get."""
    if state is not None and requests is not None:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        for command, body in state.due():
            requests.append(DumperControlReqInput(method=wire.CONTROL + command, body=body))
    return requests


# ------------------------------------------------------------------------------------------------ engine events


def after_checkpoint(_: Any, cache: Any, request: Any, **__: Any) -> None:
    if state is not None and state.cache.tree is cache:
        state.call_checkpointed(request)


def before_reset(cache: Any, *_: Any, **__: Any) -> None:
    if state is not None and state.cache.tree is cache:
        state.cache_resets()


def after_flush_cache(done: Any, *_: Any, **__: Any) -> Any:
    if state is not None and done:
        state.cache_was_flushed()
    return done


def after_session_held_tokens(tokens: int, *_: Any, **__: Any) -> int:
    """Slots under transfer are owned by nobody SGLang knows; its idle check would take them for a leak."""
    return tokens + (state.adoptions.in_flight_tokens if state is not None else 0)


def before_generate(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.runtime_context import get_serving

    request.extra_key = versions.admitted(request.extra_key, str(get_serving().weight_version))
    return (scheduler, request, *args), kwargs


def after_batch(_: Any, scheduler: Any, batch: Any, *args: Any, **__: Any) -> None:
    """How fast this engine computes prompts decides whether pages are worth moving to it. Batches of a few tokens (the
    first step of a call whose prefix is cached) would tell what a step costs, not what a token does."""
    tokens = batch.extend_num_tokens or 0
    if state is not None and batch.forward_mode.is_extend() and tokens >= LEAST_MEASURED and batch.launch_ts:
        state.computed(int(tokens), time.monotonic() - batch.launch_ts)


def after_version_change(_: Any, scheduler: Any, *args: Any, **__: Any) -> None:
    if state is not None:
        state.version_changed(scheduler)


# (target, hook, kind of hook)
HOOKS = (
    ("sglang.srt.mem_cache.registry.create_tree_cache", after_create_tree_cache, "after"),
    (_SCHEDULER + "handle_dumper_control", around_control, "around"),
    (_SCHEDULER + "handle_generate_request", before_generate, "before"),
    (_SCHEDULER + "record_weight_version_change", after_version_change, "after"),
    (_SCHEDULER + "flush_cache", after_flush_cache, "after"),
    (_SCHEDULER + "process_batch_result", after_batch, "after"),
    (_COMPONENTS + "request_receiver.SchedulerRequestReceiver._pull_raw_reqs", after_pull_raw_reqs, "after"),
    (_OBSERVER + "session_held_tokens", after_session_held_tokens, "after"),
    (_TREE + "checkpoint", after_checkpoint, "after"),
    (_TREE + "reset", before_reset, "before"),
)
TARGETS = tuple(target for target, _, _ in HOOKS)
