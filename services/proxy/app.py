"""The HTTP side: which dialect a path speaks, whose key it carries, and how a reply is kept alive and delivered.

Invariants: every answer is in the dialect of its path, errors included; a reply's bytes are sent only when its record
is durable; a stream begins at once, is never silent for longer than KEEP_ALIVE_S and is never cut after a tool call
has begun (the reply is written whole).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.proxy.bodies import Bodies
from services.proxy.calls import Call, Calls
from services.proxy.core import Ended, Execution, ProxyCore, Unknown
from services.proxy.delivery import deliver, send_body, send_error_stream
from services.proxy.dialects import anthropic, openai_chat, openai_responses
from services.proxy.dialects.base import ApiError, Dialect, bad_request
from services.proxy.watch import Watch

log = logging.getLogger("gyre.proxy.app")

LONGEST_BODY = 64 * 2**20
KEY_WAIT_S = 2.0  # so long a key that is not known yet may take to come through the stream

LastSequence = Callable[[], Awaitable[int]]
Refused = Callable[[str, ApiError], None]
"""(execution or "", error): called for every call that was refused or failed without a record."""


class HarnessGone(Exception):
    """The harness hung up before it had sent its request."""


class ProxyApp:
    """Everything that answers HTTP requests."""

    def __init__(
        self,
        core: ProxyCore,
        calls: Calls,
        bodies: Bodies,
        watch: Watch,
        last_sequence: LastSequence,
        refused: Refused,
        model: str,
    ) -> None:
        self._core, self._calls, self._bodies, self._watch = core, calls, bodies, watch
        self._last_sequence, self._refused = last_sequence, refused
        self._model = model

    def asgi(self) -> Starlette:
        def post(path: str, dialect: Dialect, answer: Answer) -> list[Route]:
            point = _Endpoint(self, dialect, answer)
            return [Route(p, point, methods=["POST"]) for p in (f"/v1{path}", path)]

        return Starlette(
            routes=[
                *post("/chat/completions", openai_chat, self.complete),
                *post("/responses", openai_responses, self.complete),
                *post("/messages", anthropic, self.complete),
                *post("/messages/count_tokens", anthropic, self.count_tokens),
                *[Route(p, self.models, methods=["GET"]) for p in ("/v1/models", "/models")],
                *[Route(f"{p}/{{name:path}}", self.model, methods=["GET"]) for p in ("/v1/models", "/models")],
                *[Route(p, _alive, methods=["GET", "HEAD"]) for p in ("/", "/v1", "/health", "/api/hello")],
            ],
            exception_handlers={404: _not_found, 405: _not_found},
        )

    # ---------------------------------------------------------------------------------------------------- answers

    async def complete(self, dialect: Dialect, exchange: Exchange) -> None:
        execution = await self.identify(exchange.headers)
        exchange.execution = execution.execution
        body = await exchange.body()
        # What came while the body was read may have ended the execution.
        execution = await self.identify(exchange.headers)
        request = self._bodies.read(execution.execution, dialect, body, exchange.headers)
        await self._catch_up_with_others()
        try:
            call = await self._calls.open(execution, request)
        except ApiError as error:
            if not request.stream or error.kind not in getattr(dialect, "errors_in_stream", ()):
                raise
            self._refused(execution.execution, error)
            await send_error_stream(exchange.send, dialect.stream(request, "refused", 0), error)
            return
        await deliver(self._calls, dialect, request, call, exchange.receive, exchange.send)
        self._report(call, execution.execution)

    async def count_tokens(self, dialect: Dialect, exchange: Exchange) -> None:
        execution = await self.identify(exchange.headers)
        exchange.execution = execution.execution
        body = await exchange.body()
        execution = await self.identify(exchange.headers)
        counting = functools.partial(anthropic.parse, counting=True)
        request = self._bodies.read(execution.execution, dialect, body, exchange.headers, counting)
        tokens = await self._calls.count_tokens(execution, request)
        await send_body(exchange.send, 200, anthropic.token_count(tokens))

    async def models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        entry = _model_entry(self._model, request.headers)
        return JSONResponse(
            {"object": "list", "data": [entry], "has_more": False, "first_id": self._model, "last_id": self._model}
        )

    async def model(self, request: Any) -> Any:
        """Any name is answered with the one model there is: harnesses ask for the names they know."""
        from starlette.responses import JSONResponse

        return JSONResponse(_model_entry(request.path_params["name"], request.headers))

    # ----------------------------------------------------------------------------------------------------- access

    async def identify(self, headers: Mapping[str, str]) -> Execution:
        """The execution whose key the request carries; raises ApiError 401 or 410."""
        key = key_of(headers)
        if not key:
            raise ApiError(401, "unauthorized", "no API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        key_hash = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).hexdigest()
        if key_hash not in self._core.keys:
            await self._catch_up(lambda: key_hash in self._core.keys)
        try:
            return self._core.identify(key_hash)
        except Unknown:
            raise ApiError(401, "unauthorized", "this API key belongs to no execution") from None
        except Ended as ended:
            raise ApiError(410, "gone", f"execution {ended} has ended: its key is no longer valid") from None

    async def _catch_up(self, known: Callable[[], bool]) -> None:
        """Wait until the stream's messages up to now are known, or `known`."""
        try:
            async with asyncio.timeout(KEY_WAIT_S):
                last = await self._last_sequence()
                await self._watch.until(lambda: True if known() or self._watch.sequence >= last else None, KEY_WAIT_S)
        except TimeoutError:
            log.warning("the stream did not answer within %g s", KEY_WAIT_S)

    async def _catch_up_with_others(self) -> None:
        """Where several proxies serve, the call before may have been another one's: its record must be known."""
        if len(self._core.proxies) > 1:
            await self._catch_up(lambda: False)

    def refused(self, execution: str, error: ApiError) -> None:
        self._refused(execution, error)

    def _report(self, call: Call, execution: str) -> None:
        if call.reply.done() and not call.reply.cancelled():
            error = call.reply.exception()
            if isinstance(error, ApiError):
                self._refused(execution, error)


