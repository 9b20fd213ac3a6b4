"""Fingerprints of what a run starts with besides its trained weights, by which a checkpoint finds what has changed.

Frozen weights, buffers and attributes of modules are functions of the seed and the code until something writes them: a
teacher that follows its student, running statistics, a counter. Version counters of tensors do not show writes through
`.data`, so their bytes are compared: a hash on the host, and on other devices sums of their words (`word_sums`).
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.families import INSTALLED_FLAG
from samestep.building.named_tensors import set_attributes
from samestep.building.optimizer import CombinedOptimizer
from samestep.state.named_variables import OF_USER, SEARCHED, Variable, home_of
from samestep.state.snapshot import HOLDERS, OUTSIDE, PLAIN, Slot, Snapshot, slots_of

_PLAIN = (type(None), bool, int, float, str)
_COLUMNS = 4093
"""The number of columns of the table in which a tensor's words are summed: a prime, so that rows of a usual width which change places show."""


@dataclass(frozen=True, slots=True, eq=False)
class FirstState:
    """The fingerprints of a prepared run, before its first step."""

    frozen: Mapping[str, int]
    """Of this rank's part of each frozen weight."""
    buffers: Mapping[str, int]
    attributes: Mapping[tuple[str, str], int]
    """Of each attribute of a module, by the module's path and the attribute's name."""

    @classmethod
    def of(cls, model: nn.Module, frozen: Mapping[str, Tensor]) -> FirstState:
        """Take the fingerprints of a model and of the frozen weights that this rank holds."""
        known: dict[int, int] = {}  # most modules of a model share one object, such as its configuration
        for _, _, value in attributes_of(model):
            if id(value) not in known:
                known[id(value)] = digest(value)
        return cls(
            {name: fingerprint(value) for name, value in frozen.items()},
            {name: fingerprint(buffer) for name, buffer in model.named_buffers()},
            {(path, key): known[id(value)] for path, key, value in attributes_of(model)},
        )


def attributes_of(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of every attribute of a module that is neither a weight, a buffer nor a module.

    Whether a model has installed its hooks is left out: another process has not, and would believe that it had.
    """
    for path, module in model.named_modules():
        for key, value in set_attributes(module).items():
            if key != INSTALLED_FLAG and not isinstance(value, nn.Module | types.FunctionType | types.MethodType):
                yield path, key, value


def optimizer_digests(optimizer: Optimizer) -> dict[str, int]:
    """Return the digests of an optimizer's options, by group and name, and of its attributes."""
    return {key: digest(value) for key, value in optimizer_values(optimizer).items()}


def optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of each group as `INDEX/NAME`, without the learning rate, and the optimizer's attributes."""
    options = {
        f"{index}/{key}": value
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names", "lr", "initial_lr")
    }
    # A combined optimizer is made of its members, whose options and states are its own.
    known = {
        "state",
        "param_groups",
        "defaults",
        *(["members", "names"] if isinstance(optimizer, CombinedOptimizer) else []),
    }
    # Names with an underscore in front are torch's own, such as the hooks of a step.
    of_any = _attributes_of_any_optimizer()
    attributes = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in known
        and key not in of_any
        and not isinstance(value, Optimizer)  # whose states are kept by weight
    }
    return {**options, **attributes}


@functools.cache
def _attributes_of_any_optimizer() -> frozenset[str]:
    """Return the names that torch gives every optimizer; the first optimizer of a process takes torch a second or two."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"_step_count", "_opt_called", "step"}


def fingerprint(tensor: Tensor) -> int:
    """Return a number that changes when a tensor's bytes do, but for chance."""
    flat = tensor.detach().contiguous().flatten()
    if not flat.numel():
        return 0
    if flat.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(flat.view(torch.uint8).numpy()).data)
    return hash(tuple(word_sums(flat).tolist()))


@torch.no_grad()
def word_sums(tensor: Tensor) -> Tensor:
    """Return two integers computed from a tensor's bits, where it is: a sum of its words, and one weighted by position (int64 [2])."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64))
    num_in_rows = len(words) - len(words) % _COLUMNS
    sums = torch.zeros(_COLUMNS, dtype=torch.int64, device=words.device)
    if num_in_rows:
        sums += words[:num_in_rows].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    sums[: len(words) - num_in_rows] += words[num_in_rows:]
    odd = torch.arange(1, 2 * _COLUMNS, 2, dtype=torch.int64, device=words.device) * 0x9E3779B97F4A7C1
    # Integers wrap around, alike on every rank; halved, so that their negatives can be compared too.
    return torch.stack([sums.sum(), (sums * odd).sum()]) >> 1


def digest(value: Any) -> int:
    """Return a number that changes when a value does; what cannot be examined counts as unchanged."""
    if type(value) in _PLAIN:
        return xxhash.xxh3_64_intdigest(f"{type(value).__name__} {value!r}".encode())
    stream = io.BytesIO()
    try:
        _Examiner(stream).dump(value)
    except Exception:  # objects of others' classes fail in any way
        return 0
    return xxhash.xxh3_64_intdigest(stream.getvalue())


def places_of(root: nn.Module | Callable[..., Any], modules: nn.Module | None = None) -> dict[Slot, Variable]:
    """Return where a model, or a function such as a loss, keeps values: in variables outside of modules, in buffers and attributes of some
    `modules`, and in attributes of the user's objects in these. Functions and modules themselves are left out.
    """
    rest = [((OUTSIDE, name), variable) for name, variable in Snapshot(root, weights=False).variables.items()]
    for path, part in modules.named_modules() if modules is not None else ():
        tables = ((part._buffers, part._buffers), (vars(part), set_attributes(part)))
        rest += [
            ((path, key), Variable(key, holder, key, item)) for holder, items in tables for key, item in items.items()
        ]
    places, seen = dict[Slot, Variable](), set[int]()
    while rest:
        (path, name), variable = rest.pop()
        value = variable.value
        is_of_user = home_of(type(value).__module__) in OF_USER and not isinstance(value, (*PLAIN, enum.Enum))
        is_object = is_of_user or isinstance(value, HOLDERS)
        if isinstance(value, (*SEARCHED, nn.Module)) or (is_object and id(value) in seen):
            continue
        if not is_object:
            places[path, name] = variable
            continue
        seen.add(id(value))
        fields = [(vars(value), key, item) for key, item in getattr(value, "__dict__", {}).items()]
        fields += [(value, key, item) for key, item in slots_of(value)]
        rest += [((path, f"{name}.{key}"), Variable(key, holder, key, item)) for holder, key, item in fields]
    return places


def digests_of(places: Mapping[Any, Variable]) -> dict[Any, int]:
    """Return the digests of the values of variables."""
    return {key: digest(place.value) for key, place in places.items()}


class _Examiner(pickle.Pickler):
    """A pickler whose stream holds the bytes of tensors, and neither modules, weights nor functions."""

    def persistent_id(self, value: Any) -> Any:
        """Return what stands in the stream for an object."""
        if isinstance(value, nn.Module | nn.Parameter | types.FunctionType | types.MethodType | type):
            return "not examined"
        if isinstance(value, torch.Generator):
            return "generator", fingerprint(value.get_state())
        if isinstance(value, Tensor):
            has_bytes = value.layout is torch.strided and not value.is_meta
            return "tensor", tuple(value.shape), fingerprint(value) if has_bytes else 0
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return what stands for a partial function, which has attributes, though none, once somebody asked for them."""
        if isinstance(value, functools.partial):
            return functools.partial, (value.func, *value.args), (value.keywords, vars(value) or None)
        return NotImplemented
