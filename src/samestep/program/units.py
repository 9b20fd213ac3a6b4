"""Units: which weights are gathered, and which gradients scattered, as one buffer under zero=2 and zero=3.

```
unit      │ rank 0's rows of each weight of a layer │ rank 1's │ ... │    as FSDP2 gathers and scatters them
```
A unit holds the weights of one layer or one shared weight, each padded along its first dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from samestep.models.param_spec import ParamSpec, packed_bytes
from samestep.models.spec import enclosing, is_below
from samestep.program.buckets import round_up
from samestep.program.codecs import CodedPart
from samestep.program.contributions import Contributions
from samestep.program.holding import SHARDS
from samestep.program.step import StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered together, and whose gradients are scattered together: a layer's, or one shared weight.

    The runtime makes one FSDP2 group of each.
    """

    name: str
    """The paths of its modules; empty for what the root module owns itself."""
    modules: tuple[str, ...]
    """Paths of the modules whose calls gather it."""
    params: tuple[str, ...]
    """Names of its weights."""
    dtype: str
    """Dtype in which the weights are gathered."""
    codec: str
    """Name of the codec with which its shards are summed over `dp_replicate`, one of `CODECS`; or `PLAIN`."""
    padded_numel: int
    """Elements of the unsharded buffer: each parameter's first dimension padded to a multiple of `num_shards`."""
    padded_packed_bytes: int
    """Bytes in it of weights in 4 bits, whose elements are not among these."""
    padded_grad_numel: int
    """Elements of the unsharded buffer of gradients, which frozen weights have no part in."""
    shard_axis: str
    """The data axis over which its weights are sharded."""
    num_shards: int
    """Ranks among which they are divided: 1 where a rank has them to itself, and nothing is gathered or scattered."""
    first_layer: int
    """Index of the first layer that uses its weights."""
    last_layer: int
    """Index of the last layer that uses its weights."""
    called: tuple[int, int] = (0, 0)
    """When the forward first enters one of its modules, and last leaves one: a count of such events."""
    is_called_again: bool = False
    """Its modules are called several times in a forward: held from the first call to the end of the task, and reduced
    once, after the last of their backwards."""
    is_read_by_loss: bool = False
    """The loss multiplies by its weights: held from its forward to the end of the task."""
    input_takes_gradient: bool = True
    """The gradient of its first module's input shows that its backward is over; without one it is over when the task is."""
    keep_after_forward: bool
    """Not resharded between forward and backward."""
    gather_in_backward: bool
    """Its backward reads its weights, which are gathered again for it where they were resharded."""
    prefetch: str | None = None
    """Name of the unit whose gather is issued ahead of need when this unit's backward starts."""

    @property
    def is_freed_after_forward(self) -> bool:
        """Whether its weights, gathered from other ranks, are resharded between forward and backward."""
        return self.num_shards > 1 and not self.keep_after_forward

    @property
    def is_gathered_again(self) -> bool:
        """Whether it is gathered once more for its backward."""
        return self.gather_in_backward and self.is_freed_after_forward


def by_layer(units: Iterable[Unit], layer_of: Callable[[Unit], int]) -> dict[int | None, list[Unit]]:
    """Return the units of each layer that has any, in the order given."""
    by_index: dict[int | None, list[Unit]] = {}
    for unit in units:
        by_index.setdefault(layer_of(unit), []).append(unit)
    return by_index


