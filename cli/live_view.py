"""The live terminal picture of a run (rich), and the plain log lines where the output is no terminal.

Invariant: it only reads a RunView.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.run_view import RunView

COLOURS = {
    "offline": "bright_black",
    "rollout": "cyan",
    "draining": "yellow",
    "joining": "magenta",
    "training": "red",
    "returning": "yellow",
}
WIDTH = 60


def tokens_per_second(view: RunView, now: float, window: float = 15.0) -> float:
    recent = 0
    for at, tokens in reversed(view.call_times):
        if at < now - window:
            break
        recent += tokens
    return recent / window


def role_bar(history: list[tuple[float, str]], start: float, now: float, width: int = WIDTH) -> Text:
    """The roles of one cell over [start, now], one character a slice."""
    bar = Text()
    span = max(now - start, 1e-6)
    index, role = 0, "offline"
    for column in range(width):
        at = start + span * (column + 1) / width
        while index < len(history) and history[index][0] <= at:
            role = history[index][1]
            index += 1
        bar.append("█", style=COLOURS[role])
    return bar


def render(view: RunView, now: float) -> Panel:
    table = Table.grid(padding=(0, 2))
    window = max(view.started_at, now - 180.0)
    for number, cell in sorted(view.cells.items()):
        table.add_row(
            view.cell_name(number),
            role_bar(cell.history, window, now),
            Text(f"{cell.role} {now - cell.since:.0f}s", style=COLOURS[cell.role]),
            f"v{cell.version}",
        )
    facts = Table.grid(padding=(0, 3))
    serving = view.capacity[-1][1] if view.capacity else 0
    facts.add_row(
        f"waterlevel [b]{view.level}[/b] of {serving}",
        f"running [b]{view.running}[/b]",
        f"finished [b]{view.finished}[/b]/{view.dispatched}",
        f"ready groups [b]{view.ready_groups}[/b]",
        f"tokens/s [b]{tokens_per_second(view, now):.0f}[/b]",
    )
    done = view.committed
    last = done[-1] if done else None
    recent = done[-5:]
    facts.add_row(
        f"step [b]{len(done)}[/b]/{view.steps}",
        f"reward [b]{last.reward:.3f}[/b]" if last else "reward -",
        f"mean of 5: [b]{sum(b.reward for b in recent) / len(recent):.3f}[/b]" if recent else "",
        f"staleness [b]{last.staleness:.2f}[/b]" if last else "",
        f"switches [b]{view.role_switches}[/b]",
    )
    parts: list[object] = [table, facts]
    scores = [
        f"{name} {phase} {sum(s) / len(s):.3f} (n={len(s)})" for (phase, name), s in sorted(view.eval_scores.items())
    ]
    if scores:
        parts.append(Text("evaluation: " + ", ".join(scores)))
    for at, text in view.errors[-3:]:
        parts.append(Text(f"{at - view.started_at:7.1f}s {text.splitlines()[0][:150]}", style="red"))
    title = f"{view.run}  {view.mode}  phase {view.phase}  {now - view.started_at:.0f}s"
    return Panel(Group(*parts), title=title)  # type: ignore[arg-type]


def plain_line(view: RunView, now: float) -> str:
    roles = " ".join(f"{n}:{c.role}" for n, c in sorted(view.cells.items()))
    done = view.committed
    reward = f"{done[-1].reward:.3f}" if done else "-"
    return (
        f"[{now - view.started_at:7.1f}s] {view.phase} step {len(done)}/{view.steps} reward {reward} w={view.level} "
        f"running={view.running} finished={view.finished}/{view.dispatched} ready={view.ready_groups} "
        f"tok/s={tokens_per_second(view, now):.0f} cells {roles}"
    )


class Display:
    """Shows the view until closed: a live panel on a terminal, else a line every `interval` seconds and on errors."""

    def __init__(self, view: RunView, *, quiet: bool, interval: float = 5.0, clock: Callable[[], float] = time.time):
        self.view, self.quiet, self.interval, self.clock = view, quiet, interval, clock
        self.console = Console(stderr=True)
        self.live = None
        if not quiet and self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
        self._last = 0.0
        self._errors = 0
        self._steps = 0

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(render(self.view, self.clock()), refresh=True)
            self.live.stop()

    def refresh(self) -> None:
        now = self.clock()
        if not self.view.run:
            return  # the run's first event has not been read yet
        if self.live:
            self.live.update(render(self.view, now), refresh=True)
            return
        if self.quiet:
            return
        for at, text in self.view.errors[self._errors :]:
            self.console.print(f"[{at - self.view.started_at:7.1f}s] error: {text}", markup=False, highlight=False)
        self._errors = len(self.view.errors)
        done = len(self.view.committed)
        if now - self._last >= self.interval or done != self._steps:
            self._last, self._steps = now, done
            self.console.print(plain_line(self.view, now), markup=False, highlight=False, soft_wrap=True)
