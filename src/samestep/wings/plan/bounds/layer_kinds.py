"""Kinds of layers: layers of one kind cost the same on a rank, so of each kind one is priced, and the rest is sums.

A model of hundreds of layers has a few kinds. What a rank needs for a run of layers is, for each kind, the number of its
layers times what one of them takes (`Seconds`) and needs (`Sizes`, `Units`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from samestep.memory.live_bytes import Saved
from samestep.models.layer_parts import PartialSum
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.buckets import WEIGHT_BYTES
from samestep.program.ops import BYTES_OF
from samestep.program.step import StepSpec
from samestep.program.units import padded_rows


class Seconds(NamedTuple):
    """Seconds that layers take for a micro-batch on one rank."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """With recompute, and with communication in the queue of compute."""
    weight_s: float = 0.0
    """Weight gradients, where the schedule splits them from the backward."""
    behind_s: float = 0.0
    """The part of `backward_s` after the weight gradients."""
    sent_forward_s: float = 0.0
    """The part of `forward_s` that is communication in the queue of compute."""
    sent_backward_s: float = 0.0


class Sizes(NamedTuple):
    """Sizes of layers on one rank: bytes of a sample, elements and bytes of their weights."""

    activations: float = 0.0
    """Activations after the forward."""
    again: float = 0.0
    """Further activations that exist once they have been recomputed."""
    weights: float = 0.0
    """Bytes of weights in the dtype of the module."""
    trained: float = 0.0
    """Elements that are trained."""
    expert_trained: float = 0.0
    """The part of them that is expert-sharded."""
    apart: float = 0.0
    """Trained elements with masters of another dtype."""
    expert_apart: float = 0.0
    block_trained: float = 0.0
    """Elements that are trained and belong to blocks."""
    gaps: float = 0.0
    """Elements that may be left free between trained weights in buffers, of which a rank's part of the states has none."""
    in_units: float = 0.0
    """Bytes of weights that ZeRO-2 and ZeRO-3 gather with their layer, if several ranks have a part each."""
    units_trained: float = 0.0
    """Elements of their gradients."""
    expert_in_units: float = 0.0
    expert_units_trained: float = 0.0


class BackwardSizes(NamedTuple):
    """The bytes that the backward of one layer needs on one rank for each sample, in addition to the layer's activations."""

    working: float = 0.0
    """At most."""
    boundaries: float = 0.0
    """The gradients of its input and its output."""
    loss: float = 0.0
    """Working memory of the backward of the loss after it, with the activations of the loss."""
    loss_fixed: float = 0.0
    """The part of that which a larger micro-batch does not need more of, for any number of samples."""
    gradient: float = 0.0
    """The gradient of its largest weight, for any number of samples."""

    @classmethod
    def of(cls, saved: Saved, gradients: Sequence[int]) -> BackwardSizes:
        """Return the sizes of a layer, given what it saves of one sample and the bytes of the gradients of its weights."""
        return cls(
            working=saved.working - saved.working_fixed,
            boundaries=saved.boundaries,
            loss=saved.loss + saved.loss_working - saved.loss_fixed,
            loss_fixed=saved.loss_fixed,
            gradient=max(gradients, default=0),
        )


class Units(NamedTuple):
    """Weights of layers that are sharded over data axes (zero=2 and 3), with the rows of FSDP2's padding."""

    gathered: float = 0.0
    """Bytes of weights that are gathered with their layer."""
    scattered: float = 0.0
    """Elements of their gradients."""
    expert_gathered: float = 0.0
    """Bytes of expert-sharded weights, which have a separate axis; 0 where no two ranks hold the same."""
    expert_scattered: float = 0.0
    local: float = 0.0
    """Bytes of all weights that a rank holds."""
    local_trained: float = 0.0
    root: float = 0.0
    """Bytes of weights that are gathered with no layer, and kept until the first layer's backward where there are no stages."""

    @property
    def all_gathered(self) -> float:
        """Bytes gathered over either axis."""
        return self.gathered + self.expert_gathered

    @property
    def all_scattered(self) -> float:
        """Elements scattered over either axis."""
        return self.scattered + self.expert_scattered


Parts = TypeVar("Parts", Seconds, Sizes, Units)


