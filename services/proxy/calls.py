"""One model call: found again or begun, generated, recorded, and whether its reply arrived.

Invariants: a generation goes on when the harness hangs up, and is recorded in any case. A request that asks to continue
the same conversation as an earlier one, whose answer nobody received whole, gets that answer; an answer that was
delivered is never given twice. What a record says about delivery is corrected when it turns out otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.proxy.core import AbortCalls, Execution, ProxyCore
from services.proxy.dialects.base import ApiError, Reply, Request, context_too_long
from services.proxy.generating import ENGINE_RESERVE, Generating, Work
from services.proxy.plans import Plans
from services.proxy.prompts import Prompt, Prompts
from services.proxy.reading import Reading
from services.proxy.recorder import Recorder

log = logging.getLogger("gyre.proxy.calls")

CLOSE_S = 8.0
"""So long a proxy that stops waits for the last words of its engines."""


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
    work: Work | None = None
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

    def __init__(self, core: ProxyCore, prompts: Prompts, plans: Plans, generating: Generating, recorder: Recorder):
        self._core, self._prompts, self._plans = core, prompts, plans
        self._generating, self._recorder = generating, recorder
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
        if found is not None:
            return found
        prompt = await self._prompts.prompt(execution, request, match)
        self._still_running(execution, key[1])
        longest = self._generating.context - ENGINE_RESERVE
        room = longest - prompt.length
        if room < 1:
            raise context_too_long(prompt.length, longest)
        plan = self._plans.make(execution, request, match, prompt, room)
        call = Call(plan.call, key, asyncio.get_running_loop().create_future(), int(time.time()))
        call.reply.add_done_callback(_retrieve)
        self._prepare_reading(call, execution, request)
        call.work = Work(plan, prompt, request, call.created, watched=call.reading is not None)
        self._start(call, call.work)
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
        """The reply was there, but the connection broke before its last byte was sent."""
        if self._closed or call.delivered or call.discarded or not call.reply.done() or _failed(call):
            return
        task = asyncio.create_task(self._mark(call, discarded=True))
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
                if not call.reply.done():  # what was generated is recorded when the engine has told it
                    call.reply.set_exception(ApiError(410, "gone", command.reason))
                self._open.pop(call.key, None)
        self._plans.forget(command.execution, command.attempt)
        self._prompts.forget(command.execution)
        for attempt in [a for a in self._mine if a[0] == command.execution and a[1] <= command.attempt]:
            del self._mine[attempt]

    async def close(self) -> None:
        """Cut everything. What was generated is recorded, if the engines tell it in time."""
        self._closed = True
        if self._marking:
            await asyncio.wait(self._marking, timeout=2)
        tasks = [call.task for call in self._flying if call.task is not None]
        for call in self._flying:
            if call.task is not None and not (call.work is not None and call.work.close()):
                call.task.cancel()
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
        call = Call(node.call, key, asyncio.get_running_loop().create_future(), int(time.time()))
        call.discarded = node.discarded
        prompt = self._prompts.ids(execution, node.call)[: node.prompt_length]
        reply = self._generating.reply_again(
            node.call, prompt, node.output_ids, node.finish_reason, request, call.created
        )
        call.reply.set_result(reply)
        self._open[key] = call
        return call

    def _still_running(self, execution: Execution, attempt: int) -> None:
        """The execution may have ended while its prompt was encoded."""
        now = self._core.executions.get(execution.execution)
        if now is not execution or execution.finished or execution.attempt != attempt:
            raise ApiError(410, "gone", f"execution {execution.execution} has ended: its key is no longer valid")

    # ------------------------------------------------------------------------------------------------- generating

    def _prepare_reading(self, call: Call, execution: Execution, request: Request) -> None:
        call.early = request.stream and self._plans.profile(execution.harness).early_text
        call.reading = self._generating.reading(request, early=call.early)
        call.early = call.early and call.reading is not None

    def _start(self, call: Call, work: Work) -> None:
        self._mine.setdefault(call.key[:2], set()).add(call.call)
        self._open[call.key] = call
        self._flying.add(call)
        call.task = asyncio.get_running_loop().create_task(self._run(call, work), name=call.call)

    async def _run(self, call: Call, work: Work) -> None:
        """Generate, record, reply. Ends with call.reply done, whatever happens."""
        try:
            reply = await self._generating.run(work, call.read, lambda: bool(work.aborted) or not call.waiting)
            call.discarded = work.discarded
            if not call.reply.done():
                call.reply.set_result(reply)
        except ApiError as error:
            if work.closing:
                call.reply.cancel()
            elif not call.reply.done():
                call.reply.set_exception(error)
        except asyncio.CancelledError:
            call.reply.cancel()
            raise
        except Exception as error:  # the edge of the call: the harness gets an error, the process lives on
            log.exception("call %s failed", call.call)
            if not call.reply.done():
                call.reply.set_exception(ApiError(500, "internal", f"call {call.call} failed: {type(error).__name__}"))
        finally:
            self._flying.discard(call)
            if (_failed(call) or work.aborted) and self._open.get(call.key) is call:
                del self._open[call.key]


def _failed(call: Call) -> bool:
    return call.reply.done() and (call.reply.cancelled() or call.reply.exception() is not None)


def _retrieve(reply: asyncio.Future[Reply]) -> None:
    """An error that nobody waits for any more is not worth a warning of the event loop."""
    if not reply.cancelled():
        reply.exception()
