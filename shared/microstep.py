"""A micro-step: a forest of token trees with the loss entries that its tokens carry. Written by trajectory/packing,
read by the trainer.

Layout. `tokens` [T] are the packed ids. `segments` cut them into runs: segment i covers tokens [start, start+length),
its parent segment p (or -1) comes earlier in the list, and it continues after the *last* token of p. A token attends
to itself, to earlier tokens of its segment and to all tokens of its ancestor segments; its position is its depth on
that path (0 at a root). So a shared prefix is computed once, whichever executions share it.

Loss entries [L] are separate from tokens, because one packed token can be the generated token of several executions:
entry e says that sequence `entry_sequence[e]` generated token `entry_token[e]` with behaviour log-probability
`entry_logprob[e]`; its current log-probability is read from the logits at the token's parent (the token before it on
the path). Every generated token that is trained is exactly one entry of exactly one micro-step.

A sequence is one selected path of one execution; all its entries are in the same micro-step (GSPO needs their mean).
The batch loss is  sum over sequences of weight * sum over entries of token loss,  divided once by the number of
executions of the batch; `weight` = 1 / (trained tokens of the execution), so each execution's tokens are averaged.
"""

from __future__ import annotations

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    start: int
    length: int
    parent: int  # index of the parent segment, -1 for a root


class SequenceInfo(msgspec.Struct, frozen=True):
    execution: str
    leaf: str  # call id of the path's leaf
    advantage: float
    weight: float  # 1 / trained tokens of the execution
    entries: int


class MicroStep(msgspec.Struct, frozen=True):
    micro_step: str
    batch: int
    tokens: bytes  # int32 [T]
    segments: tuple[Segment, ...]
    sequences: tuple[SequenceInfo, ...]
    entry_token: bytes  # int32 [L]: index into tokens
    entry_sequence: bytes  # int32 [L]: index into sequences
    entry_logprob: bytes  # float32 [L]


def encode(step: MicroStep) -> bytes:
    return msgspec.msgpack.encode(step)


def decode(data: bytes) -> MicroStep:
    return msgspec.msgpack.decode(data, type=MicroStep)