def make_units(step: StepSpec, chunks: tuple[range, ...]) -> tuple[Unit, ...]:
    """Group the weights into units: one for each layer, and one for each set of modules that share a weight.

    Units are in the order of the module tree, in which the gradients that are left at the end of a backward are reduced. A weight that
    no layer owns, or that code outside its layer reads, is gathered with the root, and so are the other weights of its module; a weight
    without elements is in no unit.
    """
    groups: dict[tuple[str, ...], list[ParamSpec]] = {}
    members: dict[int, dict[str, None]] = {}
    params_of: dict[int, list[ParamSpec]] = {}
    home: dict[str, int] = {}
    order: dict[str, int] = {}
    roots_of = {param.name: _roots(step, param) for param in step.model.params}
    with_root = _weights_gathered_with_root(step)
    shared = _sharing(step, with_root)
    for param in step.model.params:
        owners = _owners(step, param)
        for owner in owners:
            order.setdefault(owner, len(order))
        roots = roots_of[param.name]
        if not param.numel:
            continue
        if step.holding(param).data_axis != SHARDS:  # sharded over other ranks than the rest of its layer
            groups.setdefault(owners, []).append(param)
            continue
        is_of_root = param.name in with_root
        together = next(
            (modules for modules in shared if any(is_below(owner, m) for owner in owners for m in modules)), None
        )
        if together is not None and not is_of_root:
            groups.setdefault(together, []).append(param)
        elif not roots or is_of_root:
            groups.setdefault(("",), []).append(param)
        else:
            # A module's weights are gathered together, though a later call of it may be the first that uses some, such as adapters.
            layer = home.setdefault(roots[0], param.layer)
            members.setdefault(layer, {})[roots[0]] = None
            params_of.setdefault(layer, []).append(param)
            order.setdefault(roots[0], order[owners[0]])
    for layer, params in params_of.items():
        groups[tuple(members[layer])] = params
    units = [
        _unit(step, tuple(sorted(modules, key=lambda m: order.get(m, -1))), ps, roots_of, chunks)
        for modules, ps in groups.items()
    ]
    units.sort(key=lambda unit: order.get(unit.modules[0], -1) if unit.modules != ("",) else -1)
    return _with_prefetch(_with_spans(step, units), chunks)


def _with_spans(step: StepSpec, units: list[Unit]) -> list[Unit]:
    """Let units that several samples call in turn be used from the first layer of these units to their last one."""
    if step.microbatch_samples == 1:
        return units
    for group in step.model.called_again:
        names = {unit.name for unit in units if not {*unit.modules}.isdisjoint(group)}
        layers = [layer for unit in units if unit.name in names for layer in (unit.first_layer, unit.last_layer)]
        units = [
            replace(
                unit,
                first_layer=min(layers),
                last_layer=max(layers),
                is_called_again=True,
                keep_after_forward=_is_kept(step, max(layers)),
            )
            if unit.name in names
            else unit
            for unit in units
        ]
    return units


def _is_kept(step: StepSpec, last_layer: int) -> bool:
    """Return whether a unit with this last layer is not resharded between forward and backward.

    The last layer's backward follows at once, and a weight that first and last layer share is in use throughout. A pipeline's
    other micro-batches may come between the two.
    """
    return step.zero == 2 or (last_layer == len(step.model.layers) - 1 and step.layout.pp == 1)


def _weights_gathered_with_root(step: StepSpec) -> set[str]:
    """Return the names of weights that are gathered with the root.

    These are the weights that the root's code reads, under any of their names, and those that cannot be gathered at another time. One module's weights are gathered at one time, and a weight that modules share with all of them.
    """
    tops: dict[str, int] = {}
    for layer in step.model.layers:
        for root in layer.modules:
            if root:
                tops.setdefault(root, len(tops))
    holding = {path for root in tops for path in enclosing(root.rpartition(".")[0])}

    def place_of(owner: str) -> str:
        return min((path for path in enclosing(owner) if path in tops), key=tops.__getitem__, default=owner)

    places = {
        param.name: {place_of(owner) for owner in _owners(step, param)} for param in step.model.params if param.numel
    }
    # FSDP2 gathers one of two modules, of which one is below the other and is called by itself too, with the other alone.
    twice = {
        index
        for index, layer in enumerate(step.model.layers)
        if any(a in holding or any(b != a and b in tops for b in enclosing(a)) for a in layer.modules)
    }
    outside = {
        param.name for param in step.model.params if param.numel and (param.read_outside or param.layer in twice)
    }
    roots: set[str] = {""}
    while True:
        gathered = outside | {name for name, above in places.items() if above & roots and above != {""}}
        reached = roots | {root for name in gathered for root in places[name]}
        if reached == roots:
            return gathered
        roots = reached


