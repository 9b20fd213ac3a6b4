"""Proof that a block works token by token between its tensor-cut parts, as sequence parallelism needs it.

A forward runs on the meta device as a rank runs it: the first block is given a slice of the tokens, each cut part the
whole sequence; the sums of a part are slices again, or what it returns, where it computes on whole sequences. Between the parts it is followed on which token each value
depends (`dependence/independence.py`), and every part and the last block's output must have a row for each token of the slice. What
the parts do with whole sequences is their own affair. A second forward, on the whole sequence, must use the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from samestep.building.families import facts_of
from samestep.errors import InputError
from samestep.models.analysis import ExpertModules
from samestep.models.spec import ModelSpec, is_below
from samestep.tracing.dependence.independence import Along, Mixed
from samestep.tracing.forward import ValueOf, watch_forward
from samestep.tracing.meta_tensors import NeedsValuesError, tensors_in
from samestep.tracing.sequence_boundaries import first_of, given_of, with_first, with_given
from samestep.tracing.slices import SliceProver
from samestep.tracing.trace import containers_of


def refuse_slices(
    module: nn.Module,
    sample: Any,
    parts: Mapping[str, tuple[str, ...]],
    spec: ModelSpec,
    degree: int,
    value_of: ValueOf,
    experts: ExpertModules,
) -> tuple[str, list[str]]:
    """Return why a rank may not work on one of `degree` slices of the tokens between the cut parts, empty if it may, and
    what was tried.

    `parts` are the cut parts of each block, in the order of the blocks.
    """
    sums = {one.owner for layer in spec.layers for one in layer.sequence_boundaries if one.kind == "scatter"}
    sizes = (spec.sequence, spec.sequence // degree)
    if sizes[1] < 2:  # a single token would be broadcast to whole sequences
        return f"a rank would have {sizes[1]} of the {spec.sequence} tokens of a sample, and 2 are needed", []
    watches = [_TokenProver(module, parts, sums, size, spec.sequence) for size in sizes]
    for watch in watches:
        if refusal := _refusal_of(watch, module, sample, value_of, experts):
            return refusal, []
    first, second = (watch.calls for watch in watches)
    if first != second:
        path, *_ = next((a for a, b in zip(first, second, strict=False) if a != b), first[-1])
        return f"{path} computes differently, or with other numbers, on a part of the tokens", []
    return "", [text for watch in watches for text in watch.tried]


def _refusal_of(watch: _TokenProver, module: nn.Module, sample: Any, value_of: ValueOf, experts: ExpertModules) -> str:
    """Run the forward; return why it is not shown to work on a slice, or an empty text."""
    try:
        with watch.placed(module), watch.experts_by_row(module, experts):
            watch_forward(module, sample, 1, "the model", containers_of(module), watch, value_of)
    except NeedsValuesError:
        return f"{watch.where} looks at values of a rank's tokens"
    except InputError as error:
        reason = str(error).removeprefix("the model cannot be traced: ")
        return watch.refusal or f"on a part of the tokens {reason}"
    return watch.refusal


class _TokenProver(SliceProver):
    """A traced forward whose blocks are given a slice of the tokens, and their cut parts whole sequences."""

    between = "and between cut parts a rank has its own tokens alone"

    def __init__(
        self, module: nn.Module, parts: Mapping[str, tuple[str, ...]], sums: Collection[str], size: int, whole: int
    ) -> None:
        super().__init__(module, list(parts), size, whole)
        self.parts, self.sums, self._facts = parts, sums, facts_of(module)

    def placed(self, module: nn.Module) -> ExitStack:
        """Return a context in which blocks and cut parts are given what a rank gives them."""
        hooks = ExitStack()
        first, last = (module.get_submodule(path) for path in (self.blocks[0], self.blocks[-1]))
        hooks.enter_context(first.register_forward_pre_hook(self._split, with_kwargs=True))
        for path in (path for of_block in self.parts.values() for path in of_block):
            part = module.get_submodule(path)
            hooks.enter_context(part.register_forward_pre_hook(functools.partial(self._gather, path), with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(functools.partial(self._left, path)))
        for path in self.sums:
            hooks.enter_context(module.get_submodule(path).register_forward_hook(self._scatter))
        hooks.enter_context(last.register_forward_hook(self._join))
        return hooks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """Refuse an attention between the cut parts, which would be given a rank's tokens alone."""
        if self.is_following and any(self.known.of(tensor) is not None for tensor in (query, key, value)):
            self.refuse(f"the attention in {self.where} stands outside the parts that tp cuts")

    def _split(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self.is_following = not self.refusal
        return with_given(args, kwargs, self._slice, self._facts)

    def _slice(self, x: Tensor) -> Tensor:
        part = x.narrow(1, self.whole - self.size, self.size).clone()
        with _disable_current_modes():
            self.learn(part, Along(1, 1, 0))
        return part

    def _gather(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        given = given_of(args, kwargs, self._facts)
        self._check(given, f"{path} is not given a row for each token")
        self.is_following = False
        return with_given(args, kwargs, self._whole, self._facts)

    def _scatter(self, _: nn.Module, args: Any, output: Any) -> Any:
        output = with_first(output, self._slice)
        self.is_following = not self.refusal
        return output

    def _left(self, path: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Return what a part returns, of which a rank has its tokens; what else it returns is whole, and is no constant."""
        first, *others = tensors_in(output)
        with _disable_current_modes():
            for other in others:
                if other is not first and other.requires_grad and self.known.of(other) is None:
                    self.known.learn(other, Mixed(f"{path} by what else it returns", shown=False))
        if not any(is_below(one, path) for one in self.sums):
            return self._scatter(module, args, output)
        with _disable_current_modes():
            self._check(first, f"{path} does not return the sums of its row cuts, with a row for each token")
        return output

    def _join(self, _: nn.Module, args: Any, output: Any) -> Any:
        self._check(first_of(output), f"{self.blocks[-1]} does not return a row for each token")
        self.is_following = False
        return with_first(output, self._whole)

    def _whole(self, x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], self.whole, *x.shape[2:]))

    def _check(self, tensor: Tensor | None, reason: str) -> None:
        with _disable_current_modes():
            if self.is_following and (tensor is None or not self.known.has_rows(tensor, 1)):
                self.refuse(self._mixed or reason)
            elif self.is_following and tensor is not None and (alone := self.of_some_tokens(tensor)):
                self.refuse(alone)
