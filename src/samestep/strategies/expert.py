"""Expert parallelism: experts are sharded over `ep`, and rows are dispatched to the ranks of their experts.

GShard (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2). The ranks of `ep` are data ranks: they read different
samples, or with `cp` slices of one sample, and hold equal copies of all other weights. A token chooses k of E experts,
and each choice is a row. With E/ep experts on a rank:

```
        k rows a token    dispatch       rows of my experts      combine     my own rows
   x ──────────────────► all_to_all ──────────► experts ──────► all_to_all ──────► weighted sum of the k
```
No row is dropped. Ranks first exchange how many rows come for which expert (E numbers), and then dispatch and combine
exactly those rows. So the number of rows that a rank receives depends on values; the program lists rows x width, which
is exact if all experts are chosen equally often, and always exact for the sum over a group. Backward dispatches and
combines gradients in the other direction.

A data axis of D ranks is divided into `ep`, neighbours, and `dp_expert`, D/ep ranks that hold the same experts.
Gradients of experts are summed over `dp_expert` alone, because dispatch has brought them the samples of the other
ranks. With zero=2 and 3 experts are also sharded over `dp_expert`, in units of their own, while all other weights are
sharded over the whole `dp_shard`.

The auxiliary loss that balances experts (Fedus et al. 2021, arXiv:2101.03961, equation 4) is a product of two means
over tokens, the fraction f of choices that an expert gets and the mean P of its probability:

    c E sum_e f_e P_e         its gradient flows through P alone

Means over a micro-batch or a rank would make the loss differ between layouts, so f is the mean over the global batch:
one all_reduce at the end of the forward, which must therefore be that of all samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.layer_parts import ExpertDispatch, Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, cache_by_model
from samestep.program.holding import Holding
from samestep.program.ops import BYTES_OF, Op, OpKind, Ops, is_forward
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "ep"
SAME = "dp_expert"
"""Axis of the ranks of the innermost data axis that hold the same experts."""

_COUNT_BYTES = 8
"""Bytes of one number of rows, an int64."""


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why `ep` divides neither data ranks nor experts, or what else cannot run with experts."""
    layout, model = step.layout, step.model
    if model.balanced_experts and (error := _refuse_balance(step)):
        return error
    if layout.ep == 1:
        return None
    experts, shared = _experts_of(model)
    if not experts:
        return LayoutError(
            "ep-no-experts",
            f"ep={layout.ep}: {model.name} has no experts stacked in one weight "
            "(a module called with rows, the experts chosen for them and their weights). Use ep=1",
        )
    ranks = layout.innermost_data_ranks
    if ranks % layout.ep == 0 and experts % layout.ep == 0 and layout.reduce != "hierarchical":
        text = f"ep={layout.ep}: {shared} is used by several modules. Use ep=1"
        return LayoutError("ep-no-experts", text) if shared else None
    works = [str(n) for n in range(2, ranks + 1) if ranks % n == 0 and experts % n == 0]
    nearest = f"Use ep={' or '.join(works or ['1'])}"
    if ranks % layout.ep:
        axis = ("dp_shard" if step.zero else "dp_replicate") + (" x cp" if layout.cp > 1 else "")
        return LayoutError(
            "ep-indivisible", f"ep={layout.ep} borrows data ranks, and does not divide {axis}={ranks}. {nearest}"
        )
    if experts % layout.ep:
        uneven = next(param for param in model.params if param.experts % layout.ep)
        return LayoutError(
            "ep-indivisible", f"ep={layout.ep} does not divide the {uneven.experts} experts of {uneven.name}. {nearest}"
        )
    return LayoutError(
        "reduce-unsupported",
        f"reduce=hierarchical sums over all data ranks, and experts differ with ep={layout.ep}. Use reduce=ring",
    )


@cache_by_model
def _experts_of(model: ModelSpec) -> tuple[int, str | None]:
    """Return the greatest common divisor of the numbers of experts, and an expert weight that several modules use."""
    weights = [param for param in model.params if param.experts]
    shared = next((param.name for param in weights if param.shared or param.read_outside), None)
    return math.gcd(*(param.experts for param in weights)), shared


def _refuse_balance(step: StepSpec) -> LayoutError | None:
    """Return why the layout cannot compute the loss that balances experts over the global batch."""
    if step.layout.pp > 1:
        return LayoutError(
            "pp-balanced-experts",
            f"pp={step.layout.pp}: the loss that balances experts reads the routers of all layers, which are on several "
            "stages. Use pp=1, or a job without it (output_router_logits = false)",
        )
    if step.sharing.trains_apart:  # refused in any case, whatever its micro-batches are
        return None
    if step.num_microbatches > 1:
        return LayoutError(
            "batch-values-microbatch",
            f"microbatch={step.layout.microbatch}: the loss that balances experts needs the choices of the whole batch, which are known after its forward. Use microbatch={step.rank_samples}",
        )
    return None


