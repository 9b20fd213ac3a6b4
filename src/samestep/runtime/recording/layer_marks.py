"""The marks of layers in a window: when a layer's forward runs, and when the gradient of its output is known.

A full backward hook would put a node of its own into the graph; a hook on the output's gradient is called by the node that is there.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.models.spec import ModelSpec
from samestep.trees import tree_leaves

LayerEvent = tuple[list[Any], list[Any] | None]
"""The event of a forward that has begun, and its twin on the host's clock, if there is one."""


class LayerListener(Protocol):
    """Hears the layers of a rank; `op` is what a layer does, as the memory of a step names it."""

    def begin_layer(self, name: str, op: str) -> LayerEvent:
        """Hear that the forward of a layer begins."""

    def end_layer(self, begun: LayerEvent) -> None:
        """Hear that the forward of a layer ends."""

    def begin_backward(self, name: str, op: str) -> None:
        """Hear that the gradient of a layer's output is known."""


def mark_layers(module: nn.Module, spec: ModelSpec, listener: LayerListener) -> list[RemovableHandle]:
    """Let a listener hear each forward of a layer, and where its backward begins."""
    here = dict(module.named_modules())
    handles: list[RemovableHandle] = []
    for layer in spec.layers:
        for path in layer.modules:
            if path and path in here:  # other stages hold other layers
                handles += _mark(here[path], layer.name, listener)
    return handles


def _mark(module: nn.Module, name: str, listener: LayerListener) -> tuple[RemovableHandle, RemovableHandle]:
    begun: list[LayerEvent] = []
    forward, backward = f"forward:{name}", f"backward:{name}"

    def enter(*_: Any) -> None:
        if torch.compiler.is_compiling():  # a graph of the whole model has no place for marks
            return
        begun.append(listener.begin_layer(name, forward))

    def leave(_module: nn.Module, _given: Any, outputs: Any) -> None:
        if not begun:
            return
        listener.end_layer(begun.pop())
        for output in (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(turn)

    def turn(_: Tensor) -> None:
        listener.begin_backward(name, backward)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
