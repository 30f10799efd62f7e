"""Whether this machine can run sandboxes: the one reason for which their tests are skipped."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from shared.sandbox import SandboxMissing, find


def _missing() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            asyncio.run(find(Path(scratch)))
        except SandboxMissing as error:
            return str(error)
    return ""


MISSING = _missing()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)
