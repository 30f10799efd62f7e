"""What the lookahead policy remembers of a run: how long executions took, what training costs, its plan for the burst.

Invariant: bounded (the last `KEEP` groups), a function of the events seen, and part of the scheduler's state, so that a
snapshot or a replay decides the same. Only kept when the mode asks for it: the other modes pay nothing.
"""

from __future__ import annotations

import msgspec

KEEP = 384  # finished groups whose durations are kept


class Plan(msgspec.Struct, frozen=True):
    """The schedule of one burst."""

    burst: int = 0
    mu: int = 0
    last: int = 0  # groups of the run that are dispatched by the burst's end
    keep: int = 0  # cells that are left free for training: groups are dispatched as the others have places for them
    forecast_s: float = 0.0  # seconds per step that were expected of it


class Notes(msgspec.Struct):
    now: float = 0.0
    open: dict[str, list[float]] = {}  # group -> seconds of its finished executions
    seen: int = 0  # groups that became ready
    finished: list[list[float]] = []  # of the last KEEP ready groups, oldest first
    last_finish: dict[str, float] = {}
    assess_s: float = 0.0  # last execution finished -> group ready, of the last ready group
    trained_s: float = 0.0  # seconds of micro-steps of all committed batches
    commit_s: float = 0.0
    to_training_s: float = 0.0  # last switch of a cell: ordered -> training
    to_rollout_s: float = 0.0
    draining_s: float = 0.0
    batches: int = 0
    stale_groups: int = 0  # versions of staleness, summed over groups: see `batch_committed` and `dispatched`
    plan: Plan = Plan()

    def execution_finished(self, group: str, seconds: float) -> None:
        self.open.setdefault(group, []).append(seconds)
        self.last_finish[group] = self.now

    def group_ready(self, group: str) -> None:
        self.seen += 1
        seconds = self.open.pop(group, [])
        if seconds:
            self.finished.append(seconds)
            self.assess_s = self.now - self.last_finish.pop(group)
        if len(self.finished) > 2 * KEEP:
            del self.finished[:-KEEP]

    def role_changed(self, previous: str, role: str, seconds: float) -> None:
        """`seconds`: what the cell spent in its role before."""
        if previous == "draining":
            self.draining_s = seconds
        elif previous == "joining" and role == "training":
            self.to_training_s = self.draining_s + seconds
        elif previous == "returning" and role == "rollout":
            self.to_rollout_s = seconds

    def dispatched(self, groups: int, behind: int) -> None:
        """`behind`: committed versions that rollout was not given yet. A group starts with that much staleness."""
        self.stale_groups += groups * behind

    def batch_committed(self, outstanding: int, seconds: float) -> None:
        """Each group that the batch leaves outstanding ages by one version."""
        self.batches += 1
        self.commit_s = seconds
        self.stale_groups += outstanding
