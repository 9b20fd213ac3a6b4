"""Boundaries within a block, between which sequence parallelism cuts the sequence.

A part of a block that tp cuts is given the whole sequence. Where its column cuts read what it is given, and its sums are
what it returns, these become all_gathers and reduce_scatters. Any other part is entered and left: it computes on the whole
sequence as under tp alone, with the same sums, as one does with a fused projection whose output is gathered, with
latent attention, or with a norm of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import FamilyFacts, facts_of
from samestep.models.spec import Boundary, BoundaryKind, LayerSpec, ModelSpec, is_below
from samestep.tracing.meta_tensors import address
from samestep.tracing.operations import Operation

Styles = Mapping[str, str]
"""Cut style of each module, by its path."""
Parts = Mapping[str, tuple[str, ...]]
"""Children of each block that are given whole sequences, by the block's path."""

_COLUMN = ("column", "qkv", "gather", "vocab")


# -- possible boundaries, seen in a forward on the meta device -------------------------------------


@dataclass(slots=True)
class Calls:
    """Inputs and outputs of the modules of one forward, in the order of entry and of exit."""

    entered: dict[str, list[Tensor | None]] = field(default_factory=dict)
    left: dict[str, list[Tensor | None]] = field(default_factory=dict)
    states: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """`state_of` the tensor that a module is given in its first call."""
    copied: frozenset[str] = frozenset()
    """Modules at whose input `copy` sums a gradient under a tensor cut, by their paths."""
    cut: frozenset[int] = frozenset()
    """Storages that hold a part, or a summand, on each rank."""
    readers: Mapping[int, set[str]] = field(default_factory=dict)
    """Modules whose code reads each storage."""


@contextmanager
def record_calls(model: nn.Module) -> Iterator[Calls]:
    """Record the first tensor that every module is given and returns, in a forward that runs inside."""
    calls, facts = Calls(), facts_of(model)

    def enter(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = given_of(args, kwargs, facts)
        calls.entered.setdefault(path, []).append(given)
        if given is not None:
            calls.states.setdefault(path, state_of(given))

    def leave(path: str, _: nn.Module, args: Any, output: Any) -> None:
        calls.left.setdefault(path, []).append(first_of(output))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, path), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(functools.partial(leave, path)))
        yield calls


def readers_of(operations: Sequence[Operation]) -> dict[int, set[str]]:
    """Return the modules whose code reads each storage of a recorded forward."""
    found: dict[int, set[str]] = {}
    for op in operations:
        for view in op.given if op.func not in ("left", "outputs") else ():
            found.setdefault(view.storage, set()).add(op.where)
    return found


def with_sequence(spec: ModelSpec, model: nn.Module, styles: Styles, calls: Calls) -> tuple[ModelSpec, Parts]:
    """Return the spec with the boundaries of its sequence, or a refusal; and with it each block's cut parts."""
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
            parts[path] = _parts(path, model, styles)
            found.append(_with_boundaries(layer, model, spec, styles, calls, parts[path]))
    except _CannotCutError as reason:
        return replace(spec, sequence_refusal=str(reason)), {}
    given = calls.entered[blocks[0].modules[0]][0]
    assert given is not None
    between = set().union(*(names for _, names in found))
    params = tuple(replace(p, partial=p.partial or ("sequence" if p.name in between else "")) for p in spec.params)
    layers = tuple(layer for layer, _ in found)
    return replace(spec, layers=layers, params=params, sequence=given.shape[1], sequence_refusal=""), parts


class _CannotCutError(Exception):
    """The reason why a sequence cannot be cut."""


def _check_row(spec: ModelSpec, blocks: list[LayerSpec], calls: Calls) -> None:
    """Check that the blocks pass one tensor [batch, sequence, features] from each to the next.

    Raises:
        _CannotCutError: they do not.
    """
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
            raise _CannotCutError(f"{path} does not map a tensor [batch, sequence, features] to one of the same shape")
        if handed is not None and given is not handed:
            raise _CannotCutError(f"{path} does not get the output of the block before it")
        handed = gave


