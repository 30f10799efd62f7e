"""Launch profiles: how to start a harness program that knows nothing of us.

Owns the command line, environment and mounts of each known harness. A profile is data; `launch` fills the places
{instruction} {instruction_file} {base_url} {key} {model} {execution}, and {file:PATH}: a file of the host (relative:
from Gyre's folder), mounted read-only and replaced by its place inside the sandbox.

Invariant: a harness gets the task, a base URL, a key and a model name, and nothing else of ours that its profile does
not ask for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.harness import setup
from shared.config import HarnessConfig
from shared.sandbox import PYTHON, Mount

INSIDE = "/run/harness"
VALUE_PLACE = re.compile(r"\{(instruction|instruction_file|base_url|key|model|execution)\}")
FILE_PLACE = re.compile(r"\{file:([^{}]+)\}")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class HarnessMissing(RuntimeError):
    """The run's harness cannot be started on this machine; the message says how to fix that."""


@dataclass(frozen=True)
class Profile:
    """How one harness starts. `memory_mb` replaces the run file's limit where the program needs another one."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    memory_mb: int | None = None


@dataclass(frozen=True)
class Places:
    """What is filled in for one execution. `base_url` has no path: http://host:port."""

    instruction: str
    instruction_file: str
    base_url: str
    key: str
    model: str
    execution: str  # its id: the same in every run with the same seed and tasks


@dataclass(frozen=True)
class Launch:
    command: tuple[str, ...]
    env: dict[str, str]
    mounts: tuple[Mount, ...]


BASE_ENV = {
    "PATH": PATH,
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "USER": "agent",
    "LOGNAME": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",  # byte code would only swell the preserved workspace
    "OPENAI_API_KEY": "{key}",
    "OPENAI_BASE_URL": "{base_url}/v1",
    "OPENAI_API_BASE": "{base_url}/v1",
    "ANTHROPIC_API_KEY": "{key}",
    "ANTHROPIC_BASE_URL": "{base_url}",
    "ANTHROPIC_MODEL": "{model}",
}


def profile(config: HarnessConfig) -> Profile:
    """The profile that the run file asks for. Raises HarnessMissing."""
    mounts = tuple(Mount(_existing(path), path) for path in config.mounts)
    if config.command:
        return Profile(config.name, (*config.command, *config.extra_args), config.env, mounts)
    if config.name not in BUILT_IN:
        raise HarnessMissing(
            f"harness.name {config.name!r} is none of the built-in ones ({', '.join(BUILT_IN)}): "
            "give harness.command, or correct the name"
        )
    known = BUILT_IN[config.name]()
    return Profile(
        known.name,
        (*known.command, *config.extra_args),
        {**known.env, **config.env},
        (*known.mounts, *mounts),
        known.memory_mb,
    )


def launch(known: Profile, places: Places) -> Launch:
    """Command, environment and mounts of one execution. Raises HarnessMissing if a {file:...} is not there."""
    files: dict[str, Mount] = {}

    def mounted(match: re.Match[str]) -> str:
        source = _existing(match[1])
        mount = files.setdefault(match[1], Mount(source, f"{INSIDE}/files/{len(files)}/{source.name}"))
        return mount.target

    def fill(template: str) -> str:
        # One pass, files first: what an instruction contains is text, never a place.
        return VALUE_PLACE.sub(lambda match: str(getattr(places, match[1])), FILE_PLACE.sub(mounted, template))

    command = tuple(fill(word) for word in known.command)
    env = {name: fill(value) for name, value in {**BASE_ENV, **known.env}.items()}
    return Launch(command, env, (*known.mounts, *files.values()))


def _existing(path: str) -> Path:
    source = setup.ROOT / path  # an absolute path stays what it is
    if not source.exists():
        raise HarnessMissing(f"the harness needs {source}, which is not there: correct harness.mounts or {{file:...}}")
    return source.resolve()


def _scout() -> Profile:
    program = setup.ROOT / "examples" / "harness" / "scout" / "scout.py"
    inside = f"{INSIDE}/scout.py"
    command = (PYTHON, "-I", "-S", inside, "--model", "{model}", "--instruction-file", "{instruction_file}")
    return Profile("scout", command, mounts=(Mount(_existing(str(program)), inside),))


def _mini_swe_agent() -> Profile:
    name = "mini-swe-agent"
    if not setup.is_complete(name):
        raise HarnessMissing(f"{name} is not installed: run python -m services.harness.setup {name}")
    folder = setup.environment(name)
    # --exit-immediately and -y: no questions at a terminal that is not there.
    options = ("-m", "openai/{model}", "-t", "{instruction}", "-y", "--exit-immediately", "-o", "/tmp/trajectory.json")
    env = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini-swe-agent",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no attempt to download a price list
    }
    mounts = (Mount(folder, str(folder)), *_interpreter(folder))
    return Profile(name, (str(folder / "bin" / "mini"), *options), env, mounts, memory_mb=2048)


def _interpreter(venv: Path) -> tuple[Mount, ...]:
    """The installation that a virtual environment's interpreter belongs to, if it is not part of the system."""
    home = (venv / "bin" / "python").resolve().parents[1]
    return () if home.is_relative_to("/usr") else (Mount(home, str(home)),)


BUILT_IN = {"scout": _scout, "mini-swe-agent": _mini_swe_agent}
