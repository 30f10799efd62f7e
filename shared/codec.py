"""MessagePack on the wire, typed both ways; token arrays as raw little-endian bytes.

Invariant: decode(encode(event)) == event, and unpack(pack(x)) == x bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import msgspec
import numpy as np
import numpy.typing as npt

from shared.events import EVENTS, NAME_OF, Event

_ANY_EVENT: Any = Union[EVENTS]  # noqa: UP007  (built from a tuple at run time)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_ANY_EVENT)


class UndecodableEvent(ValueError):
    """Bytes that are no known event; carries the reason for the dead letter."""


def event_name(event: Event) -> str:
    return NAME_OF[type(event)]


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(data: bytes) -> Event:
    """Decode one event; raises UndecodableEvent with the reason."""
    try:
        event: Event = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UndecodableEvent(str(error)) from error
    return event


def pack_ids(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Token ids [n] -> 4n bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """4n bytes -> int32 array [n] (read-only view)."""
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values: Sequence[float] | npt.NDArray[np.floating[Any]]) -> bytes:
    """Floats [n] -> 4n bytes (float32)."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> npt.NDArray[np.float32]:
    """4n bytes -> float32 array [n] (read-only view)."""
    return np.frombuffer(data, dtype="<f4")
