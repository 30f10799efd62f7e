"""The roles of a cell and the only ways from one to the next.

Invariant: a cell's role changes by `advance` alone, and a pair that is not in `TABLE` is an error, not a guess. A cell
serves new calls in `rollout` only; it holds gradients in `training` only; from any role it falls back to `offline`
when a new incarnation owns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    OFFLINE = "offline"  # nothing runs yet, or runs any more
    ROLLOUT = "rollout"  # the engine takes calls
    DRAINING = "draining"  # ordered to train; live calls end, new ones go elsewhere
    JOINING = "joining"  # no live calls; gets the snapshot of the open batch, or waits for one
    TRAINING = "training"  # claims micro-steps, or waits for the next batch of the burst
    RETURNING = "returning"  # the engine takes the weights of the ordered version, then serves


class Trigger(StrEnum):
    STARTED = "started"  # a new incarnation owns the cell
    READY = "ready"  # engine and trainer stand, the engine serves the current version
    ORDER_TRAINING = "order_training"
    DRAINED = "drained"
    JOINED = "joined"
    ORDER_ROLLOUT = "order_rollout"
    REFITTED = "refitted"


class IllegalTransition(RuntimeError):
    """A trigger that the role does not know; the cell must be started again."""


TABLE: Mapping[Role, Mapping[Trigger, Role]] = {
    # a cell that comes back in the middle of a burst may get its order before its engine stands
    Role.OFFLINE: {
        Trigger.READY: Role.ROLLOUT,
        Trigger.ORDER_TRAINING: Role.JOINING,
        Trigger.ORDER_ROLLOUT: Role.RETURNING,
    },
    Role.ROLLOUT: {Trigger.ORDER_TRAINING: Role.DRAINING, Trigger.ORDER_ROLLOUT: Role.RETURNING},
    Role.DRAINING: {Trigger.DRAINED: Role.JOINING, Trigger.ORDER_ROLLOUT: Role.RETURNING},
    Role.JOINING: {Trigger.JOINED: Role.TRAINING, Trigger.ORDER_ROLLOUT: Role.RETURNING},
    Role.TRAINING: {Trigger.ORDER_ROLLOUT: Role.RETURNING},
    # its engine has had no calls since it was drained (or keeps those it has, if the drain was called off)
    Role.RETURNING: {Trigger.REFITTED: Role.ROLLOUT, Trigger.ORDER_TRAINING: Role.DRAINING},
}


def advance(role: Role, trigger: Trigger) -> Role:
    """The role after `trigger`; IllegalTransition if there is no such way."""
    if trigger is Trigger.STARTED:
        return Role.OFFLINE
    try:
        return TABLE[role][trigger]
    except KeyError:
        allowed = ", ".join(TABLE[role]) or "nothing"
        raise IllegalTransition(f"a cell that is {role} cannot take {trigger!s}; it can take {allowed}") from None


def allows(role: Role, trigger: Trigger) -> bool:
    return trigger is Trigger.STARTED or trigger in TABLE[role]
