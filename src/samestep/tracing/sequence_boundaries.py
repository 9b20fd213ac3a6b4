"""Boundaries within a block, between which sequence parallelism cuts the sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import FamilyFacts, facts_of
from samestep.models.spec import Boundary, LayerSpec, ModelSpec, is_below

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
    layer: LayerSpec, model: nn.Module, spec: ModelSpec, styles: Styles, calls: Calls, parts: tuple[str, ...]
) -> tuple[LayerSpec, set[str]]:
    """Return a block with its boundaries, and the names of the weights used between its cut parts."""
    path = layer.modules[0]
    ran = [module for module in calls.entered if module in parts]
    boundaries: list[Boundary] = []
    last: tuple[Tensor, tuple[int, bool]] | None = None
    for part in ran:
        given, state = _one_call(part, calls, calls.entered[path][0]), calls.states[part]
        if last is None or given is not last[0] or state != last[1]:
            _, takes_gradients = state
            has_gradient = given.requires_grad and takes_gradients
            boundaries.append(Boundary(owner=part, elements=given.numel(), kind="gather", has_gradient=has_gradient))
        last = given, state
        for inner in calls.entered:
            if is_below(inner, part) and inner in styles:
                boundaries += _inner_boundary(inner, styles[inner], given, calls)
    _check_weights(model, ran, styles)
    between = [
        param
        for param in spec.params
        if param.trainable and is_below(param.name, path) and _stands_between(param.name, parts, styles)
    ]
    if shared := next((param.name for param in between if param.shared), None):
        raise _CannotCutError(f"{shared} is shared, and would be used on a part of the sequence")
    products = tuple(replace(p, is_between=not any(is_below(p.owner, part) for part in parts)) for p in layer.products)
    return replace(layer, products=products, sequence_boundaries=tuple(boundaries)), {param.name for param in between}


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
    return given


def _inner_boundary(path: str, style: str, given: Tensor, calls: Calls) -> list[Boundary]:
    if style in _COLUMN and any(tensor is not given for tensor in calls.entered[path]):
        raise _CannotCutError(f"{path} does not get the input of the part of the block around it")
    if style == "gather":
        raise _CannotCutError(f"the output of {path} is gathered within the part of the block around it")
    if style != "row":
        return []
    output = calls.left[path][0]
    assert output is not None
    return [Boundary(owner=path, elements=output.numel(), kind="scatter", has_gradient=output.requires_grad)]


def _check_weights(model: nn.Module, parts: Sequence[str], styles: Styles) -> None:
    """Refuse a weight that is whole within a cut part: its gradient would be that of one rank alone.

    Raises:
        _CannotCutError: there is one.
    """
    for part in parts:
        for path, module in model.get_submodule(part).named_modules(prefix=part):
            if path not in styles and any(True for _ in module.parameters(recurse=False)):
                raise _CannotCutError(f"{path} stays whole within {part}")


def _stands_between(name: str, parts: tuple[str, ...], styles: Styles) -> bool:
    """Return whether a weight is used on a rank's tokens alone: outside the cut parts, or a row cut's bias."""
    owner, _, leaf = name.rpartition(".")
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
