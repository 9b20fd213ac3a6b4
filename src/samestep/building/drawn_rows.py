"""Drawn values of a stack of weights by rows, and the trial of a tape by plain calls of the build function.

A parameter of three dimensions or more, such as a stack of experts, may be more than a rank can hold. It is drawn some
rows at a time from one generator; a rank that holds some of its rows draws those before them too, and drops them. On a
CPU the numbers equal those of one call over the whole stack; on a GPU, where they would not, every layout draws the
same rows at a time.

The tape (`building/tape.py`) records how each value of a model is computed without computing any. To test the record,
the build function is called twice more, on real tensors and with two seeds:

    equal in both calls       a constant, or loaded from a file: the tape must make it to the bit, else the plain value is kept
    different                 drawn: the tape must have drawn it too, since its value is a function of (seed, name)

Of a tensor that is drawn in part, as an embedding to which rows were added, the tape and the two calls are three draws of
one distribution: the tape then agrees with the first call in about as many elements as the second call does.

The calls change no random state, and stay on the host. They take memory and time, so a large model whose tape holds nothing
from outside, no file and no tensor of the user's, is not tried: its values come from operations that the tape has recorded.
"""

from __future__ import annotations

import io
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.named_tensors import tensors_of
from samestep.building.replay import Ref, Slice, drawing
from samestep.building.surface import is_device, is_move, process_randomness
from samestep.building.tape import Tape
from samestep.building.torch_seams import FunctionMode

_aten = torch.ops.aten
_BY_ELEMENT = frozenset(
    {
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.mul_.Scalar,
        _aten.mul_.Tensor,
        _aten.add_.Scalar,
        _aten.add_.Tensor,
        _aten.sub_.Tensor,
        _aten.div_.Tensor,
        _aten.clamp_.default,
        _aten.erfinv_.default,
        nn.init._no_grad_trunc_normal_,
    }
)
"""Operations in place that compute every element by itself, with Python's numbers."""
_DRAWN_TOGETHER = 16
"""Elements that a CPU draws together: a row of a multiple of them takes the same numbers as it does within the whole."""
LARGEST_DRAW = 2**22
"""Largest number of elements drawn together, unless one row has more; the same in every layout."""


def are_drawn(tape: Tape, part: Slice, ref: Ref) -> bool:
    """Return whether a tensor is a stack whose rows can be drawn one after another."""
    if len(ref.size) < 3 or 0 in ref.size or math.prod(ref.size[1:]) % _DRAWN_TOGETHER or not part.entries:
        return False
    memory = tape.memories[ref.memory]
    if memory.constant is not None or not _is_whole(ref, memory.meta.nbytes()):
        return False
    for number in part.entries:
        entry = tape.entries[number]
        first, *others = entry.args or (None,)
        if entry.func not in _BY_ELEMENT or entry.writes != {ref.memory} or not entry.reads <= {ref.memory}:
            return False
        if not isinstance(first, Ref) or not _is_whole(first, memory.meta.nbytes()) or first.dtype != ref.dtype:
            return False
        if not all(isinstance(argument, (int, float, type(None))) for argument in (*others, *entry.kwargs.values())):
            return False
    return True


def _is_whole(ref: Ref, size_bytes: int) -> bool:
    """Return whether a tensor covers all of its memory, in the order of its elements."""
    stride = 1
    for size, step in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size > 1 and step != stride:
            return False
        stride *= size
    return ref.offset == 0 and not ref.conj and not ref.neg and stride * ref.dtype.itemsize == size_bytes


