"""Activation checkpointing of blocks, inside their unit (twin of `strategies/recompute.py`).

A block's `forward` is replaced, its hooks are not: FSDP2 gathers the unit's weights before and frees them after, so the
repeated forward finds them in place. Non-reentrant; no random state is kept, since our dropout has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samestep.program import Program

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
"""recompute=selective keeps the results of these: what costs FLOPs."""


def apply(model: nn.Module, program: Program, contexts: ContextFn | None = None) -> None:
    """Make each block of `model` recompute its forward, as the layout says.

    `contexts` returns what must surround a forward and its repetition, so that both draw the same dropout masks.
    """
    recompute = program.step.layout.recompute
    if recompute == "none":
        return
    kept: ContextFn | None = None
    if recompute == "selective":
        kept = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    around = _both(kept, contexts)
    for layer in program.step.model.layers:
        if layer.is_block:
            for path in layer.modules:
                block = model.get_submodule(path)
                block.forward = _recomputed(block.forward, around)


def _recomputed(forward: Callable[..., Any], around: ContextFn | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": around} if around else {}

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return call


def _both(first: ContextFn | None, second: ContextFn | None) -> ContextFn | None:
    """Nest two pairs of contexts."""
    if first is None or second is None:
        return first or second

    def pair() -> Contexts:
        outer, inner = second(), first()
        return nested(outer[0], inner[0]), nested(outer[1], inner[1])

    return pair


@contextmanager
def nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter contexts one inside the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
