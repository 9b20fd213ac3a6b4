"""Tensor parallelism: weights cut over `tp`, each rank computing on its columns, heads and tokens.

Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3). A pair of matrix products needs one sum: A is cut by
columns and B by rows, and the activations between them (heads, neurons) stay on their rank:

```
        ┌ A_1 ─ f ─ B_1 ┐
   x ─g─┤               ├─h─ y         y = f(x A) B = sum over ranks of f(x A_i) B_i
        └ A_2 ─ f ─ B_2 ┘

   g  copy:    forward nothing, backward all_reduce of the gradient of x
   h  reduce:  forward all_reduce of the partial y, backward nothing
```
q, k and v read one x, so they share one g. An embedding is cut by vocabulary: a rank looks up the tokens of its part,
the others give zeros, and h sums. The head is cut by vocabulary too, and its logits are never gathered: the loss needs
three numbers of each row, the largest logit, the sum of exponentials and the logit of the label. A layer whose input
needs no gradient has no g. A replicated weight that works on cut activations (the norm of each head) has a partial
gradient on each rank; these are summed once a step, over all micro-batches, with their buckets or units.

The gradient of A_i needs x and the gradient of x A_i, and nobody waits for it: it is computed while g's all_reduce runs.

If there are fewer heads of keys and values than ranks, tp/heads ranks share a head (multi-query attention: Shazeer
2019, arXiv:1911.02150). Every rank then keeps these weights whole and computes the one head that its queries need, and
the gradients are partial and summed like those of the norms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import LayoutError
from samestep.models.layer_parts import NOWHERE, PartialSum
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import BLOCK, Cut, ParamSpec
from samestep.models.spec import ModelSpec, cache_by_model, gradients_within
from samestep.program.holding import Holding
from samestep.program.ops import Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec

AXIS = "tp"


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why the degree would cut through a group of a weight, or why the model cannot be cut at all."""
    return (
        refuse_degree(step.model, step.layout.tp) or _refuse_packed(step.model, step.layout.tp) or _refuse_blocks(step)
    )


def _refuse_packed(model: ModelSpec, degree: int) -> LayoutError | None:
    """Return the 4-bit weight that would be cut within a block of its rows, with a degree that works."""
    for param in _held_in_4_bits(model):
        if not _cuts_packed(param, degree):
            continue
        works = max(n for n in range(1, degree) if not _cuts_packed(param, n) and degree % n == 0)
        return LayoutError(
            "tp-cuts-scale-blocks",
            f"tp={degree} cuts rows of {param.name} within blocks of {BLOCK} elements, which share a scale in 4 bits. Use tp={works}"
            ', or model.lora.base = "full"',
        )
    return None


@cache_by_model
def _held_in_4_bits(model: ModelSpec) -> tuple[ParamSpec, ...]:
    return tuple(param for param in model.params if param.held_as)


def _cuts_packed(param: ParamSpec, degree: int) -> bool:
    """Return whether a cut leaves a rank rows that are no whole blocks."""
    cut = param.cut
    if cut is None or degree == 1 or cut.dim != len(param.shape) - 1:
        return False
    return param.shape[cut.dim] // (cut.parts * min(degree, cut.groups)) % BLOCK != 0


def _refuse_blocks(step: StepSpec) -> LayoutError | None:
    """Return which weight would be cut within a block of its 8-bit states, or of the codes of its gradient."""
    degree = step.layout.tp
    for blocks, key in (
        (step.states.blocks, 'optimizer_states = "8bit"'),
        (step.sharing.blocks, f'compression = "{step.sharing.codec}"'),
    ):
        for param in step.model.params if blocks else ():
            block = blocks.get(param.name, 0) if param.trainable else 0
            if block and _cuts_block(param, degree, block):
                works = max(n for n in range(1, degree) if not _cuts_block(param, n, block) and degree % n == 0)
                return LayoutError(
                    "tp-cuts-scale-blocks",
                    f"tp={degree} cuts {param.name} within blocks of {block} elements, which share a scale under "
                    f'numerics.{key}. Use tp={works}, or "bf16"',
                )
    return None


def _cuts_block(param: ParamSpec, degree: int, block: int) -> bool:
    """Return whether a cut leaves a rank runs of elements that are no whole blocks."""
    cut = param.cut
    if cut is None or degree == 1:
        return False
    each = param.shape[cut.dim] // (cut.parts * min(degree, cut.groups))
    return each * math.prod(param.shape[cut.dim + 1 :]) % block != 0


@cache_by_model
def refuse_degree(model: ModelSpec, degree: int) -> LayoutError | None:
    """Return why a degree would cut through a group of a weight, or why the model cannot be cut at all."""
    if model.differentiates_at:
        return LayoutError("forward-takes-gradients", f"tp={degree}: {gradients_within(model)}. Use tp=1")
    if model.cut_refusal:
        return LayoutError("tp-uncuttable", f"tp={degree}: cannot shard {model.name}: {model.cut_refusal}. Use tp=1")
    for param in model.params:
        if param.cut is not None and param.read_outside:
            return LayoutError(
                "tp-uncuttable",
                f"tp={degree}: {param.name} is also read outside the layer that owns it, where it would be cut. Use tp=1",
            )
        if param.cut is not None and not _divides(degree, param.cut):
            noun = "heads" if param.cut.groups * param.cut.parts < param.shape[param.cut.dim] else "columns"
            works = [str(n) for n in range(2, param.cut.groups + 1) if _divides_all(n, model)]
            return LayoutError(
                "tp-indivisible",
                f"tp={degree} does not divide the {param.cut.groups} {noun} of {param.name}. "
                f"Use tp={' or '.join(works or ['1'])}",
            )
    return None


