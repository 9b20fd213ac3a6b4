"""Values that ranks send each other beside the tensors of a step: JSON in tensors of bytes, the lengths sent first.

torch sends objects as pickles, and whoever can reach the sockets of a group could then run code in every rank. Here what
arrives is parsed as plain data (`runtime/plain_data.py`), which makes numbers, text, lists and dicts of them, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import ModelError
from samestep.runtime import plain_data


def gather_values(mine: Any, world_size: int) -> list[Any]:
    """Return the values that all ranks pass, numbers, text, lists, tuples, sets and dicts of them, in the order of ranks.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

    Raises:
        NotPlainError: `mine` holds something else.
    """
    if world_size == 1:
        return [mine]
    device = _device_of(None)
    sent = _bytes_of(plain_data.to_text(mine), device)
    lengths = torch.zeros(world_size, 1, dtype=torch.int64, device=device)
    dist.all_gather([*lengths], torch.tensor([len(sent)], device=device))
    counts = lengths.flatten().tolist()
    given = torch.zeros(world_size, max(counts), dtype=torch.uint8, device=device)
    dist.all_gather([*given], torch.cat([sent, sent.new_zeros(max(counts) - len(sent))]))
    host = given.cpu()
    return [_value_of(row[:count]) for row, count in zip(host, counts, strict=True)]


def broadcast_value(source: int, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return on every rank of a group, by default the world, the plain value that the global rank `source` passes.

    Collective over `group`: every rank of it calls it; if one does not, the others wait until the time limit.

    Raises:
        NotPlainError: on `source`, the value is not made of numbers, text, lists, tuples, sets and dicts.
    """
    device = _device_of(group)
    sent = _bytes_of(plain_data.to_text(value), device) if dist.get_rank() == source else None
    length = torch.tensor([0 if sent is None else len(sent)], device=device)
    dist.broadcast(length, src=source, group=group)
    given = torch.empty(int(length), dtype=torch.uint8, device=device) if sent is None else sent
    dist.broadcast(given, src=source, group=group)
    return _value_of(given.cpu())


def broadcast_from(source: int, value: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return on every rank of a group what the global rank `source` passes, with its tensors on `device`.

    Collective over `group`: every rank of it calls it; if one does not, the others wait until the time limit.

    Raises:
        ModelError: on every rank; the value is not made of tensors, numbers, text, lists, tuples and dicts.
    """
    packer, is_source, told = plain_data.Packer(""), dist.get_rank() == source, None
    if is_source:
        try:
            record = packer.packed(value)
            forms = [[*tensor.shape] for tensor in packer.tensors.values()]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in packer.tensors.values()]
            told = ["", record, forms, dtypes]
        except plain_data.NotPlainError as error:
            told = [str(error), None, [], []]
    refused, record, forms, dtypes = broadcast_value(source, told, group)
    if refused:
        raise ModelError(
            f"the last stage of the pipeline returns {refused}, which is not sent to the other stages: tensors, numbers, "
            "text, and lists, tuples and dicts of them work"
        )
    tensors: list[Tensor] = []
    for index, (form, dtype) in enumerate(zip(forms, dtypes, strict=True)):
        mine = packer.tensors[str(index)].contiguous() if is_source else None
        held = torch.empty(form, dtype=_dtype(dtype), device=device) if mine is None else mine
        dist.broadcast(held, src=source, group=group)
        tensors.append(held)
    return value if is_source else plain_data.unpacked(record, lambda name: tensors[int(name)])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), f"{name} is no dtype"
    return found


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors that a group sends must lie."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _bytes_of(text: str, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def _value_of(sent: Tensor) -> Any:
    return plain_data.of_text(sent.numpy().tobytes())
