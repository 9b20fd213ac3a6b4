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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.families import is_norm
from samestep.building.named_tensors import tensors_of
from samestep.building.torch_seams import DisableTorchFunction, DispatchMode
from samestep.errors import ModelError, module_name
from samestep.models.layer_parts import BatchValueCall, Factors, Product
from samestep.tracing import batch_norms
from samestep.tracing.costs import CutStorages, exchanges_of, factors_of, flops_of, is_fusible, product_of
from samestep.tracing.custom_functions import SEVERAL, Function, Hook, report_module_hooks
from samestep.tracing.flow_recorder import FlowRecorder
from samestep.tracing.looks import PACKS, Looks, PickedRows
from samestep.tracing.meta_tensors import (
    KnownValues,
    NeedsValuesError,
    is_whole,
    mutated_operands,
    run_on_meta,
    seen_by,
    values_of,
)
from samestep.tracing.module_inputs import ForwardCalls, ModuleInputs
from samestep.tracing.operations import Analysis, Events, Executed, SavedTensor, Storages, Work, WorkKind
from samestep.trees import map_tensors, operands, tensors_in, tree_leaves, tree_map_only

_META = torch.device("meta")
_LOOKUPS = {torch.ops.aten.embedding.default: 4, torch.ops.aten._embedding_bag.default: 5}
"""Operations whose fourth argument is whether the gradient of a token is divided by how often it is there, with the place of the argument
by which the gradient is sparse."""
ValueOf = Callable[[str], Tensor]
"""Returns the value of the buffer or parameter of this name."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The weights of a model by their storages, and its norms."""

    weights: frozenset[int]
    """Parameters and buffers."""
    params: frozenset[int]
    frozen: frozenset[int]
    norms: frozenset[str]
    """Paths of its norms."""

    @classmethod
    def of(cls, module: nn.Module, key: Callable[[Tensor], int]) -> ModelFacts:
        """Return the facts of a model."""
        params = [*module.parameters()]
        return cls(
            weights=frozenset(map(key, (*params, *module.buffers()))),
            params=frozenset(map(key, params)),
            frozen=frozenset(key(param) for param in params if not param.requires_grad),
            norms=frozenset(path for path, part in module.named_modules() if is_norm(part)),
        )


