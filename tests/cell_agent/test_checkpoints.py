from hypothesis import given
from hypothesis import strategies as st

from services.cell_agent.checkpoints import checkpoint_path, prune, superseded


def test_the_last_ones_stay(tmp_path):
    for version in range(1, 6):
        checkpoint_path(tmp_path, version).mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    prune(tmp_path, newest=5, keep=2, every=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["notes", "step-00004", "step-00005"]


def test_without_a_folder_there_is_nothing_to_prune(tmp_path):
    prune(tmp_path, newest=1, keep=2, every=1)


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(0, 5), st.integers(0, 7), st.data())
def test_the_newest_committed_one_always_stays(versions, keep, every, data):
    newest = data.draw(st.sampled_from(sorted(versions)))
    gone = superseded(sorted(versions), newest, keep, every)
    assert newest not in gone
    assert all(v in gone for v in versions if v > newest)
    assert sum(v not in gone for v in versions) <= max(keep, 1) + 1