@torch.no_grad()
def draw(
    tape: Tape, part: Slice, ref: Ref, device: torch.device, keys: dict[int, int], rows: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the rows of some disjoint intervals, in the order of the intervals."""
    place = {row: at for at, row in enumerate(row for start, stop in rows for row in range(start, stop))}
    result = torch.zeros(len(place), *ref.size[1:], dtype=ref.dtype, device=device)
    together = max(1, LARGEST_DRAW // math.prod(ref.size[1:]))
    states: dict[int, Tensor] = {}
    with torch.autocast(device.type, enabled=False):
        for first in range(0, max(place, default=-1) + 1, together):
            group = range(first, min(first + together, ref.size[0]))
            drawn = torch.zeros(len(group), *ref.size[1:], dtype=ref.dtype, device=device)
            for number in part.entries:
                entry = tape.entries[number]
                if not entry.random:
                    entry.func(drawn, *entry.args[1:], **entry.kwargs)
                    continue
                with drawing(device, keys[number]) as generator:
                    if number in states:
                        generator.set_state(states[number])
                    entry.func(drawn, *entry.args[1:], **entry.kwargs)
                    states[number] = generator.get_state()
            for row in place.keys() & group:
                result[place[row]] = drawn[row - first]
    return result


SMALL_BYTES = 1 << 26
"""The size up to which every model is tried: two builds of it take less time than the trace that follows."""
_SHARE_OF_MEMORY = 0.25
"""The part of the free memory that the ranks of a machine may use for these calls together."""
_OTHER_SEED = 0x9E3779B9
_CHANCE = 8.0
"""The number of standard deviations above which a difference between two counts of agreements is not chance."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class PlainCalls:
    """The tensors that a build function returned in two plain calls with different seeds."""

    module: nn.Module
    """The module of the first call, which had the job's own seed."""
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    parameters: tuple[tuple[str, weakref.ref[Tensor]], ...]
    """Those of both modules, by name."""

    def differs(self, name: str) -> bool:
        """Return whether a tensor differs between the calls, so that it was drawn."""
        return not same_bits(self.first[name], self.second[name])


def fits(size_bytes: int) -> bool:
    """Return whether the host's free memory has room for two plain builds of a model on each rank of this machine."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if torch.cuda.is_available():
        ranks = min(ranks, torch.cuda.device_count())
    return 2 * size_bytes * ranks <= _SHARE_OF_MEMORY * psutil.virtual_memory().available


def call(source: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call a build function on real tensors of the host, with the process's generators seeded and put back afterwards.

    Raises:
        ValueError: it returned something else than a module.
    """
    quiet = warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO())  # the taped call has shown both
    with process_randomness(seed), _fill_uninitialised(), FunctionMode(_on_host), _CPU, quiet[0], quiet[1]:
        module = source()
    if not isinstance(module, nn.Module):
        raise ValueError(f"it returned a {type(module).__name__}")
    return module


def call_twice(source: Callable[[], nn.Module], seed: int) -> PlainCalls:
    """Call a build function plainly with the job's seed and with another one.

    Raises:
        ValueError: the calls returned the same module, or modules of different tensors; the text says which.
    """
    first = call(source, seed)
    second = call(source, seed ^ _OTHER_SEED)
    if first is second:
        raise ValueError("it returns the same module each time")
    if name := other_form(first, second):
        raise ValueError(f"{name} has another shape or is missing from one call to the next")
    ours, theirs = ({a.name: a.tensor.detach() for a in tensors_of(module)} for module in (first, second))
    for name, tensor in ours.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, so it has no values")
    parameters = tuple(
        (name, weakref.ref[Tensor](param)) for module in (first, second) for name, param in module.named_parameters()
    )
    return PlainCalls(first, ours, theirs, parameters)


def other_form(first: nn.Module, other: nn.Module) -> str:
    """Return the name of the first parameter or buffer whose form or ties differ between two modules; empty if none
    do."""
    ours, theirs = _forms(first), _forms(other)
    return next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), "")


def _forms(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return kind, shape, dtype and first name of each parameter and buffer, and whether it is trained."""
    forms: dict[str, tuple[Any, ...]] = {}
    first: dict[int, str] = {}
    for name, kind, tensor in ((a.name, a.kind, a.tensor) for a in tensors_of(module)):
        tied = first.setdefault(id(tensor), name) if kind == "parameter" else ""
        if kind != "attribute":
            forms[name] = (kind, tuple(tensor.shape), tensor.dtype, tied, tensor.requires_grad)
    return forms


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal to the bit."""
    return torch.equal(_bits(first), _bits(other))


def is_unfilled(tensor: Tensor) -> bool:
    """Return whether a tensor of a plain call holds nothing but the values that mark uninitialised memory."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == (1 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)).all())


def agrees_by_chance(taped: Tensor, calls: PlainCalls, name: str) -> bool:
    """Return whether the tape agrees with the first call in as many elements as the second call does, up to chance."""
    first = _bits(calls.first[name])
    expected = int((first == _bits(calls.second[name])).sum())
    count = int((first == _bits(taped)).sum())
    return expected - count <= _CHANCE * (expected + count + 1) ** 0.5


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, so that NaN equals NaN; the last dimension may become longer."""
    flat = tensor.detach().resolve_conj().resolve_neg().to(_CPU).contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).contiguous().flatten()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


@contextmanager
def _fill_uninitialised() -> Iterator[None]:
    """Fill uninitialised memory with NaN or the largest integer, so that two calls agree in it."""
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
        settings.fill_uninitialized_memory = fills


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with tensors kept on the host: a process that forks workers must not start a GPU."""
    if is_move(func):
        return args[0]
    if _is_elsewhere(kwargs.get("device")):
        kwargs = {**kwargs, "device": _CPU}
    if func is Tensor.to:
        args = (args[0], *(_CPU if is_device(arg) and _is_elsewhere(arg) else arg for arg in args[1:]))
    return func(*args, **kwargs)


def _is_elsewhere(device: Any) -> bool:
    """Return whether a device is neither the host nor the meta device."""
    return device is not None and (isinstance(device, int) or torch.device(device).type not in ("cpu", "meta"))
