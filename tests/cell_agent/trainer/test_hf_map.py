"""Hugging Face <-> Megatron: exact both ways, for every layout and family."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cell_agent.trainer.hf_map import (
    WeightsError,
    assemble,
    check_weights,
    hf_shapes,
    places,
    read_folder,
    to_local,
)
from services.cell_agent.trainer.model_spec import ModelSpec, ModelUnsupported, read_spec
from services.cell_agent.trainer.shards import local_shapes

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)]


def spec(share: int = 2, tied: bool = True, qk_norm: bool = True, bias: bool = False) -> ModelSpec:
    return ModelSpec(
        layers=4, hidden=12, ffn=16, heads=4 * share, kv_heads=4, head_dim=3, vocab=20, rope_theta=1e4, norm_eps=1e-6,
        tied=tied, qk_norm=qk_norm, qkv_bias=bias,
    )  # fmt: skip


def weights(model: ModelSpec) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in hf_shapes(model).items()}


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(LAYOUTS), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_round_trip_is_exact(layout: tuple[int, int], share: int, tied: bool, qk_norm: bool, bias: bool) -> None:
    model = spec(share, tied, qk_norm, bias)
    full = weights(model)
    shards = {place: to_local(model, place, full) for place in places(model.layers, *layout)}
    back = dict(assemble(model, shards))
    assert list(back) == list(hf_shapes(model))
    assert all(torch.equal(back[name], full[name]) for name in full)
    for place, shard in shards.items():
        assert {n: t.shape for n, t in shard.items()} == local_shapes(model, place)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(LAYOUTS[1:]))
def test_every_element_of_the_model_lies_on_some_rank(layout: tuple[int, int]) -> None:
    model = spec(tied=False)
    full = {name: torch.ones(shape) for name, shape in hf_shapes(model).items()}
    sharded = sum(
        float(t.sum())
        for place in places(model.layers, *layout)
        for name, t in to_local(model, place, full).items()
        if "norm" not in name
    )
    assert sharded == sum(float(t.sum()) for name, t in full.items() if "norm" not in name)


def test_query_groups_are_interleaved_as_megatron_wants() -> None:
    model = spec(share=2)
    full = weights(model)
    (place,) = places(model.layers, 1, 1)
    fused = to_local(model, place, full)["decoder.layers.0.self_attention.linear_qkv.weight"].view(4, 4, 3, 12)
    q = full["model.layers.0.self_attn.q_proj.weight"].view(4, 2, 3, 12)
    assert torch.equal(fused[:, :2], q)
    assert torch.equal(fused[2, 3], full["model.layers.0.self_attn.v_proj.weight"].view(4, 3, 12)[2])


def test_wrong_weights_are_named() -> None:
    model = spec()
    full = weights(model)
    del full["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        check_weights(model, full, "here")
    full["model.norm.weight"] = torch.ones(3)
    with pytest.raises(WeightsError, match="shape"):
        check_weights(model, full, "here")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        read_spec(tmp_path)
    with pytest.raises(WeightsError, match="safetensors"):
        read_folder(spec(), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen3MoeForCausalLM"]},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"use_sliding_window": True},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    import json

    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8,
        "num_attention_heads": 2, "vocab_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).qk_norm
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelUnsupported):
        read_spec(tmp_path)


def test_layouts_that_do_not_divide_the_model_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="tensor_parallel=3"):
        spec().check_layout(3, 1)
    with pytest.raises(ModelUnsupported, match="pipeline_parallel=3"):
        spec().check_layout(1, 3)
