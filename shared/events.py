"""Every fact that crosses a service border.

Invariant: events are facts in the past tense or orders by the one service that may give them; they are frozen, tagged
with their snake_case name, and each has exactly one publishing service (named in its docstring). Token ids travel as
little-endian int32 bytes, log-probabilities as float32 bytes (see codec.py), never as lists.

Times are seconds since the epoch as the publisher saw them; ordering is always by stream sequence. Durations: seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=False):
    """Base of all events. `entity()` is the id used in the subject."""

    def entity(self) -> str:
        return "run"


class BlobRef(msgspec.Struct, frozen=True):
    """A large object outside the stream: blake2b-256 hex digest of its bytes, and its size in bytes."""

    digest: str
    size: int


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) of a call were sampled under policy version `version`."""

    version: int
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True):
    """What the run imposes on sampling, whatever the harness asked for. temperature 0 = greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024


# ------------------------------------------------------------------------------------------------ control (gyre up)


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """control. First event of a stream: the resolved, validated run file as plain data (config.RunConfig)."""

    run: str
    config: dict[str, Any]
    run_dir: str
    train_tasks: tuple[str, ...]  # absolute paths of task folders, in dispatch order
    eval_tasks: dict[str, tuple[str, ...]]  # evaluation set name -> task folders
    started_at: float


class RunResumed(Event, frozen=True, kw_only=True, tag="run_resumed"):
    """control. `gyre up --resume`: all processes are new; what was in flight is redelivered."""

    resumed_at: float


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    """control. Ctrl-C or a supervisor's decision: start nothing new."""

    reason: str


class ServiceDied(Event, frozen=True, kw_only=True, tag="service_died"):
    """control. The supervisor saw a service process end unasked; `will_restart` says what it does about it."""

    service: str  # e.g. "proxy", "cell-agent-1"
    exit_code: int
    will_restart: bool
    log_tail: str

    def entity(self) -> str:
        return self.service


# ------------------------------------------------------------------------------------------------------- scheduler


class RunPhaseChanged(Event, frozen=True, kw_only=True, tag="run_phase_changed"):
    """scheduler. Phases in order: starting, eval_before, training, eval_after, finished (or failed)."""

    phase: str
    reason: str = ""


class ExecutionDispatched(Event, frozen=True, kw_only=True, tag="execution_dispatched"):
    """scheduler. The execution counts into d(t) (the waterlevel) from here on; not yet placed."""

    execution: str
    group: str
    index: int  # 0..N-1 inside the group
    task: str  # absolute path of the task folder
    purpose: str  # "train" or "eval"
    eval_set: str = ""  # with purpose "eval"
    eval_phase: str = ""  # "before" or "after"
    policy_version: int  # version the group was dispatched under: scheduling staleness counts from it
    burst: int = 0
    sampling: Sampling = Sampling()
    seed: int = 0

    def entity(self) -> str:
        return self.execution


class ExecutionPlaced(Event, frozen=True, kw_only=True, tag="execution_placed"):
    """scheduler. Room is reserved at `cell`; work item of the harness service (exactly one taker)."""

    execution: str
    group: str
    task: str
    cell: int
    sampling: Sampling
    policy_version: int

    def entity(self) -> str:
        return self.execution


class ExecutionMoved(Event, frozen=True, kw_only=True, tag="execution_moved"):
    """scheduler. New calls of the execution go to `to_cell`; room there is reserved."""

    execution: str
    from_cell: int
    to_cell: int
    reason: str

    def entity(self) -> str:
        return self.execution


class CellRoleOrdered(Event, frozen=True, kw_only=True, tag="cell_role_ordered"):
    """scheduler. `role` is "rollout" or "training". `order` rises per cell; a later order replaces an earlier one.

    training: drain live calls, then get ready to claim micro-steps. rollout: refit the engine to `version`, serve."""

    cell: int
    order: int
    role: str
    burst: int
    version: int  # rollout: policy version the engine must serve. training: version of the open/next batch's snapshot
    reason: str

    def entity(self) -> str:
        return f"cell{self.cell}"


