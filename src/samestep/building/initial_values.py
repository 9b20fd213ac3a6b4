"""Taped initialisation: each tensor's initial value is a function of (seed, its full name), whatever the layout.

The model is built on the meta device, where nothing has values, while a tape (`building/tape.py`) records which
operations wrote which memory. To make one tensor is to replay the entries from which its memory descends, and no
others:

    materialize("a.weight") = normal_ seeded by (seed, "a.weight", 0)
    materialize("b.weight") = uniform_ seeded by (seed, "b.weight", 0), the same normal_ again, and mul_

A random entry is keyed by the first name that descends from it, so all tensors that descend from it get the same
numbers. The idea of recording and replaying an initialisation is that of torchdistX's deferred_init (Meta, 2022); the
keys by name, and so the equality between layouts, are ours.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.parameter_marks import ParameterMarks, take_marks, tensors_of_hooks
from samestep.building.tape import (
    WAY_OUT,
    Ref,
    Slice,
    Surface,
    Tape,
    contiguous,
    process_randomness,
    replay,
    whole_truncated_normal,
)
from samestep.errors import ModelError, did_you_mean

_RESERVED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model on the meta device, and the tape from which each of its tensors is made.

    Every parameter, buffer and other tensor attribute of `module` is on meta. `canonical` maps every name of a tensor
    to its first one: a tied parameter has several names, and so has a module that is used twice.
    """

    module: nn.Module
    seed: int
    canonical: dict[str, str]
    _tape: Tape = field(repr=False)
    _refs: dict[str, Ref] = field(repr=False)
    _slices: dict[int, Slice] = field(repr=False)
    _keys: dict[int, int] = field(repr=False)
    _parameters: tuple[str, ...] = field(repr=False)
    marks: Mapping[str, ParameterMarks] = field(default_factory=dict, repr=False)
    """Attributes and hooks of parameters, by name."""

    def materialize(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole tensor `name`: detached, contiguous, in newly allocated memory.

        Its bits are equal on every rank (per device type), in whatever order and number tensors are made; the process's
        random state does not change. `dtype` casts values that were drawn in the model's own dtype.

        Raises:
            ModelError: the model has no such tensor, or it has no values.
        """
        ref = self._refs.get(name)
        if ref is None:
            raise ModelError(f"the model has no tensor {name!r}{did_you_mean(name, self._refs)}")
        part = self._slices[ref.memory]
        if any(self._tape.memories[base].foreign for base in part.bases):
            raise ModelError(f"{name} was made on the meta device outside the build function, so it has no values")
        made = replay(self._tape, part, ref, torch.device(device), self._keys)
        return made if dtype is None else made.to(dtype)


def blueprint(source: Callable[[], nn.Module] | nn.Module, seed: int) -> Blueprint:
    """Build a model on the meta device, and return it with the tape that makes its tensors.

    A build function is taped; of an instance the values are kept (not copied: do not train it meanwhile). Values that a
    build function looks at (`.item()`, `if`, `.numpy()`) are computed at once, unless they are random.

    Raises:
        ModelError: the initial values cannot be a function of seed and name; the text names the module or the tensor.
    """
    tape = Tape()
    if isinstance(source, nn.Module):
        module = source
    else:
        surface = Surface(tape)
        with process_randomness(seed), whole_truncated_normal(tape), tape, surface, torch.device("cpu"):
            module = _call(source)
        if not isinstance(module, nn.Module):
            raise ModelError(f"the build function returned a {type(module).__name__}; it must return an nn.Module")
    marks = take_marks(module)
    module = _on_meta(module, tape, from_instance=module is source)
    attributes = list(_attributes(module))
    attributes += [
        _Attribute(key, "hook", tensor)
        for name, mark in marks.items()
        for key, tensor in tensors_of_hooks(name, mark).items()
    ]
    refs = {attribute.name: tape.ref(attribute.tensor) for attribute in attributes}
    slices = {ref.memory: tape.slice(ref.memory) for ref in refs.values()}
    parameters = [attribute for attribute in attributes if attribute.kind == "parameter"]
    _check_parameters(parameters, refs, slices, tape)
    first: dict[tuple[int, Ref], str] = {}
    canonical = {p.name: first.setdefault((id(p.tensor), refs[p.name]), p.name) for p in attributes}
    keys = _random_keys(seed, [(name, slices[refs[name].memory]) for name in canonical], tape)
    return Blueprint(module, seed, canonical, tape, refs, slices, keys, tuple(p.name for p in parameters), marks)


def _call(source: Callable[[], nn.Module]) -> nn.Module:
    """Call the build function; turn torch's error about missing values into ours.

    Raises:
        ModelError: the function looks at values that do not exist yet.
    """
    try:
        return source()
    except RuntimeError as error:
        if "meta tensor" in str(error):
            raise ModelError(
                f"the build function looks at values that do not exist yet ({error}): {WAY_OUT}"
            ) from error
        raise


def fill_rest(blueprint: Blueprint, device: torch.device, float_dtype: torch.dtype | None = None) -> None:
    """Set every buffer and tensor attribute of the module that is still on meta to its value.

    Parameters are the caller's (set them by `setattr`: an LSTM keeps a list of its own). Attributes are tensors in a
    module's `__dict__`, also within lists, tuples and dicts there. Two names of one tensor stay one tensor. Floating
    tensors are cast to `float_dtype`. An attribute that is a view of a parameter's memory stays on meta: the parameter
    will move, and use of the stale view must raise an error.

    Raises:
        ModelError: a buffer is a view of a parameter's memory.
    """
    refs = blueprint._refs
    owned: dict[int, list[str]] = {}
    for name in blueprint._parameters:
        owned.setdefault(refs[name].memory, []).append(name)
    made: dict[Ref, Tensor] = {}

    def fill(name: str, tensor: Tensor, is_buffer: bool) -> Tensor:
        ref = refs.get(name)
        if ref is None or not tensor.is_meta:
            return tensor
        for parameter in owned.get(ref.memory, ()):
            if refs[parameter].overlaps(ref):
                if is_buffer:
                    raise ModelError(f"buffer {name} is a view of parameter {parameter}; register a clone of it")
                return tensor
        if ref not in made:
            made[ref] = blueprint.materialize(name, device, float_dtype if ref.dtype.is_floating_point else None)
        value = made[ref]
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

    for prefix, module in blueprint.module.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fill(_join(prefix, key), buffer, True)
        _map_attributes(prefix, module, functools.partial(fill, is_buffer=False))


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A tensor and its position in a module."""

    name: str
    kind: str
    """One of parameter, buffer, attribute, hook."""
    tensor: Tensor


def _attributes(module: nn.Module) -> Iterator[_Attribute]:
    """Yield every tensor under every name: parameters, then buffers, then attributes, each in the module's order."""
    modules = list(module.named_modules(remove_duplicate=False))
    for kind, held in (("parameter", "_parameters"), ("buffer", "_buffers")):
        for prefix, owner in modules:
            for key, tensor in getattr(owner, held).items():
                if tensor is not None:
                    yield _Attribute(_join(prefix, key), kind, tensor)
    parameters = {id(parameter) for parameter in module.parameters()}
    found: list[_Attribute] = []

    def find(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            found.append(_Attribute(name, "attribute", tensor))
        return tensor

    for prefix, owner in modules:
        _map_attributes(prefix, owner, find)
    yield from found


def _map_attributes(prefix: str, module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every tensor attribute of one module by `change(name, tensor)`."""
    attributes = vars(module)
    for key in [key for key in attributes if key not in _RESERVED]:
        before = attributes[key]
        after = _map_within(_join(prefix, key), before, change, depth=3)
        if after is not before:
            attributes[key] = after


def _map_within(name: str, value: Any, change: Callable[[str, Tensor], Tensor], depth: int) -> Any:
    """Return a value with its tensors changed: in a list or a dict in place, in a tuple as a new tuple."""
    if isinstance(value, Tensor):
        return change(name, value)
    if depth == 0:
        return value
    items: Iterable[tuple[Any, Any]]
    if type(value) is dict or type(value) is list:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, item in items:
            after = _map_within(f"{name}.{key}", item, change, depth - 1)
            if after is not item:
                value[key] = after
    elif type(value) is tuple:
        after = tuple(_map_within(f"{name}.{key}", item, change, depth - 1) for key, item in enumerate(value))
        return after if any(a is not b for a, b in zip(after, value, strict=True)) else value
    return value


def _join(prefix: str, key: str) -> str:
    """Return a full name."""
    return f"{prefix}.{key}" if prefix else key


def _on_meta(module: nn.Module, tape: Tape, from_instance: bool) -> nn.Module:
    """Return the module with all tensors on meta: itself if they are, else a copy that keeps its ties and attributes.

    Raises:
        ModelError: a tensor has no shape or no values, or the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for attribute in _attributes(module):
        tensor = attribute.tensor
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(
                f"{attribute.name} has no shape yet (a lazy module): run one forward and pass the instance"
            )
        if tensor.is_meta and from_instance:
            raise ModelError(
                f"{attribute.name} is on the meta device, so it has no values: pass a build function instead"
            )
        twin = tensor
        if not tensor.is_meta:
            twin = tape.twin(tensor.detach(), copies=False)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, tensor.requires_grad)
            twin.__dict__.update(tensor.__dict__)
        memo.setdefault(id(tensor), twin)
    if not from_instance and all(attribute.tensor.is_meta for attribute in _attributes(module)):
        return module
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ModelError(f"the {type(module).__name__} cannot be copied ({error}): pass a build function") from error


def _check_parameters(attributes: list[_Attribute], refs: dict[str, Ref], slices: dict[int, Slice], tape: Tape) -> None:
    """Refuse parameters without values, and different parameters in one memory, which would diverge.

    Raises:
        ModelError: there is such a parameter.
    """
    owners: dict[int, list[_Attribute]] = {}
    for attribute in attributes:
        ref = refs[attribute.name]
        memory, part = tape.memories[ref.memory], slices[ref.memory]
        if any(tape.memories[base].foreign for base in part.bases):
            raise ModelError(
                f"{attribute.name} was made on the meta device outside the build function, so it has no values"
            )
        if not part.entries and memory.constant is None and 0 not in ref.size:
            raise ModelError(f"{attribute.name} is never given values (torch.empty): fill it where it is made")
        for other in owners.setdefault(ref.memory, []):
            may_share = other.tensor is attribute.tensor or ref.stride != contiguous(ref.size)
            if not may_share and refs[other.name].overlaps(ref):
                raise ModelError(
                    f"{other.name} and {attribute.name} are two parameters in one memory; to tie them, assign one "
                    "nn.Parameter to both names"
                )
        owners[ref.memory].append(attribute)


def _random_keys(seed: int, named: list[tuple[str, Slice]], tape: Tape) -> dict[int, int]:
    """Key every random entry by (seed, first name that descends from it, its index among that name's random entries).

    The CPU's generator uses 32 bits of its seed, so two of 10^5 keys would collide: the second is hashed once more.
    """
    keys: dict[int, int] = {}
    used: set[int] = set()
    for name, part in named:
        drawn = [entry for entry in part.entries if tape.entries[entry].random]
        for ordinal, entry in enumerate(drawn):
            attempt = 0
            while entry not in keys:
                text = f"{seed}\0{name}\0{ordinal}\0{attempt}"
                key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
                if key % 2**32 not in used:
                    used.add(key % 2**32)
                    keys[entry] = key
                attempt += 1
    return keys
