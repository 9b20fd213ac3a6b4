"""The layers of a traced forward: runs of calls of top-most modules, and the weights that each of them uses.

A block that the model calls again (ALBERT has one, which it calls for every layer) makes a layer for each call, and so does
what the model calls between blocks, so every call of a module with weights is in one layer, in the order of the forward:

    x = block(norm(x)); x = block(norm(x))          norm │ block │ norm#2 │ block#2

The modules into which a trace looks are *opened*: the calls of their children form the layers and the stages. In a model that repeats itself
these are the containers of its blocks (the lists of modules whose children are the repeated layers) and what holds them. In another one, such as
two linear layers with an activation between them, they are the model itself and, where it has few children, the largest of these:

    model ─┬ stem           the calls of stem, encoder.first, encoder.second, head
           ├ encoder ─ first, second
           └ head

A module that `model.stages` names is looked for too, so what is around it is opened, but no block and nothing of torch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from samestep.building.named_tensors import join_name
from samestep.errors import ModelError, did_you_mean
from samestep.models.layer_spec import BeginsStage, LayerSpec
from samestep.models.param_spec import Use
from samestep.models.spec import ModelSpec, is_below, owner_of
from samestep.tracing.costs import Costs
from samestep.tracing.flow import CannotPassError, Flow, makes_event
from samestep.tracing.module_inputs import ForwardCalls, ModuleCall
from samestep.tracing.stage_events import layers_of_events

# -- the modules into which a trace looks ----------------------------------------------------------


def containers_of(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the containers whose children are the blocks: the most repeated one and others at its depth.

    A head of a norm and a linear layer is an nn.Sequential too, but repeats nothing. A dictionary of modules counts only
    where there are no lists: most of them hold a model's embeddings and its list of blocks.
    """
    containers = dict(_outermost("", module, _LISTS)) or {
        path: part for path, part in _outermost("", module, (nn.ModuleDict,)) if _repeated_elements(part)
    }
    if not containers:
        return ()
    repeated = {path: _repeated_elements(container) for path, container in containers.items()}
    sizes = repeated if any(repeated.values()) else {path: _num_elements(part) for path, part in containers.items()}
    best = max(sizes, key=sizes.__getitem__)
    return tuple(path for path, size in sizes.items() if size and _depth(path) == _depth(best))


_LISTS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.Sequential)


