"""One model call: which recorded call it continues, its prompt, its generation, its record, its reply.

Invariants: a prompt is the exact ids of the call that it continues plus the encoding of what is new. A generation goes
on when the harness hangs up, and is recorded in any case. A request that asks to continue the same conversation as an
earlier one, whose answer nobody received whole, gets that answer; an answer that was delivered is never given twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.proxy import canonical, replies
from services.proxy.context import Match, opening_mark, opening_of, opens_alike
from services.proxy.core import AbortCalls, Execution, ProxyCore
from services.proxy.dialects.base import ApiError, Reply, Request, context_too_long
from services.proxy.engine_client import EngineClient, EngineRefused, Generation, NoRoute, Route, is_too_long
from services.proxy.profiles import Profile, Surroundings, classify, for_harness
from services.proxy.recorder import Plan, Recorder
from services.proxy.rendering import Parsed, Rendering
from services.proxy.watch import Watch
from shared.events import Sampling
from shared.ids import call_id

log = logging.getLogger("gyre.proxy.calls")

Ids = npt.NDArray[np.int32]

ENGINE_RESERVE = 8  # SGLang takes no prompt that leaves less of the context than this


@dataclass(frozen=True)
class Limits:
    """What the run file says about calls. `context`: longest prompt + output in tokens."""

    context: int
    call_timeout_s: float


@dataclass(eq=False)
class Call:
    """A generation, in flight or done, and who waits for it."""

    call: str
    key: tuple[str, int, str]  # execution, attempt, request
    reply: asyncio.Future[Reply]
    created: int
    waiting: int = 0
    delivered: bool = False
    aborted: str = ""
    engine: asyncio.Task[None] | None = None
    task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Somebody waits for the reply inside the block."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids(parent)[:keep] + input_ids; keep -1 = all of the parent."""

    parent: str
    keep: int
    input_ids: Ids
    ids: Ids


