"""Expert parallelism: each rank of `ep` holds some experts of every layer that has them, and rows travel to theirs.

GShard (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2). The ranks of `ep` are data ranks: they read different
samples, or with `cp` slices of one, and hold all other weights alike. A token chooses k of E experts; each choice is a row. With E/ep experts a rank:

```
        k rows a token            rows of my experts            my own rows again
   x ──────────────────► all_to_all ──► experts ──► all_to_all ──► weighted sum of the k
```
Nothing is dropped: ranks first tell each other how many rows come for which expert, E numbers, and the two exchanges
are of just that size. So what a rank is sent depends on values, and the program lists what every expert being chosen
alike would make: rows x width. What all ranks of a group send is that in any case, whatever is chosen. Backward exchanges
gradients twice, the other way.

A data axis of D ranks falls into `ep`, neighbours, and `dp_expert`, D/ep ranks that hold the same experts. Gradients of
experts are summed over `dp_expert` alone: the samples of the others have come by all_to_all. With zero=2 and 3 it is also
the axis over which experts are sharded, in units of their own, while all else is sharded over the whole of `dp_shard`.

A loss that wants all experts chosen alike (Fedus et al. 2021, arXiv:2101.03961, equation 4) is a product of two means over
tokens, f the share of choices that an expert gets and P the mean of its probability:

    c E sum_e f_e P_e         its gradient flows through P alone

Means over a micro-batch or a rank would make another loss in every layout, so f is that of the whole global batch: one
all_reduce at the end of the forward, which therefore has to be that of all samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from samestep.models.spec import ExpertDispatch, LayerSpec, ModelSpec, ParamSpec, Product, remembered
from samestep.program.bodies import is_forward
from samestep.program.holding import Holding
from samestep.program.ops import BYTES_OF, Kind, Op, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "ep"
SAME = "dp_expert"
"""Ranks of the innermost data axis that hold the same experts."""

_COUNT_BYTES = 8


def refusal(step: StepSpec) -> str | None:
    """Refuse a degree that divides neither the data ranks nor the experts, and what does not know of experts."""
    layout, model = step.layout, step.model
    if model.balanced_experts and (reason := _refuse_balance(step)):
        return reason
    if layout.ep == 1:
        return None
    experts, shared = _dealt(model)
    if not experts:
        return (
            f"ep={layout.ep}: {model.name} has no experts that lie side by side in one weight "
            "(a module called with rows, the experts chosen for them and their weights): ep=1 works"
        )
    ranks = layout.innermost_data_ranks
    if ranks % layout.ep == 0 and experts % layout.ep == 0 and layout.reduce != "hierarchical":
        return f"ep={layout.ep}: {shared} is used by several modules: ep=1 works" if shared else None
    works = [str(n) for n in range(2, ranks + 1) if ranks % n == 0 and experts % n == 0]
    nearest = f"{'ep=' + ' or '.join(works) if works else 'only ep=1'} works"
    if ranks % layout.ep:
        axis = ("dp_shard" if step.zero else "dp_replicate") + (" x cp" if layout.cp > 1 else "")
        return f"ep={layout.ep} borrows data ranks, and does not divide {axis}={ranks}; {nearest}"
    if experts % layout.ep:
        uneven = next(param for param in model.params if param.experts % layout.ep)
        return f"ep={layout.ep} does not divide the {uneven.experts} experts of {uneven.name}; {nearest}"
    return f"reduce=hierarchical sums over all data ranks, and experts differ with ep={layout.ep}: reduce=ring works"


@remembered
def _dealt(model: ModelSpec) -> tuple[int, str | None]:
    """Return the largest number that divides all experts, and the name of a weight of theirs that several modules use."""
    dealt = [param for param in model.params if param.experts]
    shared = next((param.name for param in dealt if param.shared or param.read_outside), None)
    return math.gcd(*(param.experts for param in dealt)), shared


def _refuse_balance(step: StepSpec) -> str | None:
    if step.layout.pp > 1:
        return (
            f"pp={step.layout.pp}: the loss that balances experts reads the routers of all layers, which stand on several "
            "stages: pp=1 works, and so does a job without it (output_router_logits = false)"
        )
    if step.num_microbatches > 1:
        return (
            f"microbatch={step.layout.microbatch}: the loss that balances experts is one of the whole batch, whose choices "
            f"are known only after the forward of all of it: microbatch={step.rank_samples} works"
        )
    return None


def apply(program: Program) -> Program:
    """Leave a rank its experts, and write the exchanges and what a loss that balances them needs to know."""
    step = program.step
    if step.model.balanced_experts and step.layout.world_size > 1:
        program = program.with_bodies(lambda key, ops: (*ops, _choices(ops, step)) if is_forward(key) else ops)
    degree = step.layout.ep
    if degree == 1:
        return program
    local = replace(step, model=deal_model(step.model, degree)).hold(functools.partial(_hold, degree))
    holders = step.ranks.size(SAME)
    # FSDP2 asks for a group of who shares experts, even where each has some alone.
    axes = {**program.axes, AXIS: degree, **({SAME: holders} if holders > 1 or step.zero >= 2 else {})}
    return replace(program, step=local).with_bodies(lambda _, ops: tuple(_exchanged(ops, local)), axes=axes)


def _choices(ops: Ops, step: StepSpec) -> Op:
    """Count the choices of each expert, all rows, and what the loss counts."""
    op = Op(kind=Kind.ALL_REDUCE, owner="balance", axis="world", dtype="float64", after=(ops[-1].name,))
    return op.sized(step.model.balanced_experts + 2)


def _hold(degree: int, param: ParamSpec, holding: Holding) -> Holding:
    """The ranks of `ep` divide the experts; those that hold the same ones sum up their gradients."""
    return holding.sharded(AXIS, degree).summed_over(SAME) if param.experts else holding


@remembered
def deal_model(model: ModelSpec, degree: int) -> ModelSpec:
    """Return the model that one rank holds."""
    params = tuple(_deal_param(param, degree) for param in model.params)
    return replace(model, params=params, layers=tuple(_deal_layer(layer, degree) for layer in model.layers))


def _deal_param(param: ParamSpec, degree: int) -> ParamSpec:
    if not param.experts:
        return param
    return replace(param, shape=(param.shape[0] // degree, *param.shape[1:]))


def _deal_layer(layer: LayerSpec, degree: int) -> LayerSpec:
    """A rank has as many rows as before, for fewer experts; it keeps those that came back, to weigh them."""
    if not layer.dispatches:
        return layer
    sizes = {exchange.experts for exchange in layer.dispatches}
    came_back = sum(exchange.rows * exchange.width for exchange in layer.dispatches)

    def dealt(product: Product) -> Product:
        return replace(product, groups=-(-product.groups // degree)) if product.groups in sizes else product

    return replace(
        layer,
        products=tuple(map(dealt, layer.products)),
        saved_elements=layer.saved_elements + came_back,
        working_elements=layer.working_elements + came_back,
        moved_elements=layer.moved_elements + 4 * came_back,  # sorted and put back, each read and written
        repeats_last_sum=True,
    )


def _exchanged(ops: Ops, step: StepSpec) -> Iterator[Op]:
    """Write what a layer's experts exchange behind its compute."""
    for op in ops:
        yield op
        if op.layer is None or op.kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        dispatches = step.model.layers[op.layer].dispatches
        for exchange in dispatches if op.kind is Kind.FORWARD else reversed(dispatches):
            yield from _exchange(exchange, step, op)


def _exchange(exchange: ExpertDispatch, step: StepSpec, after: Op) -> Iterator[Op]:
    dtype = step.compute_dtype
    rows = Op(kind=Kind.ALL_TO_ALL, owner=exchange.owner, axis=AXIS, dtype=dtype, after=(after.name,), is_exposed=True)
    if after.kind is Kind.FORWARD:
        yield rows.but(dtype="int64", size_bytes=exchange.experts * _COUNT_BYTES)
    size = exchange.rows * exchange.width * step.microbatch_samples * BYTES_OF[step.compute_dtype]
    yield rows.but(size_bytes=size)
    yield rows.but(size_bytes=size)
