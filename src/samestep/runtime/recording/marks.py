"""The marks of the runtime: what is sent, waited for and done outside of tasks, for the recorder that listens, if one does.

A mark costs a look at one variable where nobody listens. A listener belongs to the process, since collectives are issued by hooks
and threads of autograd, too.

In a window layers are marked too: when a layer's forward runs, and when the gradient of its output is known. A full backward hook would
put a node of its own into the graph; a hook on the output's gradient is called by the node that is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.models.spec import ModelSpec
from samestep.runtime.contexts import AtEnd
from samestep.trees import tree_leaves

LayerEvent = list[Any]
"""The event of a forward that has begun."""


class Listener(Protocol):
    """Hears the marks of one process."""

    def issue(self, owner: str, kind: str) -> Issue:
        """Hear that a collective or message is being issued."""

    def begin(self, region: str) -> Callable[[], None]:
        """Hear that the host begins to do something outside of tasks; the result is called at its end."""

    def begin_copy(self, owner: str, stream: str, *, is_awaited: bool) -> Callable[[], None]:
        """Hear that what is done next on the current stream is a copy between device and host, or waits for one; the result is
        called at its end."""


class Issue(Protocol):
    """One collective or message that is being issued."""

    is_weighed: bool
    """Whether the bytes that torch is given are wanted."""

    def sent(self, work: Any) -> Any:
        """Return the work in a form whose `wait` is heard."""

    def end(self, size_bytes: int | None) -> None:
        """Hear that it was issued, with the bytes of its buffers if they are wanted; without `sent` it has ended, too."""


class _Listeners:
    """The listener of this process, which nothing keeps alive here."""

    current: Callable[[], Listener | None] = staticmethod(lambda: None)


def listener() -> Listener | None:
    """Return who listens."""
    return _Listeners.current()


def listen(listener: Listener | None) -> None:
    """Let one listener hear the marks of this process from now on, and no other."""
    _Listeners.current = staticmethod((lambda: None) if listener is None else weakref.ref(listener))


def region(name: str) -> AbstractContextManager[None]:
    """Return a context of what the host does outside of tasks, such as `data` or `checkpoint`; it begins with the call."""
    assembly = _Listeners.current()
    return _UNHEARD if assembly is None else AtEnd(assembly.begin(name))


def copy(owner: str, stream: str, *, is_awaited: bool = False) -> AbstractContextManager[None]:
    """Return a context of a copy between device and host, or of the wait for one, `stream` being its direction; it begins with the call."""
    assembly = _Listeners.current()
    return _UNHEARD if assembly is None else AtEnd(assembly.begin_copy(owner, stream, is_awaited=is_awaited))


_UNHEARD = nullcontext()


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