class Usage(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    finish: str


class Calls:
    """All calls of this proxy process."""

    def __init__(
        self,
        core: ProxyCore,
        rendering: Rendering,
        engine: EngineClient,
        recorder: Recorder,
        watch: Watch,
        limits: Limits,
    ) -> None:
        self._core, self._rendering, self._engine = core, rendering, engine
        self._recorder, self._watch, self._limits = recorder, watch, limits
        self._open: dict[tuple[str, int, str], Call] = {}  # the latest per conversation, until delivered
        self._flying: set[Call] = set()
        self._numbers: dict[tuple[str, int], int] = {}  # last call number given out, per attempt
        self._openings: dict[tuple[str, int], str] = {}
        self._mine: dict[tuple[str, int], set[str]] = {}  # calls that this process generated or gave out
        self._profiles: dict[str, Profile] = {}
        self._warned: set[str] = set()

    # ------------------------------------------------------------------------------------------------ for the app

    def open(self, execution: Execution, request: Request) -> Call:
        """The call that answers `request`: an earlier one nobody received, or a new one. Raises ApiError."""
        match = self._match(execution, request)
        key = (execution.execution, execution.attempt, match.request)
        earlier = self._open.get(key)
        if earlier is not None and not earlier.waiting and not earlier.reply.cancelled() and not _failed(earlier):
            return earlier
        return self._recall(execution, request, key) or self._start(execution, request, match, key)

    def count_tokens(self, execution: Execution, request: Request) -> int:
        return len(self._prompt(execution, request, self._match(execution, request)).ids)

    def delivered(self, call: Call) -> None:
        """The harness has the whole reply: the same request again means a new sample."""
        call.delivered = True
        if self._open.get(call.key) is call:
            del self._open[call.key]

    def abort(self, command: AbortCalls) -> None:
        """Cut what is in flight; forget the attempt."""
        for call in [*self._flying, *self._open.values()]:
            if call.key[0] == command.execution and call.key[1] <= command.attempt:
                call.aborted = command.reason
                if call.engine is not None:
                    call.engine.cancel()
                self._open.pop(call.key, None)
        tables: tuple[dict[tuple[str, int], Any], ...] = (self._numbers, self._openings, self._mine)
        for table in tables:
            for attempt in [a for a in table if a[0] == command.execution and a[1] <= command.attempt]:
                del table[attempt]

    async def close(self) -> None:
        """Cut everything; nothing more is recorded."""
        tasks = [call.task for call in self._flying if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -------------------------------------------------------------------------------------------------- preparing

    def _profile(self, harness: str) -> Profile:
        if harness not in self._profiles:
            self._profiles[harness] = for_harness(harness)
        return self._profiles[harness]

    def _match(self, execution: Execution, request: Request) -> Match:
        def payloads(call: str) -> tuple[str, ...]:
            tree = execution.contexts.tree
            parsed = self._rendering.parse(tree.nodes[call].output_ids, tree.prompt_ids(call), request.tools)
            return replies.payloads(parsed)

        fold = self._profile(execution.harness).folds()
        return execution.contexts.match(request.messages, request.tools, payloads, fold)

    def _prompt(self, execution: Execution, request: Request, match: Match) -> Prompt:
        if match.call:
            tree = execution.contexts.tree
            node, before = tree.nodes[match.call], tree.ids(match.call)
            cut = node.prompt_length
            extension = self._rendering.extend(before[:cut], before[cut:], match.new, request.tools)
            if extension is not None:
                keep = -1 if extension.keep == node.length else extension.keep
                new = np.asarray(extension.ids, dtype=np.int32)
                return Prompt(match.call, keep, new, np.concatenate((before[: extension.keep], new)))
        ids = np.asarray(self._rendering.fresh(request.messages, request.tools), dtype=np.int32)
        return Prompt("", -1, ids, ids)

    def _recall(self, execution: Execution, request: Request, key: tuple[str, int, str]) -> Call | None:
        """A call that an earlier process of the proxy recorded, whose reply may not have reached the harness."""
        node = execution.contexts.by_request(key[2])
        mine = self._mine.setdefault(key[:2], set())
        if node is None or node.children or node.call in mine or node.finish_reason == "abort":
            return None
        mine.add(node.call)
        call = Call(node.call, key, asyncio.get_running_loop().create_future(), int(time.time()))
        tree, output = execution.contexts.tree, node.output_ids
        parsed = self._rendering.parse(output, tree.prompt_ids(node.call), request.tools)
        usage = Usage(node.prompt_length, len(output), 0, node.finish_reason)
        call.reply.set_result(self._reply(request, call, parsed, output, usage))
        self._open[key] = call
        return call

    def _start(self, execution: Execution, request: Request, match: Match, key: tuple[str, int, str]) -> Call:
        prompt = self._prompt(execution, request, match)
        longest = self._limits.context - ENGINE_RESERVE
        room = longest - len(prompt.ids)
        if room < 1:
            raise context_too_long(len(prompt.ids), longest)
        plan = self._plan(execution, request, match, prompt, room)
        loop = asyncio.get_running_loop()
        call = Call(plan.call, key, loop.create_future(), int(time.time()))
        call.reply.add_done_callback(_retrieve)
        self._open[key] = call
        self._flying.add(call)
        call.task = loop.create_task(self._run(call, plan, prompt.ids, request), name=plan.call)
        return call

    def _plan(self, execution: Execution, request: Request, match: Match, prompt: Prompt, room: int) -> Plan:
        attempt = (execution.execution, execution.attempt)
        number = max(execution.contexts.latest_number, self._numbers.get(attempt, 0)) + 1
        self._numbers[attempt] = number
        call = call_id(*attempt, number)
        self._mine.setdefault(attempt, set()).add(call)
        sampling, asked = execution.sampling, request.max_tokens
        limit = min(room, sampling.max_new_tokens, asked if asked is not None else room)
        opening = opening_of(request.messages)
        call_class = self._class(execution, request, match, opening)
        if call_class.startswith("main"):
            self._openings.setdefault(attempt, opening_mark(opening))
        return Plan(
            call=call,
            execution=execution.execution,
            attempt=execution.attempt,
            parent=prompt.parent,
            keep=prompt.keep,
            call_class=call_class,
            input_ids=prompt.input_ids,
            sampling=Sampling(sampling.temperature, sampling.top_p, limit),
            request=match.request,
            opening="" if prompt.parent else opening_mark(opening),
            diverged=match.diverged,
            dialect=request.dialect,
        )

    def _class(self, execution: Execution, request: Request, match: Match, opening: str) -> str:
        first = execution.contexts.opening or self._openings.get((execution.execution, execution.attempt), "")
        parent = execution.contexts.tree.nodes[match.call].call_class if match.call else ""
        around = Surroundings(parent, not first or opens_alike(opening, first))
        verdict = classify(self._profile(execution.harness), request, around)
        if not verdict.known and execution.harness not in self._warned:
            self._warned.add(execution.harness)
            log.warning(
                "a call of %s fits no rule of the profile for harness %r and is recorded as %s: describe it in a "
                "profile (services/proxy/harness_profiles). First user text: %.200r",
                execution.execution,
                execution.harness,
                verdict.call_class,
                opening,
            )
        return verdict.call_class

    # ------------------------------------------------------------------------------------------------- generating

    async def _run(self, call: Call, plan: Plan, prompt: Ids, request: Request) -> None:
        """Generate, record, reply. Ends with call.reply done, whatever happens."""
        try:
            call.reply.set_result(await self._generate(call, plan, prompt, request))
        except ApiError as error:
            call.reply.set_exception(error)
        except asyncio.CancelledError:
            call.reply.cancel()
            raise
        except Exception as error:  # the edge of the call: the harness gets an error, the process lives on
            log.exception("call %s failed", plan.call)
            call.reply.set_exception(ApiError(500, "internal", f"call {plan.call} failed: {type(error).__name__}"))
        finally:
            self._flying.discard(call)
            if (_failed(call) or call.aborted) and self._open.get(call.key) is call:
                del self._open[call.key]

    async def _generate(self, call: Call, plan: Plan, prompt: Ids, request: Request) -> Reply:
        started = time.monotonic()
        generation = Generation(prompt, plan.sampling.max_new_tokens)
        problem = await self._sample(call, plan, generation, started + self._limits.call_timeout_s)
        if problem is not None and not generation.ids:
            raise problem
        reply, context = None, ""
        if problem is None:
            output = np.asarray(generation.ids, dtype=np.int32)
            parsed = self._rendering.parse(output, prompt, request.tools)
            usage = Usage(len(prompt), len(output), generation.cached_tokens, generation.finish)
            reply = self._reply(request, call, parsed, output, usage)
            context = canonical.step(bytes.fromhex(plan.request), canonical.message(reply.message)).hex()
            execution = self._core.executions.get(plan.execution)
            if execution is not None:
                execution.contexts.remember(plan.call, replies.payloads(parsed))
        await self._recorder.record(
            plan,
            generation,
            context=context,
            discarded=reply is None or not call.waiting,
            seconds=time.monotonic() - started,
        )
        if reply is None:
            assert problem is not None
            raise problem
        return reply

    def _reply(self, request: Request, call: Call, parsed: Parsed, output: Ids, usage: Usage) -> Reply:
        whole = replies.assistant(parsed, call.call, request.dialect)
        raw = self._rendering.decode(output).strip() if whole.tool_calls else ""
        message, stop = replies.delivered(whole, raw, request)
        return Reply(
            call=call.call,
            model=request.model,
            created=call.created,
            message=message,
            finish=replies.finish_of(message, usage.finish, stop),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            stop_sequence=stop,
        )

    async def _sample(self, call: Call, plan: Plan, generation: Generation, deadline: float) -> ApiError | None:
        """Fill `generation`; what went wrong, if it did not come to its end."""

        async def find_route(timeout_s: float) -> Route | None:
            found = await self._watch.until(lambda: self._core.route(plan.execution), timeout_s)
            return Route(*found) if found else None

        work = self._engine.generate(generation, plan.sampling, find_route, deadline, plan.call)
        call.engine = asyncio.create_task(work, name=f"{plan.call} engine")
        try:
            await call.engine
        except asyncio.CancelledError:
            if not call.aborted:
                call.engine.cancel()
                raise
            return ApiError(410, "gone", call.aborted)
        except NoRoute:
            text = f"no engine served the call within {self._limits.call_timeout_s:g} s"
            return ApiError(503, "unavailable", text, retry_after=5)
        except EngineRefused as error:
            if is_too_long(error):
                return context_too_long(len(generation.prompt), self._limits.context - ENGINE_RESERVE)
            log.error("call %s was refused by the engine: %s", plan.call, error)
            return ApiError(500, "internal", f"the engine refused the call: {error}")
        return None


def _failed(call: Call) -> bool:
    return call.reply.done() and (call.reply.cancelled() or call.reply.exception() is not None)


def _retrieve(reply: asyncio.Future[Reply]) -> None:
    """An error that nobody waits for any more is not worth a warning of the event loop."""
    if not reply.cancelled():
        reply.exception()
