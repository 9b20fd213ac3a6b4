"""Sequence parallelism within a block: the boundaries between which the sequence is cut, and the proof that a block works token by token there.

A traced forward shows the boundaries: a part that is cut by columns gathers the tokens that it is given, and a module that is cut by rows scatters
those that it returns. A part with whole gradients beside partial ones computes the whole sequence as under `tp` alone (join, split).

A forward runs on the meta device as a rank runs it: the first block is given a slice of the tokens, each cut part the
whole sequence, and what a part returns is a slice again. A part is a module, or the block's own code from modules that are
cut by columns to one that is cut by rows, where a rank keeps its tokens. Between the parts it is followed on which token each
value depends (`dependence.py`), and every part and the last block's output must have a row for each token of the
slice. Within the parts whole sequences alone are used, and what is computed of them is not used outside, other than what a
part returns first. A weight is used either between the parts, where each rank has a part of its gradient, or within them. A
second forward, on the whole sequence, must compute every token alike (`value_numbers.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.cut_proof import CutProof
from samestep.independence.slice_prover import SliceProver, compare_forwards
from samestep.independence.value_numbers import Table
from samestep.models.layer_parts import Boundary, BoundaryKind
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelAnalysis, ModelSpec, is_below, owner_of
from samestep.tracing.costs import BY_COLUMNS
from samestep.tracing.forward import ValueOf
from samestep.tracing.module_inputs import ForwardCalls, SeenTensor, first_input_of, first_of, with_first, with_given
from samestep.tracing.operations import Executed, Operation
from samestep.trees import operands, tensors_in

Styles = Mapping[str, str]
"""Cut style of each module, by its path."""
Parts = Mapping[str, tuple[str, ...]]
"""Children of each block that are given whole sequences, by the block's path."""


def _readers_of(operations: Sequence[Operation]) -> dict[int, set[str]]:
    """Return the modules whose code reads each storage of a recorded forward."""
    readers: dict[int, set[str]] = {}
    for op in operations:
        for view in op.given if op.func not in ("left", "outputs") else ():
            readers.setdefault(view.storage, set()).add(op.where)
    return readers


