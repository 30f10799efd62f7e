"""The agent's ends of the lines to a cell's workers: frames (child.py has the other ends), and which ranks are heard.

Each rank has one connection. The control rank's begins with Hello or Failed and carries commands and replies; that of
another rank carries its signs of life only.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from services.cell_agent.trainer import protocol

MAX_FRAME = 1 << 30


class OutOfStep(ConnectionError):
    """What came is no frame: nothing more can be read from the connection."""


def send_frame(writer: asyncio.StreamWriter, message: protocol.Message) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(4, "little") + data)


async def read_frame(reader: asyncio.StreamReader) -> protocol.Reply:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > MAX_FRAME:
        raise OutOfStep(f"a frame of {size} bytes from a training worker: the connection is out of step")
    reply: protocol.Reply = msgspec.msgpack.decode(await reader.readexactly(size), type=protocol.Reply)
    return reply


class Lines:
    """The connections of `world` ranks. `heard`: the ranks from which something came since somebody emptied it."""

    def __init__(self, world: int) -> None:
        self.heard: set[int] = set()
        self._missing = set(range(world))
        self._all_here = asyncio.Event()
        self._silent = dict.fromkeys(range(world), 0)
        self._greeting: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter, protocol.Reply]]
        self._greeting = asyncio.get_running_loop().create_future()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process has connected (for asyncio.start_unix_server)."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # its death is the watcher's business
            first = await read_frame(reader)
            if not isinstance(first, protocol.Alive):
                self._arrived(0)
                if self._greeting.done():  # nobody waits for it any more: the start took too long
                    writer.close()
                else:
                    self._greeting.set_result((reader, writer, first))
                return
            self._arrived(first.rank)
            while True:
                self.heard.add(first.rank)
                await read_frame(reader)
        writer.close()

    def _arrived(self, rank: int) -> None:
        self._missing.discard(rank)
        if not self._missing:
            self._all_here.set()

    async def greeting(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, protocol.Reply]:
        """The control rank's first reply, and its connection; if that is Hello, the other ranks have connected, too."""
        arrived = await self._greeting
        if isinstance(arrived[2], protocol.Hello):
            await self._all_here.wait()
        return arrived

    def count(self) -> dict[int, int]:
        """By rank, how often in a row nothing had come from it when this was called."""
        self._silent = {rank: 0 if rank in self.heard else n + 1 for rank, n in self._silent.items()}
        self.heard.clear()
        return self._silent
