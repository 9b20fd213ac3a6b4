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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.initial_values import blueprint
from samestep.building.model import model_source
from samestep.building.nf4 import mark_of
from samestep.building.several_models import followed_weight
from samestep.errors import ModelError
from samestep.job import Job
from samestep.models.layer_parts import (
    BatchValueCall,
    Exchange,
    HeadSpec,
    KeptBuffer,
    Product,
)
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, is_below
from samestep.state.snapshot import GivenWeights, Snapshot
from samestep.tracing.arranged_layers import Layer, UsesOfWeights, arrange, modules_entered_again
from samestep.tracing.backward import (
    Backward,
    WorkingSet,
    idle_weights,
    nodes_of,
    roots_of_loss,
    unlike_weights,
    watch_backward,
    working_sets,
)
from samestep.tracing.checkpointed import TracedPlaces
from samestep.tracing.containers import containers_of
from samestep.tracing.crossings import with_crossings, with_cut_crossings
from samestep.tracing.flow import takes_statistics
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.looks import paths_within
from samestep.tracing.meta_tensors import DRAWN_ELEMENTS, KNOWN_WEIGHTS, NeedsValuesError
from samestep.tracing.moved_elements import OtherWork
from samestep.tracing.opened_modules import opened_modules
from samestep.tracing.operations import Recorder, Region
from samestep.tracing.token_parts import of_one_sample, token_parts_of
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
    places: TracedPlaces | None = None,
    styles: Mapping[str, str] | None = None,
    recorder: Recorder | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    stages: Sequence[str] = (),
    keeps_all: bool = False,
) -> ModelSpec:
    """Return the spec of a module on the meta device from one forward; `sample` is a batch of one real sample.

    `value_of` serves code that looks at the values of buffers and weights; without it such code is refused. `places`
    follows the forward's checkpoints, and what autograd keeps.
    `styles` are the cut styles of modules by path: tensors between a column cut and a row cut are cut too.
    `recorder` records all operations. `loss` is called with the outputs and the sample, to find the weights that take no
    part in it. `stages` are the modules with which pipeline stages begin, if others than blocks. `keeps_all` is whether its code is
    known to look at values.

    Raises:
        ModelError: the forward fails, or needs values that are not known.
    """
    num_samples = samples_traced(module)
    containers = containers_of(module)
    opened = opened_modules(module, containers, stages)
    watch = ForwardTracer(module, styles or {}, keeps_all=keeps_all, recorder=recorder, places=places)
    before, weights = Snapshot(module), GivenWeights(module)
    try:
        outputs = watch_forward(module, sample, num_samples, name, opened, watch, value_of)
    except NeedsValuesError:
        if value_of is None or keeps_all:
            raise ModelError(_unseen(name, watch)) from None
        looked = watch.innermost or name
        before.restore()  # caches that the first attempt has filled hold no values
        watch.places.restart()
        watch = ForwardTracer(module, styles or {}, keeps_all=True, places=places)
        watch.varies = looked
        try:
            outputs = watch_forward(module, sample, num_samples, name, opened, watch, value_of)
        except NeedsValuesError:
            raise ModelError(_unseen(name, watch)) from None
    with weights.given():  # which the forward may have replaced
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
    num_samples = samples_traced(module)
    roots, names = roots_of_loss(outputs, sample, loss, num_samples)
    watch.places.reach(roots)
    has_looked = bool(watch.varies or watch.has_looked)
    unused = idle_weights(module, outputs, roots)
    idle = _never_read(module, watch) & unused if watch.varies else frozenset[int]() if has_looked else unused
    if not has_looked:
        watch.flow = watch.flow_recorder.with_idle(nodes_of(roots))
    unused |= _unsure(module, watch, roots if loss is not None and len(roots) > 1 else [])
    backward = watch_backward(module, tensors_in(getattr(outputs, "logits", outputs)), watch)
    layers = arrange(module, name, containers, watch, stages)
    assert watch.flow is not None
    specs = _layer_specs(module, layers, watch, backward, num_samples)
    uses_of = UsesOfWeights(layers, specs, watch)
    params = _param_specs(module, layers, opened, watch, _Unused(idle, unused), uses_of)
    first = min((param.layer for param in params if param.trainable and not param.is_idle), default=0)
    specs = tuple(dataclasses.replace(spec, has_backward=index >= first) for index, spec in enumerate(specs))
    if watch.cut:
        specs = with_cut_crossings(specs, watch.flow, watch.flow_recorder.values_in(watch.cut))
    varies = watch.varies or (watch.picks if watch.picks_none else "")
    return ModelSpec(
        name=name,
        layers=with_crossings(specs, watch.flow, module, num_samples),
        params=params,
        kept_after=tuple(name for name, buffer in module.named_buffers() if watch.key(buffer) in watch.kept_after),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        coupled_modules=_coupled_modules(module),
        looks=has_looked,
        varies_at=varies,
        varies_within=bool(varies) and watch.varies_within,
        picks_at="" if varies else watch.picks,
        looks_in=watch.looks.paths if varies else (),
        differentiates_at=watch.flow_recorder.differentiates_at,
        loss_names=names,
    )


