"""Names of things, and the subjects their facts are published on.

Invariant: every id is one NATS subject token (no dots, blanks or wildcards), and the id of a part starts with the id
of its whole: ``g000012`` > ``g000012x03`` > ``g000012x03a1c0007``. Numbers are zero-padded so that ids sort.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"[A-Za-z0-9_-]+\Z")
_REQUEST = re.compile(r"((.+x\d+)a\d+c\d+(?:p[A-Za-z0-9]+)?)-\d+\Z")

_AGENT = "cell-agent-"

SERVICES = ("control", "scheduler", "cell_agent", "proxy", "trajectory", "evaluator", "harness")


class BadId(ValueError):
    """An id that cannot be a subject token."""


def check(token: str) -> str:
    """Return `token` unchanged if it can stand in a subject, else raise BadId."""
    if not TOKEN.match(token):
        raise BadId(f"{token!r} cannot be an id: use letters, digits, '-' and '_' only")
    return token


def group_id(number: int) -> str:
    return f"g{number:06d}"


def eval_group_id(phase: str, eval_set: str, number: int) -> str:
    """Groups of an evaluation never mix with training groups: ``ev-before-heldout-000012``."""
    return check(f"ev-{phase}-{eval_set}-{number:06d}")


def execution_id(group: str, index: int) -> str:
    return f"{group}x{index:02d}"


def call_id(execution: str, attempt: int, number: int) -> str:
    return f"{execution}a{attempt}c{number:04d}"


def request_id(call: str, tries: int) -> str:
    """The id under which an engine knows one try of a call."""
    return f"{call}-{tries}"


def call_of(request: str) -> tuple[str, str] | None:
    """(call, execution) of an engine's request; None if it is no call of ours (a health check, say)."""
    found = _REQUEST.match(request)
    return (found[1], found[2]) if found else None


def batch_token(batch: int) -> str:
    return f"b{batch:05d}"


def micro_step_id(batch: int, number: int) -> str:
    return f"{batch_token(batch)}m{number:04d}"


def agent_service(cell: int) -> str:
    """The service that is a cell's agent, as ServiceDied and the supervisor name it."""
    return f"{_AGENT}{cell}"


def agent_cell(service: str) -> int | None:
    """The cell whose agent that service is; None for any other service."""
    number = service.removeprefix(_AGENT)
    return int(number) if service.startswith(_AGENT) and number.isdecimal() else None


def cell_token(cell: int) -> str:
    return f"cell{cell}"


def stream_name(run: str) -> str:
    return f"GYRE_{check(run)}"


def subject(run: str, service: str, entity: str, event: str) -> str:
    """``gyre.<run>.<service>.<entity id>.<event name>``; architecture.md, Events."""
    return f"gyre.{check(run)}.{check(service)}.{check(entity)}.{check(event)}"


def subject_filter(run: str, service: str = "*", entity: str = "*", event: str = "*") -> str:
    """A subject filter; ``*`` stands for any single token."""
    return f"gyre.{check(run)}.{service}.{entity}.{event}"


def dead_letter_subject(run: str, service: str) -> str:
    return subject(run, service, "dead", "dead_letter")
