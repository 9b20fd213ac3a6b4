"""Which steps are watched: in them a part of the step is done once more (`canary.py`), and ranks compare what they hold (`drift.py`).

step of this process     1  2     4           8                       16 ...      early: a sample alone
                                           every     2 every     3 every          regular: a weight's update and the ranks too
"""

from __future__ import annotations

from samestep.program.program import Program
from samestep.runtime.guards.step_trials import is_split


def is_regular(step: int, every: int, taken: int, program: Program) -> bool:
    """Return whether a step, counted from 0, is one of `every` so many, or the first of a model with what no rule shows.

    `taken` is the number of steps of this process, with this one.
    """
    is_first = taken == 1 and bool(program.step.model.tried)
    return (every > 0 and (step + 1) % every == 0) or (is_first and is_split(program))


def is_early(every: int, taken: int, program: Program) -> bool:
    """Return whether samples are run again in this step, the first, second, fourth, eighth and so on of this process.

    What code begins to do after a while is found within twice that time, until the regular checks begin; what it does from
    the beginning, such as divide by the number of samples in a micro-batch, is found whether there are regular checks or not.
    """
    return taken & (taken - 1) == 0 and (taken == 1 or taken < every) and is_split(program)
