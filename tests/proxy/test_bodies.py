"""A body that is read from what is known of earlier ones is read as if nothing were known."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.proxy_fuzz import SEEDS, damaged, mutated
from services.proxy import bodies as bodies_module
from services.proxy.bodies import Bodies, decode_json
from services.proxy.dialects import anthropic, openai_chat, openai_responses
from services.proxy.dialects.base import ApiError, Conversation

PATHS = {"/v1/chat/completions": openai_chat, "/v1/messages": anthropic, "/v1/responses": openai_responses}
TEXTS = ("", "x", 'quote " and \\ ]}[{,', "é ü 😀", "line\r\nline\ttab", '"messages": [', "\x00", "]," * 9)


def outcome(work: Any) -> Any:
    try:
        request = work()
    except ApiError as error:
        return (error.status, error.kind, error.message)
    return request


def whole(dialect: Any, data: bytes) -> Any:
    return outcome(lambda: dialect.parse(decode_json(data), {}, Conversation()))


def written(rng: random.Random, value: Any) -> str:
    """JSON with blanks, escapes, key order and doubled keys as they come."""
    blank = rng.choice(("", "", "", " ", "\n\t"))
    if isinstance(value, dict):
        pairs = list(value.items())
        if rng.random() < 0.2:
            rng.shuffle(pairs)
        if pairs and rng.random() < 0.05:
            pairs.insert(rng.randrange(len(pairs) + 1), rng.choice(pairs))
        inner = [f"{blank}{written(rng, k)}{blank}:{blank}{written(rng, v)}" for k, v in pairs]
        return "{" + f"{blank},".join(inner) + blank + "}"
    if isinstance(value, list):
        seed = rng.randrange(2**30)  # the same for each entry: what comes before it has no part in its form
        return "[" + blank + f"{blank},{blank}".join(written(random.Random(seed), v) for v in value) + blank + "]"
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def entry(rng: random.Random, path: str) -> Any:
    text = "\ud800 alone" if rng.random() < 0.01 else rng.choice(TEXTS) * rng.choice((1, 1, 400))
    name = rng.choice("ab")
    block = {"type": "text", "text": text, **({"cache_control": {"type": "ephemeral"}} if rng.random() < 0.5 else {})}
    use = {"type": "tool_use", "id": name, "name": "bash", "input": {"a": 1}}
    call = {"id": name, "type": "function", "function": {"name": "bash", "arguments": text}}
    kinds: dict[str, list[Any]] = {
        "/v1/responses": [
            {"type": "message", "role": "user", "content": text},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
            {"type": "function_call", "call_id": name, "name": "bash", "arguments": text},
            {"type": "function_call_output", "call_id": name, "output": text},
        ],
        "/v1/chat/completions": [
            {"role": "user", "content": text},
            {"role": "user", "content": [block]},
            {"role": "assistant", "content": text, "tool_calls": [call, {**call, "id": "b"}]},
            {"role": "tool", "tool_call_id": name, "content": text},
        ],
        "/v1/messages": [
            {"role": "user", "content": text},
            {"role": "user", "content": [block]},
            {"role": "assistant", "content": [block, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": text}, block]},
        ],
    }
    return rng.choice(kinds[path])


def next_list(rng: random.Random, path: str, entries: list[Any]) -> list[Any]:
    """What a harness may send after `entries`: more, less, other ones."""
    what = rng.random()
    if what < 0.1 and entries:
        entries = entries[: rng.randrange(len(entries))]
    elif what < 0.15 and entries:
        at = rng.randrange(len(entries))
        entries = [*entries[:at], mutated(rng, entries[at]), *entries[at + 1 :]]
    return [*entries, *(entry(rng, path) for _ in range(rng.choice((0, 1, 2, 2, 3))))]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(PATHS)), st.integers(0, 2**40))
def test_what_is_known_changes_nothing_of_what_is_read(path, seed):
    rng, dialect, bodies = random.Random(seed), PATHS[path], Bodies()
    entries: list[Any] = [{"role": "user", "content": "begin"}]
    style = rng.randrange(2**30)
    fields = {k: v for k, v in dict(SEEDS)[path].items() if k != dialect.list_key}
    for _ in range(8):
        entries = next_list(rng, path, entries)
        if rng.random() < 0.05:
            style = rng.randrange(2**30)
        changed = mutated(rng, fields) if rng.random() < 0.05 else fields
        before = {k: v for k, v in changed.items() if rng.random() < 0.5} if isinstance(changed, dict) else {}
        after = {k: v for k, v in changed.items() if k not in before} if isinstance(changed, dict) else {}
        text = written(random.Random(style), before | {dialect.list_key: entries} | after)
        if rng.random() < 0.05:
            text = text[:-1] + f', "{dialect.list_key}": {written(rng, [entry(rng, path)])}}}'
        if rng.random() < 0.05:
            text = f'{{"metadata": {{"{dialect.list_key}": [{{"role": "user", "content": "x"}}]}}, {text[1:]}'
        data = text.encode("utf-8", "surrogatepass")
        if rng.random() < 0.05:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) * rng.randrange(2) + data[at + rng.randrange(2) :]
        assert outcome(lambda d=data: bodies.read("e", dialect, d, {})) == whole(dialect, data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=6))
def test_malformed_bodies_one_after_the_other(seeds):
    bodies = Bodies()
    for seed in seeds:
        path, data = damaged(random.Random(seed))
        assert outcome(lambda p=path, d=data: bodies.read("e", PATHS[p], d, {})) == whole(PATHS[path], data)


def conversation(turns: int) -> list[Any]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"text {i} " * 50} for i in range(2 * turns + 1)]


@pytest.mark.parametrize("moved", [False, True])
def test_only_new_entries_are_parsed(monkeypatch, moved):
    parsed: list[int] = []
    monkeypatch.setattr(bodies_module.orjson, "loads", lambda d: parsed.append(len(d)) or json.loads(d))
    bodies = Bodies()
    for turns in range(1, 60):
        messages = [dict(m) for m in conversation(turns)]
        if moved:  # a cache mark on the last message only
            text = messages[-1]["content"]
            messages[-1]["content"] = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        data = json.dumps({"model": "m", "max_tokens": 9, "messages": messages, "stream": True}).encode()
        request = bodies.read("e", anthropic, data, {})
        assert len(request.messages) == 2 * turns + 1
    assert max(parsed[1:]) < 4_000 < len(data)


def test_other_lines_of_work_do_not_push_a_line_out_and_memory_is_bounded():
    bodies = Bodies(room=200_000)
    for turns in range(1, 40):
        for line in ("main", "sub"):
            messages = [{"role": "user", "content": line}, *conversation(turns)]
            data = json.dumps({"messages": messages}).encode()
            bodies.read(f"e{turns % 3}", openai_chat, data, {})
    assert bodies.kept <= 200_000
    for execution in ("e0", "e1", "e2"):
        bodies.forget(execution)
    assert bodies.kept == 0
