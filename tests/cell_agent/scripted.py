"""A scripted world around real cell cores: a stream that each core reads at its own pace, shells that carry commands
out late, a scheduler that follows the protocol, and a queue that sometimes gives a claim out twice. Buffers hold the
names of the micro-steps whose gradients they would hold, so that a commit can be checked to contain each exactly once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.cell_agent import commands as do
from services.cell_agent.core import CellCore
from shared import events as ev
from shared.actor import Do, Publish


def weights_of(version: int, incarnation: str, cell: int = 0) -> ev.WeightsPublished:
    return ev.WeightsPublished(
        version=version,
        cell=cell,
        incarnation=incarnation,
        session="127.0.0.1:1",
        address=1,
        nbytes=8,
        tensors=(),
        digest=f"d{version}",
    )


@dataclass
class ScriptedShell:
    """What life.py does, without processes: commands that need the trainer wait in `hand`."""

    cell: int
    incarnation: str = ""
    hand: list[do.Command] = field(default_factory=list)
    buffer: Counter[str] = field(default_factory=Counter)
    version: int = -1
    engine: int = -1
    claiming: tuple[int, int] | None = None  # attempt that `held` belongs to
    stopped: bool = False  # claims nothing more, still holds
    held: set[str] = field(default_factory=set)
    in_trainer: str = ""
    void: set[tuple[int, int]] = field(default_factory=set)
    draining: int = -1


class ScriptedWorld:
    def __init__(self, cells: int, steps: int = 3) -> None:
        self.stream: list[ev.Event] = []
        self.cores = [CellCore(k) for k in range(cells)]
        self.shells = [ScriptedShell(k) for k in range(cells)]
        self.read = [0] * cells
        self.births = 0
        self.steps = steps
        self.scheduler = ScriptedScheduler(self)
        self.committed: list[int] = []
        self.settled: list[tuple[int, str]] = []
        self.sums: dict[str, Counter[str]] = {}

    def publish(self, event: ev.Event) -> None:
        self.stream.append(event)
        self.scheduler.see(event)

    # ------------------------------------------------------------------------------------------------- moves

    def start(self, cell: int) -> None:
        """A (new) process owns the cell."""
        self.births += 1
        self.shells[cell] = ScriptedShell(cell, incarnation=f"i{self.births}")
        self.publish(ev.CellStarted(cell=cell, incarnation=f"i{self.births}"))

    def deliver(self, cell: int) -> bool:
        if self.read[cell] >= len(self.stream):
            return False
        event = self.stream[self.read[cell]]
        self.read[cell] += 1
        for effect in self.cores[cell].handle(event, float(self.read[cell])):
            if isinstance(effect, Publish):
                self.publish(effect.event)
            elif isinstance(effect, Do):
                self._submit(self.shells[cell], effect.command)
        return True

    def _submit(self, shell: ScriptedShell, command: object) -> None:
        assert isinstance(command, do.Command)
        if command.incarnation != shell.incarnation:
            return
        match command:
            case do.Claim():
                assert shell.claiming is None, "claims of two attempts at once"
                shell.claiming, shell.stopped = (command.batch, command.attempt), False
            case do.Seal():
                pass
            case do.Settle():
                assert command.batch in self.committed, "settled before the commit"
                self.settled += [(command.batch, m) for m in shell.held if m in command.micro_steps]
                shell.claiming, shell.held, shell.in_trainer = None, set(), ""
            case do.Abandon():
                shell.void.add((command.batch, command.attempt))
                self._give_back(shell)
            case do.LostMember():
                shell.void.add((command.batch, command.attempt))
            case do.CancelDrain():
                shell.draining = -1
            case do.Drain():
                shell.draining = command.order
            case do.Restart():
                self.start(shell.cell)
            case _:
                shell.hand.append(command)

    def _give_back(self, shell: ScriptedShell) -> None:
        shell.claiming, shell.held, shell.in_trainer = None, set(), ""

    def act(self, cell: int) -> bool:
        """The shell carries out what is next in its hand."""
        shell = self.shells[cell]
        if not shell.hand:
            return False
        command = shell.hand.pop(0)
        who = {"cell": cell, "incarnation": shell.incarnation}
        match command:
            case do.BringUp():
                shell.version = command.version if cell == 0 else -1
                self.publish(ev.CellTrainerReady(**who, version=command.version, store="s"))
                if cell == 0:
                    self.publish(weights_of(command.version, shell.incarnation))
            case do.Admit():
                shell.engine = command.weights.version if command.weights else 0
                self.publish(ev.CellEngineReady(**who, url="u", version=shell.engine, capacity=1))
            case do.Refit():
                shell.engine = command.weights.version
                self.publish(ev.CellRefitted(**who, version=shell.engine, seconds=0.0))
            case do.Join():
                self._join(shell, command, who)
            case do.Reduce():
                self._reduce(shell, command)
            case do.Export():
                self.publish(ev.PolicyExported(version=command.version, path="p"))
        return True

    def _join(self, shell: ScriptedShell, command: do.Join, who: dict) -> None:
        self._give_back(shell)
        if (command.batch, command.attempt) in shell.void or shell.version > command.version:
            return
        if shell.cell != 0:
            assert command.weights is not None
            assert command.weights.version == command.version
            shell.version = command.version
        assert shell.version == command.version, "gradients on the wrong weights"
        shell.buffer = Counter()
        joined = {"batch": command.batch, "attempt": command.attempt, "version": command.version}
        self.publish(ev.CellJoinedBatch(**who, **joined, pull_seconds=0.0))

    def _reduce(self, shell: ScriptedShell, command: do.Reduce) -> None:
        """The core's turn comes last: it waits for the others, as the real reduction does."""
        if shell.in_trainer:
            self.train(shell.cell)
        shell.stopped = True
        if (command.batch, command.attempt) in shell.void:
            return
        if set(shell.buffer) != set(command.ours):
            self.start(shell.cell)
            return
        if not isinstance(command, do.Commit):
            self.sums.setdefault(command.group, Counter()).update(shell.buffer)
            self.sums[f"{command.group}/{shell.cell}"] = Counter()
            return
        missing = [c for c in command.cells if c != 0 and f"{command.group}/{c}" not in self.sums]
        if missing:
            shell.hand.insert(0, command)
            return
        total = shell.buffer + self.sums.pop(command.group, Counter())
        for c in command.cells:
            self.sums.pop(f"{command.group}/{c}", None)
        listed = Counter(command.micro_steps)
        assert total == listed, f"gradient of {total}, not of {listed}"
        assert max(listed.values(), default=1) == 1
        shell.version = command.version
        self.committed.append(command.batch)
        self.publish(weights_of(command.version, shell.incarnation))
        self.publish(
            ev.BatchCommitted(
                batch=command.batch,
                attempt=command.attempt,
                version=command.version,
                cells=command.cells,
                micro_steps=command.micro_steps,
                checkpoint=f"step-{command.version}",
                seconds=0.0,
                metrics={},
            )
        )

    def drained(self, cell: int) -> bool:
        shell = self.shells[cell]
        if shell.draining < 0:
            return False
        order, shell.draining = shell.draining, -1
        self.publish(ev.CellDrained(cell=cell, incarnation=shell.incarnation, order=order, seconds=0.0))
        return True

    def claim(self, cell: int, twice: bool = False) -> bool:
        """The queue gives the cell a micro-step that nobody holds (or, with `twice`, one that somebody does)."""
        shell = self.shells[cell]
        if shell.claiming is None or shell.stopped or shell.in_trainer:
            return False
        batch, attempt = shell.claiming
        others = {m for s in self.shells if s is not shell and s.claiming == (batch, attempt) for m in s.held}
        for name in self.scheduler.listed(batch):
            if name in shell.held or (name in others) != twice or self.cores[cell].trained_elsewhere(name):
                continue
            shell.held.add(name)
            shell.in_trainer = name
            return True
        return False

    def train(self, cell: int) -> bool:
        shell = self.shells[cell]
        if not shell.in_trainer or shell.claiming is None:
            return False
        name, shell.in_trainer = shell.in_trainer, ""
        shell.buffer[name] += 1
        assert shell.buffer[name] == 1, f"{name} was trained twice into one buffer"
        batch, attempt = shell.claiming
        trained = {"micro_step": name, "batch": batch, "attempt": attempt, "tokens": 1, "seconds": 0.0, "metrics": {}}
        self.publish(ev.MicroStepTrained(**trained, cell=cell, incarnation=shell.incarnation))
        return True

    def settle_down(self, limit: int = 4000) -> None:
        """No more accidents: everything that can happen happens."""
        for _ in range(limit):
            moved = self.scheduler.act()
            for cell in range(len(self.cores)):
                moved |= self.deliver(cell) | self.act(cell) | self.drained(cell) | self.claim(cell) | self.train(cell)
            if not moved or self.scheduler.finished:
                return
        raise AssertionError("the world does not come to rest")


