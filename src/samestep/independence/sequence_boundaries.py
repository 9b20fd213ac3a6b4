"""Boundaries within a block, between which sequence parallelism cuts the sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.building.families import FamilyFacts, facts_of
from samestep.building.named_tensors import address
from samestep.independence.cut_proof import CutProof
from samestep.models.layer_parts import Boundary, BoundaryKind
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, is_below
from samestep.tracing.checkpointed import Point, TracedPlaces
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
    places: TracedPlaces = field(default_factory=TracedPlaces)
    """The points of the forward."""
    points: dict[tuple[str, Literal["entered", "left"]], Point] = field(default_factory=dict)
    """Those at which each module is entered, and left, last."""


@contextmanager
def record_calls(model: nn.Module, places: TracedPlaces) -> Iterator[Calls]:
    """Record the first tensor that every module is given and returns, in a forward that runs inside, whose points `places` has."""
    calls, facts = Calls(places=places), facts_of(model)

    def enter(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = first_input_of(args, kwargs, facts)
        calls.entered.setdefault(path, []).append(given)
        calls.points[path, "entered"] = places.point()
        if given is not None:
            calls.states.setdefault(path, state_of(given))

    def leave(path: str, _: nn.Module, args: Any, output: Any) -> None:
        calls.left.setdefault(path, []).append(first_of(output))
        calls.points[path, "left"] = places.point(output)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, path), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(functools.partial(leave, path)))
        yield calls


def _readers_of(operations: Sequence[Operation]) -> dict[int, set[str]]:
    """Return the modules whose code reads each storage of a recorded forward."""
    found: dict[int, set[str]] = {}
    for op in operations:
        for view in op.given if op.func not in ("left", "outputs") else ():
            found.setdefault(view.storage, set()).add(op.where)
    return found


def with_sequence(
    spec: ModelSpec, model: nn.Module, styles: Styles, proof: CutProof, calls: Calls, operations: Sequence[Operation]
) -> tuple[ModelSpec, Parts]:
    """Return the spec with the boundaries of its sequence, or a refusal; and with it each block's cut parts.

    `operations` are those of the forward that `calls` are of.
    """
    seen = _Seen(model, styles, proof, calls, _readers_of(operations))
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
            parts[path] = _parts(layer, seen)
            found.append(_with_boundaries(layer, spec, seen, parts[path]))
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
        other = next((*layer.modules, layer.name)[0] for layer in spec.layers[first:] if not layer.is_block)
        raise _CannotCutError(f"the blocks of {spec.name} do not follow each other: {other} computes between them")
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """A model, the cut styles of its modules, and their calls in a forward."""

    model: nn.Module
    styles: Styles
    proof: CutProof
    calls: Calls
    readers: Mapping[int, set[str]]
    """Modules whose code reads each storage."""

    def rows_in(self, part: str) -> list[str]:
        """Return the modules of a part that are cut by rows, in order of the forward."""
        return [path for path in self.calls.entered if is_below(path, part) and self.styles.get(path) == "row"]

    def leaves_features_cut(self, part: str) -> bool:
        """Return whether modules of a part are cut by columns, and none by rows."""
        by_columns = (is_below(path, part) and style in ("column", "qkv") for path, style in self.styles.items())
        return any(by_columns) and not self.rows_in(part)

    def children_of(self, block: str) -> Iterator[str]:
        """Yield the children of a block, and in place of one that is only a container, as a ModuleDict, those within it."""
        for name, child in self.model.get_submodule(block).named_children():
            path = f"{block}.{name}"
            if path in self.calls.entered or not any(True for _ in child.children()):
                yield path
            else:
                yield from self.children_of(path)

    def has_weights(self, path: str) -> bool:
        """Return whether a module itself holds weights."""
        return any(True for _ in self.model.get_submodule(path).parameters(recurse=False))


def _with_boundaries(
    layer: LayerSpec, spec: ModelSpec, seen: _Seen, parts: tuple[str, ...]
) -> tuple[LayerSpec, set[str]]:
    """Return a block with its boundaries, and the names of the weights used between its cut parts."""
    path, calls, styles = layer.modules[0], seen.calls, seen.styles
    ran = [module for module in calls.entered if module in parts]
    whole = _whole_parts(path, ran, seen)
    boundaries: list[Boundary] = []
    last: dict[bool, tuple[Tensor, tuple[int, bool]]] = {}
    for part in calls.entered:
        if part in ran:
            given, state = _one_call(part, calls, calls.entered[path][0]), calls.states[part]
            _check_whole_features(part, seen)
            known = last.get(part in whole)
            if known is None or given is not known[0] or state != known[1]:
                kind: BoundaryKind = "join" if part in whole else "gather"
                is_reached = calls.places.is_reached(calls.points[part, "left"])
                has_gradient = given.requires_grad and state[1] and is_reached
                place = calls.places.place(calls.points[part, "entered"], layer.called)
                boundaries.append(
                    Boundary(owner=part, elements=given.numel(), kind=kind, has_gradient=has_gradient, place=place)
                )
            last[part in whole] = given, state
        if part in whole:
            boundaries.append(_end(part, "split", calls, layer))
        elif styles.get(part) == "row" and is_below(part, path) and not any(is_below(part, one) for one in whole):
            boundaries.append(_end(part, "scatter", calls, layer))
    between = [
        param
        for param in spec.params
        if param.trainable
        and param.cut is None
        and is_below(param.name, path)
        and _stands_between(param.name, parts, whole, styles)
    ]
    if shared := next((param.name for param in between if param.shared), None):
        raise _CannotCutError(f"{shared} is shared, and would be used on a part of the sequence")
    products = tuple(
        replace(p, is_between=p.owner not in styles and not any(is_below(p.owner, part) for part in parts))
        for p in layer.products
    )
    return replace(layer, products=products, sequence_boundaries=tuple(boundaries)), {param.name for param in between}


def _check_whole_features(part: str, seen: _Seen) -> None:
    """Check that a part is given, and returns, whole features, unless it leaves them to a module that is cut by rows.

    Raises:
        _CannotCutError: tp cuts them.
    """
    ends = (seen.calls.entered[part], () if seen.leaves_features_cut(part) else seen.calls.left[part])
    if any(tensor is not None and address(tensor) in seen.proof.cut_storages for tensor in chain(*ends)):
        raise _CannotCutError(f"{part} is given, or returns, what tp cuts: put both cuts into one module")


def _end(path: str, kind: BoundaryKind, calls: Calls, layer: LayerSpec) -> Boundary:
    output = calls.left[path][0]
    if output is None or len(calls.left[path]) > 1:
        raise _CannotCutError(f"{path} is not called once, with a tensor [batch, sequence, features]")
    point = calls.points[path, "left"]
    has_gradient, place = calls.places.is_reached(point), calls.places.place(point, layer.called)
    return Boundary(owner=path, elements=output.numel(), kind=kind, has_gradient=has_gradient, place=place)


def _parts(layer: LayerSpec, seen: _Seen) -> tuple[str, ...]:
    """Return the children of a block that are given whole sequences: those that are cut by columns, or hold such modules, uncut
    ones that attend or convolve, and those whose code looks at values; `sequence_proof` shows what the rest of the block does.

    Raises:
        _CannotCutError: the output of a child is gathered, or the block's own code looks at values.
    """
    block, parts = layer.modules[0], []
    if any(is_below(block, path) for path in seen.proof.looking):
        raise _CannotCutError(
            f"shapes or branches at {block} depend on values, of which a rank would have those of its own tokens. Use the branch in a "
            "module of its own"
        )
    mixing = [p.owner for p in layer.products if p.taps > 1 or p.factors in ("attention", "causal", "pair")]
    for path in seen.children_of(block):
        if seen.styles.get(path) in ("gather", "vocab"):
            raise _CannotCutError(f"the block's own code uses {path}, whose output is gathered")
        styles = {style for inner, style in seen.styles.items() if is_below(inner, path)}
        mixes = not styles and any(is_below(owner, path) for owner in mixing)
        looks = any(is_below(one, path) for one in seen.proof.looking)
        if looks or styles & {*_COLUMN} or (mixes and _is_one_call(path, seen.calls, seen.calls.entered[block][0])):
            parts.append(path)
    return tuple(parts)


def _whole_parts(block: str, ran: list[str], seen: _Seen) -> set[str]:
    """Return the parts that compute whole sequences as under tp alone: those with gradients that are whole on every rank
    beside partial ones, so that what they are given takes neither their sum nor one of them alone.

    Parts that are given one tensor are alike.

    Raises:
        _CannotCutError: such a part leaves features cut, or weights that are not cut stand before the module that sums them.
    """
    entered = seen.calls.entered
    partial = {part for part in ran if len(seen.rows_in(part)) < 2 and _has_partial_gradients(part, seen)}
    given = {id(entered[part][0]) for part in ran if part not in partial}
    whole = {part for part in ran if id(entered[part][0]) in given}
    opens = ""
    for path in (path for path in entered if is_below(path, block) and path != block):
        around = next((part for part in ran if is_below(path, part)), "")
        if not around and seen.styles.get(path) == "row":
            opens = ""
        elif path == around and seen.leaves_features_cut(path):
            opens = path
            if path in whole:
                raise _CannotCutError(f"{path} leaves features cut, and has weights or inputs that are not")
        elif opens and (path == around or (not around and seen.has_weights(path) and path not in seen.styles)):
            raise _CannotCutError(f"{path} is not cut, and stands behind {opens} and before what is cut by rows")
    if opens:
        raise _CannotCutError(f"nothing that is cut by rows follows {opens} in its block")
    return whole


def _has_partial_gradients(part: str, seen: _Seen) -> bool:
    """Return whether all weights of a part are cut and read the part's input: its gradients are partial then."""
    given = seen.calls.entered[part][0]
    for path, _ in seen.model.get_submodule(part).named_modules(prefix=part):
        style = seen.styles.get(path)
        if style == "gather" or (style is None and seen.has_weights(path)):
            return False
        takes_input = style in _COLUMN or path in seen.proof.copied
        if takes_input and any(tensor is not given for tensor in seen.calls.entered.get(path, ())):
            return False
    by_columns = [path for path, style in seen.styles.items() if style in _COLUMN]
    readers = seen.readers.get(address(given), ()) if given is not None else ()
    others = (path for path in readers if not any(is_below(path, column) for column in by_columns))
    return not any(is_below(path, part) for path in others)  # as where a part adds what it is given to what it returns