def _sharing(step: StepSpec, with_root: set[str]) -> list[tuple[str, ...]]:
    """Return the sets of modules that share weights: what is below one of them is gathered with it, at the same time."""
    groups: list[tuple[str, ...]] = []
    for param in step.model.params:
        if not param.shared or not param.numel or param.name in with_root or step.holding(param).data_axis != SHARDS:
            continue
        if _moves_with_layer(step, param.layer):
            continue
        modules = dict.fromkeys(_owners(step, param))
        for known in [g for g in groups if any(is_below(a, b) or is_below(b, a) for a in g for b in modules)]:
            groups.remove(known)
            modules = dict.fromkeys([*known, *modules])
        groups.append(tuple(m for m in modules if not any(m != other and is_below(m, other) for other in modules)))
    return groups


def _moves_with_layer(step: StepSpec, layer: int) -> bool:
    """Return whether a layer is called again as a whole, so that its weights can stay together."""
    return all(param.shared and not param.aliases for param in step.model.params_of(layer))


def _owners(step: StepSpec, param: ParamSpec) -> tuple[str, ...]:
    """Return the modules that hold a weight; of one tied across stages, those that this stage calls, or else the root."""
    if step.holding(param).tied_over:
        return tuple(dict.fromkeys(use.owner for use in param.uses if use.owner)) or ("",)
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in (param.name, *param.aliases)))


def _roots(step: StepSpec, param: ParamSpec) -> list[str]:
    """Return the module of its layer that a weight is below, if any."""
    owner = _owners(step, param)[0]
    return [module for module in step.model.layers[param.layer].called if module and is_below(owner, module)]


def _with_prefetch(units: list[Unit], chunks: tuple[range, ...]) -> tuple[Unit, ...]:
    """Let the backward of each unit prefetch the unit that the forward of the same chunk uses before it.

    A unit that is called several times prefetches nothing: at its second backward that would have been used already.
    The root's is not gathered again in a pipeline.
    """
    prefetch: dict[str, str] = {}
    for axis in dict.fromkeys(unit.shard_axis for unit in units):
        by_use = sorted(
            (u for u in units if u.shard_axis == axis and not (chunks and u.modules == ("",))), key=last_use
        )
        for previous, unit in itertools.pairwise(by_use):
            together = not chunks or any({previous.first_layer, unit.first_layer} <= {*chunk} for chunk in chunks)
            if together and not unit.is_called_again:
                prefetch[unit.name] = previous.name
    return tuple(replace(unit, prefetch=prefetch.get(unit.name)) for unit in units)


def last_use(unit: Unit) -> tuple[int, int, bool]:
    """Return the sort key of the order in which a forward uses units for the last time.

    Within a layer, a unit that earlier layers use too comes last.
    """
    return unit.last_layer, unit.called[1], unit.first_layer != unit.last_layer