Answer = Callable[[Dialect, "Exchange"], Awaitable[None]]


class Exchange:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        self.receive, self._send = receive, send
        self.execution = ""
        self.begun = False

    async def send(self, message: Any) -> None:
        self.begun = True
        await self._send(message)

    async def body(self) -> bytes:
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise HarnessGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > LONGEST_BODY:
                raise ApiError(413, "too_large", f"the request is longer than {LONGEST_BODY} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)


class _Endpoint:
    """An ASGI application for one path: the boundary at which every error becomes an answer of the dialect."""

    def __init__(self, app: ProxyApp, dialect: Dialect, answer: Answer) -> None:
        self._app, self._dialect, self._answer = app, dialect, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(self._dialect, exchange)
            return
        except HarnessGone:
            return
        except ApiError as error:
            problem = error
        except RecursionError:
            problem = bad_request("the request is nested too deeply")
        except Exception:  # the edge of the request
            log.exception("a request of %s failed", exchange.execution or "an unknown execution")
            problem = ApiError(500, "internal", "the proxy failed; its log has the reason")
        self._app.refused(exchange.execution, problem)
        if not exchange.begun:
            await send_body(send, problem.status, self._dialect.error(problem), problem.headers())


def key_of(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _model_entry(name: str, headers: Mapping[str, str]) -> dict[str, Any]:
    if "anthropic-version" in headers:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}


async def _alive(_request: Any) -> Any:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("gyre proxy\n")


async def _not_found(request: Any, error: Exception) -> Any:
    from starlette.responses import Response

    dialect: Dialect = anthropic if "anthropic-version" in request.headers else openai_chat
    status = getattr(error, "status_code", 404)
    kind = "not_found" if status == 404 else "bad_request"
    body = dialect.error(ApiError(status, kind, f"{request.method} {request.url.path} is not served here"))
    return Response(body, status, media_type="application/json")


__all__ = ["ProxyApp", "key_of"]
