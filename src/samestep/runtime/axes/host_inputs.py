"""Inputs of blocks in the host's memory (`recompute=offload`, twin of `strategies/host_inputs.py`).

A block's input goes to the host as a copy on a stream of its own, which begins once the input is made. The next block waits for the
end of that copy and lets go of the tensor; so of what leaves, the device holds one input. In the backward a block that repeats its
forward asks for the input of the block before, whose copy back has the whole of that block's backward:

```
forward  of block k    release the input of k-1      copy the input of k to the host
backward of block k    take the input of k           copy the input of k-1 back         repeat the forward
```
Which blocks these are stands in the program. On a CPU, whose memory is the host's, the copies are plain ones, made at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.program.ops import COPY_STREAMS, OpKind
from samestep.program.program import Program
from samestep.runtime.recording import marks
from samestep.state.writes import marks_of

_Forward = Callable[..., Any]
Repeatable = Callable[[_Forward, tuple[Any, ...], Mapping[str, Any]], Callable[[], Any]]
"""Makes a forward and the arguments of one call a function without arguments, which may be called again."""
num_copies = 0
"""Copies of inputs to the host in this process, which tests count."""


_TO_HOST, _FROM_HOST = COPY_STREAMS[OpKind.OFFLOAD], COPY_STREAMS[OpKind.FETCH]


class HostLanes:
    """The two directions between a device and the host, on a GPU a stream each."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_gpu = device, device.type == "cuda"
        self._out, self._back = (torch.cuda.Stream(device) if self._is_gpu else None for _ in range(2))

    def to_host(self, tensor: Tensor, layer: str) -> tuple[Tensor, Any]:
        """Return a copy of the input of a layer on the host, and the event at which it is complete; None where it is already."""
        copy = torch.empty_like(tensor, device="cpu", pin_memory=self._is_gpu)
        return copy, self._copied(copy, tensor, self._out, layer, _TO_HOST)

    def from_host(self, copy: Tensor, layer: str) -> tuple[Tensor, Any]:
        """Return the tensor on the device again, and the event at which it is complete; None where it is already."""
        tensor = torch.empty_like(copy, device=self._device)
        return tensor, self._copied(tensor, copy, self._back, layer, _FROM_HOST)

    def wait_for(self, event: Any, layer: str, way: str) -> None:
        """Let what the device computes from now on wait for the end of a copy."""
        if event is not None:
            with marks.copy(layer, way, is_awaited=True):
                torch.cuda.current_stream(self._device).wait_event(event)

    def _copied(self, target: Tensor, source: Tensor, stream: Any, layer: str, way: str) -> Any:
        if stream is None:
            with marks.copy(layer, way), marks.copy(layer, way, is_awaited=True):
                target.copy_(source)
            return None
        stream.wait_stream(
            torch.cuda.current_stream(self._device)
        )  # which makes the source, or frees the target's memory
        with torch.cuda.stream(stream), marks.copy(layer, way):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


class _InputOnHost:
    """One tensor given to a block: its copy on the host, and the tensor on the device while there is one."""

    def __init__(self, tensor: Tensor, lanes: HostLanes, path: str, layer: str) -> None:
        global num_copies
        num_copies += 1
        self.given = weakref.ref(tensor)
        self._lanes, self._path, self._layer = lanes, path, layer
        self._leaving: Tensor | None = tensor.detach()
        self._before = marks_of([tensor])
        self._host, self._left = lanes.to_host(self._leaving, layer)
        self._coming: tuple[Tensor, Any] | None = None

    def release(self) -> None:
        """Release the tensor on the device, whose memory is used again only after the copy.

        Raises:
            ModelError: the model has written into the tensor after the forward that received it.
        """
        if self._leaving is None:
            return
        if marks_of([self._leaving]).differ(self._before):
            raise ModelError(
                "recompute-unsupported",
                f"the model writes into the input of {self._path} after its forward, and recompute=offload copies it to CPU memory "
                "meanwhile. Use recompute=none, or a forward that writes nowhere (x = x + y for x += y)",
            )
        self._lanes.wait_for(self._left, self._layer, _TO_HOST)
        self._leaving = None

    def fetch(self) -> None:
        """Begin the copy back to the device."""
        if self._leaving is None and self._coming is None:
            self._coming = self._lanes.from_host(self._host, self._layer)

    def take(self) -> Tensor:
        """Return the input on the device, whose memory is the caller's from now on."""
        if self._leaving is not None:
            return self._leaving.detach()
        self.fetch()
        assert self._coming is not None
        (tensor, arrived), self._coming = self._coming, None
        self._lanes.wait_for(arrived, self._layer, _FROM_HOST)
        return tensor


class _BlockCall:
    """One call of a block in a forward that a backward follows."""

    def __init__(self, previous: _BlockCall | None) -> None:
        self.inputs: dict[int | str, _InputOnHost] = {}
        """Those on the host, by their places among the arguments."""
        self._before, self._is_repeated = previous, False

    def take(self) -> dict[int | str, Tensor]:
        """Return the inputs on the device for a repeated forward, and ask for those of the call before, unless that was repeated."""
        self._is_repeated = True
        taken = {place: host_input.take().requires_grad_() for place, host_input in self.inputs.items()}
        if self._before is not None and not self._before._is_repeated:
            for host_input in self._before.inputs.values():
                host_input.fetch()
        self._before = None  # whose copies nobody holds once its own graph is gone
        return taken

    def release(self, after: _BlockCall) -> None:
        """Let go of the inputs on the device, but of those that the next call is given too."""
        kept = {id(host_input) for host_input in after.inputs.values()}
        for host_input in self.inputs.values():
            if id(host_input) not in kept:
                host_input.release()


class HostInputs:
    """The inputs of a model's blocks that a step has copied to the host."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._lanes, self._latest = HostLanes(device), _BlockCall(None)
        self._moves = {op.layer for ops in program.bodies.values() for op in ops if op.kind is OpKind.OFFLOAD}
        layers = program.step.model.layers
        self._names = [layer.name for layer in layers]
        chunks = program.chunks or (range(len(layers)),)
        self._begins = {next((index for index in chunk if layers[index].is_block), None) for chunk in chunks}

    def around(self, layer: int, path: str) -> Repeatable:
        """Return what makes one call of a block a function that can be repeated."""
        return functools.partial(self._call, path, self._names[layer], layer in self._moves, layer in self._begins)

    def _call(
        self,
        path: str,
        layer: str,
        moves: bool,
        begins: bool,
        forward: _Forward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Callable[[], Any]:
        previous, call = self._latest, _BlockCall(None if begins else self._latest)
        tensors_here = dict(_activations(args, kwargs) if moves else ())
        for place, tensor in tensors_here.items():
            same = (
                host_input for host_input in previous.inputs.values() if host_input.given() is tensor
            )  # an encoder's output, as all blocks get it
            call.inputs[place] = next(same, None) or _InputOnHost(tensor, self._lanes, path, layer)
        previous.release(call)
        self._latest = call
        others = tuple(None if place in tensors_here else value for place, value in enumerate(args))
        named = {name: value for name, value in kwargs.items() if name not in tensors_here}
        taken = [tensors_here]

        def run() -> Any:
            tensors = taken.pop() if taken else call.take()
            placed = (tensors.get(place, value) for place, value in enumerate(others))
            return forward(*placed, **named, **{name: x for name, x in tensors.items() if isinstance(name, str)})

        return run


def _activations(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Tensor]]:
    """Yield the place and the value of each argument through which a gradient flows to the layers before."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        is_activation = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad
        if is_activation and value.is_floating_point():
            yield place, value
