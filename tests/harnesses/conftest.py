"""One scripted engine for all harness tests; a run with a proxy of its own for each."""

from __future__ import annotations

import pytest_asyncio

from services.proxy import rendering
from services.proxy.plans import Plans
from tests import from_scratch
from tests.harnesses.world import CONTEXT, Script, make_model, scripted_engine
from tests.proxy.support import World


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory):
    """(model folder, script, engine, renderer)."""
    model = tmp_path_factory.mktemp("model")
    script = Script(make_model(model))
    async with script.serving() as url, scripted_engine(model, url, tmp_path_factory.mktemp("engine")) as engine:
        script.engine_url = engine.url
        yield model, script, engine, rendering.load(str(model))


@pytest_asyncio.fixture(loop_scope="session")
async def world(nats_url, fresh_run, tmp_path, stage, monkeypatch):
    """(run, script, workspace): an empty workspace, an execution with the key "secret" is the test's to start."""
    model, script, engine, _ = stage
    script.policy, script.problems = (lambda _seen: "ok"), []
    for told in (script.prompts, script.said, script.asked):
        told.clear()
    monkeypatch.setattr(Plans, "make", from_scratch.watch(script.asked))
    run = World(nats_url, fresh_run, tmp_path, model, CONTEXT)
    await run.begin()
    await run.cell(0, engine.url, version=0)
    await run.start_proxy()
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    yield run, script, workspace
    await run.end()
