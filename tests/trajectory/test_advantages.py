import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from services.trajectory.advantages import group_advantages

rewards = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=20)


def _named(values: list[float]) -> dict[str, float]:
    return {f"x{i}": v for i, v in enumerate(values)}


@given(rewards, st.integers(0, 5), st.booleans())
def test_they_sum_to_zero_and_keep_the_order_of_rewards(values: list[float], placeholders: int, std: bool) -> None:
    scored = _named(values)
    names = tuple(f"p{i}" for i in range(placeholders))
    advantages = group_advantages(scored, names, std=std)
    assert set(advantages) == set(scored) | set(names)
    assert abs(math.fsum(advantages.values())) < 1e-6 * len(advantages)
    reward = {**scored, **dict.fromkeys(names, 0.0)}
    ranked = sorted(advantages, key=lambda name: reward[name])
    for low, high in itertools.pairwise(ranked):
        assert advantages[low] <= advantages[high]


def test_known_values() -> None:
    assert group_advantages({"a": 1.0, "b": 0.0}, (), std=False) == {"a": 0.5, "b": -0.5}
    with_std = group_advantages({"a": 1.0, "b": 0.0}, (), std=True)
    assert math.isclose(with_std["a"], 1.0, rel_tol=1e-5)
    assert group_advantages({"a": 1.0, "b": 0.5}, ("c",), std=False) == {"a": 0.5, "b": 0.0, "c": -0.5}


@given(st.floats(0, 1), st.integers(1, 16), st.booleans())
def test_equal_rewards_give_exact_zeros(value: float, n: int, std: bool) -> None:
    assert set(group_advantages(_named([value] * n), (), std=std).values()) == {0.0}


def test_one_scored_execution_is_no_comparison() -> None:
    assert group_advantages({"a": 1.0}, ("p", "q"), std=True) == {"a": 0.0, "p": 0.0, "q": 0.0}
    assert group_advantages({}, ("p", "q"), std=True) == {"p": 0.0, "q": 0.0}
    assert group_advantages({}, (), std=True) == {}