def _unit(
    step: StepSpec,
    modules: tuple[str, ...],
    params: list[ParamSpec],
    roots_of: Mapping[str, list[str]],
    chunks: tuple[range, ...],
) -> Unit:
    layers = step.model.layers
    last = len(layers) - 1
    is_root = modules == ("",)
    first_layer, last_layer = _span_of_root(step, params, chunks) if is_root else _span(params)
    # What takes a gradient, in a pipeline.
    receives = any(first_layer in chunk and chunk.start > 0 and layers[chunk.start].sends_gradient for chunk in chunks)
    # A frozen start of the model has no backward that would read its weights.
    has_backward = receives or any(param.trainable and param.layer <= last_layer for param in step.model.params)
    first_root = _first_root(step, params, roots_of)
    entered = (
        params if any(param.aliases for param in params) else [p for p in params if roots_of[p.name] == first_root]
    )
    holding = step.holding(params[0])
    return Unit(
        name=", ".join(modules),  # FSDP2's own label of it
        modules=modules,
        params=tuple(param.name for param in params),
        first_layer=first_layer,
        last_layer=last_layer,
        dtype=step.working_dtype(params[0]),
        codec=step.sharing.codec,
        padded_numel=sum(padded_rows(param, holding.num_shards) for param in params if not param.held_as),
        padded_packed_bytes=sum(
            packed_bytes(padded_rows(param, holding.num_shards)) for param in params if param.held_as
        ),
        padded_grad_numel=sum(padded_rows(param, holding.num_shards) for param in params if param.trainable),
        keep_after_forward=_is_kept(step, last_layer),
        # A stage gives the model's own code copies of the weights that it reads itself.
        gather_in_backward=layers[last_layer].backward_reads_weights and has_backward and not (is_root and chunks),
        called=(0 if is_root else min(param.called[0] for param in params), max(param.called[1] for param in params)),
        is_called_again=any(param.calls > 1 for param in params),
        is_read_by_loss=step.layout.loss_chunk is not None and last_layer == last,
        input_takes_gradient=not is_root and (receives or all(param.takes_gradient for param in entered)),
        shard_axis=holding.data_axis,
        num_shards=holding.num_shards,
    )


def _first_root(step: StepSpec, params: list[ParamSpec], roots_of: Mapping[str, list[str]]) -> list[str]:
    """Return the module that is entered first of those with these weights, if any."""

    def entered(param: ParamSpec) -> tuple[int, int]:
        roots = roots_of[param.name]
        return param.layer, step.model.layers[param.layer].called.index(roots[0]) if roots else -1

    return roots_of[min(params, key=entered).name]


def _span_of_root(step: StepSpec, params: list[ParamSpec], chunks: tuple[range, ...]) -> tuple[int, int]:
    """Return the first and the last layer of the forwards that gather what the root module owns."""
    chunk = next((chunk for chunk in chunks if params[0].layer in chunk), range(len(step.model.layers)))
    return chunk[0], chunk[-1]


def _span(params: list[ParamSpec]) -> tuple[int, int]:
    """Return the first and the last layer that use the weights of a unit."""
    return min(param.layer for param in params), max(param.last_layer for param in params)


def padded_rows(param: ParamSpec, multiple: int) -> int:
    """Return the elements of `param` with its first dimension padded to a multiple, as FSDP2 cuts it."""
    return round_up(param.rows, multiple) * param.row_numel


def partial_sizes(step: StepSpec, unit: Unit, axis: str) -> dict[str, int]:
    """Return the elements, row padding included, of a rank's shards of a unit's gradients that are partial over `axis`."""
    names = {*unit.params}
    return {
        param.name: padded_rows(param, unit.num_shards) // unit.num_shards
        for param in step.model.params
        if param.name in names and param.trainable and param.numel and axis in step.holding(param).partial_over
    }


def coded_parts(step: StepSpec, contributions: Contributions, unit: Unit) -> dict[CodedPart, tuple[str, ...]]:
    """Return the buffers of gradients that a rank encodes of a unit, each with blocks of one size, and their weights.

    They hold the rank's shard, or all of the unit where codes are scattered.
    """
    left_of = 1 if step.scatters_codes else unit.num_shards
    params = [param for param in step.model.params if param.name in unit.params and param.trainable and param.numel]
    coded_parts: dict[CodedPart, tuple[str, ...]] = {}
    for block in sorted({step.sharing.block_of(param) for param in params}, reverse=True):
        alike = [param for param in params if step.sharing.block_of(param) == block]
        numel = sum(padded_rows(param, unit.num_shards) // left_of for param in alike)
        coded_parts[CodedPart(round_up(numel, contributions.ranks * block), block)] = tuple(
            param.name for param in alike
        )
    return coded_parts
