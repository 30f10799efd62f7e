"""`gyre tree`: one execution's trajectory tree, with call classes, token counts and the paths that were trained."""

from __future__ import annotations

from collections.abc import Iterable

from rich.tree import Tree as RichTree

from shared import events as ev
from shared.codec import unpack_ids


def draw(execution: str, events: Iterable[ev.Event]) -> RichTree:
    """Build the picture from the execution's events (and its group's assignment). Raises KeyError if unknown."""
    calls: dict[str, ev.ModelCallRecorded] = {}
    attempt, facts, trained = 0, [], {}
    for event in events:
        if isinstance(event, ev.ExecutionStarted) and event.execution == execution:
            attempt = event.attempt
            calls.clear()
        elif isinstance(event, ev.ModelCallRecorded) and event.execution == execution:
            calls[event.call] = event
        elif isinstance(event, ev.ExecutionFinished) and event.execution == execution:
            facts.append(f"{event.ending} after {event.seconds:.1f} s")
        elif isinstance(event, ev.ExecutionAssessed) and event.execution == execution:
            facts.append(f"{event.status}, reward {event.score:.3f}")
        elif isinstance(event, ev.GroupAssigned) and execution in event.advantages:
            advantage = event.advantages[execution]
            facts.append(f"trained in step {event.batch} with advantage {advantage:+.3f}")
            trained = {p.leaf: (i, p) for i, p in enumerate(event.paths.get(execution, ()), 1)}
    if not calls and not facts:
        raise KeyError(execution)
    on_path = _ancestors(calls, trained)
    title = f"[bold]{execution}[/bold] attempt {attempt}: " + "; ".join(facts)
    root = RichTree(title)
    branches = {"": root}
    for call in calls.values():  # in stream order: parents come first
        parent = branches.get(call.parent, root)
        branches[call.call] = parent.add(_label(call, trained, on_path))
    return root


def _ancestors(calls: dict[str, ev.ModelCallRecorded], leaves: Iterable[str]) -> set[str]:
    out: set[str] = set()
    for leaf in leaves:
        call: str = leaf
        while call and call not in out and call in calls:
            out.add(call)
            call = calls[call].parent
    return out


def _label(call: ev.ModelCallRecorded, trained: dict[str, tuple[int, ev.PathSelected]], on_path: set[str]) -> str:
    marks = []
    if call.keep >= 0:
        marks.append(f"branches after {call.keep} ids")
    if call.diverged:
        marks.append("changed by the harness")
    if call.discarded:
        marks.append("discarded")
    if call.finish_reason != "stop":
        marks.append(call.finish_reason)
    if call.call in trained:
        number, path = trained[call.call]
        marks.append(f"[green]path {number} ends here, {path.tokens} tokens trained[/green]")
    elif call.call in on_path:
        marks.append("[green]on a trained path[/green]")
    versions = ",".join(f"v{s.version}" for s in call.versions)
    new, out = len(unpack_ids(call.input_ids)), len(unpack_ids(call.output_ids))
    tail = f" ({'; '.join(marks)})" if marks else ""
    return f"{call.call.rpartition('a')[2]} {call.call_class} +{new} in, {out} out, {versions}, cell {call.cell}{tail}"
