"""Property tests of context matching: whatever a harness does to the form of a conversation, it continues the same
call; whatever it does to the meaning makes a branch; and no token is lost, doubled or invented."""

import json
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy import canonical, replies
from services.proxy.context import Contexts
from services.proxy.dialects import anthropic, openai_chat
from services.proxy.dialects.base import Message, ToolCall
from services.proxy.rendering import Parsed
from shared.codec import pack_floats, pack_ids
from shared.events import ModelCallRecorded, Sampling

EXECUTION = "g000001x00"
TOOL = {"name": "bash", "description": "d", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}
words = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12).map(lambda s: "x" + s.strip())
scalars = st.one_of(
    words, st.integers(-(2**40), 2**40), st.booleans(), st.none(), st.sampled_from([1.5, 60000.0, -0.0])
)
arguments = st.dictionaries(words, st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=3)
turns = st.lists(st.tuples(words, st.lists(arguments, max_size=3), words), min_size=1, max_size=5)


def record(number, parent, request, message, call_class="main_task"):
    call = f"{EXECUTION}a1c{number:04d}"
    context = canonical.step(bytes.fromhex(request), canonical.message(message)).hex()
    return ModelCallRecorded(
        call=call,
        execution=EXECUTION,
        attempt=1,
        cell=0,
        parent=parent,
        keep=-1,
        call_class=call_class,
        input_ids=pack_ids([number]),
        output_ids=pack_ids([1000 + number]),
        output_logprobs=pack_floats([-1.0]),
        versions=(),
        finish_reason="stop",
        sampling=Sampling(),
        context=context,
        request=request,
    )


class Dialogue:
    """An execution played turn by turn: what the policy said is kept as text, as the proxy would parse it."""

    def __init__(self, dialect):
        self.dialect, self.contexts, self.said = dialect, Contexts(EXECUTION), {}

    def payloads(self, call):
        return replies.payloads(self.said[call])

    def match(self, body):
        request = self.dialect.parse(body, {})
        return self.contexts.match(request.messages, request.tools, self.payloads)

    def answer(self, match, text, calls):
        """The policy's turn on a matched request; returns the neutral message as delivered."""
        number = self.contexts.latest_number + 1
        call = f"{EXECUTION}a1c{number:04d}"
        self.said[call] = Parsed(text, "", tuple(("bash", json.dumps(c)) for c in calls))
        message = replies.assistant(self.said[call], call, self.dialect.name)
        self.contexts.add(record(number, match.call, match.request, message))
        return call, message


def openai_wire(history):
    messages = [{"role": "system", "content": "sys"}]
    for user, message, results in history:
        messages.append({"role": "user", "content": user})
        if message is not None:
            calls = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
            messages.append({"role": "assistant", "content": message.text, **({"tool_calls": calls} if calls else {})})
            messages += [{"role": "tool", "tool_call_id": c.id, "content": results} for c in message.tool_calls]
    return {"model": "m", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}


