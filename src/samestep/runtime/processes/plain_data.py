"""Values as plain data: JSON, with the tensors that it names stored separately. Data from a socket or a file is never
code.

    {"step": (3, nan)}          {"dict": [["step", {"tuple": [3, NaN]}]]}
    a tensor                    {"tensor": NAME}, and the tensor by itself
    an object of a known class  {"object": "Output", "fields": {...}}

Numbers and text stand as they are, so nothing that is a JSON object comes from the value itself. Floats come back to the
bit: JSON's text of a float is the shortest that reads back as the same one, and NaN and Infinity are words. A reader looks
classes up among those that its caller names, and imports nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque
}  # fmt: skip
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


class NotPlainError(TypeError):
    """A value is of a kind that plain data does not hold; the text names the kind."""


class Packer:
    """Turns values into plain data, and collects the tensors in them under names that begin alike."""

    def __init__(self, prefix: str, classes: Sequence[type] = ()) -> None:
        self.tensors: dict[str, Tensor] = {}
        """The tensors themselves, detached, by name."""
        self._prefix, self._classes = prefix, frozenset(classes)

    def packed(self, value: Any) -> Any:
        """Return a value as plain data.

        Raises:
            NotPlainError: it holds an object of another kind.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, Tensor):
            return self._pack_tensor(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": self.packed(torch.from_numpy(value.copy()))}
        if type(value) is range:
            return {"range": [value.start, value.stop, value.step]}
        for kind, make in _SEQUENCES.items():
            if type(value) is make:
                more = {"maxlen": value.maxlen} if isinstance(value, collections.deque) else {}
                return {kind: [self.packed(one) for one in value], **more}
        if type(value) in _DICTS:
            return {"dict": [[self.packed(key), self.packed(one)] for key, one in value.items()]}
        if type(value) in self._classes:
            fields = {field.name: self.packed(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"object": type(value).__name__, "fields": fields}
        raise NotPlainError(f"a {type(value).__name__}")

    def _pack_tensor(self, value: Tensor) -> Any:
        if value.layout is not torch.strided or value.is_meta:
            raise NotPlainError(f"a {type(value).__name__} of layout {value.layout} on {value.device}")
        if value.dtype is torch.complex128:  # which no file of safetensors holds
            return {"complex": self._pack_tensor(torch.view_as_real(value.resolve_conj()))}
        name = f"{self._prefix}{len(self.tensors)}"
        self.tensors[name] = value.detach()
        return {"tensor": name}


def unpack_plain(record: Any, read: Callable[[str], Tensor], classes: Sequence[type] = ()) -> Any:
    """Return the value that plain data stands for; `read` returns a tensor by its name.

    Raises:
        KeyError: it stands for an object of a class that is not among `classes`.
    """
    if not isinstance(record, dict):
        return record
    if "tensor" in record:
        return read(record["tensor"])
    if "complex" in record:
        return torch.view_as_complex(unpack_plain(record["complex"], read))
    if "array" in record:
        return unpack_plain(record["array"], read).numpy()
    if "range" in record:
        return range(*record["range"])
    if "dict" in record:
        return {unpack_plain(key, read, classes): unpack_plain(value, read, classes) for key, value in record["dict"]}
    if "object" in record:
        known = {one.__name__: one for one in classes}
        fields = {name: unpack_plain(one, read, classes) for name, one in record["fields"].items()}
        return known[record["object"]](**fields)
    kind = next(kind for kind in _SEQUENCES if kind in record)
    values: Iterator[Any] = (unpack_plain(one, read, classes) for one in record[kind])
    return collections.deque(values, record["maxlen"]) if kind == "deque" else _SEQUENCES[kind](values)


def to_text(value: Any) -> str:
    """Return a value without tensors as JSON, from which `of_text` makes an equal one.

    Raises:
        NotPlainError: it holds an object of another kind.
    """
    packer = Packer("")
    text = json.dumps(packer.packed(value))
    if packer.tensors:
        raise NotPlainError("a tensor")
    return text


def of_text(text: str | bytes) -> Any:
    """Return the value that JSON of `to_text` stands for.

    Raises:
        ValueError: the text is no JSON.
        KeyError: it names a tensor or a class.
    """
    no_tensors: Mapping[str, Tensor] = {}
    return unpack_plain(json.loads(text), no_tensors.__getitem__)
