"""Messages to token ids and back, through the model family's renderer (package `renderers`).

Invariant: ids that were already given to or taken from the engine are never encoded again. `extend` returns only what
comes after them; it gives None when the renderer cannot continue (the caller then renders the whole conversation).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from services.proxy.dialects.base import Message, Tool, ToolCall
from services.proxy.tokenizer import FastTokenizer, StandIns, load_tokenizer

TAIL = 256
"""So many ids of the prompt are shown to a renderer that looks back only to the start of the last turn."""

ALL = 2**62

LOCAL = ("qwen3",)
"""Renderers whose bridge reads no more than the last turn of the prompt, and which pass on what they encode without
looking at it (tests/proxy/test_rendering.py)."""

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class Extension(NamedTuple):
    """ids(parent)[:keep] + ids is the next prompt."""

    keep: int
    ids: list[int]


class Parsed(NamedTuple):
    """What the policy generated, as text. `calls` have (name, raw arguments)."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


class RenderingUnavailable(RuntimeError):
    """No renderer for the model; the message says what to set."""


def load(model_path: str, renderer: str = "auto", *, thinking: bool = False) -> Rendering:
    """The renderer for a Hugging Face folder. `renderer` is a name known to the package, or auto: by architecture."""
    from renderers import create_renderer
    from renderers.configs import _config_class_for

    tokenizer = load_tokenizer(model_path)
    name = _by_architecture(model_path) if renderer == "auto" else renderer
    try:
        config_class = _config_class_for(name)
    except (KeyError, ValueError) as error:
        raise RenderingUnavailable(f"model.renderer {name!r} is unknown to the package renderers: {error}") from error
    fields = config_class.model_fields
    config = config_class(**({"enable_thinking": thinking} if "enable_thinking" in fields else {}))
    local = name in LOCAL
    if local and isinstance(tokenizer, FastTokenizer):
        tokenizer = StandIns(tokenizer)
    return Rendering(create_renderer(tokenizer, config), tokenizer, local=local, foreign=local and not thinking)


def _by_architecture(model_path: str) -> str:
    from pathlib import Path

    known = {
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3",
        "Glm4MoeForCausalLM": "glm-4.5",
        "GptOssForCausalLM": "gpt-oss",
        "DeepseekV3ForCausalLM": "deepseek-v3",
        "MiniMaxM2ForCausalLM": "minimax-m2",
        "LlamaForCausalLM": "llama-3",
    }
    names = orjson.loads((Path(model_path) / "config.json").read_bytes()).get("architectures") or ["?"]
    if names[0] not in known:
        raise RenderingUnavailable(f"no renderer is known for {names[0]}: set model.renderer in the run file")
    return known[names[0]]


