"""Errors that are the user's to fix: shown as one message, without a traceback."""

from __future__ import annotations

from cli.history import NoSuchRun
from cli.up import NoTasks
from cli.usage import UsageError
from deploy.local import RunBusy, RunFailed
from shared.config_check import ConfigError
from shared.nats_server import NatsServerMissing

EXPECTED = (NoSuchRun, NoTasks, RunBusy, RunFailed, ConfigError, NatsServerMissing, UsageError)
