"""What the prompt of a call must be, worked out without the proxy: the whole conversation that the harness sent,
written down from scratch in the model's format, with the policy's own turns replaced by exactly what it generated.

Nothing here uses the proxy's matching, its renderer or its records' prompts; the format is written out below once
more. Where it differs from a plain rendering of the transcript, by design: a turn of the policy stands as it was
generated (reasoning included, which templates strip from earlier turns, and its own spelling of tool calls, whatever
the harness sends back); a turn that the harness wrote, and every turn of a line that begins anew, stands as sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.proxy import canonical
from services.proxy.dialects.base import Message, Request, ToolCall
from services.proxy.plans import Plans
from shared.codec import unpack_ids
from shared.events import ModelCallRecorded

START, END = "<|im_start|>", "<|im_end|>"
BEGINS = f"{START}assistant\n<think>\n\n</think>\n\n"  # thinking is off: the prompt closes it before the policy speaks
TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Turn(NamedTuple):
    """What the policy generated in a call, as far as it is continued."""

    call: str
    output: list[int]


def prompt(request: Request, generated: list[Turn], encode: Any, end: int) -> list[int]:
    """Ids of the prompt. `generated`: turns of the policy on the way to this call, in order.
    `encode`: text to ids; `end`: the id of END."""
    ids: list[int] = []
    text = _head(request)
    turns = list(generated)
    messages = request.messages[1:] if request.messages[0].role == "system" else request.messages
    for place, message in enumerate(messages):
        if message.role == "assistant" and turns and _is(message, turns[0], encode):
            text += BEGINS
            output = turns.pop(0).output
            ids += encode(text) + output + ([] if output and output[-1] == end else [end])
            text = "\n"
        elif message.role == "assistant":
            text += BEGINS + message.text.lstrip("\n") + _calls(message.tool_calls, message.text) + f"{END}\n"
        elif message.role == "tool":
            first = place == 0 or messages[place - 1].role != "tool"
            last = place + 1 == len(messages) or messages[place + 1].role != "tool"
            opens = f"{START}user" if first else ""
            text += f"{opens}\n<tool_response>\n{message.text}\n</tool_response>" + (f"{END}\n" if last else "")
        else:
            text += f"{START}{message.role}\n{message.text}{END}\n"
    assert not turns, f"{len(turns)} turns of the policy are not in the conversation that continues them"
    return ids + list(encode(text + BEGINS))


def _head(request: Request) -> str:
    system = request.messages[0].text if request.messages[0].role == "system" else None
    if not request.tools:
        return "" if system is None else f"{START}system\n{system}{END}\n"
    tools = ({"name": t.name, "description": t.description, "parameters": t.parameters} for t in request.tools)
    signatures = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    before = "" if system is None else f"{system}\n\n"
    return f"{START}system\n{before}{TOOLS.format(signatures=signatures)}{END}\n"


def _calls(calls: Iterable[ToolCall], text: str) -> str:
    written = ""
    for number, call in enumerate(calls):
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
        body = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else call.arguments
        written += "\n" if number or text else ""
        written += f'<tool_call>\n{{"name": "{call.name}", "arguments": {body}}}\n</tool_call>'
    return written


def _is(message: Message, turn: Turn, encode: Any) -> bool:
    """Whether an assistant turn is that turn of the policy: it carries its tool-call ids, or without any its text."""
    ids = [canonical.OUR_TOOL_ID.match(call.id) for call in message.tool_calls]
    if any(ids):
        return canonical.call_tag(turn.call) in [found[1] for found in ids if found]
    said = encode.decode(turn.output).replace(END, "")
    return not message.tool_calls and "".join(said.split()) == "".join(message.text.split())


def lineage(records: dict[str, ModelCallRecorded], call: str) -> list[Turn]:
    """Turns on the way from the root to `call`, without that of `call`."""
    turns: list[Turn] = []
    lengths = {}
    for name, record in records.items():  # in recording order, so parents come first
        inherited = (lengths[record.parent] if record.keep < 0 else record.keep) if record.parent else 0
        lengths[name] = inherited + len(record.input_ids) // 4 + len(record.output_ids) // 4
    while records[call].parent:
        record, parent = records[call], records[records[call].parent]
        output = unpack_ids(parent.output_ids).tolist()
        if record.keep >= 0:
            output = output[: len(output) - (lengths[record.parent] - record.keep)]
        turns.insert(0, Turn(parent.call, output))
        call = record.parent
    return turns


@dataclass
class Encode:
    """Text to ids and back, with the model's own tokenizer."""

    tokenizer: Any

    def __call__(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def watch(asked: dict[str, Request]) -> Callable[..., Any]:
    """In place of Plans.make: notes which request each call answers."""
    original = Plans.make

    def make(self: Plans, execution: Any, request: Request, *rest: Any) -> Any:
        plan = original(self, execution, request, *rest)
        asked[plan.call] = request
        return plan

    return make


def check(
    records: list[ModelCallRecorded], asked: dict[str, Request], prompts: dict[str, list[int]], tokenizer: Any
) -> None:
    """Each prompt that the engine got (`prompts`, by call) is what its conversation gives from scratch."""
    encode, by_call = Encode(tokenizer), {r.call: r for r in records}
    end = int(tokenizer.convert_tokens_to_ids(END))
    for call in by_call:
        got, expected = prompts[call], prompt(asked[call], lineage(by_call, call), encode, end)
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(expected))
            around = slice(max(0, at - 30), at + 30)
            texts = f"got ...{encode.decode(got[around])!r}, from scratch ...{encode.decode(expected[around])!r}"
            raise AssertionError(f"{call} differs at {at}: {texts}")
