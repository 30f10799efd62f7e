"""The pure parts of KV hand-over: what is readable, which pages pair up, whose pages may be used, when moving pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.cell_agent.engine.kv import pages, rates, versions
from services.cell_agent.engine.kv.errors import KvMismatch, KvStale, KvUnsupported
from services.cell_agent.engine.kv.exposure import Exposure, joined

PAGE = 4


class Registry:
    """A scripted Transfer Engine: refuses overlaps and double closing, as the real one does."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}

    def register(self, first: int, pages: int) -> None:
        taken = self.slots()
        assert not taken & set(range(first, first + pages * PAGE)), "overlap"
        self.open[first] = pages

    def unregister(self, first: int, pages: int) -> None:
        assert self.open.pop(first) == pages

    def slots(self) -> set[int]:
        return {s for first, pages in self.open.items() for s in range(first, first + pages * PAGE)}


lease_pages = st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True)
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 5), lease_pages), max_size=25)


@given(steps)
def test_only_leased_pages_are_readable_and_no_pin_goes_before_its_pages_are_closed(script) -> None:
    registry = Registry()
    exposure = Exposure(PAGE, registry.register, registry.unregister)
    alive: dict[str, set[int]] = {}
    pinned: dict[str, set[int]] = {}
    for opens, number, numbers in script:
        lease, starts = f"L{number}", [n * PAGE for n in numbers]
        if opens and lease not in pinned:
            pinned[lease] = alive[lease] = {s + i for s in starts for i in range(PAGE)}
            runs = exposure.expose(lease, starts)
            assert [first + i * PAGE for first, count in runs for i in range(count)] == starts
            for first, count in runs:  # no run crosses a region
                assert any(f <= first and first + count * PAGE <= f + c * PAGE for f, c in registry.open.items())
        elif not opens and lease in alive:
            del alive[lease]
            for over in exposure.hide(lease):
                del pinned[over]
        readable = registry.slots()
        assert all(slots <= readable for slots in alive.values())
        assert readable <= set().union(*pinned.values())
        assert exposure.pages * PAGE == len(readable)
    for lease in list(alive):
        for over in exposure.hide(lease):
            del pinned[over]
    assert not registry.open
    assert not pinned


def test_a_lease_that_cannot_be_registered_leaves_nothing_open() -> None:
    registry = Registry()

    def register(first: int, pages: int) -> None:
        if first == 8 * PAGE:
            raise OSError("no more regions")
        registry.register(first, pages)

    exposure = Exposure(PAGE, register, registry.unregister)
    with pytest.raises(OSError, match="no more"):
        exposure.expose("L", [0, 8 * PAGE])
    assert not registry.open
    assert exposure.pages == 0


def test_flushing_closes_everything_at_once() -> None:
    registry = Registry()
    exposure = Exposure(PAGE, registry.register, registry.unregister)
    exposure.expose("A", [0, 4])
    exposure.expose("B", [4, 8])
    exposure.hide_all()
    assert not registry.open
    assert exposure.hide("A") == {"A"}


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30, unique=True), st.data())
def test_every_page_of_the_lease_goes_to_the_slot_of_the_same_position(remote_pages, data) -> None:
    skip = data.draw(st.integers(0, len(remote_pages)))
    numbers = st.lists(st.integers(0, 200), unique=True, min_size=len(remote_pages), max_size=len(remote_pages))
    local = [n * PAGE for n in data.draw(numbers)[skip:]]
    remote = [n * PAGE for n in remote_pages]
    matches = pages.matched(joined(remote, PAGE), local_runs := joined(local, PAGE), skip, PAGE)
    pairs = [(m.remote + i * PAGE, m.local + i * PAGE) for m in matches for i in range(m.pages)]
    assert pairs == list(zip(remote[skip:], local, strict=True))
    for match in matches:
        first, count = local_runs[match.run]
        assert first <= match.local
        assert match.local + match.pages * PAGE <= first + count * PAGE


