"""What a picture needs of a simulated run, collected from its events: roles, waterlevel, capacity, commits."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared import events as ev


@dataclass
class Timeline:
    """Give `see` to a World as `watch`. Times in seconds."""

    capacity_per_cell: int
    cells: int
    roles: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    level: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    serving: list[tuple[float, int]] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    end: float = 0.0

    def __post_init__(self) -> None:
        self.roles = {k: [(0.0, "rollout")] for k in range(self.cells)}
        self._rollout = self.cells
        self.serving = [(0.0, self.cells * self.capacity_per_cell)]

    def see(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.ExecutionDispatched):
            self._step(now, 1)
        elif isinstance(event, ev.ExecutionFinished):
            self._step(now, -1)
        elif isinstance(event, ev.CellRoleChanged):
            self.roles[event.cell].append((now, event.role))
            self._rollout += (event.role == "rollout") - (event.previous == "rollout")
            self.serving.append((now, self._rollout * self.capacity_per_cell))
        elif isinstance(event, ev.BatchCommitted):
            self.commits.append(now)
            self.end = now

    def _step(self, now: float, change: int) -> None:
        last, value = self.level[-1]
        if last == now:
            self.level[-1] = (now, value + change)
        else:
            self.level.append((now, value + change))