def _with_boundaries(
    layer: LayerSpec,
    model: nn.Module,
    spec: ModelSpec,
    styles: Styles,
    calls: Calls,
    parts: tuple[str, ...],
) -> tuple[LayerSpec, set[str]]:
    """Return a block with its boundaries, and the names of the weights used between its cut parts."""
    path = layer.modules[0]
    ran = [module for module in calls.entered if module in parts]
    given = {part: _one_call(part, calls, calls.entered[path][0]) for part in ran}
    inner = {part: _inner_boundaries(part, model, styles, given[part], calls) for part in ran}
    whole = {part for part in ran if any(inner[one] is None for one in ran if given[one] is given[part])}
    if whole and (
        outer := next((o for o in calls.copied if is_below(o, path) and not any(is_below(o, p) for p in parts)), "")
    ):
        raise _CannotCutError(
            f"the gradient of the input of {outer} is summed, and {min(whole)} computes below it as a whole"
        )
    boundaries: list[Boundary] = []
    last: dict[bool, tuple[Tensor, tuple[int, bool]]] = {}
    for part in ran:
        is_whole, now = part in whole, (given[part], calls.states[part])
        before = last.get(is_whole)
        if before is None or before[0] is not now[0] or before[1] != now[1]:
            kind: BoundaryKind = "enter" if is_whole else "gather"
            boundaries.append(_boundary(part, kind, now[0], has_gradient=now[0].requires_grad and now[1][1]))
        last[is_whole] = now
        if is_whole:
            gave = calls.left[part][0]
            assert gave is not None
            boundaries.append(_boundary(part, "leave", gave, has_gradient=gave.requires_grad))
        else:
            boundaries += inner[part] or ()
    between = [
        param
        for param in spec.params
        if param.trainable and is_below(param.name, path) and _stands_between(param.name, parts, whole, styles)
    ]
    if shared := next((param.name for param in between if param.shared), None):
        raise _CannotCutError(f"{shared} is shared, and would be used on a part of the sequence")
    products = tuple(replace(p, is_between=not any(is_below(p.owner, part) for part in parts)) for p in layer.products)
    return replace(layer, products=products, sequence_boundaries=tuple(boundaries)), {param.name for param in between}


def _boundary(owner: str, kind: BoundaryKind, tensor: Tensor, *, has_gradient: bool) -> Boundary:
    return Boundary(owner=owner, elements=tensor.numel(), kind=kind, has_gradient=has_gradient)


def _parts(block: str, model: nn.Module, styles: Styles) -> tuple[str, ...]:
    """Return the children of a block that hold cut modules; `sequence_proof` shows what the rest of the block does.

    Raises:
        _CannotCutError: the block's own code uses a cut module.
    """
    parts: list[str] = []
    for name in dict(model.get_submodule(block).named_children()):
        path = f"{block}.{name}"
        if path in styles:
            raise _CannotCutError(
                f"{path} is cut in the block's own code: put attention and MLP into modules of their own"
            )
        if any(is_below(inner, path) for inner in styles):
            parts.append(path)
    return tuple(parts)


def _one_call(part: str, calls: Calls, block: Tensor | None) -> Tensor:
    given, gave = calls.entered[part][0], calls.left[part][0]
    is_one = len(calls.entered[part]) == 1 and given is not None and gave is not None and block is not None
    if not is_one or given.shape[:2] != block.shape[:2] or gave.shape[:2] != block.shape[:2]:  # type: ignore[union-attr]
        raise _CannotCutError(f"{part} is not called once, with a tensor [batch, sequence, features]")
    assert given is not None
    assert gave is not None
    if {address(given), address(gave)} & calls.cut:
        raise _CannotCutError(f"{part} is given, or returns, what tp cuts: put both cuts into one module")
    return given


def _inner_boundaries(
    part: str, model: nn.Module, styles: Styles, given: Tensor, calls: Calls
) -> list[Boundary] | None:
    """Return the sums of a part of a block that leave a rank its tokens; None for a part that computes as under tp alone."""
    found: list[Boundary] = []
    for path, module in model.get_submodule(part).named_modules(prefix=part):
        if path not in styles and any(True for _ in module.parameters(recurse=False)):
            return None  # the gradient of a whole weight would be that of one rank's tokens alone
    by_columns = [path for path, style in styles.items() if style in _COLUMN]
    for where in calls.readers.get(address(given), ()):
        if is_below(where, part) and not any(is_below(where, path) for path in by_columns):
            return None  # as where a part adds what it is given to what it returns
    for path in calls.entered:
        style = styles.get(path) if is_below(path, part) else None
        if style == "gather" or (style in _COLUMN and any(tensor is not given for tensor in calls.entered[path])):
            return None
        if style == "row":
            output = calls.left[path][0]
            assert output is not None
            found.append(_boundary(path, "scatter", output, has_gradient=output.requires_grad))
    return found


def _stands_between(name: str, parts: tuple[str, ...], whole: Collection[str], styles: Styles) -> bool:
    """Return whether a weight is used on a rank's tokens alone: outside the cut parts, or the bias of a scattered sum."""
    owner, _, leaf = name.rpartition(".")
    if any(is_below(name, part) for part in whole):
        return False
    return not any(is_below(name, part) for part in parts) or (styles.get(owner) == "row" and leaf == "bias")


def state_of(given: Tensor) -> tuple[int, bool]:
    """Return what must be the same for one move of a tensor to serve two modules: how often the tensor was written, and
    whether autograd records.
    """
    return given._version, torch.is_grad_enabled()


def with_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], facts: FamilyFacts
) -> Any:
    """Return a module's arguments with its first tensor changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = facts.name_of_hidden(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with its first tensor changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def given_of(args: tuple[Any, ...], kwargs: dict[str, Any], facts: FamilyFacts) -> Tensor | None:
    """Return the first tensor that a module is given."""
    given = args[0] if args else kwargs[facts.name_of_hidden(kwargs)] if kwargs else None
    return given if isinstance(given, Tensor) else None


def first_of(output: Any) -> Tensor | None:
    """Return the first tensor that a module returns."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None