def total(parts: Sequence[Parts]) -> Parts:
    """Return the sum of some parts."""
    return parts[0] if len(parts) == 1 else type(parts[0])(*map(sum, zip(*parts, strict=True)))


def multiple(part: Parts, number: int) -> Parts:
    """Return `number` times a part."""
    return part if number == 1 else type(part)(*[number * value for value in part])


def quicker(seconds: Seconds, other: Seconds) -> Seconds:
    """Return the lower of two times, field by field; of subtracted fields the higher."""
    return Seconds(
        forward_s=min(seconds.forward_s, other.forward_s),
        backward_s=min(seconds.backward_s, other.backward_s),
        weight_s=min(seconds.weight_s, other.weight_s),
        behind_s=max(seconds.behind_s, other.behind_s),
        sent_forward_s=max(seconds.sent_forward_s, other.sent_forward_s),
        sent_backward_s=max(seconds.sent_backward_s, other.sent_backward_s),
    )


def weights(step: StepSpec, layer: int) -> tuple[float, ...]:
    """Return the fields of `Sizes` that describe weights."""
    params = step.model.params_of(layer)
    trained = [param for param in params if param.trainable]
    of_experts = [param for param in trained if step.holding(param).is_expert_sharded]

    def apart(some: Sequence[ParamSpec]) -> int:
        return sum(param.numel for param in some if step.working_dtype(param) != step.master_dtype)

    return (
        sum(map(step.weight_bytes, params)),
        sum(param.numel for param in trained),
        sum(param.numel for param in of_experts),
        apart(trained),
        apart(of_experts),
        sum(param.numel for param in trained) if step.model.layers[layer].is_block else 0,
        sum(-param.numel % _alignment(step, param) for param in trained),
        *_in_units(step, [(param, param.numel) for param in params]),
    )


