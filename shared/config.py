"""The run file: one YAML file, typed, every key documented here (docs/run-file.md is generated from these classes).

Invariant: a RunConfig that `load` returned has been checked as a whole: unknown keys, wrong types, missing folders,
batches that cannot fit and layouts that cells cannot hold are refused before anything starts, with key, value and fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """model: what is trained."""

    path: str
    """Hugging Face folder (config.json, *.safetensors, tokenizer); relative paths start at the run file's folder."""
    name: str = "gyre-policy"
    """Model name that the proxy announces to harnesses."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights in engine and trainer."""
    context: int = 4096
    """Longest prompt + output of one call, in tokens."""
    renderer: str = "auto"
    """Message-to-token renderer (package `renderers`); auto picks by the model's architecture."""
    thinking: bool = False
    """Whether the chat template opens a thinking block."""


class TasksConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tasks: folders in the Harbor layout (task.toml, instruction.md, environment/, tests/)."""

    train: str
    """Folder whose sub-folders are the training tasks."""
    limit: int = 0
    """Use only the first so many training tasks; 0 = all."""


class EvalSetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """evaluation.sets[]: one fixed set of executions, run before and after training."""

    name: str
    tasks: str
    """Folder of tasks."""
    executions: int
    """How many executions in all; tasks are repeated evenly."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    when: tuple[Literal["before", "after"], ...] = ("before", "after")


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sets: tuple[EvalSetConfig, ...] = ()
    main: str = ""
    """The set whose mean reward is reward_before / reward_after; empty = the first."""


class HarnessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """harness: the unmodified agent program."""

    name: str = "scout"
    """A built-in launch profile (scout, mini-swe-agent) or any name of your own with `command`."""
    command: tuple[str, ...] = ()
    """Command line of your own harness; {instruction}, {instruction_file}, {base_url}, {key}, {model} and {execution}
    (the execution's id) are put in."""
    env: dict[str, str] = {}
    """Additional environment variables, with the same places to fill."""
    mounts: tuple[str, ...] = ()
    """Host folders that the harness needs, visible read-only inside the sandbox at the same path."""
    setup: str = ""
    """Shell command that prepares the harness (once, outside the sandbox) before the run starts."""
    extra_args: tuple[str, ...] = ()
    """Appended to the built-in profile's command line."""


class ExecutionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """execution: limits of one execution."""

    harness_time_limit_s: float = 7200.0
    """The harness is stopped after this long; what it left is scored as usual."""
    overall_budget_s: float = 14400.0
    """From dispatch to assessment; with nothing assessable by then the execution is excluded."""
    start_attempts: int = 3
    """Tries to start before the execution becomes a zero-reward placeholder."""
    memory_mb: int = 512
    """Address-space limit of each process in the sandbox (0 = none)."""
    processes: int = 64
    """Most processes in one sandbox."""
    disk_mb: int = 64
    """Largest file and /tmp size in the sandbox."""
    network: Literal["proxy-only", "host"] = "proxy-only"
    """proxy-only: nothing but the model API is reachable from the sandbox."""


class AssessmentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """assessment: scoring of preserved workspaces."""

    timeout_s: float = 60.0
    """Longest run of one task's tests (a task.toml may ask for less)."""
    tries: int = 3
    """An evaluator failure is unresolved and tried again so often in all, then excluded: it is never a zero."""
    workers: int = 2
    """Assessments at once."""


class SamplingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """sampling: imposed on training executions, whatever the harness asks for."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024


class CellsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """cells: cell 0 is the core, the others are satellites; all have the same layout."""

    count: int = 3
    """Cells that both roll out and train."""
    standalone: int = 0
    """Additional rollout engines that never train and hold no trainer, numbered after the cells. They take every
    burst's weights; executions of cells that leave rollout go to them first."""
    capacity: int = 32
    """Concurrent executions that one cell's engine serves."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine_tokens: int = 65536
    """KV slots of one engine, in tokens (0: let the engine decide, on a GPU)."""
    engine_page: int = 16
    """KV page size in tokens. Smaller pages share more of common prefixes; below 16 calls move without pages."""
    engine_args: tuple[str, ...] = ()
    """Additional SGLang server arguments."""
    threads: int = 1
    """CPU threads of each engine and training process."""
    handover: Literal["live", "pages", "recompute", "drain"] = "live"
    """What a cell that leaves rollout does with its live model calls: live = they are cut at once and go on at another
    cell, with their KV pages where moving these is faster than computing them again, by measured rates (the harness
    notices nothing); pages = the same, always with pages; recompute = always without; drain = the cell waits until they
    have ended."""
    kv_stale: Literal["drop", "keep"] = "drop"
    """What live model calls do when their engine takes new weights: drop = their KV is computed again under the new
    weights before they go on; keep = they stop for the update only and go on with the KV that older weights computed,
    and may take it to another cell. New calls never use KV of older weights in either."""
    handover_timeout_s: float = 5.0
    """A moved call waits so long for its KV pages at the other cell; then its prefix is computed again there."""
    handover_hold_s: float = 15.0
    """A leaving cell keeps the KV pages of a moved call so long for the other cell; must exceed handover_timeout_s."""
    start_timeout_s: float = 300.0

    @property
    def engines(self) -> int:
        """All that roll out: cells [0, count) train as well, [count, engines) never do."""
        return self.count + self.standalone


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """scheduler: who rolls out, who trains, what is dispatched when."""

    mode: Literal["elastic", "async", "colocate", "lookahead"] = "elastic"
    mu: int = 3
    """Training steps per burst (between two weight publications to rollout)."""
    phi: float = 0.5
    """Extra-dispatch factor in batches: (phi + mu) * groups_per_batch groups are outstanding at a burst boundary."""
    groups_per_batch: int = 32
    """B: groups consumed by one training step."""
    executions_per_group: int = 16
    """N: executions of one task."""
    supply_fraction: float = 0.5
    """A cell leaves rollout only if this fraction of the batch's groups is ready and untrained ..."""
    supply_hold_s: float = 1.0
    """... continuously for so long."""
    async_training_cells: int = 1
    """Mode async: cells [0, n) always train, the others always roll out."""
    streaming: bool = True
    """Groups are trained as they become ready. false: a batch opens when all its groups are ready, as plain
    asynchronous training does it (the paper's baseline)."""


class TrainingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """training: the paper's recipe by default."""

    steps: int = 48
    """Optimizer steps (batches) of the run."""
    learning_rate: float = 1e-6
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Linear learning-rate warm-up."""
    clip_grad: float = 1.0
    token_weight_cap: float = 5.0
    """Token importance weights are capped here."""
    sequence_clip_low: float = 0.995
    sequence_clip_high: float = 1.005
    """Sequence-level importance ratios outside [low, high] stop contributing in the direction that leads further."""
    advantage_std: bool = True
    """Divide group-relative advantages by the group's standard deviation."""
    paths_per_execution: int = 5
    """J_max."""
    micro_step_tokens: int = 4096
    """Packed tokens of one micro-step."""
    checkpoint_every: int = 1
    """Steps between durable checkpoints (weights and optimizer)."""
    keep_checkpoints: int = 2


class ProxyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """proxy: the model API that harnesses see."""

    port: int = 0
    """0 = any free port."""
    call_timeout_s: float = 7200.0
    progress_tokens: int = 512
    """A call in flight writes what it has generated to the stream every so many tokens (8 bytes each); 0 = never. Only
    what is newer than that is lost if its proxy and its engine die together."""


class BusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """bus: NATS JetStream."""

    url: str = ""
    """Empty: `gyre up` starts a server of its own."""
    blob_threshold_bytes: int = 262144
    """Payloads above this go to the blob store."""


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """telemetry: traces (OTLP) and metrics (Prometheus)."""

    otlp_endpoint: str = ""
    """http(s)://host:4318 of an OTLP/HTTP receiver; empty: traces go to <run dir>/traces.jsonl as OTLP/JSON."""
    prometheus_port: int = 0
    """First port of the services' /metrics; 0 = off."""


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole run file."""

    name: str
    """Run ids start with this."""
    seed: int = 0
    model: ModelConfig
    tasks: TasksConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    harness: HarnessConfig = HarnessConfig()
    execution: ExecutionConfig = ExecutionConfig()
    assessment: AssessmentConfig = AssessmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    cells: CellsConfig = CellsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    training: TrainingConfig = TrainingConfig()
    proxy: ProxyConfig = ProxyConfig()
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    runs_dir: str = "runs"
    """Where runs/<id>/ is made; relative to the working directory."""


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain data, for RunStarted; `from_plain` takes it back."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def from_plain(plain: dict[str, Any]) -> RunConfig:
    """Take back what `to_plain` gave. No checks but the types: it was checked when it was loaded."""
    return msgspec.convert(plain, RunConfig)


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and check a run file; `overrides` maps dotted keys to values (``{"training.steps": 2}``).

    Raises config_check.ConfigError with every problem: key, value, fix."""
    from shared.config_check import load_checked

    return load_checked(path, overrides or {})
