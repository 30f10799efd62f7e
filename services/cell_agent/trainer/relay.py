"""How commands reach the ranks of a cell, and replies the agent.

The control rank reads frames from the agent's socket in a thread (so that Train commands can be queued ahead) and
hands each, in order, to all ranks over the cell's CPU group. Invariant: `next` returns the same command on every
rank; when the agent is gone it returns Exit.
"""

from __future__ import annotations

import queue
import threading

import msgspec
import torch
import torch.distributed as dist

from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.child import connect, read_frame, show_life, write_frame
from services.cell_agent.trainer.parallel import Parallel

DRAIN = protocol.EndBatch(id=0)  # nobody's command: the pipeline runs dry because nothing follows for now


class Relay:
    def __init__(self, parallel: Parallel, path: str) -> None:
        self._parallel = parallel
        self._pushed_back: protocol.Command | None = None
        self._socket = connect(path)
        if not parallel.is_control:
            show_life(self._socket, parallel.rank)
        else:
            self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            threading.Thread(target=self._listen, name="agent-socket", daemon=True).start()

    def next(self, idle_s: float | None = None) -> protocol.Command:
        """The next command. Blocks until there is one, or, with `idle_s`, for so long: then it is DRAIN."""
        if self._pushed_back is not None:
            command, self._pushed_back = self._pushed_back, None
            return command
        data = b""
        if self._parallel.is_control:
            try:
                data = self._arrived.get(timeout=idle_s)
            except queue.Empty:
                data = msgspec.msgpack.encode(DRAIN)
        if self._parallel.world > 1:
            data = self._spread(data)
        decoded: protocol.Command = msgspec.msgpack.decode(data, type=protocol.Command)
        return decoded

    def push_back(self, command: protocol.Command) -> None:
        """Return `command` once more from the next `next`."""
        self._pushed_back = command

    def reply(self, message: protocol.Reply) -> None:
        """Control rank only: send a reply to the agent."""
        if self._parallel.is_control:
            write_frame(self._socket, message)

    def live(self) -> None:
        """Control rank only: from now on the agent hears of this process."""
        if self._parallel.is_control:
            show_life(self._socket)

    def _spread(self, data: bytes) -> bytes:
        size = torch.tensor(len(data))
        dist.broadcast(size, 0, self._parallel.control)
        frame = torch.empty(int(size), dtype=torch.uint8)
        if self._parallel.is_control:
            frame.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(frame, 0, self._parallel.control)
        spread: bytes = frame.numpy().tobytes()
        return spread

    def _listen(self) -> None:
        while True:
            data = read_frame(self._socket)
            if data is None:
                self._arrived.put(msgspec.msgpack.encode(protocol.Exit(id=0)))
                return
            self._arrived.put(data)
