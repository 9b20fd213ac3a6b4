"""Fingerprints of what a run starts with besides its trained weights, by which a checkpoint finds what has changed.

Frozen weights, buffers and attributes of modules are functions of the seed and the code until something writes them: a
teacher that follows its student, running statistics, a counter. Version counters of tensors do not show writes through
`.data`, so their bytes are compared: a hash on the host, and on other devices a sum of their words weighted by position.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.families import facts_of
from samestep.building.optimizer import CombinedOptimizer

_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, str)
_WORDS = 1 << 24
"""The number of words of a tensor whose weighted sum is taken at once."""


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
    left_out = _OF_MODULES | {facts_of(model).installed_flag}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in left_out and not isinstance(value, nn.Module | types.FunctionType | types.MethodType):
                yield path, key, value


def optimizer_digests(optimizer: Optimizer) -> dict[str, int]:
    """Return the digests of an optimizer's options, by group and name, and of its attributes."""
    return {key: digest(value) for key, value in optimizer_values(optimizer).items()}


def optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of each group as `INDEX/NAME`, without the learning rate, and the optimizer's attributes."""
    found = {
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
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in known
        and key not in of_any
        and not isinstance(value, Optimizer)  # whose states are kept by weight
    }
    return {**found, **own}


@functools.cache
def _attributes_of_any_optimizer() -> frozenset[str]:
    """Return the names that torch gives every optimizer; the first optimizer of a process takes torch a second or two."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"_step_count", "_opt_called", "step"}


def versions_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return each tensor's count of writes and its address, which a write through `.data` leaves as they are."""
    return {
        name: (0 if tensor.is_inference() else tensor._version, 0 if tensor.is_meta else tensor.data_ptr())
        for name, tensor in tensors.items()
    }


def fingerprint(tensor: Tensor) -> int:
    """Return a number that changes when a tensor's bytes do, but for chance."""
    flat = tensor.detach().contiguous().flatten()
    if not flat.numel():
        return 0
    words = flat.view(torch.uint8)
    if words.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(words.numpy()).data)
    if words.numel() % 4 == 0 and words.data_ptr() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(_WORDS)):
        weights = torch.arange(1, part.numel() + 1, device=part.device)
        total = total * 31 + (part.long() * weights).sum() + number
    return int(total)


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


class _Examiner(pickle.Pickler):
    """A pickler whose stream holds the bytes of tensors, and neither modules, weights nor functions."""

    def persistent_id(self, value: Any) -> Any:
        """Return what stands in the stream for an object."""
        if isinstance(value, nn.Module | nn.Parameter | types.FunctionType | types.MethodType | type):
            return "not examined"
        if isinstance(value, torch.Generator):
            return "generator", fingerprint(value.get_state())
        if isinstance(value, Tensor):
            whole = value.layout is torch.strided and not value.is_meta
            return "tensor", tuple(value.shape), fingerprint(value) if whole else 0
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return what stands for a partial function, which has attributes, though none, once somebody asked for them."""
        if isinstance(value, functools.partial):
            return functools.partial, (value.func, *value.args), (value.keywords, vars(value) or None)
        return NotImplemented
