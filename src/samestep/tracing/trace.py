"""From an nn.Module on the meta device to a `ModelSpec`, by one traced forward of one sample, without values.

Layers follow the modules. Blocks are the children of the containers (nn.ModuleList, nn.Sequential) in which the model
repeats itself; modules that run before, between and after them, each taken as high in the tree as possible, make up the
other layers:

    LlamaForCausalLM ─┬ model ─┬ embed_tokens, rotary_emb    embed_tokens      first
                      │        ├ layers ─ 0, 1, ...          model.layers.0    a block each
                      │        └ norm                        norm+lm_head      last
                      └ lm_head

Costs follow the data (`tracing/forward.py`). An operation belongs to the layer that was entered last. One layer makes a
storage; if another layer reads it, it is passed on (`output_elements` of the maker, `input_elements` of its first
reader), and if autograd keeps it, it is saved once, by the layer that keeps it first.

Code that looks at the values of weights and activations (`x[x > 0]`, the tokens of an expert) is traced with all values
of the sample and the weights, where these are few enough to run on the CPU once. In larger models no value of a weight is made:
where whole numbers are computed of floating ones (the experts that scores choose), or code looks at one, values are drawn for
them. Code that looks may act differently for the next sample, so the spec names the module that does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from samestep.building.initial_values import blueprint
from samestep.building.model import model_source
from samestep.building.model_changes import held_as
from samestep.building.several_models import followed_weight
from samestep.errors import ModelError
from samestep.job import Job
from samestep.models.layer_parts import Exchange, HeadSpec, KeptBuffer, Product, WorkingSet
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, is_below, owner_of
from samestep.state.snapshot import Snapshot, holding
from samestep.tracing.arranged_layers import (
    Layer,
    UsesOfWeights,
    arrange,
    containers_of,
    modules_entered_again,
    opened_modules,
)
from samestep.tracing.backward import (
    Backward,
    idle_weights,
    roots_of_loss,
    token_parts_of,
    unlike_weights,
    watch_backward,
    working_sets,
)
from samestep.tracing.costs import Costs, Region, costs_of
from samestep.tracing.flow import takes_statistics
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.looks import paths_within
from samestep.tracing.meta_tensors import DRAWN_ELEMENTS, KNOWN_WEIGHTS, NeedsValuesError
from samestep.tracing.operations import Analysis, Events
from samestep.tracing.stage_events import with_crossings, with_cut_crossings
from samestep.tracing.watched_forward import is_outside, watch_forward
from samestep.trees import tensors_in


def model_spec(job: Job, sample: Any) -> ModelSpec:
    """Return the spec of a job's model; `sample` is a batch of one real sample.

    Raises:
        ModelError: the model cannot be built or traced.
    """
    plan = blueprint(model_source(job), job.train.seed)
    name = job.model.source.rpartition(":")[2]
    return trace(plan.module, sample, name, functools.partial(plan.materialize, device=torch.device("cpu")))


def trace(
    module: nn.Module,
    sample: Any,
    name: str,
    value_of: ValueOf | None = None,
    styles: Mapping[str, str] | None = None,
    analysis: Analysis | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    stages: Sequence[str] = (),
    keeps_all: bool = False,
    events: Events | None = None,
) -> ModelSpec:
    """Return the spec of a module on the meta device from one forward; `sample` is a batch of one real sample.

    `value_of` serves code that looks at the values of buffers and weights; without it such code is refused.
    `styles` are the cut styles of modules by path: tensors between a column cut and a row cut are cut too.
    `analysis` receives the events of the forward. `loss` is called with the outputs and the sample, to find the weights that take no
    part in it. `stages` are the modules with which pipeline stages begin, if others than blocks. `keeps_all` is whether its code is
    known to look at values. `events` receives what the forward does.

    Raises:
        ModelError: the forward fails, or needs values that are not known.
    """
    num_samples = samples_traced(module)
    containers = containers_of(module)
    opened = opened_modules(module, containers, stages)
    events = events or Events(costs=[])
    watch = ForwardTracer(module, styles or {}, keeps_all, analysis, events=events)
    snapshot, weights = Snapshot(module), [(part._parameters, dict(part._parameters)) for part in module.modules()]
    try:
        outputs = watch_forward(module, sample, num_samples, watch, value_of, name, opened)
    except NeedsValuesError:
        if value_of is None or keeps_all:
            raise _unseen(name, watch) from None
        looked = watch.modules.innermost or name
        snapshot.restore()  # caches that the first attempt has filled hold no values
        events.restart()
        watch = ForwardTracer(module, styles or {}, keeps_all=True, events=events)
        watch.looks.varies = looked
        try:
            outputs = watch_forward(module, sample, num_samples, watch, value_of, name, opened)
        except NeedsValuesError:
            raise _unseen(name, watch) from None
    with holding(weights):  # which the forward may have replaced
        return _spec_of(module, sample, name, (containers, opened, stages), watch, outputs, loss)


def _spec_of(
    module: nn.Module,
    sample: Any,
    name: str,
    places: tuple[tuple[str, ...], tuple[str, ...], Sequence[str]],
    watch: ForwardTracer,
    outputs: Any,
    loss: Callable[[Any, Any], Any] | None,
) -> ModelSpec:
    """Return the spec of a module from its traced forward; `places` are its lists of blocks, what was opened, and named stages."""
    containers, opened, stages = places
    num_samples, looks, recorded = samples_traced(module), watch.looks, watch.flow_recorder
    roots, names = roots_of_loss(outputs, sample, loss, num_samples)
    watch.places.reach(roots)
    has_looked = bool(looks.varies or looks.has_looked)
    unused = idle_weights(module, outputs, roots)
    idle = _never_read(module, watch) & unused if looks.varies else frozenset[int]() if has_looked else unused
    if not has_looked:
        recorded.take_idle(roots)
    unused |= unlike_weights(roots if loss is not None and len(roots) > 1 else [])
    if looks.varies:  # other values may leave any weight unused
        unused |= {id(param) for param in module.parameters() if param.requires_grad}
    assert watch.events.costs is not None
    costs = costs_of(watch.events.costs, watch.modules.regions, watch.facts.weights, watch.facts.norms)
    backward = watch_backward(module, tensors_in(getattr(outputs, "logits", outputs)), watch)
    layers = arrange(module, name, containers, watch.modules, costs, stages)
    assert recorded.flow is not None
    specs = _layer_specs(module, layers, watch, costs, backward, num_samples)
    uses_of = UsesOfWeights(layers, specs, watch.modules, recorded.flow)
    params = _param_specs(module, layers, opened, watch, _Unused(idle, unused), uses_of)
    first = min((param.layer for param in params if param.trainable and not param.is_idle), default=0)
    specs = tuple(dataclasses.replace(spec, has_backward=index >= first) for index, spec in enumerate(specs))
    if divided := watch.cut.storages:
        specs = with_cut_crossings(specs, recorded.flow, recorded.values_in(divided))
    varies, kept_after = looks.varies or (watch.picked.path if watch.picked.has_none else ""), watch.events.kept_after
    return ModelSpec(
        name=name,
        layers=with_crossings(specs, recorded.flow, module, num_samples),
        params=params,
        kept_after=tuple(name for name, buffer in module.named_buffers() if watch.key(buffer) in kept_after),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        coupled_modules=tuple(path for path in _coupled_modules(module) if path in watch.modules.of),
        looks=has_looked,
        varies_at=varies,
        varies_within=bool(varies) and looks.varies_within,
        picks_at="" if varies else watch.picked.path,
        looks_in=looks.paths if varies else (),
        differentiates_at=recorded.differentiates_at,
        loss_names=names,
    )


_WHOLE_BATCHES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def samples_traced(module: nn.Module) -> int:
    """Return the number of copies of a sample that are traced: batch norm refuses a batch of one."""
    return _WHOLE_BATCHES.get(module) or (2 if _coupled_modules(module) else 1)


def trace_whole_batch(module: nn.Module, num_samples: int) -> None:
    """Let forwards of a module be traced on so many samples, since it takes no fewer."""
    _WHOLE_BATCHES[module] = num_samples


def _coupled_modules(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of modules through which samples of a batch influence each other, or through their statistics."""
    return tuple(
        path
        for path, part in module.named_modules()
        if takes_statistics(part) and (part.training or getattr(part, "running_mean", None) is None)
    )


