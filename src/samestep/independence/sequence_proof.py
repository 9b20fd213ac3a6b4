"""Proof that a block works token by token between its tensor-cut parts, as sequence parallelism needs it.

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
from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.families import facts_of
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.slice_prover import SliceProver, compare_forwards
from samestep.independence.value_numbers import Table
from samestep.models.spec import ModelAnalysis, is_below, owner_of
from samestep.tracing.forward import ValueOf
from samestep.tracing.module_inputs import first_input_of, first_of, with_first, with_given
from samestep.tracing.operations import Executed
from samestep.trees import operands, tensors_in


def refuse_slices(
    module: nn.Module,
    sample: Any,
    analysis: ModelAnalysis,
    degree: int,
    value_of: ValueOf,
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
        self._facts, self._parts = facts_of(module), tuple(chain(*analysis.sequence_parts.values()))
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

    def failure(self, reason: str) -> str:
        """Return the refusal of a forward that fails."""
        return f"on a part of the tokens {reason}"

    def placed(self, module: nn.Module) -> ExitStack:
        """Return a context in which blocks and cut parts are given what a rank gives them."""
        hooks = ExitStack()
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
        arguments = with_given(args, kwargs, self.slice_of, self._facts)
        self.is_following = not self.refusal
        return arguments

    def _gather(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = first_input_of(args, kwargs, self._facts)
        self.is_following = not self.refusal
        self._check(hidden, f"{path} is not given a row for each token")
        if any(is_below(inner, path) for inner in self.looking):
            self._check_unseen(path, [tensor for tensor in tensors_in((args, kwargs)) if tensor is not hidden])
        self._is_whole = self.is_following = False
        gathered = with_given(args, kwargs, self._whole, self._facts)
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
