"""What a change of role costs, and what a harness sees of it.

    python benchmarks/role_switch.py [--json] [--steps 8] [--tokens 300] [--no-links]

A real run of the whole system (`gyre up`, three cells, the example's model with random weights so that calls are long)
whose harness is a streaming client that writes down the gaps between the events of its calls. From the run's stream:

- both ways of a switch, split into steps. `control` is all of it that is not moving bytes: rollout -> training from the
  order to CellJoinedBatch without the pull and without waiting for a batch to open; training -> rollout from the order
  to the role change without the pull and without handing the bytes to the engine and comparing them there;
- the share of the prefixes of moved calls that came with their pages (`cells.handover: pages`), page remainder aside,
  of calls whose pages were pinned; how many moved without (they were waiting, or not pinned in time) is told;
- the longest gap between two events of a call, of moved calls and of the others of the same run.

Then the pulls, by benchmarks/weight_fanout.py: a pull against a plain read of the Transfer Engine, several pulls at
once against one (over limited links; needs root). A quiet machine: everything here is a time. About five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import weight_fanout  # noqa: E402
from cli.history import open_stream  # noqa: E402
from shared import events as ev  # noqa: E402

CLIENT = "benchmarks/role_switch_workload/streaming_client.py"
TASKS = 8
CALLS, WORDS = 2, 250
RUN_LIMIT_S = 420.0
BYTES_IN_REFIT = ("pull_s", "copy_s", "load_s", "check_s")
BYTES_IN_JOIN = ("pull_s", "load_s")


class RunBroke(RuntimeError):
    """The run did not end well; the message has its last words."""


# -------------------------------------------------------------------------------------------------------- the run


def write_tasks(folder: Path) -> Path:
    """Tasks whose test takes over the score that the client left."""
    for k in range(TASKS):
        task = folder / f"task-{k}"
        for part in ("environment/workspace", "tests"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 20\n[agent]\ntimeout_sec = 300\n')
        (task / "instruction.md").write_text("Make your calls.\n")
        (task / "environment" / "workspace" / "README").write_text("nothing\n")
        test = task / "tests" / "test.sh"
        test.write_text(
            '#!/bin/sh\nlogs=${VERIFIER_LOGS:-/logs/verifier}\nmkdir -p "$logs"\ncat score > "$logs/reward.txt"\n'
        )
        test.chmod(0o755)
    return folder


def write_model(folder: Path) -> Path:
    """The example's shape and tokenizer with random weights that never say a special token: every call is plain text
    of the length that is asked for. How: one component of the embeddings is the same large number everywhere, and the
    output rows of special tokens have the other sign there."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    source = ROOT / "examples" / "minirepo" / "model"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source)
    config.tie_word_embeddings = False
    model = Qwen3ForCausalLM(config).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    rows = model.get_output_embeddings().weight
    unsaid = [i for i in range(rows.shape[0]) if i in special or i >= len(tokenizer)]
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 30.0
        rows[:, 0] = 1.0
        rows[unsaid, 0] = -1.0
    model.save_pretrained(folder)
    return folder


def settings(work: Path, steps: int, tokens: int) -> dict[str, object]:
    command = ["/usr/bin/python3", "-I", "-S", f"{{file:{CLIENT}}}", "{base_url}", "{key}", "{model}", "{execution}"]
    return {
        "runs_dir": work / "runs",
        "name": "role-switch",
        "model.path": write_model(work / "model"),
        "tasks.train": write_tasks(work / "tasks"),
        "harness.name": "streaming-client",
        "harness.command": json.dumps([*command, str(CALLS), str(WORDS)]),
        "harness.extra_args": "[]",
        "execution.harness_time_limit_s": 200,
        "execution.overall_budget_s": 300,
        "sampling.max_new_tokens": tokens,
        "training.steps": steps,
        "training.learning_rate": 1e-6,
        "scheduler.mode": "elastic",
        "scheduler.mu": 1,
        "scheduler.phi": 0.5,
        "scheduler.groups_per_batch": 4,
        "scheduler.executions_per_group": 3,
        "scheduler.supply_fraction": 0.25,
        "scheduler.supply_hold_s": 0.1,
        "cells.count": 3,
        "cells.capacity": 8,
        "cells.engine_tokens": 24576,
        "cells.handover": "pages",
        "evaluation.main": '""',
        "evaluation.sets": "[]",
    }


