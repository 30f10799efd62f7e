"""The HTTP doors: POST /gyre/kv/<command> with the run's secret, answered by the scheduler processes, and what policy
the engine has for KV of older weights, which is no secret."""

import hmac
import json
from typing import Any

from fastapi import Request
from fastapi.responses import ORJSONResponse

from services.cell_agent.engine.kv import hooks, wire


def add(secret: str) -> None:
    """To SGLang's application, in the process that serves it."""
    import sglang.srt.entrypoints.http_server as http_server
    from sglang.srt.managers.io_struct import DumperControlReqInput

    async def kv(command: str, request: Request) -> ORJSONResponse:
        if not authorized(request.headers.get("authorization", ""), secret):
            return _answer(401, {"kind": "KvRefused", "message": "the run's secret is missing or wrong"})
        body = json.loads(await request.body() or b"{}")
        manager = http_server._global_state.tokenizer_manager
        answers = await manager.dumper_control(DumperControlReqInput(method=wire.CONTROL + command, body=body))
        failed = [answer.error for answer in answers if not answer.success]
        if failed:
            return _answer(409, json.loads(failed[0]))
        return _answer(200, answers[0].response[0])

    async def stale() -> dict[str, str]:
        return {"policy": hooks.stale_policy()}

    http_server.app.add_api_route(wire.ROUTE + "/{command}", kv, methods=["POST"], response_model=None)
    http_server.app.add_api_route(wire.STALE_ROUTE, stale, methods=["GET"])


def authorized(header: str, secret: str) -> bool:
    return hmac.compare_digest(header.encode(), f"Bearer {secret}".encode())


def _answer(status: int, content: dict[str, Any]) -> ORJSONResponse:
    return ORJSONResponse(status_code=status, content=content)
