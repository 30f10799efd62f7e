"""The built-in profiles on requests shaped like those of their harnesses: which tools, headers and openings they have.

The texts are our own; tests/harnesses runs the harnesses themselves.
"""

import pytest

from services.proxy.dialects.base import Message, Request, Tool
from services.proxy.profiles import BUILT_IN, ProfileError, Surroundings, classify, for_harness, load_profile

FIRST, OTHER = Surroundings("", True), Surroundings("", False)


def after(call_class, first=False):
    return Surroundings(call_class, first)


def request(*users, system="You help with code.", tools=("shell",), **headers):
    messages = [Message("system", system)]
    for text in users:
        messages += [Message("user", text), Message("assistant", "done")]
    return Request(
        dialect="chat",
        model="m",
        messages=tuple(messages[:-1]),
        tools=tuple(Tool(name, "", {}) for name in tools),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


QWEN_MAIN, QWEN_SUB = ("shell", "agent", "list_agents"), ("shell", "agent")
SNAPSHOT = "Write a <state_snapshot> of what was done."
COMPACTION = '{"turn": 3, "request_kind": "compaction"}'
SUMMARY = "Your task is to create a detailed summary of the conversation so far."
CONTINUED = "This session is being continued from a previous conversation."

CASES = [
    ("claude-code", request("fix it"), FIRST, "main_task"),
    ("claude-code", request("fix it", "now"), after("main_task"), "main_task"),
    ("claude-code", request("a part", x_claude_code_agent_id="7"), OTHER, "sub_task"),
    ("claude-code", request("a part", "go on", x_claude_code_agent_id="7"), after("sub_task"), "sub_task"),
    ("claude-code", request("a part", SUMMARY, x_claude_code_agent_id="7"), after("sub_task"), "sub_summary"),
    ("claude-code", request("fix it", SUMMARY), after("main_task"), "main_summary"),
    ("claude-code", request("fix it", SUMMARY, tools=()), OTHER, "main_summary"),
    ("claude-code", request(CONTINUED), OTHER, "main_task"),
    ("claude-code", request("a title for: fix it", tools=()), OTHER, "auxiliary"),
    ("codex", request("fix it", x_codex_turn_metadata="{}"), FIRST, "main_task"),
    ("codex", request("fix it", x_codex_turn_metadata=COMPACTION), after("main_task"), "main_summary"),
    ("codex", request("a part", x_openai_subagent="collab_spawn", x_codex_turn_metadata="{}"), OTHER, "sub_task"),
    (
        "codex",
        request("a part", x_openai_subagent="collab_spawn", x_codex_turn_metadata=COMPACTION),
        after("sub_task"),
        "sub_summary",
    ),
    ("opencode", request("fix it"), FIRST, "main_task"),
    ("opencode", request("a part", x_parent_session_id="ses_1"), OTHER, "sub_task"),
    ("opencode", request("fix it", system="You are a title generator.", tools=()), FIRST, "auxiliary"),
    ("opencode", request("fix it", "Create a new anchored summary"), after("main_task"), "main_summary"),
    ("qwen-code", request("fix it", tools=QWEN_MAIN), FIRST, "main_task"),
    ("qwen-code", request("fix it", "now", tools=QWEN_MAIN), after("main_task"), "main_task"),
    ("qwen-code", request("a part", tools=QWEN_SUB), OTHER, "sub_task"),  # it may start agents itself
    ("qwen-code", request("a part", "go on", tools=QWEN_SUB), after("sub_task"), "sub_task"),
    ("qwen-code", request("fix it", system=SNAPSHOT, tools=()), OTHER, "main_summary"),
    ("qwen-code", request("<state_snapshot>done</state_snapshot>", "go on", tools=QWEN_MAIN), OTHER, "main_task"),
    ("qwen-code", request("who should speak next?", tools=()), OTHER, "auxiliary"),
    ("scout", request("fix it", tools=("bash", "delegate")), FIRST, "main_task"),
    ("scout", request("a part", tools=("bash",)), OTHER, "sub_task"),
    ("scout", request("a part", "go on", tools=("bash",)), after("sub_task"), "sub_task"),
    ("scout", request("fix it", "Summarize the work so far."), after("main_task", first=True), "main_summary"),
    ("mini-swe-agent", request("fix it"), FIRST, "main_task"),
    ("mini-swe-agent", request("something else"), OTHER, "main_task"),
    ("never-described", request("fix it"), FIRST, "main_task"),
]


@pytest.mark.parametrize(("harness", "asked", "around", "expected"), CASES)
def test_calls_are_classed_as_their_harness_means_them(harness, asked, around, expected):
    verdict = classify(for_harness(harness), asked, around)
    assert (verdict.call_class, verdict.known) == (expected, True)


@pytest.mark.parametrize(
    ("harness", "asked"),
    [
        ("claude-code", request("what is this?")),
        ("codex", request("what is this?")),
        ("opencode", request("what is this?")),
        ("qwen-code", request("what is this?", tools=QWEN_MAIN)),
        ("never-described", request("what is this?")),
    ],
)
def test_what_no_rule_knows_is_not_guessed(harness, asked):
    assert classify(for_harness(harness), asked, OTHER) == ("auxiliary", False)


@pytest.mark.parametrize("path", sorted(BUILT_IN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_built_in_profile_is_named_as_its_file(path):
    assert load_profile(path).name == path.stem


def test_a_users_profile_comes_before_the_built_in_one(tmp_path):
    (tmp_path / "codex.yaml").write_text("name: codex\nmain: [{}]\n")
    verdict = classify(for_harness("codex", [tmp_path]), request("a part", x_openai_subagent="x"), OTHER)
    assert verdict == ("main_task", True)


@pytest.mark.parametrize("text", ["name: x\nmian: [{}]\n", "name: x\nmain: [{system: '('}]\n", "name: [\n"])
def test_a_profile_that_cannot_be_used_is_named(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=str(path)):
        load_profile(path)
