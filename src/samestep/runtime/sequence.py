"""Sequence parallelism on real modules (twin of `strategies/sequence.py`).

What is cut stands between two borders of a block's children: a child that holds tensor-cut modules (attention, MLP) is
given the whole sequence, `gather`, and its row-cut modules give a rank its tokens of their sum, `scatter`. Everything
else in a block must work on each token by itself, which is known of norms, dropouts and plain linear layers, and of experts
and routers where `runtime/locality.py` has shown it; the residual sums are the block's own code. All of it is found out on the meta device, in the forward of one sample: whether the column
cuts read what their part is given, and whether a block hands on what it is given the shape of.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.model import Border, LayerSpec, ModelSpec, is_below
from samestep.program import Program
from samestep.runtime.families import FamilyFacts, facts_of
from samestep.runtime.mesh import Mesh, all_gather, reduce_scatter
from samestep.runtime.record import owned
from samestep.runtime.traced_model import TracedModel

Styles = Mapping[str, str]
"""How modules are cut, by their paths."""
Parts = Mapping[str, tuple[str, ...]]
"""The children of each block that are given whole sequences, by the block's path."""

_COLUMN = ("column", "qkv", "gather", "vocab")


# -- what could be cut, seen in a forward on the meta device ---------------------------------------


@dataclass(slots=True)
class Calls:
    """What the modules of one forward were given and gave: (tensor given, tensor returned), in order of their entry."""

    entered: dict[str, list[Tensor | None]] = field(default_factory=dict)
    left: dict[str, list[Tensor | None]] = field(default_factory=dict)


@contextmanager
def watching(model: nn.Module) -> Iterator[Calls]:
    """Note what every module is given and gives in the forward that runs meanwhile."""
    calls, facts = Calls(), facts_of(model)

    def enter(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        calls.entered.setdefault(path, []).append(_given(args, kwargs, facts))

    def leave(path: str, _: nn.Module, args: Any, output: Any) -> None:
        calls.left.setdefault(path, []).append(_first(output))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, path), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(functools.partial(leave, path)))
        yield calls


def with_sequence(
    spec: ModelSpec, model: nn.Module, styles: Styles, calls: Calls, experts: Collection[str]
) -> tuple[ModelSpec, Parts]:
    """Write into a spec where its sequence may be cut, or why it may not; return with it each block's cut parts."""
    if spec.cut_refusal:
        return replace(spec, sequence_refusal=f"{spec.name} cannot be cut, {spec.cut_refusal}"), {}
    blocks = [layer for layer in spec.layers if layer.is_block]
    if not blocks:
        return replace(spec, sequence_refusal=f"{spec.name} has no blocks"), {}
    parts: dict[str, tuple[str, ...]] = {}
    found: list[tuple[LayerSpec, set[str]]] = []
    try:
        _check_row(spec, blocks, calls)
        for layer in spec.layers:
            if not layer.is_block:
                found.append((layer, set()))
                continue
            path = layer.modules[0]
            parts[path] = _parts(path, model, styles, experts)
            found.append(_bordered(layer, model, spec, styles, calls, parts[path]))
    except _CannotCutError as reason:
        return replace(spec, sequence_refusal=str(reason)), {}
    given = calls.entered[blocks[0].modules[0]][0]
    assert given is not None
    between = set().union(*(names for _, names in found))
    params = tuple(replace(p, partial=p.partial or ("sequence" if p.name in between else "")) for p in spec.params)
    layers = tuple(layer for layer, _ in found)
    return replace(spec, layers=layers, params=params, sequence=given.shape[1], sequence_refusal=""), parts


class _CannotCutError(Exception):
    """Why a sequence cannot be cut."""


def _check_row(spec: ModelSpec, blocks: list[LayerSpec], calls: Calls) -> None:
    """Raise unless the blocks hand one tensor [batch, sequence, features] from each to the next."""
    first = spec.layers.index(blocks[0])
    if spec.layers[first : first + len(blocks)] != tuple(blocks):
        raise _CannotCutError(f"the blocks of {spec.name} do not follow each other")
    handed: Tensor | None = None
    for layer in blocks:
        path = layer.modules[0]
        if len(layer.modules) > 1 or len(calls.entered.get(path, ())) != 1:
            raise _CannotCutError(f"{layer.name} is not one module that is called once")
        given, gave = calls.entered[path][0], calls.left[path][0]
        if given is None or gave is None or given.dim() != 3 or given.shape != gave.shape:
            raise _CannotCutError(f"{path} does not take and give a tensor [batch, sequence, features]")
        if handed is not None and given is not handed:
            raise _CannotCutError(f"{path} is not given what the block before it gives")
        handed = gave