class Rendering:
    """One model's way from messages to ids."""

    def __init__(self, renderer: Any, tokenizer: Any, *, local: bool, foreign: bool) -> None:
        """`foreign`: an assistant turn is rendered the same wherever it stands, so one may follow exact ids."""
        self._renderer, self._tokenizer, self._foreign = renderer, tokenizer, foreign
        self.lookback = TAIL if local else ALL
        """So many ids of a prompt `extend` and `parse` look at, from its end; more may be given."""
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self.marks_calls = local
        """Tool calls and reasoning begin with tokens of their own: plain text is known while it is generated."""
        self.special_ids = frozenset(self.stop_ids) | frozenset(getattr(tokenizer, "added_ids", ()))

    def fresh(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> list[int]:
        """The whole conversation, ready for the next assistant turn."""
        wire, wired_tools = wire_messages(messages), wire_tools(tools)
        with self._deferring() as filled:
            return filled(self._renderer.render(wire, tools=wired_tools, add_generation_prompt=True).token_ids)

    def extend(
        self,
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        before: int = 0,
    ) -> Extension | None:
        """What `messages` add after a call whose exact ids are `before` ids, prompt and output; None if it can't be
        told."""
        if not messages:
            return None
        if any(m.role == "assistant" for m in messages):
            start = before + len(prompt)
            return self._extend_foreign(start, output, messages) if self._foreign else None
        tail = prompt[-self.lookback :].tolist()
        known = tail + output.tolist()
        with self._deferring() as filled:
            bridged = self._renderer.bridge_to_next_turn(
                tail, output.tolist(), wire_messages(messages), tools=wire_tools(tools)
            )
            if bridged is None:
                return None
            ids = list(bridged.token_ids)
            shared = _common_prefix(known, ids)
            if shared < len(tail):
                return None
            return Extension(before + len(prompt) - len(tail) + shared, filled(ids[shared:]))

    def _extend_foreign(
        self, start: int, output: npt.NDArray[np.int32], messages: tuple[Message, ...]
    ) -> Extension | None:
        """Like `extend`, with assistant turns among the messages that the policy never generated in this form. They
        are rendered after a stand-in turn, whose ids are cut off again."""
        stand_in = (Message("user", "."), Message("assistant", "."))
        conversation = wire_messages(stand_in + messages)
        with self._deferring() as filled:
            rendered = self._renderer.render(conversation, tools=None, add_generation_prompt=True)
            ids, owners = list(rendered.token_ids), rendered.message_indices
            closing = [i for i, owner in enumerate(owners) if owner == 1 and ids[i] in self.stop_ids]
            if not closing:
                return None
            extension = filled(ids[closing[-1] + 1 :])
        if len(output) == 0 or int(output[-1]) not in self.stop_ids:
            extension = [ids[closing[-1]], *extension]
        return Extension(start + len(output), extension)

    def _deferring(self) -> contextlib.AbstractContextManager[Callable[[list[int]], list[int]]]:
        return self._tokenizer.deferring() if isinstance(self._tokenizer, StandIns) else contextlib.nullcontext(list)

    def parse(self, output: npt.NDArray[np.int32], prompt: npt.NDArray[np.int32], tools: tuple[Tool, ...]) -> Parsed:
        """Generated ids to text, reasoning and tool calls, malformed calls included."""
        tail = prompt[-self.lookback :].tolist()
        parsed = self._renderer.parse_response(output.tolist(), tools=wire_tools(tools), prompt_ids=tail)
        text, calls = parsed.content, []
        for call in parsed.tool_calls:
            found = _call(call)
            if found is None:
                text = f"{text}\n{call.raw}".strip()  # no call at all: the harness gets to see what was written
            else:
                calls.append(found)
        return Parsed(text, parsed.reasoning_content or "", tuple(calls))

    def text_of(self, ids: list[int]) -> str:
        """Ids of plain text, without any loss."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def tokens_before(self, output: npt.NDArray[np.int32], stop: str) -> int:
        """How many output tokens lie wholly before the first `stop` in the text that follows the reasoning."""
        ids = output.tolist()
        whole = self.text_of(ids)
        at = whole.find(stop, max(0, whole.rfind("</think>")))
        if at < 0:
            return len(ids)
        low, high = 0, len(ids)  # the largest k with len(text of k tokens) <= at
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self.text_of(ids[:middle])) <= at else (low, middle - 1)
        return low

    def decode(self, ids: npt.NDArray[np.int32]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _call(call: Any) -> tuple[str, str] | None:
    """(name, raw arguments) of one parsed attempt; None if not even a name can be made out."""
    start = _ARGUMENTS.search(call.raw)
    if call.name and str(call.status) in ("ok", "unknown_tool"):
        if isinstance(call.arguments, str):
            return str(call.name), call.arguments
        arguments = call.arguments if call.arguments is not None else {}
        return str(call.name), _as_written(call.raw, start.end() if start else -1, arguments)
    name = _NAME.search(call.raw)
    if name is None:
        return None
    arguments = call.raw[start.end() :].strip() if start else ""
    return name[1], call.raw if _is_object(arguments) else arguments


def _is_object(text: str) -> bool:
    """A broken call around whole arguments must not be repaired by taking it apart: it would seem well made."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _as_written(raw: str, start: int, arguments: Any) -> str:
    """The arguments' own text inside `raw`, if it begins at `start` and means the same; else written anew."""
    if start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(raw, start)
        except (ValueError, RecursionError):
            value, end = None, 0
        if end and value == arguments:
            return raw[start:end]
    return json.dumps(arguments)


def wire_messages(messages: tuple[Message, ...]) -> list[Any]:
    """Neutral messages as the package's plain dictionaries."""
    return [_wire(m) for m in messages]


def _wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [_wire_call(c) for c in message.tool_calls]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _wire_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = call.arguments
    if not isinstance(arguments, dict):
        arguments = call.arguments
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def wire_tools(tools: tuple[Tool, ...]) -> list[Any] | None:
    return [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools] or None


def _common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
