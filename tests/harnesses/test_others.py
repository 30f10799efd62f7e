"""codex, opencode and qwen-code, live, through the proxy on a scripted engine."""

import re

import pytest

from services.proxy.generating import Generating
from shared.events import Sampling
from tests.harnesses import programs
from tests.harnesses.world import calls_text, check_exact, roots

OTHERS = ("codex", "opencode", "qwen-code")
pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]
HARNESSES = {
    name: (h.run, h.tool) for name, h in programs.HARNESSES.items() if name in ("codex", "opencode", "qwen-code")
}


@pytest.fixture(params=HARNESSES)
def harness(request):
    program, shell = HARNESSES[request.param]
    return request.param, program, shell


async def play(world, harness, policy, task):
    run, script, workspace = world
    name, program, _ = harness
    await run.execution(harness=name, sampling=Sampling(max_new_tokens=4000))
    script.policy = policy
    ran = await program(run.ready.url, task, workspace)
    assert ran.code == 0, ran.told
    records = await check_exact(run, script)
    main = [r for r in records if r.call_class == "main_task"]
    shape = [(r.call, r.parent, r.call_class, r.diverged) for r in records]
    assert roots(main) == 1, shape
    return ran, main, shape


async def test_simple_task(world, harness):
    shell = harness[2]

    def policy(seen):
        if "itle" in seen.turns[0][1][:400] and "<tools>" not in seen.turns[0][1]:
            return "A title"
        return calls_text(shell("echo hi > hello.txt")) if seen.results == 0 else "all is done"

    ran, main, shape = await play(world, harness, policy, "write hello.txt")
    assert "all is done" in ran.out
    assert (world[2] / "hello.txt").read_text() == "hi\n"
    assert len(main) == 2, shape


async def test_parallel_and_malformed_calls(world, harness):
    shell = harness[2]

    def policy(seen):
        if "itle" in seen.turns[0][1][:400] and "<tools>" not in seen.turns[0][1]:
            return "A title"
        turns = sum(role == "assistant" for role, _ in seen.turns) - 1
        if turns == 0:
            return calls_text(shell("sleep 1; echo a > a.txt"), shell("echo b > b.txt"))
        if turns == 1:
            return f'<tool_call>\n{{"name": "{shell("")[0]}", "arguments": {{"command": }}}}\n</tool_call>'
        if turns == 2:
            return calls_text(shell("echo c > c.txt"))
        return "all is done"

    await play(world, harness, policy, "write three files")
    assert all((world[2] / f"{n}.txt").exists() for n in "abc")


SUMMARY = "<analysis>a</analysis>\n<state_snapshot>Summary: the work is half done.</state_snapshot>"
ASKED = re.compile(r"(?i)summary|summariz|checkpoint|state_snapshot")


async def compacted(world, name, program, shell, ends=(0,), **options):
    """A task of many turns with a window that it outgrows; returns the classes of its calls. `ends`: exit codes."""
    run, script, workspace = world
    await run.execution(harness=name, sampling=Sampling(max_new_tokens=4000))
    calls = []

    def policy(seen):
        calls.append((len(seen.ids), seen.last[-150:]))
        if "half done" in seen.users or len(calls) > 25:
            return "all is done"
        if "<tools>" not in seen.turns[0][1] or ASKED.search(seen.last[-3000:]):
            return SUMMARY
        return calls_text(shell(f"seq {len(calls)} 900"))

    script.policy = policy
    ran = await program(run.ready.url, "count and count", workspace, **options)
    assert ran.code in ends, ran.told
    assert "all is done" in ran.out, ran.told
    return [r.call_class for r in await check_exact(run, script)], calls


async def test_codex_compacts(world):
    program, shell = HARNESSES["codex"]
    settings = "model_context_window = 40000\nmodel_auto_compact_token_limit = 18000"
    classes, calls = await compacted(world, "codex", program, shell, settings=settings)
    assert "main_summary" in classes, (classes, calls)
    assert classes[-1] == "main_task"


