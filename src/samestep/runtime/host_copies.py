"""Copies between the host and a device for which the host does not wait.

A copy from or to ordinary host memory holds the host until it is done, and so until the device has done all that was asked
before. From pinned memory it is one more entry in the device's queue. Torch keeps pinned memory that was freed for the
next copy, and gives it away only once the copies from it are done.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.trees import map_tensors


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, whose copy from the host may still be under way there."""
    return tensor.to(device) if is_near(tensor, device) else tensor.pin_memory().to(device, non_blocking=True)


def batch_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; a GPU copies from the host while it computes, and later computations wait for the copy."""
    if device.type != "cuda":
        return map_tensors(batch, lambda tensor: tensor if tensor.device == device else tensor.to(device))
    aside, here = _copying(device), torch.cuda.current_stream(device)

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(device)
        with torch.cuda.stream(aside):
            found = to_device(tensor, device)
        found.record_stream(here)  # its memory is that stream's until what is asked there now is done
        return found

    batch = map_tensors(batch, moved)
    here.wait_stream(aside)
    return batch


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which batches are copied to it."""
    return torch.cuda.Stream(device)


def master_on_host(value: Tensor) -> Tensor:
    """Return a copy of a value on the host, pinned if the value is on a GPU."""
    copy = value.detach().to("cpu", copy=True)
    return copy.pin_memory() if value.device.type == "cuda" else copy


class Reading:
    """Numbers of a device on their way to the host, which waits for nothing that was asked of the device afterwards."""

    def __init__(self, numbers: Tensor, known: Sequence[float] = ()) -> None:
        """Begin to read `numbers`; those that are `known` on the host follow them."""
        self._held, self._known, self._arrived = numbers, known, None
        if numbers.device.type == "cuda":
            self._held = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._held.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        """Wait until the numbers are on the host, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [*self._held.tolist(), *self._known]


def send_to_values(gradients: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients where the values are; those on the host arrive there before any later `Reading`."""
    return [
        gradient
        if gradient.device == value.device
        else torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True).copy_(gradient, non_blocking=True)
        for gradient, value in zip(gradients, values, strict=True)
    ]


def beside(gradients: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients where the values are: those that are copied to the host are waited for once, together."""
    if gradients and not gradients[0].is_cuda:
        return [*gradients]
    found = send_to_values(gradients, values)
    apart = next((one for one, other in zip(gradients, found, strict=True) if one is not other), None)
    if apart is not None:
        torch.cuda.current_stream(apart.device).synchronize()
    return found


def publish(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values into targets of as many elements, perhaps of another dtype or on another device."""
    near = [(value.view_as(target), target) for value, target in pairs if is_near(value, target.device)]
    if near:
        torch._foreach_copy_([target for _, target in near], [value for value, _ in near])
    for value, target in pairs:
        if not is_near(value, target.device):
            _send(value.view_as(target), target)


def _send(value: Tensor, target: Tensor) -> None:
    """Copy a value of the host into a target on a GPU, while the host goes on."""
    if not (value.dtype == target.dtype and value.is_pinned()):
        value = torch.empty(target.shape, dtype=target.dtype, pin_memory=True).copy_(value)
    target.copy_(value, non_blocking=True)


def is_near(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor reaches a device without a copy from the host to a GPU."""
    return tensor.device.type == device.type or device.type != "cuda"
