"""Activation checkpointing of blocks, inside their unit (twin of `strategies/recompute.py`).

A block's `forward` is replaced, its hooks are not: FSDP2 gathers the unit's weights before and frees them after, so the
recomputed forward finds them in place. Non-reentrant; no random state is kept, since our dropout has none.

A forward with side effects would not be the same the second time: buffers that it writes (running statistics) are
written once, and the recomputation writes into copies; a block that writes into its own input is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samestep.errors import ModelError
from samestep.program.program import Program

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]

_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operations whose results recompute=selective keeps, because they cost FLOPs."""


def apply(model: nn.Module, program: Program, contexts: ContextFn | None = None) -> None:
    """Make each block of `model` recompute its forward, as the layout says.

    `contexts` returns the contexts of a forward and of its recomputation, so that both draw the same dropout masks.
    """
    recompute = program.step.layout.recompute
    if recompute == "none":
        return
    keeping = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    for layer in program.step.model.layers:
        if layer.is_block:
            for path in layer.modules:
                block = model.get_submodule(path)
                kept = keeping if recompute == "selective" and not _hides_operations(path, block, program) else None
                around = _both(_both(kept, contexts), _buffers_written_once(block))
                block.forward = _recomputed(path, block.forward, around)


def _hides_operations(path: str, block: nn.Module, program: Program) -> bool:
    """Return whether recompute=selective must recompute the block whole, because results cannot be kept one by one.

    Recurrent layers write into the results of their products afterwards, which torch does not notice: the kept result
    would be wrong. A unit within a block is gathered in its first forward alone, so the two forwards would differ.
    """
    recurrent = any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in block.modules())
    return recurrent or any(module.startswith(f"{path}.") for unit in program.units for module in unit.modules)


def _recomputed(path: str, forward: Callable[..., Any], around: ContextFn | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": around} if around else {}

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = [(leaf, leaf._version) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        output = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)
        if any(tensor._version != version for tensor, version in given):
            raise ModelError(
                f"{path} writes into its own input, which the recomputation of its forward needs: recompute=none works, "
                "and so does a forward that writes nowhere (x = x + y for x += y)"
            )
        return output

    return call


def _buffers_written_once(block: nn.Module) -> ContextFn | None:
    """Return contexts of a forward and its recomputation, which writes into copies of the same buffers."""
    owners = [module for module in block.modules() if module._buffers]
    if not owners:
        return None

    def versions(module: nn.Module) -> list[int]:
        return [buffer._version for buffer in module._buffers.values() if buffer is not None]

    def pair() -> Contexts:
        written: list[nn.Module] = []

        @contextmanager
        def first() -> Iterator[None]:
            before = [versions(module) for module in owners]
            yield
            # All buffers of a module: batch norm's statistics change without a version, its batch counter with one.
            written.extend(m for m, seen in zip(owners, before, strict=True) if versions(m) != seen)

        @contextmanager
        def repeated() -> Iterator[None]:
            kept = [(module, dict(module._buffers)) for module in written]
            for module, buffers in kept:
                module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
            try:
                yield
            finally:
                for module, buffers in kept:
                    module._buffers.update(buffers)

        return first(), repeated()

    return pair


def _both(first: ContextFn | None, second: ContextFn | None) -> ContextFn | None:
    """Return a function that nests two pairs of contexts."""
    if first is None or second is None:
        return first or second

    def pair() -> Contexts:
        outer, inner = second(), first()
        return nested(outer[0], inner[0]), nested(outer[1], inner[1])

    return pair


@contextmanager
def nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Return a context that enters the given ones, each inside the one before."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
