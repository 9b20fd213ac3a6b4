"""Context parallelism on real modules (twin of `strategies/context.py`): sliced blocks, attention on whole sequences.

The model runs its own forward on the whole batch. A hook in front of each block cuts this rank's rows of tokens out of
its arguments (`independence/token_slices.py` has found which arguments have such rows), so embeddings, positions and masks
are made before that, of the whole sequence. Within a block a function mode replaces `scaled_dot_product_attention`, under
`exchange=ring` by that of `ring_attention.py`, else so:

    query, key, value   [B, A, T/N, D]  all_to_all ──►  [B, A/N, T, D]   attention with the whole mask
    output              [B, A, T/N, D]  ◄── all_to_all  [B, A/N, T, D]

Legend: B samples, A heads, T tokens, N ranks of `cp`, D features of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.attention import AttentionCall, DocumentMask, multi_head_attention
from samestep.errors import LayoutError
from samestep.independence.sliced_shapes import (
    Reshaping,
    fit_reshape,
    loss_of_slice,
    sequence_dim,
    slice_whole_operands,
    tokens_of,
)
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, is_below
from samestep.program.program import Program
from samestep.program.ring_visits import SlicePlacement
from samestep.randomness.masks import dropped_weights
from samestep.runtime.axes.context import whole_parts
from samestep.runtime.axes.context.block_exchanges import BlockExchanges
from samestep.runtime.axes.context.neighbours import NeighbourTokens
from samestep.runtime.axes.context.ring_attention import Ring
from samestep.runtime.axes.context.whole_parts import SharedRows, own_rows, rows_of
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.contexts import Anew
from samestep.runtime.processes.mesh import Mesh
from samestep.strategies.context import attention_ranks, placement_of
from samestep.tracing.checkpointed import Contexts
from samestep.trees import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten

_NOTHING: AbstractContextManager[None] = nullcontext()
Forward = Callable[..., Any]


class WholeSequences:
    """The counterpart of `Slicing` in a layout without `cp`: every rank has whole sequences."""

    degree, index, length, block, heads = 1, 0, 0, "", 1

    def of(self, samples: Any) -> AbstractContextManager[None]:
        """Return the context of a forward on whole sequences, which does nothing."""
        return _NOTHING

    def recompute_contexts(self) -> Contexts:
        """Return the contexts of a block's forward and of its recomputation, which do nothing."""
        return _NOTHING, _NOTHING

    def part(self, samples: Any) -> Any:
        """Return the samples that the loss compares with this rank's outputs: all tokens."""
        return samples

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return all tokens of a tensor."""
        return tensor

    def shape_of(self, shape: torch.Size) -> torch.Size:
        """Return the shape of hidden states between blocks."""
        return shape

    def in_graph(self, path: str, forward: Forward, *, is_repeated: bool = False) -> Forward:
        """Return the forward of a module as a graph contains it."""
        return forward


class Slicing:
    """This rank's slice of every sequence, active while a forward runs in `of`."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh) -> None:
        self._spec, self._layout = program.step.model, program.step.layout
        self._per_node = program.step.ranks_per_node
        self._ranks = attention_ranks(self._spec, self._layout, self._per_node)
        self.heads = self._ranks.heads if self._ranks.ring > 1 else 1
        """Ranks that exchange heads where others pass keys around a ring."""
        self._of_heads, self._of_ring = (mesh.groups[axis] for axis in (self._ranks.heads_axis, self._ranks.ring_axis))
        self._sliced_dims = dict(self._spec.slices)
        self._gathers = any(layer.gathered_parts for layer in self._spec.layers)
        self.degree, self.index = mesh.size("cp"), mesh.index("cp")
        self.group = mesh.groups["cp"]
        self.length = 0
        """Tokens of the whole sequence; 0 outside `of`."""
        self.block = ""
        """Name of the block that was entered last."""
        self.exchanged = 0
        """Number of attentions since then."""
        self._exchanges = {
            layer.name: BlockExchanges(layer.name, self._ranks, self._of_heads, self.index, self._ring_of)
            for layer in self._spec.layers
            if layer.is_block
        }
        self._cut = SharedRows()
        for layer in program.step.model.layers:
            for path in layer.modules if layer.is_block else ():
                block = model.get_submodule(path)
                begins = path == layer.modules[0]
                # Before a rank of tp takes its tokens of the slice.
                block.register_forward_pre_hook(
                    self._entered(layer, path, begins=begins), with_kwargs=True, prepend=True
                )
                if path == layer.modules[-1]:
                    block.register_forward_hook(self._left(layer))
        whole_parts.install(model, self._spec, self)
        self.moves = NeighbourTokens(model, self._spec, self, DTYPES[program.step.master_dtype])
        """The calls that need tokens of neighbours."""

    @contextmanager
    def of(self, samples: Any) -> Iterator[None]:
        """Return the context of a forward on sliced sequences; `samples` are whole.

        Collective over `cp`: every rank of the group runs the same attentions inside; if one does not, the others wait
        until the time limit.

        Raises:
            LayoutError: the degree does not divide the tokens of a sample, or the forward differs from the traced one.
        """
        length = tokens_of(samples).shape[1]
        if length % self.degree:
            raise LayoutError(
                "cp-indivisible", f"cp={self.degree} does not divide the {length} tokens of a sample. Use cp=1"
            )
        with self._slicing(length, ""):
            yield

    @contextmanager
    def _slicing(self, length: int, block: str, moves: Any = None) -> Iterator[None]:
        previous = self.length, self.block, self.exchanged, self._cut
        self.length, self.block, self.exchanged, self._cut = length, block, 0, SharedRows()
        try:
            with Exchanging(self), self.moves.receiving(), self.moves.at(moves):
                yield
        finally:
            self.length, self.block, self.exchanged, self._cut = previous

    def recompute_contexts(self) -> Contexts:
        """Return the contexts of a block's forward, and of its recomputation with the slice that is active now."""
        return _NOTHING, Anew(functools.partial(self._slicing, self.length, self.block, self.moves.place))

    def part(self, samples: Any) -> Any:
        """Return this rank's tokens of a batch, for the loss."""
        length = tokens_of(samples).shape[1]
        return tree_map_only(
            Tensor, lambda t: self._rows(t, 1, length) if t.dim() > 1 and t.shape[1] == length else t, samples
        )

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor [B, T, ...] that has a row for each token of the whole sequence."""
        return self._shared(tensor, 1)

    def rows_along(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a tensor that has a row for each token along a dimension."""
        return own_rows(tensor, self.placement(self.length).runs(self.index), dim)

    def suspend(self) -> tuple[int, str, int]:
        """Let the code that runs next have whole sequences; return the argument with which `resume` ends that."""
        state = self.length, self.block, self.exchanged
        self.length, self.block = 0, ""
        return state

    def resume(self, state: tuple[int, str, int]) -> None:
        """Let the code that runs next have slices again."""
        self.length, self.block, self.exchanged = state

    def placement(self, length: int) -> SlicePlacement:
        """Return which of so many tokens each rank holds."""
        return placement_of(self._spec, self._layout, length, self._per_node)

    def shape_of(self, shape: torch.Size) -> torch.Size:
        """Return the shape of sliced hidden states between blocks, given `shape` of whole ones."""
        return torch.Size([shape[0], shape[1] // self.degree, *shape[2:]]) if self.length else shape

    def _rows(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        return rows_of(tensor, self.placement(length).runs(self.index), dim)

    def _shared(self, tensor: Tensor, dim: int) -> Tensor:
        return self._cut.of(tensor, self.placement(self.length).runs(self.index), dim)

    # -- around blocks -----------------------------------------------------------------------------

    def _entered(self, layer: LayerSpec, path: str, *, begins: bool) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.length:
                return None
            if begins or self.block != layer.name:
                self.block, self.exchanged = layer.name, 0
            leaves, tree = tree_flatten_with_path((args, kwargs))
            return tree_unflatten(
                [
                    self._sliced(keystr(argument), leaf) if isinstance(leaf, Tensor) else leaf
                    for argument, leaf in leaves
                ],
                tree,
            )

        return hook

    def _sliced(self, argument: str, leaf: Tensor) -> Tensor:
        dim = self._sliced_dims.get(argument)
        if isinstance(leaf, DocumentMask):
            return leaf  # attention is given it with whole sequences, whether the example had documents or not
        if dim is None:
            if sequence_dim(leaf.shape, self.length) is not None:
                raise LayoutError(
                    "cp-forward-differs",
                    f"{self.block} is given {argument} of shape {list(leaf.shape)}, which the traced forward did not give "
                    "it: whether it has a row for each token is not known. Use cp=1",
                )
            return leaf
        if dim < 0 or leaf.shape[dim] != self.length:
            return leaf
        part = self._shared(leaf, dim)
        if self._gathers and not leaf.requires_grad:
            return whole_parts.with_whole(part, leaf)
        return part

    def _left(self, layer: LayerSpec) -> Callable[..., None]:
        expected = layer.num_sliced_attentions

        def hook(*_: Any) -> None:
            if self.length and self.exchanged != expected:
                raise LayoutError(
                    "cp-forward-differs",
                    f"{layer.name} attends {self.exchanged} times by scaled_dot_product_attention, and {expected} times in "
                    "the traced forward. Use cp=1",
                )

        return hook

    # -- around attention --------------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute attention for this rank's heads or queries over all tokens; query, key and value are [B, A, T/N, D].

        Collective over `cp`, see [Note: collective calls].
        """
        self.exchanged += 1
        exchanges, ranks = self._exchanges[self.block], self._ranks
        if ranks.heads > 1:
            query, key, value, mask = exchanges.by_heads(*call[:4])
            call = call._replace(query=query, key=key, value=value, attn_mask=mask)
        output = call.attend(
            dropped_weights(call, None, self.length),
            across=exchanges.ring(self.length // ranks.ring) if ranks.ring > 1 else None,
        )
        return output if ranks.heads == 1 else exchanges.output(output)

    def _ring_of(self, tokens: int, owner: str) -> Ring:
        """Return this rank's place in a ring of which each rank has so many tokens."""
        placement = self.placement(tokens * self._ranks.ring).ring
        return Ring(placement, self.index // self._ranks.heads, self._of_ring, owner)

    # -- in graphs ---------------------------------------------------------------------------------

    def in_graph(self, path: str, forward: Forward, *, is_repeated: bool = False) -> Forward:
        """Return the forward of a module as a graph contains it: its attentions exchange what they do outside of one.

        A forward that a graph repeats does so by itself.
        """
        layer = next(
            layer.name
            for layer in self._spec.layers
            if layer.is_block and any(is_below(path, module) for module in layer.modules)
        )
        mode = GraphAttentions(self, self._exchanges[layer])

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_repeated and torch.compiler.is_dynamo_compiling():
                return forward(*args, **kwargs)
            with mode:
                return forward(*args, **kwargs)

        return call

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
        """Return the result of a function that code on slices calls under a mode."""
        if not self.block:
            return func(*args, **kwargs)
        moves = self.moves
        if moves.are_here and (moved := moves.intercept(func, args, kwargs)) is not NotImplemented:
            return moved
        if func is F.scaled_dot_product_attention:
            return self.attend(AttentionCall(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            return multi_head_attention(mode, *args, **kwargs)
        size = self.length // self.degree
        loss = loss_of_slice(func, args, kwargs, self.length, size, self.rows_of)
        if loss is not None:
            return loss
        args = fit_reshape(func, args, self.length, size)
        args = slice_whole_operands(func, args, self.length, size, self.rows_of)
        if moves.sources is not None:
            result = func(*args, **kwargs)
            moves.sources.note(result, args, kwargs)
            return result
        return func(*args, **kwargs)


def slicing_of(model: nn.Module, program: Program, mesh: Mesh) -> Slicing | WholeSequences:
    """Return the slice of every sequence that this rank runs, with hooks on the model's blocks where it is a part."""
    return Slicing(model, program, mesh) if mesh.size("cp") > 1 else WholeSequences()


@contextmanager
def on_meta(module: nn.Module, model: ModelSpec, samples: Any, degree: int) -> Iterator[None]:
    """Give the blocks of a module on the meta device the slices of one rank of `degree` in a forward inside.

    Attention is not exchanged: its output has the shape of the slice that its queries have.
    """
    if degree == 1:
        yield
        return
    length = tokens_of(samples).shape[1]
    size, dims, begun = length // degree, dict(model.slices), []

    def cut(argument: str, leaf: Any) -> Any:
        dim = dims.get(argument, -1) if isinstance(leaf, Tensor) else -1
        return leaf.narrow(dim, 0, size).clone() if dim >= 0 and leaf.shape[dim] == length else leaf

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        begun.append(True)
        leaves, tree = tree_flatten_with_path((args, kwargs))
        return tree_unflatten([cut(keystr(argument), leaf) for argument, leaf in leaves], tree)

    with ExitStack() as stack:
        for path in (path for layer in model.layers if layer.is_block for path in layer.modules):
            block = module.get_submodule(path)
            stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
        stack.enter_context(Reshaping(length, size, lambda: bool(begun)))
        yield


class Exchanging(TorchFunctionMode):
    """A function mode in which a sliced block's attention sees whole sequences."""

    def __init__(self, slicing: Slicing) -> None:
        super().__init__()
        self.slicing = slicing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.slicing.intercept(func, args, kwargs or {}, self)


class GraphAttentions(Exchanging):
    """The same in a graph of a compiler, of the attentions of one block; what it cannot trace leaves the graph for a call."""

    def __init__(self, slicing: Slicing, exchanges: BlockExchanges) -> None:
        super().__init__(slicing)
        self._exchanges = exchanges
        self._outside = torch.compiler.disable(self._intercepted, reason="it has no form that a graph computes")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():  # between two graphs
            return self._outside(func, args, kwargs)
        length = self.slicing.length
        if func is Tensor.unflatten:  # of which a compiler cannot look into the method under a mode
            return torch.unflatten(*args, **kwargs)
        if not length:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            output = self._exchanges.attend_in_graph(*args, **kwargs)
            if output is not None:
                self.slicing.exchanged += 1
                return output
        size = length // self.slicing.degree
        if func in _ATTENTIONS or _has_both(length, size, args):
            return self._outside(func, args, kwargs)
        return func(*fit_reshape(func, args, length, size), **kwargs)

    def _intercepted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.slicing.intercept(func, args, kwargs, self)


_ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def _has_both(length: int, size: int, args: Sequence[Any]) -> bool:
    """Return whether an operation is given all tokens and those of a slice."""
    operands = args[0] if len(args) and isinstance(args[0], list | tuple) else args
    rows = [operand.shape[1] for operand in operands if isinstance(operand, Tensor) and operand.dim() > 1]
    return length in rows and size in rows
