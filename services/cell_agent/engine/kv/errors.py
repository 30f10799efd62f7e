"""What can be wrong with a hand-over, by name. Every one of them ends with the caller recomputing the prefix."""

from __future__ import annotations


class KvError(Exception):
    """Base. `kind` is the name that crosses HTTP."""

    @property
    def kind(self) -> str:
        return type(self).__name__


class KvUnsupported(KvError):
    """This engine's cache is not of a kind whose pages can be moved."""


class KvStale(KvError):
    """The pages were computed under other weights than the receiver may use."""


class KvMismatch(KvError):
    """The two engines do not lay out their pages alike."""


class KvNoRoom(KvError):
    """The receiver has no free KV slots, even after eviction."""


class KvUnknown(KvError):
    """No lease or adoption of that name."""


class KvRefused(KvError):
    """A request that cannot be carried out as it stands."""


class KvUnreachable(KvError):
    """The engine does not answer."""


class KvTransferFailed(KvError):
    """The pages did not arrive, or not in time."""


BY_KIND: dict[str, type[KvError]] = {
    c.__name__: c
    for c in (KvUnsupported, KvStale, KvMismatch, KvNoRoom, KvUnknown, KvRefused, KvUnreachable, KvTransferFailed)
}
