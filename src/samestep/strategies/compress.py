"""Compressed gradients: contributions are summed encoded over the slowest links, between the outermost data ranks.

Inside a contribution everything is summed in full first: over the ranks of a node that share it, stages that tie a weight,
and `tp` or `cp` where a gradient is partial. Then each rank encodes what it holds of the contribution, and

```
                 sent by a rank, of N             after it
all_to_all       (N-1)/N of the codes             each rank has one chunk of all contributions, and sums it in float32
all_gather       (N-1)/N of the codes             each rank has all sums; not where ranks shard them, and gather weights
```
as many bytes as a ring's all_reduce of the codes. The ops of buckets are written where gradients are reduced
(`strategies/data.py`), so that the first is issued while backward still runs, and those of the units of zero=2 and 3 that all
data ranks shard where these are scattered (`strategies/shard.py`); those of units that replicas have in common here.
What is computed is in `program/contributions.py`, what bytes there are in `program/codecs.py`.

Where replicas are trained apart (`numerics.exchange_every`), no step sends gradients between them. The same buffers carry,
behind every so many updates, what each replica's weights have moved by, as they are or encoded: `Program.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.program.codecs import PLAIN, exchange
from samestep.program.contributions import Contributions
from samestep.program.holding import REPLICAS, SHARDS
from samestep.program.ops import UPDATE_BODY, Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.program.units import coded_parts


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why a layout cannot make the contributions that the job compresses, and what works."""
    contributions, replicas, layout = step.contributions, step.sharing.replicas, step.layout
    if contributions is None:
        return None
    return next(
        (
            LayoutError(error.code, f"numerics.replicas = {replicas}: {error}")
            for error in _reasons(step, contributions, layout, replicas)
        ),
        None,
    )


def apply(program: Program) -> Program:
    """Return the program with the exchange of the shards of units, after all sums within a contribution."""
    contributions = program.step.contributions
    if contributions is not None and program.step.sharing.trains_apart:
        axes = {**program.axes, contributions.axis: contributions.ranks}
        return replace(program, axes=axes, exchange=tuple(_exchange_of_moves(program, contributions)))
    if contributions is None or not program.units or program.step.sharing.trains_apart or program.step.scatters_codes:
        return program
    axes = {**program.axes, contributions.axis: contributions.ranks}
    return program.with_update(lambda ops: tuple(_add_exchanges(ops, program, contributions)), axes=axes)


def _exchange_of_moves(program: Program, contributions: Contributions) -> Iterator[Op]:
    """Yield what is sent of the moves of weights: every buffer's all_to_all or all_reduce, and then the all_gathers; and after the outer
    step the weights, under zero=1, which have moved once more."""
    step = program.step
    buffers = [(bucket.name, bucket.codec, [bucket.coded(contributions)]) for bucket in program.buckets]
    buffers += [(unit.name, unit.codec, [*coded_parts(step, contributions, unit)]) for unit in program.units]
    sent = [
        [*exchange(name, codec, contributions.axis, parts, step.master_dtype, gathers=True)]
        for name, codec, parts in buffers
        if parts
    ]
    outer = Op(kind=OpKind.OUTER, owner="outer")
    names = {bucket.name for bucket in program.buckets}
    yield from (ops[0].but(after=(f"{OpKind.UPDATE}:optimizer",)) for ops in sent)
    yield from (op.but(after=(ops[0].name,)) for ops in sent for op in ops[1:])
    yield outer.but(after=tuple(ops[-1].name for ops in sent))
    for op in program.bodies[UPDATE_BODY]:
        if op.kind is OpKind.ALL_GATHER and op.owner in names:
            yield op.but(after=(outer.name,))


def _add_exchanges(ops: Ops, program: Program, contributions: Contributions) -> Iterator[Op]:
    """Yield the ops of the update with what is sent of each unit before the step's scalars."""
    for op in ops:
        if op.owner != "scalars":
            yield op
            continue
        waits = op.after
        for unit in program.units:
            parts = [*coded_parts(program.step, contributions, unit)]
            dtype = program.step.master_dtype
            for sent in (
                exchange(unit.name, unit.codec, contributions.axis, parts, dtype, gathers=True) if parts else ()
            ):
                yield sent.but(after=waits)
                waits = (*op.after, sent.name)
        yield op.but(after=waits)


def _reasons(step: StepSpec, contributions: Contributions, layout: Layout, replicas: int) -> Iterator[LayoutError]:
    if replicas != (ranks := contributions.ranks):
        works = (
            f"Use dp_replicate={replicas}" if layout.dp_shard > 1 and layout.dp_replicate > 1 else f"Use dp={replicas}"
        )
        of_job = "" if ranks == 1 else f", or numerics.replicas = {ranks}, which changes the result"
        yield LayoutError(
            "contributions-uneven",
            f"each data rank makes one contribution, and {str(layout)!r} has {ranks}. {works}{of_job}",
        )
    if layout.reduce != "ring":
        yield LayoutError(
            "compression-unsupported", f"reduce={layout.reduce} sums gradients as they are. Use reduce=ring"
        )
    if step.scatters_codes and not step.sharing.trains_apart and (error := _refuse_scattered(step)):
        yield LayoutError(error.code, f"zero={step.zero} {error}")
    trained = [param for param in step.model.params if param.trainable]
    factored = [param for param in trained if step.sharing.is_factored(param)]
    if factored or (step.sharing.rank and step.scatters_codes):  # whose codes are of one block after another
        yield from _refuse_cut_matrices(step, contributions, (factored or trained)[0].name)
    if contributions.axis == SHARDS and layout.cp > 1:
        yield LayoutError(
            "compression-unsupported", f"zero={step.zero} divides gradients among the ranks of cp too. Use zero=0"
        )
    if layout.ep > 1 and (step.zero == 0 or contributions.axis == SHARDS):
        works = f"Use dp_replicate={replicas} dp_shard={layout.ep}"
        if step.sharing.rank:  # which is refused there
            works = f'Use ep=1, or "int8" with dp_replicate={replicas} dp_shard={layout.ep}'
        yield LayoutError(
            "compression-unsupported",
            f"ep={layout.ep} mixes the samples of data ranks, which then make no contributions of their own. {works}",
        )
    if step.sharing.trains_apart and (error := _refuse_apart(step, contributions)):
        yield error
    if layout.dp > replicas and step.global_batch % (layout.dp * step.num_microbatches):
        yield (
            LayoutError(
                "contributions-uneven",
                f"{layout.dp * step.num_microbatches} micro-batches of the {step.global_batch} samples are not equal, so the contributions would not be equal. Use a degree and a microbatch that divide them",
            )
        )


