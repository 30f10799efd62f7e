"""Call classes by declarative rules per harness: harness_profiles/*.yaml, to which users can add.

Invariant: the class of a call depends only on its request, on the class of the call it continues and on the opening of
the execution's first call, so that a restarted proxy gives the same answer. What no rule knows is called auxiliary and
reported, never guessed.

A profile is a list of fingerprints for each of main, sub and auxiliary: which line of work a call belongs to. `summary`
says which calls of a line ask for a summary of it. A fingerprint holds when all its conditions hold; the first line in
the order auxiliary, sub, main that has a holding fingerprint is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from services.proxy.dialects.base import Request

BUILT_IN = Path(__file__).parent / "harness_profiles"


class ProfileError(ValueError):
    """A profile file that cannot be used; says which file and why."""


class When(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fingerprint: all given conditions must hold. Patterns are regular expressions, searched."""

    headers: dict[str, str] = {}
    """Header name (lower case) -> pattern its value must have."""
    system: str = ""
    """Pattern in the first system text."""
    first_user: str = ""
    """Pattern in the first user text."""
    last_user: str = ""
    """Pattern in the text of the last message, which must be a user message."""
    has_tools: bool | None = None
    """Whether the request has any tools."""
    tools: tuple[str, ...] = ()
    """Names that must be among the tools."""
    no_tools: tuple[str, ...] = ()
    """Names that must not be among the tools."""
    opening: Literal["", "first", "other"] = ""
    """first: the conversation begins as the execution's first call did. other: it begins differently."""
    continues: Literal["", "main", "sub", "auxiliary"] = ""
    """The call continues a recorded call of this line."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to read one harness."""

    name: str
    description: str = ""
    auxiliary: tuple[When, ...] = ()
    sub: tuple[When, ...] = ()
    main: tuple[When, ...] = ()
    summary: tuple[When, ...] = ()
    fold: tuple[str, ...] = ()
    """Patterns deleted from system texts before contexts are compared (version suffixes and the like)."""
    early_text: bool = False
    """Streamed text may be sent while it is generated. Only for harnesses that drop a turn whose stream was cut inside
    its text and ask again: others take the beginning for the whole."""

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(p) for p in self.fold)


class Surroundings(NamedTuple):
    """What a fingerprint can see beside the request."""

    parent_class: str  # class of the call that is continued, "" if none
    opens_first: bool  # the conversation begins as the first call of the execution did (or is the first)


def fingerprint(request: Request) -> str:
    """What a rule could hold on to: named in the warning about a call that no rule knows."""
    tools = ",".join(t.name for t in request.tools)
    agents = [f"{k}: {v[:80]}" for k, v in sorted(request.headers.items()) if "agent" in k and k != "user-agent"]
    agents += [f"user-agent: {request.headers.get('user-agent', '')[:60]}"]
    system = next((m.text for m in request.messages if m.role == "system"), "")
    last = request.messages[-1]
    return f"tools [{tools}]; {'; '.join(agents)}; system {system[:120]!r}; last {last.role} {last.text[:120]!r}"


class Verdict(NamedTuple):
    call_class: str
    known: bool


def classify(profile: Profile, request: Request, around: Surroundings) -> Verdict:
    for line, fingerprints in (("auxiliary", profile.auxiliary), ("sub", profile.sub), ("main", profile.main)):
        if _any(fingerprints, request, around):
            if line == "auxiliary":
                return Verdict("auxiliary", True)
            part = "summary" if _any(profile.summary, request, around) else "task"
            return Verdict(f"{line}_{part}", True)
    return Verdict("auxiliary", False)


def _any(fingerprints: Iterable[When], request: Request, around: Surroundings) -> bool:
    return any(_holds(when, request, around) for when in fingerprints)


def _holds(when: When, request: Request, around: Surroundings) -> bool:
    tools = {t.name for t in request.tools}
    first = "first" if around.opens_first else "other"
    return (
        when.opening in ("", first)
        and when.continues in ("", around.parent_class.partition("_")[0])
        and when.has_tools in (None, bool(tools))
        and tools.issuperset(when.tools)
        and tools.isdisjoint(when.no_tools)
        and all(re.search(p, request.headers.get(name, "")) for name, p in when.headers.items())
        and _found(when.system, request, "system")
        and _found(when.first_user, request, "user")
        and (not when.last_user or _last_user(when.last_user, request))
    )


def _found(pattern: str, request: Request, role: str) -> bool:
    if not pattern:
        return True
    text = next((m.text for m in request.messages if m.role == role), "")
    return re.search(pattern, text) is not None


def _last_user(pattern: str, request: Request) -> bool:
    last = request.messages[-1]
    return last.role == "user" and re.search(pattern, last.text) is not None


def load_profile(path: Path) -> Profile:
    try:
        profile = msgspec.yaml.decode(path.read_bytes(), type=Profile)
        for pattern in _patterns(profile):
            re.compile(pattern)
    except (msgspec.DecodeError, re.error) as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile


def _patterns(profile: Profile) -> Iterable[str]:
    yield from profile.fold
    for when in (*profile.auxiliary, *profile.sub, *profile.main, *profile.summary):
        yield from (when.system, when.first_user, when.last_user, *when.headers.values())


def for_harness(name: str, folders: Iterable[Path] = ()) -> Profile:
    """The profile named `name`, from the user's folders first, then built in; `default` if there is none."""
    for folder in (*folders, BUILT_IN):
        path = folder / f"{name}.yaml"
        if path.is_file():
            return load_profile(path)
    return load_profile(BUILT_IN / "default.yaml")
