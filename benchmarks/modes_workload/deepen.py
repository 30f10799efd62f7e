"""The example's policy, made deeper by layers that change nothing at first: same behaviour, more arithmetic.

With the 4-layer model, training a batch costs less than a tenth of what rolling it out does, and every schedule looks
alike. In the paper's runs the two are of one size; `deepen` brings this workload there. A new layer is a copy of an old
one whose two output projections are zero, so it adds nothing to the residual stream until it is trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def deepen(source: Path, target: Path, times: int) -> Path:
    """`source` (a Hugging Face folder of a Qwen3-like model) with `times` as many layers, in `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers * times
    config["layer_types"] = ["full_attention"] * (layers * times)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".layers." not in name:
            weights[name] = tensor
            continue
        head, _, rest = name.partition(".layers.")
        number, _, part = rest.partition(".")
        for copy in range(times):
            silent = copy and part in ZERO
            new = torch.zeros_like(tensor) if silent else tensor.clone()
            weights[f"{head}.layers.{int(number) * times + copy}.{part}"] = new
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