def _refuse_scattered(step: StepSpec) -> LayoutError | None:
    """Return why the ranks of `dp_shard` cannot scatter the units of zero=2 and 3 encoded, and what works."""
    layout, trained = step.layout, [param for param in step.model.params if param.trainable]
    if step.num_microbatches > 1 and layout.accumulate == "sharded":
        return LayoutError(
            "compression-unsupported",
            f"scatters the gradient of each of {step.num_microbatches} micro-batches, and their sum is encoded. Use "
            "accumulate=full, or zero=1",
        )
    if partial := next((param for param in trained if _is_partial(param, layout)), None):
        works = "Use zero=1" + ", or tp alone" * (partial.partial == "sequence")
        return LayoutError(
            "compression-unsupported",
            f"scatters the gradient of {partial.name} before it is summed over tp={layout.tp}. {works}",
        )
    tied = next((p.name for p in trained if len({use.layer for use in p.uses}) > 1), "")
    if layout.pp > 1 and tied:
        return LayoutError(
            "compression-unsupported",
            f"scatters the gradient of {tied}, which several layers use, before stages sum it. Use zero=1",
        )
    return None


def _is_partial(param: ParamSpec, layout: Layout) -> bool:
    """Return whether each rank of `tp` has a part of a weight's gradient: it sees some of the heads or of the tokens."""
    if layout.tp == 1:
        return False
    is_shared = param.cut is not None and param.cut.is_shareable and layout.tp > param.cut.groups
    return is_shared or param.partial == "cut" or (layout.sequence_parallel and param.partial == "sequence")


def _refuse_cut_matrices(step: StepSpec, contributions: Contributions, name: str) -> Iterator[LayoutError]:
    """Yield which axes leave a rank no whole matrices, of which `name` is one, and what works."""
    layout = step.layout
    if step.zero >= 2 or (step.zero and contributions.axis == REPLICAS):
        axis = f"dp_shard={layout.dp_shard}" if layout.dp_shard > 1 else f"cp={layout.cp}"
        zero = 0 if layout.cp > 1 or step.sharing.trains_apart else 1
        yield (
            LayoutError(
                "compression-unsupported",
                f'numerics.compression = "{step.sharing.codec}" factors whole matrices, and zero={step.zero} divides the gradient of {name} '
                f'among {axis}. Use dp={step.sharing.replicas} zero={zero}, or "int8"',
            )
        )
    cut = next(
        (param.name for param in step.model.params if param.cut is not None and step.sharing.is_factored(param)), ""
    )
    if layout.tp > 1 and cut:
        alone = " without sequence_parallel" if layout.sequence_parallel else ""
        yield (
            LayoutError(
                "compression-unsupported",
                f'numerics.compression = "{step.sharing.codec}" factors whole matrices, and tp={layout.tp} divides {cut}. Use tp=1{alone}, '
                'or "int8"',
            )
        )


def _refuse_apart(step: StepSpec, contributions: Contributions) -> LayoutError | None:
    """Return why replicas cannot be trained independently in a layout, and what works."""
    layout, model = step.layout, step.model
    if step.zero and contributions.axis == SHARDS:
        works = "Use zero=0"
        if not step.sharing.rank:  # which is refused there
            works += f", or dp_replicate={step.sharing.replicas} dp_shard={layout.dp_shard}"
        return LayoutError(
            "diloco-unsupported",
            f"zero={step.zero} shards the states of one optimizer over dp_shard, and each replica has its own. {works}",
        )
    if layout.offload:
        return LayoutError(
            "diloco-unsupported", "offload is not proven with numerics.exchange_every. Use a layout without offload"
        )
    is_cut = step.zero > 0 or any(degree > 1 for degree in layout.weight_axes.values())
    if is_cut and (name := next((param.name for param in model.params if param.is_updated_whole), "")):
        return LayoutError(
            "diloco-unsupported",
            f"the optimizer updates {name} whole, which is not proven with numerics.exchange_every where a layout "
            "divides weights. Use zero=0 tp=1",
        )
    if model.balanced_experts:
        return LayoutError(
            "diloco-unsupported",
            f"a loss that balances experts is not proven with numerics.exchange_every. {_together(step)}",
        )
    if model.couples_samples:
        owner = next(iter((*model.coupled_modules, *model.batch_norm_owners)))
        return LayoutError(
            "diloco-unsupported",
            f"{owner} takes statistics of samples, which replicas would keep apart. {_together(step)}",
        )
    return None


def _together(step: StepSpec) -> str:
    """Return what works where replicas cannot be trained independently: one model, whose gradients may be compressed."""
    alone = " with replicas=1" if step.sharing.codec == PLAIN else ""
    return f"Use exchange_every=1{alone}"