def _bordered(
    layer: LayerSpec, model: nn.Module, spec: ModelSpec, styles: Styles, calls: Calls, parts: tuple[str, ...]
) -> tuple[LayerSpec, set[str]]:
    """Find the borders of a block, and the weights between its cut parts."""
    path = layer.modules[0]
    order = sorted(parts, key=lambda part: list(calls.entered).index(part))
    borders: list[Border] = []
    last: Tensor | None = None
    for part in order:
        given = _one_call(part, calls, calls.entered[path][0])
        if given is not last:
            borders.append(Border(owner=part, elements=given.numel(), kind="gather", has_gradient=given.requires_grad))
        last = given
        for inner in calls.entered:
            if is_below(inner, part) and inner in styles:
                borders += _inner_border(inner, styles[inner], given, calls)
    _check_weights(model, parts, styles)
    between = [
        param
        for param in spec.params
        if param.trainable and is_below(param.name, path) and _stands_between(param.name, parts, styles)
    ]
    if shared := next((param.name for param in between if param.shared), None):
        raise _CannotCutError(f"{shared} is shared, and would be used on a part of the sequence")
    products = tuple(replace(p, is_between=not any(is_below(p.owner, part) for part in parts)) for p in layer.products)
    return replace(layer, products=products, sequence_borders=tuple(borders)), {param.name for param in between}


def _parts(block: str, model: nn.Module, styles: Styles, experts: Collection[str]) -> tuple[str, ...]:
    """Children of a block that hold cut modules; the others must work on each token by itself."""
    facts = facts_of(model)
    parts: list[str] = []
    for name, child in model.get_submodule(block).named_children():
        path = f"{block}.{name}"
        if path in styles:
            raise _CannotCutError(
                f"{path} is cut in the block's own code: put attention and MLP into modules of their own"
            )
        if any(is_below(inner, path) for inner in styles):
            parts.append(path)
        elif not _works_alone(child, path, experts, facts):
            raise _CannotCutError(f"{path}, a {type(child).__name__}, may mix tokens")
    return tuple(parts)


def _works_alone(child: nn.Module, path: str, experts: Collection[str], facts: FamilyFacts) -> bool:
    """Whether a child of a block works on each token by itself: all its parts do, or it holds experts."""
    if any(is_below(inner, path) for inner in experts):
        return True  # which tokens they are is shown by `locality`
    return all(facts.is_tokenwise(module) for module in child.modules() if not any(True for _ in module.children()))


def _one_call(part: str, calls: Calls, block: Tensor | None) -> Tensor:
    given, gave = calls.entered[part][0], calls.left[part][0]
    is_one = len(calls.entered[part]) == 1 and given is not None and gave is not None and block is not None
    if not is_one or given.shape[:2] != block.shape[:2] or gave.shape[:2] != block.shape[:2]:  # type: ignore[union-attr]
        raise _CannotCutError(f"{part} is not called once, with a tensor [batch, sequence, features]")
    assert given is not None
    return given


def _inner_border(path: str, style: str, given: Tensor, calls: Calls) -> list[Border]:
    if style in _COLUMN and any(tensor is not given for tensor in calls.entered[path]):
        raise _CannotCutError(f"{path} is not given what the part of the block around it is given")
    if style != "row":
        return []
    output = calls.left[path][0]
    assert output is not None
    return [Border(owner=path, elements=output.numel(), kind="scatter")]


def _check_weights(model: nn.Module, parts: tuple[str, ...], styles: Styles) -> None:
    """Refuse a weight that is whole within a cut part: its gradient would be that of one rank."""
    for part in parts:
        for path, module in model.get_submodule(part).named_modules(prefix=part):
            if path not in styles and any(True for _ in module.parameters(recurse=False)):
                raise _CannotCutError(f"{path} stays whole within {part}")


def _stands_between(name: str, parts: tuple[str, ...], styles: Styles) -> bool:
    """Whether a weight works on a rank's tokens only: outside the cut parts, or a bias that is added to a row's sum."""
    owner, _, leaf = name.rpartition(".")
    return not any(is_below(name, part) for part in parts) or (styles.get(owner) == "row" and leaf == "bias")


