"""What a forward runs under torch.utils.checkpoint: its modules, and the places among its checkpoints, recorded while it is traced.

A checkpoint repeats its code in front of the first backward that asks for something which it keeps, up to the last such thing.
A checkpoint within it keeps what its own code does; the one around it keeps what it is given.

```
    checkpoint 1 [ a   checkpoint 2 [ b (kept) c ]   d ]        a is repeated by 1, b by 2
```
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from samestep.building.autograd_graph import nodes_from
from samestep.building.torch_seams import Replaced, autograd_sequence_number
from samestep.models.layer_parts import NOWHERE, ForwardPlace
from samestep.trees import tensors_in

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


ContextFn = Callable[[], Contexts]


Begin = Callable[[ContextFn | None], Iterator[None]]


_GENERATOR = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch_checkpoint, name)
)


def replaced_checkpoint(
    generator: Callable[[Begin, ContextFn], Iterator[None]], reentrant: Callable[..., Any] | None = None
) -> Replaced:
    """Return a context inside which the functions that torch's `checkpoint` calls are others.

    `generator` is given what begins the one before with the contexts that it is to enter, and the contexts of the call.
    """

    def starting(original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def started(*args: Any, **named: Any) -> Iterator[None]:
            if "context_fn" in named:
                both = {**named}
                contexts = both.pop("context_fn")
                return generator(lambda around: original(*args, context_fn=around, **both), contexts)
            return generator(lambda around: original(*args[:2], around, *args[3:], **named), args[2])

        return started

    replaced = Replaced((torch_checkpoint, _GENERATOR, starting))
    if reentrant is None:
        return replaced
    called = (torch_checkpoint.CheckpointFunction, "apply", lambda _: staticmethod(reentrant))
    return Replaced(*replaced.attributes, called)


def without_reentry(function: Callable[..., Any], preserve: bool, *args: Any, detaches: bool = True) -> Any:
    """Run a reentrant checkpoint as one that is not, whose repeated forward is in the modes of its first one.

    With `detaches`, nothing is trained inside where no input takes a gradient, as torch has it.
    """
    with torch.no_grad() if detaches and not takes_gradient(args) else nullcontext():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def takes_gradient(args: tuple[Any, ...]) -> bool:
    """Return whether one of a call's arguments takes a gradient."""
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


@dataclass(slots=True)
class Checkpointed:
    """The checkpoints of the model's code, as a trace has shown them."""

    entered: set[str] = field(default_factory=set)
    """Paths of the modules that ran inside of one, or keep nothing outside of those that their own code makes."""
    detached: bool = False
    """Whether the inputs of a reentrant one take no gradient, so that torch trains nothing inside."""


@contextmanager
def record_checkpointed(model: nn.Module) -> Iterator[Checkpointed]:
    """Record the checkpoints of the model's code, which run plainly inside."""
    depth = [0]
    seen = Checkpointed()

    def counted(_begin: Begin, _own: ContextFn) -> Iterator[None]:
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        seen.detached |= not takes_gradient(args)
        return without_reentry(function, preserve, *args)

    def enter(path: str, module: nn.Module, args: Any) -> None:
        if depth[0]:
            seen.entered.add(path)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, path)))
        hooks.enter_context(replaced_checkpoint(counted, reentrant))
        yield seen


class Point(NamedTuple):
    """A point of a traced forward."""

    time: int
    at: int
    inside: tuple[int, ...]
    nodes: frozenset[int]
    """Autograd's numbers of the nodes that have made what is there."""


class _SavedTensor(NamedTuple):
    """A tensor that is kept for the backward."""

    time: int
    module: str | None
    """The top-most module that runs; None after all."""
    inside: tuple[int, ...]
    """The checkpoints around it, the innermost last."""
    node: int
    """Autograd's number of the node that keeps it."""
    is_input: bool
    """Whether a checkpoint is given it."""


