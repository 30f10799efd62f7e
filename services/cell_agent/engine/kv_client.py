"""The agents' side of live KV hand-over: the commands of engine/kv over HTTP, and their order.

    lease = await client.cut(source, rid, lease_id, ttl_s)      # the call stops; its /generate answers with what it has
    moved = await client.move(source, destination, lease)       # adopt -> acknowledge -> commit, or a reason why not
    /generate at the destination with prompt + output, and extra_key=moved.extra_key if that is not empty

Invariant: pages are committed at the destination only after the source said that they were held until all had been
read. `move` never raises for what can go wrong with engines and links: the caller recomputes, and the reason counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any, TypeVar

import aiohttp
import msgspec

from services.cell_agent.engine.kv import rates, wire
from services.cell_agent.engine.kv.errors import BY_KIND, KvError, KvTransferFailed, KvUnreachable
from services.cell_agent.engine.kv.wire import Adopting, Committed, Lease, LeaseState, Pulled, Status

POLL_FIRST_S, POLL_MOST_S = 0.002, 0.025
REQUEST_TIMEOUT_S = 10.0
DECLINED_MOST = 15  # moves in a row, before one is made to measure again
ACKNOWLEDGE_TIMEOUT_S = 4.0  # a moved call waits for it

T = TypeVar("T")


class AdoptResult(msgspec.Struct, frozen=True):
    """tokens: now in the destination's slots, old and pulled; seconds: of the whole step; wire_s: of the pull."""

    tokens: int
    nbytes: int
    seconds: float
    wire_s: float


class Moved(msgspec.Struct, frozen=True):
    """tokens: of the call's prefix that the destination will find in its cache; 0 = recompute, for `reason`."""

    tokens: int
    extra_key: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    steps: dict[str, float] = {}


