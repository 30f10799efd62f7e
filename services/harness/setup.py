"""Installs harness programs into environments of their own: `python -m services.harness.setup mini-swe-agent`.

Invariant: an environment that carries the marker file is complete; without it, it is made anew. Running this twice
costs one look at the marker.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venvs"
PACKAGES = {"mini-swe-agent": ("mini-swe-agent==2.4.6",)}
MARKER = "gyre-complete"


class SetupFailed(RuntimeError):
    """A harness could not be installed."""


def environment(name: str) -> Path:
    return ENVIRONMENTS / name


def is_complete(name: str) -> bool:
    marker = environment(name) / MARKER
    return marker.is_file() and marker.read_text() == _contents(name)


def install(name: str) -> Path:
    """Make the environment of harness `name` unless it is there. Raises SetupFailed."""
    if name not in PACKAGES:
        raise SetupFailed(f"{name!r} needs no set-up; this installs: {', '.join(PACKAGES)}")
    folder = environment(name)
    if is_complete(name):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name])
    _run("chmod", "-R", "a+rX", str(folder))  # sandboxes run under another user id
    (folder / MARKER).write_text(_contents(name))
    return folder


def _contents(name: str) -> str:
    return "\n".join(PACKAGES[name]) + "\n"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupFailed(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def main(names: list[str]) -> int:
    if not names:
        print(f"usage: python -m services.harness.setup NAME...  ({', '.join(PACKAGES)})", file=sys.stderr)
        return 2
    try:
        for name in names:
            print(f"{name}: {install(name)}")
    except SetupFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