def test_pages_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(KvMismatch):
        pages.matched([(0, 3)], [(0, 2)], 0, PAGE)
    with pytest.raises(KvMismatch):
        pages.matched([(0, 1)], [(0, 2)], 0, PAGE)


def test_a_slice_is_the_bytes_of_its_slots() -> None:
    buffers = [torch.arange(32 * 6, dtype=torch.float32).view(32, 2, 3), torch.zeros(32, 1, 2, dtype=torch.bfloat16)]
    pool = pages.pool(buffers, PAGE, 0, 1)
    first, second = pool.slices(8, 2)
    assert first.view(torch.float32).tolist() == buffers[0][8:16].flatten().tolist()
    assert first.data_ptr() == pool.bases[0] + 8 * pool.strides[0]
    assert second.nbytes == 8 * pool.strides[1]
    assert pool.layout != pages.pool(buffers, PAGE, 1, 2).layout
    with pytest.raises(KvUnsupported):
        pages.pool([torch.zeros(4, 4).t()], PAGE, 0, 1)


def test_slots_must_be_whole_pages() -> None:
    assert pages.starts(torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), PAGE) == [8, 0]
    with pytest.raises(KvMismatch):
        pages.starts(torch.tensor([8, 9, 10, 12]), PAGE)


words = st.text(max_size=6)


@given(words.filter(lambda w: ";" not in w), words)
def test_a_new_call_enters_the_namespace_of_the_present_weights(version, rest) -> None:
    key = versions.admitted(rest, version)
    assert versions.parts(key) == (version, "", rest)
    assert versions.admitted(key, version + "1") == key  # a moved call keeps the pages it asks for
    assert versions.renewed(key, version + "1") == versions.namespace(version + "1", rest)


def test_fresh_pages_are_shared_and_others_are_private_or_refused() -> None:
    assert versions.adopted("3", "3", "3", "drop", "L", "x") == versions.admitted("x", "3")
    for oldest, newest, own in (("2", "3", "3"), ("2", "2", "3"), ("", "3", "3")):
        with pytest.raises(KvStale):
            versions.adopted(oldest, newest, own, "drop", "L", "")
        private = versions.adopted(oldest, newest, own, "keep", "L", "x")
        assert private != versions.admitted("x", own)
        assert versions.parts(private) == (oldest, "L", "x")
    with pytest.raises(KvStale, match="newer"):
        versions.adopted("10", "10", "9", "keep", "L", "")
    assert versions.adopted("9", "9", "10", "keep", "L", "")


def test_moving_is_chosen_where_it_is_faster() -> None:
    slow_link = rates.Rates(transfer_bytes_s=1e6, prefill_tokens_s=10_000, fixed_s=0.02)
    assert not rates.choose(1000, 1000, slow_link).transfer  # 1.02 s against 0.1 s
    fast_link = rates.Rates(transfer_bytes_s=1e9, prefill_tokens_s=10_000, fixed_s=0.02)
    assert rates.choose(1000, 1000, fast_link).transfer
    assert not rates.choose(100, 1000, fast_link).transfer  # short prefix: 0.0201 s against 0.01 s
    assert not rates.choose(0, 1000, fast_link).transfer


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1e3, 1e12), st.floats(1, 1e7))
def test_the_choice_is_the_smaller_estimate(tokens, size, bytes_s, tokens_s) -> None:
    choice = rates.choose(tokens, size, rates.Rates(bytes_s, tokens_s, 0.01))
    assert choice.transfer == (choice.transfer_s <= choice.recompute_s)


def test_what_was_not_measured_is_tried_and_then_known() -> None:
    fresh = rates.Rates()
    assert rates.choose(10, 10, fresh).transfer
    known = fresh.after_transfer(1000, 0.1, 0.3).after_prefill(100, 0.01)
    assert known.transfer_bytes_s == pytest.approx(10_000)
    assert known.prefill_tokens_s == pytest.approx(10_000)
    assert fresh.fixed_s < known.fixed_s < 0.2
    assert known.after_transfer(0, 0.0, 0.1) == known
