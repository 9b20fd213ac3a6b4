"""The compiler of a run's graphs (`run.compile_backend`): one graph for all code that is equal, and a reason where there is none.

A graph is what torch traces of a forward. Before the backend compiles it, crossings of one tensor become one
(`rank_crossings.py`) and dropouts take their masks from an operation (`graph_draws.py`). Before its first call it runs once on
copies. Where the backend, or that run, fails, its operations run one by one, as they would without a compiler.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samestep.building.torch_seams import (
    current_compile_id,
    disable_current_modes,
    dynamo,
    inductor_options,
    num_graph_breaks,
)
from samestep.errors import first_line
from samestep.models.spec import is_below
from samestep.randomness import graph_draws
from samestep.randomness.masks import MaskSource
from samestep.runtime.axes import rank_crossings
from samestep.trees import tensors_in

Structure = tuple[object, ...]
"""The classes of a module and of all modules in it, their code where it is an instance's own, and which are islands."""


class GraphCompiler:
    """Compiles the graphs of this run. torch keeps it as long as it keeps the code, so it holds no module."""

    def __init__(self, name: str, mode: str = "default", part: str = "") -> None:
        self.name, self.part = name, part
        self._options = {} if mode == "default" else {"config_patches": inductor_options(mode)}
        self.label = name if mode == "default" else f"{name} ({mode})"
        """The backend as lines of a run name it."""
        self._backends: dict[Structure, Callable[..., Any]] = {}
        self.running: str | None = None
        """The path of the module whose graph runs; that of a model is empty."""
        self.modules: dict[int, str] = {}
        """The paths of the modules in it, by their `id`."""
        self.num_graphs = self.num_again = 0
        """All graphs, and those of code that had been compiled before."""
        self.seconds = 0.0
        """The time of all calls in which something was compiled."""
        self.drawing: Set[str] = frozenset()
        """The paths of modules that draw masks."""
        self.why_whole = ""
        """Why each module that is compiled must be one graph, if it must."""
        self.breaks_before = 0
        """The breaks of all graphs before the module's call."""
        self.uncompiled: dict[str, str] = {}
        """Why a block, or a module in one, runs uncompiled, by its path."""
        self._codes: set[int | None] = set()

    @contextmanager
    def running_in(self, path: str, modules: dict[int, str]) -> Iterator[None]:
        """Let what is compiled inside be a graph of the module with this path, in which others have these paths by their `id`."""
        outer = self.running, self.modules, self.breaks_before
        self.running, self.modules, self.breaks_before = path, modules, num_graph_breaks()
        began, graphs = time.perf_counter(), self.num_graphs
        try:
            yield
        finally:
            self.running, self.modules, self.breaks_before = outer
            if outer[0] is None and self.num_graphs > graphs:
                self.seconds += time.perf_counter() - began

    def summary(self, part: str, islands: str, graphs: int, left: int) -> list[str]:
        """Return lines on the graphs of a part of the run, if there are more than `graphs`, and on what was left uncompiled after the
        first `left`."""
        lines = []
        if self.num_graphs > graphs:
            again = f", {self.num_again} of them again for other shapes or values" if self.num_again else ""
            lines.append(
                f"run.compile: {part} as {pluralise(self.num_graphs, 'graph')} of {self.label}{again}{islands}, "
                f"compiled in {self.seconds:.1f} s"
            )
        reasons: dict[str, list[str]] = {}
        for path, reason in [*self.uncompiled.items()][left:]:
            reasons.setdefault(reason, []).append(path)
        for reason, blocks in reasons.items():
            paths = [path or "the model" for path in blocks]
            others = f" and {len(paths) - 1} more run" if len(paths) > 1 else " runs"
            lines.append(f"run.compile: {paths[0]}{others} uncompiled: {reason}")
        return lines

    def backend_for(self, structure: Structure) -> Callable[..., Any]:
        """Return the backend for modules of a structure; torch reuses a graph for the same backend alone."""
        return self._backends.setdefault(structure, functools.partial(self._compile))

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile one graph, in which crossings of one tensor are one; where the backend cannot, return a function that runs its operations one by one."""
        backend = dynamo().lookup_backend(self.name)
        compilation = current_compile_id()
        code = None if compilation is None else compilation.frame_id
        self.num_again += code in self._codes
        self._codes.add(code)
        for part in graph_draws.parts_of(graph):
            rank_crossings.share(part.graph)
        if num_graph_breaks() > self.breaks_before and (reason := self._why_whole()):
            raise dynamo().exc.TorchDynamoException(f"{reason}, and its graph breaks")  # nothing has run yet
        unnamed = graph_draws.replace_dropouts(graph, self.modules)
        if unnamed:
            raise dynamo().exc.TorchDynamoException(unnamed)
        for part in graph_draws.parts_of(graph):
            part.recompile()
        try:
            with warnings.catch_warnings():  # torch's code warns when inductor imports it to compile
                warnings.simplefilter("ignore", DeprecationWarning)
                compiled: Callable[..., Any] = backend(graph, inputs, **self._options)
        except dynamo().exc.TorchDynamoException:
            raise  # by which the compiler begins anew
        except Exception as error:
            return self._left(graph, error)
        return _NewGraph(functools.partial(self._tried, graph, compiled))

    def _tried(
        self, graph: torch.fx.GraphModule, compiled: Callable[..., Any], inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Run a new graph once on copies of the inputs of its first call; return what computes it from now on."""
        try:
            run_once(compiled, inputs)
        except Exception as error:
            return self._left(graph, error)
        self.num_graphs += 1
        return compiled

    def _left(self, graph: torch.fx.GraphModule, error: Exception) -> Callable[..., Any]:
        """Return what runs the operations of a graph one by one, and note why."""
        self.uncompiled[self.running or ""] = f"{self.name} fails for it and its like: {first_line(error)}"
        return graph.forward

    def _why_whole(self) -> str:
        """Return why the module that runs must be one graph, if it must."""
        if any(is_below(path, self.running or "") for path in self.drawing):
            return "it draws masks of dropout"  # which would be counted anew in each graph of one call
        return self.why_whole


