"""Cancelling work without leaving anything of it behind.

Invariant: what these functions started or were given is through when they return or raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

AGAIN_S = 3.0


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of blocking `work`, done in a thread. A cancellation is raised after the work has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` until they have all ended. Once is not always enough: Python 3.11's wait_for, which clients of the
    bus use, forgets a cancellation that comes at the moment its result does."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