class RefitOrdered(Event, frozen=True, kw_only=True, tag="refit_ordered"):
    """scheduler. A cell that stays in rollout loads policy `version` while it serves."""

    cell: int
    version: int

    def entity(self) -> str:
        return f"cell{self.cell}"


class BatchOpened(Event, frozen=True, kw_only=True, tag="batch_opened"):
    """scheduler. Training batch `batch` (1-based, = optimizer step) accepts groups; gradients on `base_version`.

    `attempt` rises when the batch restarts because the core cell was lost: all its micro-steps are trained again."""

    batch: int
    attempt: int
    base_version: int
    groups: int  # B
    burst: int

    def entity(self) -> str:
        return f"b{self.batch:05d}"


class BatchReduceOrdered(Event, frozen=True, kw_only=True, tag="batch_reduce_ordered"):
    """scheduler. Every micro-step of the sealed batch is trained in `cells` (core first): reduce, then step."""

    batch: int
    attempt: int
    cells: tuple[int, ...]
    executions: int  # divisor of the summed per-execution losses

    def entity(self) -> str:
        return f"b{self.batch:05d}"


class BurstEnded(Event, frozen=True, kw_only=True, tag="burst_ended"):
    """scheduler. mu batches are committed; engines go to `version`."""

    burst: int
    version: int

    def entity(self) -> str:
        return f"burst{self.burst}"


class TimerFired(Event, frozen=True, kw_only=True, tag="timer_fired"):
    """Published by the shell of the service that asked for it, so that a replay sees the same timers."""

    service: str
    key: str

    def entity(self) -> str:
        return "timer"


# ------------------------------------------------------------------------------------------------------ cell agent


class CellStarted(Event, frozen=True, kw_only=True, tag="cell_started"):
    """cell_agent. A (new) agent process owns the cell: whatever ran in it before is gone. Role: offline.

    Cells from `cells.count` on are standalone engines: they say nothing of a trainer and get no role orders."""

    cell: int
    incarnation: str

    def entity(self) -> str:
        return f"cell{self.cell}"


class CellEngineReady(Event, frozen=True, kw_only=True, tag="cell_engine_ready"):
    """cell_agent. The rollout engine answers at `url` with policy `version`; capacity in concurrent executions.

    `offers`: host:port where the cell tells others which chunks of which snapshot they can read from it."""

    cell: int
    incarnation: str
    url: str
    version: int
    capacity: int
    offers: str = ""

    def entity(self) -> str:
        return f"cell{self.cell}"


class CellTrainerReady(Event, frozen=True, kw_only=True, tag="cell_trainer_ready"):
    """cell_agent. The training workers stand; on the core, weights and optimizer are at policy `version`.

    `store` (core only): host:port of the TCP store over which cells build their reduction groups."""

    cell: int
    incarnation: str
    version: int
    store: str = ""

    def entity(self) -> str:
        return f"cell{self.cell}"


class CellRoleChanged(Event, frozen=True, kw_only=True, tag="cell_role_changed"):
    """cell_agent. roles: offline, rollout, draining, joining, training, returning. `seconds` in the role before."""

    cell: int
    incarnation: str
    order: int
    role: str
    previous: str
    seconds: float
    version: int

    def entity(self) -> str:
        return f"cell{self.cell}"


class CellDrained(Event, frozen=True, kw_only=True, tag="cell_drained"):
    """cell_agent. No call is live in the cell's engine any more, as the role order `order` asked; `calls` were cut."""

    cell: int
    incarnation: str
    order: int
    seconds: float
    calls: int = 0

    def entity(self) -> str:
        return f"cell{self.cell}"


