"""Fixtures of the proxy's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.proxy import rendering
from tests.proxy.support import ScriptedEngine, World, make_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and config of a Qwen3, without weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> rendering.Rendering:
    return rendering.load(str(model_folder))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model_folder)


@pytest_asyncio.fixture
async def world(
    nats_url: str, fresh_run: str, tmp_path: Path, model_folder: Path, tokenizer: Any
) -> AsyncIterator[tuple[World, ScriptedEngine]]:
    """A run with a proxy, one cell whose engine is scripted, and one execution with the key "secret"."""
    run = World(nats_url, fresh_run, tmp_path, model_folder, context=1024)
    async with ScriptedEngine(tokenizer).running() as engine:
        await run.begin()
        await run.cell(0, engine.url)
        await run.execution()
        await run.start_proxy()
        try:
            yield run, engine
        finally:
            await run.end()
