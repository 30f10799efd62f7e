"""Fixtures on real parts: one nats-server for the whole test session, and a run name of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.nats_server import start_server


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real nats-server with JetStream, on a free port; its store is a temporary folder."""
    store: Path = tmp_path_factory.mktemp("nats")
    server = start_server(store)
    yield server.url
    server.kill()


@pytest.fixture
def fresh_run() -> str:
    """A run id that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"
