"""Continuous 1F1B: one pipeline start-up and one drain, however many micro-steps arrive and whenever they do.

Owns the order of forwards, backwards and transfers between pipeline stages. Invariant: whether another micro-step
follows is asked (on all ranks at once) only at points where every stage stands at the same place of the schedule, so
fused sends and receives always meet; gradients only accumulate, nothing here zeroes, scales or reduces them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_type
from torch import Tensor

from services.cell_agent.trainer.microsteps import Prepared

# Megatron's form: (step, model) -> (output, output -> (loss, tokens, report))
ForwardStep = Callable[[Prepared, Any], tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]]


@dataclass
class _Flight:
    step: Prepared
    received: Any
    output: Any
    seconds: float


class Stream:
    """The schedule of one rank. `take` blocks until the next micro-step and returns None when the stream ends; `done`
    is called, in order, when a micro-step's backward is through on this rank."""

    def __init__(
        self,
        model: Any,
        config: Any,
        forward: ForwardStep,
        take: Callable[[], Prepared | None],
        done: Callable[[Prepared, float], None],
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self._model, self._config, self._forward = model, config, forward
        self._take, self._done = take, done
        self._context = groups.cp.size()
        self._link = P2PCommunicator(pp_group=groups.pp, config=config)
        stage, stages = groups.pp.rank(), groups.pp.size()
        self._first, self._last = stage == 0, stage == stages - 1
        self._ahead = stages - 1 - stage  # forwards this stage is ahead of its backwards
        self._flying: deque[_Flight] = deque()

    def run(self, step: Prepared | None) -> int:
        """Compute `step` and all that `take` yields after it, then drain. Returns how many there were."""
        count = 0
        received: Any = None
        has_received = False
        while step is not None:
            if not has_received:
                received = self._link.recv_forward(self._shape(step), self._first)
            flight = self._fly(step, received, count)
            self._flying.append(flight)
            count += 1
            received, has_received = None, False
            if len(self._flying) <= self._ahead:
                self._link.send_forward(flight.output, self._last)
                step = self._take()
                continue
            oldest = self._flying.popleft()
            gradient = self._link.send_forward_recv_backward(flight.output, self._shape(oldest.step), self._last)
            upstream = self._backward(oldest, gradient)
            step = self._take()
            if step is None:
                self._link.send_backward(upstream, self._first)
            else:
                received = self._link.send_backward_recv_forward(upstream, self._shape(step), self._first)
                has_received = True
        self._drain()
        return count

    def _drain(self) -> None:
        while self._flying:
            oldest = self._flying.popleft()
            gradient = self._link.recv_backward(self._shape(oldest.step), self._last)
            self._link.send_backward(self._backward(oldest, gradient), self._first)

    def _fly(self, step: Prepared, received: Any, index: int) -> _Flight:
        started = time.perf_counter()
        output, _ = schedules.forward_step(
            self._forward,
            step,
            self._model,
            1,
            received,
            [],
            self._config,
            cp_group_size=self._context,
            current_microbatch=index,
            is_last_stage=self._last,
        )
        return _Flight(step, received, output, time.perf_counter() - started)

    def _backward(self, flight: _Flight, gradient: Any) -> Any:
        started = time.perf_counter()
        kind = get_model_type(self._model)
        upstream = schedules.backward_step(flight.received, flight.output, gradient, kind, self._config)
        self._done(flight.step, flight.seconds + time.perf_counter() - started)
        return upstream

    def _shape(self, step: Prepared) -> list[tuple[int, int, int]]:
        return [(len(step.tokens), 1, self._config.hidden_size)]