def samples_traced(module: nn.Module) -> int:
    """Return the number of copies of a sample that are traced: batch norm refuses a batch of one."""
    return 2 if _coupled_modules(module) else 1


def _coupled_modules(module: nn.Module) -> tuple[str, ...]:
    return tuple(path for path, part in module.named_modules() if _couples_samples(part))


def _couples_samples(module: nn.Module) -> bool:
    """Return whether samples of a batch influence each other through this module, or through its statistics."""
    return takes_statistics(module) and (module.training or getattr(module, "running_mean", None) is None)


def _unseen(name: str, watch: ForwardTracer) -> str:
    """Return the message about code that looks at values that a trace does not have."""
    return (
        f"{name} cannot be traced: {watch.reached} looks at the values of a tensor (as .item(), `if`, x[mask] or a loop over "
        f"experts do), and the meta device has none; models of up to {KNOWN_WEIGHTS:,} weights are run once to see, larger ones "
        f"with drawn values of tensors of up to {DRAWN_ELEMENTS:,} elements, and a form that does not look, as torch.where, "
        "always works"
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
        if path not in within and watch.key(param) not in watch.stacks
    )


def _unsure(module: nn.Module, watch: ForwardTracer, outputs: Sequence[Tensor]) -> frozenset[int]:
    """Return the ids of weights that other values may leave unused: those read after a look at values, where shapes or
    branches
    follow from them, and of a loss that no trace shows those on which not all of the model's `outputs` depend."""
    behind = {
        id(param)
        for param in module.parameters()
        if watch.varies and param.requires_grad and watch.key(param) not in watch.read_before_look
    }
    return unlike_weights(outputs) | behind


# -- from a traced forward to a spec ---------------------------------------------------------------