def anthropic_wire(history):
    messages, pending = [], []
    for user, message, results in history:
        messages.append({"role": "user", "content": [*pending, {"type": "text", "text": user}]})
        pending = []
        if message is not None:
            blocks = [{"type": "text", "text": message.text}] if message.text else []
            blocks += [
                {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
                for c in message.tool_calls
            ]
            messages.append({"role": "assistant", "content": blocks})
            pending = [{"type": "tool_result", "tool_use_id": c.id, "content": results} for c in message.tool_calls]
    tools = [{"name": TOOL["name"], "description": "d", "input_schema": TOOL["parameters"]}]
    return {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, "system": "sys"}


def shuffled(draw, value):
    """The same JSON value with keys in another order."""
    if isinstance(value, dict):
        return {k: shuffled(draw, value[k]) for k in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return [shuffled(draw, v) for v in value]
    return value


def reformat_arguments(draw, text):
    value = shuffled(draw, json.loads(text))
    if draw(st.booleans()):
        value = floats(value)
    if draw(st.booleans()):
        value = json.loads(unicodedata.normalize("NFD", json.dumps(value, ensure_ascii=False)))
    indent = draw(st.sampled_from([None, 2]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent)


def floats(value):
    """Integers written as floats."""
    if isinstance(value, dict):
        return {k: floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [floats(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def reformat_openai(draw, body):
    """Everything that harnesses were seen to change without changing the meaning."""
    body = shuffled(draw, body)
    for message in body["messages"]:
        content = message["content"]
        if draw(st.booleans()):
            content = draw(st.sampled_from(["", " ", "\n"])) + content + draw(st.sampled_from(["", "\n"]))
        if draw(st.booleans()):
            content = unicodedata.normalize("NFD", content)
        if draw(st.booleans()):
            block = {"type": "text", "text": content}
            content = [block | ({"cache_control": {"type": "ephemeral"}} if draw(st.booleans()) else {})]
        message["content"] = content or (None if message["role"] == "assistant" else "")
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = reformat_arguments(draw, call["function"]["arguments"])
    return json.loads(json.dumps(body, ensure_ascii=draw(st.booleans())))


@settings(max_examples=150, deadline=None)
@given(st.data(), turns)
def test_reformatted_openai_conversations_continue(data, script):
    dialogue, history, last = Dialogue(openai_chat), [], ""
    for user, calls, said in script:
        body = reformat_openai(data.draw, openai_wire([*history, (user, None, "")]))
        match = dialogue.match(body)
        assert (match.call, match.diverged) == (last, False)
        last, message = dialogue.answer(match, said, calls)
        history.append((user, message, "result of " + user))
    tree = dialogue.contexts.tree
    assert len(tree.leaves()) == 1
    assert tree.ids(last).tolist() == [t for n in range(1, len(script) + 1) for t in (n, 1000 + n)]


@settings(max_examples=150, deadline=None)
@given(st.data(), turns)
def test_reformatted_anthropic_conversations_continue(data, script):
    dialogue, history, last = Dialogue(anthropic), [], ""
    for user, calls, said in script:
        body = anthropic_wire([*history, (user, None, "")])
        for message in body["messages"]:
            for block in message["content"]:
                if data.draw(st.booleans()):
                    block["cache_control"] = {"type": "ephemeral"}
            if len(message["content"]) == 1 and message["content"][0]["type"] == "text" and data.draw(st.booleans()):
                message["content"] = message["content"][0]["text"]
        match = dialogue.match(json.loads(json.dumps(shuffled(data.draw, body))))
        assert (match.call, match.diverged) == (last, False)
        last, message = dialogue.answer(match, said, calls)
        history.append((user, message, "result of " + user))


@settings(max_examples=150, deadline=None)
@given(turns, st.data())
def test_a_change_of_meaning_makes_a_branch_at_its_place(script, data):
    dialogue, history, calls_made = Dialogue(openai_chat), [], []
    for user, calls, said in script:
        match = dialogue.match(openai_wire([*history, (user, None, "")]))
        call, message = dialogue.answer(match, said, calls)
        calls_made.append(call)
        history.append((user, message, "result of " + user))
    at = data.draw(st.integers(0, len(history) - 1))
    user, message, results = history[at]
    what = data.draw(st.sampled_from(["user", "text"]))
    if what == "user":
        history[at] = (user + " changed", message, results)
    else:
        history[at] = (user, Message("assistant", message.text + " changed"), results)
    match = dialogue.match(openai_wire([*history, ("next", None, "")]))
    assert match.call == (calls_made[at - 1] if at else "")
    assert match.diverged == (what == "text")


@settings(max_examples=200, deadline=None)
@given(arguments, arguments)
def test_canonical_arguments_are_equal_exactly_when_the_values_are(a, b):
    same = canonical.value(a) == canonical.value(b)
    assert (canonical.arguments(json.dumps(a)) == canonical.arguments(json.dumps(b))) == same
    assert canonical.arguments(json.dumps(a, indent=1)) == canonical.arguments(json.dumps(a, ensure_ascii=False))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_arguments_have_a_canonical_form(text):
    assert isinstance(canonical.tool_call(ToolCall("", "bash", text)), str)


def test_kept_turns_after_compaction_are_context_of_a_new_branch():
    dialogue = Dialogue(openai_chat)
    first = openai_wire([("do it", None, "")])
    _, message = dialogue.answer(dialogue.match(first), "said", [{"command": "ls"}])
    kept = openai_wire([("summary of it all", message, "ok"), ("go on", None, "")])
    match = dialogue.match(kept)
    assert match.call == ""
    assert len(match.new) == 5
