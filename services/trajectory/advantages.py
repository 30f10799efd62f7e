"""Group-relative advantages.

Owns: reward -> advantage inside one group. Invariant: advantages of a group sum to zero (up to rounding), and a group
that holds no comparison has advantage exactly 0.0 for every member, so that nothing of it is packed.

advantage_i = (r_i - mean) / (std + STD_EPS), mean and population std over the counted executions of the group (scored
ones with their score, placeholders with reward 0). Excluded executions are in no statistic.

What biases the estimate, and what is done about it:
- The baseline contains r_i itself: the gradient is scaled by (n-1)/n. Same for all groups of one size; left as it is.
- Dividing by the standard deviation gives groups of nearly equal rewards (very easy or very hard tasks) the same pull
  as mixed ones. `training.advantage_std: false` switches it off.
- Excluding an execution is only neutral if exclusion does not depend on what the policy did. Evaluator failures are
  taken as such; executions without anything assessable at the end of the overall budget are long ones, so a group
  that lost some leans towards what finishes in time. The counts are in GroupReady: watch them.
- A placeholder (its harness never worked) lowers the mean although the policy did nothing wrong; it has no tokens, so
  it only shifts the others up. With fewer than two scored executions that shift would be all there is: such a group
  gets zero advantages.
- Groups of equal rewards train nothing but stay in the divisor of the loss (BatchSealed.executions): the step size
  does not grow when fewer groups of a batch carry a signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

STD_EPS = 1e-6
EQUAL = 1e-9
"""A reward (0..1) this close to the mean is equal to it: the rest is rounding."""


def group_advantages(scored: Mapping[str, float], placeholders: tuple[str, ...], *, std: bool) -> dict[str, float]:
    """Advantage of every counted execution: `scored` (execution -> score) and `placeholders` (reward 0).

    Zero for all if fewer than two executions are scored or all rewards are equal."""
    rewards = {**scored, **dict.fromkeys(placeholders, 0.0)}
    values = list(rewards.values())
    if len(scored) < 2:
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(values) / len(values)
    scale = 1.0
    if std:
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in values) / len(values)) + STD_EPS
    return {name: 0.0 if abs(r - mean) <= EQUAL else (r - mean) / scale for name, r in rewards.items()}
