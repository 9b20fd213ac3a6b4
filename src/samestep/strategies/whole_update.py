"""Whole updates: a weight whose optimizer needs all its elements at once goes to one rank, whatever divides it.

Muon, Shampoo and SOAP orthogonalise or precondition a matrix, Adafactor and LARS take a mean or a norm of it: what one
element becomes depends on the others. ZeRO leaves a rank some rows of every matrix, a tensor cut some columns or heads,
an expert cut some experts. So one all_to_all brings the parts of each weight and of its gradient to the owner, which has
the optimizer state, and another one sends the updated parts back (Liu et al. 2025, arXiv:2502.16982, gather on every rank;
an owner for each does the work once). With N ranks and P such weights each rank sends 2 P/N elements and then P/N. Under
zero=1 ZeRO adds no collective: `program/buckets.py` lays each weight into the chunk of one rank. Where both divide a
weight, a data rank gathers what the cut leaves, and lends that to the owner of the whole.

```
... reductions ─ all_to_all (data axis) ─ all_to_all (tp, ep) ─ scalars ─ update ─ all_to_all (tp, ep) ─ all_to_all (data axis)
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from samestep.errors import LayoutError
from samestep.models.param_spec import ParamSpec
from samestep.program.buckets import owners_of
from samestep.program.holding import Owned, Owners
from samestep.program.ops import Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

GRADIENTS, WEIGHTS = "gradients to owners", "weights from owners"


def refusal(step: StepSpec) -> LayoutError | None:
    """Refuse a weight that comes to one rank from two axes; any other one can."""
    tp, ep = step.layout.tp, step.layout.ep
    for param in step.model.params if tp > 1 and ep > 1 else ():
        if param.is_updated_whole and param.cut is not None and param.experts:
            return LayoutError(
                "optimizer-cut-both-ways",
                f"the optimizer does not treat every element of {param.name} by itself, and tp={tp} and ep={ep} both cut it. Use tp=1"
                ", or ep=1",
            )
    return None


def apply(program: Program) -> Program:
    """Return the program with an owner for each divided weight that is updated whole, and what is sent to it and back."""
    step = program.step
    params = [param for param in step.model.params if param.is_updated_whole and param.trainable and param.numel]
    if not params:
        return program
    owners = tuple(_over_data(step, params)) if step.zero >= 2 else ()
    lenders = {member.name: member.owner for owner in owners for member in owner.members} or _chunks(program)
    owners += tuple(_over_cuts(step, params, lenders))
    if not owners:
        return program
    dtype = step.master_dtype
    return program.with_update(lambda ops: tuple(_add_exchanges(ops, owners, dtype)), owners=owners)


def _over_data(step: StepSpec, params: list[ParamSpec]) -> Iterator[Owners]:
    """Yield, for each data axis that shards such weights by rows, who gathers them."""
    for axis in sorted({step.holding(param).data_axis for param in params}):
        sharded = [p for p in params if step.holding(p).data_axis == axis and step.holding(p).num_shards > 1]
        ranks = step.ranks.size(axis)
        parts = {p.name: -(-p.rows // ranks) * p.row_numel for p in sharded}
        wholes = {p.name: p.numel for p in sharded}
        if sharded:
            yield _assign_owners(axis, ranks, parts, wholes, dict.fromkeys(parts), axis, is_cut=False)


def _over_cuts(step: StepSpec, params: list[ParamSpec], lenders: Mapping[str, int]) -> Iterator[Owners]:
    """Yield, for each axis that cuts such weights, who updates them."""
    for axis in sorted({axis for param in params for axis in step.holding(param).sharded_over}):
        cut = [param for param in params if axis in step.holding(param).sharded_over]
        ranks = step.ranks.size(axis)
        parts = {p.name: p.numel for p in cut}
        wholes = {p.name: p.numel * ranks for p in cut}
        owners = {p.name: lenders.get(p.name) for p in cut}
        yield _assign_owners(axis, ranks, parts, wholes, owners, step.holding(cut[0]).data_axis, is_cut=True)


def _assign_owners(
    axis: str,
    ranks: int,
    parts: Mapping[str, int],
    wholes: Mapping[str, int],
    lenders: Mapping[str, int | None],
    data_axis: str,
    *,
    is_cut: bool,
) -> Owners:
    """Divide weights among the ranks of an axis, those of each lender by themselves; windows are as large as the largest."""
    members: list[Owned] = []
    window = 0
    for lender in dict.fromkeys(lenders.values()):
        names = [name for name in parts if lenders[name] == lender]
        filled = [0] * ranks
        for name, owner in zip(names, owners_of([parts[name] for name in names], ranks), strict=True):
            members.append(
                Owned(
                    name=name,
                    owner=owner,
                    offset=filled[owner],
                    part_numel=parts[name],
                    numel=wholes[name],
                    lender=lender,
                )
            )
            filled[owner] += parts[name]
        window = max(window, *filled)
    return Owners(
        axis=axis, ranks=ranks, members=tuple(members), window_numel=window, data_axis=data_axis, is_cut=is_cut
    )


def _chunks(program: Program) -> dict[str, int]:
    """Return the data rank that has each weight in its chunk of a bucket under zero=1."""
    return {
        member.name: member.offset // (bucket.padded_numel // bucket.holding.num_shards)
        for bucket in program.buckets
        if bucket.holding.num_shards > 1
        for member in bucket.members
    }


def _add_exchanges(ops: Ops, owners: tuple[Owners, ...], dtype: str) -> Iterator[Op]:
    """Yield the update's ops with the exchange of gradients before the step's scalars, and of weights after the update."""

    def op(owners: Owners, name: str, numel: int, after: tuple[str, ...]) -> Op:
        sent = Op(kind=OpKind.ALL_TO_ALL, owner=f"{name} {owners.axis}", axis=owners.axis, dtype=dtype, after=after)
        return sent.but(is_exposed=True).sized(numel)

    waits: tuple[str, ...] = ()
    for current in ops:
        if current.owner == "scalars":
            for owner in owners:
                brought = op(owner, GRADIENTS, owner.gathered_numel, (*current.after, *waits))
                waits = (*waits, brought.name)
                yield brought
            current = current.but(after=(*current.after, *waits))
            waits = ()
        yield current.but(after=(*current.after, *waits)) if waits else current
        if current.kind is OpKind.UPDATE:
            for owner in reversed(owners):
                sent = op(owner, WEIGHTS, owner.scattered_numel, (current.name, *waits))
                waits = (*waits, sent.name)
                yield sent
