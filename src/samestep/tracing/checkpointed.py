"""Which modules a forward runs under torch.utils.checkpoint: recorded while it is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from samestep.building.torch_seams import Replaced

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


ContextFn = Callable[[], Contexts]


_Begin = Callable[[ContextFn | None], Iterator[None]]


_GENERATOR = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch_checkpoint, name)
)


def replaced_checkpoint(
    generator: Callable[[_Begin, ContextFn], Iterator[None]], reentrant: Callable[..., Any]
) -> Replaced:
    """Return a context inside which the two functions that torch's `checkpoint` calls are others.

    `generator` is given what begins torch's own with the contexts that it is to enter, and the contexts of the call.
    """

    def starting(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def started(*given: Any, **named: Any) -> Iterator[None]:
            if "context_fn" in named:
                both = {**named}
                own = both.pop("context_fn")
                return generator(lambda around: original(*given, context_fn=around, **both), own)
            return generator(lambda around: original(*given[:2], around, *given[3:], **named), given[2])

        return started

    return Replaced(
        (torch_checkpoint, _GENERATOR, starting),
        (torch_checkpoint.CheckpointFunction, "apply", lambda _: staticmethod(reentrant)),
    )


def _takes_gradient(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


@dataclass(slots=True)
class Checkpointed:
    """The checkpoints of the model's code, as a trace has shown them."""

    entered: set[str] = field(default_factory=set)
    """Paths of the modules that ran inside of one."""
    detached: bool = False
    """Whether the inputs of a reentrant one take no gradient, so that torch trains nothing inside."""


@contextmanager
def record_checkpointed(model: nn.Module) -> Iterator[Checkpointed]:
    """Record the checkpoints of the model's code, which run plainly inside."""
    depth = [0]
    seen = Checkpointed()

    def counted(_begin: _Begin, _own: ContextFn) -> Iterator[None]:
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        detached = not _takes_gradient(args)
        seen.detached |= detached
        with torch.no_grad() if detached else nullcontext():
            return checkpoint(function, *args, use_reentrant=False)

    def enter(path: str, module: nn.Module, args: Any) -> None:
        if depth[0]:
            seen.entered.add(path)

    handles = [
        module.register_forward_pre_hook(functools.partial(enter, path)) for path, module in model.named_modules()
    ]
    try:
        with replaced_checkpoint(counted, reentrant):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
