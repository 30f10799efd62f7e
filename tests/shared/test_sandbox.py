"""Sandboxes with real bubblewrap: what is visible, what is limited, what is forwarded, and that nothing survives."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import sandbox
from shared.sandbox import MODEL_SOCKET, Bubblewrap, Ended, Limits, Mount, Sandbox, SandboxFailed, SandboxMissing
from tests.harness.support import processes_with
from tests.sandboxes import needs_sandbox

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}


@pytest.fixture
async def tools(tmp_path: Path) -> Bubblewrap:
    return await sandbox.find(tmp_path / "scratch")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


async def run(tools: Bubblewrap, work: Path, script: str, limit_s: float = 20.0, **more: object) -> tuple[Ended, str]:
    said: list[bytes] = []
    spec = Sandbox(("/bin/sh", "-c", script), work, env=ENV, **more)  # type: ignore[arg-type]
    running = await tools.start(spec, said.append)
    ended = await running.wait(limit_s)
    return ended, b"".join(said).decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------- walls


@needs_sandbox
async def test_only_the_workspace_and_temporary_folders_can_be_written(tools: Bubblewrap, work: Path) -> None:
    script = """for p in /x /usr/x /etc/x /run/x /dev/x /proc/sys/x /app/x /tmp/x /dev/shm/x; do
    (echo 1 > $p) 2>/dev/null && echo $p; done; echo pwd $(pwd)"""
    ended, said = await run(tools, work, script)
    assert ended.code == 0
    assert said.split() == ["/app/x", "/tmp/x", "/dev/shm/x", "pwd", "/app"]
    assert (work / "x").read_text() == "1\n"


@needs_sandbox
async def test_nothing_of_the_host_is_visible(tools: Bubblewrap, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "x")
    ended, said = await run(tools, work, "ls / ; ls /home /root /etc/shadow 2>&1; env; ls /proc | grep -c '^[0-9]'")
    assert ended.code == 0
    top = said.split("ls:")[0].split()
    assert set(top) <= {
        "app",
        "bin",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "run",
        "sbin",
        "tmp",
        "usr",
    }
    assert "SECRET_OF_THE_SERVICE" not in said
    assert int(said.split()[-1]) <= 4  # its own processes


@needs_sandbox
async def test_there_is_no_privilege(tools: Bubblewrap, work: Path) -> None:
    _, said = await run(
        tools, work, "id -u; grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status; mount -t tmpfs x /mnt"
    )
    words = said.split()
    assert int(words[0]) >= 1000
    assert words.count("0000000000000000") >= 2
    assert said.split("NoNewPrivs:")[1].split()[0] == "1"


@needs_sandbox
async def test_there_is_no_network(tools: Bubblewrap, work: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"""python3 -c "
import socket
for address in (('127.0.0.1', {port}), ('192.0.2.1', 80)):
    try: socket.create_connection(address, 2); print('connected')
    except OSError as e: print('refused')
"; grep -c : /proc/net/dev"""
        _, said = await run(tools, work, script)
    assert said.split() == ["refused", "refused", "1"]


@needs_sandbox
async def test_mounts_are_read_only_unless_asked(tools: Bubblewrap, work: Path, tmp_path: Path) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    mounts = (Mount(tmp_path / "ro", "/deep/er/ro"), Mount(tmp_path / "rw", "/logs/rw", writable=True))
    _, said = await run(
        tools, work, "cat /deep/er/ro/file /logs/rw/file; echo x > /deep/er/ro/n; echo y > /logs/rw/n", mounts=mounts
    )
    assert said.startswith("rorw")
    assert not (tmp_path / "ro" / "n").exists()
    assert (tmp_path / "rw" / "n").read_text() == "y\n"


# ---------------------------------------------------------------------------------------------------------- limits


