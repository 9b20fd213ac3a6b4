"""Follows a forward on a slice of the sequence, as a rank of `cp` runs it: each value by the tokens of the slice on which it depends.

`token_slices.py` says what is to be shown, and runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.loss_result import OF_SLICE
from samestep.building.model_loss import RETURNS_LOGITS
from samestep.building.named_tensors import tensors_of
from samestep.building.torch_seams import disable_current_modes
from samestep.errors import InputError
from samestep.independence.dependence import NO_DIM, Along, Call, Dependence, Mixed, Wide
from samestep.independence.dimension_maps import is_elementwise
from samestep.independence.gathered_parts import PartCalls
from samestep.independence.operation_trial import Given, outcome_of
from samestep.independence.row_prover import Prover
from samestep.independence.sliced_shapes import Reshaping, sequence_dim, token_rows_of
from samestep.independence.value_numbers import Table, first_difference
from samestep.models.layer_parts import GatheredPart, GatheredTensor
from samestep.models.spec import ExpertModules, is_below
from samestep.state import snapshot
from samestep.tracing.custom_functions import Function, Hook
from samestep.tracing.forward import ValueOf
from samestep.tracing.looks import tensors_seen_by
from samestep.tracing.meta_tensors import NeedsValuesError
from samestep.tracing.watched_forward import answer_alike, watch_forward
from samestep.trees import keystr, operands, tensors_in, tree_flatten_with_path, tree_leaves, tree_unflatten

WHOLE = -1
"""The dimension of tokens of an argument that has none."""

WORKS = "Use scaled_dot_product_attention (attn_implementation = 'sdpa') with a mask of the whole sequence, or none"


class SliceProver(Prover):
    """Follows a forward whose blocks are given the last slice of `size` of the sequence's tokens."""

    between = ""
    """Why tokens may not be mixed, if it is not for an attention that is exchanged."""
    of_rank, other_sizes = "its slice", "slices of another length"
    """How refusals name the tokens of a rank, and the forward that is compared with the whole one."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[str],
        size: int,
        num_tokens: int,
        table: Table,
        looking: Collection[str] = (),
    ) -> None:
        super().__init__(module, size, table)
        self.blocks, self.whole, self.looking = blocks, num_tokens, looking
        """Blocks, tokens of the whole sequence, and modules whose code looks at values."""
        self.held = [named.tensor for named in tensors_of(module)]
        self.outcome: list[Hashable] = []
        """What identifies the values of the outputs, and of what the model holds when its forward has ended."""
        self.is_following, self.refusal = False, ""
        self._mixed = self._mixed_at = ""
        self._joined = set[str]()
        """The operations that have joined rows to those of tokens, as text."""
        self.failed_at = ""
        """Path of the module in which the proof has failed; empty for the one whose code ran last."""

    def run(self, module: nn.Module, sample: Any, value_of: ValueOf | None, experts: ExpertModules) -> str:
        """Run the forward of a model as a rank runs it; return why it is not shown to work on a slice, or an empty text."""
        try:
            with snapshot.preserve_modules(module), self.placed(module), self.experts_by_row(module, experts):
                watch_forward(module, sample, 1, self.tracer, value_of)
        except NeedsValuesError:
            return f"{self.where} looks at values of {self.of_rank}"
        except InputError as error:
            return self.refusal or self.failure(str(error).removeprefix("the model cannot be traced: "))
        return self.refusal

    def failure(self, reason: str) -> str:
        """Return the refusal of a forward that fails."""
        return f"on {self.of_rank} {reason}"

    def placed(self, module: nn.Module) -> ExitStack:
        """Return a context in which blocks are given what a rank gives them."""
        return ExitStack()

    # -- events of the forward ---------------------------------------------------------------------

    def slice_of(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the slice of a tensor that has a row for each token of the whole sequence."""
        part = tensor.narrow(dim, self.whole - self.num_rows, self.num_rows).clone()
        with disable_current_modes():
            self.numbers.take_rows(part, tensor, dim)
            self.learn(part, Along(dim, 1, 0))
        return part

    def enter(self, path: str, part: nn.Module, given: Any) -> None:
        """Check a module whose forward starts, which must be given no slice if its code looks at values."""
        if self.is_following and not any(is_below(path, block) for block in self.blocks):
            self._check_one_token(path, given)
        if path in self.looking:
            self._check_unseen(path, tensors_seen_by(part, given))

    def _check_one_token(self, path: str, inputs: Any) -> None:
        """Refuse a module after the blocks that is given one token, as one that pools is: a slice has another token there."""
        with disable_current_modes():
            dependences = [
                self.known.of(tensor) for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor) and tensor.is_meta
            ]
            if any(isinstance(dependence, Along) and dependence.dim == NO_DIM for dependence in dependences):
                self.refuse(f"{path} is given one token of a slice", path)

    def looks(self, seen: Sequence[Tensor]) -> None:
        """Check that code does not look at a slice."""
        self._check_unseen(self.where, seen)

    def _check_unseen(self, path: str, tensors: Iterable[Tensor]) -> None:
        """Refuse a slice among the tensors that code is given which looks at values."""
        with disable_current_modes():
            if self.is_following and any(self.known.of(tensor) is not None for tensor in tensors if tensor.is_meta):
                self.refuse(f"shapes or branches at {path} depend on values, and it is given a slice")

    # -- what values are computed from -------------------------------------------------------------

    def applied(self, function: Function, args: tuple[Any, ...], named: dict[str, Any], outcome: Any) -> None:
        """Add a custom Function to what its results are computed from: its backward may use the numbers that it is given."""
        super().applied(function, args, named, outcome)
        numbers = (leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, bool | int | float | complex | str))
        what = function.__self__, tuple(map(repr, numbers))
        self._add_to_numbers(operands(outcome), "function", *what)

    def hooked(self, name: str, hook: Hook, given: list[Tensor], results: list[Tensor]) -> None:
        """Add a hook on gradients to what its tensors are computed from, as what it makes of drawn ones."""
        super().hooked(name, hook, given, results)
        with disable_current_modes():
            drawn = [Given(self._of_one_token(tensor), tensor.dtype) for tensor in given]
        self._add_to_numbers([*given], "hook", outcome_of(hook, tuple(drawn)))

    def _of_one_token(self, tensor: Tensor) -> tuple[int, ...]:
        dependence, shape = self.known.of(tensor), list(tensor.shape)
        if isinstance(dependence, Along) and dependence.dim >= 0:
            shape[dependence.dim] = dependence.inner
        return tuple(shape)

    def _add_to_numbers(self, tensors: list[Tensor], *what: Hashable) -> None:
        with disable_current_modes():
            for tensor in tensors:
                if tensor.is_meta:
                    self.numbers.name(tensor, *what, self.numbers.of(tensor), where=self.where)

    # -- checks ------------------------------------------------------------------------------------

    def check_attention(self, call: AttentionCall) -> None:
        """Leave the shapes of an attention that will be exchanged: `attended` says which of them fit."""
        if not self.is_following:
            super().check_attention(call)

    def of_some_tokens(self, tensor: Tensor) -> str:
        """Return which operation has computed some tokens of a tensor otherwise than the others; empty if none has."""
        alone = self.numbers.apart(tensor)
        return f"{alone} computes some tokens of a slice otherwise than the others" if alone else ""

    def refuse(self, reason: str, path: str = "") -> None:
        """Store a refusal, and the module in which it arises; the first reason is kept, since later ones follow from it."""
        if not self.refusal:
            at = self._mixed_at if self._mixed and self._mixed in reason else self.where
            self.refusal, self.failed_at = reason, path or at
        self.is_following = False

    def learn(self, tensor: Tensor, dependence: Dependence) -> None:
        """Set the dependence of a tensor, and remember the first operation that mixed tokens."""
        super().learn(tensor, dependence)
        if isinstance(dependence, Along) and isinstance(dependence.start, Wide):
            self._joined.add(dependence.start.where)
        if not self._mixed and isinstance(dependence, Mixed):
            module, _, operation = dependence.where.rpartition(" by ")
            path = self._mixed_at = module or self.where
            does = f"mixes tokens by {operation}" if module else f"is given {operation} of tokens"
            if dependence.where in self._joined:
                does = f"joins other rows to the rows of tokens by {operation}"
            works = f". {WORKS}" if operation in ("bmm", "baddbmm", "mm") else ""
            if operation.startswith("nll_loss"):
                works = f". {RETURNS_LOGITS}"
            self._mixed = f"{path} {does}, {self.between or f'and only attention is exchanged{works}'}"

    def _follow(self, call: Call) -> None:
        """Set the dependences of results; by elements alone, rows of neighbours stay: of others `tp` would send more rows than tokens."""
        starts = [known.start for tensor in call.given if isinstance(known := self.known.of(tensor), Along)]
        wide = next((start for start in starts if isinstance(start, Wide)), None)
        if wide is None or is_elementwise(call.func):
            super()._follow(call)
            return
        for result in call.results:
            self.learn(result, Mixed(wide.where, shown=True))

    def refuse_gradient(self, where: str) -> None:
        """Refuse a custom Function whose backward mixes tokens."""
        self.refuse(f"{where} mixes tokens")

    def sums_along(self, gradients: list[Tensor]) -> list[int | None] | None:
        """Return where the tokens of gradients are before the blocks: each rank's gradient is zero outside of its slice."""
        if self.refusal:
            return None
        return [sequence_dim(gradient.shape, self.whole) for gradient in gradients]

    def on_constant(self, constant: Tensor, dim: int, inner: int, where: str) -> None:
        """Refuse a constant with a row for each token of a slice; one of the whole sequence is sliced before its
        first use."""
        if self.num_rows < self.whole and not self.is_uniform(constant) and constant.stride(dim):
            self.refuse(f"{where} counts the tokens of a slice itself. Use positions made before the blocks")


