"""Proof that the samples of a batch do not influence each other, so that ranks and micro-batches may split the batch.

A forward runs on the meta device on NUM_SAMPLES copies of a sample. The batch may be split if every output that the loss reads has the samples in their order along one
dimension. Where a rule shows that samples are mixed on the way to such an output, splitting is refused, with the module
and the operation. What is not clear is listed to be tried on the run's first batch, whole against one sample of it:

    an operation without a rule, which keeps the samples where they are on drawn values (`operation_trial.py`), or does not
        run on them
    code that looks at a value, or at the number of samples, and may then act differently
    a constant with a row for each sample
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from samestep.building.model_loss import ModelLoss
from samestep.building.named_tensors import address
from samestep.building.over_samples import mark_of, within
from samestep.building.torch_seams import disable_current_modes
from samestep.datasets.values import has_items
from samestep.errors import ModelError
from samestep.independence.dependence import NO_DIM, Along, Call, Dependence, Mixed
from samestep.independence.dimension_maps import bind_arguments
from samestep.independence.linear_hooks import is_linear
from samestep.independence.row_prover import Prover
from samestep.independence.row_rules import assume_rows_stay, of_each_row
from samestep.independence.sample_decisions import Decisions, act_on, asks_of_parts
from samestep.independence.value_numbers import Table
from samestep.models.layer_parts import BatchValueCall
from samestep.models.spec import ExpertModules, LossTensor
from samestep.state.snapshot import preserve_function, preserve_modules
from samestep.tracing.batch_norms import OPERATIONS
from samestep.tracing.custom_functions import Hook, follow_calls, follow_hook
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.meta_tensors import NeedsValuesError, mutated_operands
from samestep.tracing.module_inputs import Groups, groups_of
from samestep.tracing.operations import Executed
from samestep.tracing.watched_forward import TracedValues, watch_forward
from samestep.trees import map_tensors, operands, tensors_in, tree_map_only

NUM_SAMPLES = 4
"""Samples that are traced: code that pairs samples, or looks at groups of two or four, runs on so many."""

_UNSEEN = ", which looks at its values and changes it, or is one of a node. Use a hook on a tensor (x.register_hook) that only looks at it"


@dataclass(frozen=True, slots=True)
class Findings:
    """The answer to whether samples influence each other."""

    refusal: str = ""
    """Where samples influence each other, as text; empty if nothing shows it."""
    tried: tuple[str, ...] = ()
    """What is assumed, and must be tried on real values."""
    batch_norms: Mapping[str, int] = field(default_factory=dict)
    """Modules whose calls of batch norm take statistics of samples that lie along the first dimension, each with the number of times
    that all of them stand there one behind the other."""
    called_again: Groups = ()
    """Modules that the forward of several samples calls several times."""
    loss_values: tuple[BatchValueCall, ...] = ()
    """Calls in the loss that take values of all samples."""
    loss_reads: tuple[LossTensor, ...] | None = None
    """What a loss of the whole batch reads; empty where several samples cannot be traced, None for a sum over samples."""
    loss_pairs: int = 0
    """Elements that a loss of the whole batch keeps for each pair of samples."""
    hooks_scale: bool = False
    """Whether what hooks make of gradients is not in proportion to them."""


def examine(
    module: nn.Module,
    sample: Any,
    loss: Callable[[Any, Any], Any],
    experts: ExpertModules,
    value_of: ValueOf | None,
    *,
    keeps_all: bool,
    takes_gradients: bool = False,
    group: int = NUM_SAMPLES,
    around: Callable[[RowsOf, Place], AbstractContextManager[Any]] = lambda rows_of, place: nullcontext(),
) -> Findings:
    """Return whether samples influence each other in a model's forward; `sample` is a batch of one real sample.

    `keeps_all` follows the values of all tensors, for models whose code looks at them; `takes_gradients` keeps what a gradient that the
    forward takes needs; `group` is the number of samples whose statistics a batch norm takes. `around` makes its context from functions that say where a tensor has its samples, and note it of random numbers.
    """
    if has_items(sample):
        return Findings(tried=("the forward on several samples, each an item of a list",))

    prover = functools.partial(_SampleProver, module, Table(), keeps_all=keeps_all, takes_gradients=takes_gradients)

    def run(watch: _SampleProver) -> tuple[Any, Groups]:
        with around(watch.rows_of, watch.place), watch.experts_by_row(module, experts):
            output = watch_forward(module, sample, NUM_SAMPLES, watch.tracer, value_of)
        watch.decisions.computed = [*watch.numbers.history, *map(watch.numbers.of, tensors_in(output))]
        return output, groups_of(module, watch.tracer.modules)

    def run_again(decisions: Decisions) -> None:
        with preserve_modules(module):
            run(prover(decisions))

    watch = prover(Decisions())
    try:
        with preserve_modules(module):
            outputs, calls = run(watch)
    except (ModelError, NeedsValuesError) as error:
        # One sample can be traced, and several cannot: what their number changes is seen on real batches.
        reason = str(error).removeprefix("the model cannot be traced: ") or f"{watch.where} looks at values"
        unknown = () if mark_of(loss) is not None else None
        return Findings(tried=(f"the forward on several samples ({reason})",), loss_reads=unknown)
    # What a forward returns as the loss is of all samples: forwards on parts of a batch are tried (`forward_loss.py`).
    is_within = isinstance(loss, ModelLoss)
    read = set[int]() if is_within else watch.read_by(loss, outputs)
    refusal, tried = watch.mixed_gradient, [*watch.tried, *(["the loss that the forward returns"] if is_within else [])]
    refusal = refusal or act_on(watch.decisions, run_again)
    refusal = refusal or _refused_norm(module, sample, watch, value_of, 0 if keeps_all else group)
    refused, unproven = watch.judge(tensor for tensor in tensors_in(outputs) if read is None or address(tensor) in read)
    refusal, tried = refusal or refused, [*tried, *unproven]
    tried += [f"{where}, which looks at values" for where in watch.reads]
    listed = () if refusal else tuple(dict.fromkeys(tried))
    reads = _read_by_marked(loss, watch, outputs)
    pairs = 0 if reads is None or is_within else watch.pairs_of(loss, outputs)
    return Findings(refusal, listed, watch.batch_norm_views, calls, watch.loss_values, reads, pairs, watch.hooks_scale)


def storages_read(loss: Callable[[Any, Any], Any], outputs: Any, batch: Any) -> set[int] | None:
    """Return the storages that a loss reads of tensors on the meta device; None where it does not run on them."""
    read = set[int]()

    def ran(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        read.update(map(address, operands(*args, *kwargs.values())))

    try:
        with preserve_function(loss), torch.enable_grad(), follow_calls(ran):
            loss(outputs, batch)
    except Exception:  # of the user's own code, which may look at values
        return None
    return read


def _read_by_marked(loss: Callable[[Any, Any], Any], watch: _SampleProver, outputs: Any) -> tuple[Any, ...] | None:
    """Return the tensors that a loss over the full batch reads; None for another loss."""
    if (mark := mark_of(loss)) is None:
        return None
    reads = (*watch.loss_tensors("outputs", outputs), *watch.loss_tensors("batch"))
    if not mark.rows:
        return reads
    return tuple(replace(tensor, is_by_rows=tensor.of == "outputs" and not tensor.dtype) for tensor in reads)


def _refused_norm(module: nn.Module, sample: Any, few: _SampleProver, value_of: ValueOf | None, group: int) -> str:
    """Return where code calls batch norm on parts of the samples: in one of several ways, or more often for a whole group of samples than
    for a few; empty if nowhere. A group of 0 samples is not looked at.
    """
    if both := few.batch_norm_views.keys() & few.otherwise_called:
        return f"{min(both) or 'the model itself'} by one of its calls of batch_norm"
    if not few.batch_norm_views or not group:
        return ""
    of_group = ForwardTracer(module, {})
    try:
        with preserve_modules(module):
            watch_forward(module, sample, group, of_group, value_of)
    except (ModelError, NeedsValuesError):
        return ""
    fewer, calls = (Counter(call.owner for _, call in tracer.events.batch_norms) for tracer in (few.tracer, of_group))
    owner = next((path for path in few.batch_norm_views if calls[path] > fewer[path]), None)
    if owner is None:
        return ""
    size, rest = divmod(group * fewer[owner], calls[owner])
    key = "numerics.batch_norm_group" + ("" if rest else f" = {size}")
    works = f"one call on all of them, with {key}, takes the same statistics in every layout"
    return f"{owner or 'the model itself'} by calls of batch norm on parts of the samples ({works})"


RowsOf = Callable[[Tensor], tuple[int, int] | None]
"""Returns the dimension of a tensor that holds the samples, -1 for none, and the positions of one side by side, 0 for all."""
Place = Callable[[Any, tuple[int, int] | None, Callable[[tuple[int, int]], None]], None]
"""Is told where random numbers, which depend on no tensor, have a row for each sample; it calls the function if they have other rows."""


class _SampleProver(Prover):
    """Follows a forward on several samples, whose operations without a rule are listed and assumed to be harmless."""

    def __init__(
        self, module: nn.Module, table: Table, decisions: Decisions, *, keeps_all: bool, takes_gradients: bool
    ) -> None:
        super().__init__(module, NUM_SAMPLES, table, keeps_all=keeps_all, takes_gradients=takes_gradients)
        self.decisions = decisions
        self.mixed_gradient = ""
        self.hooks_scale = False
        """Where a custom backward mixes samples, as text."""
        self.batch_norm_views: dict[str, int] = {}
        """Modules whose calls of batch norm are computed over groups of samples, whatever a layout splits, each with the number of
        times that all samples stand one behind the other among the rows."""
        self.otherwise_called: set[str] = set()
        """Modules that call batch norm on what does not have the samples along its first dimension."""
        self._draws: dict[int, tuple[Tensor, Along, Callable[[tuple[int, int]], None]]] = {}
        """Random numbers with several rows for each sample, by storage; whether these rows are side by side shows at their first use."""
        self._batch: Any = None
        self.loss_values: tuple[BatchValueCall, ...] = ()
        self._read: set[int] | None = None

    def leave(self, path: str, part: nn.Module, inputs: Any, output: Any) -> None:
        """Note the values of the model's outputs, as far as they are known."""
        if path:
            return
        with disable_current_modes():
            floating = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            self.decisions.outputs = [self.value_of(tensor) for tensor in floating]

    def given(self, batch: Any) -> None:
        """Note the batch of the forward; each of its tensors has a row for each sample, or several as a graph has vertices."""
        with disable_current_modes():
            for leaf in tensors_in(batch):
                if leaf.dim():
                    self.learn(leaf, Along(0, leaf.shape[0] // NUM_SAMPLES, 0))
                    self.known.are_placed &= leaf.shape[0] == NUM_SAMPLES
        self._batch = batch

    def rows_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the dimension of a tensor that holds the samples in order, and the positions of one side by side."""
        dependence = self.known.of(tensor)
        if not isinstance(dependence, Along):
            return None if dependence else (NO_DIM, 0)
        if not self.known.is_ordered(tensor):
            return None
        is_whole = tensor.shape[dependence.dim] == NUM_SAMPLES * dependence.inner
        return (dependence.dim, 0 if is_whole else dependence.inner)

    def place(
        self, numbers: Any, rows: tuple[int, int] | None, replace_rows: Callable[[tuple[int, int]], None]
    ) -> None:
        """Set the dependence of random numbers that are drawn for each sample: each depends on its sample alone."""
        if not isinstance(numbers, Tensor) or rows is None or rows[0] == NO_DIM or self.known.of(numbers) is not None:
            return
        dim, inner = rows
        dependence = Along(dim, inner or numbers.shape[dim] // NUM_SAMPLES, 0)
        self.learn(numbers, dependence)
        if not inner and dependence.inner > 1:
            self._draws[address(numbers)] = numbers, dependence, replace_rows

    def untried(self, call: Call) -> list[Dependence]:
        """Return the dependences of the results of an operation that is listed and assumed to keep samples
        independent."""
        self.tried.append(call.text)
        return list(assume_rows_stay(call))

    def _follow(self, call: Call) -> None:
        """Assume that batch norm keeps samples independent: a layout computes its statistics over the same groups of
        samples. The factor of a mean in its gradient is tried: it may be taken away again."""
        if (of_each := of_each_row(call)) is not None:
            self.tried.append(f"{call.text}, which divides by the number of samples")
            for result, dependence in zip(call.results, of_each, strict=True):
                self.learn(result, dependence)
            return
        is_one = self.tracer.flow_recorder.at.in_batch_norm and call.func.overloadpacket in OPERATIONS
        if not is_one or not bind_arguments(call).get("training", True):
            super()._follow(call)
            self._try_other_rows(call.given, lambda: self._follow_draws(call))
            return
        x, owner = bind_arguments(call)["input"], self.tracer.events.batch_norms[-1][1].owner
        rows = self.known.of(x) if self.known.is_ordered(x) else None
        views = len(x) // (NUM_SAMPLES * rows.inner) if isinstance(rows, Along) and rows.dim == 0 else 0
        if not views or self.batch_norm_views.setdefault(owner, views) != views:
            self.otherwise_called.add(owner)
            super()._follow(call)
            return
        for index, result in enumerate(call.results):
            self.learn(result, None if index else rows)

    def hooked(self, name: str, hook: Hook, given: list[Tensor], results: list[Tensor]) -> None:
        """Follow a hook on gradients by its operations too: a trial does not see what it does with larger ones."""
        super().hooked(name, hook, given, results)
        with disable_current_modes():
            self.hooks_scale = self.hooks_scale or not is_linear(hook, given)
            gradients = [torch.empty_like(tensor, requires_grad=False) for tensor in given]
            for tensor, gradient in zip(given, gradients, strict=True):
                self.learn(gradient, self.known.of(tensor))

            def ran(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> None:
                args, kwargs = tree_map_only(Tensor, self.tracer.move, (args, kwargs))
                self._carry_on(func, args, kwargs, operands(outcome) or mutated_operands(func, args, kwargs))

            new_gradients = follow_hook(hook, gradients, ran)
            shared = [
                dependence
                for dependence in map(self.known.of, new_gradients or ())
                if isinstance(dependence, Mixed) and dependence.shown
            ]
            if shared or (new_gradients is None and any(isinstance(self.known.of(tensor), Along) for tensor in given)):
                self.refuse_gradient(f"{self.where} by {name}" + ("" if shared else _UNSEEN))

    def moved(self, made: Tensor, constant: Tensor) -> None:
        """Note what is known of a constant of the host; random numbers stay known."""
        self._try_other_rows([constant], lambda: not self.known.is_ordered(constant))
        super().moved(made, constant)
        if (drawn := self._draws.get(address(constant))) and made.shape == drawn[0].shape:
            self._draws[address(made)] = (made, *drawn[1:])

    def _follow_draws(self, call: Call) -> bool:
        super()._follow(call)
        return any(isinstance(self.known.of(result), Mixed) for result in call.results)

    def _try_other_rows(self, tensors: Iterable[Tensor], mixes: Callable[[], bool]) -> None:
        """Let random numbers [K * B] among the operands be those of [K, B] if an operation mixes samples, and then does not."""
        drawn = [self._draws.pop(address(tensor), None) for tensor in (tensors if self._draws and mixes() else ())]
        for numbers, along, replace_rows in filter(None, drawn):
            self.learn(numbers, Along(along.dim, 1, 0))
            if not mixes():
                replace_rows((along.dim, 1))
                return
            self.learn(numbers, along)
            mixes()

    def refuse_gradient(self, where: str) -> None:
        """Store the first Function whose backward mixes samples."""
        self.mixed_gradient = self.mixed_gradient or where

    def on_constant(self, constant: Tensor, dim: int, inner: int, where: str) -> None:
        """List a constant whose rows may differ between samples."""
        if self.is_uniform(constant) or not constant.numel() or constant.stride(dim) == 0:
            return
        values = self.value_of(constant)
        if values is not None and constant.shape[dim] == NUM_SAMPLES * inner:
            rows = values.movedim(dim, 0).unflatten(0, (NUM_SAMPLES, inner))
            if bool((rows == rows[:1]).all()):
                return
        self.tried.append(f"{where}, which uses a constant with a row for each sample")

    def take_values(self, kind: Literal["sum", "cat"], x: Tensor, result: Tensor) -> None:
        """Let a value of all samples, which every rank computes alike, depend on no single one."""
        with disable_current_modes():
            dependence = self.known.of(x)
            in_rows = isinstance(dependence, Along) and dependence.dim == 0 and self.known.is_ordered(x)
            text = f"{self.where} by batch_{kind}, and its rows are not the samples in order"
            if not in_rows and dependence is not None and not isinstance(dependence, Mixed):
                self.mixed_gradient = self.mixed_gradient or text
            elif not in_rows:
                self.tried.append(text)
            self.learn(result, None)

    def loss_tensors(self, of: Literal["outputs", "batch"], outputs: Any = None) -> Iterator[LossTensor]:
        """Yield what the loss has read of the outputs or of the batch; of a loss that was not seen to read, all."""
        for index, tensor in enumerate(tensors_in(self._batch if of == "batch" else outputs)):
            if self._read is None or address(tensor) in self._read:
                is_number = tensor.is_floating_point() or tensor.is_complex()
                rows = self.rows_of(tensor)
                number = tensor.numel() // (NUM_SAMPLES if rows is None or rows[0] >= 0 else 1)
                each = number * (1 if is_number else tensor.element_size())
                yield LossTensor(
                    of=of,
                    index=index,
                    elements=each * (2 if tensor.is_complex() else 1),
                    dtype="" if is_number else "uint8",
                    rows=rows,
                )

    def pairs_of(self, loss: Callable[[Any, Any], Any], outputs: Any) -> int:
        """Return the elements that a loss keeps for each pair of samples, such as a matrix of their products; 0 where it does not run on the meta device.

        The loss runs on n, 2 n and 4 n samples. The elements that autograd saves of it are a polynomial in the number of samples,
        s(n) = a + b n + c n^2, and the result is c.
        """

        def saved(times: int) -> int:
            def larger(tensor: Tensor) -> Tensor:
                shape, rows = list(tensor.shape), self.rows_of(tensor)
                if rows is not None and rows[0] >= 0:
                    shape[rows[0]] *= times
                on_meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
                return on_meta.requires_grad_(on_meta.is_floating_point() or on_meta.is_complex())

            sizes: dict[int, int] = {}

            def note(tensor: Tensor) -> Tensor:
                sizes[tensor.untyped_storage()._cdata] = tensor.numel()
                tensors.append(tensor)  # else another one may have its address
                return tensor

            tensors: list[Tensor] = []
            with within(None), torch.enable_grad(), preserve_function(loss), saved_tensors_hooks(note, lambda x: x):
                result = loss(map_tensors(outputs, larger), map_tensors(self._batch, larger))
            del result
            return sum(sizes.values())

        try:
            few, twice, most = (saved(times) for times in (1, 2, 4))
        except Exception:  # the user's own code, which may look at values
            return 0
        return max(0, round(((most - twice) / 2 - (twice - few)) / (3 * NUM_SAMPLES**2)))

    def read_by(self, loss: Callable[[Any, Any], Any], outputs: Any) -> set[int] | None:
        """Return the storages that a loss reads; None if it does not run on the meta device."""
        events = self.tracer.events
        of_forward, events.batch_values = events.batch_values, []
        with within(TracedValues(self.tracer.note_values)):
            self._read = storages_read(loss, outputs, self._batch)
        self.loss_values = tuple(replace(call, owner="") for _, call in events.batch_values)
        events.batch_values = of_forward
        return self._read

    def ran(self, op: Executed) -> Any:
        """Follow an operation, and return what the code gets: another answer, if that is asked of it."""
        func, outcome = op.func, super().ran(op)
        if not self.tracer.values.keeps_all or not self.is_following:
            return outcome
        tensors = [tensor for tensor in operands(*op.args, *op.kwargs.values()) if tensor.is_meta]
        if torch.Tag.data_dependent_output not in func.tags:
            self.decisions.check_length(len(self.numbers.history))
        elif len(tensors) == 1:
            return self.decisions.answer(self.key(tensors[0]), outcome)
        elif any(isinstance(self.known.of(tensor), Along) for tensor in tensors):
            return self.decisions.answer_about_rows(func, outcome, self.where)
        return outcome

    def judge(self, outputs: Iterable[Tensor]) -> tuple[str, list[str]]:
        """Return why an output of a sample depends on other samples, if one does, and which operations leave it open."""
        refusal, unproven = "", list[str]()
        for tensor in outputs:
            if not tensor.is_floating_point():
                continue
            dependence = self.known.of(tensor)
            if isinstance(dependence, Mixed) and dependence.shown:
                refusal = refusal or dependence.where
            elif isinstance(dependence, Along) and (alone := self.numbers.apart(tensor)):
                refusal = refusal or f"{alone}, which computes some samples otherwise than the others"
            elif not self.known.is_ordered(tensor):
                where = "the outputs, which are not one for each sample"
                unproven.append(dependence.where if isinstance(dependence, Mixed) else where)
        return refusal, unproven

    def read(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Return the values of a tensor that code reads, or other ones where it is asked what the code does with these."""
        answer: Tensor = self.decisions.answer(self.key(tensor), value)
        return answer

    def _carry_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        super()._carry_on(func, args, kwargs, results)
        if not self.tracer.values.keeps_all:
            return
        tensors = [tensor for tensor in operands(*args, *kwargs.values()) if tensor.is_meta]
        read = [(self.key(tensor), tensor, isinstance(self.known.of(tensor), Along)) for tensor in tensors]
        mixed = [(self.key(tensor), tensor, isinstance(self.known.of(tensor), Mixed)) for tensor in results]
        asks = asks_of_parts(func, args, self.value_of)
        self.decisions.follow(func, read, mixed, self.where, self.value_of, asks=asks)
