"""Compressed gradients: contributions are summed encoded over the slowest links, between the outermost data ranks.

Inside a contribution everything is summed in full first: over the ranks of a node that share it, stages that tie a weight,
and `tp` or `cp` where a gradient is partial. Then each rank encodes what it holds of the contribution, and

```
                 sent by a rank, of N             after it
all_to_all       (N-1)/N of the codes             each rank has one chunk of all contributions, and sums it in float32
all_gather       (N-1)/N of the codes             each rank has all sums; not under zero=1, where weights are gathered
```
as many bytes as a ring's all_reduce of the codes. The ops of buckets are written where gradients are reduced
(`strategies/data.py`), so that the first is issued while backward still runs; those of the units of zero=2 and 3 here.
What is computed is in `program/contributions.py`, what bytes there are in `program/codecs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestep.layout import Layout
from samestep.program.bodies import UPDATE_BODY
from samestep.program.codecs import exchange
from samestep.program.contributions import Contributions
from samestep.program.holding import REPLICAS, SHARDS
from samestep.program.ops import Op, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.program.units import coded_parts


def refusal(step: StepSpec) -> str | None:
    """Return why a layout cannot make the contributions that the job compresses, and what works."""
    made, replicas, layout = step.contributions, step.replicas, step.layout
    if made is None:
        return None
    return next(
        (f"numerics.replicas = {replicas}: {reason}" for reason in _reasons(step, made, layout, replicas)), None
    )


def apply(program: Program) -> Program:
    """Return the program with the exchange of the shards of units, behind all sums within a contribution."""
    made = program.step.contributions
    if made is None or not program.units:
        return program
    axes = {**program.axes, made.axis: made.ranks}
    return program.with_bodies(
        lambda key, ops: tuple(_exchanged(ops, program, made)) if key == UPDATE_BODY else ops, axes=axes
    )


def _exchanged(ops: Ops, program: Program, made: Contributions) -> Iterator[Op]:
    """Yield the ops of the update with what is sent of each unit before the step's scalars."""
    for op in ops:
        if op.owner != "scalars":
            yield op
            continue
        waits = op.after
        for unit in program.units:
            parts = [*coded_parts(program.step, made, unit)]
            for sent in exchange(unit.name, unit.codec, made.axis, parts, made.each, gathers=True) if parts else ():
                yield sent.but(after=waits)
                waits = (*op.after, sent.name)
        yield op.but(after=waits)


def _reasons(step: StepSpec, made: Contributions, layout: Layout, replicas: int) -> Iterator[str]:
    wanted = f"dp_replicate={replicas} works" if layout.num_shards > 1 else f"dp={replicas} works"
    if replicas % made.ranks:
        yield f"{made.ranks} ranks of {made.axis} make no equal number of contributions; {wanted}"
    if layout.reduce != "ring":
        yield f"reduce={layout.reduce} sums gradients as they are; reduce=ring works"
    if step.zero >= 2 and made.axis == SHARDS:
        yield f"zero={step.zero} sums gradients over dp_shard in full; zero=1 works, and so does dp_replicate={replicas}"
    if made.axis == SHARDS and layout.cp > 1:
        yield f"zero={step.zero} divides gradients among the ranks of cp too; zero=0 works"
    if layout.ep > 1 and (step.zero == 0 or made.axis == SHARDS):
        yield (
            f"ep={layout.ep} mixes the samples of data ranks, which then make no contributions of their own; "
            f"dp_replicate={replicas} dp_shard={layout.ep} works"
        )
    if made.each > 1 and (reason := _refuse_several(step, made)):
        yield f"{reason}; {wanted}"
    if (made.each > 1 or layout.dp > replicas) and step.global_batch % (layout.dp * step.num_microbatches):
        yield (
            f"{layout.dp * step.num_microbatches} micro-batches of the {step.global_batch} samples are not equal, so they are "
            "not those of equal contributions; a degree and a microbatch that divide them work"
        )


def _refuse_several(step: StepSpec, made: Contributions) -> str | None:
    """Return why a rank cannot make several contributions one after the other."""
    layout = step.layout
    for axis, degree in (("pp", layout.pp), ("tp", layout.tp), ("cp", layout.cp)):
        if degree > 1:
            return f"with {axis}={degree} a data rank makes one contribution, not {made.each}"
    if step.zero and made.axis == REPLICAS:
        return f"with dp_shard={layout.dp_shard} a replica makes one contribution, not {made.each}"
    if step.num_microbatches % made.each:
        works = -(-step.rank_samples // made.each)
        return (
            f"{step.num_microbatches} micro-batches of a rank do not divide among {made.each} contributions: "
            f"microbatch={works} works"
        )
    return None
