"""A route of the engine that SGLang lacks: which requests are live, and ending some of them.

    GET  /gyre/calls                -> {"calls": [rid, ...]}
    POST /gyre/calls/abort {"calls": [rid, ...]} -> {"aborted": [rid, ...]}: those that were live

Invariant: lists what the HTTP process has taken in and not yet answered to the end, health checks aside; so an empty
list, and no load, mean that nothing runs. An abort only asks: the request's own answer tells when it has stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PATH = "/gyre/calls"
HEALTH_CHECK = "HEALTH_CHECK"


def install(http_server: Any) -> None:
    """Add the routes to SGLang's application; before the server starts."""

    def manager() -> Any:
        return http_server._global_state.tokenizer_manager

    async def calls() -> dict[str, list[str]]:
        return {"calls": live(manager().rid_to_state)}

    async def abort(body: dict[str, list[str]]) -> dict[str, list[str]]:
        tokenizer = manager()
        wanted = set(body["calls"])
        found = [rid for rid in live(tokenizer.rid_to_state) if rid in wanted]
        for rid in found:
            tokenizer.abort_request(rid=rid)
        return {"aborted": found}

    http_server.app.add_api_route(PATH, calls, methods=["GET"])
    http_server.app.add_api_route(f"{PATH}/abort", abort, methods=["POST"])


def live(requests: Iterable[str]) -> list[str]:
    return [rid for rid in requests if isinstance(rid, str) and not rid.startswith(HEALTH_CHECK)]