class CallCut(Event, frozen=True, kw_only=True, tag="call_cut"):
    """cell_agent (source). Its cell leaves rollout, so it cut the live call; the proxy goes on with it at `to_cell`.

    `rid` names the call at the engine (ids.request_id). to_cell -1: its execution was not moved (it is over). With
    `lease` the engine at `engine` holds the KV pages of the call's first `tokens` tokens still until the destination
    acknowledges, for `hold_s` at most; the description of the pages is `pages`, above a threshold `pages_blob`."""

    rid: str
    call: str
    execution: str
    from_cell: int
    to_cell: int
    incarnation: str
    order: int
    lease: str = ""
    engine: str = ""
    tokens: int = 0
    hold_s: float = 0.0
    pages: bytes = b""
    pages_blob: BlobRef | None = None
    seconds: float = 0.0  # from the decision to cut until the call had stopped or its pages were pinned

    def entity(self) -> str:
        return self.execution


class CallAdopted(Event, frozen=True, kw_only=True, tag="call_adopted"):
    """cell_agent (destination). How a call that was cut goes on here.

    outcome: pages (`tokens_from_pages` tokens need not be computed again), recompute (no pages were offered, or
    computing is faster), failed (the pages did not come; `detail` tells why; they are computed again)."""

    rid: str
    call: str
    execution: str
    cell: int
    incarnation: str
    lease: str
    outcome: str
    tokens_from_pages: int = 0
    seconds: float = 0.0
    extra_key: str = ""  # the call must send it to find its pages
    detail: str = ""

    def entity(self) -> str:
        return self.execution


class CallReleased(Event, frozen=True, kw_only=True, tag="call_released"):
    """cell_agent (source). The pages of `lease` are pinned no longer. Exactly one per CallCut with a lease.

    outcome: adopted, unneeded or failed (the destination said so), expired (it said nothing in time), lost (this cell
    failed)."""

    rid: str
    execution: str
    cell: int
    incarnation: str
    lease: str
    outcome: str

    def entity(self) -> str:
        return self.execution


class CellRefitted(Event, frozen=True, kw_only=True, tag="cell_refitted"):
    """cell_agent. The engine of the cell now serves policy `version`, verified against the published digest.

    `steps`: seconds of the pull (pull_s) and of putting the weights into the engine (copy_s, pause_s, load_s,
    check_s, resume_s); pulled bytes by source (core_bytes, cell_bytes)."""

    cell: int
    incarnation: str
    version: int
    seconds: float
    steps: dict[str, float] = {}

    def entity(self) -> str:
        return f"cell{self.cell}"


class CellFailed(Event, frozen=True, kw_only=True, tag="cell_failed"):
    """cell_agent. A part of the cell died or cannot start; the agent restarts the cell (a new CellStarted)."""

    cell: int
    incarnation: str
    part: str  # "engine", "trainer", or "receiver": what takes a standalone engine's weights
    reason: str
    log_tail: str

    def entity(self) -> str:
        return f"cell{self.cell}"


class EngineCounted(Event, frozen=True, kw_only=True, tag="engine_counted"):
    """cell_agent. The engine's own counter of tokens it generated since it started (an independent check of the
    records); published when a run phase ends and when the agent stops in order."""

    cell: int
    incarnation: str
    engine: str  # names one engine process: the count starts at 0 with it
    generated_tokens: int

    def entity(self) -> str:
        return f"cell{self.cell}"


class CellJoinedBatch(Event, frozen=True, kw_only=True, tag="cell_joined_batch"):
    """cell_agent. The cell holds the snapshot of `version`, zeroed gradients, and claims micro-steps of the batch.

    `steps`: seconds of reading and verifying (pull_s) and of filling the model (load_s); pulled bytes by source
    (core_bytes, cell_bytes). Empty on the core."""

    cell: int
    incarnation: str
    batch: int
    attempt: int
    version: int
    pull_seconds: float  # 0 on the core
    steps: dict[str, float] = {}

    def entity(self) -> str:
        return f"cell{self.cell}"


