"""The noisy expert: it knows the tools and when to stop, and is unsure in its choices.

One Expert plays one execution: the main agent, its sub-agents and its summaries. It says what a policy would generate
as text, tool-call markup included. A policy that imitates it has better and worse habits to choose from, which is what
reinforcement learning sharpens.
"""

import json
import random
from dataclasses import dataclass

from examples.harness.scout import scout
from examples.minirepo.family import CONSTANTS, OPERATIONS, SUFFIXES, File, Function, Task

DONE = "Done."
MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what mini-swe-agent ends on


@dataclass(frozen=True)
class Noise:
    """How often the expert does each thing wrong."""

    operation: float = 0.42  # another operation than the one asked for
    suffix: float = 0.2  # plus for minus, and so on
    constant: float = 0.15  # another constant
    malformed: float = 0.1  # a tool call that isn't one
    stop_early: float = 0.04  # says it is done before it is
    not_looked_up: float = 0.35  # guesses LIMIT instead of reading it
    forget: float = 0.3  # leaves out the second function, or the file to delegate
    summary: float = 0.2  # a wrong value in the summary


CLEAN = Noise(0, 0, 0, 0, 0, 0, 0, 0)


def call_text(name: str, arguments: dict[str, str]) -> str:
    """A tool call in the model's own markup."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def corrupt(rng: random.Random, text: str) -> str:
    """A malformed version of a tool call: broken JSON, a tool that isn't there, or a wrong argument name."""
    choice = rng.randrange(3)
    if choice == 0:
        return text.replace('"}}\n</tool_call>', '"}\n</tool_call>')
    if choice == 1:
        return text.replace('"write_file"', '"write"').replace('"bash"', '"shell"').replace('"delegate"', '"agent"')
    return text.replace('"content": ', '"text": ').replace('"command": ', '"cmd": ').replace('"task": ', '"file": ')


class Expert:
    """One execution's expert; `reply` is called once per model call, in the order of the calls.

    With `shell` it plays mini-swe-agent instead, which has only bash, no sub-agents and a marker to end with.
    """

    def __init__(self, task: Task, rng: random.Random, noise: Noise, shell: bool = False):
        self.task, self.rng, self.noise, self.shell = task, rng, noise, shell
        self.looks_up = task.limit is not None and rng.random() >= noise.not_looked_up
        self.forgets = rng.random() < noise.forget
        self.known: int | None = None
        self.written: set[str] = set()
        self.delegated: set[str] = set()

    def reply(self, messages: list[dict], tools: list[dict]) -> str:
        """The next assistant turn for this conversation."""
        if messages[-1]["content"] == scout.SUMMARY_REQUEST:
            return self._summary()
        if not messages[1]["content"].startswith(self.task.instruction):  # a sub-agent's task
            return self._write(next(f for f in self.task.files if messages[1]["content"].startswith(f.sentence())))
        if self.looks_up and self.known is None:
            command = {"command": f"cat {next(iter(self.task.workspace))}"}
            return self._call("bash", command, lambda: setattr(self, "known", self.task.limit))
        if len(self.task.files) > 1 and not self.forgets and self.task.files[1].path not in self.delegated:
            file = self.task.files[1]
            if self.shell:
                self.delegated.add(file.path)
                return self._write(file)
            return self._call("delegate", {"task": file.sentence()}, lambda: self.delegated.add(file.path))
        return self._write(self.task.files[0])

    def _call(self, name: str, arguments: dict[str, str], done) -> str:
        text = call_text(name, arguments)
        if self.rng.random() < self.noise.malformed:
            return corrupt(self.rng, text)
        done()
        return text

    def _write(self, file: File) -> str:
        if file.path in self.written or self.rng.random() < self.noise.stop_early:
            return call_text("bash", {"command": f"echo {MARKER}"}) if self.shell else DONE
        functions = file.functions[:1] if self.forgets else file.functions
        content = "".join(f.source(self._expression(f)) for f in functions)
        name, arguments = "write_file", {"path": file.path, "content": content}
        if self.shell:
            name, arguments = "bash", {"command": f"cat > {file.path} <<'EOF'\n{content}EOF"}
        return self._call(name, arguments, lambda: self.written.add(file.path))

    def _expression(self, function: Function) -> str:
        rng, noise = self.rng, self.noise
        operation, suffix, constant = function.operation, function.suffix, function.constant
        if function.looked_up:
            constant = rng.choice(CONSTANTS) if self.known is None else self.known
        if rng.random() < noise.operation:
            operation = rng.choice([i for i in range(len(OPERATIONS[function.takes])) if i != operation])
        if rng.random() < noise.constant:
            constant = rng.choice(CONSTANTS)
        if suffix is not None and rng.random() < noise.suffix:
            suffix = rng.randrange(len(SUFFIXES))
        return function.expression(operation, suffix, constant)

    def _summary(self) -> str:
        facts = [f"{path} is written." for path in sorted(self.written | self.delegated)]
        if self.known is not None:
            if self.rng.random() < self.noise.summary:
                self.known = self.rng.choice(CONSTANTS)
            facts.insert(0, f"LIMIT is {self.known}.")
        return " ".join(facts) or "Nothing is done."