def _alignment(step: StepSpec, param: ParamSpec) -> int:
    """Return the number of elements of which the place of a weight in a buffer is a multiple, where zero=1 divides it."""
    return max(step.states.alignment, WEIGHT_BYTES // BYTES_OF[step.working_dtype(param)])


def _in_units(step: StepSpec, numels: Sequence[tuple[ParamSpec, int]]) -> list[float]:
    """Return the bytes and the trained elements of those weights that are gathered with their layer, then of expert-sharded ones."""
    sizes = [0.0] * 4
    for param, numel in numels:
        if _is_in_unit(step, param):
            first = 2 * step.holding(param).is_expert_sharded
            sizes[first] += step.weight_bytes(param, numel)
            sizes[first + 1] += numel * param.trainable
    return sizes


def units(step: StepSpec, layer: int) -> Units:
    """Return the gathered and scattered weights of a layer."""
    shared: list[tuple[ParamSpec, int]] = []
    local = local_trained = root = 0.0
    for param in step.model.params_of(layer):
        parts = _num_holders(step, param)
        numel = padded_rows(param, parts)
        local += param.bytes_of(numel, BYTES_OF[step.master_dtype]) / parts
        local_trained += numel / parts * param.trainable
        if parts > 1:
            shared.append((param, numel))
            root += step.weight_bytes(param) if _is_kept(step, param) else 0
    return Units._make((*_in_units(step, shared), local, local_trained, root))


def _is_kept(step: StepSpec, param: ParamSpec) -> bool:
    """Return whether a weight is gathered from the first layer's forward to its backward where there are no stages: one that the first
    and the last layer share, and one that is gathered with the root."""
    if step.holding(param).is_expert_sharded or _is_in_unit(step, param):
        return False
    is_tied = param.layer == 0 and param.last_layer == len(step.model.layers) - 1
    return is_tied if param.shared else param.read_outside


def _num_holders(step: StepSpec, param: ParamSpec) -> int:
    """Return the number of ranks that each have a part of a weight under zero=2 and 3."""
    return step.ranks.size("dp_expert") if step.holding(param).is_expert_sharded else step.layout.num_shards


def _is_in_unit(step: StepSpec, param: ParamSpec) -> bool:
    """Whether a weight is gathered with its layer, a module of which owns it, and not with the root."""
    if param.shared or param.read_outside:
        return False
    return any(module and param.name.startswith(f"{module}.") for module in step.model.layers[param.layer].called)


def one_of_each(model: ModelSpec) -> tuple[ModelSpec, list[int]]:
    """Return a model of one layer of each kind, and the kind of every layer.

    Layers that are no blocks, the first block and the last are separate kinds, since strategies depend on their position.
    """
    blocks = [index for index, layer in enumerate(model.layers) if layer.is_block]
    owned: dict[int, list[ParamSpec]] = {}
    for param in model.params:
        owned.setdefault(param.layer, []).append(param)
    known: dict[object, int] = {}
    chosen: list[int] = []
    kind_of: list[int] = []
    for index, layer in enumerate(model.layers):
        alone = not layer.is_block or index in (blocks[0], blocks[-1])
        key = index if alone else _kind(layer, owned.get(index, []))
        if key not in known:
            known[key] = len(chosen)
            chosen.append(index)
        kind_of.append(known[key])
    # A middle kind is met before the last block, so the order of the layers is kept.
    place = {index: number for number, index in enumerate(chosen)}
    params = tuple(
        replace(param, layer=place[index], uses=tuple(replace(use, layer=kind_of[use.layer]) for use in param.uses))
        for index in chosen
        for param in owned.get(index, [])
    )
    # What batch norm and its like send depends on the data axes, which bounds leave open, so they leave it out.
    layers = tuple(replace(model.layers[index], batch_norms=(), batch_values=()) for index in chosen)
    return replace(model, layers=layers, params=params), kind_of


def _kind(layer: LayerSpec, params: Sequence[ParamSpec]) -> object:
    """Return the key by which layers are of one kind: everything but names."""
    root = f"{layer.modules[0]}." if layer.modules else ""

    def named(parts: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(replace(part, owner=part.owner.removeprefix(root)) for part in parts)  # type: ignore[type-var,attr-defined]

    def summed(parts: tuple[PartialSum, ...]) -> tuple[object, ...]:
        beside = (tuple(path.removeprefix(root) for path in part.beside) for part in parts)
        return named(tuple(replace(part, beside=paths) for part, paths in zip(parts, beside, strict=True)))

    return (
        replace(
            layer, name="", modules=(), again=(), repeats="", forward_sums=(), backward_sums=(), sequence_boundaries=(), dispatches=(), products=(), token_parts=(),
            crossings=(), crossing_refusal="", batch_norms=(), batch_values=(),
        ),
        *(named(parts) for parts in (layer.forward_sums, layer.sequence_boundaries, layer.dispatches)),
        summed(layer.backward_sums),
        named(layer.products),
        named(layer.token_parts),
        tuple(
            replace(
                param, name=param.name.removeprefix(root), layer=0, called=(0, 0), uses=(),
                aliases=tuple(alias.removeprefix(root) for alias in param.aliases),
            )
            for param in params
        ),
    )  # fmt: skip


def least_sent(layers: Sequence[LayerSpec], model: ModelSpec) -> int:
    """Return the elements of one sample that cross any boundary between these layers, at least."""
    crossed = [layer.crossings for layer in model.layers if layer.crossings]
    if crossed:
        return min(sum(crossing.elements for crossing in crossings if crossing.takes_gradient) for crossings in crossed)
    return min((layer.output_elements for layer in layers), default=0)


def least_updated(step: StepSpec, sizes: Sizes) -> float:
    """Return the least number of elements that the optimizer of a rank updates, over all splits of the data axis."""
    shared, holders = sizes.trained - sizes.expert_trained, step.ranks.size("dp_outer") * step.ranks.size("dp_expert")
    return shared / step.layout.dp_cp_size + sizes.expert_trained / holders


def unlike_in_chunks(steps: Sequence[StepSpec]) -> list[StepSpec]:
    """Return the first of steps that differ in chunks, and those that may be much quicker than it: chunks of the loss are where they
    spare a gather of logits, and so may be chunks of MLPs."""
    first = steps[0]
    return [
        first,
        *(
            step
            for step in steps[1:]
            if step.cuts_loss != first.cuts_loss
            or (step.layout.mlp_chunk is not None and step.layout.loss_chunk is None)
        ),
    ]
