"""Tensors of the meta device: their identity, operations on them, and the values of those that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.named_tensors import address, inner_tensor
from samestep.trees import operands, tensors_in, tree_map_only

_META = torch.device("meta")

KNOWN_ELEMENTS = 2**20
"""Values are followed in tensors of at most so many elements: tokens, positions and a mask of ones, not masks of pairs."""

KNOWN_TIMES = 4
"""Values of long samples are followed in tensors of so many times their elements: tokens and positions, padded or side by side."""

KNOWN_WEIGHTS = 2**26
"""Code that looks at floating values is run for real in models of at most so many weights, and with drawn scores in larger ones."""

DRAWN_ELEMENTS = 2**22
"""Values are drawn for tensors of at most so many elements: the scores by which tokens choose experts, not activations."""

DRAWN_IN_ALL = 2**28
"""Elements after which no more values are drawn in one forward: a GiB of float32."""

_CPU = torch.device("cpu")


class NeedsValuesError(Exception):
    """Code looked at a value that the trace does not have."""


class KnownValues:
    """Values of integer tensors on the meta device: each storage has a flat copy on the CPU, shared by its views."""

    def __init__(self, keeps_all: bool, *, draws: bool = False) -> None:
        self.keeps_all = keeps_all
        """Whether the values of all tensors are kept, floating ones too."""
        self.generator = torch.Generator().manual_seed(0) if draws else None
        """Draws the floating values of which whole numbers are computed, and those that code looks at, where they are not known."""
        self.limit = KNOWN_ELEMENTS
        self._num_drawn = 0
        self._twins: dict[int, Tensor] = {}

    def make_room(self, batch: Any) -> None:
        """Keep values in tensors as large as those of a batch, whatever the length of its samples."""
        sizes = [leaf.numel() for leaf in tensors_in(batch) if not leaf.is_floating_point()]
        self.limit = max(KNOWN_ELEMENTS, KNOWN_TIMES * max(sizes, default=0))

    def follows(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor of this dtype and size are kept."""
        if self.keeps_all or not tensor.is_meta:
            return tensor.is_meta
        is_kept = tensor.numel() <= self.limit or is_whole(tensor)
        return is_kept and storage_elements(tensor) <= self.limit

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Store the value of a tensor that alone has its storage."""
        if self.follows(tensor):
            twin = torch.zeros(storage_elements(tensor), dtype=tensor.dtype)
            place = twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            once = tuple(
                slice(None) if stride else slice(1) for stride in tensor.stride()
            )  # an expanded one repeats itself
            place[once].copy_(value.expand(tensor.shape)[once])
            self._twins[address(tensor)] = twin

    def forget(self, tensor: Tensor) -> None:
        """Drop the value of a tensor into which something unknown was written."""
        self._twins.pop(address(tensor), None)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the value is known."""
        if not tensor.is_meta:
            return True
        twin = self._twins.get(address(tensor))
        return twin is not None and twin.dtype == tensor.dtype

    def found_by(self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation finds of the values; None for `tensor[numbers]`, whose shape is known without values.

        Raises:
            NeedsValuesError: the values are not known.
        """
        if all(map(self.knows, tensors)) or self.draw(tensors):
            return self.run(func, args, kwargs)
        if func.overloadpacket not in _PICKING:
            raise NeedsValuesError
        picks = operands(args[1])
        return self._picked(func, args[0], picks, args[1:]) if any(map(is_mask, picks)) else None

    def _picked(self, func: Any, tensor: Tensor, picks: list[Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return the result of `tensor[mask]`, whose shape depends on the values of the mask.

        Raises:
            NeedsValuesError: these values are not known.
        """
        if not all(map(self.knows, picks)):
            raise NeedsValuesError
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        real = func(zeros, *tree_map_only(Tensor, self.of, args))
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)

    def draw(self, tensors: list[Tensor]) -> bool:
        """Draw values for those tensors that have none; return whether all have values now, as small ones do if any are drawn."""
        unknown = [tensor for tensor in tensors if not self.knows(tensor)]
        sizes = [storage_elements(tensor) for tensor in unknown]
        if unknown and (self.generator is None or max(sizes) > DRAWN_ELEMENTS or self._num_drawn > DRAWN_IN_ALL):
            return False
        for tensor in unknown:
            size = storage_elements(tensor)
            self._num_drawn += size
            if tensor.is_floating_point():
                twin = torch.randn(size, generator=self.generator).to(tensor.dtype)
            else:
                twin = torch.randint(0, 2, (size,), generator=self.generator).to(tensor.dtype)
            self._twins[address(tensor)] = twin
        return True

    def of(self, tensor: Tensor) -> Tensor:
        """Return the value; writing into it changes the stored value."""
        if not tensor.is_meta:
            return tensor
        return self._twins[address(tensor)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values."""
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        return func(*args, **(kwargs | {"device": _CPU} if "device" in kwargs else kwargs))

    def follow(
        self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any
    ) -> None:
        """Repeat on the values an operation that ran on the meta device."""
        followed = [tensor for tensor in operands(outcome) if self.follows(tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not followed or (is_random and not self.keeps_all):
            return
        if func.overloadpacket in FILLED_LIKE and not func._schema.is_mutable:
            self._fill(func, args, kwargs, outcome)
            return
        makes_numbers = any(map(is_whole, followed)) and not func._schema.is_mutable
        if not all(map(self.knows, inputs)) and not (makes_numbers and self.draw(inputs)):
            for tensor in followed if func._schema.is_mutable else ():
                self.forget(tensor)
            return
        try:
            with torch.random.fork_rng(devices=[]) if is_random else nullcontext():
                value = self.run(func, args, kwargs)
        except NotImplementedError:  # an operation of other devices alone, as torch.histc of integers is
            for tensor in followed:
                self.forget(tensor)
            return
        if not func._schema.is_mutable:
            for tensor, real in zip(operands(outcome), operands(value), strict=True):
                if address(tensor) not in self._twins:
                    self.learn(tensor, real)

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Tensor) -> None:
        """Learn the elements of a new tensor, which are those of no other tensor, whatever it is like."""
        number = FILLED_LIKE[func.overloadpacket]
        value = arguments(func, args, kwargs)["fill_value"] if number is None else number
        if not isinstance(value, Tensor):
            self.learn(outcome, torch.full((), value, dtype=outcome.dtype))


def values_of(module: nn.Module, *, keeps_all: bool) -> KnownValues:
    """Return what a forward of a model knows; with `keeps_all`, all values, or in a large model drawn ones where they are needed."""
    is_small = sum(param.numel() for param in module.parameters()) <= KNOWN_WEIGHTS
    return KnownValues(keeps_all and is_small, draws=keeps_all and not is_small)


_aten = torch.ops.aten
FILLED_LIKE = {
    **dict.fromkeys((_aten.zeros_like, _aten.new_zeros), 0),
    **dict.fromkeys((_aten.ones_like, _aten.new_ones), 1),
    **dict.fromkeys((_aten.full_like, _aten.new_full)),
}
"""Operations that make a tensor of equal elements like another, and the number that they all have, if it is not given."""


def call_with_numbers(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any], read: Callable[[Tensor], Tensor]
) -> Any:
    """Call a function of torch, `call`, with tensors on the host in place of numbers in the code, where their values are known.

    Torch makes them on the device of the other operands: a list in an index, as in `tokens[:, [-1, 0]]`, out of the sight of
    any mode, and `torch.tensor(0.5, device=x.device)` on the meta device, where the number is lost. `x.numpy()` and a format
    of a tensor bypass the dispatcher; `read` returns a tensor on the host that they are given instead.
    """
    if func in _READS and args[0].is_meta:
        return call(read(args[0]), *args[1:], **kwargs)
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        tensor, index, *rest = args
        parts = index if isinstance(index, tuple) else (index,)
        if any(_is_numbers(part) for part in parts):
            indices = tuple(torch.tensor(part) if _is_numbers(part) else part for part in parts)
            args = tensor, indices if isinstance(index, tuple) else indices[0], *rest
    elif func in (torch.tensor, torch.as_tensor) and not operands(*args, *kwargs.values()):
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return call(*args, **(kwargs | {"device": _CPU})).to("meta")
    return call(*args, **kwargs)


_READS: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__, Tensor.__format__))


def _is_numbers(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(number, bool | int) for number in part)


GROUPED_PRODUCTS = (torch.ops.aten._grouped_mm.default,)
"""Products of rows with the matrix of their group (expert): torch does not count them, and on meta takes only bf16."""


_LIKE_THEIR_OPERAND = (torch.ops.aten._sample_dirichlet.default,)
"""Operations of which torch does not say that their result has the shape of their operand."""


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors of the meta device.

    Raises:
        NotImplementedError: nobody has said what shape its results have, or a grouped product has other shapes than forward and
            backward of experts have.
    """
    if func in _LIKE_THEIR_OPERAND and args[0].is_meta:
        return torch.empty_like(args[0])
    if func not in GROUPED_PRODUCTS:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if func.namespace == "aten":  # a custom operation without a fake kernel, or whose fake kernel needs values
                raise
            raise NotImplementedError(str(error)) from error
    left, right, ends = *args[:2], args[2] if len(args) > 2 else kwargs.get("offs")
    if left.dim() == 2 and right.dim() == 3:  # rows [N, K], sorted by group, with a matrix [K, M] for each group
        return left.new_empty((left.shape[0], right.shape[-1]))
    if left.dim() == 2 and right.dim() == 2 and ends is not None:  # backward: [K, N] with [N, M], one result per group
        return left.new_empty((ends.numel(), left.shape[0], right.shape[1]))
    raise NotImplementedError(f"a grouped product of {list(left.shape)} with {list(right.shape)}")


def arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, with their defaults."""
    named = {**{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return {argument.name: named.get(argument.name, argument.default_value) for argument in func._schema.arguments}


def mutated_operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the operands into which an operation writes."""
    if not func._schema.is_mutable:
        return []
    named = arguments(func, args, kwargs)
    written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return operands(*map(named.__getitem__, written))


def storage_elements(tensor: Tensor) -> int:
    """Return the number of elements of a tensor's storage."""
    return inner_tensor(tensor).untyped_storage().nbytes() // tensor.element_size()


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor of the meta device holds whole numbers."""
    return tensor.is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def seen_by(func: Any, tensors: list[Tensor], args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors whose values say what an operation returns, or of what shape it is."""
    seen = operands(args[1]) if func.overloadpacket in _PICKING else tensors
    is_by_number = func.overloadpacket in _PICKING and not any(map(is_mask, seen))
    return [] if is_by_number else [tensor for tensor in seen if tensor.is_meta]


def is_mask(index: Any) -> bool:
    """Return whether an index is a mask."""
    return index.dtype in (torch.bool, torch.uint8)


_PICKING = (torch.ops.aten.index, torch.ops.aten.masked_select)
"""`tensor[picks]`: with integer picks the shape of the result is known without values, with a mask it is not."""
