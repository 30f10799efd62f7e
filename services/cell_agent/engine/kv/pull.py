"""Reading a lease's pages into slots of our own, in a thread.

Invariant: until `done` is set the slots must not be used; then `error` says whether they hold the lease's pages. Until
`quiet` is set they may still be written (a peer that hangs was given up), so they must not be freed. The scheduler
never waits for the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from services.cell_agent.engine.kv import pulse
from services.cell_agent.engine.kv.errors import KvError
from services.cell_agent.engine.kv.pages import Match, Pool, Runs
from services.cell_agent.engine.kv.wire import RankPages
from services.cell_agent.transfer.mooncake import PeerUnreachable, Piece, TransferError, TransferSession

log = logging.getLogger("gyre.kv")


class Pull:
    """One transfer. `events`: device work that must be over before the slots are written (empty on a CPU)."""

    def __init__(
        self,
        session: TransferSession,
        secret: str,
        peer: RankPages,
        pool: Pool,
        runs: Runs,
        matches: Sequence[Match],
        events: Sequence[Any],
    ) -> None:
        self._session, self._secret, self._peer, self._pool = session, secret, peer, pool
        self._runs, self._matches, self._events = runs, matches, events
        self.done, self.quiet = threading.Event(), threading.Event()
        self.error, self.nbytes, self.seconds = "", 0, 0.0
        threading.Thread(target=self._run, name="kv-pull", daemon=True).start()

    def _run(self) -> None:
        started = time.perf_counter()
        late: tuple[int, ...] = ()
        try:
            self._read()
        except PeerUnreachable as error:
            self.error, late = str(error), error.late
        except (KvError, TransferError) as error:
            self.error = str(error)
        except Exception as error:  # a fault of ours must reach whoever asks for the result
            log.exception("pulling pages failed")
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.seconds = time.perf_counter() - started
            self.done.set()
        self._session.until_quiet(late)
        self.quiet.set()

    def _read(self) -> None:
        for event in self._events:
            event.synchronize()
        pulse.check(self._peer.pulse, self._secret, self._peer.session)
        targets = [self._pool.slices(first, pages) for first, pages in self._runs]
        registered = []
        try:
            for tensor in (t for run in targets for t in run):
                self._session.register(tensor)
                registered.append(tensor)
            self.nbytes = self._session.read_pieces(self._peer.session, self._pieces(targets))
        finally:
            for tensor in registered:
                self._session.unregister(tensor)

    def _pieces(self, targets: Sequence[Sequence[Any]]) -> list[Piece]:
        page, strides, bases = self._pool.page, self._pool.strides, self._peer.bases
        return [
            Piece(
                address=bases[b] + match.remote * stride,
                into=targets[match.run][b],
                offset=(match.local - self._runs[match.run][0]) * stride,
                nbytes=match.pages * page * stride,
            )
            for b, stride in enumerate(strides)
            for match in self._matches
        ]
