"""Which weights computed a KV page, and who may use it. Pure.

SGLang neither marks pages with the weights that computed them nor drops them at an update unless it is asked to. So
every call's pages live in a namespace of the prefix cache (`extra_key`) that names the weight version under which the
call was admitted. Invariant: a call never hits a page of another namespace, so a new call never hits a page of older
weights, whether or not the update flushed the cache.

Two policies for calls that are alive at an update:
- drop: they are recomputed (the updater retracts them and flushes); pages of mixed or older versions are not adopted.
- keep: they go on with their pages, as in-flight updates do. Such pages may be adopted by an engine with the same or
  newer weights, in a namespace of the moved call's own, so that nobody else can hit them.
"""

from __future__ import annotations

import re

from services.cell_agent.engine.kv.errors import KvStale

POLICIES = ("drop", "keep")
_NAMESPACE = re.compile(r"gyre:w=([^;]*);(?:lease=([^;]*);)?", re.S)


def namespace(version: str, rest: str = "") -> str:
    """Of calls admitted under `version`; `rest` is what the caller itself asked for."""
    return f"gyre:w={version};{rest}"


def private_namespace(oldest: str, lease: str, rest: str = "") -> str:
    """Of one moved call whose pages are not all of the current version."""
    return f"gyre:w={oldest};lease={lease};{rest}"


def parts(extra_key: str | None) -> tuple[str, str, str] | None:
    """(oldest version, lease or "", rest) of a namespace of ours, else None."""
    found = _NAMESPACE.match(extra_key or "")
    return None if found is None else (found[1], found[2] or "", (extra_key or "")[found.end() :])


def admitted(extra_key: str | None, version: str) -> str:
    """The namespace of a call that arrives with `extra_key`. One of ours is left as it is: the call was moved."""
    return namespace(version, extra_key or "") if parts(extra_key) is None else str(extra_key)


def renewed(extra_key: str | None, version: str) -> str:
    """The namespace of a call that holds no page and will be computed under `version`."""
    found = parts(extra_key)
    return namespace(version, found[2] if found else extra_key or "")


def adopted(oldest: str, newest: str, own: str, policy: str, lease: str, rest: str) -> str:
    """The namespace that pages computed between `oldest` and `newest` enter in an engine whose weights are `own`.
    Raises KvStale where the policy forbids their use."""
    if oldest == newest == own:
        return namespace(own, rest)
    if policy != "keep":
        raise KvStale(
            f"the pages were computed under weights {oldest}..{newest}, this engine has {own}; recompute, "
            "or allow it with the policy keep"
        )
    if not _not_newer(newest, own):
        raise KvStale(f"the pages were computed under weights {newest}, newer than this engine's {own}; recompute")
    return private_namespace(oldest, lease, rest)


def _not_newer(version: str, than: str) -> bool:
    if version.isdecimal() and than.isdecimal():
        return int(version) <= int(than)
    return version == than
