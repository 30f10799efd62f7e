"""What a harness writes, kept within bounds.

Invariant: the log of one attempt holds at most HEAD + TAIL bytes: the beginning as it comes, the end once it is known.
"""

from __future__ import annotations

from pathlib import Path

HEAD = 64 * 1024
TAIL = 64 * 1024


class BoundedLog:
    """Appends to `path`; several attempts of an execution stand one after the other."""

    def __init__(self, path: Path, title: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.write(f"--- {title}\n".encode())
        self._room = HEAD
        self._tail = b""
        self._left_out = 0

    def write(self, data: bytes) -> None:
        if self._room > 0:
            self._file.write(data[: self._room])
            data, self._room = data[self._room :], self._room - len(data)
        self._tail += data
        if len(self._tail) > 2 * TAIL:
            self._cut()

    def close(self, last: str = "") -> None:
        self._cut()
        if self._left_out:
            self._file.write(f"\n--- {self._left_out} bytes left out\n".encode())
        self._file.write(self._tail + (f"--- {last}\n".encode() if last else b""))
        self._file.close()

    def _cut(self) -> None:
        over = len(self._tail) - TAIL
        if over > 0:
            self._left_out += over
            self._tail = self._tail[over:]
