"""From a prompt to a recorded reply.

Invariant: a call is announced before an engine gets it, and whatever was generated is recorded before anybody learns of
it or of the failure that ended it; a reply is a function of the recorded ids and the request alone. What is left behind
unrecorded (the proxy stops, or lost the call to another one) is in the stream, for another process to go on with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.proxy import canonical, replies
from services.proxy.core import ProxyCore
from services.proxy.dialects.base import ApiError, Reply, Request, context_too_long
from services.proxy.engine_client import EngineClient, EngineRefused, NoRoute, Route, is_too_long
from services.proxy.generation import Generation
from services.proxy.handover import Continued, Handover, until_settled
from services.proxy.plans import Plan
from services.proxy.progress import Progress
from services.proxy.prompts import Prompt, Prompts
from services.proxy.reading import Reading
from services.proxy.recorder import Recorder
from services.proxy.rendering import Parsed, Rendering
from services.proxy.watch import Watch
from shared.telemetry import Telemetry, Trail

log = logging.getLogger("gyre.proxy.generating")

Ids = npt.NDArray[np.int32]

ENGINE_RESERVE = 8  # SGLang takes no prompt that leaves less of the context than this
WATCHED_INTERVAL = 8  # tokens between two reports where a stop sequence or early text waits for them


@dataclass(frozen=True)
class Limits:
    """What the run file says about calls. `context`: longest prompt + output in tokens."""

    context: int
    call_timeout_s: float
    handover_s: float = 5.0  # a call that moves waits so long for its KV pages


class Lost(Exception):
    """Another process of the proxy has taken the call over."""


TRIES_OF_A_TAKE = 1000
"""Requests to engines that one owner of a call can make under names of its own."""


@dataclass(eq=False)
class Work:
    """One generation to do."""

    plan: Plan
    prompt: Prompt
    request: Request
    created: int
    progress: Progress
    watched: bool = False  # somebody reads along
    take: int = 0
    found: Generation | None = None  # what an earlier owner of the call left behind
    aborted: str = ""
    closing: bool = False
    lost: bool = False
    discarded: bool = False  # set with the record
    engine: asyncio.Task[None] | None = field(default=None, repr=False)
    _ending: bool = False

    def abort(self, reason: str) -> None:
        """End the generation, to be recorded as far as it got; nobody wants the reply."""
        self._end_engine()
        self.aborted = reason

    def lose(self) -> None:
        """Another process owns the call now."""
        self._end_engine()
        self.lost = True

    def close(self) -> bool:
        """The proxy stops: end the generation, to be recorded as far as it got, or to be gone on with by the next
        process. False if it has not begun."""
        self._end_engine()
        self.closing = True
        return self.engine is not None

    def _end_engine(self) -> None:
        """Once: a second cancellation would not let the engine say its last word."""
        if self.engine is not None and not self._ending:
            self._ending = True
            self.engine.cancel()


class Usage(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    finish: str


class Generating:
    def __init__(
        self,
        core: ProxyCore,
        rendering: Rendering,
        prompts: Prompts,
        engine: EngineClient,
        recorder: Recorder,
        watch: Watch,
        limits: Limits,
        telemetry: Telemetry,
        trail: Trail,
    ) -> None:
        self._core, self._rendering, self._prompts, self._engine = core, rendering, prompts, engine
        self._recorder, self._watch, self._limits = recorder, watch, limits
        self._telemetry, self._trail = telemetry, trail
        self.context = limits.context

    def reading(self, request: Request, *, early: bool) -> Reading | None:
        """Something that follows the text while it is generated, if anybody wants to know."""
        if not (request.stop or early) or not self._rendering.marks_calls:
            return None
        return Reading(self._rendering.text_of, self._rendering.special_ids, request.stop)

    async def run(self, work: Work, read: Callable[[list[int]], bool], unwanted: Callable[[], bool]) -> Reply:
        """Raises ApiError or Lost. `read` is told new ids; `unwanted` is asked when the record is made."""
        started, plan, request = time.monotonic(), work.plan, work.request
        continued = Continued(self._telemetry, self._trail)

        def reported(new: list[int]) -> bool:
            continued.token()
            work.progress.grown(generation)
            return read(new)

        generation = Generation(work.prompt.pieces, plan.sampling.max_new_tokens, reported=reported)
        if work.watched:
            generation.interval = WATCHED_INTERVAL
        if work.found is not None:
            self._go_on(generation, work.found)
        problem = None
        if not generation.finish:
            problem = await self._sample(work, generation, started + self._limits.call_timeout_s, continued)
        if work.lost:
            raise Lost
        if work.closing and problem is not None and not self._core.ending:
            await work.progress.durable(generation)
            raise problem
        if problem is not None and not generation.ids:
            await self._recorder.drop(plan.call, plan.execution, plan.attempt, tokens=0, reason=problem.message)
            raise problem
        reply, context, delivered = None, "", -1
        output = np.asarray(generation.ids, dtype=np.int32)
        if problem is None:
            parsed = self._rendering.parse(output, work.prompt.tail, request.tools)
            usage = Usage(work.prompt.length, len(output), generation.cached_tokens, generation.finish)
            reply = self._reply(plan.call, parsed, output, usage, request, work.created)
            context = canonical.step(bytes.fromhex(plan.request), canonical.message(reply.message)).hex()
            if reply.stop_sequence is not None:
                generation.finish = "stop"
                delivered = self._rendering.tokens_before(output, reply.stop_sequence)
            self._remember(plan, parsed)
        work.discarded = reply is None or unwanted()
        await self._recorder.record(
            plan,
            generation,
            context=context,
            discarded=work.discarded,
            seconds=time.monotonic() - started,
            delivered=delivered,
        )
        if reply is None:
            assert problem is not None
            raise problem
        self._prompts.remember(plan.call, work.prompt, output)
        return reply

    def _go_on(self, generation: Generation, found: Generation) -> None:
        generation.cell, generation.cached_tokens = found.cell, found.cached_tokens
        generation.begin_with(found.ids, found.logprobs, found.spans)
        generation.finish = found.finish
        if not generation.finish and generation.ids:
            if generation.stopped or self._engine.is_end(generation.ids[-1]):
                generation.finish = "stop"
            elif len(generation.ids) >= generation.limit:
                generation.finish = "length"

    async def settle(self, plan: Plan, found: Generation) -> None:
        """Record a call that nobody will ask for any more, as far as it got."""
        found.finish = found.finish or "abort"
        await self._recorder.record(plan, found, context="", discarded=True, seconds=0.0)

    def _remember(self, plan: Plan, parsed: Parsed) -> None:
        execution = self._core.executions.get(plan.execution)
        if execution is not None:
            execution.contexts.remember(plan.call, replies.payloads(parsed))

    def reply_again(self, call: str, prompt: Ids, output: Ids, finish: str, request: Request, created: int) -> Reply:
        """The reply of a call that is recorded."""
        parsed = self._rendering.parse(output, prompt, request.tools)
        return self._reply(call, parsed, output, Usage(len(prompt), len(output), 0, finish), request, created)

    def _reply(self, call: str, parsed: Parsed, output: Ids, usage: Usage, request: Request, created: int) -> Reply:
        whole = replies.assistant(parsed, call, request.dialect)
        raw = self._rendering.decode(output).strip() if whole.tool_calls else ""
        message, stop = replies.delivered(whole, raw, request)
        return Reply(
            call=call,
            model=request.model,
            created=created,
            message=message,
            finish=replies.finish_of(message, usage.finish, stop),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            stop_sequence=stop,
        )

    async def _sample(
        self, work: Work, generation: Generation, deadline: float, continued: Continued
    ) -> ApiError | None:
        """Fill `generation`; what went wrong, if it did not come to its end."""
        plan = work.plan
        if work.aborted:
            return ApiError(410, "gone", work.aborted)

        async def find_route(timeout_s: float) -> Route | None:
            found = await self._watch.until(lambda: self._core.route(plan.execution), timeout_s)
            return Route(*found) if found else None

        async def moved(rid: str) -> Handover | None:
            cuts = self._core.cuts
            continued.cut(rid)
            return await until_settled(self._watch, cuts, plan.execution, rid, self._limits.handover_s)

        async def ready() -> None:
            await work.progress.durable(generation)

        first = work.take * TRIES_OF_A_TAKE
        doing = self._engine.generate(generation, plan.sampling, find_route, deadline, plan.call, moved, ready, first)
        work.engine = asyncio.create_task(doing, name=f"{plan.call} engine")
        try:
            await work.engine
        except asyncio.CancelledError:
            if work.aborted:
                return ApiError(410, "gone", work.aborted)
            if work.lost:
                return None
            if work.closing and work.engine.cancelled():
                return ApiError(503, "unavailable", "the proxy is stopping", retry_after=1)
            work.engine.cancel()
            raise
        except NoRoute:
            text = f"no engine served the call within {self._limits.call_timeout_s:g} s"
            return ApiError(503, "unavailable", text, retry_after=5)
        except EngineRefused as error:
            if is_too_long(error):
                return context_too_long(work.prompt.length, self._limits.context - ENGINE_RESERVE)
            log.error("call %s was refused by the engine: %s", plan.call, error)
            return ApiError(500, "internal", f"the engine refused the call: {error}")
        return None