def _outermost(path: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost containers that hold weights, without those that mostly consist of another one."""
    total = _num_elements(module)
    is_container = isinstance(module, kinds)
    computed = "parametrizations" if is_parametrized(module) else ""  # a dictionary of lists of what makes its weights
    children = [(join_name(path, name), child) for name, child in module.named_children() if name != computed]
    inner = [c for _, c in children if isinstance(c, kinds) and 2 * _num_elements(c) > total]
    if is_container and total and not inner:
        yield path, module
        return
    for child_path, child in children:
        yield from _outermost(child_path, child, kinds)


def _repeated_elements(container: nn.Module) -> int:
    """Return the weights in children of one class, where there are several of it, or the container is a list."""
    sizes: Counter[type[nn.Module]] = Counter()
    counts: Counter[type[nn.Module]] = Counter()
    for child in container.children():
        sizes[type(child)] += _num_elements(child)
        counts[type(child)] += 1
    least = 1 if isinstance(container, nn.ModuleList) else 2
    return max((size for kind, size in sizes.items() if counts[kind] >= least), default=0)


def _num_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


ENOUGH_CALLS = 16
"""Modules are opened until so many are called, so that stages can be balanced."""
_CLOSED = ("torch", "peft")
"""Packages whose modules may read the weights of their children without calling them, as torch's attention does."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def opened_modules(module: nn.Module, containers: Collection[str], stages: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the modules whose children make calls; `containers` are those of the blocks.

    Raises:
        ModelError: `stages` names no module with weights, or a part of a block.
    """
    opened = dict.fromkeys(containers or _open_by_size(module))
    for name in stages:
        opened |= dict.fromkeys(_around(name, module, containers))
    return tuple(opened)


def _open_by_size(module: nn.Module) -> Iterator[str]:
    """Yield the model, and the largest of what is called as long as that are few modules."""
    called = {"": module}
    while len(called) < ENOUGH_CALLS:
        may = [path for path, part in called.items() if _can_be_opened(part)]
        if not may:
            return
        path = max(may, key=lambda candidate: _num_elements(called[candidate]))
        yield path
        part = called.pop(path)
        prefix = f"{path}." if path else ""
        called |= {f"{prefix}{name}": child for name, child in part.named_children() if makes_event(child)}


def _can_be_opened(part: nn.Module) -> bool:
    """Return whether a module's code is seen to call its children: it is no leaf, and not code of a library."""
    if not any(makes_event(child) for child in part.children()):
        return False
    return type(part) in _CONTAINERS or type(part).__module__.partition(".")[0] not in _CLOSED


def _around(name: str, module: nn.Module, containers: Collection[str]) -> Iterator[str]:
    """Yield the modules around one that `model.stages` names."""
    parts = dict(module.named_modules())
    if name not in parts or not name:
        known = [path for path, part in parts.items() if path and _num_elements(part)]
        raise ModelError("stages-unknown", f"model.stages: the model has no module {name!r}{did_you_mean(name, known)}")
    steps = name.split(".")
    for index in range(len(steps)):
        path = ".".join(steps[:index])
        is_block = any(path != container and is_below(path, container) for container in containers) if path else False
        if is_block or (path and not _can_be_opened(parts[path])):
            what = "a block" if is_block else type(parts[path]).__name__
            raise ModelError(
                "stages-unknown", f"model.stages: {name!r} is a part of {what}, which stays whole. Use {path!r}"
            )
        yield path


# -- layers ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Layer:
    """A layer under construction."""

    name: str = ""
    is_block: bool = False
    block: str = ""
    """Path of its block; empty if it is none."""
    modules: list[str] = field(default_factory=list)
    """Modules that it is the first to call."""
    again: list[str] = field(default_factory=list)
    """Modules that an earlier layer has called before."""
    repeats: str = ""
    """Name of that layer, if both are blocks."""
    regions: list[str] = field(default_factory=list)
    begins_stage: BeginsStage = ""

    @property
    def called(self) -> tuple[str, ...]:
        """Paths of all its modules."""
        return *self.modules, *self.again


def arrange(
    module: nn.Module,
    name: str,
    containers: tuple[str, ...],
    modules: ForwardCalls,
    costs: Costs,
    stages: Sequence[str] = (),
) -> list[Layer]:
    """Return the layers, which are runs of calls of the top-most modules in order, and where pipeline stages may begin.

    Stages begin with blocks, where the model has several; with any call in a model without such a list; and with the modules
    that `stages` names, if it names some.

    Raises:
        ModelError: no call of a module with weights begins with one of `stages`.
    """
    calls = [call for call in modules.order if call in modules.regions]
    if len(calls) < (1 if containers else 2) and not stages:
        owns_weights = any(True for _ in module.parameters(recurse=False))
        paths = [] if owns_weights else [modules.regions[call] for call in calls]
        return [Layer(name=name, modules=paths or [""], regions=list(modules.regions))]
    named = _first_calls(stages, calls, modules)
    layers = _join_calls(containers, modules, named, is_fine=False)
    blocks = sum(layer.is_block for layer in layers)
    in_lists = any(not isinstance(module.get_submodule(path), nn.Sequential) for path in containers)
    if stages:
        for index, layer in enumerate(layers):
            layer.begins_stage = "named" if not index or named & {*layer.regions[:1]} else "no"
    elif blocks < 2 or not in_lists:
        layers = _join_calls(containers, modules, named, is_fine=True)
        flops = [sum(costs.regions[call].flops for call in layer.regions) for layer in layers]
        of_blocks = sum(count for count, layer in zip(flops, layers, strict=True) if layer.is_block)
        prefers_blocks = blocks > 1 and 2 * of_blocks >= sum(flops)
        for layer in layers:
            layer.begins_stage = "if needed" if prefers_blocks and not layer.is_block else "yes"
    layers[0].regions.append("")
    _name(layers, modules)
    return layers


def _first_calls(stages: Sequence[str], calls: Sequence[str], modules: ForwardCalls) -> set[str]:
    """Return the first call at or below each module that `model.stages` names.

    Raises:
        ModelError: there is none, or a stage begins there anyway.
    """
    begins: set[str] = set()
    for name in stages:
        call = next((call for call in calls if is_below(modules.regions[call], name)), None)
        if call is None:
            known = ", ".join(dict.fromkeys(modules.regions[key] for key in calls[1:]))
            raise ModelError(
                "stages-unknown",
                f"model.stages: the forward calls no module with weights at {name!r}. Use these: {known}",
            )
        if call == calls[0]:
            raise ModelError(
                "stages-unknown",
                f"model.stages: the first stage always begins with {name!r}. Use the names of modules that begin later stages",
            )
        begins.add(call)
    return begins


def _join_calls(
    containers: tuple[str, ...], modules: ForwardCalls, begin: Collection[str], *, is_fine: bool
) -> list[Layer]:
    """Return the calls in layers: blocks, and what stands between them, which `is_fine` divides into single calls.

    A layer begins in any case with each call in `begin`.
    """
    layers: list[Layer] = []
    first_of: dict[str, Layer] = {}
    for call in modules.order:
        has_weights = call in modules.regions
        path = modules.regions.get(call, call)
        block = block_of(path, containers)
        last = layers[-1] if layers else None
        begins = has_weights and (call in begin or (is_fine and block is None))
        joins = False
        if last is not None:
            # Another part of the block that runs; the same part again begins a layer.
            is_part = block is not None and last.block == block and path not in last.called
            goes_on = is_part and bool(last.again) == (call != path)
            # One of its kind, or a block before an activation.
            joins = goes_on or ((block is None) != last.is_block and not (block and has_weights))
        if block in first_of and not has_weights:
            layer = first_of[block]
        elif last is not None and joins and not begins:
            layer = last
        elif has_weights:
            layer = Layer(is_block=block is not None, block=block or "")
            layers.append(layer)
            if block is not None:
                first_of.setdefault(block, layer)
        else:
            continue  # a module without weights between layers of another kind
        if has_weights:
            layer.regions.append(call)
            known = layer.again if call != path else layer.modules
            known += [path] if path not in layer.called else []
        elif len(modules.of[path]) == 1:
            layer.modules.append(path)
    return layers


def block_of(path: str, containers: Iterable[str]) -> str | None:
    """Return the path of the container's child that `path` is, or is part of."""
    for container in containers:
        if path != container and is_below(path, container):
            below = path[len(container) + 1 :] if container else path
            child = below.partition(".")[0]
            return f"{container}.{child}" if container else child
    return None


def _name(layers: list[Layer], modules: ForwardCalls) -> None:
    """Name blocks after their paths, and other layers after their modules with weights; number equal names."""
    paths = [[modules.regions[call] for call in layer.regions if call] for layer in layers]
    shorts = ["+".join(path.rpartition(".")[2] for path in some) for some in paths]
    taken = Counter({layer.block: 2 for layer in layers})
    taken.update(short for layer, short in zip(layers, shorts, strict=True) if not layer.is_block and not layer.again)
    caller: dict[str, str] = {}
    count: Counter[str] = Counter()
    for layer, short, some in zip(layers, shorts, paths, strict=True):
        layer.name = layer.block if layer.is_block else short if taken[short] < 2 else "+".join(some)
        count[layer.name] += 1
        if count[layer.name] > 1:
            layer.name = f"{layer.name}#{count[layer.name]}"
        caller.update(dict.fromkeys(layer.modules, layer.name))
        layer.repeats = caller.get(layer.again[0], "") if layer.is_block and layer.again else ""


def modules_entered_again(layers: Sequence[Layer], modules: ForwardCalls) -> list[tuple[tuple[str, int], ...]]:
    """Return for each layer the modules that other layers enter too, and how often this layer enters each."""
    layer_of = {region: index for index, layer in enumerate(layers) for region in layer.regions}
    by_layer: list[dict[str, int]] = [{} for _ in layers]
    for path, calls in modules.of.items():
        counts = Counter(layer_of[call.region] for call in calls if call.is_within)
        for index, count in counts.items() if len(counts) > 1 else ():
            by_layer[index][path] = count
    return [tuple(counts.items()) for counts in by_layer]


class UsesOfWeights:
    """Finds the layers that use each weight: called with the name of a weight and the modules that hold it."""

    def __init__(self, layers: Sequence[Layer], specs: Sequence[LayerSpec], modules: ForwardCalls, flow: Flow) -> None:
        self._layer_of = {region: index for index, layer in enumerate(layers) for region in layer.regions}
        self._modules = modules
        self._events = dict(flow.uses)
        try:
            self._places, num_known = layers_of_events(specs, flow)
        except CannotPassError:  # which matters to a pipeline alone
            self._places, num_known = [0] * len(flow.events), 0
        self._is_clear = num_known == len(layers) or len(layers) == 1

    def __call__(self, name: str, owners: Collection[str]) -> tuple[Use, ...]:
        """Return the uses of a weight in the order of layers; nothing of one that nothing reads."""
        read = {self._places[event] for event in self._events.get(name, ())} if self._is_clear else None
        uses: list[Use] = []
        for path in owners:
            for layer, calls in self._calls(path).items():
                if read is None or layer in read:
                    called = min(call.entered for call in calls), max(call.left for call in calls)
                    uses.append(Use(layer=layer, owner=path, calls=len(calls), called=called))
        uses += [Use(layer=layer) for layer in (read or set()) - {use.layer for use in uses}]
        return tuple(sorted(uses, key=lambda use: (use.layer, use.called, use.owner)))

    def _calls(self, path: str) -> dict[int, list[ModuleCall]]:
        """Return by layer the calls of a module, or where it is not called itself of the nearest one around it."""
        by_layer: dict[int, list[ModuleCall]] = {}
        while path:
            calls: dict[int, list[ModuleCall]] = {}
            for call in self._modules.of.get(path, ()):
                if call.is_within:
                    calls.setdefault(self._layer_of[call.region], []).append(call)
            by_layer = {**calls, **by_layer}
            path = owner_of(path)
        return by_layer


def layers_of_regions(layers: Sequence[LayerSpec], calls: ForwardCalls) -> dict[str, int]:
    """Return the index of the layer to which each region of a forward belongs, where that calls the modules of the trace."""
    indices = (index for index, layer in enumerate(layers) for _ in range(layer.calls))
    regions = [region for region in calls.order if region in calls.regions]
    pairs = zip(regions, indices, strict=False)
    return {region: index for region, index in pairs if calls.regions[region] in layers[index].called}


def with_loss(spec: ModelSpec) -> ModelSpec:
    """Add the loss to the last layer: it writes the log-probabilities of the output, and keeps them for its backward.

    A cross entropy does that, and other losses do little less. Its backward holds their gradient and its own result.
    """
    *others, last = spec.layers
    moved = 2 * last.output_elements
    last = replace(
        last,
        loss_elements=last.output_elements,
        loss_working_elements=2 * last.output_elements,
        moved=last.moved.plus(moved, moved if spec.logit_rows else 0, kernels=3),
    )
    return replace(spec, layers=(*others, last))