@needs_sandbox
async def test_a_fork_bomb_meets_the_process_limit(tools: Bubblewrap, work: Path) -> None:
    script = "i=0; while [ $i -lt 60 ]; do sleep 5 & i=$((i+1)); done; wait"
    ended, said = await run(tools, work, script, limits=Limits(processes=20))
    assert "ork" in said  # dash: "Cannot fork", bash: "fork: retry"
    assert ended.seconds < 19


@needs_sandbox
async def test_memory_files_and_tmp_are_limited(tools: Bubblewrap, work: Path) -> None:
    limits = Limits(memory_mb=200, disk_mb=4)
    _, said = await run(tools, work, "python3 -c 'x = bytearray(400 << 20)' 2>&1 | tail -1", limits=limits)
    assert "MemoryError" in said
    await run(tools, work, "head -c 9000000 /dev/zero > /app/big", limits=limits)
    assert (work / "big").stat().st_size <= 4 << 20
    _, said = await run(
        tools, work, "for i in 1 2 3; do head -c 3000000 /dev/zero > /tmp/$i || echo full; done", limits=limits
    )
    assert "full" in said


# ---------------------------------------------------------------------------------------------------------- ends


@needs_sandbox
@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize(("script", "code", "number"), [("exit 7", 7, 0), ("true", 0, 0)])
async def test_the_exit_code_comes_out(
    tools: Bubblewrap, work: Path, supervised: bool, script: str, code: int, number: int
) -> None:
    ended, _ = await run(tools, work, script, supervised=supervised)
    assert (ended.code, ended.signal, ended.stopped) == (code, number, False)


@needs_sandbox
async def test_a_signal_that_ends_the_command_is_told_apart(tools: Bubblewrap, work: Path) -> None:
    ended, _ = await run(tools, work, "kill -SEGV $$", supervised=True)
    assert (ended.code, ended.signal) == (None, signal.SIGSEGV)


@needs_sandbox
@pytest.mark.parametrize("supervised", [True, False])
async def test_nothing_survives_the_command(tools: Bubblewrap, work: Path, supervised: bool) -> None:
    mark = f"3139.{time.time_ns() % 1_000_000}"
    script = f"(setsid nohup sleep {mark} >/dev/null 2>&1 &); trap '' TERM; sleep 0.1"
    ended, _ = await run(tools, work, script, supervised=supervised)
    assert ended.code == 0
    assert processes_with(mark) == []


@needs_sandbox
@pytest.mark.parametrize("supervised", [True, False])
async def test_nothing_survives_a_kill(tools: Bubblewrap, work: Path, supervised: bool) -> None:
    mark = f"3140.{time.time_ns() % 1_000_000}"
    spec = Sandbox(
        ("/bin/sh", "-c", f"trap '' TERM INT HUP; (setsid sleep {mark} &); while :; do :; done"),
        work,
        env=ENV,
        supervised=supervised,
    )
    running = await tools.start(spec)
    while f"sleep {mark} " not in processes_with(mark):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.6)  # long enough to get some processor time on a busy machine
    ended = await running.kill()
    assert processes_with(mark) == []
    assert ended.signal == signal.SIGKILL
    assert ended.cpu_seconds > 0.005  # what the killed processes used is counted


@needs_sandbox
async def test_a_kill_right_after_the_start_is_complete(tools: Bubblewrap, work: Path) -> None:
    mark = f"3141.{time.time_ns() % 1_000_000}"
    for delay in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02):
        starting = asyncio.create_task(tools.start(Sandbox(("/bin/sleep", mark), work, env=ENV)))
        await asyncio.sleep(delay)
        starting.cancel()
        if await asyncio.wait({starting}) and not starting.cancelled():
            await starting.result().kill()
        assert processes_with(mark) == []


