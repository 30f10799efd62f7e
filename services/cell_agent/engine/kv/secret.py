"""The run's secret, which engines and agents prove to each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from services.cell_agent.engine.kv.wire import SECRET_ENV

FILE = "kv-secret"


def run_secret(run_dir: Path) -> str:
    """The same for all callers of a run: from GYRE_KV_SECRET if the operator set it (agents without a shared folder),
    else from a file in the run's folder that only its owner can read; the first caller writes it."""
    if given := os.environ.get(SECRET_ENV):
        return given
    path, fresh = run_dir / FILE, run_dir / f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    if not path.exists():
        handle = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(fresh, path)  # whole or not at all; fails if another caller was first
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_text()