@dataclass(slots=True)
class TracedPlaces:
    """The points of a traced forward among the checkpoints of the model's code, what is kept for the backward after each, and which
    of them the backward reaches."""

    _time: int = 0
    _edges: int = 0
    """Number of checkpoints that have begun or ended."""
    _open: list[int] = field(default_factory=list)
    _saved: list[_SavedTensor] = field(default_factory=list)
    """What is kept, in its order."""
    _reached: frozenset[int] | None = None
    """The nodes that the backward reaches; None where that is not known."""

    @property
    def are_alike(self) -> bool:
        """Whether the model's code makes no checkpoint."""
        return not self._edges

    @property
    def covered(self) -> set[str]:
        """Paths of the top-most modules that keep nothing but within checkpoints, and what these are given."""
        by = [(saved.module, saved.inside) for saved in self._saved if saved.module is not None and not saved.is_input]
        return {module for module, inside in by if inside} - {module for module, inside in by if not inside}

    def clear(self) -> None:
        """Forget all, since another forward begins."""
        self._time = self._edges = 0
        self._open.clear()
        self._saved.clear()

    def point(self, outcome: Any = ()) -> Point:
        """Return the present point of the forward, at which it has just computed the tensors of `outcome`; the next one is later."""
        self._time += 1
        nodes = {tensor.grad_fn._sequence_nr() for tensor in tensors_in(outcome) if tensor.grad_fn is not None}
        return Point(self._time, self._edges, tuple(self._open), frozenset(nodes))

    def keep(self, module: str | None, *, is_input: bool = False) -> None:
        """Record that the newest node keeps a tensor, in a top-most module or after all."""
        self._time += 1
        self._saved.append(
            _SavedTensor(self._time, module, tuple(self._open), autograd_sequence_number() - 1, is_input)
        )

    @contextmanager
    def checkpoint(self, module: str | None) -> Iterator[None]:
        """Return the context of a checkpoint's code; what it is given is kept around it."""
        self.keep(module, is_input=True)
        self._edges += 1
        self._open.append(self._edges)
        try:
            yield
        finally:
            self._edges += 1
            self._open.pop()

    def reach(self, roots: Iterable[Tensor]) -> None:
        """Record that the backward begins at these tensors."""
        self._reached = frozenset(node._sequence_nr() for node in nodes_from(root.grad_fn for root in roots))

    def is_reached(self, point: Point) -> bool:
        """Return whether the backward reaches the tensors of a point; where that is not known, it is assumed."""
        return self._reached is None or not self._reached.isdisjoint(point.nodes)

    def is_kept_behind(self, point: Point, modules: Collection[str]) -> bool:
        """Return whether one of these top-most modules keeps something after a point."""
        return any(saved.module in modules for saved in self._saved_after(point))

    def _saved_after(self, point: Point) -> Iterator[_SavedTensor]:
        return itertools.islice(self._saved, bisect_right(self._saved, point.time, key=lambda saved: saved.time), None)

    def place(self, point: Point, modules: Collection[str], *, is_kept: bool = False) -> ForwardPlace:
        """Return the place of a point in the forward of a layer of these modules.

        `is_kept` is whether ranks keep something of what they send there, in the innermost checkpoint.
        """
        if self.are_alike:
            return NOWHERE
        around = (0, *point.inside)
        behind = {saved.inside[-1] for saved in self._saved_after(point) if saved.inside}
        if any(saved.module in modules and not saved.inside for saved in self._saved_after(point)):
            behind.add(0)
        if is_kept:
            behind.add(around[-1])
        again = tuple(number for number in around if number in behind and (number == 0 or self._is_repeated(number)))
        return ForwardPlace(at=point.at, inside=point.inside, again=again)

    def _is_repeated(self, checkpoint: int) -> bool:
        """Return whether the backward asks for something that a checkpoint keeps."""
        nodes = {saved.node for saved in self._saved if checkpoint in saved.inside}
        return bool(nodes) and (self._reached is None or not self._reached.isdisjoint(nodes))
