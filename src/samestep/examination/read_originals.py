"""Whether a forward reads weights that its run does not train: those that a variable holds, and not the module.

A run puts parameters of its own into modules, or the same parameters with other values. A variable around a function that holds a
parameter itself, or a view of one, has the first values in every step. So has a global variable that holds a module of another call of the
build function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.building.initial_values import Blueprint
from samestep.building.outside_reads import FirstRead
from samestep.errors import ModelError


@contextmanager
def refused_reads(plan: Blueprint) -> Iterator[None]:
    """Return the context of traced forwards, which must not read weights of which the run trains a copy.

    Raises:
        ModelError: one has.
    """
    trained = {id(param) for param in plan.module.parameters()}
    held = ((name, weight()) for name, weight in (*plan.given.items(), *plan.others))
    originals = [
        (name, weight)
        for name, weight in held
        if weight is not None and weight.requires_grad and id(weight) not in trained
    ]
    if not originals:
        yield
        return
    reads = FirstRead(originals)
    with reads.within(plan.module):
        yield
    if reads.name:
        whose = (
            "a module that another call of the build function has made"
            if reads.name in dict(plan.others)
            else "the model itself"
        )
        raise ModelError(
            "instance-read-elsewhere",
            f"the forward reads {reads.name} of {whose}, from a global variable or an object outside of the model, and a run trains the "
            "parameters that are in the modules: the forward would see the first values in every step; a module that is read from self works",
        )
