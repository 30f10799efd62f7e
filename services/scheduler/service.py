"""Shell of the scheduler: its core on the run's stream, and the core's counters as metrics.

Invariant: nothing is decided here.
"""

from __future__ import annotations

from services.scheduler.core import SchedulerCore
from services.scheduler.state import State
from shared.events import CellRoleOrdered, Event
from shared.runtime import ServiceContext, drive
from shared.stored import Stored
from shared.telemetry import Telemetry

SNAPSHOT_EVERY = 5_000
"""Events between two snapshots: what a restarted process plays again at most."""


GAUGES = {
    "waterlevel": "Executions dispatched and not finished",
    "capacity": "Executions that the cells in rollout can hold",
    "waiting": "Executions without a place",
    "outstanding_groups": "Groups dispatched and not consumed by a committed batch",
    "ready_groups": "Ready groups that no batch has taken",
    "policy_version": "Committed batches",
    "burst": "The current burst",
    "training_cells": "Cells that belong to training",
    "role_orders": "Role orders given so far",
}


class Gauges:
    """The scheduler's state as Prometheus gauges. O(1) per event."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._gauges = {name: telemetry.gauge(f"gyre_scheduler_{name}", text) for name, text in GAUGES.items()}

    def show(self, s: State) -> None:
        values = {
            "waterlevel": s.waterlevel,
            "capacity": s.capacity,
            "waiting": len(s.waiting),
            "outstanding_groups": s.outstanding,
            "ready_groups": len(s.ready),
            "policy_version": s.version,
            "burst": s.burst,
            "training_cells": s.training,
            "role_orders": s.switches,
        }
        for name, value in values.items():
            self._gauges[name].set(value)


async def serve(ctx: ServiceContext) -> None:
    """Run until ctx.stop."""
    core, gauges = SchedulerCore(), Gauges(ctx.telemetry)

    def observe(_message: Stored) -> None:
        gauges.show(core.state)

    shown = observe if ctx.config.telemetry.prometheus_port else None

    def begins(event: Event) -> str:
        """Each change of role is one trace, through all services."""
        return "order role" if isinstance(event, CellRoleOrdered) else ""

    await drive(ctx, core, observe=shown, snapshot_every=SNAPSHOT_EVERY, begins=begins)
