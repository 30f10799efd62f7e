"""Which pages peers can read, and for which lease. Pure: what is registered where is told to two callbacks.

Invariants: a region is readable exactly while some lease needs a page of it; regions never overlap (Mooncake refuses
overlaps); no page is readable after the pin under which it was made readable is given up. Leases share pages (calls of
one group share a prompt), so a region outlives the lease that opened it while another lease needs it, and the pin of
the opener is kept until then: `hide` says which pins may go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Region:
    """`pages` pages from slot `first`."""

    first: int
    pages: int
    opener: str
    users: set[str] = field(default_factory=set)


class Exposure:
    """`page`: slots per page. `register`/`unregister` get (first slot, pages)."""

    def __init__(self, page: int, register: Callable[[int, int], None], unregister: Callable[[int, int], None]) -> None:
        self.page = page
        self._register, self._unregister = register, unregister
        self._regions: dict[int, Region] = {}  # by first slot
        self._of_page: dict[int, Region] = {}  # by first slot of a page
        self._closed: set[str] = set()

    @property
    def pages(self) -> int:
        return len(self._of_page)

    def expose(self, lease: str, starts: Sequence[int]) -> list[tuple[int, int]]:
        """Make the pages that begin at `starts` (in token order) readable for `lease`. Returns (first slot, pages) runs
        in the same order, none of which crosses a region."""
        try:
            for first, pages in joined(sorted({s for s in starts if s not in self._of_page}), self.page):
                self._register(first, pages)
                region = self._regions[first] = Region(first, pages, lease)
                region.users.add(lease)  # so that a failure further on closes it again
                self._of_page |= {first + i * self.page: region for i in range(pages)}
        except BaseException:
            self.hide(lease)
            raise
        for start in starts:
            self._of_page[start].users.add(lease)
        runs: list[tuple[int, int]] = []
        for start in starts:
            last = runs[-1] if runs else None
            follows = last is not None and start == last[0] + last[1] * self.page
            if last is not None and follows and self._of_page[start] is self._of_page[last[0]]:
                runs[-1] = (last[0], last[1] + 1)
            else:
                runs.append((start, 1))
        return runs

    def hide(self, lease: str) -> set[str]:
        """`lease` needs nothing any more. Returns the leases, all hidden, whose pins may go now."""
        self._closed.add(lease)
        for region in list(self._regions.values()):
            region.users.discard(lease)
            if not region.users:
                self._close(region)
        openers = {region.opener for region in self._regions.values()}
        free = self._closed - openers
        self._closed -= free
        return free

    def hide_all(self) -> None:
        """Close everything; the pins are void."""
        for region in list(self._regions.values()):
            self._close(region)
        self._closed.clear()

    def _close(self, region: Region) -> None:
        self._unregister(region.first, region.pages)
        del self._regions[region.first]
        for i in range(region.pages):
            del self._of_page[region.first + i * self.page]


def joined(starts: Sequence[int], page: int) -> list[tuple[int, int]]:
    """Ascending page starts as (first slot, pages) runs."""
    runs: list[tuple[int, int]] = []
    for start in starts:
        if runs and start == runs[-1][0] + runs[-1][1] * page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((start, 1))
    return runs