def apply(program: Program) -> Program:
    """Return the program of a rank's experts, with dispatch and combine and the all_reduce of the balancing loss."""
    step = program.step
    if step.model.balanced_experts and step.layout.world_size > 1:
        program = program.with_bodies(lambda key, ops: (*ops, _choices(ops, step)) if is_forward(key) else ops)
    degree = step.layout.ep
    if degree == 1:
        return program
    local = step.but(model=shard_experts(step.model, degree)).hold(functools.partial(_hold, degree))
    holders = step.ranks.size(SAME)
    # FSDP2 needs a group of the ranks with the same experts, even if it has a single rank.
    axes = {**program.axes, AXIS: degree, **({SAME: holders} if holders > 1 or step.zero >= 2 else {})}
    return replace(program, step=local).with_bodies(lambda _, ops: tuple(_add_dispatches(ops, local)), axes=axes)


def _choices(ops: Ops, step: StepSpec) -> Op:
    """Return the all_reduce of each expert's number of choices, the number of rows and the count of the loss."""
    op = Op(kind=OpKind.ALL_REDUCE, owner="balance", axis="world", dtype="float64", after=(ops[-1].name,))
    return op.sized(step.model.balanced_experts + 2)


def _hold(degree: int, param: ParamSpec, holding: Holding) -> Holding:
    """Return the holding of a weight after `ep`: experts are sharded, with gradients summed over `dp_expert`."""
    return holding.sharded(AXIS, degree).summed_over(SAME) if param.experts else holding


@cache_by_model
def shard_experts(model: ModelSpec, degree: int) -> ModelSpec:
    """Return the local model of a rank that holds one of `degree` shards of the experts."""
    params = tuple(_shard_param(param, degree) for param in model.params)
    return replace(model, params=params, layers=tuple(_shard_layer(layer, degree) for layer in model.layers))


def _shard_param(param: ParamSpec, degree: int) -> ParamSpec:
    if not param.experts:
        return param
    return replace(param, shape=(param.shape[0] // degree, *param.shape[1:]))


def _shard_layer(layer: LayerSpec, degree: int) -> LayerSpec:
    """Return a layer with fewer experts and as many rows; it also keeps the combined rows, to weight them."""
    if not layer.dispatches:
        return layer
    sizes = {dispatch.experts for dispatch in layer.dispatches}
    combined = sum(dispatch.rows * dispatch.width for dispatch in layer.dispatches)

    def sharded(product: Product) -> Product:
        """Return a product with the weights of one rank's experts."""
        return replace(product, groups=-(-product.groups // degree)) if product.groups in sizes else product

    return replace(
        layer,
        products=tuple(map(sharded, layer.products)),
        saved_elements=layer.saved_elements + combined,
        working=layer.working.plus(combined),
        norm_working=layer.norm_working.plus(-combined),
        moved=layer.moved.plus(4 * combined),  # sorted by expert and put back, each read and written
        repeats_last_sum=True,
    )


def _add_dispatches(ops: Ops, step: StepSpec) -> Iterator[Op]:
    """Yield the ops with dispatch and combine of a layer's experts after its compute."""
    for op in ops:
        yield op
        if op.layer is None or op.kind not in (OpKind.FORWARD, OpKind.BACKWARD):
            continue
        layer = step.model.layers[op.layer]
        dispatches = layer.dispatches if op.kind is OpKind.FORWARD or layer.has_backward else ()
        for dispatch in dispatches if op.kind is OpKind.FORWARD else reversed(dispatches):
            yield from _all_to_alls(dispatch, step, op)


def _all_to_alls(dispatch: ExpertDispatch, step: StepSpec, after: Op) -> Iterator[Op]:
    """Yield the exchange of the numbers of rows (forward only), dispatch and combine."""
    dtype = step.compute_dtype
    rows = Op(
        kind=OpKind.ALL_TO_ALL,
        owner=dispatch.owner,
        axis=AXIS,
        dtype=dtype,
        after=(after.name,),
        is_exposed=True,
        place=dispatch.place,
    )
    if after.kind is OpKind.FORWARD:
        yield rows.but(dtype="int64", size_bytes=dispatch.experts * _COUNT_BYTES)
    size = dispatch.rows * dispatch.width * step.microbatch_samples * BYTES_OF[step.compute_dtype]
    yield rows.but(size_bytes=size)
    yield rows.but(size_bytes=size)