class _NewGraph:
    """A graph that runs once on copies before its first call."""

    def __init__(self, run_first: Callable[[Sequence[Any]], Callable[..., Any]]) -> None:
        self._run_first = run_first
        self._run: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Return what the graph computes."""
        if self._run is None:
            self._run = self._run_first(inputs)
            del self._run_first
        return self._run(*inputs)


def pluralise(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def run_once(graph: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Run a graph forward and backward on copies of the inputs of its first call, before anything depends on it.

    Compilers refuse some code only when its graph runs, or when its backward is compiled, which is after modules behind it have
    run, and other ranks have been sent something. Nothing outside sees this run: its masks drop nothing, its crossings send
    nothing, and the buffers that it writes are copies. At most it needs the memory of the first backward, and a copy of the weights.

        copies of the inputs ─► forward ─► gradients of zeros ─► backward          what fails here runs uncompiled

    Raises:
        Exception: what the graph, or the compiler of its backward, raises.
    """
    # Within a checkpointed block the hooks outside would repeat that block in this backward.
    alone = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), disable_current_modes(), alone, graph_draws.running("", _DropsNothing()):
        results = [
            tensor
            for tensor in tensors_in(graph(*[_copy_of(x) if isinstance(x, Tensor) else x for x in inputs]))
            if tensor.requires_grad
        ]
        if results:
            torch.autograd.backward(results, [torch.zeros_like(result) for result in results])


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a tensor with separate memory, which has the values, the strides and the place in a graph of another."""
    if (place := rank_crossings.trial_place(tensor)) is not None:
        return place
    values = tensor.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or values.layout is not torch.strided:
        return values.clone().requires_grad_(tensor.requires_grad)
    flat = values.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    copy = flat.as_strided(tensor.shape, tensor.stride())
    copy.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf:
        return copy
    passed: Tensor = _Passed.apply(copy)  # what is no leaf may be written in place
    return passed


class _Passed(torch.autograd.Function):
    """The identity, whose result is no view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _DropsNothing(MaskSource):
    """Masks of the first run of a graph."""

    def drop_in_graph(
        self, x: Tensor, shape: torch.Size, p: float, what: str, mask: tuple[str, int, int], entries: dict[str, int]
    ) -> Tensor:
        """Return a mask that drops nothing."""
        return x.new_zeros(shape, dtype=torch.bool)