def _unseen(name: str, watch: ForwardTracer) -> ModelError:
    """Return the error about code that looks at values that a trace does not have."""
    return ModelError(
        "forward-looks-at-values",
        f"{name} cannot be traced: {watch.reached} looks at the values of a tensor (as .item(), `if`, x[mask] or a loop over "
        f"experts do), and the meta device has none. Only models of up to {KNOWN_WEIGHTS:,} weights are run once to see them, and larger ones "
        f"with drawn values of tensors of up to {DRAWN_ELEMENTS:,} elements. Use a form that does not look, such as torch.where",
    )


class _Unused(NamedTuple):
    """The ids of weights to which the loss of the trace gives no gradient."""

    idle: frozenset[int]
    """Those of a forward that looks at no values."""
    perhaps: frozenset[int]
    """All of which the trace does not show that every step gives them one."""


def _never_read(module: nn.Module, watch: ForwardTracer) -> frozenset[int]:
    """Return the ids of the weights that nothing in the forward reads, outside of modules whose code looks at values."""
    within = paths_within(module, watch.looks.paths)
    return frozenset(
        id(param)
        for path, part in module.named_modules()
        for param in part.parameters(recurse=False)
        if path not in within and watch.key(param) not in watch.events.readers
    )


# -- from a traced forward to a spec ---------------------------------------------------------------


