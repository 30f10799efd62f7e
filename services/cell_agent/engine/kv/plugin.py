"""SGLang's entry point (`sglang.srt.plugins`): hand KV pages of live calls over to another engine.

Off unless GYRE_KV_SECRET is set, so that an SGLang server that happens to run in the same environment is left alone.
SGLang calls `register` in every process of a server and applies the hooks afterwards; a hook that it cannot apply is
only logged there, so the scheduler checks them all before it takes a request (hooks.py) and refuses to start.
"""

from __future__ import annotations

import multiprocessing
import os

from services.cell_agent.engine.kv.wire import SECRET_ENV


def register() -> None:
    secret = os.environ.get(SECRET_ENV, "")
    if not secret:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from services.cell_agent.engine.kv import hooks

    for target, hook, kind in hooks.HOOKS:
        HookRegistry.register(target, hook, HookType(kind))
    if multiprocessing.parent_process() is None:
        from services.cell_agent.engine.kv import routes

        routes.add(secret)
