"""What a cell agent and its training workers say to each other.

One socket, between the agent and the cell's control rank (rank 0 of the cell's world), which forwards to the other
ranks over the cell's own CPU process group. Frames: 4-byte little-endian length, then MessagePack of one tagged
struct. The agent sends commands, one at a time except for Train (which may be queued ahead); each command has exactly
one reply with the same `id`. A worker that fails answers Failed and exits: its cell is started again. In between the
control rank says every few seconds that it is Alive; workers that fall silent are killed.
"""

from __future__ import annotations

import msgspec

from shared.events import TensorSlice


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    id: int


# ------------------------------------------------------------------------------------------------ agent -> worker


class Load(Message, frozen=True, kw_only=True, tag="load"):
    """Core: weights (and optimizer) from a Hugging Face folder or, if given, a checkpoint folder. -> Done"""

    hf_path: str
    checkpoint: str = ""


class Pull(Message, frozen=True, kw_only=True, tag="pull"):
    """Get a published snapshot over the Transfer Engine from its owner and from other cells that have some of it
    (`peers`: host:port of their offers), verified; keep it; with `load` also put it into the training model (joining a
    batch). -> Done(metrics={"pull_s", "verify_s", "load_s", "core_bytes", "cell_bytes", "sources", "lost_sources"})"""

    session: str
    address: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    digest: str
    chunk_bytes: int
    chunks: bytes
    version: int
    load: bool = True
    peers: tuple[str, ...] = ()


class BeginBatch(Message, frozen=True, kw_only=True, tag="begin_batch"):
    """Zero the gradients; micro-steps of this batch follow. -> Done"""

    batch: int
    attempt: int
    version: int


class Train(Message, frozen=True, kw_only=True, tag="train"):
    """Forward and backward of one micro-step (microstep.MicroStep bytes). -> Trained

    The reply comes when the backward is through: with pipeline stages that is after later micro-steps arrived,
    EndBatch, or a short while (0.2 s) without either."""

    payload: bytes


class EndBatch(Message, frozen=True, kw_only=True, tag="end_batch"):
    """No more micro-steps for now: drain the pipeline. All Trained replies precede the reply. -> Done"""


class Reduce(Message, frozen=True, kw_only=True, tag="reduce"):
    """Sum the gradient buffers of the named cells into the core's. `group` names the set of cell incarnations (same on
    all members); groups are built on first use over the TCP store at `store` and kept. -> Done"""

    group: str
    rank: int  # this cell's place in the set, core = 0
    size: int
    store: str  # host:port, served by the core's control rank


class Step(Message, frozen=True, kw_only=True, tag="step"):
    """Core: divide by `executions`, clip, optimizer step, new version. -> Done(metrics: grad_norm, learning_rate)"""

    executions: int
    version: int


class Publish(Message, frozen=True, kw_only=True, tag="publish"):
    """Core: freeze the current weights as snapshot `version` (Hugging Face layout). -> Published"""

    version: int


class Save(Message, frozen=True, kw_only=True, tag="save"):
    """Core: durable checkpoint of weights and optimizer in `path` (written aside, then renamed). -> Done"""

    path: str


class Export(Message, frozen=True, kw_only=True, tag="export"):
    """Core: write a Hugging Face folder (config and tokenizer copied from `hf_path`). -> Done"""

    path: str
    hf_path: str


class Refit(Message, frozen=True, kw_only=True, tag="refit"):
    """Put the last pulled (or, on the core, published) snapshot `version` into the SGLang server at `engine_url`
    between its begin/end calls, and verify it. -> Done(metrics=the seconds of each step: engine_push.refit)"""

    engine_url: str
    version: int


class Exit(Message, frozen=True, kw_only=True, tag="exit"):
    """Leave in order. -> Done"""


# ------------------------------------------------------------------------------------------------ worker -> agent


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First frame of the control rank (id 0): the workers of the cell stand. `store`: the core's TCP store; `offers`:
    where other cells hear of the snapshots that are held here."""

    pid: int
    world_size: int
    store: str = ""
    offers: str = ""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    metrics: dict[str, float] = {}


class Trained(Message, frozen=True, kw_only=True, tag="trained"):
    micro_step: str
    tokens: int
    seconds: float
    metrics: dict[str, float] = {}  # loss, entries, sequences, clipped, ratio_mean, kl, entropy_estimate


class Published(Message, frozen=True, kw_only=True, tag="published"):
    version: int
    session: str
    address: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    digest: str
    chunk_bytes: int
    chunks: bytes


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """Nobody's reply (id 0): the process of `rank` runs, whatever it is busy with."""

    rank: int


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The command was not carried out. `fatal`: the worker exits; otherwise nothing changed and it goes on (Pull and
    Refit that failed for an outside reason)."""

    reason: str
    fatal: bool = True


Command = Load | Pull | BeginBatch | Train | EndBatch | Reduce | Step | Publish | Save | Export | Refit | Exit
Reply = Hello | Done | Trained | Published | Alive | Failed