def with_sequence(
    spec: ModelSpec,
    model: nn.Module,
    styles: Styles,
    proof: CutProof,
    calls: ForwardCalls,
    operations: Sequence[Operation],
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
    pairs: list[tuple[LayerSpec, set[str]]] = []
    try:
        _check_row(spec, blocks, calls)
        for layer in spec.layers:
            if not layer.is_block:
                pairs.append((layer, set()))
                continue
            path = layer.modules[0]
            parts[path] = _parts(layer, seen)
            pairs.append(_with_boundaries(layer, spec, seen, parts[path]))
    except _CannotCutError as reason:
        return replace(spec, sequence_refusal=str(reason)), {}
    block_input = calls.of[blocks[0].modules[0]][0].input
    assert block_input is not None
    between = set().union(*(names for _, names in pairs))
    params = tuple(replace(p, partial=p.partial or ("sequence" if p.name in between else "")) for p in spec.params)
    layers = tuple(layer for layer, _ in pairs)
    return replace(spec, layers=layers, params=params, sequence=block_input.shape[1], sequence_refusal=""), parts


class _CannotCutError(Exception):
    """The reason why a sequence cannot be cut."""


def _check_row(spec: ModelSpec, blocks: list[LayerSpec], calls: ForwardCalls) -> None:
    """Check that the blocks pass one tensor [batch, sequence, features] from each to the next.

    Raises:
        _CannotCutError: they do not.
    """
    first = spec.layers.index(blocks[0])
    if spec.layers[first : first + len(blocks)] != tuple(blocks):
        other = next((*layer.modules, layer.name)[0] for layer in spec.layers[first:] if not layer.is_block)
        raise _CannotCutError(f"the blocks of {spec.name} do not follow each other: {other} computes between them")
    handed: SeenTensor | None = None
    for layer in blocks:
        path = layer.modules[0]
        if len(layer.modules) > 1 or len(calls.of.get(path, ())) != 1:
            raise _CannotCutError(f"{layer.name} is not one module that is called once")
        block_input, block_output = calls.of[path][0].input, calls.of[path][0].output
        if (
            block_input is None
            or block_output is None
            or len(block_input.shape) != 3
            or block_input.shape != block_output.shape
        ):
            raise _CannotCutError(f"{path} does not map a tensor [batch, sequence, features] to one of the same shape")
        if handed is not None and block_input.number != handed.number:
            raise _CannotCutError(f"{path} does not get the output of the block before it")
        handed = block_output


@dataclass(frozen=True, slots=True)
class _Seen:
    """A model, the cut styles of its modules, and their calls in a forward."""

    model: nn.Module
    styles: Styles
    proof: CutProof
    calls: ForwardCalls
    readers: Mapping[int, set[str]]
    """Modules whose code reads each storage."""

    def rows_in(self, part: str) -> list[str]:
        """Return the modules of a part that are cut by rows, in order of the forward."""
        return [path for path in self.calls.of if is_below(path, part) and self.styles.get(path) == "row"]

    def leaves_features_cut(self, part: str) -> bool:
        """Return whether modules of a part are cut by columns, and none by rows."""
        by_columns = (is_below(path, part) and style in ("column", "qkv") for path, style in self.styles.items())
        return any(by_columns) and not self.rows_in(part)

    def children_of(self, block: str) -> Iterator[str]:
        """Yield the children of a block, and in place of one that is only a container, as a ModuleDict, those within it."""
        for name, child in self.model.get_submodule(block).named_children():
            path = f"{block}.{name}"
            if path in self.calls.of or not any(True for _ in child.children()):
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
    ran = [module for module in calls.of if module in parts]
    whole_parts = _whole_parts(path, ran, seen)
    boundaries: list[Boundary] = []
    last: dict[bool, SeenTensor] = {}
    for part in calls.of:
        if part in ran:
            call = calls.of[part][0]
            part_input = call.input
            if part_input is None or not _is_one_call(part, calls, calls.of[path][0].input):
                raise _CannotCutError(f"{part} is not called once, with a tensor [batch, sequence, features]")
            _check_whole_features(part, seen)
            known = last.get(part in whole_parts)
            if known is None or (part_input.number, part_input.state) != (known.number, known.state):
                kind: BoundaryKind = "join" if part in whole_parts else "gather"
                has_gradient = part_input.takes_gradient and part_input.state[1] and calls.places.is_reached(call.way)
                place = calls.places.place(call.entered_at, layer.called)
                elements = part_input.shape.numel()
                boundaries.append(
                    Boundary(owner=part, elements=elements, kind=kind, has_gradient=has_gradient, place=place)
                )
            last[part in whole_parts] = part_input
        if part in whole_parts:
            boundaries.append(_end(part, "split", calls, layer))
        elif (
            styles.get(part) == "row"
            and is_below(part, path)
            and not any(is_below(part, whole_part) for whole_part in whole_parts)
        ):
            boundaries.append(_end(part, "scatter", calls, layer))
    between = [
        param
        for param in spec.params
        if param.trainable
        and param.cut is None
        and is_below(param.name, path)
        and _stands_between(param.name, parts, whole_parts, styles)
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
    calls, leaves_cut = seen.calls.of[part], seen.leaves_features_cut(part)
    ends = [end for call in calls for end in (call.input, None if leaves_cut else call.output)]
    if any(end is not None and end.storage in seen.proof.cut_storages for end in ends):
        raise _CannotCutError(f"{part} is given, or returns, a tensor that tp shards: put both cuts into one module")


def _end(path: str, kind: BoundaryKind, calls: ForwardCalls, layer: LayerSpec) -> Boundary:
    call, *more = calls.of[path]
    if call.output is None or more:
        raise _CannotCutError(f"{path} is not called once, with a tensor [batch, sequence, features]")
    has_gradient, place = calls.places.is_reached(call.way), calls.places.place(call.left_at, layer.called)
    return Boundary(owner=path, elements=call.output.shape.numel(), kind=kind, has_gradient=has_gradient, place=place)


def _parts(layer: LayerSpec, seen: _Seen) -> tuple[str, ...]:
    """Return the children of a block that are given whole sequences: those that are cut by columns, or hold such modules, uncut
    ones that attend or convolve, and those whose code looks at values; the proof shows what the rest of the block does.

    Raises:
        _CannotCutError: the output of a child is gathered, or the block's own code looks at values.
    """
    block, parts = layer.modules[0], []
    if any(is_below(block, path) for path in seen.proof.looking):
        raise _CannotCutError(
            f"shapes or branches at {block} depend on values, and a rank would have the values of its own tokens. Use a module of "
            "its own for the branch"
        )
    mixing = [p.owner for p in layer.products if p.taps > 1 or p.factors in ("attention", "causal", "pair")]
    for path in seen.children_of(block):
        if seen.styles.get(path) in ("gather", "vocab"):
            raise _CannotCutError(f"the block's own code uses {path}, which has a gathered output")
        styles = {style for inner, style in seen.styles.items() if is_below(inner, path)}
        mixes = not styles and any(is_below(owner, path) for owner in mixing)
        looks = any(is_below(inner, path) for inner in seen.proof.looking)
        if looks or styles & {*BY_COLUMNS} or (mixes and _is_one_call(path, seen.calls, seen.calls.of[block][0].input)):
            parts.append(path)
    return tuple(parts)


def _whole_parts(block: str, ran: list[str], seen: _Seen) -> set[str]:
    """Return the parts that compute whole sequences as under tp alone: those with gradients that are whole on every rank
    beside partial ones, so that what they are given takes neither their sum nor one of them alone.

    Parts that are given one tensor are alike.

    Raises:
        _CannotCutError: such a part leaves features cut, or weights that are not cut stand before the module that sums them.
    """
    calls = seen.calls.of
    partial = {part for part in ran if len(seen.rows_in(part)) < 2 and _has_partial_gradients(part, seen)}
    numbers = {_number(calls[part][0].input) for part in ran if part not in partial}
    whole_parts = {part for part in ran if _number(calls[part][0].input) in numbers}
    opens = ""
    for path in (path for path in calls if is_below(path, block) and path != block):
        around = next((part for part in ran if is_below(path, part)), "")
        if not around and seen.styles.get(path) == "row":
            opens = ""
        elif path == around and seen.leaves_features_cut(path):
            opens = path
            if path in whole_parts:
                raise _CannotCutError(f"{path} leaves features cut, and has weights or inputs that are not")
        elif opens and (path == around or (not around and seen.has_weights(path) and path not in seen.styles)):
            raise _CannotCutError(f"{path} is not sharded, between {opens} and layers that are sharded by rows")
    if opens:
        raise _CannotCutError(f"nothing that is cut by rows follows {opens} in its block")
    return whole_parts


def _has_partial_gradients(part: str, seen: _Seen) -> bool:
    """Return whether all weights of a part are cut and read the part's input: its gradients are partial then."""
    part_input = seen.calls.of[part][0].input
    for path, _ in seen.model.get_submodule(part).named_modules(prefix=part):
        style = seen.styles.get(path)
        if style == "gather" or (style is None and seen.has_weights(path)):
            return False
        takes_input = style in BY_COLUMNS or path in seen.proof.copied
        if takes_input and any(_number(call.input) != _number(part_input) for call in seen.calls.of.get(path, ())):
            return False
    by_columns = [path for path, style in seen.styles.items() if style in BY_COLUMNS]
    readers = seen.readers.get(part_input.storage, ()) if part_input is not None else ()
    others = (path for path in readers if not any(is_below(path, column) for column in by_columns))
    return not any(is_below(path, part) for path in others)  # as where a part adds what it is given to what it returns


def _number(tensor: SeenTensor | None) -> int:
    return 0 if tensor is None else tensor.number


def _is_one_call(part: str, calls: ForwardCalls, block: SeenTensor | None) -> bool:
    """Return whether a module is called once, with a tensor [batch, sequence, features] as the block around it, and returns one."""
    if len(calls.of.get(part, ())) != 1 or block is None:
        return False
    ends = calls.of[part][0].input, calls.of[part][0].output
    return all(end is not None and end.shape[:2] == block.shape[:2] for end in ends)


def _stands_between(name: str, parts: tuple[str, ...], whole_parts: set[str], styles: Styles) -> bool:
    """Return whether a weight is used on a rank's tokens alone: outside the cut parts, or a row cut's bias."""
    owner, _, leaf = name.rpartition(".")
    if any(is_below(name, part) for part in whole_parts):
        return False
    if styles.get(owner, "sum") != "sum":
        return styles[owner] == "row" and leaf == "bias"
    return not any(is_below(name, part) for part in parts)


# -- the proof -------------------------------------------------------------------------------------


def refuse_slices(
    module: nn.Module, sample: Any, analysis: ModelAnalysis, degree: int, value_of: ValueOf
) -> tuple[str, list[str]]:
    """Return why a rank may not work on one of `degree` slices of the tokens between the cut parts, empty if it may, and
    what was tried.
    """
    tokens = analysis.spec.sequence
    if tokens // degree < 2:  # a single token would be broadcast to whole sequences
        return f"a rank would have {tokens // degree} of the {tokens} tokens of a sample, and 2 are needed", []
    table: Table = {}
    whole, part = (_TokenProver(module, analysis, size, table) for size in (tokens, tokens // degree))
    refusal, _ = compare_forwards(whole, part, module, sample, value_of, analysis.experts)
    return refusal, [] if refusal else [*whole.tried, *part.tried]


class _TokenProver(SliceProver):
    """Follows a forward whose blocks are given a slice of the tokens, and their cut parts whole sequences."""

    between = "and between cut parts a rank has its own tokens alone"
    of_rank, other_sizes = "a rank's tokens", "a part of the tokens"

    def __init__(self, module: nn.Module, analysis: ModelAnalysis, size: int, table: Table) -> None:
        spec = analysis.spec
        super().__init__(module, list(analysis.sequence_parts), size, spec.sequence, table, spec.looks_in)
        self._parts = tuple(chain(*analysis.sequence_parts.values()))
        boundaries = chain(*(layer.sequence_boundaries for layer in analysis.spec.layers))
        self._ends = [boundary.owner for boundary in boundaries if boundary.kind in ("scatter", "split")]
        self._is_whole = False
        """Whether what runs is a part, which has whole sequences."""
        self._of_whole: set[int] = set()
        """Storages that parts have written."""
        weights = dict(module.named_parameters())
        self._between = {
            self.key(weights[param.name])
            for param in analysis.spec.params
            if param.partial == "sequence" and analysis.cut_styles.get(owner_of(param.name)) != "row"
        }
        """Storages of weights that are used between the parts, and of what is made of them there."""

    def placed(self, module: nn.Module) -> ExitStack:
        """Return a context in which blocks and cut parts are given what a rank gives them."""
        hooks = super().placed(module)
        first, last = (module.get_submodule(path) for path in (self.blocks[0], self.blocks[-1]))
        hooks.enter_context(first.register_forward_pre_hook(self._split, with_kwargs=True))
        for path in self._parts:
            part = module.get_submodule(path)
            hooks.enter_context(part.register_forward_pre_hook(functools.partial(self._gather, path), with_kwargs=True))
        for path in self._ends:
            hooks.enter_context(module.get_submodule(path).register_forward_hook(self._scatter))
        hooks.enter_context(last.register_forward_hook(self._join))
        return hooks

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Refuse an attention between the cut parts, which would be given a rank's tokens alone."""
        self.number_attention(call, output)
        if self._is_whole:
            self._check_whole(operands(*call[:4]))
        if self.is_following and any(self.known.of(tensor) is not None for tensor in call[:3]):
            self.refuse(f"the attention in {self.where} stands outside the parts that tp cuts")

    def ran(self, op: Executed) -> Any:
        """Check what an operation within the parts, or between them, is given, and follow its results."""
        super().ran(op)
        tensors = op.given
        with disable_current_modes():
            keys = {self.key(tensor) for tensor in operands(op.outcome) if tensor.is_meta}
            if self._is_whole:
                self._check_whole(tensors)
                read = set() if op.func._schema.is_mutable else {self.key(tensor) for tensor in tensors}
                self._of_whole |= keys - read
            elif self.is_following:
                self._check_between(tensors)
                self._between |= keys
        return op.outcome

    def _check_between(self, tensors: list[Tensor]) -> None:
        """Refuse an operation between the parts on what they have computed, or on a tensor whose gradient no rank has whole."""
        for tensor in tensors:
            key = self.key(tensor)
            if key in self._of_whole:
                self.refuse(f"{self.where} uses a result that a sharded part (tp) has computed of the whole sequence")
            elif tensor.requires_grad and self.known.of(tensor) is None and key not in self._between:
                self.refuse(f"{self.where} uses a tensor that takes a gradient, and is not made of a rank's own tokens")

    def _check_whole(self, tensors: list[Tensor]) -> None:
        """Refuse an operation of a part on one rank's tokens alone, or on a weight of which a rank has a part of the
        gradient."""
        if any(self.known.of(tensor) is not None for tensor in tensors):
            self.refuse(f"{self.where} uses a rank's own tokens beside the whole sequence")
        if any(tensor.requires_grad and self.key(tensor) in self._between for tensor in tensors):
            self.refuse(f"{self.where} uses a weight that is used between the cut parts too")

    def _split(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        arguments = with_given(args, kwargs, self.slice_of)
        self.is_following = not self.refusal
        return arguments

    def _gather(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = first_input_of(args, kwargs)
        self.is_following = not self.refusal
        self._check(hidden, f"{path} is not given a row for each token")
        if any(is_below(inner, path) for inner in self.looking):
            self._check_unseen(path, [tensor for tensor in tensors_in((args, kwargs)) if tensor is not hidden])
        self._is_whole = self.is_following = False
        gathered = with_given(args, kwargs, self._whole)
        self._is_whole = True
        return gathered

    def _scatter(self, _: nn.Module, args: Any, output: Any) -> Any:
        self._is_whole = False
        output = with_first(output, self.slice_of)
        self.is_following = not self.refusal
        return output

    def _join(self, _: nn.Module, args: Any, output: Any) -> Any:
        with disable_current_modes():
            last = [] if (hidden := first_of(output)) is None else [hidden]
            self.outcome = [self.numbers.of(tensor) for tensor in (*last, *self.held)]
        self._check(first_of(output), f"{self.blocks[-1]} does not return a row for each token")
        self.is_following = False
        return with_first(output, self._whole)

    def _whole(self, x: Tensor) -> Tensor:
        tensor = x.new_empty((x.shape[0], self.whole, *x.shape[2:]))
        self._of_whole.add(self.key(tensor))
        with disable_current_modes():
            self.numbers.name(tensor, "whole", self.numbers.of(x))
        return tensor

    def _check(self, tensor: Tensor | None, reason: str) -> None:
        with disable_current_modes():
            if self.is_following and (tensor is None or not self.known.has_rows(tensor, 1)):
                self.refuse(self._mixed or reason)
            elif self.is_following and tensor is not None and (alone := self.of_some_tokens(tensor)):
                self.refuse(alone)