class BlockProver(SliceProver):
    """Follows a forward as a rank of `cp` runs it: blocks have a slice of the tokens, and parts that mix them otherwise than attention all."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[str],
        size: int,
        num_tokens: int,
        table: Table,
        looking: Collection[str] = (),
        wider: Collection[str] = (),
    ) -> None:
        super().__init__(module, blocks, size, num_tokens, table, looking)
        self.wider = wider
        """Parts that compute all tokens."""
        self.slices: dict[str, int | None] = {}
        """Arguments of blocks by their position: the dimension that is sliced, or None."""
        self.passed: set[str] = set()
        """Arguments of blocks that were slices when they were given."""
        self.parts = PartCalls(self.tracer.modules)
        self.is_in_function = False
        """Whether a recurrence runs that needs the state of the rank before."""
        self._others = ""
        """The shape of hidden states that have other rows than one for each token, as text."""
        self._part = ""
        """Path of the part that computes all tokens now; empty outside of such parts."""
        self._wholes: dict[int, tuple[Tensor, Tensor]] = {}
        """Slices of arguments of blocks, by identity, with the whole tensor of each."""

    def failure(self, reason: str) -> str:
        """Return the refusal of a forward that fails: behind the blocks because tensors of all tokens, as labels, meet those of a slice."""
        is_behind = self.slices and not self.is_in_block
        return f"on a slice {reason}. {RETURNS_LOGITS if is_behind else WORKS}"

    def placed(self, module: nn.Module) -> ExitStack:
        """Return a context in which blocks, and the parts that compute all tokens, are given what a rank gives them."""
        hooks = super().placed(module)
        for path in self.blocks:
            enter = functools.partial(self.enter_block, path)
            hooks.enter_context(module.get_submodule(path).register_forward_pre_hook(enter, with_kwargs=True))
        for path in self.wider:
            part, enter = module.get_submodule(path), functools.partial(self.enter_part, path)
            hooks.enter_context(part.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(functools.partial(self.leave_part, path)))
        hooks.enter_context(module.register_forward_hook(lambda _, args, outputs: self.check_outputs(outputs)))
        hooks.enter_context(Reshaping(self.whole, self.num_rows, lambda: self.is_on_slices, self.slice_of))
        return hooks

    @property
    def is_on_slices(self) -> bool:
        """Whether the code that runs now is given slices."""
        return bool(self.slices) and not self._part and not self.is_in_function

    @property
    def is_in_block(self) -> bool:
        """Whether the forward of a block runs."""
        return not self.tracer.modules.paths.isdisjoint(self.blocks)

    def enter_block(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return a block's arguments, with slices of those that have a row for each token."""
        self.parts.enter_block(path)
        self.is_following = not self.refusal
        leaves, tree = tree_flatten_with_path((args, kwargs))
        arguments = [
            self._sliced(keystr(argument), leaf) if isinstance(leaf, Tensor) else leaf for argument, leaf in leaves
        ]
        return tree_unflatten(arguments, tree)

    def _sliced(self, argument: str, leaf: Tensor) -> Tensor:
        if self.known.of(leaf) is not None:
            self.passed.add(argument)
            return leaf
        is_bias = (
            leaf.dim() == 3 and leaf.shape[0] > 1 and leaf.shape[1] == leaf.shape[2]
        )  # of pairs of tokens, for each head
        dim = None if is_bias else sequence_dim(leaf.shape, self.whole)
        if not self.slices and leaf.dim() == 3 and leaf.is_floating_point() and self.whole not in leaf.shape[:2]:
            self._others = f", but {list(leaf.shape)}"
        if self.slices.setdefault(argument, dim) != dim:
            self.refuse(f"{argument} has rows of tokens in one block and not in another")
        if dim is None:
            return leaf
        part = self.slice_of(leaf, dim)
        if not leaf.requires_grad:
            self._wholes[id(part)] = part, leaf
        return part

    def enter_part(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a part that computes all tokens, as gathered from all ranks."""
        if not self.is_following:
            return None
        leaves, tree = tree_flatten_with_path((args, kwargs))
        tensors: list[GatheredTensor] = []
        arguments = [self._gathered(path, keystr(place), leaf, tensors) for place, leaf in leaves]
        if self.refusal:
            return None
        self.parts.enter(GatheredPart(owner=path, given=tuple(tensors)))
        self._part, self.is_following = path, False
        return tree_unflatten(arguments, tree)

    def _gathered(self, path: str, place: str, leaf: Any, tensors: list[GatheredTensor]) -> Any:
        """Return an argument of a part as a rank gives it, and add it to `tensors` if that is a slice."""
        dependence = self.known.of(leaf) if isinstance(leaf, Tensor) else None
        if dependence is None or self.refusal:
            return leaf
        at = dependence.dim if isinstance(dependence, Along) else 0
        slice_, whole = self._wholes.get(id(leaf), (None, leaf))
        is_known = slice_ is leaf
        if at < 1 or not self.known.has_rows(leaf, at) or not (is_known or leaf.is_floating_point()):
            self.refuse(self._mixed or f"{path} is not given a row for each token", self._mixed_at or path)
            return leaf
        if alone := self.of_some_tokens(leaf):
            self.refuse(alone, path)
            return leaf
        elements = leaf.numel() * self.whole // self.num_rows
        takes_gradient = leaf.requires_grad and torch.is_grad_enabled()
        tensors.append(
            GatheredTensor(place=place, dim=at, elements=elements, takes_gradient=takes_gradient, is_known=is_known)
        )
        if is_known:
            return whole
        self.is_following = False
        gathered = torch.cat([leaf] * (self.whole // self.num_rows), at)
        self.is_following = True
        with disable_current_modes():
            self.learn(gathered, None)
            self.numbers.name(gathered, "whole", self.numbers.of(leaf))
        return gathered

    def leave_part(self, path: str, _: nn.Module, args: Any, output: Any) -> Any:
        """Return a rank's tokens of what a part that computes all tokens has returned."""
        if self._part != path:
            return None
        leaves, tree = tree_flatten_with_path(output)
        results, returned = [], []
        for place, leaf in leaves:
            dim = sequence_dim(leaf.shape, self.whole) if isinstance(leaf, Tensor) else None
            if not dim:
                results.append(leaf)
                continue
            returned.append((keystr(place), dim))
            results.append(self.slice_of(leaf, dim))
            if not leaf.requires_grad:
                self._wholes[id(results[-1])] = results[-1], leaf
        self.parts.leave(returned, output)
        self._part, self.is_following = "", not self.refusal
        return tree_unflatten(results, tree)

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Check an attention that will be exchanged: it is given slices, and a mask of the whole sequence."""
        self.number_attention(call, output)
        query, key, value, mask = call[:4]
        if query.dim() == 4:
            self.parts.attended(is_within=bool(self._part))
        if not self.is_following:
            return
        with disable_current_modes():
            if query.dim() != 4:
                self.refuse(f"the attention in {self.where} has no dimension of heads")
            elif not all(self.known.has_rows(tensor, 2) for tensor in (query, key, value)):
                reason = f"; {self._mixed}" if self._mixed else ""
                if self._others or all(dim is None for dim in self.slices.values()):
                    reason = f"; the blocks are not given a row for each of the {self.whole} tokens of a sample{self._others}"
                self.refuse(f"the attention in {self.where} is not between the tokens of one sequence{reason}")
            elif alone := next(filter(None, map(self.of_some_tokens, (query, key, value))), ""):
                self.refuse(alone)
            elif mask is not None and not _fits(mask.shape, self.whole):
                self.refuse(f"{self.where} makes its attention mask itself, for a slice")
            elif not self.is_in_block:
                self.refuse(f"the attention in {self.where} stands outside the blocks")
            else:
                self.learn(output, Along(2, 1, 0))

    def check_outputs(self, outputs: Any) -> None:
        """Check that the logits, or those of a loss that the forward returns, have a row for each token of the slice."""
        self.tracer.places.reach(every := tensors_in(outputs))
        of_loss = next((vars(tensor)[OF_SLICE][0] for tensor in every if OF_SLICE in vars(tensor)), None)
        try:
            logits = token_rows_of(outputs) if of_loss is None else of_loss
        except InputError as error:
            self.refuse(str(error))
            return
        with disable_current_modes():
            self.outcome = [self.numbers.of(tensor) for tensor in (logits, *self.held)]
            dims = (0, 2) if of_loss is not None else (1, 2) if logits.dim() == 3 else ()
            if not any(self.known.has_rows(logits, dim) for dim in dims[: logits.dim() - 1]):
                self.refuse(
                    self._mixed or "its outputs have no row for each token, so the loss cannot be summed over slices"
                )
            elif reason := self.of_some_tokens(logits):
                self.refuse(reason)

    def sums_along(self, gradients: list[Tensor]) -> list[int | None] | None:
        """Return where the tokens of gradients are before the blocks, and nothing from these on."""
        return None if self.slices else super().sums_along(gradients)


def compare_forwards(
    whole: SliceProver,
    part: SliceProver,
    module: nn.Module,
    sample: Any,
    value_of: ValueOf | None,
    experts: ExpertModules,
) -> tuple[str, str]:
    """Run a model's forward on the whole sequence and on a slice; return why it is not shown that every token is computed alike, and
    the path of the module that shows it, or empty texts."""
    if whole.looking:
        answer_alike((whole.tracer, part.tracer), module, sample, value_of)
    for watch in (whole, part):
        if refusal := watch.run(module, sample, value_of, experts):
            return refusal, watch.failed_at or watch.where
    if whole.outcome != part.outcome:
        path = first_difference(whole.numbers, part.numbers)
        return f"{path} computes differently, or with other numbers, on {part.other_sizes}", path
    return "", ""


def _fits(shape: torch.Size, length: int) -> bool:
    return len(shape) >= 2 and shape[-1] == length and shape[-2] in (1, length)
