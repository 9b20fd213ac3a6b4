"""Whole updates: under zero=2 and 3 a weight whose optimizer needs all its elements at once goes to one rank.

Muon, Shampoo and SOAP orthogonalise or precondition a matrix, Adafactor and LARS take a mean or a norm of it: what one
element becomes depends on the others. ZeRO leaves a rank some rows of every matrix. So one all_to_all brings the parts of
each gradient to the owner of the weight, which keeps a copy of the weight and its optimizer state, and another one sends
the updated rows back (Liu et al. 2025, arXiv:2502.16982, gather on every rank; an owner for each does the work once). With
N ranks and P such weights each rank sends P/N elements twice. Under zero=1 no collective is added: `program/buckets.py`
lays each weight into the chunk of one rank.

```
... reductions ─ all_to_all (gradients) ─ all_reduce of scalars ─ update ─ all_to_all (weights)
```
"""

from __future__ import annotations

from collections.abc import Iterator

from samestep.program.bodies import UPDATE_BODY
from samestep.program.buckets import owners_of
from samestep.program.ops import Op, OpKind, Ops
from samestep.program.owners import Owned, Owners
from samestep.program.program import Program
from samestep.program.step import StepSpec

GRADIENTS, WEIGHTS = "gradients to owners", "weights from owners"


def refusal(step: StepSpec) -> str | None:
    """Refuse nothing: any weight can be brought to one rank."""
    return None


def apply(program: Program) -> Program:
    """Return the program with an owner for each weight that ZeRO shards by rows, and what is sent to it and back."""
    if program.step.zero < 2:
        return program
    owners = tuple(_owners(program.step))
    if not owners:
        return program
    dtype = program.step.master_dtype
    return program.with_bodies(
        lambda key, ops: tuple(_exchanged(ops, owners, dtype)) if key == UPDATE_BODY else ops, owners=owners
    )


def _owners(step: StepSpec) -> Iterator[Owners]:
    """Yield, for each axis that shards weights to be updated whole, who updates them."""
    params = [param for param in step.model.params if param.is_updated_whole and param.trainable and param.numel]
    for axis in sorted({step.holding(param).data_axis for param in params}):
        mine = [param for param in params if step.holding(param).data_axis == axis]
        ranks = step.ranks.size(axis)
        filled = [0] * ranks
        members = []
        for param, owner in zip(mine, owners_of([param.numel for param in mine], ranks), strict=True):
            part = -(-param.shape[0] // ranks) * (param.numel // param.shape[0])
            members.append(
                Owned(name=param.name, owner=owner, offset=filled[owner], part_numel=part, numel=param.numel)
            )
            filled[owner] += part
        yield Owners(axis=axis, ranks=ranks, members=tuple(members), window_numel=max(filled))


def _exchanged(ops: Ops, owners: tuple[Owners, ...], dtype: str) -> Iterator[Op]:
    """Yield the update's ops with the exchange of gradients before the step's scalars, and of weights at the end."""

    def op(one: Owners, name: str, after: tuple[str, ...]) -> Op:
        sent = Op(kind=OpKind.ALL_TO_ALL, owner=f"{name} {one.axis}", axis=one.axis, dtype=dtype, after=after)
        return sent.but(is_exposed=True).sized(one.ranks * one.window_numel)

    for current in ops:
        if current.owner == "scalars":
            sent = [op(one, GRADIENTS, current.after) for one in owners]
            yield from sent
            current = current.but(after=(*current.after, *(one.name for one in sent)))
        yield current
    yield from (op(one, WEIGHTS, (f"{OpKind.UPDATE}:optimizer",)) for one in owners)