def _one_call(part: str, calls: Calls, block: Tensor | None) -> Tensor:
    if not _is_one_call(part, calls, block):
        raise _CannotCutError(f"{part} is not called once, with a tensor [batch, sequence, features]")
    given = calls.entered[part][0]
    assert given is not None
    return given


def _is_one_call(part: str, calls: Calls, block: Tensor | None) -> bool:
    """Return whether a module is called once, with a tensor [batch, sequence, features] as the block around it, and returns one."""
    if len(calls.entered.get(part, ())) != 1 or block is None:
        return False
    first = (calls.entered[part][0], calls.left[part][0])
    return all(tensor is not None and tensor.shape[:2] == block.shape[:2] for tensor in first)


def _stands_between(name: str, parts: tuple[str, ...], whole: set[str], styles: Styles) -> bool:
    """Return whether a weight is used on a rank's tokens alone: outside the cut parts, or a row cut's bias."""
    owner, _, leaf = name.rpartition(".")
    if any(is_below(name, part) for part in whole):
        return False
    if styles.get(owner, "sum") != "sum":
        return styles[owner] == "row" and leaf == "bias"
    return not any(is_below(name, part) for part in parts)


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


def first_input_of(args: tuple[Any, ...], kwargs: dict[str, Any], facts: FamilyFacts) -> Tensor | None:
    """Return the first tensor that a module is given."""
    given = args[0] if args else kwargs[facts.name_of_hidden(kwargs)] if kwargs else None
    return given if isinstance(given, Tensor) else None


def first_of(output: Any) -> Tensor | None:
    """Return the first tensor that a module returns."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None