class ScriptedScheduler:
    """Follows the protocol: everybody trains, batches of two micro-steps, attempts after losses."""

    def __init__(self, world: ScriptedWorld) -> None:
        self.world = world
        self.live: dict[int, str] = {}
        self.ready: set[int] = set()
        self.orders: Counter[int] = Counter()
        self.wants: dict[int, str] = {}
        self.version = 0
        self.batch: ev.BatchOpened | None = None
        self.attempt: Counter[int] = Counter()
        self.trained: dict[str, int] = {}
        self.joined: set[int] = set()
        self.reducing: tuple[int, ...] = ()
        self.restart = False

    def listed(self, batch: int) -> tuple[str, ...]:
        return tuple(f"b{batch}m{i}" for i in range(3))

    @property
    def finished(self) -> bool:
        return self.version >= self.world.steps

    def see(self, event: ev.Event) -> None:
        match event:
            case ev.CellStarted():
                self._lose(event.cell)
                self.live[event.cell] = event.incarnation
            case ev.CellTrainerReady():
                if self.live.get(event.cell) == event.incarnation:
                    self.ready.add(event.cell)
            case ev.CellJoinedBatch():
                if self.live.get(event.cell) == event.incarnation and self._open_is(event.batch, event.attempt):
                    self.joined.add(event.cell)
            case ev.MicroStepTrained():
                current = self._open_is(event.batch, event.attempt)
                if current and self.live.get(event.cell) == event.incarnation:
                    holder = self.trained.setdefault(event.micro_step, event.cell)
                    self.restart = self.restart or holder != event.cell
            case ev.BatchCommitted():
                self.version = event.version
                self.batch, self.trained, self.reducing, self.restart = None, {}, (), False

    def _open_is(self, batch: int, attempt: int) -> bool:
        return self.batch is not None and (self.batch.batch, self.batch.attempt) == (batch, attempt)

    def _lose(self, cell: int) -> None:
        self.ready.discard(cell)
        self.joined.discard(cell)
        self.wants.pop(cell, None)
        self.trained = {m: c for m, c in self.trained.items() if c != cell}
        self.restart = self.restart or cell == 0 or cell in self.reducing

    def order(self, cell: int, role: str) -> bool:
        if cell not in self.ready or self.wants.get(cell) == role:
            return False
        self.orders[cell] += 1
        self.wants[cell] = role
        self.world.publish(
            ev.CellRoleOrdered(
                cell=cell, order=self.orders[cell], role=role, burst=1, version=self.version, reason="script"
            )
        )
        return True

    def act(self) -> bool:
        if self.finished:
            return False
        if self.batch is None or self.restart:
            return self.order(0, "training") or self._open()
        if any(self.order(c, "training") for c in sorted(self.ready) if self.wants.get(c) != "training"):
            return True
        listed = self.listed(self.batch.batch)
        if self.reducing or 0 not in self.joined or any(m not in self.trained for m in listed):
            return False
        self.reducing = (0, *sorted({c for c in self.trained.values() if c != 0}))
        self.world.publish(
            ev.BatchReduceOrdered(batch=self.batch.batch, attempt=self.batch.attempt, cells=self.reducing, executions=4)
        )
        return True

    def _open(self) -> bool:
        if 0 not in self.ready:
            return False
        number = self.version + 1
        self.attempt[number] += 1
        self.batch = ev.BatchOpened(
            batch=number, attempt=self.attempt[number], base_version=self.version, groups=1, burst=1
        )
        self.trained, self.joined, self.reducing, self.restart = {}, set(), (), False
        self.world.publish(self.batch)
        if self.attempt[number] == 1:
            self.world.publish(
                ev.BatchSealed(
                    batch=number,
                    groups=("g1",),
                    executions=4,
                    micro_steps=self.listed(number),
                    mean_reward=0.0,
                    mean_staleness=0.0,
                )
            )
        return True
