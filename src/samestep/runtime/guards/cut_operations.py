"""The operations of a rank's forward on tensors of which it has a part: features under tp, tokens under cp and sequence_parallel; and on
what stands for the results of other stages under pp, which an added operation may not read.

The proof of such a layout has seen the operations of the trace. A forward that a flag, a counter or a global lets take another branch runs
others later, and they may combine features or tokens of which other ranks have the rest. So the operations of the first step are counted, and
those of a forward that builds another graph are counted again. An operation that has been added must compute each element by itself, or
under cp each token. Samples of other lengths take more or fewer of the same operations, in loops over chunks, and other views: with them only
operations that compute, and that no forward has run before, count as added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from samestep.building.named_tensors import address, inner_tensor
from samestep.building.torch_seams import DispatchMode
from samestep.independence.dimension_maps import is_elementwise
from samestep.models.spec import owner_of
from samestep.runtime.guards.repeat import Repeat
from samestep.trees import operands, tensors_in

_OF_ELEMENTS = frozenset({"detach", "alias", "unsqueeze", "empty_like"})
"""Views and new tensors that leave each element its place, beside the operations that compute each by itself."""
_OF_TOKENS = frozenset({"mm", "addmm", "linear", "native_layer_norm", "_fused_rms_norm", "t"})
_VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias", "expand"})

OF_STAGES = " on results of another stage"
"""End of the names of operations that read a stand-in."""

Shapes = tuple[torch.Size, ...]
"""The shapes of the tensors of a micro-batch."""


class CutOperations:
    """The operations that a forward of this rank runs on parts."""

    def __init__(self, again: Repeat, microbatch: int) -> None:
        """Run a micro-batch of a step again, and count the operations on parts that do more than compute each element by itself.

        Collective over the world, see [Note: collective calls].
        """
        self._assembly, layout = again.assembly, again.assembly.parallel.program.step.layout
        self.counts: Counter[str] = Counter()
        self.views: set[str] = set()
        """Which of these are views."""
        self.of_tokens = layout.cp > 1 or layout.sequence_parallel
        """Whether ranks divide the tokens of what a batch holds."""
        self._of_stages = layout.pp > 1
        self._parts: dict[int, StorageWeakRef] = {}
        self._stands: dict[int, StorageWeakRef] = {}
        spec, indices = self._assembly.model.spec, again.of_microbatch(microbatch)
        samples = again.read(indices)
        self.shapes: Shapes = tuple(tensor.shape for tensor in tensors_in(samples))
        if self.of_tokens:
            _note(self._parts, tensors_in(samples))
        paths = {owner_of(param.name) for param in spec.params if param.cut is not None}
        self._cut = {self._assembly.model.module.get_submodule(path) for path in paths}
        with again.running(), self._assembly.model.compiled.off(), DispatchMode(self._carry_out):
            again.run(indices, samples, microbatch=microbatch if spec.couples_samples else None)

    def _is_part(self, tensor: Tensor) -> bool:
        """Return whether a tensor was computed of parts, or is a weight of a module that is cut, as the module has it now."""
        if address(tensor) in self._parts:
            return True
        return isinstance(tensor, nn.Parameter) and any(
            tensor is param for module in self._cut for param in module._parameters.values()
        )

    def _carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, tensors, name = func(*args, **kwargs), operands(*args, *kwargs.values()), func.overloadpacket.__name__
        if func.namespace == "c10d":  # a sum over ranks, or the parts of all of them
            for tensor in () if self.of_tokens else tensors:
                self._parts.pop(address(tensor), None)
        elif self._of_stages and any(address(tensor) in self._stands or _is_stand_in(tensor) for tensor in tensors):
            _note(self._stands, operands(result))
            self._count(f"{name}{OF_STAGES}", func)
        elif parts := [tensor for tensor in tensors if self._is_part(tensor)]:
            results, sizes = operands(result), {size for tensor in parts for size in tensor.shape if size > 1}
            _note(self._parts, results)
            is_of_elements = name in _OF_ELEMENTS or (is_elementwise(func) and not sizes & _integers(args))
            if not is_of_elements and not (self.of_tokens and _keeps_tokens(func, name, parts[0], args, results)):
                self._count(name, func)
        return result

    def _count(self, name: str, func: Any) -> None:
        self.counts[name] += 1
        if name in _VIEWS or any(returned.alias_info for returned in func._schema.returns):
            self.views.add(name)


def _note(known: dict[int, StorageWeakRef], tensors: Iterable[Tensor]) -> None:
    known.update((address(tensor), StorageWeakRef(inner_tensor(tensor).untyped_storage())) for tensor in tensors)


def _is_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor has one value, which takes no memory: that of a layer of another stage."""
    return tensor.numel() > 1 and tensor.layout is torch.strided and not any(tensor.stride())


class SeenOperations:
    """A record of what forwards of earlier steps have run on parts, by the shapes of their micro-batches."""

    def __init__(self) -> None:
        self._counts: dict[Shapes, Counter[str]] = {}

    def note(self, now: CutOperations) -> None:
        """Keep what a forward of the first step has run."""
        self._counts[now.shapes] = self._counts.get(now.shapes, Counter()) | now.counts

    def added(self, now: CutOperations) -> Set[str]:
        """Return the operations that a forward has added to those before it; if there are none, it is one of them from now on."""
        before = self._counts.get(now.shapes)
        if before is not None:
            added: Set[str] = (now.counts - before).keys()
        else:
            added = now.counts.keys() - now.views - set[str]().union(*self._counts.values())
        if not added:
            self._counts.setdefault(now.shapes, now.counts)
        return added


def _integers(args: tuple[Any, ...]) -> set[int]:
    """Return the whole numbers among arguments, which may count the features of a part."""
    return {int(arg) for arg in args if isinstance(arg, int | float) and not isinstance(arg, bool) and arg == int(arg)}


def _keeps_tokens(func: Any, name: str, part: Tensor, args: tuple[Any, ...], results: list[Tensor]) -> bool:
    """Return whether an operation combines at most the features of each token, which are the last dimension."""
    if name in _VIEWS:
        return bool(results) and results[0].shape[-1:] == part.shape[-1:]
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    dim = named.get("dim", named.get("dims"))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return name in _OF_TOKENS or all(number in (-1, part.dim() - 1) for number in dims)