def _layer_specs(
    module: nn.Module, layers: list[Layer], watch: ForwardTracer, backward: Backward, num_samples: int
) -> tuple[LayerSpec, ...]:
    """Return the spec of each layer, summed over its regions."""
    layer_of = {region: index for index, layer in enumerate(layers) for region in layer.regions}
    working, in_norms = (working_sets(backward, layer_of, watch, in_norms=one) for one in (False, True))
    inputs, outputs, saved = _storages_of(len(layers), layer_of, watch)

    def elements(keys: set[int]) -> int:
        return sum(watch.sizes[key] for key in keys) // num_samples

    specs = []
    entered = modules_entered_again(layers, watch)
    outside = _kept_outside(module, layers, watch)
    for index, layer in enumerate(layers):
        regions = [watch.regions[path] for path in layer.regions]
        results = set[int]().union(*(region.results for region in regions))
        kept = inputs[index] | results
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
            saved_pair_elements=elements(saved[index] & watch.pairs),
            saved_norm_elements=elements(norms := saved[index] & watch.norm_savers.keys())
            + elements(norms & watch.savers.keys()),
            input_norm_elements=elements((inputs[index] & watch.norm_savers.keys()) - watch.savers.keys()),
            saved_selective_elements=elements(kept),
            saved_cut_elements=elements(saved[index] & watch.cut),
            saved_selective_cut_elements=elements(kept & watch.cut),
            products=tuple(_of_one(part, num_samples) for part in _products_of(regions)),
            backward_reads_weights=_backward_reads_weights(module, layer),
            exchanges=_exchanges_of(layer, watch, num_samples),
            token_parts=tuple(
                of_one_sample(one, num_samples) for one in token_parts_of(module, layer, layer_of, watch, backward)
            ),
            batch_values=_batch_values_of(layer, watch),
            batch_norms=tuple(call for region, call in watch.batch_norms if region in layer.regions),
            kept=tuple(one for region, one in outside if region in layer.regions),
        )
        most, of_norms = (sets.get(index, WorkingSet()) for sets in (working, in_norms))
        spec = _with_other_work(spec, watch.moved.of({*layer.regions}, watch.sizes, watch.returned), num_samples)
        specs.append(_with_working(spec, most, of_norms, num_samples))
    if head := _head_of(specs[-1], {watch.sizes[key] // num_samples for key in outputs[-1]}):
        logits = head.logits * num_samples
        kept = {key for key in saved[-1] if watch.sizes[key] != logits}
        works_on = working_sets(backward, layer_of, watch, logits).get(len(layers) - 1, WorkingSet()).elements
        head = dataclasses.replace(head, saved_elements=elements(kept), working_elements=works_on // num_samples)
        specs[-1] = dataclasses.replace(specs[-1], head=head)
    return tuple(specs)


def _with_other_work(spec: LayerSpec, other: OtherWork, num_samples: int) -> LayerSpec:
    """Return a layer with what one sample's forward moves besides its products, and the part of it that fused groups spare."""
    return dataclasses.replace(
        spec,
        moved_elements=other.moved // num_samples,
        moved_cut_elements=other.moved_cut // num_samples,
        kernels=other.kernels,
        fusible_elements=other.fusible // num_samples,
        fusible_cut_elements=other.fusible_cut // num_samples,
        fusible_kernels=other.fusible_kernels,
    )


def _with_working(spec: LayerSpec, most: WorkingSet, of_norms: WorkingSet, num_samples: int) -> LayerSpec:
    """Return a layer with the elements of one sample that are alive in its backward, and in that of its norms."""
    return dataclasses.replace(
        spec,
        working_elements=most.elements // num_samples,
        working_cut_elements=most.cut_elements // num_samples,
        working_weights=most.weights,
        norm_working_elements=of_norms.elements // num_samples,
        norm_working_cut_elements=of_norms.cut_elements // num_samples,
        norm_working_wide_elements=of_norms.wide_elements // num_samples,
        norm_working_weights=of_norms.weights,
    )


def _products_of(regions: Sequence[Region]) -> Iterator[Product]:
    """Yield the products of a layer's regions, and whether a repeated forward repeats them: those after the last tensor that
    autograd keeps are not."""
    last = max((number for number, region in enumerate(regions) if region.repeated), default=-1)
    for number, region in enumerate(regions):
        for index, product in enumerate(region.products):
            is_repeated = number < last or (number == last and index < region.repeated)
            yield dataclasses.replace(product, is_repeated=is_repeated)


def _batch_values_of(layer: Layer, watch: ForwardTracer) -> tuple[BatchValueCall, ...]:
    """Return the calls of a layer whose values depend on the whole batch, in the order of the forward."""
    return tuple(
        dataclasses.replace(call, is_only_kept=watch.keeps_all_values)
        for region, call in watch.batch_values
        if region in layer.regions
    )


def _kept_outside(module: nn.Module, layers: Sequence[Layer], watch: ForwardTracer) -> list[tuple[str, KeptBuffer]]:
    """Return the buffers of no layer's modules that get a value after the step, each with the region whose code gives it."""
    roots = [path for layer in layers for path in layer.modules if path]
    return [
        (
            watch.kept_after[watch.key(buffer)],
            KeptBuffer(name=name, elements=buffer.numel(), dtype="" if buffer.is_floating_point() else "int64"),
        )
        for name, buffer in module.named_buffers()
        if watch.key(buffer) in watch.kept_after and not any(is_below(name.rpartition(".")[0], root) for root in roots)
    ]


def _exchanges_of(layer: Layer, watch: ForwardTracer, num_samples: int) -> tuple[Exchange, ...]:
    """Return what the attentions of a block exchange of one sample, where ranks hold parts of sequences."""
    return tuple(
        dataclasses.replace(
            exchange,
            elements=exchange.elements // num_samples,
            is_kept=exchange.role == "output" and watch.saves[key] > 1,
            takes_gradient=exchange.takes_gradient and watch.places.is_reached(point),
            place=watch.places.place(point, layer.called),
        )
        for region, key, exchange, point in watch.exchanges
        if layer.is_block and region in layer.regions
    )


def _storages_of(count: int, layer_of: Mapping[str, int], watch: ForwardTracer) -> tuple[list[set[int]], ...]:
    """Return the storages that each of `count` layers takes from others, gives to others, and keeps for its backward."""
    inputs, outputs, saved = ([set[int]() for _ in range(count)] for _ in range(3))
    for key, readers in watch.readers.items():
        maker = layer_of[watch.makers[key]] if key in watch.makers else None
        others = [layer_of[reader] for reader in readers if layer_of[reader] != maker]
        if others:
            inputs[others[0]].add(key)
        if others and maker is not None:
            outputs[maker].add(key)
    for key in watch.returned & watch.makers.keys():
        outputs[layer_of[watch.makers[key]]].add(key)
    for key, saver in (watch.norm_savers | watch.savers).items():
        saved[layer_of[saver]].add(key)
    return inputs, outputs, saved


def _head_of(last: LayerSpec, sizes: Collection[int]) -> HeadSpec | None:
    """Return the module that makes the logits: that of the last product with a weight, if they are as large; else None."""
    product = next((one for one in reversed(last.products) if one.factors in ("weight", "frozen")), None)
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


def _of_one(product: Product, num_samples: int) -> Product:
    """Return a product's share of one sample."""
    if product.factors in ("weight", "frozen"):
        return dataclasses.replace(product, rows=product.rows // num_samples)
    return dataclasses.replace(product, count=product.count // num_samples)


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
    names = _names_of(module)
    meeting = set()
    for alike in names.values():
        owners = {_owner(name) for name in alike}
        if len(alike) > 1 or any(len(watch.visits.get(owner, ())) > 1 for owner in owners):
            meeting |= owners
    layer_of = {path: index for index, layer in enumerate(layers) for path in layer.modules}
    specs = []
    for name, param in module.named_parameters():
        alike = names[id(param)]
        owners = {_owner(alias) for alias in alike}
        own = _layer_of(_owner(name), layer_of, opened)
        uses = uses_of(name, owners)
        # A module's weights are gathered together, so one shared weight makes all of them shared.
        shared = bool(owners & meeting)
        roots = owners if shared else {root for root in layers[own].modules if is_below(_owner(name), root)}
        entered = [path for path in watch.visits if path in roots]
        is_replaced = not watch.slots.replaced.isdisjoint(alike)
        spec = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            layer=uses[0].layer if uses else own,
            aliases=tuple(alike[1:]),
            shared=shared,
            called=(
                min((watch.visits[path][0].entered for path in entered), default=0),
                max((watch.visits[path][-1].left for path in entered), default=0),
            ),
            calls=max(1, *(len(watch.visits.get(path, ())) for path in owners)),
            uses=uses if uses and uses[0].layer < uses[-1].layer else (),
            read_outside=is_replaced
            or (any(roots) and any(not roots & running for running in watch.stacks.get(watch.key(param), ()))),
            is_replaced=is_replaced,
            takes_gradient=bool(entered) and entered[0] in watch.taking_gradient,
            trainable=param.requires_grad,
            is_idle=param.requires_grad and id(param) in unused.idle,
            may_be_unused=param.requires_grad and id(param) in unused.perhaps,
            follows=followed_weight(module, name),
            held_as=mark_of(module.get_submodule(_owner(name))) if name.endswith(".weight") else "",
            embeds=next((watch.lookups.by_path[path] for path in owners if path in watch.lookups.by_path), ""),
            sparse_gradient=any(getattr(module.get_submodule(path), "sparse", False) is True for path in owners),
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


def _owner(param_name: str) -> str:
    return param_name.rpartition(".")[0]


def _layer_of(path: str, layer_of: Mapping[str, int], opened: tuple[str, ...]) -> int:
    """Return the index of a module's layer: of its nearest listed ancestor, the nearest module that ran, or 0."""
    if is_outside(path, opened):
        return 0
    above = path
    while above and above not in layer_of:
        above = above.rpartition(".")[0]
    if above:
        return layer_of[above]
    while path:
        path = path.rpartition(".")[0]
        near = [index for listed, index in layer_of.items() if is_below(listed, path)]
        if near:
            return min(near)
    return 0
