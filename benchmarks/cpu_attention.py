"""SGLang's torch_native attention loops against ours for one layer, in CPU time.

`python benchmarks/cpu_attention.py [--json]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from services.cell_agent.engine import cpu_attention, launch

REPEATS = 50


def milliseconds(work: Callable[[], object]) -> float:
    work()
    started = time.process_time()
    for _ in range(REPEATS):
        work()
    return (time.process_time() - started) / REPEATS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path[:0] = [str(launch.CPU_SHIMS), str(launch.ENGINE_ONLY)]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    library = launch.declare_torchvision_operators()
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Theirs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, heads, shared, size, slots = 24, 6, 2, 32, 65536
    keys, values = torch.randn(slots, shared, size), torch.randn(slots, shared, size)
    lengths = torch.randint(200, 450, (batch,))
    table = torch.randint(0, slots, (batch, 4096), dtype=torch.int32)
    requests = torch.arange(batch)
    one = torch.randn(batch, heads, size)
    new = torch.full((8,), 40)
    many = torch.randn(8 * 40, heads, size)
    prefixes = lengths[:8] - 40
    rest = {"scaling": size**-0.5, "enable_gqa": True}
    common = (keys, values, table)
    with torch.no_grad():
        out: dict[str, float] = {
            "decode_sglang_ms": milliseconds(
                lambda: Theirs._run_sdpa_forward_decode(None, one, one.clone(), *common, requests, lengths, **rest)
            ),
            "decode_ms": milliseconds(
                lambda: cpu_attention.decode(one, one.clone(), *common, requests, lengths, size**-0.5)
            ),
            "extend_sglang_ms": milliseconds(
                lambda: Theirs._run_sdpa_forward_extend(
                    None, many, many.clone(), *common, requests[:8], lengths[:8], prefixes, new, causal=True, **rest
                )
            ),
            "extend_ms": milliseconds(
                lambda: cpu_attention.extend(
                    many, many.clone(), *common, requests[:8], lengths[:8], prefixes, new, size**-0.5, True
                )
            ),
        }
    del library
    out["decode_ratio"] = out["decode_sglang_ms"] / out["decode_ms"]
    out["extend_ratio"] = out["extend_sglang_ms"] / out["extend_ms"]
    print(json.dumps(out) if arguments.json else "\n".join(f"{k:18} {v:.2f}" for k, v in out.items()))


if __name__ == "__main__":
    main()
