"""The marks of layers in a window: when a layer's forward runs, and when the gradient of its output is known.

A full backward hook would put a node of its own into the graph; a hook on the output's gradient is called by the node that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.models.spec import ModelSpec
from samestep.trees import tree_leaves


def mark_layers(
    module: nn.Module, spec: ModelSpec, begin: Callable[[str], Callable[[], None]], backward: Callable[[str], None]
) -> list[RemovableHandle]:
    """Call `begin` and what it returns around each forward of a layer, and `backward` where its backward begins."""
    here = dict(module.named_modules())
    handles: list[RemovableHandle] = []
    for layer in spec.layers:
        for path in layer.modules:
            if path and path in here:  # other stages hold other layers
                handles += _mark(here[path], layer.name, begin, backward)
    return handles


def _mark(
    module: nn.Module, name: str, begin: Callable[[str], Callable[[], None]], backward: Callable[[str], None]
) -> tuple[RemovableHandle, RemovableHandle]:
    ends: list[Callable[[], None]] = []

    def enter(*_: Any) -> None:
        ends.append(begin(name))

    def leave(_module: nn.Module, _given: Any, outputs: Any) -> None:
        if ends:
            ends.pop()()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(lambda _: backward(name))

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