def _layer_specs(
    module: nn.Module, layers: list[Layer], watch: ForwardTracer, costs: Costs, backward: Backward, num_samples: int
) -> tuple[LayerSpec, ...]:
    """Return the spec of each layer, summed over its regions."""
    layer_of = {region: index for index, layer in enumerate(layers) for region in layer.regions}
    working_of = functools.partial(working_sets, backward, layer_of, watch, costs)
    working, in_norms = working_of(), working_of(in_norms=True)
    sizes, norm_savers, divided = watch.storages.sizes, costs.norm_savers.keys(), watch.cut.storages
    inputs, outputs, saved = _storages_of(len(layers), layer_of, costs, watch.events.returned)

    def elements(keys: set[int]) -> int:
        return sum(sizes[key] for key in keys) // num_samples

    specs = []
    entered = modules_entered_again(layers, watch.modules)
    outside = _kept_outside(module, layers, watch)
    for index, layer in enumerate(layers):
        regions = [costs.regions[path] for path in layer.regions]
        selective = inputs[index].union(*(region.results for region in regions))
        moved, fusible = costs.moved.of({*layer.regions}, sizes, watch.events.returned)
        spec = LayerSpec(
            name=layer.name,
            modules=tuple(layer.modules),
            again=tuple(layer.again),
            repeats=layer.repeats,
            calls=sum(bool(region) for region in layer.regions),
            entered=entered[index],
            is_block=layer.is_block,
            begins_stage=layer.begins_stage,
            forward_flops=sum(region.flops for region in regions) // num_samples,
            input_elements=elements(inputs[index]),
            output_elements=elements(outputs[index]),
            saved_elements=elements(saved[index]),
            saved_pair_elements=elements(saved[index] & watch.events.pairs),
            saved_norm_elements=elements(norms := saved[index] & norm_savers) + elements(norms & costs.savers.keys()),
            input_norm_elements=elements((inputs[index] & norm_savers) - costs.savers.keys()),
            saved_selective_elements=elements(selective),
            saved_cut_elements=elements(saved[index] & divided),
            saved_selective_cut_elements=elements(selective & divided),
            products=tuple(_products_of(regions, num_samples)),
            backward_reads_weights=_backward_reads_weights(module, layer),
            exchanges=_exchanges_of(layer, watch, costs, num_samples),
            token_parts=tuple(
                part.sliced_by(num_samples) for part in token_parts_of(module, layer, layer_of, watch, costs, backward)
            ),
            batch_values=tuple(call for region, call in watch.events.batch_values if region in layer.regions),
            batch_norms=tuple(call for region, call in watch.events.batch_norms if region in layer.regions),
            kept=tuple(buffer for region, buffer in outside if region in layer.regions),
            moved=moved.of_one(num_samples),
            fusible=fusible.of_one(num_samples),
            working=working.get(index, WorkingSet()).of_one(num_samples),
            norm_working=in_norms.get(index, WorkingSet()).of_one(num_samples),
        )
        specs.append(spec)
    if head := _head_of(specs[-1], {sizes[key] // num_samples for key in outputs[-1]}):
        peak = working_of(head.logits * num_samples).get(len(layers) - 1, WorkingSet()).elements
        specs[-1] = dataclasses.replace(specs[-1], head=_with_costs(head, sizes, saved[-1], peak, num_samples))
    return tuple(specs)


def _products_of(regions: Sequence[Region], num_samples: int) -> Iterator[Product]:
    """Yield one sample's share of the products of a layer's regions, and whether a repeated forward repeats them: those after the last
    tensor that autograd keeps are not."""
    last = max((number for number, region in enumerate(regions) if region.repeated), default=-1)
    for number, region in enumerate(regions):
        for index, product in enumerate(region.products):
            is_repeated = number < last or (number == last and index < region.repeated)
            if product.factors in ("weight", "frozen"):
                yield dataclasses.replace(product, rows=product.rows // num_samples, is_repeated=is_repeated)
            else:
                yield dataclasses.replace(product, count=product.count // num_samples, is_repeated=is_repeated)


def _kept_outside(module: nn.Module, layers: Sequence[Layer], watch: ForwardTracer) -> list[tuple[str, KeptBuffer]]:
    """Return the buffers of no layer's modules that get a value after the step, each with the region whose code gives it."""
    roots = [path for layer in layers for path in layer.modules if path]
    return [
        (
            watch.events.kept_after[watch.key(buffer)],
            KeptBuffer(name=name, elements=buffer.numel(), dtype="" if buffer.is_floating_point() else "int64"),
        )
        for name, buffer in module.named_buffers()
        if watch.key(buffer) in watch.events.kept_after and not any(is_below(owner_of(name), root) for root in roots)
    ]


def _exchanges_of(layer: Layer, watch: ForwardTracer, costs: Costs, num_samples: int) -> tuple[Exchange, ...]:
    """Return what the attentions of a block exchange of one sample, where ranks hold parts of sequences."""
    return tuple(
        dataclasses.replace(
            exchange,
            elements=exchange.elements // num_samples,
            is_kept=exchange.role == "output" and costs.saves[key] > 1,
            takes_gradient=exchange.takes_gradient and watch.places.is_reached(point),
            place=watch.places.place(point, layer.called),
        )
        for region, key, exchange, point in watch.events.exchanges
        if layer.is_block and region in layer.regions
    )


def _storages_of(
    count: int, layer_of: Mapping[str, int], costs: Costs, returned: Set[int]
) -> tuple[list[set[int]], ...]:
    """Return the storages that each of `count` layers takes from others, gives to others, and keeps for its backward."""
    inputs, outputs, saved = ([set[int]() for _ in range(count)] for _ in range(3))
    for key, readers in costs.readers.items():
        maker = layer_of[costs.makers[key]] if key in costs.makers else None
        others = [layer_of[reader] for reader in readers if layer_of[reader] != maker]
        if others:
            inputs[others[0]].add(key)
        if others and maker is not None:
            outputs[maker].add(key)
    for key in returned & costs.makers.keys():
        outputs[layer_of[costs.makers[key]]].add(key)
    for key, saver in costs.saved.items():
        saved[layer_of[saver]].add(key)
    return inputs, outputs, saved


def _head_of(last: LayerSpec, sizes: Collection[int]) -> HeadSpec | None:
    """Return the module that makes the logits: that of the last product with a weight, if they are as large; else None."""
    product = next((product for product in reversed(last.products) if product.factors in ("weight", "frozen")), None)
    if product is None or product.groups * product.count * product.taps > 1 or not product.owner:
        return None
    if product.rows * product.columns not in sizes:
        return None
    return HeadSpec(
        owner=product.owner,
        rows=product.rows,
        inner=product.inner,
        columns=product.columns,
        is_frozen=product.factors == "frozen",
    )


def _with_costs(head: HeadSpec, sizes: Mapping[int, int], saved: set[int], peak: int, num_samples: int) -> HeadSpec:
    """Return the head with the elements for one sample that its layer keeps, and works on in the backward, besides the logits."""
    rest = sum(sizes[key] for key in saved if sizes[key] != head.logits * num_samples)
    return dataclasses.replace(head, saved_elements=rest // num_samples, working_elements=peak // num_samples)


def _backward_reads_weights(module: nn.Module, layer: Layer) -> bool:
    """Return whether a gradient flows through a weight to an input; through an embedding it does not."""
    parts = (part for path in layer.called for part in module.get_submodule(path).modules())
    owners = [part for part in parts if any(True for _ in part.parameters(recurse=False))]
    return not all(isinstance(owner, nn.Embedding) for owner in owners)


def _param_specs(
    module: nn.Module,
    layers: list[Layer],
    opened: tuple[str, ...],
    watch: ForwardTracer,
    unused: _Unused,
    uses_of: UsesOfWeights,
) -> tuple[ParamSpec, ...]:
    """Return the spec of each parameter, once, under its first name."""
    names, calls = _names_of(module), watch.modules.of
    meeting = set()
    for alike in names.values():
        owners = {owner_of(name) for name in alike}
        if len(alike) > 1 or any(len(calls.get(owner, ())) > 1 for owner in owners):
            meeting |= owners
    layer_of = {path: index for index, layer in enumerate(layers) for path in layer.modules}
    specs = []
    for name, param in module.named_parameters():
        alike = names[id(param)]
        owners = {owner_of(alias) for alias in alike}
        layer_of_owner = _layer_of(owner_of(name), layer_of, opened)
        uses = uses_of(name, owners)
        # A module's weights are gathered together, so one shared weight makes all of them shared.
        shared = bool(owners & meeting)
        roots = (
            owners if shared else {root for root in layers[layer_of_owner].modules if is_below(owner_of(name), root)}
        )
        entered = [path for path in calls if path in roots]
        is_replaced = not watch.inputs.replaced.isdisjoint(alike)
        spec = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            layer=uses[0].layer if uses else layer_of_owner,
            aliases=tuple(alike[1:]),
            shared=shared,
            called=(
                min((calls[path][0].entered for path in entered), default=0),
                max((calls[path][-1].left for path in entered), default=0),
            ),
            calls=max(1, *(len(calls.get(path, ())) for path in owners)),
            uses=uses if uses and uses[0].layer < uses[-1].layer else (),
            read_outside=is_replaced
            or (any(roots) and any(not roots & running for running in watch.events.readers.get(watch.key(param), ()))),
            is_replaced=is_replaced,
            takes_gradient=bool(entered) and calls[entered[0]][0].takes_gradient,
            trainable=param.requires_grad,
            is_idle=param.requires_grad and id(param) in unused.idle,
            may_be_unused=param.requires_grad and id(param) in unused.perhaps,
            follows=followed_weight(module, name),
            held_as=held_as(module.get_submodule(owner_of(name))) if name.endswith(".weight") else "",
            embeds=next((watch.inputs.embeds[path] for path in owners if path in watch.inputs.embeds), ""),
            sparse_gradient=watch.key(param) in watch.events.sparse
            or any(getattr(module.get_submodule(path), "sparse", False) is True for path in owners),
        )
        specs.append(spec)
    return tuple(specs)


def _names_of(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, by its id; a module at two positions in the tree counts once."""
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        for leaf, param in part.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(param), []).append(f"{path}.{leaf}" if path else leaf)
    return names


def _layer_of(path: str, layer_of: Mapping[str, int], opened: tuple[str, ...]) -> int:
    """Return the index of a module's layer: of its nearest listed ancestor, the nearest module that ran, or 0."""
    if is_outside(path, opened):
        return 0
    above = path
    while above and above not in layer_of:
        above = owner_of(above)
    if above:
        return layer_of[above]
    while path:
        path = owner_of(path)
        near = [index for listed, index in layer_of.items() if is_below(listed, path)]
        if near:
            return min(near)
    return 0
