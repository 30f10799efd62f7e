"""The real example harness, unmodified, as a process of its own, through the proxy on a scripted engine."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from shared.events import Sampling
from tests.proxy.support import Turn, call_text

SCOUT = Path(__file__).parents[2] / "examples" / "harness" / "scout" / "scout.py"


def policy(body, tokenizer):
    """What the policy says, by what stands in the last turn of the prompt."""
    prompt = tokenizer.decode(body["input_ids"])
    turns = prompt.split("<|im_start|>user\n")
    last = turns[-1]
    sub = "Your part" in turns[1] and "delegate" not in turns[0]
    if "Summarize the work so far." in last:
        return Turn("it is half done<|im_end|>")
    if sub:
        if "<tool_response>" in last:
            return Turn("the part is done<|im_end|>")
        return Turn(call_text("bash", json.dumps({"command": "echo part > part.txt"})))
    if "the part is done" in prompt or "Summary of the work" in prompt:
        return Turn("all is done<|im_end|>")
    if "wrote a.txt" in last:
        return Turn(call_text("delegate", json.dumps({"task": "Your part"})))
    if "invalid tool call" in last:
        return Turn(call_text("write_file", json.dumps({"path": "a.txt", "content": "é\n"}), "now right"))
    return Turn(call_text("write_file", '{"path": "a.txt", "content": '))


@pytest.mark.parametrize("options", [(), ("--stream",), ("--context-limit", "600")])
async def test_scout_runs_through_the_proxy(world, tokenizer, tmp_path, options):
    run, engine = world
    engine.choose = lambda body: policy(body, tokenizer)
    await run.execution("g000009x00", key="scout", sampling=Sampling(max_new_tokens=200))
    folder = tmp_path / "workspace"
    folder.mkdir()
    environment = os.environ | {"OPENAI_BASE_URL": run.ready.url + "/v1", "OPENAI_API_KEY": "scout"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCOUT),
        "write the file",
        "--model",
        "m",
        *options,
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out.decode().strip()) == (0, "all is done"), err.decode()
    tree = await run.tree()
    # every prompt that the engine got is the prompt of exactly one node, in the same order
    assert [r["input_ids"] for r in engine.requests] == [tree.prompt_ids(c).tolist() for c in tree.nodes]
    classes = [n.call_class for n in tree.nodes.values()]
    assert not any(n.diverged or n.discarded for n in tree.nodes.values())
    if options[:1] == ("--context-limit",):
        assert classes == ["main_task", "main_summary", "main_task"]
    else:
        assert classes == ["main_task"] * 3 + ["sub_task"] * 2 + ["main_task"]
        assert sorted(len(tree.path(c)) for c in tree.leaves()) == [2, 4]
        assert (folder / "part.txt").exists()
        assert (folder / "a.txt").read_text() == "é\n"
