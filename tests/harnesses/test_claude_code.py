"""Claude Code, live, through the proxy on a scripted engine."""

import json

import pytest

from services.proxy.generating import Generating
from shared.events import Sampling
from tests.harnesses.programs import claude_code
from tests.harnesses.world import calls_text, check_exact, roots

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]
VERSIONS = ["claude-code-2.1.220", "claude-code-latest"]
PART = "Your part: make part.txt"


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


async def start(run):
    await run.execution(harness="claude-code", sampling=Sampling(max_new_tokens=4000))


def bash(command):
    return "Bash", {"command": command, "description": "x"}


def simple(seen):
    if seen.results == 0:
        return calls_text(bash("echo hi > hello.txt"), text="I write the file.")
    return "all is done"


def result_of(ran):
    """The last line of the event stream that the program prints."""
    lines = [json.loads(line) for line in ran.out.splitlines() if line.startswith("{")]
    return next((line for line in reversed(lines) if line.get("type") == "result"), {})


def ended_well(ran):
    assert ran.code == 0, ran.told
    result = result_of(ran)
    assert result.get("is_error") is False, ran.told
    return result


async def test_simple_task(world, version):
    run, script, workspace = world
    await start(run)
    script.policy = simple
    ran = await claude_code(version, run.ready.url, "write hello.txt", workspace)
    assert ended_well(ran)["result"] == "all is done"
    assert (workspace / "hello.txt").read_text() == "hi\n"
    records = await check_exact(run, script)
    main = [r for r in records if r.call_class == "main_task"]
    assert (len(main), roots(main)) == (2, 1), [(r.call, r.parent, r.call_class, r.diverged) for r in records]
    assert not any(r.diverged for r in main)


async def test_parallel_calls(world, version):
    run, script, workspace = world
    await start(run)

    def policy(seen):
        if seen.results == 0:
            return calls_text(bash("sleep 1; echo a > a.txt; echo one"), bash("echo b > b.txt; echo two"))
        return "all is done"

    script.policy = policy
    ran = await claude_code(version, run.ready.url, "write two files", workspace)
    ended_well(ran)
    assert (workspace / "a.txt").exists()
    assert (workspace / "b.txt").exists()
    records = await check_exact(run, script)
    main = [r for r in records if r.call_class == "main_task"]
    assert (len(main), roots(main)) == (2, 1)


async def test_malformed_arguments(world, version):
    run, script, workspace = world
    await start(run)

    def policy(seen):
        if seen.results == 0:
            return '<tool_call>\n{"name": "Bash", "arguments": {"command": }}\n</tool_call>'
        if seen.results == 1:
            return calls_text(bash("echo hi > hello.txt"))
        return "all is done"

    script.policy = policy
    ran = await claude_code(version, run.ready.url, "write hello.txt", workspace)
    ended_well(ran)
    assert (workspace / "hello.txt").exists()
    records = await check_exact(run, script)
    main = [r for r in records if r.call_class == "main_task"]
    assert (len(main), roots(main)) == (3, 1), [(r.call, r.parent, r.call_class, r.diverged) for r in records]


async def test_sub_agent(world, version):
    run, script, workspace = world
    await start(run)

    def policy(seen):
        if PART in seen.users and "DELEGATE" not in seen.users:
            return calls_text(bash("echo part > part.txt")) if seen.results == 0 else "the part is done"
        if "the part is done" in seen.users:
            return "all is done"
        if seen.results == 0:
            agent = {"description": "a part", "prompt": PART, "subagent_type": "general-purpose"}
            return calls_text(("Agent", agent))
        return "I wait for the part."

    script.policy = policy
    ran = await claude_code(version, run.ready.url, "DELEGATE the part", workspace)
    ended_well(ran)
    assert (workspace / "part.txt").exists(), ran.told
    records = await check_exact(run, script)
    sub = [r for r in records if r.call_class == "sub_task"]
    main = [r for r in records if r.call_class == "main_task"]
    assert (len(sub), roots(sub), roots(main)) == (2, 1, 1), [
        (r.call, r.parent, r.call_class, r.diverged) for r in records
    ]


async def test_compaction_on_a_context_that_is_too_long(world, version, monkeypatch):
    run, script, workspace = world
    await start(run)
    original = Generating.run

    async def smaller(self, work, *arguments):
        if self.context > 60_000:
            self.context = work.prompt.length + 12_000
        return await original(self, work, *arguments)

    monkeypatch.setattr(Generating, "run", smaller)

    def policy(seen):
        if "detailed summary" in seen.last:
            return "<analysis>a</analysis>\n<summary>The work is half done.</summary>"
        if "half done" in seen.users:
            return "all is done"
        return calls_text(bash(f"seq {seen.results} 700"))

    script.policy = policy
    ran = await claude_code(version, run.ready.url, "count and count", workspace)
    ended_well(ran)
    records = await check_exact(run, script)
    classes = [r.call_class for r in records]
    assert "main_summary" in classes, classes
    assert classes[-1] == "main_task"


async def test_automatic_compaction(world, version):
    run, script, workspace = world
    await start(run)
    sizes = []

    def policy(seen):
        sizes.append(len(seen.ids))
        if "detailed summary" in seen.last:
            return "<analysis>a</analysis>\n<summary>The work is half done.</summary>"
        if "half done" in seen.users or len(sizes) > 30:
            return "all is done"
        return calls_text(bash(f"seq {seen.results} 1500"))

    script.policy = policy
    window = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "40000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "90"}
    ran = await claude_code(version, run.ready.url, "count and count", workspace, **window)
    ended_well(ran)
    records = await check_exact(run, script)
    classes = [r.call_class for r in records]
    assert "main_summary" in classes, (classes, sizes)
    assert classes[-1] == "main_task"
