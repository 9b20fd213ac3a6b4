"""Plain values that ranks exchange outside of the tensors of a step: JSON in tensors of bytes, the lengths sent first.

torch sends objects as pickles, and whoever can reach the sockets of a group could then run code in every rank. Here
received bytes are parsed as plain data: numbers, text, lists and dicts of them, and nothing else. Files of workers are read in the same
way. Tensors are stored separately under the names that the JSON contains.

    {"step": (3, nan)}          {"dict": [["step", {"tuple": [3, NaN]}]]}
    a tensor                    {"tensor": NAME}, and the tensor by itself
    an object of a known class  {"object": "Output", "fields": {...}}

Numbers and text stand as they are, so nothing that is a JSON object comes from the value itself. Floats come back to the
bit: JSON's text of a float is the shortest that reads back as the same one, and NaN and Infinity are words. A reader looks
classes up among those that its caller names, and imports nothing.

`check` compares the ranks' runs before process groups are created. A rank whose model was traced differently (its code
asks for the rank, or draws a number and branches on it), or that was started with another layout or job, would wait for
messages that nobody sends. So would one that kept the groups of a run which has failed on another rank alone. Ranks of
several hosts may have different files of code: those that two ranks have both imported must be equal.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.datasets.imported import loaded_sources
from samestep.errors import InputError, LayoutError, ModelError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes import mesh


def gather_values(value: Any, world_size: int) -> list[Any]:
    """Return the values that all ranks pass, numbers, text, lists, tuples, sets and dicts of them, in the order of ranks.

    Collective over the world, see [Note: collective calls].

    Raises:
        NotPlainError: `value` holds something else.
    """
    if world_size == 1:
        return [value]
    device = _device_of(None)
    sent = _bytes_of(to_text(value), device)
    lengths = torch.zeros(world_size, 1, dtype=torch.int64, device=device)
    dist.all_gather([*lengths], torch.tensor([len(sent)], device=device))
    counts = lengths.flatten().tolist()
    received = torch.zeros(world_size, max(counts), dtype=torch.uint8, device=device)
    dist.all_gather([*received], torch.cat([sent, sent.new_zeros(max(counts) - len(sent))]))
    host = received.cpu()
    return [_value_of(row[:count]) for row, count in zip(host, counts, strict=True)]


def broadcast_value(source: int, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return on every rank of a group, by default the world, the plain value that the global rank `source` passes.

    Collective over `group`, see [Note: collective calls].

    Raises:
        NotPlainError: on `source`, the value is not made of numbers, text, lists, tuples, sets and dicts.
    """
    device = _device_of(group)
    sent = _bytes_of(to_text(value), device) if dist.get_rank() == source else None
    length = torch.tensor([0 if sent is None else len(sent)], device=device)
    dist.broadcast(length, src=source, group=group)
    tensor = torch.empty(int(length), dtype=torch.uint8, device=device) if sent is None else sent
    dist.broadcast(tensor, src=source, group=group)
    return _value_of(tensor.cpu())


def broadcast_from(
    source: int,
    value: Any,
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    what: str = "the last stage of the pipeline returns {}, which is not sent to the other stages",
    kind: type[InputError] = ModelError,
) -> Any:
    """Return on every rank of a group the value that the global rank `source` passes, with its tensors on `device`.

    Collective over `group`, by default the world, see [Note: collective calls].

    Raises:
        ModelError: or the error of `kind`, on every rank; the value is not made of tensors, numbers, text, lists, tuples and
            dicts. Its text is `what`, with the kind of value.
    """
    packer, is_source, told = Packer(""), dist.get_rank() == source, None
    if is_source:
        try:
            record = packer.packed(value)
            forms = [[*tensor.shape] for tensor in packer.tensors.values()]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in packer.tensors.values()]
            told = ["", record, forms, dtypes]
        except NotPlainError as error:
            told = [str(error), None, [], []]
    refused, record, forms, dtypes = broadcast_value(source, told, group)
    if refused:
        raise kind(
            "value-not-sendable",
            f"{what.format(refused)}. Use tensors, numbers, text, and lists, tuples and dicts of them",
        )
    tensors: list[Tensor] = []
    for index, (form, dtype) in enumerate(zip(forms, dtypes, strict=True)):
        contiguous = packer.tensors[str(index)].to(device).contiguous() if is_source else None
        data = torch.empty(form, dtype=_dtype(dtype), device=device) if contiguous is None else contiguous
        dist.broadcast(data.view(-1).view(torch.uint8), src=source, group=group)  # not every backend sends every dtype
        tensors.append(data)
    return value if is_source else unpack_plain(record, lambda name: tensors[int(name)])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    return dtype


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the tensors that a group sends."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _bytes_of(text: str, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def _value_of(sent: Tensor) -> Any:
    return of_text(sent.numpy().tobytes())


def check(spec: ModelSpec, layout: Layout, job: Job, *, several_hosts: bool = False) -> None:
    """Check that all ranks have the same layout, the same numerics and update, and the same traced model, and hosts the same code.

    Collective over the world, see [Note: collective calls].

    Raises:
        LayoutError: some rank has another; every rank raises it.
    """
    digests = {
        "layout": str(layout),
        "job": _digest(job.numerics, job.optimizer, job.schedule, job.train.global_batch, job.train.seed),
        "traced model": _digest(spec),
    }
    with outside_step():  # a model is prepared in its first step
        sources = loaded_sources() if several_hosts else {}
        heard = gather_values((digests, mesh.num_forgotten(), sources), layout.world_size)
    mesh.forget_as_often(max(num_forgotten for _, num_forgotten, _ in heard))
    everyone = [theirs for theirs, _, _ in heard]
    for what in digests:
        apart = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if not apart:
            continue
        who = f"rank {apart[0]} has" if len(apart) == 1 else f"ranks {', '.join(map(str, apart))} have"
        named = f" ({everyone[apart[0]][what]!r} and {everyone[0][what]!r})" if what == "layout" else ""
        works = ". Use a forward that runs the same operations on every rank" if what == "traced model" else ""
        raise LayoutError(
            "hosts-differ", f"{who} another {what} than rank 0{named}; ranks of one run need the same one{works}"
        )
    _compare_code([sources for _, _, sources in heard])


def _compare_code(sources: Sequence[Mapping[str, str]]) -> None:
    """Check that a module which several ranks have imported is the same file for all of them.

    Raises:
        LayoutError: it is not.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in enumerate(sources):
        for name, digest in digests.items():
            other, digest_there = first.setdefault(name, (rank, digest))
            if digest_there != digest:
                raise LayoutError(
                    "hosts-differ", f"ranks {rank} and {other} have different {name}. Use the same files on all hosts"
                )


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


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
                return {kind: [self.packed(item) for item in value], **more}
        if type(value) in _DICTS:
            return {"dict": [[self.packed(key), self.packed(item)] for key, item in value.items()]}
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
        known = {class_.__name__: class_ for class_ in classes}
        fields = {name: unpack_plain(item, read, classes) for name, item in record["fields"].items()}
        return known[record["object"]](**fields)
    kind = next(kind for kind in _SEQUENCES if kind in record)
    values: Iterator[Any] = (unpack_plain(item, read, classes) for item in record[kind])
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
