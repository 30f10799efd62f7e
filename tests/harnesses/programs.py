"""How each harness program is started against the proxy. What is not installed is skipped with the way to get it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.world import ROOT, Ran, calls_text, run_program

VENVS = ROOT / ".venvs"


@dataclass(frozen=True)
class Harness:
    """A program, the tool with which its agent runs a command, and how the policy ends the work."""

    profile: str
    run: Callable[..., Awaitable[Ran]]  # (url, task, folder)
    tool: Callable[[str], tuple[str, dict[str, Any]]]
    last: str = "all is done"

    def says(self, *commands: str, text: str = "") -> str:
        """A turn of the policy that runs commands."""
        return calls_text(*map(self.tool, commands), text=text)


def installed(name: str, program: str) -> Path:
    path = VENVS / name / program
    if not (VENVS / name / "gyre-complete").is_file() or not path.exists():
        pytest.skip(f"{name} is not installed: run `make harnesses` (deploy/harnesses.sh {name})")
    return path


def settle(folder: Path, name: str, text: str) -> None:
    """Write a file of settings in the home that `run_program` gives to a program in `folder`."""
    path = folder.parent / "home" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def claude_code(name: str, url: str, task: str, folder: Path, *extra: str, **env: str) -> Ran:
    program = installed(name, "node_modules/.bin/claude")
    command = [
        str(program),
        "-p",
        task,
        "--dangerously-skip-permissions",
        "--output-format",
        "stream-json",
        "--verbose",
    ]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "secret",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    return await run_program([*command, *extra], environment | env, folder)


async def mini_swe_agent(url: str, task: str, folder: Path, *extra: str, **env: str) -> Ran:
    program = installed("mini-swe-agent", "bin/mini")
    options = ["-m", "openai/m", "-t", task, "-y", "--exit-immediately", "-o", str(folder.parent / "trajectory.json")]
    environment = {
        "OPENAI_API_KEY": "secret",
        "OPENAI_API_BASE": url + "/v1",
        "OPENAI_BASE_URL": url + "/v1",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder.parent / "mini"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return await run_program([str(program), *options, *extra], environment | env, folder)


async def codex(url: str, task: str, folder: Path, *extra: str, settings: str = "") -> Ran:
    program = installed("codex", "node_modules/.bin/codex")
    provider = f'name = "gyre"\nbase_url = "{url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    head = f'model = "m"\nmodel_provider = "gyre"\n{settings}\n'
    settle(folder, ".codex/config.toml", f"{head}[model_providers.gyre]\n{provider}")
    options = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *extra, task]
    return await run_program([str(program), *options], {"OPENAI_API_KEY": "secret"}, folder)


async def opencode(url: str, task: str, folder: Path, *extra: str, context: int = 60_000) -> Ran:
    program = installed("opencode", "node_modules/.bin/opencode")
    model = {"name": "m", "limit": {"context": context, "output": 4000}, "tool_call": True}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "gyre", "models": {"m": model}}
    provider["options"] = {"baseURL": f"{url}/v1", "apiKey": "secret"}
    settings = {"model": "gyre/m", "autoupdate": False, "share": "disabled", "provider": {"gyre": provider}}
    settle(folder, ".config/opencode/opencode.json", json.dumps(settings))
    env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return await run_program([str(program), "run", "--format", "json", *extra, task], env, folder)


async def qwen_code(url: str, task: str, folder: Path, *extra: str, context: int = 0) -> Ran:
    program = installed("qwen-code", "node_modules/.bin/qwen")
    if context:
        settings = {"model": {"generationConfig": {"contextWindowSize": context}}}
        settle(folder, ".qwen/settings.json", json.dumps(settings))
    env = {"OPENAI_API_KEY": "secret", "OPENAI_BASE_URL": url + "/v1", "OPENAI_MODEL": "m"}
    return await run_program([str(program), "-p", task, "--yolo", "--auth-type", "openai", *extra], env, folder)


SUBMIT = calls_text(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat hello.txt"}))
HARNESSES = {
    "mini-swe-agent": Harness("mini-swe-agent", mini_swe_agent, lambda c: ("bash", {"command": c}), SUBMIT),
    **{
        name: Harness("claude-code", partial(claude_code, name), lambda c: ("Bash", {"command": c, "description": "x"}))
        for name in ("claude-code-2.1.220", "claude-code-latest")
    },
    "codex": Harness("codex", codex, lambda c: ("exec_command", {"cmd": c})),
    "opencode": Harness("opencode", opencode, lambda c: ("bash", {"command": c, "description": "x"})),
    "qwen-code": Harness(
        "qwen-code",
        qwen_code,
        lambda c: ("run_shell_command", {"command": c, "description": "x", "is_background": False}),
    ),
}
