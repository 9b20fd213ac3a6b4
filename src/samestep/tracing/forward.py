"""One traced forward on the meta device: what each operation reads, writes and costs, and what autograd keeps.

A storage is identified by its address. The operations between the entry of one top-most module with weights and the
next such entry are a region; one region makes a storage, and others read it, return it or keep it for the backward.
FLOPs are torch's own count (`torch.utils.flop_counter`): 2 for a multiplication and an addition, attention as if
nothing were masked.

Attention is traced as the fused kernels compute it: they keep queries, keys, values, output, one log-sum-exp a row and
the given mask, but no matrix of scores. Integers keep their values, so that code which looks at the positions of
tokens takes the branch it would really take; on request all values of the sample and the weights are kept.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.families import facts_of
from samestep.building.named_tensors import address, inner_tensor, tensors_of
from samestep.building.torch_seams import DispatchMode, autograd_sequence_number
from samestep.errors import ModelError, module_name
from samestep.models.layer_parts import BatchNormCall, BatchValueCall, Cutting, Factors, Product
from samestep.tracing import attention_exchanges, batch_norms
from samestep.tracing.checkpointed import TracedPlaces
from samestep.tracing.custom_functions import report_module_hooks
from samestep.tracing.flow import Flow, makes_event
from samestep.tracing.flow_recorder import FlowRecorder
from samestep.tracing.looks import Looks
from samestep.tracing.meta_tensors import (
    KnownValues,
    NeedsValuesError,
    is_whole,
    run_on_meta,
    seen_by,
    storage_elements,
    values_of,
)
from samestep.tracing.module_inputs import CallNotes, EmbeddingInputs, WeightSlots
from samestep.tracing.moved_elements import MovedElements, OperationKind, is_fusible
from samestep.tracing.operations import LOOKED, Recorder, Region, Visit
from samestep.tracing.picked_rows import PACKS, PickedRows
from samestep.tracing.products import Products
from samestep.trees import map_tensors, operands, tensors_in, tree_leaves, tree_map_only

_META = torch.device("meta")
_BY_COLUMNS = ("column", "qkv", "gather", "vocab")
"""The cut styles that leave a rank some of the columns of a product."""

ValueOf = Callable[[str], Tensor]
"""Returns the value of the buffer or parameter of this name."""


class ForwardTracer(DispatchMode):
    """Records what every operation reads, writes and costs, by region. A storage is identified by its address."""

    has_backward = True
    """Whether a backward follows, which frees what autograd keeps."""

    def __init__(
        self,
        module: nn.Module,
        styles: Mapping[str, str],
        keeps_all: bool = False,
        recorder: Recorder | None = None,
        answers: Iterable[Any] | None = None,
        places: TracedPlaces | None = None,
    ) -> None:
        super().__init__()
        self.looks = Looks.again(answers)
        """Where code looks at values; with the `answers` of an earlier forward, it takes the branches of that one."""
        self.recorder = recorder
        """Records every operation, if there is one."""
        self.places = places or TracedPlaces()
        self.styles = styles
        self.cut: set[int] = set()
        """Storages of which a tensor cut leaves a rank its part."""
        self.regions: dict[str, Region] = {"": Region()}
        """Every call of a top-most module with weights, by its path, or from the second call on by path and number."""
        self.region = ""
        """The newest of them; empty before the first."""
        self.moved = MovedElements()
        self.order: list[str] = []
        """These calls, and the first calls of top-most modules without weights, in their order."""
        self.visits: dict[str, list[Visit]] = {}
        """The calls of each module."""
        self.lookups = EmbeddingInputs(self.key)
        """What the embeddings look up."""
        self.taking_gradient: set[str] = set()
        """Modules whose input took a gradient when they were first entered."""
        self.stacks: dict[int, set[frozenset[str]]] = {}
        """For each weight, the sets of modules that were running when it was read."""
        self.innermost = ""
        """Path of the module that was entered last."""
        self.makers: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.savers: dict[int, str] = {}
        self.norm_savers: dict[int, str] = {}
        """Storages that norms keep, which compute in master precision, with their regions."""
        self.returned: set[int] = set()
        self.sizes: dict[int, int] = {}
        """Number of elements of each storage."""
        self._alive: dict[int, torch.UntypedStorage] = {}
        self.values = values_of(module, keeps_all=keeps_all)
        self.slots = WeightSlots(module)
        """Weights in whose place a module had another tensor when it was entered."""
        self.notes = CallNotes(self.key)
        self._open_notes()
        self._learn_weights(module)

    def _open_notes(self) -> None:
        """Make the notes of what the forward does, all empty."""
        self.varies = ""
        """Path of a module whose code may act differently, or make another shape, for other values."""
        self.varies_within = True
        """Whether what follows from values of weights, or of floating inputs, stays within calls of modules."""
        self.picks = ""
        """Path of the first module whose code works on rows that values of the sample pick: other samples may have more."""
        self.picks_none = False
        """Whether the sample has no such row, so that what is done to them cannot be seen."""
        self._picked = PickedRows(self.key)
        self.has_looked = False
        """Whether its code looks at values: with others it may use other weights."""
        self.read_before_look = frozenset[int]()
        """The weights, by their storages, that were read before its code looked at a value first."""
        self.exchanges: list[attention_exchanges.PlacedExchange] = []
        """Inputs and outputs of attentions, with region, storage, and the point at which ranks send them."""
        self.batch_norms: list[tuple[str, BatchNormCall]] = []
        """Calls of batch norm that take the statistics of samples, with their regions."""
        self.batch_values: list[tuple[str, BatchValueCall]] = []
        """Calls that take values of all samples by name, with their regions."""
        self.of_batch: set[int] = set()
        """Storages that depend on what these have returned."""
        self.kept_after: dict[int, str] = {}
        """The buffers with a value after the step, each with the region whose code gives it last."""
        self.saves: Counter[int] = Counter()
        """Number of times that each storage is kept."""
        self.pairs: set[int] = set()
        """Storages of masks of pairs of tokens."""
        self.flow_recorder = FlowRecorder(self)
        self.flow: Flow | None = None
        """What passes between modules; None before the forward has ended."""
        self.marks: list[tuple[int, str]] = []
        """Autograd's sequence numbers from which on nodes belong to a region."""
        self._running, self._open = list[str](), list[Visit]()
        self._calls: Counter[str] = Counter()
        self._is_within = self._writes = self._is_fusible = False
        """Whether a call of a module with weights runs, and whether the operation at hand writes into its operands, or may be fused."""
        self._events = 0
        self._depth = 0

    def _learn_weights(self, module: nn.Module) -> None:
        self.looks.data = {self.key(param) for param in module.parameters()}
        self._weights = {self.key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        facts = facts_of(module)
        self._products = Products(facts.grouped_fallback)
        self.norms = {path for path, part in module.named_modules() if facts.is_norm(part)}
        self._frozen = {self.key(param) for param in module.parameters() if not param.requires_grad}

    def take_values(self, kind: Literal["sum", "cat"], x: Tensor, result: Tensor) -> None:
        """Receive a call that takes values of all samples, with its result."""
        is_number = x.is_floating_point() or x.is_complex()
        call = BatchValueCall(
            owner="".join(self._running[-1:]),
            kind=kind,
            elements=math.prod(x.shape[1:]) * (2 if x.is_complex() else 1),
            dtype="" if is_number else "int64",
            takes_gradient=result.requires_grad,
            is_everywhere=self.flow_recorder.is_between,
        )
        self.batch_values.append((self.region, call))
        self.of_batch.add(self.key(result))

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Receive the value that a buffer gets after the step."""
        self.kept_after[self.key(buffer)] = self.region

    @property
    def keeps_all_values(self) -> bool:
        """Whether neither the outputs nor what the forward writes depends on values of all samples."""
        return not self.of_batch & (self.returned | self._weights)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        as_given = args, kwargs
        given = operands(*args, *kwargs.values())
        if any(t.is_meta for t in given) and not all(t.is_meta for t in given) and func.overloadpacket not in PACKS:
            # A constant that the forward made on the CPU; meta tensors cannot be combined with CPU tensors.
            args, kwargs = tree_map_only(Tensor, self.to_meta, (args, kwargs))
            given = operands(*args, *kwargs.values())
        outcome = self._run(func, given, args, kwargs)
        if (call := batch_norms.find_batch_norm(func, args, kwargs, "".join(self._running[-1:]))) is not None:
            self.batch_norms.append((self.region, call))
        written = [tensor for tensor in operands(outcome) if tensor.is_meta]
        flops = self._products.flops_of(func, args, kwargs, outcome)
        given = [tensor for tensor in given if tensor.is_meta]
        self.flow_recorder.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        self._writes, self._is_fusible = func._schema.is_mutable, is_fusible(func, args, kwargs)
        self.looks.follow(func, map(self.key, given), map(self.key, written))
        self._follow_picks(func, args, given, written)
        self.record(given, written, flops, None if flops is None else self._product_of(func, args, outcome, flops))
        if self.recorder is not None:
            self.recorder.record(func, self.where, *as_given, outcome)
        return outcome

    def _product_of(self, func: Any, args: tuple[Any, ...], outcome: Tensor, flops: int) -> Product:
        """Describe a matrix product or convolution of the module that was entered last."""
        left, right = self._products.factors_of(func, args)
        style = self.styles.get(self.innermost, "")
        cut: Cutting = "inner" if style == "row" else "columns" if style in _BY_COLUMNS else ""
        keys = self.key(left), self.key(right)
        if keys[1] not in self._weights and not self.cut.isdisjoint(keys):
            cut = "count"
        kind: Factors = "pair" if keys[1] not in self._weights else "frozen" if keys[1] in self._frozen else "weight"
        return self._products.product_of(func, args, outcome, flops, factors=kind, cut=cut, owner=self.innermost)

    def _follow_picks(self, func: Any, args: tuple[Any, ...], given: list[Tensor], made: list[Tensor]) -> None:
        """Note the first event that works on rows which values pick, and whether it passes them on."""
        if self._picked.follow(func, args, given, made) and self.flow_recorder.picks():
            self.picks = self.picks or self.innermost
            if any(tensor.numel() == 0 for tensor in made):
                self.picks_none = True
                self.looks.unseen.setdefault(self.where)
            if not self._depth:
                self.varies_within = False
                self.flow_recorder.pick()

    @property
    def where(self) -> str:
        """Path of the module whose code runs; empty for the model itself."""
        return self._running[-1] if self._running else ""

    def _run(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the meta device, and on the values where they are known.

        Raises:
            NeedsValuesError: its result depends on values that are not known.
        """
        leaves = func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, _META)
        if func.overloadpacket in PACKS and args[0].is_meta:
            return self._pack(func, *args)
        looks = leaves or torch.Tag.data_dependent_output in func.tags
        sizes = torch.Tag.dynamic_output_shape in func.tags
        if (looks or sizes) and any(tensor.is_meta for tensor in given):
            self._look(given)
            find = functools.partial(self.values.found_by, func, given, args, kwargs)
            seen = seen_by(func, given, args)
            if looks and self.recorder is not None and not self.looks.tokens.isdisjoint(map(self.key, seen)):
                self.recorder.branching.add(self.where)
            found = self._answered(seen, find) if self.looks.is_open(map(self.key, seen)) else find()
            if found is not None:
                return found if looks else tree_map_only(Tensor, self.to_meta, found)
        try:
            outcome = run_on_meta(func, args, kwargs)
        except NotImplementedError:
            return self._run_on_values(func, given, args, kwargs)
        self.values.follow(func, given, args, kwargs, outcome)
        return outcome

    def _look(self, given: list[Tensor]) -> None:
        """Note that code looks at values, and whether it does so between calls of modules."""
        if not self.has_looked:
            self.has_looked, self.read_before_look = True, frozenset(self._weights & self.readers.keys())
        if not self._depth and any(self.key(tensor) in self.looks.data for tensor in given if tensor.is_meta):
            self.varies_within = False

    def _answered(self, seen: list[Tensor], find: Callable[[], Any]) -> Any:
        """Return what a look at these tensors is answered, and record it."""
        self.varies = self.varies or self.innermost or "the model itself"
        if self.recorder is not None:
            self.recorder.record(LOOKED, self.where, tuple(seen), {}, ())
        return self.looks.answer(self.where, find)

    def _run_on_values(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of an operation of which nobody has said what shape they have without values.

        Raises:
            NeedsValuesError: the values are not known.
        """
        if self.looks.known is None and not self.values.draw(given):
            raise NeedsValuesError
        self._look(given)
        found = self._answered(given, functools.partial(self.values.run, func, args, kwargs))
        return tree_map_only(Tensor, self.to_meta, found)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor that code reads.

        Raises:
            NeedsValuesError: they are not known.
        """
        self._look([tensor])
        is_open = self.looks.is_open([self.key(tensor)])
        return (
            self._answered([tensor], functools.partial(self._value_read, tensor))
            if is_open
            else self._value_read(tensor)
        )

    def _value_read(self, tensor: Tensor) -> Tensor:
        if not self.values.draw([tensor]):
            raise NeedsValuesError
        return self.values.of(tensor).clone()

    def _pack(self, func: Any, tensor: Tensor, lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return the rows of padded sequences that are there, and on the host how many there are at each time.

        Raises:
            NeedsValuesError: the lengths are not known.
        """
        if not self.values.knows(lengths):
            raise NeedsValuesError
        self._look([lengths])
        self.varies, self.varies_within = self.varies or self.innermost or "the model itself", False
        self.looks.modules.setdefault(self.where)
        is_known = self.values.knows(tensor)
        given = self.values.of(tensor) if is_known else torch.zeros(tensor.shape, dtype=tensor.dtype)
        rows, sizes = func(given, self.values.of(lengths), *rest)
        made = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=_META)
        if is_known:
            self.values.learn(made, rows)
        return made, sizes

    def record(
        self, given: list[Tensor], written: list[Tensor], flops: int | None, product: Product | None = None
    ) -> None:
        """Add an operation to the current region; `flops` is None unless recompute=selective keeps its results."""
        region = self.regions[self.region]
        read = {self.key(tensor) for tensor in given}
        for key in read - self._weights - region.read:
            self.readers.setdefault(key, []).append(self.region)
        region.read |= read
        for key in read & self._weights:
            self.stacks.setdefault(key, set()).add(frozenset(self._running))
        keys = {self.key(tensor) for tensor in written}
        if self.of_batch & read:
            self.of_batch |= keys
        self.flow_recorder.ran(read, keys if self._writes else keys - read)
        for key in keys - read:  # a view, or a tensor written in place, was made earlier
            self.makers.setdefault(key, self.region)
        is_cut = product.cut in ("columns", "count") if product else bool(read & self.cut)
        if is_cut and not (product and self.styles.get(product.owner) == "gather"):
            self.cut |= keys - read
        if flops is not None:
            region.flops += flops
            region.results.update(keys)
        if product is not None:
            region.products.append(product)
        if product is not None or keys - read or any(tensor._version for tensor in written):  # no view
            reads, writes = (tuple((self.key(one), one.numel()) for one in some) for some in (given, written))
            kind: OperationKind = "product" if product is not None else "fusible" if self._is_fusible else "other"
            self.moved.ran(self.region, reads, writes, kind, is_cut=is_cut)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """Record the inputs and the output of an attention; one without a dimension of heads exchanges nothing."""
        if query.dim() != 4:
            return
        is_cut = self.key(query) in self.cut
        for tensor, exchange in attention_exchanges.exchanges_of(query, key, value, output, is_cut=is_cut):
            self.exchanges.append((self.region, self.key(tensor), exchange, self.places.point()))

    def attended(self, output: Tensor) -> None:
        """Record that an attention has kept what it keeps: ranks send its output after that."""
        if self.exchanges and output.dim() == 4:
            self.exchanges[-4:] = attention_exchanges.behind(self.exchanges[-4:], self.places.point(output))

    def applied(self, function: Any, args: tuple[Any, ...], named: dict[str, Any], outcome: Any) -> None:
        """Record the call of a custom Function of autograd, whose operations have been recorded before.

        The weights that it is given are read here: its backward may use them without the modules that own them.
        """
        for key in {self.key(tensor) for tensor in tensors_in((args, named))} & self._weights:
            self.stacks.setdefault(key, set()).add(frozenset(self._running))
        if self.recorder is not None:
            self.recorder.record("function", self.where, (function, *args), named, outcome)

    def save(self, tensor: Tensor) -> Tensor | None:
        """Record a tensor that autograd keeps, unless it is a weight; return it only if a backward follows."""
        if self._depth:  # and not the model's own code behind it, which is not recomputed with it
            self.regions[self.region].keep()
        self.places.keep(self.here)
        key = self.key(tensor)
        if tensor.is_meta and key not in self._weights:
            saved = self.norm_savers if self._running and self._running[-1] in self.norms else self.savers
            saved.setdefault(key, self.region)
            self.saves[key] += 1
            self.notes.kept.setdefault(key, self.where)
        return tensor if self.has_backward else None

    @property
    def here(self) -> str | None:
        """Path of the top-most module with weights entered last; None in the model's code after it, which is not repeated with it."""
        return self.regions[self.region].path if self._depth else None

    def given(self, batch: Any) -> Any:
        """Return the batch that the forward is given, on the meta device."""
        return batch

    def copies_of(self, sample: Any, count: int) -> Any:
        """Return `count` copies of a sample as a batch on the meta device."""
        copies = map_tensors(sample, lambda one: torch.cat([one] * count) if one.dim() else one)
        self.values.make_room(copies)
        batch = map_tensors(copies, self.to_meta)
        for one in tensors_in(batch):
            (self.looks.tokens if is_whole(one) else self.looks.data).add(self.key(one))
        return batch

    def to_meta(self, real: Tensor) -> Tensor:
        """Return a meta tensor for a real one, whose integer values stay known."""
        if real.is_meta:
            return real
        tensor = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        self.key(tensor)
        self.values.learn(tensor, real)
        return tensor

    def key(self, tensor: Tensor) -> int:
        """Return the address of a tensor's storage, its index in the trace's tables, and keep the storage alive."""
        found = address(tensor)
        if found not in self._alive:
            self._alive[found] = inner_tensor(tensor).untyped_storage()
            self.sizes[found] = storage_elements(tensor)
        return found

    @property
    def reached(self) -> str:
        """The module at which the forward is, as text."""
        return f"the forward at {module_name(self.innermost)}" if self.innermost else "the forward"

    def enter(self, path: str, part: nn.Module, outside: bool, given: Any) -> None:
        """Record that a module's forward starts."""
        self.innermost = path
        self.notes.enter(path, given)
        visits = self.visits.setdefault(path, [])
        self._running.append(path)
        self._events += 1
        if not visits and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(given)):
            self.taking_gradient.add(path)
        if isinstance(part, nn.Embedding) and not visits:
            self.lookups.note(path, next((t for t in tree_leaves(given) if isinstance(t, Tensor)), None), self.values)
        if not outside:
            self._enter_inside(path, part, is_first=not visits)
        visits.append(Visit(self.region, self._events, self._is_within and not outside))
        self._open.append(visits[-1])

    def _enter_inside(self, path: str, part: nn.Module, *, is_first: bool) -> None:
        if self._depth == 0:
            self.slots.note(path, part)
            self._is_within = makes_event(part)
            if self._is_within:
                self._calls[path] += 1
                self.region = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
                self.regions[self.region] = Region(path=path)
                self.order.append(self.region)
                self.marks.append((autograd_sequence_number(), self.region))
            elif is_first:
                self.order.append(path)
        self._depth += 1

    def check_attention(self, call: AttentionCall) -> None:
        """Raise a RuntimeError where the shapes of an attention's arguments do not fit."""
        call.check()

    def hooked(self, name: str, hook: Callable[..., Any], given: list[Tensor], results: list[Tensor]) -> None:
        """Receive a hook on gradients: a function of those of `given` tensors that returns those of `results`."""

    def leave(self, outside: bool, part: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Record that a module's forward ends."""
        report_module_hooks(part, given, output, self.hooked)
        self.notes.leave(output)
        self._events += 1
        self._running.pop()
        self._open.pop().left = self._events
        self._depth -= not outside
        if not self._depth and self._picked.holds(output):
            self.varies_within = False
            self.flow_recorder.pick()

    @contextmanager
    def knowing(self, module: nn.Module, value_of: ValueOf | None) -> Iterator[None]:
        """Make the module's tensors of integers, or all of its tensors, known while a forward runs inside."""
        for one in tensors_of(module):
            is_pairs = one.kind == "buffer" and one.tensor.shape[-1:] == one.tensor.shape[-2:-1]  # as a mask of ones
            is_small = one.tensor.numel() <= self.values.limit
            is_wanted = self.values.keeps_all or ((is_whole(one.tensor) or is_pairs) and is_small)
            if value_of is not None and is_wanted:
                with suppress(ModelError):
                    self.values.learn(one.tensor, value_of(one.name))
        yield
        self.values = KnownValues(keeps_all=False)
