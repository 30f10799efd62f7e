"""Selected paths -> bins -> micro-steps.

Owns: which paths share a micro-step, and the forest in which they share tokens. Invariants: a bin's token count is
that of the trie of its paths, at most `budget` unless it holds a single path that is longer; each path is in one bin;
the order of paths and bins depends on their contents only.

How bins are chosen. A path costs a bin only the tokens that the bin's paths do not already have as a prefix. Paths
are sorted as strings of token ids, so the longest prefix shared with a bin is the one shared with its nearest
neighbour there, and the prefix shared by two paths is the smallest of the adjacent ones between them. Each path goes
to the bin where it costs least (then the fullest, then the oldest), a new one if it fits nowhere. Two orders are
tried: longest first, which fills well, and string order, which keeps branches of one tree together; the one that
computes fewer tokens (then needs fewer bins) is kept.

The trie merges equal prefixes from the root only, so a shared token has the same context, and the same logits, on
every path.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from shared.codec import pack_floats, pack_ids, unpack_floats, unpack_ids
from shared.microstep import MicroStep, Segment, SequenceInfo

Ids = npt.NDArray[np.int32]


class TrainPath(msgspec.Struct, frozen=True, array_like=True):
    """A selected path of one execution, ready to be packed."""

    group: str
    execution: str
    leaf: str
    advantage: float
    weight: float  # 1 / newly trained tokens of the execution
    ids: bytes  # int32 [n]
    positions: bytes  # int32 [m]: which of ids are newly trained
    logprobs: bytes  # float32 [m]

    @property
    def length(self) -> int:
        return len(self.ids) // 4

    @property
    def trained(self) -> int:
        return len(self.positions) // 4


class Bin(msgspec.Struct, array_like=True):
    """Paths that share a micro-step; `tokens` = size of their trie."""

    paths: list[TrainPath] = []
    tokens: int = 0


def pack(held: Sequence[Bin], paths: Sequence[TrainPath], budget: int) -> list[Bin]:
    """Bins of `held` (kept together, filled up) and of `paths`. Held bins come first, in their order."""
    order = _StringOrder([path for old in held for path in old.paths] + list(paths))
    known = sum(len(old.paths) for old in held)
    fresh = [rank for rank in range(len(order.paths)) if order.source[rank] >= known]
    longest_first = sorted(fresh, key=lambda rank: (-order.paths[rank].length, rank))
    plans = [_place(order, held, ranks, budget) for ranks in (longest_first, fresh)]
    best = min(plans, key=lambda plan: (sum(room.tokens for room in plan), len(plan)))
    return [Bin([order.paths[rank] for rank in room.ranks], room.tokens) for room in best]


def release(bins: Sequence[Bin], budget: int, *, below: float, at_most: int) -> tuple[list[Bin], list[Bin]]:
    """(bins to emit now, bins to hold for later paths): held are at most `at_most`, the emptiest of those filled less
    than `below` of the budget."""
    loose = sorted((b.tokens, i) for i, b in enumerate(bins) if b.tokens < below * budget)[:at_most]
    keep = {i for _, i in loose}
    return [b for i, b in enumerate(bins) if i not in keep], [b for i, b in enumerate(bins) if i in keep]


def micro_step(packed: Bin, name: str, batch: int) -> MicroStep:
    """The bin as the trainer takes it; layout in shared/microstep.py."""
    order = _StringOrder(packed.paths)
    forest = _forest(order)
    tokens, where, which, logprobs = [], [], [], []
    for rank, path in enumerate(order.paths):
        line = forest.lines[rank]
        tokens.append(unpack_ids(path.ids)[order.before[rank] :])
        where.append(line.locate(unpack_ids(path.positions)))
        which.append(np.full(path.trained, rank, dtype=np.int32))
        logprobs.append(unpack_floats(path.logprobs))
    return MicroStep(
        micro_step=name,
        batch=batch,
        tokens=pack_ids(np.concatenate(tokens)),
        segments=tuple(forest.segments),
        sequences=tuple(SequenceInfo(p.execution, p.leaf, p.advantage, p.weight, p.trained) for p in order.paths),
        entry_token=pack_ids(np.concatenate(where)),
        entry_sequence=pack_ids(np.concatenate(which)),
        entry_logprob=pack_floats(np.concatenate(logprobs)),
    )


# --------------------------------------------------------------------------------------------------- string order


class _StringOrder:
    """Paths sorted by ids, then execution and leaf. `source[rank]` = place in the input; `before[rank]` = length of the
    prefix shared with the path one rank lower."""

    def __init__(self, paths: Sequence[TrainPath]) -> None:
        keys = [unpack_ids(p.ids).astype(">i4").tobytes() for p in paths]
        self.source = sorted(range(len(paths)), key=lambda i: (keys[i], paths[i].execution, paths[i].leaf))
        self.paths = [paths[i] for i in self.source]
        self.before = np.zeros(len(paths), dtype=np.int64)
        for rank in range(1, len(paths)):
            self.before[rank] = common_prefix(unpack_ids(self.paths[rank - 1].ids), unpack_ids(self.paths[rank].ids))

    def shared(self, rank: int, ranks: list[int]) -> int:
        """Longest prefix that path `rank` shares with one of the paths `ranks` (ascending)."""
        place = bisect_left(ranks, rank)
        low = int(self.before[ranks[place - 1] + 1 : rank + 1].min()) if place else 0
        high = int(self.before[rank + 1 : ranks[place] + 1].min()) if place < len(ranks) else 0
        return max(low, high)


def common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


@dataclass(eq=False)
class _Room:
    ranks: list[int] = field(default_factory=list)
    tokens: int = 0


def _place(order: _StringOrder, held: Sequence[Bin], ranks: Sequence[int], budget: int) -> list[_Room]:
    rooms = _held_rooms(order, held)
    for rank in ranks:
        length = order.paths[rank].length
        best: tuple[int, int, int] | None = None
        for number, room in enumerate(rooms):
            free = budget - room.tokens
            cost = length - order.shared(rank, room.ranks)
            if cost <= free and (best is None or (cost, free, number) < best):
                best = (cost, free, number)
        if best is None:
            rooms.append(_Room([rank], length))
        else:
            insort(rooms[best[2]].ranks, rank)
            rooms[best[2]].tokens += best[0]
    return rooms


def _held_rooms(order: _StringOrder, held: Sequence[Bin]) -> list[_Room]:
    owner = [number for number, old in enumerate(held) for _ in old.paths]
    rooms = [_Room([], old.tokens) for old in held]
    for rank, source in enumerate(order.source):
        if source < len(owner):
            rooms[owner[source]].ranks.append(rank)
    return rooms


# --------------------------------------------------------------------------------------------------------- forest


@dataclass(eq=False)
class _Line:
    """Where the tokens of one path lie: depths from starts[k] on are at packed index depth + shift[k]."""

    starts: list[int]
    owners: list[int]  # rank whose own tokens they are
    shifts: list[int]

    def locate(self, depths: Ids) -> Ids:
        piece = np.searchsorted(np.array(self.starts), depths, side="right") - 1
        where: Ids = (depths + np.array(self.shifts)[piece]).astype(np.int32)
        return where


@dataclass(eq=False)
class _Forest:
    segments: list[Segment]
    lines: list[_Line]


def _forest(order: _StringOrder) -> _Forest:
    """Each path owns the tokens beyond the prefix shared with the path before it; they lie in rank order. Owned runs
    are cut where a later path leaves them."""
    lines: list[_Line] = []
    cuts: list[set[int]] = []
    offset = 0
    for rank, path in enumerate(order.paths):
        depth = int(order.before[rank])
        line = _branch(lines[-1], depth) if lines else _Line([], [], [])
        if line.owners:
            cuts[line.owners[-1]].add(depth)
        if path.length > depth:
            line.starts.append(depth)
            line.owners.append(rank)
            line.shifts.append(offset - depth)
        lines.append(line)
        cuts.append({path.length})
        offset += path.length - depth
    return _Forest(_segments(order, lines, cuts), lines)


def _branch(line: _Line, depth: int) -> _Line:
    """The part of a path's line above `depth`."""
    keep = bisect_left(line.starts, depth)
    return _Line(line.starts[:keep], line.owners[:keep], line.shifts[:keep])


def _segments(order: _StringOrder, lines: list[_Line], cuts: list[set[int]]) -> list[Segment]:
    segments: list[Segment] = []
    ending: dict[tuple[int, int], int] = {}  # (owner, depth at which the segment ends) -> segment
    for rank, line in enumerate(lines):
        start = int(order.before[rank])
        parent = -1
        if start:
            above = line.owners[bisect_left(line.starts, start) - 1]
            parent = ending[above, start]
        for stop in sorted(cuts[rank]):
            if stop <= start:
                continue
            segments.append(Segment(start + line.shifts[-1], stop - start, parent))
            parent = ending[rank, stop] = len(segments) - 1
            start = stop
    return segments
