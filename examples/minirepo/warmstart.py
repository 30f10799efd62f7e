"""Makes the example policy: tokenizer, expert transcripts, supervised training. The one script behind `model/`.

`python -m examples.minirepo.warmstart --out DIR [--seconds N] [--processes N] [--seed N]`. Everything is seeded;
training stops by CPU time, so two machines end at different step counts. The shipped weights come from the defaults:
two processes, 1,250 steps.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from examples.minirepo import sft
from examples.minirepo.expert import CLEAN, Noise
from examples.minirepo.family import KINDS, make_task
from examples.minirepo.tokenizer import train_tokenizer
from examples.minirepo.transcripts import make_renderer, play

MODEL = Path(__file__).parent / "model"
FIRST_SEED = 1_000_000  # warm-start tasks never share a seed with the generated task folders
EXECUTIONS = {"basics": 12_000, "clean": 8_000, "noisy": 20_000}
MINI_SWE_AGENT = 0.12  # share of executions that show mini-swe-agent's conversation instead of scout's
NOISES = {"basics": CLEAN, "clean": CLEAN, "noisy": Noise()}
KINDS_OF = {"basics": ("plain", "value", "pair"), "clean": KINDS, "noisy": KINDS}  # the short ones first


def transcripts(tokenizer, name: str, seed: int, rank: int, world: int) -> list[tuple[int, list[sft.Row]]]:
    """This process's share of a data set: contexts grouped by their opening, as (its length, rows)."""
    renderer = make_renderer(tokenizer)
    rng, kinds = random.Random(f"{name} {seed} {rank}"), KINDS_OF[name]
    groups: dict[tuple[int, ...], list[sft.Row]] = {}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for i in range(rank, EXECUTIONS[name], world):
        task, shell = make_task("train", FIRST_SEED + i, kinds[i // world % len(kinds)]), rng.random() < MINI_SWE_AGENT
        contexts, _ = play(task, rng, NOISES[name], tokenizer, renderer, shell)
        for context in contexts:
            opening = context.ids[: context.ids.index(end) + 1]
            groups.setdefault(tuple(opening), []).append((context.ids, context.mask))
    return [(len(opening), rows) for opening, rows in groups.items()]


def worker(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One training process."""
    torch.set_num_threads(1)
    if args.processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.processes)
    tokenizer = train_tokenizer(args.seed)
    data = {name: transcripts(tokenizer, name, args.seed, rank, args.processes) for name in EXECUTIONS}
    model = sft.make_model(len(tokenizer), args.seed)
    sft.train(model, data, sft.Recipe(args.seconds), rank, args.processes, lambda text: print(text, flush=True))
    if rank == 0:
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        print(
            f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens -> {args.out}",
            flush=True,
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="warmstart", description="Makes the example policy from scratch.")
    parser.add_argument("--out", default=str(MODEL))
    parser.add_argument("--seconds", type=float, default=620.0, help="CPU seconds that each process trains")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (args, f"{folder}/meeting"), nprocs=args.processes)
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