class ForwardTracer(DispatchMode):
    """Records what every operation reads, writes and costs, by region, and reports each event to an analysis."""

    def __init__(
        self,
        module: nn.Module,
        styles: Mapping[str, str],
        keeps_all: bool = False,
        analysis: Analysis | None = None,
        answers: Iterable[Any] | None = None,
        events: Events | None = None,
        has_backward: bool = True,
    ) -> None:
        super().__init__()
        self.has_backward = has_backward
        """Whether a backward follows, which frees what autograd keeps."""
        self.storages = Storages()
        self.key = self.storages.key
        self.facts = ModelFacts.of(module, self.key)
        self.looks = Looks(known=None if answers is None else deque(answers))
        """Where code looks at values; with the `answers` of an earlier forward, it takes the branches of that one."""
        self.looks.data |= self.facts.params
        self.analysis, self.is_analysed = analysis or Analysis(), analysis is not None
        self.analysis.tracer = self
        self.events = events or Events()
        """With a list for its costs, these are recorded too."""
        self.places = self.events.places
        self.cut = CutStorages(styles)
        self.modules = self.events.modules = ForwardCalls(self.key, self.places)
        self.inputs = ModuleInputs(module, self.key)
        self.picked = PickedRows(self.key)
        self.values = values_of(module, keeps_all=keeps_all)
        self.flow_recorder = FlowRecorder(self.key, self.read)

    def take_values(self, kind: Literal["sum", "cat"], x: Tensor, result: Tensor) -> None:
        """Record a call that takes values of all samples, and report it."""
        self.note_values(kind, x, result)
        self.analysis.take_values(kind, x, result)

    def note_values(self, kind: Literal["sum", "cat"], x: Tensor, result: Tensor) -> None:
        """Record a call that takes values of all samples."""
        is_number = x.is_floating_point() or x.is_complex()
        call = BatchValueCall(
            owner=self.modules.where,
            kind=kind,
            elements=math.prod(x.shape[1:]) * (2 if x.is_complex() else 1),
            dtype="" if is_number else "int64",
            takes_gradient=result.requires_grad,
            is_everywhere=self.flow_recorder.at.is_between,
        )
        self.events.batch_values.append((self.modules.region, call))

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Record that a buffer gets a value after the step."""
        self.events.kept_after[self.key(buffer)] = self.modules.region
        self.analysis.keep(buffer, value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        as_given = args, kwargs
        if self.is_analysed:
            self.analysis.begin(func, args, kwargs)
        inputs = operands(*args, *kwargs.values())
        if any(t.is_meta for t in inputs) and not all(t.is_meta for t in inputs) and func.overloadpacket not in PACKS:
            args, kwargs = tree_map_only(Tensor, self.move, (args, kwargs))
            inputs = operands(*args, *kwargs.values())
        outcome = self._run(func, inputs, args, kwargs)
        channels = 0
        if func.overloadpacket in batch_norms.OPERATIONS:
            inputs, channels = [*inputs, args[0]], batch_norms.channels_first(args[0])  # which is read twice
            call = batch_norms.find_batch_norm(func, args, kwargs, self.modules.where)
            self.events.batch_norms.extend([] if call is None else [(self.modules.region, call)])
        if func in _LOOKUPS and args[3:4] == (True,):
            self.events.counting.append(self.modules.innermost)
        if func in _LOOKUPS and args[_LOOKUPS[func] :][:1] == (True,):
            self.events.sparse.add(self.key(args[0]))
        if func._schema.is_mutable:
            self.events.written.update(map(self.key, mutated_operands(func, *as_given)))
        written = [tensor for tensor in operands(outcome) if tensor.is_meta]
        inputs = [tensor for tensor in inputs if tensor.is_meta]
        self.flow_recorder.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        self.looks.follow(func, map(self.key, inputs), map(self.key, written))
        self._follow_picks(func, args, inputs, written)
        flops, product, is_fused = None, None, False
        if self.events.costs is not None or self.cut.styles:
            flops, is_fused = flops_of(func, args, kwargs, outcome), is_fusible(func, args, kwargs)
            product = None if flops is None else self._product_of(func, args, outcome, flops)
        self.record(
            inputs, written, flops, product, writes=func._schema.is_mutable, is_fusible=is_fused, channels=channels
        )
        return self.analysis.ran(Executed(func, *as_given, args, kwargs, outcome)) if self.is_analysed else outcome

    def move(self, constant: Tensor) -> Tensor:
        """Return a constant that the forward has made on the CPU, on the meta device."""
        tensor = self.to_meta(constant)
        self.analysis.moved(tensor, constant)
        return tensor

    def _product_of(self, func: Any, args: tuple[Any, ...], outcome: Tensor, flops: int) -> Product:
        """Describe a matrix product or convolution of the module that was entered last."""
        facts, owner = self.facts, self.modules.innermost
        left, right = map(self.key, factors_of(func, args))
        kind: Factors = "pair" if right not in facts.weights else "frozen" if right in facts.frozen else "weight"
        cut = self.cut.of_product(owner, (left, right), is_pair=kind == "pair")
        return product_of(func, args, outcome, flops, factors=kind, cut=cut, owner=owner)

    def _follow_picks(self, func: Any, args: tuple[Any, ...], inputs: list[Tensor], results: list[Tensor]) -> None:
        """Note the first event that works on rows which values pick, and whether it passes them on."""
        if self.picked.follow(func, args, inputs, results) and self.flow_recorder.picks():
            self.picked.path = self.picked.path or self.modules.innermost
            if any(tensor.numel() == 0 for tensor in results):
                self.picked.has_none = True
                self.looks.unseen.setdefault(self.modules.where)
            if not self.modules.is_inside:
                self.looks.varies_within = False
                self.flow_recorder.pick()

    def _run(self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the meta device, and on the values where they are known.

        Raises:
            NeedsValuesError: its result depends on values that are not known.
        """
        leaves = func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, _META)
        if func.overloadpacket in PACKS and args[0].is_meta:
            return self._pack(func, *args)
        looks = leaves or torch.Tag.data_dependent_output in func.tags
        sizes = torch.Tag.dynamic_output_shape in func.tags
        if (looks or sizes) and any(tensor.is_meta for tensor in inputs):
            self._look(inputs)
            find = functools.partial(self.values.found_by, func, inputs, args, kwargs)
            seen = seen_by(func, inputs, args)
            if looks and self.is_analysed and not self.looks.tokens.isdisjoint(map(self.key, seen)):
                self.analysis.branches()
            answer = self._answered(seen, find) if self.looks.is_open(map(self.key, seen)) else find()
            if answer is not None:
                return answer if looks else tree_map_only(Tensor, self.to_meta, answer)
        try:
            outcome = run_on_meta(func, args, kwargs)
        except NotImplementedError:
            return self._run_on_values(func, inputs, args, kwargs)
        self.values.follow(func, inputs, args, kwargs, outcome)
        return outcome

    def _look(self, tensors: list[Tensor]) -> None:
        """Note that code looks at values, and whether it does so between calls of modules."""
        self.looks.has_looked = True
        if any(self.key(tensor) in self.looks.data for tensor in tensors if tensor.is_meta):
            self.looks.varies_within &= self.modules.is_inside

    def _answered(self, seen: list[Tensor], find: Callable[[], Any]) -> Any:
        """Return what a look at these tensors is answered, and record it."""
        self.analysis.looks(seen)
        self.looks.vary_at(self.modules.innermost)
        return self.looks.answer(self.modules.where, find)

    def _run_on_values(self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of an operation of which nobody has said what shape they have without values.

        Raises:
            NeedsValuesError: the values are not known.
        """
        if self.looks.known is None and not self.values.draw(inputs):
            raise NeedsValuesError
        self._look(inputs)
        results = self._answered(inputs, functools.partial(self.values.run, func, args, kwargs))
        return tree_map_only(Tensor, self.to_meta, results)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor that code reads.

        Raises:
            NeedsValuesError: they are not known.
        """
        self._look([tensor])
        find = functools.partial(self._value_read, tensor)
        value: Tensor = self._answered([tensor], find) if self.looks.is_open([self.key(tensor)]) else find()
        return self.analysis.read(tensor, value)

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
        self.looks.vary_at(self.modules.innermost)
        self.looks.varies_within = False
        self.looks.modules.setdefault(self.modules.where)
        is_known = self.values.knows(tensor)
        padded = self.values.of(tensor) if is_known else torch.zeros(tensor.shape, dtype=tensor.dtype)
        rows, sizes = func(padded, self.values.of(lengths), *rest)
        packed = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=_META)
        if is_known:
            self.values.learn(packed, rows)
        return packed, sizes

    def record(
        self,
        inputs: list[Tensor],
        written: list[Tensor],
        flops: int | None,
        product: Product | None = None,
        *,
        writes: bool = False,
        is_fusible: bool = False,
        channels: int = 0,
    ) -> None:
        """Add an operation, which may write into its operands; `flops` is None unless recompute=selective keeps its results."""
        read, keys = {self.key(tensor) for tensor in inputs}, {self.key(tensor) for tensor in written}
        self.flow_recorder.ran(read, keys if writes else keys - read)
        is_cut = self.cut.follow(read, keys - read, product)
        self._note_readers(read)
        if self.events.costs is None:
            return
        reads, writings = (tuple((self.key(tensor), tensor.numel()) for tensor in some) for some in (inputs, written))
        kind: WorkKind = "product" if product is not None else "fusible" if is_fusible else "other"
        is_view = product is None and keys <= read and not any(tensor._version for tensor in written)
        self.events.costs.append(
            Work(self.modules.region, reads, writings, kind, flops, product, is_cut, is_view, channels)
        )

    def _note_readers(self, storages: Iterable[int]) -> None:
        for key in self.facts.weights.intersection(storages) if self.events.costs is not None else ():
            self.events.readers.setdefault(key, set()).add(self.modules.paths)

    def exchange(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Record what ranks exchange of an attention; one without a dimension of heads exchanges nothing."""
        if query.dim() != 4 or self.events.costs is None:
            return
        is_cut = self.key(query) in self.cut.storages
        for tensor, exchange in exchanges_of(query, key, value, output, is_cut=is_cut):
            place = self.modules.region, self.key(tensor)
            self.events.exchanges.append((*place, exchange, self.places.point()))

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Record that an attention has kept what it keeps, and report it: ranks send its output after that."""
        self.analysis.attended(call, output)
        sent = self.events.exchanges
        if sent and output.dim() == 4:
            point = self.places.point(output)  # where the output is sent, in which the inputs take part
            sent[-4:] = [
                (region, key, exchange, point if exchange.role == "output" else start._replace(nodes=point.nodes))
                for region, key, exchange, start in sent[-4:]
            ]

    def applied(self, function: Function, args: tuple[Any, ...], named: dict[str, Any], outcome: Any) -> None:
        """Report the call of a custom Function of autograd, whose operations have been recorded before.

        The weights that it is given are read here: its backward may use them without the modules that own them.
        """
        self._note_readers(map(self.key, tensors_in((args, named))))
        self.analysis.applied(function, args, named, outcome)

    def save(self, tensor: Tensor) -> Tensor | None:
        """Record a tensor that autograd keeps; return it only if a backward follows."""
        modules = self.modules
        self.places.keep(modules.top_most)
        if self.events.costs is not None:
            key = self.key(tensor)
            storage = key if tensor.is_meta and key not in self.facts.weights else None
            self.events.costs.append(SavedTensor(modules.region, modules.where, storage, is_inside=modules.is_inside))
        return tensor if self.has_backward else None

    def copies_of(self, sample: Any, count: int) -> Any:
        """Return `count` copies of a sample as a batch on the meta device."""
        copies = map_tensors(sample, lambda tensor: torch.cat([tensor] * count) if tensor.dim() else tensor)
        self.values.make_room(copies)
        batch = map_tensors(copies, self.to_meta)
        for tensor in tensors_in(batch):
            (self.looks.tokens if is_whole(tensor) else self.looks.data).add(self.key(tensor))
        return batch

    def to_meta(self, real: Tensor) -> Tensor:
        """Return a meta tensor for a real one, whose integer values stay known."""
        if real.is_meta:
            return real
        tensor = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        self.key(tensor)
        self.values.learn(tensor, real)
        self.analysis.made_on_meta(tensor, real)
        return tensor

    @property
    def reached(self) -> str:
        """The module whose code runs, as text."""
        at = self.modules.where
        return f"the forward at {module_name(at)}" if at else "the forward"

    def enter(self, path: str, outside: bool, part: nn.Module, *arguments: Any) -> None:
        """Record that a module's forward starts."""
        if isinstance(part, nn.Embedding) and path not in self.modules.of:
            indices = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
            self.inputs.note_indices(path, indices, self.values)
        if not outside and not self.modules.is_inside:
            self.inputs.note_weights(path, part)
        with DisableTorchFunction():  # no mode need see the shapes that are read
            self.modules.enter(path, part, *arguments, is_outside=outside)
        self.analysis.enter(path, part, arguments)

    def hooked(self, name: str, hook: Hook, tensors: list[Tensor], results: list[Tensor]) -> None:
        """Report a hook on gradients, a function of those of `tensors` that returns those of `results`."""
        if name == SEVERAL:
            self.flow_recorder.note_several(tensors)
        self.analysis.hooked(name, hook, tensors, results)

    def leave(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record that a module's forward ends."""
        self.analysis.leave(path, part, (args, kwargs), output)
        report_module_hooks(part, args, output, self.hooked)
        with DisableTorchFunction():
            self.modules.leave(output)
        if not self.modules.is_inside and self.picked.holds(output):
            self.looks.varies_within = False
            self.flow_recorder.pick()

    @contextmanager
    def knowing(self, module: nn.Module, value_of: ValueOf | None) -> Iterator[None]:
        """Make the module's tensors of integers, or all of its tensors, known while a forward runs inside."""
        for entry in tensors_of(module):
            # Pairs, as of a mask of ones.
            is_pairs = entry.kind == "buffer" and entry.tensor.shape[-1:] == entry.tensor.shape[-2:-1]
            is_small = entry.tensor.numel() <= self.values.limit
            is_wanted = self.values.keeps_all or ((is_whole(entry.tensor) or is_pairs) and is_small)
            if value_of is not None and is_wanted:
                with suppress(ModelError):
                    self.values.learn(entry.tensor, value_of(entry.name))
        yield
        self.values = KnownValues(keeps_all=False)
