"""scout whose tools take as long as builds and test runs do: `scout_slow_tools.py SCOUT EXECUTION MEDIAN_S TASK_SIGMA
EXECUTION_SIGMA [scout's arguments]`.

The time an execution spends in tools is lognormal with a factor that its group shares:

    ln seconds = ln median + task_sigma * z(group) + execution_sigma * z(execution)

and is spread evenly over its first TOOL_CALLS tool calls. It is a function of the execution's id only, so that runs
with the same seed and tasks meet the same work, whatever schedules them. Runs inside the sandbox: standard library
only.
"""

import hashlib
import math
import runpy
import sys
import time

TOOL_CALLS = 3


def normal(name):
    """A standard normal draw that depends on `name` only (Box and Muller)."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    u, v = (int.from_bytes(part, "big") / 2**64 for part in (digest[:8], digest[8:]))
    return math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)


def tool_seconds(execution, median, task_sigma, execution_sigma):
    group = execution.partition("x")[0]
    return median * math.exp(task_sigma * normal(group) + execution_sigma * normal(execution))


def slowed(body, pauses):
    """The same tool, after the next of `pauses` seconds (None left: at once)."""

    def run(settings, arguments):
        time.sleep(next(pauses, 0.0))
        return body(settings, arguments)

    return run


def main():
    program, execution, *law = sys.argv[1:6]
    seconds = tool_seconds(execution, *map(float, law))
    scout = runpy.run_path(program, run_name="scout")
    pauses = iter([seconds / TOOL_CALLS] * TOOL_CALLS)
    bodies = scout["TOOL_BODIES"]
    bodies.update({name: slowed(body, pauses) for name, body in bodies.items()})
    return scout["main"](sys.argv[6:])


if __name__ == "__main__":
    sys.exit(main())
