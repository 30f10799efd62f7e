"""Errors that are the user's to fix: shown as one message, without a traceback."""

from __future__ import annotations

from cli.history import NoSuchRun
from cli.preflight import NoServer, PortTaken
from cli.up import NoTasks
from cli.usage import UsageError
from deploy.local import RunBusy, RunFailed
from services.harness.profiles import HarnessMissing
from services.harness.setup import SetupFailed
from shared.config_check import ConfigError
from shared.nats_server import NatsServerMissing
from shared.sandbox import SandboxMissing

EXPECTED = (
    NoSuchRun,
    NoTasks,
    NoServer,
    PortTaken,
    RunBusy,
    RunFailed,
    ConfigError,
    HarnessMissing,
    NatsServerMissing,
    SandboxMissing,
    SetupFailed,
    UsageError,
)