class MicroStepTrained(Event, frozen=True, kw_only=True, tag="micro_step_trained"):
    """cell_agent. Gradients of the micro-step are in the cell's buffer (not yet committed)."""

    micro_step: str
    batch: int
    attempt: int
    cell: int
    incarnation: str
    tokens: int
    seconds: float
    metrics: dict[str, float]

    def entity(self) -> str:
        return self.micro_step


class BatchCommitted(Event, frozen=True, kw_only=True, tag="batch_committed"):
    """cell_agent (core). The optimizer stepped, the checkpoint is durable: policy `version` exists.

    `micro_steps` lists every micro-step whose gradient went in, each exactly once."""

    batch: int
    attempt: int
    version: int
    cells: tuple[int, ...]
    micro_steps: tuple[str, ...]
    checkpoint: str  # folder
    seconds: float
    metrics: dict[str, float]

    def entity(self) -> str:
        return f"b{self.batch:05d}"


class TensorSlice(msgspec.Struct, frozen=True):
    """One tensor inside a snapshot buffer, in Hugging Face naming and layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightsPublished(Event, frozen=True, kw_only=True, tag="weights_published"):
    """cell_agent (core). A frozen snapshot of policy `version` can be read over the Transfer Engine.

    `session` is the Transfer Engine address of the owner, `address` the buffer's. Valid until the version after the
    next is published. `chunks` are the XXH3-128 digests of its chunks of `chunk_bytes`, which readers verify one by
    one; `digest` (blake2b-256 of version, sizes and these digests) names the snapshot, wherever a copy of it is."""

    version: int
    cell: int
    incarnation: str
    session: str
    address: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    digest: str
    chunk_bytes: int = 0
    chunks: bytes = b""

    def entity(self) -> str:
        return f"v{self.version:05d}"


class PolicyExported(Event, frozen=True, kw_only=True, tag="policy_exported"):
    """cell_agent (core). The policy stands as a Hugging Face folder at `path`."""

    version: int
    path: str


# --------------------------------------------------------------------------------------------------------- harness


class ExecutionStarted(Event, frozen=True, kw_only=True, tag="execution_started"):
    """harness. The harness process is about to run. `key_hash` = blake2b-256 hex of the execution's API key.

    A new attempt replaces everything the one before recorded (its process and workspace are gone)."""

    execution: str
    attempt: int
    key_hash: str
    harness: str

    def entity(self) -> str:
        return self.execution


class ExecutionFinished(Event, frozen=True, kw_only=True, tag="execution_finished"):
    """harness. Work item of the evaluator. `ending`: completed, harness_timeout, overall_timeout, crashed,
    failed_to_start, stopped. `artifact`: the preserved workspace (tar.zst), None if there never was one."""

    execution: str
    group: str
    task: str
    attempt: int
    ending: str
    exit_code: int | None
    artifact: BlobRef | None
    seconds: float
    cpu_seconds: float
    detail: str = ""

    def entity(self) -> str:
        return self.execution


# ----------------------------------------------------------------------------------------------------------- proxy


class ProxyReady(Event, frozen=True, kw_only=True, tag="proxy_ready"):
    """proxy. Harnesses reach the model API here: `url` (http://host:port) and the unix socket `socket`.

    A new `incarnation` of a proxy says that the process before it is gone."""

    proxy: str
    url: str
    socket: str
    incarnation: str = ""

    def entity(self) -> str:
        return self.proxy


class ModelCallRecorded(Event, frozen=True, kw_only=True, tag="model_call_recorded"):
    """proxy. One model call, token-exact; published durably before the last byte of the response is sent.

    The prompt's ids are: ids(parent) + input_ids, where ids(root) is empty and ids(call) = prompt + output_ids.
    `parent` is the call id of the tree node that this call continues, or "" for a new root child.
    With `keep` >= 0 only the first `keep` ids of ids(parent) are inherited (the context diverged inside them)."""

    call: str
    execution: str
    attempt: int
    cell: int
    parent: str
    keep: int  # -1: all of the parent's ids
    call_class: str  # main_task, main_summary, sub_task, sub_summary, auxiliary
    input_ids: bytes  # int32
    output_ids: bytes  # int32
    output_logprobs: bytes  # float32, same length as output_ids
    versions: tuple[VersionSpan, ...]
    finish_reason: str  # stop, length, abort
    sampling: Sampling
    context: str = ""  # canonical hash of the serialized conversation after this call
    request: str = ""  # canonical hash of the conversation that was asked to be continued (a retry has the same)
    opening: str = ""  # "length:hash" of the first user text of a root child: tells main and sub-agent lines apart
    diverged: bool = False  # the harness changed what the policy generated before this call
    discarded: bool = False  # the response never reached the harness whole
    cached_tokens: int = 0
    queued_s: float = 0.0
    seconds: float = 0.0
    dialect: str = ""
    delivered: int = -1  # with a stop sequence: so many output tokens lie before it, and only these are continued

    def entity(self) -> str:
        return self.execution


class ModelCallBegun(Event, frozen=True, kw_only=True, tag="model_call_begun"):
    """proxy. A call is in flight from here on, durably before any engine is asked for its tokens; ModelCallRecorded
    (or ModelCallDropped) ends it.

    `take` 0: the process `proxy`, `incarnation` begins it. take n + 1: that process goes on with what the owner of
    take n left behind; of several such events the first in the stream counts."""

    call: str
    execution: str
    attempt: int
    proxy: str
    incarnation: str
    take: int
    parent: str  # this and the following as in ModelCallRecorded
    keep: int
    call_class: str
    prompt_tokens: int
    sampling: Sampling
    request: str
    opening: str = ""
    diverged: bool = False
    dialect: str = ""

    def entity(self) -> str:
        return self.execution


class ModelCallProgressed(Event, frozen=True, kw_only=True, tag="model_call_progressed"):
    """proxy. Output of a call in flight from token `start` on, so that another process can go on with it. Published
    every proxy.progress_tokens tokens, and before the call goes to another engine."""

    call: str
    execution: str
    attempt: int
    take: int
    start: int
    output_ids: bytes  # int32
    output_logprobs: bytes  # float32
    versions: tuple[VersionSpan, ...]  # of the whole output so far

    def entity(self) -> str:
        return self.execution


class ModelCallLeft(Event, frozen=True, kw_only=True, tag="model_call_left"):
    """proxy (one of several). The harness hung up before the reply was there. The generation goes on, and the same
    request gets its reply from any proxy."""

    call: str
    execution: str
    attempt: int

    def entity(self) -> str:
        return self.execution


class ModelCallDropped(Event, frozen=True, kw_only=True, tag="model_call_dropped"):
    """proxy. A call in flight ends without a record. Either it failed before anything was generated, or its proxy died,
    nobody asked for it again, and the engines that knew its prompt are gone too: `tokens` are known to be lost then."""

    call: str
    execution: str
    attempt: int
    tokens: int
    reason: str

    def entity(self) -> str:
        return self.execution


class ModelCallMarked(Event, frozen=True, kw_only=True, tag="model_call_marked"):
    """proxy. Corrects `discarded` of a recorded call: its reply reached a retry after all, or was lost on the way."""

    call: str
    execution: str
    attempt: int
    discarded: bool

    def entity(self) -> str:
        return self.execution


class ModelCallUnclassified(Event, frozen=True, kw_only=True, tag="model_call_unclassified"):
    """proxy. A call fits no rule of its harness's profile and is recorded as `call_class`. Published once per harness
    and fingerprint, so that somebody writes the missing rule."""

    call: str
    execution: str
    harness: str
    call_class: str
    fingerprint: str  # tool names, headers that name an agent, beginnings of the first system and the last user text

    def entity(self) -> str:
        return self.execution


class ModelCallRefused(Event, frozen=True, kw_only=True, tag="model_call_refused"):
    """proxy. A call that produced no tokens: which error the harness got, and why."""

    execution: str
    status: int
    kind: str
    message: str

    def entity(self) -> str:
        return self.execution or "unknown"


# ------------------------------------------------------------------------------------------------------- evaluator


class ExecutionAssessed(Event, frozen=True, kw_only=True, tag="execution_assessed"):
    """evaluator. An assessment is tied to execution, attempt, artifact and branch. Exactly one per execution.

    `status`: scored (score in 0..1), excluded (evaluator unresolved after all retries, or nothing assessable at the
    overall budget's end), placeholder (total failure before any work: score 0)."""

    execution: str
    group: str
    attempt: int
    artifact: str  # digest, "" if none
    branch: str
    status: str
    score: float
    tries: int
    seconds: float
    detail: str = ""

    def entity(self) -> str:
        return self.execution


# ------------------------------------------------------------------------------------------------------ trajectory


class GroupReady(Event, frozen=True, kw_only=True, tag="group_ready"):
    """trajectory. All executions of the training group are terminal and assessed; the group can be assigned."""

    group: str
    policy_version: int
    rewards: tuple[float, ...]  # of the scored and placeholder executions
    excluded: int
    placeholders: int
    tokens_generated: int

    def entity(self) -> str:
        return self.group


class PathSelected(msgspec.Struct, frozen=True):
    """A root-to-leaf path chosen for training: the leaf's call id, its class, tokens it newly trains."""

    leaf: str
    call_class: str
    tokens: int


class GroupAssigned(Event, frozen=True, kw_only=True, tag="group_assigned"):
    """trajectory. The group's executions train in `batch`, each exactly once. Zero-advantage executions are consumed
    too: they count into the loss's divisor and have no paths packed."""

    group: str
    batch: int
    policy_version: int
    advantages: dict[str, float]  # execution -> group-relative advantage (scored and placeholder ones)
    paths: dict[str, tuple[PathSelected, ...]]  # execution -> selected paths (at most J_max)

    def entity(self) -> str:
        return self.group


class MicroStepReady(Event, frozen=True, kw_only=True, tag="micro_step_ready"):
    """trajectory. Work item of the training cells (entity = batch, so that one consumer per batch claims them).

    `payload` is a microstep.MicroStep in MessagePack, inline or, above a threshold, as `blob`."""

    micro_step: str
    batch: int
    groups: tuple[str, ...]
    tokens: int  # packed tokens computed
    path_tokens: int  # tokens the same paths would need unshared
    trained_tokens: int
    payload: bytes | None
    blob: BlobRef | None

    def entity(self) -> str:
        return f"b{self.batch:05d}"


class BatchSealed(Event, frozen=True, kw_only=True, tag="batch_sealed"):
    """trajectory. No more groups or micro-steps follow for the batch. May list no micro-steps at all."""

    batch: int
    groups: tuple[str, ...]
    executions: int  # scored + placeholder executions: divisor of the loss
    micro_steps: tuple[str, ...]
    mean_reward: float
    mean_staleness: float

    def entity(self) -> str:
        return f"b{self.batch:05d}"


# ------------------------------------------------------------------------------------------------------------- any


class DeadLetter(Event, frozen=True, kw_only=True, tag="dead_letter"):
    """Any service. A message that could not be decoded or handled, kept whole."""

    service: str
    subject: str
    sequence: int
    reason: str
    data: bytes

    def entity(self) -> str:
        return "dead"


EVENTS: tuple[type[Event], ...] = tuple(
    sorted(
        (c for c in globals().values() if isinstance(c, type) and issubclass(c, Event) and c is not Event),
        key=lambda c: c.__name__,
    )
)

NAME_OF: dict[type[Event], str] = {c: str(c.__struct_config__.tag) for c in EVENTS}