def run_system(work: Path, steps: int, tokens: int) -> Path:
    """`gyre up` to its end; the run's folder."""
    options = [x for k, v in settings(work, steps, tokens).items() for x in ("--set", f"{k}={v}")]
    run = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "up", str(ROOT / "examples/minirepo/run.yaml"), "--json", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    try:
        out, errors = run.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RunBroke(f"the run took longer than {RUN_LIMIT_S:.0f} s: fewer --steps, or a quieter machine") from error
    finally:
        if run.poll() is None:
            run.terminate()  # it stops in order
            run.wait(60)
    if run.returncode != 0:
        raise RunBroke(errors[-4000:])
    return Path(json.loads(out.strip().splitlines()[-1])["run_dir"])


async def read_stream(folder: Path) -> list[tuple[float, ev.Event]]:
    async with open_stream(folder) as bus:
        end = await bus.last_sequence()
        return [(s.time, s.event) async for s in bus.read_until(end) if s.event is not None]


# ---------------------------------------------------------------------------------------------------- the switches


@dataclass
class Switch:
    """One order of one cell and what came of it. Times in seconds since the order; `steps`: what the events tell."""

    cell: int
    role: str
    at: float
    marks: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)

    @property
    def control_s(self) -> float | None:
        """None: the switch did not come to its end."""
        if self.role == "training":
            if "joined" not in self.marks:
                return None
            ready = self.marks.get("out", self.marks["joined"])
            waited = max(0.0, self.marks.get("opened", 0.0) - ready)  # no batch was open
            return self.marks["joined"] - waited - sum(self.steps.get(k, 0.0) for k in BYTES_IN_JOIN)
        if "serves" not in self.marks:
            return None
        return self.marks["serves"] - sum(self.steps.get(k, 0.0) for k in BYTES_IN_REFIT)


def switches_of(stream: Sequence[tuple[float, ev.Event]]) -> list[Switch]:
    open_switch: dict[int, Switch] = {}
    done: list[Switch] = []
    opened: dict[tuple[int, int], float] = {}
    for at, event in stream:
        match event:
            case ev.CellRoleOrdered():
                open_switch[event.cell] = Switch(event.cell, event.role, at)
                done.append(open_switch[event.cell])
            case ev.BatchOpened():
                opened[event.batch, event.attempt] = at
            case ev.CellDrained() if event.cell in open_switch:
                open_switch[event.cell].marks["drained"] = at - open_switch[event.cell].at
            case ev.CellRoleChanged() if event.cell in open_switch:
                switch = open_switch[event.cell]
                if switch.role == "training" and event.role in ("joining", "training"):
                    switch.marks.setdefault("out", at - switch.at)
                elif switch.role == "rollout" and event.role == "rollout":
                    switch.marks["serves"] = at - switch.at
            case ev.CellRefitted() if event.cell in open_switch and open_switch[event.cell].role == "rollout":
                open_switch[event.cell].marks["refitted"] = at - open_switch[event.cell].at
                open_switch[event.cell].steps = event.steps
            case ev.CellJoinedBatch() if event.cell in open_switch and "joined" not in open_switch[event.cell].marks:
                switch = open_switch[event.cell]
                switch.marks["joined"], switch.steps = at - switch.at, event.steps
                if (when := opened.get((event.batch, event.attempt))) is not None:
                    switch.marks["opened"] = when - switch.at
    return done