def _divides(degree: int, cut: Cut) -> bool:
    """Return whether ranks get whole groups or share them equally, or the weight may also stay whole."""
    return cut.style in ("vocab", "gather") or cut.groups % degree == 0 or _is_shared(degree, cut)


def _divides_all(degree: int, model: ModelSpec) -> bool:
    return all(_divides(degree, param.cut) for param in model.params if param.cut is not None)


def _is_shared(degree: int, cut: Cut) -> bool:
    return cut.is_shareable and degree > cut.groups and degree % cut.groups == 0


def apply(program: Program) -> Program:
    """Return the program of one rank's part of the weights and FLOPs, with the all_reduces of partial sums."""
    step = program.step
    model = cut_model(step.model, step.layout.tp, step.cuts_loss)
    local = step.but(model=model).hold(functools.partial(_hold, step.layout.tp))
    axes = {**program.axes, AXIS: step.layout.tp}
    return replace(program, step=local).with_bodies(lambda _, ops: tuple(_cut(ops, local)), axes=axes)


def _hold(degree: int, param: ParamSpec, holding: Holding) -> Holding:
    """Return the holding of a weight, of which `param` is the local part: sharded, or replicated and maybe partial."""
    if param.cut is not None:
        return holding.sharded(AXIS, degree)
    replicated = holding.replicated(AXIS, degree)
    return replicated.partial(AXIS) if param.partial == "cut" else replicated


@cache_by_model
def cut_model(model: ModelSpec, degree: int, cuts_loss: bool = True) -> ModelSpec:
    """Return the local model of one of `degree` ranks.

    A vocabulary, or what is gathered, stays whole if the degree does not divide it, and so do the weights of heads that
    ranks share.
    """
    uncut = [p for p in model.params if p.cut and p.cut.groups % degree and not _is_shared(degree, p.cut)]
    owners = {name.rpartition(".")[0] for param in uncut for name in (param.name, *param.aliases)}
    params = tuple(_cut_param(param, degree) for param in model.params)
    layers = tuple(_cut_layer(layer, degree, owners, cuts_loss) for layer in model.layers)
    cuts_logits = model.logit_rows > 0 and any(p.cut and p.cut.style == "vocab" for p in params)
    if cuts_logits and cuts_loss:
        layers = (*layers[:-1], _with_cut_loss(layers[-1], degree))
    return replace(model, params=params, layers=layers, logit_rows=model.logit_rows if cuts_logits else 0)


def _with_cut_loss(last: LayerSpec, degree: int) -> LayerSpec:
    """Return the last layer with the memory of a loss on cut logits: at most two copies of a rank's logits."""
    logits, saved, working = (
        -(-size // degree) for size in (last.output_elements, last.loss_elements, last.loss_working_elements)
    )
    return replace(last, loss_elements=saved, loss_working_elements=min(working, 2 * logits - saved))


def _cut_param(param: ParamSpec, degree: int) -> ParamSpec:
    if param.cut is None:
        return param
    if param.cut.groups % degree:
        return replace(param, cut=None, partial="cut" if _is_shared(degree, param.cut) else param.partial)
    shape = tuple(size // degree if dim == param.cut.dim else size for dim, size in enumerate(param.shape))
    return replace(param, shape=shape)


def _cut_layer(layer: LayerSpec, degree: int, owners: set[str], cuts_loss: bool) -> LayerSpec:
    """Return one rank's part of a layer, without the sums of the modules in `owners`, which are not cut."""
    sums = (part for part in layer.forward_sums if part.owner not in owners)
    forward = tuple(part for part in sums if part.kind != "logits" or not cuts_loss)
    backward = tuple(part for part in layer.backward_sums if part.owner not in owners)
    cut = layer.cut_by(degree) if forward or backward else layer
    return replace(cut, forward_sums=forward, backward_sums=backward)


def _cut(ops: Ops, step: StepSpec) -> Iterator[Op]:
    """Yield the compute ops with one rank's FLOPs, each followed by the all_reduces of its partial sums."""
    layers = step.model.layers
    for op in ops:
        if op.layer is None:
            yield op
            continue
        forward = op.kind is OpKind.FORWARD
        layer = layers[op.layer]
        last = op.layer == len(layers) - 1
        flops = layer.forward_flops if forward else layer.backward_flops
        yield op.but(flops=flops * step.microbatch_samples)
        if forward:
            yield from _sums(layer.forward_sums, step, op)
            yield from _loss(step, op) if last else ()
        else:
            yield from _sums(layer.backward_sums, step, op)


def _sums(parts: tuple[PartialSum, ...], step: StepSpec, after: Op) -> Iterator[Op]:
    for part in parts:
        op = _sum(part.owner, step.compute_dtype, after).sized(part.elements * step.microbatch_samples)
        op = op if part.place is NOWHERE else op.but(place=part.place)
        if part.beside and after.layer is not None:
            op = op.but(beside=step.model.layers[after.layer].separable_products(part.beside))
        yield op if part.kind == "sum" else op.but(kind=OpKind.ALL_GATHER)


def _loss(step: StepSpec, after: Op) -> Iterator[Op]:
    """Yield the all_reduces of a loss on cut logits: first each row's maximum, then its sum and its label's logit; or those of a
    loss of one's own in chunks."""
    rows = step.model.logit_rows
    chunk_reduces = step.model.chunk_reduces if step.layout.loss_chunk is not None else ()
    for name, numel in (chunk_reduces or (("largest", rows), ("sums", 2 * rows))) if rows and step.cuts_loss else ():
        yield _sum(f"loss.{name}", step.master_dtype, after).sized(numel * step.microbatch_samples)


def _sum(owner: str, dtype: str, after: Op) -> Op:
    return Op(kind=OpKind.ALL_REDUCE, owner=owner, axis=AXIS, dtype=dtype, after=(after.name,), is_exposed=True)
