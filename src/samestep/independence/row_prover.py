"""The dependences of a traced forward on the rows of one axis, for samples and for tokens, followed from its operations."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.named_tensors import address, tensors_of
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.dependence import Along, Call, Dependence, Dependences, Mixed, nothing_known
from samestep.independence.dimension_maps import FILLS, Map, along_dimension, attention, is_elementwise
from samestep.independence.linear_hooks import is_linear
from samestep.independence.operation_trial import Given, Outcome, RowsAlong, try_apart, try_sums
from samestep.independence.row_rules import assume_rows_stay, by_map, rule_of
from samestep.independence.value_numbers import Operand, Table, ValueNumbers
from samestep.models.spec import ExpertModules
from samestep.tracing import experts as experts_module
from samestep.tracing.custom_functions import Function, Hook
from samestep.tracing.forward import ForwardTracer
from samestep.tracing.operations import FEW_ELEMENTS, Analysis, Executed
from samestep.trees import operands, tree_map_only


class Prover(Analysis):
    """Follows the dependences of a forward; what they must be, its subclasses say."""

    def __init__(
        self, module: nn.Module, num_rows: int, table: Table, *, keeps_all: bool = False, takes_gradients: bool = False
    ) -> None:
        self.tracer = ForwardTracer(module, {}, keeps_all, analysis=self, has_backward=takes_gradients)
        self.key = self.tracer.key
        self.known = Dependences(num_rows, self.key)
        self.num_rows = num_rows
        self.is_following = True
        self.reads: list[str] = []
        """Paths of modules whose code looked at a value that depends on rows."""
        self.tried: list[str] = []
        """What is used because a trial has passed, or is assumed, as text."""
        self._operands: list[Operand] = []
        """The operands of the operation that runs."""
        self._given_to_experts: list[Hashable] = []
        self._routed: tuple[Tensor, ...] = ()
        """What experts are given that run now, if that depends on rows."""
        self._uniform: set[int] = set()
        """Storages whose elements are all equal, or random; other checks cover randomness."""
        self.numbers = ValueNumbers(table, self.known, self.key, lambda tensor: address(tensor) in self._uniform)
        """The numbers of values; those that the model holds have their names."""
        for named in tensors_of(module):
            self.numbers.name(named.tensor, "held", named.name)

    @property
    def where(self) -> str:
        """Path of the module whose code runs."""
        return self.tracer.modules.where or "the model itself"

    def untried(self, call: Call) -> list[Dependence]:
        """Return the dependences of the results of an operation that has no rule and does not run on drawn values."""
        return list(nothing_known(call))

    def refuse_gradient(self, where: str) -> None:
        """Receive the text of a custom Function whose backward does not compute each row by itself."""

    def on_constant(self, constant: Tensor, dim: int, inner: int, where: str) -> None:
        """Receive a constant with several positions along the dimension of rows of the other operands."""

    def learn(self, tensor: Tensor, dependence: Dependence) -> None:
        """Set the dependence of a tensor."""
        self.known.learn(tensor, dependence)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor, where it is known."""
        values = self.tracer.values
        return values.of(tensor) if values.knows(tensor) else None

    def is_uniform(self, tensor: Tensor) -> bool:
        """Return whether all elements of a tensor are equal, or random."""
        return tensor.numel() == 1 or address(tensor) in self._uniform

    @contextmanager
    def experts_by_row(self, module: nn.Module, experts: ExpertModules) -> Iterator[None]:
        """Take every module of experts, in a forward that runs inside, to compute each of its rows by itself."""
        with ExitStack() as stack:
            for path in experts.counts:
                part = module.get_submodule(path)
                stack.enter_context(part.register_forward_pre_hook(self._enter_experts, with_kwargs=True))
                stack.enter_context(part.register_forward_hook(self._leave_experts))
            stack.enter_context(experts_module.compute_by_groups(module, experts))
            yield

    def _enter_experts(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the numbers of the rows that experts are given; they compute each row by itself, so that what runs inside is not followed."""
        with disable_current_modes():
            routed = experts_module.routing_arguments(args, kwargs)
            self._given_to_experts = [self.numbers.of(tensor) for tensor in routed]
            if self.is_following and any(self.known.of(tensor) is not None for tensor in routed):
                self._routed, self.is_following = routed, False

    def _leave_experts(self, _: nn.Module, args: Any, output: Tensor) -> None:
        """Set the dependences of each row of the experts' result to those of its input row, and its number."""
        with disable_current_modes():
            if self._routed:
                call = self._call("its experts", self._routed, {}, [output])
                self._routed, self.is_following = (), True
                self._learn_by(_by_rows, call)
            self.numbers.name(output, "experts", self.where, *self._given_to_experts, where=self.where)

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Set the dependence of the output of an attention."""
        if self.is_following:
            self._learn_by(attention, self._call("attention", tuple(operands(*call[:4])), {}, [output]))
            self.number_attention(call, output)

    def number_attention(self, call: AttentionCall, output: Tensor) -> None:
        """Set the number of the output of an attention."""
        with disable_current_modes():
            what = [self.numbers.of(x) if isinstance(x, Tensor) else repr(x) for x in call]
            apart = self.numbers.apart(*operands(*call))
            self.numbers.name(output, "attention", *what, where=self.where, apart=apart)

    def made_on_meta(self, made: Tensor, real: Tensor) -> None:
        """Set the number of the values of a tensor that stands for a real one."""
        with disable_current_modes():
            self.numbers.learn_constant(made, real)

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the operands of an operation as they are before it."""
        with disable_current_modes():
            self._operands = self.numbers.seen_by(func, args, kwargs)

    def ran(self, op: Executed) -> Any:
        """Set the dependences and the numbers of the results of an operation."""
        with disable_current_modes():
            if self.is_following:
                self._carry_on(op.func, op.meta_args, op.meta_kwargs, op.results)
            self.numbers.ran(op, self._operands, self.where)
        return op.outcome

    def applied(self, function: Function, args: tuple[Any, ...], named: dict[str, Any], outcome: Any) -> None:
        """Try the backward of a custom Function, of which the forward alone is followed."""
        results = [tensor for tensor in operands(outcome) if tensor.is_meta]
        with disable_current_modes():
            self._try_backward(f"the gradient of {function.__self__.__name__}", function, args, named, results)

    def hooked(self, name: str, hook: Hook, given: list[Tensor], results: list[Tensor]) -> None:
        """Follow a hook on gradients, which no forward shows: where all rows share these it must be linear."""
        with disable_current_modes(), torch.no_grad():
            gradients = tuple(tensor.detach() for tensor in given)
            if not self._is_shared(gradients, given):
                self._try_backward(name, hook, gradients, {}, results)
            elif not is_linear(hook, given):
                self.refuse_gradient(f"{self.where} by {name}")

    def _is_shared(self, operands: Iterable[Tensor], gradients: list[Tensor]) -> bool:
        """Return whether each part of the rows contributes to gradients: to those of what all rows share."""
        is_of_none = all(self.known.of(tensor) is None for tensor in operands if tensor.is_meta)
        return self.sums_along(gradients) is not None or (self.is_following and is_of_none)

    def _try_backward(
        self, name: str, compute: Any, args: tuple[Any, ...], named: dict[str, Any], results: list[Tensor]
    ) -> None:
        """Try what computes gradients: for each row by itself, or additively where all rows share what it is given."""
        tensors = operands(*args, *named.values())
        if self._is_shared(tensors, results):
            dims = self.sums_along(results) or [None] * len(results)
            outcome = try_sums(compute, *self._given(args, named, {}), dims)
        elif self.is_following and any(
            isinstance(self.known.of(tensor), Along) for tensor in tensors if tensor.is_meta
        ):
            rows = [known for tensor in results if (known := self._rows(tensor)) is not None]
            outcome = self._try(compute, args, named, {}, rows) if len(rows) == len(results) else "fails"
        else:
            return
        text = f"{self.where} by {name}"
        if outcome == "differs":
            self.refuse_gradient(text)
        else:
            self.tried.append(text)

    def sums_along(self, gradients: list[Tensor]) -> list[int | None] | None:
        """Return where parts of the rows contribute to gradients, before rows are followed: to positions along a
        dimension, or, for None in the list, to all elements. None while rows are followed.
        """
        return None

    def _rows(self, tensor: Tensor) -> RowsAlong | None:
        """Return where a tensor has the rows, all of them in order; None if it has not."""
        return self._in_order(self.known.of(tensor), tensor)

    def _in_order(self, dependence: Dependence, tensor: Tensor) -> RowsAlong | None:
        if not isinstance(dependence, Along) or not self.known.is_ordered(tensor, dependence):
            return None
        return RowsAlong(dependence.dim, dependence.inner, self.num_rows)

    def _try(
        self, compute: Any, args: Any, kwargs: Any, written: dict[int, RowsAlong], results: list[RowsAlong]
    ) -> Outcome:
        """Try an operation whose rows are known; `written` are the rows of operands that it writes, by identity."""
        try:
            return try_apart(compute, *self._given(args, kwargs, written), results)
        except ValueError:
            return "fails"

    def _given(
        self, args: Any, kwargs: Any, written: dict[int, RowsAlong]
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Return arguments of an operation with what a trial knows of each tensor in its place."""

        def described(tensor: Tensor) -> Any:
            if not tensor.is_meta:
                return tensor
            dependence, rows = self.known.of(tensor), self._rows(tensor) or written.get(id(tensor))
            if isinstance(dependence, Along) and rows is None:
                raise ValueError("rows that are not in order")
            known = self.value_of(tensor) if not tensor.is_floating_point() and dependence is None else None
            values = None if known is None or known.numel() > FEW_ELEMENTS else tuple(known.flatten().tolist())
            shape, is_mixed = tuple(tensor.shape), isinstance(dependence, Mixed)
            return Given(shape, tensor.dtype, tensor.requires_grad, rows, is_mixed, values)

        args, kwargs = tree_map_only(Tensor, described, (args, kwargs))
        return tuple(tuple(item) if isinstance(item, list) else item for item in args), tuple(sorted(kwargs.items()))

    def without_rule(self, call: Call) -> list[Dependence]:
        """Return the dependences of the results of an operation that has no rule, and is tried on drawn values."""
        dependences = list(assume_rows_stay(call))
        pairs = zip(dependences, call.results, strict=True)
        rows = [known for dependence, result in pairs if (known := self._in_order(dependence, result)) is not None]
        if not rows or len(rows) < len(dependences):
            return self.untried(call)
        written = {id(result): of_result for result, of_result in zip(call.results, rows, strict=True)}
        outcome = self._try(call.func, call.args, call.kwargs, written, rows)
        if outcome == "fails":
            return self.untried(call)
        if outcome == "differs":
            return [Mixed(call.text, shown=True) for _ in dependences]
        self.tried.append(call.text)
        return dependences

    def moved(self, made: Tensor, constant: Tensor) -> None:
        """Note what is known of a constant."""
        if (dependence := self.known.of(constant)) is not None:  # random numbers that belong to samples
            self.learn(made, dependence)
        if not constant.is_meta and constant.numel():
            with disable_current_modes():
                if bool((constant == constant.flatten()[0]).all()):
                    self._uniform.add(self.key(made))

    def _learn_by(self, dimension_map: Map, call: Call) -> None:
        """Set the dependences of the results of a call by its map of dimensions."""
        for result, dependence in zip(call.results, by_map(dimension_map, call), strict=True):
            self.learn(result, dependence)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> Call:
        return Call(func, args, kwargs, results, self.known, self.where, self.on_constant, self.value_of)

    def _carry_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        """Set the dependences of the results of an operation."""
        packet, writes = func.overloadpacket, func._schema.is_mutable
        if packet in _TURNS:
            return  # the storage stays as it is
        tensors = [tensor for tensor in operands(*args, *kwargs.values()) if tensor.is_meta]
        met = any(self.known.of(tensor) is not None for tensor in tensors)
        if met and torch.Tag.data_dependent_output in func.tags:
            self.reads.append(self.where)
        if packet in FILLS or (torch.Tag.nondeterministic_seeded in func.tags and _draws(func, met)):
            self._note_uniform(results, is_uniform=True, writes=writes)
            self._learn_constants(results)
            return
        elementwise = is_elementwise(func)
        if not met:
            is_uniform = bool(tensors) and elementwise and all(self.key(tensor) in self._uniform for tensor in tensors)
            if is_uniform or writes:
                self._note_uniform(results, is_uniform=is_uniform, writes=writes)
            self._learn_constants(results if writes else [])
        elif writes or not all(address(result) in {address(t) for t in tensors} for result in results):  # no views
            self._follow(self._call(func, args, kwargs, results))

    def _note_uniform(self, results: list[Tensor], *, is_uniform: bool, writes: bool) -> None:
        """Note whether all elements of results are equal: of a tensor that is written in part, others may differ from these."""
        for tensor in results:
            is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            note = self._uniform.add if is_uniform and (is_whole or not writes) else self._uniform.discard
            note(self.key(tensor))

    def _learn_constants(self, results: list[Tensor]) -> None:
        for result in results:
            self.learn(result, None)

    def _follow(self, call: Call) -> None:
        """Set the dependences of the results of an operation that has met rows, by its rule."""
        try:
            rule = rule_of(call.func)
            dependences = self.without_rule(call) if rule is None else list(rule(call))
        except (IndexError, KeyError, TypeError, ValueError):  # a form of the operation that its rule does not foresee
            dependences = list(nothing_known(call))
        for result, dependence in zip(call.results, dependences, strict=False):
            self.learn(result, dependence)
        for result in call.results[len(dependences) :]:
            self.learn(result, Mixed(call.text, shown=False))


_by_rows = along_dimension(0)
_TURNS = frozenset(
    (
        torch.ops.aten.transpose_, torch.ops.aten.t_, torch.ops.aten.squeeze_, torch.ops.aten.unsqueeze_,
        torch.ops.aten.swapaxes_, torch.ops.aten.swapdims_, torch.ops.aten.as_strided_, torch.ops.aten.detach_,
    )
)  # fmt: skip
"""Operations that make another view of a tensor in its place, as a GRU does whose batch comes first."""


def _draws(func: Any, met: bool) -> bool:
    """Return whether a random operation depends on no tensor's values, as randn, randn_like and bernoulli_(0.5) do."""
    name: str = func.overloadpacket.__name__
    return not met or "like" in name or func._overloadname in ("p", "float") or name in ("normal_", "uniform_")
