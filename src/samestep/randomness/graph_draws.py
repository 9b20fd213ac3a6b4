"""Dropout masks in graphs of `torch.compile`.

A graph is made once and runs in each step, for all blocks that are equal, so a mask is no constant of it. Where code that was
traced calls a dropout, the graph calls the same replacement as a `DropoutMode` does, with its mask from an operation:

    graph      drop_mask(shape, p, within, call, draw)  ─►  masked_fill, mul, the products of an attention: kernels of the compiler
    run        within + path of the block = module      ─►  the mode of the forward that runs: the mask of (module, entry, draw)

`within` is the path of the module that draws in the block, `call` counts its calls in the graph, and `draw` the masks of a call.
The backward keeps the mask, as it does without a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.errors import ModelError
from samestep.randomness.masks import MaskSource
from samestep.randomness.replacements import DROPPING, HANDLERS


@dataclass(slots=True)
class _GraphRun:
    """The block whose graph runs, and the mode of its forward."""

    path: str
    source: MaskSource
    entries: dict[str, int] = field(default_factory=dict)
    """The number of calls of each module before the graph began."""


_RUNNING: list[_GraphRun] = []
"""The graphs that run, innermost last."""


@contextmanager
def running(path: str, source: MaskSource | None) -> Iterator[None]:
    """Let the graph of a module take its masks from a source, inside."""
    if source is None:
        yield
        return
    _RUNNING.append(_GraphRun(path, source))
    try:
        yield
    finally:
        _RUNNING.pop()


def report_uncompiled(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
    """Let the forward of a module whose calls a graph contains be reported where it runs uncompiled, by functions that are hooks of
    other modules: hooks would be part of the graph."""
    forward_here = vars(module).get("forward")
    if isinstance(forward_here, MethodType) and forward_here.__self__ is module:
        forward, takes_module = forward_here.__func__, True
    else:
        forward, takes_module = forward_here or type(module).forward, forward_here is None

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = (module, *args) if takes_module else args
        if torch.compiler.is_compiling():
            return forward(*arguments, **kwargs)
        enter(module, args)
        try:
            return forward(*arguments, **kwargs)
        finally:
            leave(module, args, None)

    module.forward = MethodType(call, module)


@dataclass(frozen=True, slots=True)
class _GraphSource(MaskSource):
    """The source of the one mask of a call of a dropout in a graph."""

    within: str
    call: int
    draw: int

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return the operation's result, bool [shape]. The compiler makes one kernel of its use with what is around it."""
        mask: Tensor = torch.ops.samestep.drop_mask(x, list(shape), p, self.within, self.call, self.draw, what)
        return mask

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses a call."""
        return _RUNNING[-1].source.refuse(reason) if _RUNNING else ModelError("random-numbers", reason)


def parts_of(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """Yield a traced graph and the graphs in it: of blocks that are recomputed."""
    return (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))


def _nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph, and of those in it where they are called, in the order in which they run."""
    for node in graph.graph.nodes:
        inner = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule):
            yield from _nodes(inner)
        else:
            yield node


def replace_dropouts(graph: torch.fx.GraphModule, names: Mapping[int, str]) -> str:
    """Replace the dropouts of a traced block, whose modules have these paths in it by their `id`; return why that is not possible,
    or nothing."""
    draws: dict[tuple[str, str], int] = {}
    calls: dict[str, list[tuple[str, str]]] = {}
    for node in _nodes(graph):
        if node.op != "call_function" or node.target not in DROPPING:
            continue
        p = _probability(node.target, node.args, node.kwargs)
        if p == 0:
            continue
        stack = node.meta.get("nn_module_stack") or {"": ("", None)}
        key = next(reversed(stack))  # the `id` of the innermost module, and the number of its call
        module, _, _ = key.partition("@")
        within = "" if not key else names.get(int(module) if module.isdigit() else 0)
        if within is None or isinstance(p, torch.fx.Node):
            return f"the module that calls {node.target.__name__}, and its probability, are unknown"
        caller = (key, stack[key][0])  # a module that has two names in a block is called by one of them
        draw = draws[caller] = draws.get(caller, -1) + 1
        callers = calls.setdefault(within, [])
        if caller not in callers:
            callers.append(caller)
        node.target = _drawing(node.target, _GraphSource(within, callers.index(caller), draw))
    return ""


def _drawing(function: Callable[..., Any], source: _GraphSource) -> Callable[..., Any]:
    """Return the replacement of a dropout in a graph, under the name of that dropout."""
    handler = HANDLERS[function]

    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        return handler(source, function, *args, **kwargs)

    return drawn


def _probability(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the probability with which a call of a dropout drops; 0 where it does not train."""
    if function is F.scaled_dot_product_attention:
        return AttentionCall(*args, **kwargs).dropout_p
    arguments = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    is_training = arguments.get("training", arguments.get("train", True))
    return arguments.get("p", 0.5) if is_training else 0


def _mask(x: Tensor, shape: Sequence[int], p: float, within: str, call: int, draw: int, what: str) -> Tensor:
    run = _RUNNING[-1]
    name = ".".join(filter(None, (run.path, within)))
    return run.source.drop_in_graph(x, torch.Size(shape), p, what, (name, call, draw), run.entries)


_LIBRARY = torch.library.Library("samestep", "FRAGMENT")
_LIBRARY.define(
    "drop_mask(Tensor x, SymInt[] shape, float p, str within, int call, int draw, str what) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # a CUDA graph would repeat the mask of the step in which it was captured
)
_LIBRARY.impl("drop_mask", _mask, "CompositeExplicitAutograd")
torch.library.register_fake(
    "samestep::drop_mask", lambda x, shape, *_: x.new_empty(shape, dtype=torch.bool), lib=_LIBRARY
)
