"""The scheduler's core against the cell agent's own core: both must mean the same by the same events."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings

from tests.scheduler.test_world import plans
from tests.scheduler.world import Plan, World


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans)
def test_every_run_with_real_cell_agent_cores_ends(plan: Plan) -> None:
    world = World(replace(plan, real_agents=True)).run()
    assert world.phase == "finished"
    world.checks.finish()