def part(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            by_name[name].append(value)
    return {name: round(part(values, 0.5), 4) for name, values in by_name.items()}


def switch_figures(stream: Sequence[tuple[float, ev.Event]]) -> dict[str, Any]:
    found = [s for s in switches_of(stream) if s.control_s is not None]
    ways = {"rollout_to_training": "training", "training_to_rollout": "rollout"}
    control = [s.control_s or 0.0 for s in found]
    result: dict[str, Any] = {"switches": len(found), "control_s_p50": part(control, 0.5)}
    result["control_s_max"] = max(control, default=math.nan)
    for name, role in ways.items():
        of = [s for s in found if s.role == role]
        result[name] = {
            "switches": len(of),
            "control_s_p50": part([s.control_s or 0.0 for s in of], 0.5),
            "since_order_s": medians([s.marks for s in of]),
            "steps_s": medians([{k: v for k, v in s.steps.items() if k.endswith("_s")} for s in of]),
        }
    return result


def page_figures(stream: Sequence[tuple[float, ev.Event]]) -> dict[str, Any]:
    cuts = {e.rid: e for _, e in stream if isinstance(e, ev.CallCut) and e.to_cell >= 0}
    adopted = {e.rid: e for _, e in stream if isinstance(e, ev.CallAdopted)}
    held = {rid: cut for rid, cut in cuts.items() if cut.lease}
    came = sum(adopted[rid].tokens_from_pages for rid in held if rid in adopted)
    outcomes: dict[str, int] = defaultdict(int)
    for answer in adopted.values():
        outcomes[answer.outcome] += 1
    return {
        "calls_moved": len(cuts),
        "calls_moved_without_pages": len(cuts) - len(held),
        "outcomes": dict(outcomes),
        "prefix_tokens": sum(cut.tokens for cut in held.values()),
        "pages_reused": came / max(1, sum(cut.tokens for cut in held.values())),
        "cut_s_p50": part([cut.seconds for cut in held.values()], 0.5),
        "adopt_s_p50": part([a.seconds for a in adopted.values() if a.outcome == "pages"], 0.5),
    }


# --------------------------------------------------------------------------------------------- what harnesses see


def gap_figures(folder: Path, stream: Sequence[tuple[float, ev.Event]]) -> dict[str, Any]:
    moved = {e.call for _, e in stream if isinstance(e, ev.CallCut) and e.to_cell >= 0}
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for log in (folder / "logs" / "executions").glob("*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if "GAPS {" in line:
                told = json.loads(line[line.index("{") :])
                gaps[told["call"] in moved].append(told["longest_s"])
    return {
        "gap_s_p50": part(gaps[True], 0.5),
        "gap_s_p99": part(gaps[True], 0.99),
        "gap_s_calls": len(gaps[True]),
        "unmoved_gap_s_p50": part(gaps[False], 0.5),
        "unmoved_gap_s_p99": part(gaps[False], 0.99),
        "unmoved_gap_s_calls": len(gaps[False]),
    }


def spans(folder: Path, name: str) -> list[float]:
    """Seconds of the spans of that name in the run's traces."""
    found = []
    for file in folder.glob("traces-*.jsonl"):
        for line in file.read_text().splitlines():
            for resource in json.loads(line).get("resourceSpans", ()):
                for scope in resource.get("scopeSpans", ()):
                    for span in scope.get("spans", ()):
                        if span["name"] == name:
                            found.append((int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9)
    return found


def measure(steps: int, tokens: int, with_links: bool, size_mb: int, cells: int, link_mbit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gyre-role-switch-") as work:
        folder = run_system(Path(work), steps, tokens)
        stream = asyncio.run(read_stream(folder))
        found = switch_figures(stream) | page_figures(stream) | gap_figures(folder, stream)
        names = ("order role", "leave rollout", "adopt call", "release call", "continue call", "join batch", "refit")
        found["spans_s_p50"] = {name: round(part(spans(folder, name), 0.5), 4) for name in names}
    loopback = weight_fanout.over_loopback(size_mb, weight_fanout.REPEATS)
    found |= {"pull_vs_raw": loopback["pull_vs_raw"], "pull_over_loopback": loopback}
    if with_links:
        over = weight_fanout.over_links(cells, weight_fanout.LINK_MIB, link_mbit, 3)
        found |= {"pull_vs_raw_over_links": over["pull_vs_raw"], "fanout": over["fanout"], "pull_over_links": over}
    return found


def show(found: dict[str, Any], indent: str = "") -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name:32} {value:.4g}" if isinstance(value, float) else f"{indent}{name:32} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="training steps of the run: one burst each")
    parser.add_argument("--tokens", type=int, default=300, help="of each call")
    parser.add_argument("--no-links", action="store_true", help="leave out the limited links (they need root)")
    parser.add_argument("--size-mb", type=int, default=256, help="of the snapshot that is pulled over loopback")
    parser.add_argument("--cells", type=int, default=4, help="satellites that pull at once over the links")
    parser.add_argument("--link-mbit", type=float, default=100.0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the run and the namespaces end in any case
    found = measure(args.steps, args.tokens, not args.no_links, args.size_mb, args.cells, args.link_mbit)
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