@needs_sandbox
async def test_sandboxes_die_with_a_service_that_is_killed_while_they_start(work: Path, tmp_path: Path) -> None:
    mark = f"3143.{time.time_ns() % 1_000_000}"
    program = f"""
import asyncio, sys
from pathlib import Path
from shared import sandbox
async def main():
    tools = await sandbox.find(Path({str(tmp_path / "scratch")!r}))
    print("started", flush=True)
    while True:
        for supervised in (True, False):
            await tools.start(sandbox.Sandbox(("/bin/sleep", {mark!r}), Path({str(work)!r}), supervised=supervised))
asyncio.run(main())
"""
    for delay in (0.05, 0.06, 0.073, 0.081, 0.094):
        service = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE, cwd=ROOT)
        assert service.stdout is not None
        assert await service.stdout.readline() == b"started\n"
        await asyncio.sleep(delay)
        service.kill()
        await service.wait()
        async with asyncio.timeout(5):
            while processes_with(mark):
                await asyncio.sleep(0.02)


@needs_sandbox
async def test_sandboxes_die_with_their_service(work: Path, tmp_path: Path) -> None:
    mark = f"3142.{time.time_ns() % 1_000_000}"
    program = f"""
import asyncio, sys
from pathlib import Path
from shared import sandbox
async def main():
    tools = await sandbox.find(Path({str(tmp_path / "scratch")!r}))
    for supervised in (True, False):
        await tools.start(sandbox.Sandbox(("/bin/sleep", {mark!r}), Path({str(work)!r}), supervised=supervised))
    print("started", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE, cwd=ROOT)
    assert service.stdout is not None
    assert await service.stdout.readline() == b"started\n"
    service.kill()
    await service.wait()
    async with asyncio.timeout(5):
        while processes_with(mark):
            await asyncio.sleep(0.02)


@needs_sandbox
async def test_a_command_that_is_not_there_is_a_failed_start(tools: Bubblewrap, work: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match="No such file"):
        await tools.start(Sandbox(("/nowhere/harness",), work, supervised=True))
    with pytest.raises(SandboxFailed, match="absent"):
        await tools.start(Sandbox(("/bin/true",), tmp_path / "absent", supervised=True))
    mounts = (Mount(tmp_path / "gone", "/gone"),)
    with pytest.raises(SandboxFailed, match="gone"):
        await tools.start(Sandbox(("/bin/true",), work, mounts=mounts, supervised=True))


@needs_sandbox
async def test_sandboxes_leave_no_descriptor_open(tools: Bubblewrap, work: Path) -> None:
    await run(tools, work, "true", supervised=True)
    before = len(os.listdir("/proc/self/fd"))
    for supervised in (True, False):
        await run(tools, work, "echo x", supervised=supervised)
        with pytest.raises(SandboxFailed):
            await tools.start(Sandbox(("/nowhere",), work, supervised=True))
    assert len(os.listdir("/proc/self/fd")) == before


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="this test run has no root rights: all the others show it")
async def test_an_unprivileged_user_gets_the_same_walls() -> None:
    folder = Path("/tmp") / f"gyre-unprivileged-{time.time_ns()}"  # pytest's own folders are closed to other users
    program = """
import asyncio, pathlib, sys
from shared import sandbox
async def main(base):
    tools = await sandbox.find(base / "scratch")
    assert tools.setpriv == ""
    said = []
    (base / "work").mkdir()
    spec = sandbox.Sandbox(("/bin/sh", "-c", "echo $(id -u) > x; grep -c : /proc/net/dev; touch /y"), base / "work",
                           env={"PATH": "/usr/bin:/bin"}, supervised=True)
    ended = await (await tools.start(spec, said.append)).wait(10)
    print(ended.code, (base / "work" / "x").read_text().strip(), b"".join(said).decode().split()[0])
