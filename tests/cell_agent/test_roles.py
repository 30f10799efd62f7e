"""The role table as a state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cell_agent.roles import TABLE, IllegalTransition, Role, Trigger, advance, allows


def test_one_burst_goes_round():
    way = [
        (Trigger.READY, Role.ROLLOUT),
        (Trigger.ORDER_TRAINING, Role.DRAINING),
        (Trigger.DRAINED, Role.JOINING),
        (Trigger.JOINED, Role.TRAINING),
        (Trigger.ORDER_ROLLOUT, Role.RETURNING),
        (Trigger.REFITTED, Role.ROLLOUT),
    ]
    role = Role.OFFLINE
    for trigger, expected in way:
        role = advance(role, trigger)
        assert role is expected


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("trigger", [t for t in Trigger if t is not Trigger.STARTED])
def test_what_the_table_does_not_name_is_refused(role, trigger):
    if allows(role, trigger):
        assert advance(role, trigger) is TABLE[role][trigger]
    else:
        with pytest.raises(IllegalTransition, match=str(role)):
            advance(role, trigger)


@pytest.mark.parametrize("role", list(Role))
def test_a_new_incarnation_is_offline_whatever_the_old_one_was(role):
    assert advance(role, Trigger.STARTED) is Role.OFFLINE


@pytest.mark.parametrize("role", [r for r in Role if r is not Role.OFFLINE])
def test_no_role_is_a_trap(role):
    """From every role a cell gets back to rollout by orders and their completion."""
    reached, new = set(), {role}
    while new:
        reached |= new
        new = {target for r in new for target in TABLE[r].values()} - reached
    assert Role.ROLLOUT in reached


@given(st.lists(st.sampled_from(list(Trigger)), max_size=40))
def test_gradients_are_only_reached_through_an_engine_without_calls(triggers):
    """Whatever is triggered: training follows joining, and joining follows draining or a start without an engine."""
    role = Role.OFFLINE
    for trigger in triggers:
        if not allows(role, trigger):
            continue
        before, role = role, advance(role, trigger)
        if role is Role.TRAINING:
            assert before is Role.JOINING
        if role is Role.JOINING:
            assert before in (Role.DRAINING, Role.OFFLINE)
