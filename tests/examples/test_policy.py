"""The example policy's tokenizer, weights and warm-start data."""

import json
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples.harness.scout import scout
from examples.minirepo import transcripts
from examples.minirepo.expert import CLEAN, MARKER, Noise
from examples.minirepo.family import KINDS, make_task
from examples.minirepo.tokenizer import MARKUP, SPECIALS

FOLDER = Path(__file__).parents[2] / "examples/minirepo"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER / "model")
RENDERER = transcripts.make_renderer(TOKENIZER)


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.binary())
def test_any_bytes_that_reach_a_prompt_survive(data):
    text = data.decode("utf-8", "replace")
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_characters_from_all_of_unicode_have_tokens():
    for code in [*range(256), *range(0x100, 0xD800, 251), *range(0xE000, 0x110000, 2531)]:
        ids = TOKENIZER.encode(chr(code), add_special_tokens=False)
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == chr(code)


def test_qwen3_markup_is_single_tokens():
    for text in SPECIALS + MARKUP:
        assert len(TOKENIZER.encode(text, add_special_tokens=False)) == 1
    assert TOKENIZER.eos_token == "<|im_end|>"


def test_chat_template_writes_what_the_renderer_writes():
    tools = [tool["function"] for tool in (scout.BASH, scout.WRITE_FILE, scout.DELEGATE)]
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "true"}}}
    messages = [
        {"role": "system", "content": scout.SYSTEM},
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": "I try.", "tool_calls": [call | {"id": "1"}, call | {"id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": "3"}]},
        {"role": "tool", "tool_call_id": "3", "content": "three"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "more"},
    ]
    for some, end in ((messages, True), (messages[:-1], False), (messages[1:2], True)):
        for offered in (tools, None):
            ids = RENDERER.render(some, tools=offered, add_generation_prompt=end).token_ids
            text = TOKENIZER.apply_chat_template(some, tools=offered, add_generation_prompt=end, tokenize=False)
            assert text == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_weights_are_small_and_plain_transformers_generates_with_them():
    assert (FOLDER / "model/model.safetensors").stat().st_size <= 15 * 2**20
    config = json.loads((FOLDER / "model/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    program = (
        "import sys; sys.modules['torchvision'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "t, m = (c.from_pretrained(sys.argv[1]) for c in (AutoTokenizer, AutoModelForCausalLM))\n"
        "assert 1e6 <= m.num_parameters() <= 4e6, m.num_parameters()\n"
        "assert m.config.vocab_size >= len(t)\n"
        "x = t.apply_chat_template([{'role': 'user', 'content': 'hi'}], add_generation_prompt=True,"
        " return_tensors='pt', return_dict=True)\n"
        "print(m.generate(**x, max_new_tokens=4, do_sample=False).shape)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(FOLDER / "model")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def passed(task, files) -> float:
    """The fraction of the hidden tests that the expert's files pass."""
    modules = {path: {} for path in files if path.endswith(".py")}
    for path, names in modules.items():
        exec(files[path], names)
    hits = []
    for check in task.checks:
        function = modules.get(check.module + ".py", {}).get(check.function)
        hits.append(function is not None and function(*check.arguments) == check.expected)
    return sum(hits) / len(hits)


@pytest.mark.parametrize("shell", [False, True], ids=["scout", "mini-swe-agent"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_without_noise_solves_every_kind(kind, shell):
    for seed in range(5):
        task = make_task("train", seed, kind)
        contexts, files = transcripts.play(task, random.Random(seed), CLEAN, TOKENIZER, RENDERER, shell)
        assert passed(task, files) == 1.0
        assert len(contexts) == (1 if shell or kind in ("plain", "value") else 2)


def test_the_noisy_expert_is_unsure_but_not_lost():
    rng, noise = random.Random(0), Noise()
    rewards = []
    for seed in range(300):
        task = make_task("train", seed)
        rewards.append(passed(task, transcripts.play(task, rng, noise, TOKENIZER, RENDERER)[1]))
    assert 0.2 < sum(rewards) / len(rewards) < 0.5


def test_transcripts_hold_the_rendered_conversation_and_mark_what_the_policy_says():
    for seed in range(40):
        contexts, _ = transcripts.play(make_task("train", seed), random.Random(seed), Noise(), TOKENIZER, RENDERER)
        for context in contexts:
            assert len(context.ids) == len(context.mask)
            text = TOKENIZER.decode(context.ids, skip_special_tokens=False)
            said = TOKENIZER.decode([i for i, m in zip(context.ids, context.mask, strict=True) if m])
            assert text.startswith("<|im_start|>system\n" + scout.SYSTEM)
            assert said.count("<|im_end|>") == text.count("<|im_start|>assistant")
            assert context.ids[-1] == TOKENIZER.eos_token_id


def test_transcripts_are_what_the_real_tools_would_have_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"config.txt": "LIMIT = 7\n"}
    (tmp_path / "config.txt").write_text(files["config.txt"])
    fake = transcripts.dict_workspace(files)
    calls = [
        ("bash", {"command": "cat config.txt"}),
        ("bash", {"command": "cat missing.txt"}),
        ("write_file", {"path": "a.py", "content": "x = 1\n"}),
        ("bash", {"command": "cat a.py"}),
        ("bash", {"command": "cat > b.py <<'EOF'\ny = 2\nEOF"}),
        ("bash", {"command": "cat b.py"}),
    ]
    real_settings = Namespace(command_timeout=10)
    for name, arguments in calls:
        real = scout.TOOL_BODIES[name](real_settings, arguments)
        assert fake[name](None, arguments) == real


def test_mini_swe_agent_configuration_says_what_the_transcripts_say():
    config = yaml.safe_load((FOLDER / "mini-swe-agent.yaml").read_text())
    assert config["agent"]["system_template"] == transcripts.MINI_SYSTEM
    assert config["agent"]["instance_template"].replace("{{task}}", "{task}") == transcripts.MINI_INSTANCE
    assert config["agent"]["step_limit"] == transcripts.MINI_STEPS
    assert config["model"]["format_error_template"] == transcripts.MINI_FORMAT_ERROR
    assert MARKER in transcripts.MINI_INSTANCE
