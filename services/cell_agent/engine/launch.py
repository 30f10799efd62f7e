"""The process that an engine is: SGLang's own server, started so that it cannot outlive its agent.

    python -m services.cell_agent.engine.launch PARENT_PID cpu|cuda <SGLang server arguments>

Invariant: this process asks the kernel for SIGKILL at its parent's death before anything else, and SGLang's children
ask the same of this one, so `kill -9` of the agent leaves nothing behind.

On a CPU it also makes a server out of what registries ship: the `sgl_kernel` stand-in (cpu_shims), operator schemas
for a torchvision that was built for CUDA, and children that are forked after the imports instead of spawned before
them. A spawned child imports torch and SGLang again, which is two thirds of the start time and of the memory.
Nothing of this is touched on a machine with an accelerator.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from services.cell_agent.engine import cpu_attention, kept, live_calls
from shared.parent import die_with_parent

CPU_SHIMS = Path(__file__).parent / "cpu_shims"
ENGINE_ONLY = Path(sys.prefix) / "engine-only"  # packages that would break others beside a CPU torch (deploy/setup.sh)


def die_with(parent: int) -> None:
    """SIGKILL this process when `parent` dies; leave at once if it is dead already."""
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"engine: the agent {parent} is gone")


def declare_torchvision_operators() -> object:
    """The schemas that torchvision decorates while it is imported; its CUDA library, which defines them, cannot load
    beside a CPU torch. The returned library must be kept alive."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def other_model_modules(model_path: str) -> list[str]:
    """SGLang's model modules that do not define the architecture of `model_path` (it would import all of them)."""
    import importlib.util

    config = Path(model_path) / "config.json"
    spec = importlib.util.find_spec("sglang")
    if not config.is_file() or spec is None or spec.origin is None:
        return []
    wanted = json.loads(config.read_text()).get("architectures", [])
    modules = sorted((Path(spec.origin).parent / "srt" / "models").glob("*.py"))
    defining = {m.stem for m in modules if any(re.search(rf"^class {w}\b", m.read_text(), re.M) for w in wanted)}
    return [m.stem for m in modules if m.stem not in defining] if defining else []


class _Forked(ForkProcess):
    """A child of the launch process; starts with default signal handling, as a spawned one would."""

    def start(self) -> None:
        gc.collect()
        gc.freeze()  # the collector leaves shared pages alone
        super().start()

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        super().run()


class _ForkingMultiprocessing:
    """What SGLang's engine module uses of `multiprocessing`, with forked processes."""

    Process = _Forked
    Pipe = staticmethod(multiprocessing.Pipe)

    @staticmethod
    def set_start_method(method: str, force: bool = False) -> None:
        """SGLang asks for spawn, which CUDA needs and a CPU does not."""


def prepare_cpu(model_path: str) -> object:
    """Everything that must happen on a CPU before SGLang is imported, and the switch to forked children."""
    sys.path[:0] = [str(CPU_SHIMS), str(ENGINE_ONLY)]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(other_model_modules(model_path)))
    library = declare_torchvision_operators()
    import sglang.srt.entrypoints.engine as engine
    import sglang.srt.entrypoints.http_server as http_server

    def no_detokenizer(cls: Any, /, **_: Any) -> tuple[list[Any], list[str]]:
        return [], []  # without a tokenizer the scheduler answers the HTTP process directly

    def nothing_to_freeze(server_args: object) -> None:
        """SGLang would post to a server that does not listen yet, and log that it failed; see _Forked.start."""

    http_server._freeze_gc_after_server_warmup = nothing_to_freeze
    engine.mp = _ForkingMultiprocessing
    engine.Engine._launch_detokenizer_subprocesses = classmethod(no_detokenizer)
    cpu_attention.install()
    return library


def main(arguments: list[str]) -> None:
    parent, device, server = int(arguments[0]), arguments[1], arguments[2:]
    die_with(parent)
    keep = prepare_cpu(server[server.index("--model-path") + 1]) if device == "cpu" else None
    import sglang.srt.entrypoints.http_server as http_server
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    live_calls.install(http_server)
    kept.install(http_server)
    try:
        run_server(prepare_server_args(server))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    del keep


if __name__ == "__main__":
    main(sys.argv[1:])
