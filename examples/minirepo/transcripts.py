"""Expert transcripts as token ids, exactly as a policy will see and write them.

The real agent program's loop (scout's Agent) runs in this process; its model is the noisy expert, its workspace a dict.
Rendering follows what a token-exact proxy does: the first call of a context is rendered whole, each later one is the
last prompt, the last completion and the rendered new messages. Invariant: a transcript's ids are one context's prompt
and completions in order, and its mask is 1 exactly on the tokens that the policy is to produce (end of turn included).
"""

import json
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field

from renderers.base import ToolCallParseStatus
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

from examples.harness.scout import scout
from examples.minirepo.expert import MARKER, Expert, Noise
from examples.minirepo.family import Task

CONTEXT_LIMIT = 350  # tokens above which scout compacts, in the transcripts and in the example's run file
MAX_TURNS = 8

SCOUT_SETTINGS = scout.Settings(
    Namespace(
        model="policy", max_turns=MAX_TURNS, context_limit=CONTEXT_LIMIT, max_output_tokens=0, no_subagents=False,
        parallel=False, stream=False, max_retries=0, request_timeout=60.0, command_timeout=10.0, quiet=True,
    )
)  # fmt: skip


# The conversation that mini-swe-agent has under `mini-swe-agent.yaml`; a test compares both.
MINI_SYSTEM = "You are a coding agent. Work in the current folder with the tool."
MINI_INSTANCE = "{task}\nAt the end run: echo " + MARKER
MINI_FORMAT_ERROR = "error: invalid tool call. Use bash."
MINI_STEPS, MINI_FORMAT_ERRORS = 8, 3
MINI_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}


@dataclass
class Context:
    """One growing context: what it has been told and has said, and the ids of both."""

    messages: list[dict]
    prompt: list[int]
    completion: list[int]
    mask: list[int]
    extra: list[float] = field(default_factory=list)  # per id; what `generate` returned beside the ids, 0 elsewhere

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion


def make_renderer(tokenizer) -> Qwen3Renderer:
    """The renderer for this policy: Qwen3 without thinking."""
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))


class Dialogue:
    """The model side of one execution. `generate(prompt, messages, tools)` gives completion ids, a float for each."""

    def __init__(self, renderer: Qwen3Renderer, generate: Callable):
        self.renderer, self.generate = renderer, generate
        self.contexts: list[Context] = []

    def model(self, messages: list[dict], tools: list[dict]) -> tuple[dict, int]:
        """A model call as scout makes it: (assistant message, total tokens)."""
        specs = [tool["function"] for tool in tools]
        known = [
            c for c in self.contexts if messages[: len(c.messages)] == c.messages and len(messages) > len(c.messages)
        ]
        context = max(known, key=lambda c: len(c.messages), default=None)
        if context:
            new = messages[len(context.messages) :]
            prompt = self.renderer.bridge_to_next_turn(context.prompt, context.completion, new, tools=specs).token_ids
        else:
            prompt = self.renderer.render(messages, tools=specs, add_generation_prompt=True).token_ids
            context = Context([], [], [], [])
            self.contexts.append(context)
        completion, extra = self.generate(prompt, messages, tools)
        context.mask += [0] * (len(prompt) - len(context.mask)) + [1] * len(completion)
        context.extra += [0.0] * (len(prompt) - len(context.extra)) + list(extra)
        context.prompt, context.completion = prompt, completion
        reply = self.parse(prompt, completion)
        context.messages = [*messages, reply]
        return reply, len(context.ids)

    def parse(self, prompt: list[int], completion: list[int]) -> dict:
        """Completion ids to an OpenAI assistant message; what is no proper call keeps its raw text as arguments."""
        parsed = self.renderer.parse_response(completion, prompt_ids=prompt)
        calls = []
        for i, call in enumerate(parsed.tool_calls):
            good = call.status == ToolCallParseStatus.OK
            arguments = json.dumps(call.arguments, ensure_ascii=False) if good else call.raw
            calls.append(
                {"id": f"call_{i}", "type": "function", "function": {"name": call.name or "", "arguments": arguments}}
            )
        return scout._assistant(parsed.content or None, calls)


def dict_workspace(files: dict[str, str]) -> dict[str, Callable]:
    """Scout's tools on a dict of files: what the expert's few commands give, in scout's words, without a process."""

    def bash(_settings, arguments):
        command = arguments["command"]
        if command.startswith("cat > "):
            head, _, content = command.removesuffix("EOF").partition(" <<'EOF'\n")
            files[head.removeprefix("cat > ")] = content
            return "(no output)"
        path = command.removeprefix("cat ")
        return files.get(path, f"cat: {path}: No such file or directory\n[exit 1]")

    def write_file(_settings, arguments):
        files[arguments["path"]] = arguments["content"]
        return f"wrote {arguments['path']}"

    return {"bash": bash, "write_file": write_file}


def mini_swe_agent(task: Task, model: Callable, bash: Callable) -> None:
    """mini-swe-agent's loop, as far as the model sees it: bash only, one user message for a call that isn't one."""
    messages = [
        {"role": "system", "content": MINI_SYSTEM},
        {"role": "user", "content": MINI_INSTANCE.format(task=task.instruction)},
    ]
    errors = 0
    for _ in range(MINI_STEPS):
        reply, _ = model(messages, [MINI_BASH])
        call = (reply.get("tool_calls") or [{}])[0]
        arguments = scout.valid_arguments(call, [MINI_BASH])
        if arguments is None:
            messages = [*messages, {"role": "user", "content": MINI_FORMAT_ERROR}]  # the reply itself is left out
            errors += 1
            if errors == MINI_FORMAT_ERRORS:
                return
            continue
        if arguments["command"] == f"echo {MARKER}":
            return
        errors, result = 0, bash(None, arguments)
        messages = [*messages, reply, {"role": "tool", "tool_call_id": call["id"], "content": result}]


def play(
    task: Task, rng: random.Random, noise: Noise, tokenizer, renderer, shell: bool = False
) -> tuple[list[Context], dict[str, str]]:
    """One execution by the expert, in scout or (`shell`) in mini-swe-agent: its contexts and the files it left."""
    expert = Expert(task, rng, noise, shell)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def generate(_prompt, messages, tools):
        ids = [*tokenizer.encode(expert.reply(messages, tools), add_special_tokens=False), end]
        return ids, [0.0] * len(ids)

    dialogue, files = Dialogue(renderer, generate), dict(task.workspace)
    tools = dict_workspace(files)
    if shell:
        mini_swe_agent(task, dialogue.model, tools["bash"])
    else:
        scout.Agent(SCOUT_SETTINGS, task.instruction, dialogue.model, tools).run()
    return dialogue.contexts, files
