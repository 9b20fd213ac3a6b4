"""Blocks that run as graphs of `torch.compile` (`run.compile`): what is computed, and where, stays as it is.

The forward of each block of this rank is replaced by its compiled form. Its hooks are not, so what a layout does around a
block (gather weights, receive, count calls) stands outside of the graph. What it does inside is in the graph: casts, and the
crossings of `tp` (`rank_crossings.py`) and the exchanges of heads of `cp` (`context/block_exchanges.py`). A module in a block with hooks of the user's own
is an island: a call of it leaves the graph, its hooks run in Python, and its forward is a graph again if it has children.

```
block     graph ───┐              ┌── graph         equal blocks share their graphs
island             └► attention ──┘
                      hooks, graph
```
Dropout masks come from an operation of the graph (`graph_draws.py`). Modules that draw other random numbers, or masks that are too
large to be kept, are islands without a graph; and so are experts, whose shapes depend on values. A graph holds no function mode of dropout.

Graphs are for training forwards. Without gradients (validation loss, samples, the canary) the same modules run as they are,
and so they do while they are searched for one at fault. What the compiler cannot take runs uncompiled, and a line says why.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.attention import fused
from samestep.building.attention.formula import BLOCK_ELEMENTS
from samestep.building.attention.fused import attend_each
from samestep.building.loss import RunFunction, run_uncompiled
from samestep.building.torch_seams import (
    current_function_mode,
    current_function_modes,
    dynamo,
    num_graph_breaks,
    pop_function_mode,
    push_function_mode,
)
from samestep.errors import JobError, ModelError, did_you_mean, first_line
from samestep.examination.traced_model import TracedModel
from samestep.job_tables import CompileMode, RunTable
from samestep.models.spec import MaskSpec, ModelAnalysis, is_below
from samestep.program.program import Program
from samestep.program.step import StepSpec, repeats_in_graphs
from samestep.randomness import graph_draws
from samestep.randomness.masks import MaskSource
from samestep.runtime.axes import rank_crossings
from samestep.runtime.axes.context.slicing import Exchanging, GraphAttentions
from samestep.runtime.axes.graph_compiler import GraphCompiler, Structure, pluralise
from samestep.runtime.axes.precision import MixedProducts, RaiseIslands

InGraph = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_ISLAND = "samestep keeps it outside of the graph"
LOSS = "the loss"
"""What lines of a run call the functions of the loss that samestep has written."""
_CHANGES = 8
"""How often code may be compiled anew because what it is given has changed, before torch runs it uncompiled."""


class CompiledBlocks:
    """The blocks of this rank that run as graphs, and the results of their compilation."""

    def __init__(self, backend: str = "", mode: CompileMode = "default", *, in_graph: InGraph | None = None) -> None:
        self._as_in_graph: InGraph = in_graph or (lambda path, forward: forward)
        self.in_graph: Set[nn.Module] = set()
        """Modules whose calls a graph contains, so that a hook on them would not run."""
        self.num_blocks = 0
        """Blocks that run as graphs."""
        self.compiler = GraphCompiler(backend, mode)
        self.of_loss = GraphCompiler(backend, mode, part=LOSS)
        """Compiles functions of the loss."""
        self.of_loss.why_whole = "it is to be one graph"
        self.run: RunFunction = self._run if backend else run_uncompiled
        """Calls a function of the loss that samestep has written."""
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._num_reported: dict[GraphCompiler, tuple[int, int]] = {}
        self._breaks_before = num_graph_breaks() if backend else 0
        self._is_off = False
        self._num_islands = 0
        """Calls that have left a graph."""
        self._aside: list[TorchFunctionMode] = []
        """The function modes that were active when the innermost graph was entered."""

    @property
    def num_breaks(self) -> int:
        """The places where a graph ended in the middle of a block, counted once for all blocks that share it."""
        return max(num_graph_breaks() - self._breaks_before, 0) if self.compiler.name else 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run every block uncompiled, inside."""
        was_off, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = was_off

    def news(self) -> list[str]:
        """Return lines on graphs that were compiled, and on code that was left uncompiled, since the last call."""
        lines: list[str] = []
        for compiler in (self.compiler, self.of_loss):
            now = compiler.num_graphs, len(compiler.uncompiled)
            reported = self._num_reported.get(compiler, (0, 0))
            if now != reported:
                self._num_reported[compiler] = now
                lines += self._summary_of(compiler, *reported)
        return lines

    def summary(self) -> list[str]:
        """Return lines on all graphs, and on modules that were left uncompiled."""
        return self._summary_of(self.compiler) + self._summary_of(self.of_loss)

    def _summary_of(self, graph_compiler: GraphCompiler, graphs: int = 0, left: int = 0) -> list[str]:
        """Return lines on graphs, if there are more than `graphs`, and on code that was left uncompiled after the first `left`."""
        islands = f", with {pluralise(self.num_breaks, 'island')}" if graph_compiler is self.compiler else ""
        return graph_compiler.summary(graph_compiler.part or pluralise(self.num_blocks, "block"), islands, graphs, left)

    # -- a call ------------------------------------------------------------------------------------

    def compiled(self, path: str, module: nn.Module, structure: Structure) -> Callable[..., Any]:
        """Return a function that runs a module's forward as a graph, which modules of one structure may share."""
        forward, compiler = module.forward, self.compiler
        names = {id(inner): name for name, inner in module.named_modules()}
        graph = torch.compile(self._as_in_graph(path, forward), backend=compiler.backend_for(structure))

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_off or not torch.is_grad_enabled() or path in compiler.uncompiled:
                return forward(*args, **kwargs)
            with compiler.running_in(path, names):
                return self._call(compiler, path, (graph, forward), args, kwargs)

        return call

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the loss as a graph."""
        if self._is_off or LOSS in self.of_loss.uncompiled:
            return function(*args)
        graph = self._functions.get(function)
        if graph is None:
            _allow_more_graphs(_CHANGES)
            backend = self.of_loss.backend_for((function,))
            graph = self._functions[function] = torch.compile(function, backend=backend)
        with self.of_loss.running_in(LOSS, {}):
            return self._call(self.of_loss, LOSS, (graph, function), args, {})

    def _call(
        self,
        compiler: GraphCompiler,
        path: str,
        forms: tuple[Callable[..., Any], Callable[..., Any]],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call code in its two forms: as a graph, or as it is where a mode must see it or the compiler cannot take it."""
        graph, plainly = forms
        modes = current_function_modes()
        if any(isinstance(mode, MaskSource) and mode.sees_all for mode in modes):
            return plainly(*args, **kwargs)
        source = next((mode for mode in modes if isinstance(mode, MaskSource)), None)
        islands = self._num_islands
        try:
            with self._without(modes), graph_draws.running(path, source):
                return graph(*args, **kwargs)
        except dynamo().exc.TorchDynamoException as error:
            reason = f"it cannot be compiled: {first_line(getattr(error, 'inner_exception', error))}"
            if self._num_islands > islands:  # to run it once more would communicate twice
                raise ModelError("run-compile", f'{path or "the model"}: {reason}. Set run.compile = "none"') from None
            compiler.uncompiled[path] = reason
            return plainly(*args, **kwargs)

    def outside(self, module: nn.Module) -> None:
        """Let the calls of a module leave the graph that contains them, under the modes that the graph was entered with."""
        call = module._call_impl

        def island(*args: Any, **kwargs: Any) -> Any:
            self._num_islands += 1
            if not self._aside:
                return call(*args, **kwargs)
            with self._with_all():
                return call(*args, **kwargs)

        module._compiled_call_impl = torch.compiler.disable(island, reason=_ISLAND)

    @contextmanager
    def _without(self, modes: list[TorchFunctionMode]) -> Iterator[None]:
        """Suspend the modes that draw masks, which a graph would draw once for all steps, that exchange what attentions need, and that cast."""
        others = [mode for mode in modes if not isinstance(mode, MaskSource | Exchanging | MixedProducts)]
        if len(others) == len(modes):
            yield
            return
        outer, self._aside = self._aside, modes
        _replace_modes(others)
        try:
            yield
        finally:
            _replace_modes(modes)
            self._aside = outer

    @contextmanager
    def _with_all(self) -> Iterator[None]:
        """Put back the modes that a graph has suspended."""
        inner, outer = current_function_modes(), self._aside
        _replace_modes(outer)
        self._aside = []
        try:
            yield
        finally:
            _replace_modes(inner)
            self._aside = outer


def _replace_modes(modes: list[TorchFunctionMode]) -> None:
    while current_function_mode() is not None:
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


# -- which modules ---------------------------------------------------------------------------------


def compile_blocks(traced: TracedModel, program: Program, settings: RunTable, in_graph: InGraph) -> CompiledBlocks:
    """Replace the forward of each block of this rank by its compiled form, if the job asks for it.

    `in_graph` returns the forward of a module that a graph contains, by the module's path.

    Call it when the axes have put their hooks on the modules, and before hooks that report each module's forward: those
    must be left off the modules `in_graph`.

    Raises:
        JobError: torch has no such backend.
        ModelError: the model compiles a module of a block itself.
    """
    if settings.compile == "none":
        return CompiledBlocks()
    check(settings)
    _prepare_compiler()
    blocks = CompiledBlocks(settings.compile_backend, settings.compile_mode, in_graph=in_graph)
    model, step = traced.module, program.step
    blocks.compiler.drawing = {mask.owner for mask in step.model.masks}
    uncompiled = {mask.owner: reason for mask in step.model.masks if (reason := _kept_out(mask, model, program))}
    uncompiled |= dict.fromkeys(traced.analysis.experts.counts, "its shapes depend on values")
    uncompiled |= dict(_of_all_samples(step)) | dict(_of_other_slices(step))
    uncompiled |= dict.fromkeys(
        _keeping(model, traced.analysis), "its forward writes a tensor that a backward would read again"
    )
    uncompiled |= dict.fromkeys(_pending_head(program), "its logits are computed in chunks")
    units = {path for unit in program.units for path in unit.modules} | {
        host_module.path for host_module in program.host_modules
    }
    entry = _GraphEntry(blocks, uncompiled, units)
    differs = step.model.differentiates_at
    takes_gradients = (
        f"the forward at {differs} takes gradients itself, and a graph has none of its gradients" if differs else ""
    )
    blocks_of_rank = [*_paths_of_blocks(program)]
    for path in blocks_of_rank:
        block = model.get_submodule(path)
        _refuse_compiled(path, block)
        if reason := uncompiled.get(path) or takes_gradients:
            blocks.compiler.uncompiled[path] = reason
        elif block not in entry.seen:
            blocks.num_blocks += 1
            entry.enter(path, block)
    if repeats_in_graphs(step):
        blocks.compiler.why_whole = "it is recomputed"
        blocks.compiler.uncompiled |= dict(_broken_repeats(blocks_of_rank, entry.islands))
    blocks.in_graph = entry.in_graph - entry.seen
    _allow_more_graphs(blocks.num_blocks + _CHANGES)
    return blocks


@dataclass(frozen=True)
class _GraphEntry:
    """The modules that are brought into graphs, and the islands that are kept out of them."""

    blocks: CompiledBlocks
    uncompiled: Mapping[str, str]
    """Paths of modules without a graph, each with the reason."""
    units: Set[str]
    """Paths of modules whose weights are gathered or copied around their forward."""
    in_graph: set[nn.Module] = field(default_factory=set)
    seen: set[nn.Module] = field(default_factory=set)
    """Modules whose forward is the beginning of a graph."""
    islands: list[str] = field(default_factory=list)

    def enter(self, path: str, module: nn.Module) -> None:
        """Compile a module's forward, but for the islands in it."""
        self.seen.add(module)
        structure = (type(module), *self._inside(path, module))
        module.forward = self.blocks.compiled(path, module, structure)

    def _inside(self, path: str, module: nn.Module) -> Iterator[object]:
        """Add the modules in a module to its graph, or turn them into islands; yield the properties that distinguish
        them."""
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            _refuse_compiled(inner, child)
            forward = vars(child).get("forward")
            yield inner.count("."), name, type(child), getattr(forward, "__code__", forward)
            if inner in self.uncompiled or inner in self.units or _has_hooks(child):
                has_graph = inner not in self.uncompiled and any(True for _ in child.children())
                if has_graph and child not in self.seen:
                    self.enter(inner, child)
                self.blocks.outside(child)
                self.islands.append(inner)
                yield "island"
            else:
                self.in_graph.add(child)
                yield from self._inside(inner, child)


def _prepare_compiler() -> None:
    """Let graphs take the exchanges between ranks as operations, and leave attentions of documents out."""
    # The compiler asks each input for its gradient; torch warns of that once, where it is no weight's.
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    # It is said of each checkpoint with contexts; a graph that contains it removes operations in place first.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    torch.compiler.allow_in_graph(rank_crossings.cross)
    # Run by itself between two graphs, it would be one of the function that it was given first, and serve others.
    for mode in (GraphAttentions, RaiseIslands):
        dynamo().eval_frame.skip_code(mode.__torch_function__.__code__)
    fused.attend_each = torch.compiler.disable(attend_each, reason=_ISLAND)


def _of_all_samples(step: StepSpec) -> Iterator[tuple[str, str]]:
    """Yield each module whose code takes values of samples that other ranks or micro-batches have, with the reason why it has no graph.

    A batch norm has none either where a block is repeated: a repeated forward writes into copies of its buffers, for which torch would
    make another graph, and within one graph it would read a counter that the next micro-batch has written.
    """
    groups = step.sample_groups
    if step.layout.recompute != "none" or (groups is not None and not groups.is_one_forward):
        yield from ((path, "it takes statistics of samples (batch norm)") for path in step.model.batch_norm_owners)
    for layer in step.model.layers:
        yield from ((call.owner, "it takes values of all samples (samestep.batch_sum)") for call in layer.batch_values)


def _of_other_slices(step: StepSpec) -> Iterator[tuple[str, str]]:
    """Yield each block whose operations a rank of `cp` computes with tokens of others, one by one, with the reason why it has no graph."""
    for layer in step.model.layers if step.layout.cp > 1 else ():
        if layer.token_moves and layer.is_block:
            yield from ((path, "it needs tokens of neighbours under cp") for path in layer.modules)


def _broken_repeats(blocks: Sequence[str], islands: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each block that is recomputed and has an island, with the reason why it runs uncompiled: torch compiles none of its parts."""
    for path in blocks:
        inner = next((island for island in islands if is_below(island, path)), None)
        if inner is not None:
            yield path, f"it is recomputed as one graph, and {inner} stays outside of graphs. Use recompute=full"


def _pending_head(program: Program) -> Iterator[str]:
    """Yield the path of a head whose forward is replaced in each step (`pending_of`)."""
    head = program.step.model.layers[-1].head
    if head is not None and program.step.layout.loss_chunk is not None:
        yield head.owner


def _kept_out(mask: MaskSpec, model: nn.Module, program: Program) -> str:
    """Return why the module that draws this runs uncompiled; nothing where a graph can draw it.

    A graph keeps whole masks for its backward, and an attention's may be larger than all else that it keeps.
    """
    is_large = math.prod(mask.shape) * program.step.microbatch_samples > BLOCK_ELEMENTS
    if mask.is_numbers or (is_large and not isinstance(model.get_submodule(mask.owner), nn.Dropout)):
        return f"it draws {'a large mask of dropout' if is_large else mask.name}"
    return ""


def _allow_more_graphs(number: int) -> None:
    """Raise the limits of the compiler, which also count the compilations of earlier runs of this process; let it take numbers of a
    module, such as the probability of a dropout, as constants, also where another module has had others."""
    config = dynamo().config
    config.specialize_float = True
    # A norm's weights are others while its forward runs; in a block that is recomputed, too.
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    config.recompile_limit += number
    config.accumulated_recompile_limit += number


def _keeping(model: nn.Module, analysis: ModelAnalysis) -> Iterator[str]:
    """Yield the modules whose forward writes a tensor and reads it: a graph of the backward may compute from what stands there later."""
    owners = dict(model.named_modules())
    for state in analysis.states:
        if (
            state.is_read
            and state.owner in owners
            and isinstance(getattr(owners[state.owner], state.name, None), Tensor)
        ):
            yield state.owner


def _paths_of_blocks(program: Program) -> Iterator[str]:
    """Yield the paths of the modules that the blocks of this rank call."""
    layers = program.step.model.layers
    for chunk in program.chunks or (range(len(layers)),):
        yield from (path for index in chunk if layers[index].is_block for path in layers[index].called)


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


def _refuse_compiled(path: str, module: nn.Module) -> None:
    if module._compiled_call_impl is not None or isinstance(module, dynamo().OptimizedModule):
        raise ModelError(
            "run-compile",
            f"run.compile and {path or 'the module'}, which the model compiles itself. Use one of the two",
        )


def check(settings: RunTable) -> None:
    """Check that torch has the backend, if anything is compiled; a process that forks workers spares them the import.

    Raises:
        JobError: torch has no such backend.
    """
    if settings.compile == "none":
        return
    name, known = settings.compile_backend, torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise JobError(
            "run-compile",
            f"run.compile_backend = {name!r} is not a backend of torch.compile{did_you_mean(name, known)}; "
            f"{', '.join(known)} are",
        )
