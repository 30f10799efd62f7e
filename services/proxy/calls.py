"""One model call: found again or begun, generated, recorded, and whether its reply arrived.

Invariants: a generation goes on when the harness hangs up, and is recorded in any case. A request that asks to continue
the same conversation as an earlier one, whose answer nobody received whole, gets that answer, whichever process of the
proxy began it; an answer that was delivered is never given twice. What a record says about delivery is corrected when
it turns out otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.proxy.core import AbortCalls, Execution, ProxyCore
from services.proxy.dialects.base import ApiError, Reply, Request, context_too_long
from services.proxy.flights import Flight
from services.proxy.generating import ENGINE_RESERVE, Generating, Lost, Work
from services.proxy.plans import Plans, plan_of
from services.proxy.prompts import Prompt, Prompts
from services.proxy.reading import Reading
from services.proxy.recorder import Recorder
from services.proxy.settling import Settling, new_ids
from services.proxy.takeover import Takeover
from shared.events import Event, ModelCallBegun
from shared.tree import Node

log = logging.getLogger("gyre.proxy.calls")

CLOSE_S = 8.0
"""So long a proxy that stops waits for the last words of its engines."""
LEFT_S = 1.0
"""So long another proxy may take to say that the harness hung up on it."""
FOLLOW_S = 2.0
"""So often a call that another proxy generates is looked at: whether that proxy still lives."""


@dataclass(eq=False)
class Call:
    """A generation, in flight or done, and who waits for it."""

    call: str
    key: tuple[str, int, str]  # execution, attempt, request
    reply: asyncio.Future[Reply]
    created: int
    waiting: int = 0
    delivered: bool = False
    discarded: bool = False  # what the stream says about it
    reading: Reading | None = None
    early: bool = False  # `reading.text` may be sent before the reply
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    work: Work | None = None  # none while another process of the proxy generates
    task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Somebody waits for the reply inside the block."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def read(self, ids: list[int]) -> bool:
        """New tokens are there; true if no more are wanted."""
        if self.reading is None:
            return False
        stop = self.reading.feed(ids)
        if self.early:
            self.grown.set()
        return stop


class Calls:
    """All calls of this proxy process."""

    def __init__(
        self,
        core: ProxyCore,
        prompts: Prompts,
        plans: Plans,
        generating: Generating,
        recorder: Recorder,
        takeover: Takeover,
        settling: Settling,
    ) -> None:
        self._core, self._prompts, self._plans = core, prompts, plans
        self._generating, self._recorder = generating, recorder
        self._takeover, self._settling = takeover, settling
        self._open: dict[tuple[str, int, str], Call] = {}  # the latest per conversation, until delivered
        self._flying: set[Call] = set()
        self._mine: dict[tuple[str, int], set[str]] = {}  # calls that this process generated or gave out
        self._marking: set[asyncio.Task[None]] = set()
        self._closed = False

    # ------------------------------------------------------------------------------------------------ for the app

    async def open(self, execution: Execution, request: Request) -> Call:
        """The call that answers `request`: an earlier one nobody received, or a new one. Raises ApiError. Whoever gets
        it must join it before anything else is awaited."""
        match = self._prompts.match(execution, request)
        key = (execution.execution, execution.attempt, match.request)
        found = self._found(key) or self._recalled(execution, request, key)
        if found is None:
            found = await self._elsewhere(execution, request, key)
        if found is not None:
            return found
        prompt = await self._prompts.prompt(execution, request, match)
        self._still_running(execution, key[1])
        longest = self._generating.context - ENGINE_RESERVE
        room = longest - prompt.length
        if room < 1:
            raise context_too_long(prompt.length, longest)
        began = self._core.flights.latest_number(*key[:2])
        plan = self._plans.make(execution, request, match, prompt, room, began)
        call = _call(plan.call, key)
        self._prepare_reading(call, execution, request)
        progress = self._recorder.progress(plan, 0)
        progress.begin(self._takeover.begun(plan, prompt.length))
        work = Work(plan, prompt, request, call.created, progress, watched=call.reading is not None)
        self._start(call, partial(self._run, call, work))
        return call

    async def count_tokens(self, execution: Execution, request: Request) -> int:
        prompt: Prompt = await self._prompts.prompt(execution, request, self._prompts.match(execution, request))
        return prompt.length

    async def before_delivery(self, call: Call) -> None:
        """A reply whose record says that nobody got it is about to be sent: correct that first."""
        if call.discarded:
            await self._mark(call, discarded=False)

    def delivered(self, call: Call) -> None:
        """The harness has the whole reply: the same request again means a new sample."""
        call.delivered = True
        if self._open.get(call.key) is call:
            del self._open[call.key]

    def lost(self, call: Call) -> None:
        """The connection broke, maybe, before the last byte of the reply was sent."""
        if not call.reply.done() and not call.waiting and not self._closed and len(self._core.proxies) > 1:
            self._mark_soon(self._recorder.left(call.call, call.key[0], call.key[1]))
        if self._closed or call.delivered or call.discarded or not call.reply.done() or _failed(call):
            return
        self._mark_soon(self._mark(call, discarded=True))

    def _mark_soon(self, marking: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(marking)
        self._marking.add(task)
        task.add_done_callback(self._marking.discard)

    async def _mark(self, call: Call, *, discarded: bool) -> None:
        call.discarded = discarded
        await self._recorder.mark(call.call, call.key[0], call.key[1], discarded=discarded)

    def abort(self, command: AbortCalls) -> None:
        """Cut what is in flight; forget the attempt."""
        for call in [*self._flying, *self._open.values()]:
            if call.key[0] == command.execution and call.key[1] <= command.attempt:
                if call.work is not None:
                    call.work.abort(command.reason)
                elif call.task is not None and not call.reply.done():
                    call.task.cancel()
                _fail(call, ApiError(410, "gone", command.reason))  # what was generated is recorded when it is told
                self._open.pop(call.key, None)
        self._plans.forget(command.execution, command.attempt)
        self._prompts.forget(command.execution)
        for attempt in [a for a in self._mine if a[0] == command.execution and a[1] <= command.attempt]:
            del self._mine[attempt]
        self._settling.attempt(command.execution, command.attempt)

    async def close(self) -> None:
        """Cut everything. What was generated is recorded, if the engines tell it in time."""
        self._closed = True
        if self._marking:
            await asyncio.wait(self._marking, timeout=2)
        tasks = [call.task for call in self._flying if call.task is not None]
        for call in self._flying:
            if call.task is not None and not (call.work is not None and call.work.close()):
                call.task.cancel()
        self._settling.close()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ finding

    def _found(self, key: tuple[str, int, str]) -> Call | None:
        """A call of this process that asks the same and that nobody waits for or has received."""
        earlier = self._open.get(key)
        usable = earlier is not None and not earlier.waiting and not earlier.reply.cancelled() and not _failed(earlier)
        return earlier if usable else None

    def _recalled(self, execution: Execution, request: Request, key: tuple[str, int, str]) -> Call | None:
        """A call that another process of the proxy recorded, whose reply may not have reached the harness."""
        node = execution.contexts.by_request(key[2])
        mine = self._mine.setdefault(key[:2], set())
        if node is None or node.children or node.call in mine or node.finish_reason == "abort":
            return None
        mine.add(node.call)
        call = _call(node.call, key)
        call.discarded = node.discarded
        call.reply.set_result(self._reply_of(execution, node, request, call.created))
        self._open[key] = call
        return call

    def _reply_of(self, execution: Execution, node: Node, request: Request, created: int) -> Reply:
        prompt = self._prompts.ids(execution, node.call)[: node.prompt_length]
        return self._generating.reply_again(node.call, prompt, node.output_ids, node.finish_reason, request, created)

    def _still_running(self, execution: Execution, attempt: int) -> None:
        """The execution may have ended while its prompt was encoded."""
        now = self._core.executions.get(execution.execution)
        if now is not execution or execution.finished or execution.attempt != attempt:
            raise ApiError(410, "gone", f"execution {execution.execution} has ended: its key is no longer valid")

    # ---------------------------------------------------------------------------------------- calls of other processes

    async def _elsewhere(self, execution: Execution, request: Request, key: tuple[str, int, str]) -> Call | None:
        """A call in flight at another process of the proxy, or left behind by one, for which nobody waits there."""
        flight = await self._unattended(key)
        found = self._found(key) or self._recalled(execution, request, key)  # it may have changed meanwhile
        if flight is None or found is not None:
            return found
        self._still_running(execution, key[1])
        call = _call(flight.begun.call, key)
        self._prepare_reading(call, execution, request)
        self._start(call, partial(self._join, call, execution, request))
        return call

    async def _unattended(self, key: tuple[str, int, str]) -> Flight | None:
        for flight in self._core.flights.of_request(*key):
            if self._takeover.mine(flight) or flight.begun.call in self._mine.get(key[:2], ()):
                continue
            if flight.left or await self._takeover.gone(flight):
                return flight

            def settled(call: str = flight.begun.call) -> bool | None:
                now = self._core.flights.find(key[0], call)
                return True if now is None or now.left else None

            # Its proxy may be about to notice that the harness hung up. If it does not, the harness asks twice.
            if await self._takeover.watch.until(settled, LEFT_S):
                return self._core.flights.find(key[0], flight.begun.call)
        return None

    async def _join(self, call: Call, execution: Execution, request: Request) -> None:
        """Follow the call at its owner, or become its owner."""
        while True:
            flight = self._core.flights.find(call.key[0], call.call)
            if flight is None:
                return self._take_reply(call, execution, request)
            if not await self._takeover.gone(flight):
                await self._takeover.watch.until(partial(self._changed, flight, flight.begun.take), FOLLOW_S)
                continue
            taken = await self._takeover.take(flight)
            if taken is not None:
                return await self._go_on(call, taken, execution, request)

    def _changed(self, flight: Flight, take: int) -> bool | None:
        now = self._core.flights.find(flight.begun.execution, flight.begun.call)
        return True if now is None or now.begun.take != take else None

    def _take_reply(self, call: Call, execution: Execution, request: Request) -> None:
        """The reply of a call that its owner has ended."""
        node = execution.contexts.tree.nodes.get(call.call)
        if node is None or node.finish_reason == "abort":
            raise ApiError(503, "unavailable", f"call {call.call} was given up; ask again", retry_after=1)
        if not call.reply.done():
            call.discarded = node.discarded
            call.reply.set_result(self._reply_of(execution, node, request, call.created))

    async def _go_on(self, call: Call, flight: Flight, execution: Execution, request: Request) -> None:
        """This process owns the call now."""
        begun = flight.begun
        left = await self._takeover.left_behind(flight)
        if left.prompt is not None:
            new = new_ids(execution, begun, left.prompt)
            prompt = self._prompts.exact(begun.parent, begun.keep, new, left.prompt)
        else:
            prompt = await self._prompts.prompt(execution, request, self._prompts.match(execution, request))
        if (prompt.parent, prompt.keep, prompt.length) != (begun.parent, begun.keep, begun.prompt_tokens):
            await self._settling.drop(flight, left.generation)
            raise ApiError(503, "unavailable", f"call {call.call} was lost; ask again", retry_after=1)
        plan = plan_of(begun, prompt.input_ids)
        log.info("call %s: going on after %d tokens, take %d", call.call, len(left.generation.ids), begun.take)
        progress = self._recorder.progress(plan, begun.take, flight.tokens)
        watched = call.reading is not None
        work = Work(plan, prompt, request, call.created, progress, watched, begun.take, left.generation)
        await self._run(call, work)

    def heard(self, event: Event) -> None:
        """A message of the stream that the core has handled: another process may have taken a call of ours."""
        if not isinstance(event, ModelCallBegun) or event.take == 0:
            return
        flight = self._core.flights.find(event.execution, event.call)
        if flight is None or self._takeover.mine(flight):
            return
        for call in self._flying:
            if call.call == event.call and call.work is not None and call.work.take < event.take:
                log.warning("call %s was taken over by %s", call.call, event.proxy)
                call.work.lose()

    # ------------------------------------------------------------------------------------------------- generating

    def _prepare_reading(self, call: Call, execution: Execution, request: Request) -> None:
        call.early = request.stream and self._plans.profile(execution.harness).early_text
        call.reading = self._generating.reading(request, early=call.early)
        call.early = call.early and call.reading is not None

    def _start(self, call: Call, doing: Callable[[], Awaitable[None]]) -> None:
        self._mine.setdefault(call.key[:2], set()).add(call.call)
        self._open[call.key] = call
        self._flying.add(call)
        call.task = asyncio.get_running_loop().create_task(self._to_its_end(call, doing), name=call.call)

    async def _to_its_end(self, call: Call, doing: Callable[[], Awaitable[None]]) -> None:
        """The edge of a call: call.reply is done in the end, whatever happens."""
        try:
            await doing()
        except ApiError as error:
            if call.work is not None and call.work.closing:
                call.reply.cancel()
            else:
                _fail(call, error)
        except asyncio.CancelledError:
            call.reply.cancel()
            raise
        except Exception as error:  # the edge of the call: the harness gets an error, the process lives on
            log.exception("call %s failed", call.call)
            _fail(call, ApiError(500, "internal", f"call {call.call} failed: {type(error).__name__}"))
        finally:
            self._ended(call)

    async def _run(self, call: Call, work: Work) -> None:
        """Generate, record, reply."""
        call.work = work
        try:
            reply = await self._generating.run(work, call.read, lambda: bool(work.aborted) or not call.waiting)
        except Lost:
            return await self._lost_to_another(call, work)
        call.discarded = work.discarded
        if not call.reply.done():
            call.reply.set_result(reply)

    async def _lost_to_another(self, call: Call, work: Work) -> None:
        """Whoever waits here gets the reply from the call's new owner."""
        call.work = None
        execution = self._core.executions.get(call.key[0])
        if execution is None or execution.attempt != call.key[1]:
            return _fail(call, ApiError(410, "gone", work.aborted or "the execution has ended"))
        await self._join(call, execution, work.request)

    def _ended(self, call: Call) -> None:
        self._flying.discard(call)
        aborted = call.work is not None and call.work.aborted
        if (_failed(call) or aborted) and self._open.get(call.key) is call:
            del self._open[call.key]


def _call(call: str, key: tuple[str, int, str]) -> Call:
    made = Call(call, key, asyncio.get_running_loop().create_future(), int(time.time()))
    made.reply.add_done_callback(_retrieve)
    return made


def _fail(call: Call, error: ApiError) -> None:
    if not call.reply.done():
        call.reply.set_exception(error)


def _failed(call: Call) -> bool:
    return call.reply.done() and (call.reply.cancelled() or call.reply.exception() is not None)


def _retrieve(reply: asyncio.Future[Reply]) -> None:
    """An error that nobody waits for any more is not worth a warning of the event loop."""
    if not reply.cancelled():
        reply.exception()
