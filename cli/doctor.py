"""`gyre doctor`: what this machine has and lacks for running Gyre, each lack with its fix."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    name: str
    status: str  # ok, warning, missing
    detail: str
    fix: str = ""


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] == (3, 11)
    return Finding("python", "ok" if ok else "missing", version, "" if ok else "run `make setup` with Python 3.11")


def _module(module: str, what: str) -> Callable[[], Finding]:
    def probe() -> Finding:
        try:
            found = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  (an import can fail in any way; the reason is what is reported)
            return Finding(what, "missing", f"{module}: {type(error).__name__}: {error}", "run `make setup`")
        return Finding(what, "ok", f"{module} {getattr(found, '__version__', '')}".strip())

    return probe


def _distribution(name: str, what: str) -> Callable[[], Finding]:
    def probe() -> Finding:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return Finding(what, "ok", f"{name} {version(name)}")
        except PackageNotFoundError:
            return Finding(what, "missing", f"{name} is not installed", "run `make setup`")

    return probe


def _nats() -> Finding:
    from shared.nats_server import NatsServerMissing, find_server

    try:
        binary = find_server()
    except NatsServerMissing as error:
        return Finding("nats-server", "missing", str(error).splitlines()[0], "run `make setup`")
    out = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False, timeout=10)
    return Finding("nats-server", "ok", out.stdout.strip())


def _sandbox() -> Finding:
    binary = shutil.which("bwrap")
    if binary is None:
        return Finding(
            "sandbox", "missing", "no bwrap", "install the package bubblewrap (apt, dnf, pacman), or `make setup`"
        )
    probe = [binary, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
    out = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=10)
    if out.returncode:
        fix = "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1), or run as root"
        return Finding("sandbox", "missing", out.stderr.strip()[:200], fix)
    return Finding("sandbox", "ok", f"{binary} works")


def _memory() -> Finding:
    import psutil

    total = psutil.virtual_memory()
    text = f"{total.total / 2**30:.1f} GiB, {total.available / 2**30:.1f} GiB free"
    if total.available < 12 * 2**30:
        return Finding(
            "memory", "warning", text, "the demo's three cells need about 12 GiB; lower cells.count or cells.standalone"
        )
    return Finding("memory", "ok", text)


def _cpus() -> Finding:
    count = len(os.sched_getaffinity(0))
    fix = "" if count >= 2 else "the demo is sized for 2 cores; expect it to take longer"
    return Finding("processors", "ok" if count >= 2 else "warning", f"{count} usable", fix)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 2**30
    ok = free > 5
    return Finding(
        "disk",
        "ok" if ok else "warning",
        f"{free:.0f} GiB free here",
        "" if ok else "free some space: a run needs 1-2 GiB",
    )


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("accelerator", "ok", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return Finding("accelerator", "ok", "none: engine and trainer run on the CPU (named shims, see README)")


def examine() -> list[Finding]:
    """Probe everything; no probe stops another."""
    probes: list[Callable[[], Finding]] = [
        _python, _cpus, _memory, _disk, _nats, _sandbox,
        _distribution("sglang", "rollout engine"), _module("megatron.core", "trainer"),
        _module("mooncake.engine", "transfer"), _module("renderers", "renderers"), _module("torch", "torch"), _gpu,
    ]  # fmt: skip
    warnings.simplefilter("ignore")  # packages that tell of optional GPU parts are no news here
    findings = []
    for probe in probes:
        try:
            findings.append(probe())
        except Exception as error:  # noqa: BLE001  (doctor reports every failure as a finding)
            findings.append(
                Finding(probe.__name__.strip("_"), "missing", f"{type(error).__name__}: {error}", "run `make setup`")
            )
    return findings