class KvClient:
    """One per agent. `secret`: the run's. `always`: move pages also where computing them is expected to be faster.
    `rates`: what was measured so far; `outcomes`: how moves ended, by reason."""

    def __init__(self, secret: str, timeout_s: float = REQUEST_TIMEOUT_S, always: bool = False) -> None:
        self._timeout_s, self._always = timeout_s, always
        self._declined = 0  # in a row
        self._computed: dict[str, tuple[int, float]] = {}  # engine -> its prefilled tokens and seconds, as last told
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"})
        self.rates = rates.Rates()
        self.outcomes: Counter[str] = Counter()
        self._letting_go: set[asyncio.Task[bool]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._letting_go)
        await self._http.close()

    # --------------------------------------------------------------------------------------------- single commands

    async def cut(self, engine_url: str, rid: str, lease_id: str, ttl_s: float) -> Lease | None:
        """Stop call `rid` and hold its pages for `ttl_s`. None if there are no pages to move: the engine does not know
        the call, or it had not computed a whole page. The lease id must be new."""
        deadline = time.monotonic() + ttl_s
        answer = await self._post(engine_url, "cut", {"lease": lease_id, "rid": rid, "ttl": ttl_s})
        if not answer["live"]:
            return None
        pause = POLL_FIRST_S
        while True:
            state = await self._ask(engine_url, "lease", {"lease": lease_id}, LeaseState)
            if state.state != "pending":
                return state.lease
            if time.monotonic() > deadline:
                await self.drop(engine_url, lease_id)
                raise KvTransferFailed(f"call {rid} did not stop within the lease's {ttl_s} s")
            pause = await _rest(pause)

    async def adopt(
        self, dest_url: str, lease: Lease, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> AdoptResult:
        """Have the destination pull the pages into slots of its own. Raises KvError; nothing is held there then."""
        started = time.monotonic()
        limit = lease.left_s if timeout_s is None else min(timeout_s, lease.left_s)
        body = {"lease": msgspec.to_builtins(lease), "ttl": lease.ttl_s if ttl_s is None else ttl_s}
        try:
            begun = await self._ask(dest_url, "adopt", body, Adopting, limit)
            pulled = await self._until_pulled(dest_url, lease.id, started + limit)
        except (KvUnreachable, KvTransferFailed):
            self._let_go(dest_url, lease.id)
            raise
        self._prefilled(dest_url, begun)
        return AdoptResult(begun.have + begun.pulling, pulled.nbytes, time.monotonic() - started, pulled.seconds)

    async def _until_pulled(self, dest_url: str, lease: str, deadline: float) -> Pulled:
        pause = POLL_FIRST_S
        while True:
            left = max(1.0, deadline - time.monotonic())
            state = await self._ask(dest_url, "pulled", {"lease": lease}, Pulled, left)
            if state.state == "done":
                return state
            if state.state != "running":
                raise KvTransferFailed(state.error or "the destination gave the adoption up")
            if time.monotonic() > deadline:
                raise KvTransferFailed("the pages did not arrive before the lease ran out")
            pause = await _rest(pause)

    async def acknowledge(self, source_url: str, lease_id: str) -> bool:
        """Tell the source that its pages were read; it lets them go. True only if it says that it had held them all the
        time: a source that does not answer has proved nothing."""
        try:
            answer = await self._post(source_url, "acknowledge", {"lease": lease_id}, ACKNOWLEDGE_TIMEOUT_S)
        except KvError:
            return False
        return bool(answer["held"])

    async def commit(self, dest_url: str, lease_id: str) -> Committed:
        """Put adopted pages into the destination's prefix cache. Only after `acknowledge` said True. Raises KvError."""
        done = await self._ask(dest_url, "commit", {"lease": lease_id}, Committed)
        if done.state != "committed":
            raise KvTransferFailed(done.error or f"the adoption is {done.state} at the destination")
        return done

    async def drop(self, url: str, lease_id: str) -> bool:
        """Let go of everything under that name, at a source or a destination. False if nothing was, or no answer came
        (its ttl ends it then)."""
        try:
            return bool((await self._post(url, "drop", {"lease": lease_id}))["dropped"])
        except KvError:
            return False

    async def status(self, url: str) -> Status:
        return await self._ask(url, "status", {}, Status)

    # ---------------------------------------------------------------------------------------------------- together

    def worth_moving(self, lease: Lease) -> rates.Choice:
        """By the measured rates: move the pages, or have the destination compute them."""
        return rates.choose(len(lease.tokens), lease.nbytes // max(1, len(lease.tokens)), self.rates)

    def _prefilled(self, url: str, begun: Adopting) -> None:
        """What the destination has computed since it was last asked is the measured rate of computing prefixes."""
        tokens, seconds = self._computed.get(url, (0, 0.0))
        self._computed[url] = begun.prefilled, begun.prefill_s
        self.rates = self.rates.after_prefill(begun.prefilled - tokens, begun.prefill_s - seconds)

    def _declines(self, lease: Lease) -> bool:
        """Whether the prefix is better computed. Now and then pages move all the same: rates change, and only moves
        measure them."""
        if self._always or self.worth_moving(lease).transfer or self._declined >= DECLINED_MOST:
            self._declined = 0
            return False
        self._declined += 1
        return True

    async def move(self, source_url: str, dest_url: str, lease: Lease, timeout_s: float | None = None) -> Moved:
        """adopt -> acknowledge -> commit. On any failure both sides let go and the reason is told and counted."""
        started = time.monotonic()
        if self._declines(lease):
            self._let_go(source_url, lease.id)
            return self._ended("recompute_faster", started)
        try:
            adopted = await self.adopt(dest_url, lease, timeout_s=timeout_s)
            acknowledging = time.monotonic()
            if not await self.acknowledge(source_url, lease.id):
                self._let_go(dest_url, lease.id)
                return self._ended("not_held", started)
            committing = time.monotonic()
            done = await self.commit(dest_url, lease.id)
        except KvError as error:
            self._let_go(source_url, lease.id)
            self._let_go(dest_url, lease.id)
            return self._ended(error.kind, started, str(error))
        seconds = time.monotonic() - started
        self.rates = self.rates.after_transfer(adopted.nbytes, adopted.wire_s, seconds)
        self.outcomes["moved"] += 1
        steps = {
            "adopt": adopted.seconds,
            "wire": adopted.wire_s,
            "acknowledge": committing - acknowledging,
            "commit": time.monotonic() - committing,
        }
        return Moved(done.tokens, done.extra_key, adopted.nbytes, seconds, "", steps)

    def _let_go(self, url: str, lease_id: str) -> None:
        """Without waiting: the engine may hang, and the call is to go on."""
        task = asyncio.create_task(self.drop(url, lease_id), name=f"drop {lease_id}")
        self._letting_go.add(task)
        task.add_done_callback(self._letting_go.discard)

    def _ended(self, reason: str, started: float, detail: str = "") -> Moved:
        self.outcomes[reason] += 1
        return Moved(0, seconds=time.monotonic() - started, reason=f"{reason}: {detail}" if detail else reason)

    # ------------------------------------------------------------------------------------------------------- wire

    async def _ask(
        self, url: str, command: str, body: dict[str, Any], kind: type[T], timeout_s: float | None = None
    ) -> T:
        return msgspec.convert(await self._post(url, command, body, timeout_s), kind)

    async def _post(
        self, url: str, command: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        where = f"{url}{wire.ROUTE}/{command}"
        limit = aiohttp.ClientTimeout(total=min(self._timeout_s, timeout_s or self._timeout_s))
        try:
            async with self._http.post(where, json=body, timeout=limit) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise KvUnreachable(f"{where} does not answer ({error!r})") from error
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        if response.status == 200 and isinstance(answer, dict):
            return answer
        if isinstance(answer, dict) and answer.get("kind") in BY_KIND:
            raise BY_KIND[answer["kind"]](answer["message"])
        if response.status == 404:
            raise KvUnreachable(
                f"{where}: this engine runs without the KV plugin; install the project and set the secret"
            )
        raise KvUnreachable(f"{where} answered {response.status}: {text[:300]}")


async def _rest(pause: float) -> float:
    await asyncio.sleep(pause)
    return min(POLL_MOST_S, pause * 1.5)
