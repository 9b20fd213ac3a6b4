"""Whether a forward reads weights that its run does not train: those of the instance that was given, or of another call of the build function.

A run trains parameters of its own. Functions and weak references that the model holds refer to them (`building/module_copies.py`); a
global variable, or an object of the code around, still holds the module that was copied, and code that calls it would compute with
its first values in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.building.first_read import FirstRead
from samestep.building.initial_values import Blueprint
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
        where = "another call of the build function has made" if reads.name in dict(plan.others) else "was given"
        raise ModelError(
            f"the forward reads {reads.name} of the model instance that {where}, from a global variable or an object outside of the "
            "model, and a run trains parameters of its own: the forward would see the first values in every step; a module that is "
            "read from self works"
        )