# -- carrying it out -------------------------------------------------------------------------------


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    """Put the borders around the cut parts of each block, and around all blocks."""
    step = program.step
    if not step.layout.sequence_parallel:
        return
    model, group, facts = traced.module, mesh.groups["tp"], traced.facts
    blocks = [layer.modules[0] for layer in step.model.layers if layer.is_block]
    first, last = model.get_submodule(blocks[0]), model.get_submodule(blocks[-1])
    split = functools.partial(_split, group=group, owner=blocks[0])
    first.register_forward_pre_hook(lambda _, args, kwargs: with_given(args, kwargs, split, facts), with_kwargs=True)
    for path in blocks:
        gathered = Shared(gather, group)
        for part in traced.analysis.sequence_parts[path]:
            once = functools.partial(gathered, part)
            model.get_submodule(part).register_forward_pre_hook(
                functools.partial(_gather_given, once, facts), with_kwargs=True
            )
    join = functools.partial(_join, group=group, owner=blocks[-1])
    last.register_forward_hook(lambda _, args, output: with_first(output, join))


def _gather_given(gather: Callable[[Tensor], Tensor], facts: FamilyFacts, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return with_given(args, kwargs, gather, facts)


class Shared:
    """A move, made once for all modules that are given one tensor in turn, as q, k and v, or the parts of a parallel block.

    In the backward they share one sum.
    """

    def __init__(self, move: Move, group: dist.ProcessGroup) -> None:
        self._move, self._group = move, group
        self._given: weakref.ref[Tensor] | None = None
        self._moved: Tensor | None = None

    def __call__(self, path: str, x: Tensor) -> Tensor:
        """Return x moved, by the module of this path if it is the first one that is given it."""
        if self._moved is not None and self._given is not None and self._given() is x:
            return self._moved
        moved = self._move(x, self._group, path)
        self._given, self._moved = weakref.ref(x, self._forget), moved
        return moved

    def _forget(self, given: weakref.ref[Tensor]) -> None:
        """Let go of what was moved, and of the graph behind it, with the tensor it was made of."""
        if given is self._given:
            self._given = self._moved = None


def with_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], facts: FamilyFacts
) -> Any:
    """Change the tensor that a module is given first."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = facts.name_of_hidden(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensor that a module gives first."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], facts: FamilyFacts) -> Tensor | None:
    given = args[0] if args else kwargs[facts.name_of_hidden(kwargs)] if kwargs else None
    return given if isinstance(given, Tensor) else None


def _first(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None


# -- the borders -----------------------------------------------------------------------------------


Move = Callable[[Tensor, dist.ProcessGroup, str], Tensor]


class _Moved(torch.autograd.Function):
    """One move of a sequence over the ranks in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.owner, ctx.back = group, owner, back
        return there(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], ctx.group, ctx.owner), None, None, None, None


def gather(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Put the sequence together from all ranks; sum the gradients of all, and hand each rank its tokens'."""
    return _Moved.apply(x, group, owner, _all_gathered, _reduce_scattered)


def scatter(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Sum x over the ranks and keep this rank's tokens; put the gradients of all tokens together."""
    return _Moved.apply(x, group, owner, _reduce_scattered, _all_gathered)


def _split(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Keep this rank's tokens of what all ranks hold."""
    degree = dist.get_world_size(group)
    if x.shape[1] % degree:
        raise LayoutError(
            f"sequence_parallel: tp={degree} does not divide the {x.shape[1]} tokens of this batch; "
            f"{x.shape[1] // degree * degree} tokens work, and so does tp={degree} alone"
        )
    return _Moved.apply(x, group, owner, _own, _all_gathered)


def _join(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Put the sequence together; every rank goes on alike with the whole."""
    return _Moved.apply(x, group, owner, _all_gathered, _own)


def _own(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """[batch, sequence, features] that all ranks hold to this rank's [batch, sequence / N, features]."""
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def _all_gathered(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """[batch, sequence / N, features] of each rank to [batch, sequence, features]."""
    degree = dist.get_world_size(group)
    parts = x.new_empty(degree * x.shape[0], *x.shape[1:])
    with owned(owner):
        all_gather(parts, x.contiguous(), group=group)
    return parts.view(degree, *x.shape).transpose(0, 1).flatten(1, 2)


def _reduce_scattered(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """[batch, sequence, features] of each rank to this rank's [batch, sequence / N, features] of their sum."""
    degree = dist.get_world_size(group)
    parts = x.unflatten(1, (degree, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    with owned(owner):
        reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine
