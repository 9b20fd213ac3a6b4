"""Activation checkpointing of blocks, inside their unit (twin of `strategies/recompute.py`).

A block's `forward` is replaced, its hooks are not: FSDP2 gathers the unit's weights before and frees them after, so the
recomputed forward finds them in place. Non-reentrant; no random state is kept, since our dropout has none.

A model may call `torch.utils.checkpoint` itself, which would repeat its forward outside of the modes that compute
dropout masks, raise float32 islands and slice sequences. So all calls of it within a step, by the model or by this
file, get contexts that enter these modes (`in_our_modes`). Reentrant calls run as non-reentrant ones: the gradients are
the same, and reentrant ones know no contexts. Where a model checkpoints whole blocks, the block's hooks would run twice
(they cut, gather and receive), so these calls run plainly, and the layout's recompute is taken as "full".

A graph of `torch.compile` that contains a block's forward and backward decides for each operation whether it is repeated.

A forward with side effects would not be the same the second time: buffers that it writes (running statistics) are
written once, and the recomputation writes into copies; dicts and lists among the arguments are given again as they were; a block
that writes into a tensor that it is given is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from samestep.building.torch_seams import Replaced, graph_is_made, is_transformed, transforms_beside_hooks
from samestep.errors import ModelError
from samestep.layout import Layout
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelAnalysis, is_below
from samestep.program.program import Program
from samestep.program.repeated_products import KEEPS_PRODUCTS, KeptProducts, kept_products
from samestep.randomness import graph_draws  # noqa: F401 (it defines the operation that draws masks in graphs)
from samestep.runtime.axes import precision, rank_crossings  # noqa: F401 (it defines those that cross ranks)
from samestep.runtime.axes.host_inputs import HostInputs, Repeatable
from samestep.runtime.axes.step_part import nest_pairs
from samestep.runtime.contexts import Anew
from samestep.runtime.recording import marks
from samestep.state.writes import Marks, marks_of
from samestep.tracing.checkpointed import Begin, ContextFn, Contexts, replaced_checkpoint, without_reentry
from samestep.trees import map_tensors, tensors_in, tree_leaves

"""What `checkpoint` calls: since torch 2.14 the first one, by keywords; the second one calls it for others."""
TAKEN = "the model checkpoints its own blocks, which is taken as recompute=full"
"""The remark where `layout_for` returns another layout."""


@dataclass(frozen=True, slots=True)
class _Around:
    """The contexts of a checkpoint that this file creates, not the model."""

    contexts: ContextFn | None

    def __call__(self) -> Contexts:
        return self.contexts() if self.contexts else (nullcontext(), nullcontext())


_COUNTED = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._grouped_mm.default,
    }
)
"""Operations whose results are kept by their number in the forward (`program/repeated_products.py`): they cost FLOPs."""
_BATCHED = frozenset({torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})
"""Products whose results recompute=selective keeps, and recompute=alternate does not."""
_ATTENTIONS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Operations whose results both keep."""
_KEPT_IN_GRAPHS = [
    getattr(torch.ops.samestep, name).default
    for name in ("drop_mask", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
]
"""Operations whose results a graph keeps: what other ranks send, and masks, which a backward could not ask for."""


def _drop_in_graph() -> Contexts:
    return create_selective_checkpoint_contexts(_KEPT_IN_GRAPHS)


def _keep_products(others: frozenset[Any], every: int, repeated: int, total: int, keeps_last: bool) -> Contexts:
    """Return contexts of a forward and its recomputation, of which it takes the results of `others` and of products that are kept.

    A compiler reads arguments of a context as constants. They are the numbers of `KeptProducts`, not the record, which torch 2.11
    makes anew of what stands for its fields in the compiler.
    """
    products = KeptProducts(every, repeated, total, keeps_last)
    runs: dict[bool, Iterator[int]] = {False: itertools.count(), True: itertools.count()}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_counted = operation in _COUNTED
        is_kept = products.keeps(next(runs[context.is_recompute])) if is_counted else operation in others
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def _keeping(products: KeptProducts, others: frozenset[Any]) -> ContextFn:
    """Return what makes the contexts of blocks that keep the same: one function, so that equal blocks share a compiler's graph."""
    return functools.partial(_keep_products, others, *products)


def layout_for(layout: Layout, analysis: ModelAnalysis) -> Layout:
    """Return the layout that runs: with recompute=full where the model checkpoints its blocks itself."""
    is_around_blocks = analysis.spec.checkpoints == "plain"
    return replace(layout, recompute="full") if is_around_blocks and layout.recompute == "none" else layout


def apply(
    model: nn.Module,
    program: Program,
    device: torch.device,
    in_graph: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> None:
    """Make each block of `model` recompute its forward, as the layout says; in a graph the forward is what `in_graph` returns for a path."""
    recompute = program.step.layout.recompute
    if recompute == "none":
        return
    others = _ATTENTIONS | (_BATCHED if recompute == "selective" else frozenset())
    raises = program.step.compute_dtype == "float64"
    on_host = HostInputs(program, device) if recompute == "offload" else None
    for index, layer in enumerate(program.step.model.layers):
        if layer.is_block:
            for path in layer.modules:
                block = model.get_submodule(path)
                context_fn, contexts = None, _drop_in_graph
                if recompute in KEEPS_PRODUCTS and not _hides_operations(path, block, program):
                    products = kept_products(program.step, layer, _products_of(layer, path))
                    context_fn = _keeping(products, others)
                    contexts = _keeping(products, others | frozenset(_KEPT_IN_GRAPHS))
                around = _both(context_fn, _both(_buffers_written_once(block), _weights_of_the_forward(block)))
                around = _both(around, _marked(layer.name))
                moved = on_host.around(index, path) if on_host else None
                traced = precision.with_islands_raised(block.forward) if raises else block.forward
                traced = in_graph(path, traced) if in_graph else traced
                block.forward = _recompute_forward(path, (block.forward, traced), around, contexts, moved)


def _products_of(layer: LayerSpec, path: str) -> tuple[Product, ...]:
    """Return the products of a layer that one of its modules runs."""
    return layer.products if len(layer.modules) == 1 else tuple(p for p in layer.products if is_below(p.owner, path))


# -- every call of torch.utils.checkpoint ----------------------------------------------------------


def in_our_modes(contexts: ContextFn, *, plainly: bool, detached: bool) -> Replaced:
    """Return a context, to be entered in each step, that gives every checkpointed forward inside the contexts of a forward and of
    its recomputation.

    With `plainly`, the model's checkpointed code keeps all that its backward needs, as if it were not checkpointed.
    With `detached`, a reentrant call whose inputs take no gradient trains nothing. Where the trace has shown no such call,
    there is none: an input that takes no gradient is then a pipeline's stand-in.
    """

    def generator(begin: Begin, context_fn: ContextFn) -> Iterator[None]:
        if graph_is_made():
            return begin(context_fn)
        return (
            _plain()
            if plainly and not isinstance(context_fn, _Around)
            else begin(_both(None if context_fn is torch_checkpoint.noop_context_fn else context_fn, contexts))
        )

    reentrant = functools.partial(without_reentry, detaches=detached)
    return Replaced(*replaced_checkpoint(generator, reentrant).attributes, *transforms_beside_hooks().attributes)


def _plain() -> Iterator[None]:
    yield


def _hides_operations(path: str, block: nn.Module, program: Program) -> bool:
    """Return whether recompute must repeat all of the block, because results cannot be kept one by one.

    Recurrent layers write into the results of their products afterwards, which torch does not notice: the kept result
    would be wrong. A unit within a block is gathered in its first forward alone, so the two forwards would differ.
    """
    recurrent = any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in block.modules())
    return recurrent or any(module.startswith(f"{path}.") for unit in program.units for module in unit.modules)


def _recompute_forward(
    path: str,
    forms: tuple[Callable[..., Any], Callable[..., Any]],
    around: ContextFn | None,
    in_graph: ContextFn,
    moved: Repeatable | None,
) -> Callable[..., Any]:
    """Return a forward that is repeated before its backward, by torch or by the graph of a compiler that contains both, which has a
    form of its own."""
    made_here = _Around(around)
    forward, traced = forms

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(traced, *args, use_reentrant=False, context_fn=in_graph, **kwargs)
        if is_transformed():
            raise ModelError(
                "recompute-unsupported",
                f"{path} runs inside of a transform of torch.func (vmap, grad), where its forward cannot be repeated. Use "
                "recompute=none",
            )
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marks = marks_of(tensors)
        repeated = _with_arguments_as_given(forward, args, kwargs)
        if moved is not None:
            repeated, args, kwargs = moved(repeated, args, kwargs), (), {}
        output = checkpoint(
            repeated, *args, use_reentrant=False, preserve_rng_state=False, context_fn=made_here, **kwargs
        )
        if marks_of(tensors).differ(marks):
            raise ModelError(
                "recompute-unsupported",
                f"{path} writes into its own input, which the recomputation of its forward needs. Use recompute=none, "
                "or a forward that writes nowhere (x = x + y for x += y)",
            )
        return output

    return call


def _with_arguments_as_given(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a forward whose recomputations get dicts, lists and objects with what they held in front of the first run.

    A block may write what later blocks read into them (keys and values that layers share); repeated, it would find it there.
    """
    twins = {id(value): _twin(value) for value in (*args, *kwargs.values()) if _can_be_written(value)}
    if not twins:
        return forward
    runs = itertools.count()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not next(runs):
            return forward(*args, **kwargs)
        anew = [_twin(twins[id(value)]) if id(value) in twins else value for value in args]
        named = {name: _twin(twins[id(value)]) if id(value) in twins else value for name, value in kwargs.items()}
        return forward(*anew, **named)

    return run


def _can_be_written(argument: Any) -> bool:
    """Return whether an argument is a dict, a list, or an object of a user's class that holds tensors."""
    objects = [leaf for leaf in tree_leaves(argument) if not isinstance(leaf, Tensor)]
    return type(argument) in (dict, list) or bool(tensors_in(objects))


def _twin(argument: Any) -> Any:
    """Return other containers and objects with the same tensors."""
    return map_tensors(argument, lambda tensor: tensor)


def _buffers_written_once(block: nn.Module) -> ContextFn | None:
    """Return contexts of a forward and its recomputation, which writes into copies of the same buffers."""
    owners = [module for module in block.modules() if module._buffers]
    if not owners:
        return None

    def present(module: nn.Module) -> Marks:
        return marks_of(buffer for buffer in module._buffers.values() if buffer is not None)

    def pair() -> Contexts:
        written: list[nn.Module] = []

        @contextmanager
        def first() -> Iterator[None]:
            values = [present(module) for module in owners]
            yield
            # All buffers of a module: batch norm's statistics change without a version, its batch counter with one.
            written.extend(m for m, seen in zip(owners, values, strict=True) if present(m).differ(seen))

        @contextmanager
        def repeated() -> Iterator[None]:
            of_modules = [(module, dict(module._buffers)) for module in written]
            for module, buffers in of_modules:
                module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
            try:
                yield
            finally:
                for module, buffers in of_modules:
                    module._buffers.update(buffers)

        return first(), Anew(repeated)

    return pair


def _marked(layer: str) -> ContextFn:
    """Return contexts of a forward and its recomputation, which a recorder hears."""
    return lambda: (nullcontext(), Anew(lambda: marks.region(f"recompute:{layer}")))


def _weights_of_the_forward(block: nn.Module) -> ContextFn:
    """Return contexts of a forward and its recomputation, which uses the weights that the modules had in the forward.

    `torch.func.functional_call` around the block gives them others, which are gone when the backward comes.
    """
    owners = [module for module in block.modules() if module._parameters]

    def pair() -> Contexts:
        at_first = [dict(module._parameters) for module in owners]

        @contextmanager
        def repeated() -> Iterator[None]:
            now = [_replaced_weights_of(module, weights) for module, weights in zip(owners, at_first, strict=True)]
            for module, weights, others in zip(owners, at_first, now, strict=True):
                module._parameters.update({name: weights[name] for name in others})
            try:
                yield
            finally:
                for module, others in zip(owners, now, strict=True):
                    module._parameters.update(others)

        return nullcontext(), Anew(repeated)

    return pair


def _replaced_weights_of(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a module in whose place the forward had others.

    A weight of which this rank holds a shard is gathered by the module's own hooks, before it computes.
    """
    now = module._parameters
    return {
        name: now[name]
        for name, weight in weights.items()
        if name in now
        and now[name] is not weight
        and not isinstance(weight, DTensor)
        and not isinstance(now[name], DTensor)
    }


def _both(first: ContextFn | None, second: ContextFn | None) -> ContextFn | None:
    """Return a function that nests two pairs of contexts."""
    if first is None or second is None:
        return first or second

    return lambda: nest_pairs(second(), first())


def nest_each(contexts: Sequence[ContextFn]) -> Contexts:
    """Return the contexts of a forward and of its recomputation: those of each function, inside those of the one before."""
    return nest_pairs(*(make() for make in contexts))
