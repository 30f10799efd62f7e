"""Bubblewrap sandboxes: where harnesses work and where tests score.

Owns the command line of a sandbox and the life of its processes. A sandbox sees a read-only /usr, a minimal /etc, a
private /tmp, its workspace at /app (read-write), the mounts it was given, and no network but, if asked for, one unix
socket of the model proxy, which `sandbox_entry.py` offers on a loopback port to harnesses that only speak HTTP.

Invariant: when `Running.wait` returns, no process of the sandbox is alive, however it ended; and every sandbox dies
with the service process that started it. The CPU time in `Ended` is that of the whole sandbox.

Two ways to the same walls: as root with CAP_SYS_ADMIN a sandbox gets a user id of its own without a user namespace, so
that per-user limits count for it alone; otherwise a user namespace maps the caller's id. Standard library only.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.sandbox_process import Ended, Running, SandboxFailed

__all__ = ["Bubblewrap", "Ended", "Limits", "Mount", "Running", "Sandbox", "SandboxFailed", "SandboxMissing", "find"]

WORKSPACE = "/app"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
MODEL_PORT = 8080
# Process 1 of an unsupervised sandbox. It keeps bubblewrap's user, whose death signal would not reach another one.
WAIT_AND_RUN = """echo '{"started": 1}' >&0; read -r go || exit 125; "$@" </dev/null; exit $?"""
MODEL_SOCKET = "model.sock"
PYTHON = "/usr/bin/python3"
ENTRY = Path(__file__).with_name("sandbox_entry.py")
FIRST_UID, UIDS = 2_000_000_000, 1 << 20  # beyond what subordinate ids, systemd and login accounts use


class SandboxMissing(RuntimeError):
    """This machine cannot run sandboxes; the message says how to fix that."""


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Limits:
    """Limits of the kernel, per process except `processes` (per sandbox). 0 = none."""

    memory_mb: int = 0  # address space; Node and other virtual machines reserve gigabytes: give them 0
    processes: int = 64
    disk_mb: int = 64  # largest file, and size of /tmp
    open_files: int = 1024


@dataclass(frozen=True)
class Sandbox:
    """What to run. With `model_folder` (it holds the proxy's socket under the name MODEL_SOCKET) the command finds the
    model API at http://127.0.0.1:MODEL_PORT; `supervised` alone gives the same signals and exit report without it."""

    command: tuple[str, ...]
    workspace: Path
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    limits: Limits = Limits()
    model_folder: Path | None = None
    supervised: bool = False
    host_network: bool = False


# ------------------------------------------------------------------------------------------------- finding the tools

FIXES = """To fix:
  bubblewrap not installed   Debian/Ubuntu: apt-get install bubblewrap   Fedora: dnf install bubblewrap
  user namespaces are off    Debian: sysctl -w kernel.unprivileged_userns_clone=1
                             Ubuntu: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0
                             Fedora, RHEL: sysctl -w user.max_user_namespaces=15000
  inside a container         start it with --privileged, or --cap-add SYS_ADMIN --security-opt seccomp=unconfined
                             --security-opt apparmor=unconfined --security-opt systempaths=unconfined"""


@dataclass(frozen=True)
class Bubblewrap:
    """The sandbox tools of this machine, tried out by `find`."""

    bwrap: str
    prlimit: str
    setpriv: str  # "" = user namespace
    options: frozenset[str]
    etc: Path

    async def start(self, sandbox: Sandbox, output: Callable[[bytes], None] | None = None) -> Running:
        """Start the sandbox; `output` gets what its processes write. Call from the event loop's thread: the sandbox
        dies with the thread that started it. Raises SandboxFailed."""
        uid = FIRST_UID + secrets.randbelow(UIDS) if self.setpriv else 1000
        running = Running(output, supervised=sandbox.supervised or sandbox.model_folder is not None)
        try:
            if self.setpriv:
                writable = [sandbox.workspace, *(m.source for m in sandbox.mounts if m.writable)]
                await asyncio.to_thread(_chown, writable, uid)
            running.spawn(self._command(sandbox, uid, running), sandbox.env)
            await running.confirm()
        except OSError as error:
            running.abandon()
            raise SandboxFailed(f"the sandbox cannot start: {error}") from error
        except BaseException:
            await running.kill()
            raise
        return running

    def _command(self, sandbox: Sandbox, uid: int, running: Running) -> list[str]:
        command = [self.bwrap, "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
        command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if not sandbox.host_network:
            command += ["--unshare-net"]
        if self.setpriv:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        else:
            command += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
            command += ["--disable-userns"] if "--disable-userns" in self.options else []
        command += self._files(sandbox, uid, running)
        command += ["--chdir", WORKSPACE, "--", *_limits(self.prlimit, sandbox.limits)]
        own_user: list[str] = []
        if self.setpriv:
            own_user = [self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
            own_user += ["--inh-caps=-all", "--bounding-set=-all"]
        if running.supervised:
            path = f"/run/model/{MODEL_SOCKET}" if sandbox.model_folder is not None else "-"
            command += [*own_user, PYTHON, "-I", "-S", "/run/sandbox_entry.py", path, str(MODEL_PORT)]
        else:
            command += ["/bin/sh", "-c", WAIT_AND_RUN, "sh", *own_user]
        return command + list(sandbox.command)

    def _files(self, sandbox: Sandbox, uid: int, running: Running) -> list[str]:
        disk_mb = sandbox.limits.disk_mb if "--size" in self.options else 0
        temporary = ["--perms", "1777", *(["--size", str(disk_mb << 20)] if disk_mb else []), "--tmpfs"]
        account = f"root:x:0:0::/:/bin/sh\nagent:x:{uid}:{uid}::/tmp:/bin/sh\n"
        args = _system_folders()
        args += ["--ro-bind", str(self.etc), "/etc"]
        args += ["--perms", "0644", "--ro-bind-data", str(running.data_fd(account)), "/etc/passwd"]
        args += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
        if sandbox.host_network:
            for path in ("/etc/resolv.conf", "/etc/ssl/certs", "/etc/pki"):
                args += ["--ro-bind-try", path, path]
        args += ["--proc", "/proc", "--dev", "/dev", *temporary, "/dev/shm", "--remount-ro", "/dev"]
        args += [*temporary, "/tmp", "--dir", "/run", "--bind", str(sandbox.workspace), WORKSPACE]
        if running.supervised:
            args += ["--ro-bind", str(ENTRY), "/run/sandbox_entry.py"]
        if sandbox.model_folder is not None:
            args += ["--ro-bind", str(sandbox.model_folder), "/run/model"]
            args += ["--symlink", f"model/{MODEL_SOCKET}", f"/run/{MODEL_SOCKET}"]
        for mount in sandbox.mounts:
            args += _parents(mount.target)
            args += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
        return [*args, "--remount-ro", "/"]


async def find(scratch: Path) -> Bubblewrap:
    """The working sandbox tools of this machine; files they need are kept in `scratch`. Raises SandboxMissing."""
    bwrap, prlimit = shutil.which("bwrap"), shutil.which("prlimit", path="/usr/bin:/usr/sbin:/bin")
    setpriv = shutil.which("setpriv", path="/usr/bin:/usr/sbin:/bin")
    if bwrap is None or prlimit is None or not os.access(PYTHON, os.X_OK):
        absent = "bwrap" if bwrap is None else "prlimit (package util-linux)" if prlimit is None else PYTHON
        raise SandboxMissing(f"sandboxes need {absent}, which this machine does not have.\n{FIXES}")
    usage = subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False)
    options = frozenset(word for word in (usage.stdout + usage.stderr).split() if word.startswith("--"))
    scratch.mkdir(parents=True, exist_ok=True)
    etc = _minimal_etc(scratch / "etc")
    reasons = []
    for own_user in [setpriv or "", ""] if os.geteuid() == 0 and setpriv else [""]:
        tools = Bubblewrap(bwrap, prlimit, own_user, options, etc)
        reason = await _try_out(tools, scratch / "probe")
        if reason is None:
            return tools
        reasons.append(reason)
    raise SandboxMissing(f"{bwrap} cannot make sandboxes on this machine: {'; '.join(reasons)}\n{FIXES}")


async def _try_out(tools: Bubblewrap, workspace: Path) -> str | None:
    workspace.mkdir(exist_ok=True)
    said: list[bytes] = []
    try:
        running = await tools.start(Sandbox(("/bin/sh", "-c", "true"), workspace, supervised=True), said.append)
        ended = await running.wait(10.0)
    except SandboxFailed as error:
        return str(error)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return None if ended.code == 0 else b"".join(said).decode("utf-8", "replace").strip() or f"ended as {ended}"


def _system_folders() -> list[str]:
    args = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_FOLDERS[1:]:
        if os.path.islink(name):
            args += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            args += ["--ro-bind", name, name]
    return args


def _parents(target: str) -> list[str]:
    """The folders above a mount. Those that bubblewrap makes by itself are closed to the sandbox's own user."""
    first = target.strip("/").split("/")[0]
    if f"/{first}" in SYSTEM_FOLDERS:
        return []
    return [word for parent in reversed(Path(target).parents[:-1]) for word in ("--dir", str(parent))]


def _limits(prlimit: str, limits: Limits) -> list[str]:
    args = [prlimit, "--core=0"]
    args += [f"--as={limits.memory_mb << 20}"] if limits.memory_mb else []
    args += [f"--nproc={limits.processes}"] if limits.processes else []
    args += [f"--fsize={limits.disk_mb << 20}"] if limits.disk_mb else []
    args += [f"--nofile={limits.open_files}"] if limits.open_files else []
    return [*args, "--"]


def _minimal_etc(etc: Path) -> Path:
    for folder in ("alternatives", "ssl/certs", "pki"):
        (etc / folder).mkdir(parents=True, exist_ok=True)
    texts = {
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
        "group": "root:x:0:\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "passwd": "",
        "resolv.conf": "",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
    for name in ("ld.so.cache", "ssl/openssl.cnf"):
        if Path("/etc", name).is_file():
            shutil.copyfile(Path("/etc", name), etc / name)
    for path in (etc, *etc.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # readable inside whatever the caller's umask is
    return etc


def _chown(folders: list[Path], uid: int) -> None:
    """Writable folders belong to the sandbox's own user."""
    for folder in folders:
        os.lchown(folder, uid, uid)
        for root, names, files in os.walk(folder):
            for name in (*names, *files):
                os.lchown(os.path.join(root, name), uid, uid)