async def test_opencode_compacts(world):
    program, shell = HARNESSES["opencode"]
    classes, calls = await compacted(world, "opencode", program, shell, context=24_000)
    assert "main_summary" in classes, (classes, calls)
    assert classes[-1] == "main_task", (classes, calls)


async def test_qwen_code_compacts(world):
    program, shell = HARNESSES["qwen-code"]
    classes, calls = await compacted(world, "qwen-code", program, shell, context=60_000)
    assert "main_summary" in classes, (classes, calls)
    assert classes[-1] == "main_task", (classes, calls)


AGENTS = {"opencode": ("task", "general"), "qwen-code": ("agent", "general-purpose")}
PART = "Your part: make part.txt"


@pytest.mark.parametrize("name", AGENTS)
async def test_sub_agent(world, name):
    program, shell = HARNESSES[name]
    tool, kind = AGENTS[name]

    def policy(seen):
        if "<tools>" not in seen.turns[0][1]:
            return "A title"
        if PART in seen.users and "DELEGATE" not in seen.users:
            return calls_text(shell("echo part > part.txt")) if seen.results == 0 else "the part is done"
        if seen.results == 0:
            return calls_text((tool, {"description": "a part", "prompt": PART, "subagent_type": kind}))
        return "all is done"

    ran, main, shape = await play(world, (name, program, shell), policy, "DELEGATE the part")
    assert (world[2] / "part.txt").exists(), ran.told
    sub = [r for r in await world[0].records() if r.call_class == "sub_task"]
    last = 3 if name == "qwen-code" else 2  # its agents work in the background: it waits, and is told
    assert (len(sub), roots(sub), len(main)) == (2, 1, last), shape


async def test_codex_sub_agent(world):
    """The main line starts one and waits for it."""
    program, shell = HARNESSES["codex"]

    def policy(seen):
        if PART in seen.users and "DELEGATE" not in seen.users:
            return calls_text(shell("echo part > part.txt")) if seen.results == 0 else "the part is done"
        if seen.results == 0:
            return calls_text(("spawn_agent", {"message": PART}))
        if seen.results == 1:
            started = re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", seen.last)
            return calls_text(("wait_agent", {"targets": started[:1], "timeout_ms": 120_000}))
        return "all is done"

    ran, main, shape = await play(world, ("codex", program, shell), policy, "DELEGATE the part")
    assert (world[2] / "part.txt").exists(), ran.told
    sub = [r for r in await world[0].records() if r.call_class == "sub_task"]
    assert (len(sub), roots(sub), len(main)) == (2, 1, 3), (shape, ran.told)


@pytest.fixture
def small_context(monkeypatch):
    """An engine whose context is soon too short for an agent's calls; what has no tools still fits."""
    original = Generating.run

    async def smaller(self, work, *arguments):
        if self.context > 60_000 and work.request.tools:
            self.context = work.prompt.length + 12_000
        return await original(self, work, *arguments)

    monkeypatch.setattr(Generating, "run", smaller)


@pytest.mark.parametrize("name", ["opencode", "qwen-code"])
async def test_a_context_that_is_too_long_is_compacted(world, small_context, name):
    program, shell = HARNESSES[name]
    ends = (0, 1) if name == "opencode" else (0,)  # it goes on to the end, and then exits with 1
    classes, calls = await compacted(world, name, program, shell, ends)
    assert "main_summary" in classes, (classes, calls)
    assert classes[-1] == "main_task", (classes, calls)


async def test_codex_ends_on_a_context_that_is_too_long(world, small_context):
    """It does not compact then; it says why it ends, and what was generated is recorded."""
    run, script, workspace = world
    program, shell = HARNESSES["codex"]
    await run.execution(harness="codex", sampling=Sampling(max_new_tokens=4000))
    script.policy = lambda seen: calls_text(shell(f"seq {seen.results} 900"))
    ran = await program(run.ready.url, "count and count", workspace)
    assert "context window" in ran.out, ran.told
    main = [r for r in await check_exact(run, script) if r.call_class == "main_task"]
    assert (roots(main), len(main) > 1) == (1, True), ran.told