asyncio.run(main(pathlib.Path(sys.argv[1])))
"""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    shutil.copytree(ROOT / "shared", folder / "code" / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    try:
        command = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", sandbox.PYTHON, "-c", program, folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder / "code", check=False, env=ENV)
        if "SandboxMissing" in done.stderr:
            pytest.skip(f"this machine gives unprivileged users no namespaces: {done.stderr[-300:]}")
        assert done.stdout.split() == ["1", "1000", "1"], done.stderr
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------------ model API


class EchoServer:
    """A scripted model API: sends back what it gets, upper-cased, and counts connections."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self.folder, self.connections = folder, 0

    async def __aenter__(self) -> EchoServer:
        path = self.folder / MODEL_SOCKET
        self.server = await asyncio.start_unix_server(self.serve, str(path))
        path.chmod(0o666)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()
        writer.write(b"<end>")
        await writer.drain()
        writer.close()


@needs_sandbox
async def test_bytes_pass_in_order_with_half_close_and_many_connections(
    tools: Bubblewrap, work: Path, tmp_path: Path
) -> None:
    (work / "client.py").write_text(
        """
import socket, threading, hashlib, os
def one(i, results):
    s = socket.create_connection(("127.0.0.1", 8080))
    data = (b"%06d" % i) * 200_000
    def send():
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
    t = threading.Thread(target=send); t.start()
    got = b""
    while part := s.recv(1 << 16):
        got += part
    t.join()
    results[i] = got == data.upper() + b"<end>"
results = {}
threads = [threading.Thread(target=one, args=(i, results)) for i in range(12)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(results.values()))
s = socket.create_connection(("127.0.0.1", 8080))
for word in (b"stream", b"ing"):
    s.sendall(word)
    print(s.recv(100).decode())
s.close()
"""
    )
    async with EchoServer(tmp_path / "api") as server:
        ended, said = await run(
            tools, work, "python3 client.py", model_folder=server.folder, limits=Limits(processes=64)
        )
    assert said.split("\n")[:3] == [str([True] * 12), "STREAM", "ING"]
    assert ended.code == 0
    assert server.connections == 13


@needs_sandbox
async def test_a_forwarder_with_broken_connections_neither_stops_nor_burns_time(
    tools: Bubblewrap, work: Path, tmp_path: Path
) -> None:
    (work / "client.py").write_text(
        """
import socket, struct, time
held = []
for i in range(30):
    s = socket.create_connection(("127.0.0.1", 8080))
    s.sendall(b"x" * 1000)
    if i % 3 == 0:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()                       # reset
    elif i % 3 == 1:
        s.shutdown(socket.SHUT_RDWR)
    else:
        held.append(s)                  # open, half read
time.sleep(1.5)
s = socket.create_connection(("127.0.0.1", 8080)); s.sendall(b"alive"); print(s.recv(100).decode())
"""
    )
    async with EchoServer(tmp_path / "api") as server:
        ended, said = await run(tools, work, "python3 client.py", model_folder=server.folder)
    assert said.strip() == "ALIVE"
    assert ended.cpu_seconds < 0.6  # a busy loop would have used 1.5 s


@needs_sandbox
async def test_without_a_listening_proxy_connections_are_closed(tools: Bubblewrap, work: Path, tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    script = """python3 -c "
import socket
s = socket.create_connection(('127.0.0.1', 8080))
print(repr(s.recv(10)))
" 2>&1 | tail -1"""
    ended, said = await run(tools, work, script, model_folder=tmp_path / "api")
    assert ended.code == 0
    assert "b''" in said or "reset" in said


# ------------------------------------------------------------------------------------------------- missing tools


async def test_a_machine_without_bubblewrap_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxMissing, match="apt-get install bubblewrap") as caught:
        await sandbox.find(tmp_path / "scratch")
    assert "dnf install bubblewrap" in str(caught.value)


async def test_a_machine_that_refuses_namespaces_is_told_how_to_allow_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access(sandbox.PYTHON, os.X_OK):
        pytest.skip(f"{sandbox.PYTHON} is missing: the message would be about that")
    refusing = tmp_path / "bwrap"  # stands in for a bubblewrap whose kernel says no
    refusing.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxMissing, match="Operation not permitted") as caught:
        await sandbox.find(tmp_path / "scratch")
    assert "unprivileged_userns" in str(caught.value)
