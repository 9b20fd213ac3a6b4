"""Running a model's forward on the meta device under a `ForwardTracer`, which records it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samestep.building.dispatch_mode import uncompiled
from samestep.building.model import call_model, why_unfit
from samestep.building.surface import process_randomness
from samestep.building.transforms import transforms_beside_hooks
from samestep.errors import ModelError, SamestepError, line_of
from samestep.models.spec import is_below
from samestep.tracing import snapshot
from samestep.tracing.custom_functions import reported
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.fused_attention import fused_attention
from samestep.tracing.meta_autocast import autocast_on_meta
from samestep.tracing.meta_tensors import (
    KnownConstants,
    NeedsValuesError,
    tensors_in,
)

_SEED = 0
"""Of what code draws in a traced forward: the same on all ranks."""


def outputs_on_meta(module: nn.Module, sample: Any, num_samples: int, value_of: ValueOf | None, keeps_all: bool) -> Any:
    """Run the forward on the meta device, on copies of a sample, and return the outputs and the batch; nothing is recorded.

    `keeps_all` follows the values of all tensors, for models whose code looks at them.

    Raises:
        NeedsValuesError: it looks at values that are not known.
    """
    watch = ForwardTracer(module, lambda block: None, {}, keeps_all=keeps_all)
    batch = watch.copies_of(sample, num_samples)
    with (
        process_randomness(_SEED),
        uncompiled(),
        autocast_on_meta(),
        watch.knowing(module, value_of),
        fused_attention(watch),
        torch.enable_grad(),
        watch,
        KnownConstants(watch.read),
    ):
        return call_model(module, batch), batch


def watch_forward(
    module: nn.Module,
    sample: Any,
    num_samples: int,
    name: str,
    containers: tuple[str, ...],
    watch: ForwardTracer,
    value_of: ValueOf | None,
) -> Any:
    """Run the forward under `watch`, on `num_samples` copies of the sample, and return its outputs.

    Raises:
        ModelError: the forward fails.
        NeedsValuesError: it looks at values that `watch` does not know.
    """
    batch = watch.copies_of(sample, num_samples)
    for key, held in batch.items() if isinstance(batch, Mapping) else [("", batch)]:
        tensors = [tensor for tensor in tree_leaves(held) if isinstance(tensor, Tensor)]
        watch.given_by |= {watch.key(tensor): "positions" if key == "position_ids" else "tokens" for tensor in tensors}
    try:
        with ExitStack() as stack:
            stack.enter_context(process_randomness(_SEED))
            stack.enter_context(uncompiled())
            stack.enter_context(autocast_on_meta())
            stack.enter_context(watch.knowing(module, value_of))
            stack.enter_context(_hooks(module, containers, watch))
            stack.enter_context(fused_attention(watch))
            stack.enter_context(reported(watch.applied, watch.hooked))
            stack.enter_context(watch.flow_recorder.over(module, functools.partial(is_outside, containers=containers)))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.save, _given_back))
            stack.enter_context(transforms_beside_hooks())
            stack.enter_context(watch)
            stack.enter_context(KnownConstants(watch.read))
            outputs = call_model(module, watch.given(batch))
    except (SamestepError, NeedsValuesError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        unfit = f"; {why}" if (why := why_unfit(module, batch)) else ""
        raise ModelError(
            f"{name} cannot be traced: {watch.reached} fails: {type(error).__name__}: {reason}{line_of(error)}{unfit}"
        ) from error
    watch.returned = {watch.key(tensor) for tensor in tensors_in(outputs)}
    watch.flow = watch.flow_recorder.finish(outputs)
    return outputs


def answer_alike(
    watches: Iterable[ForwardTracer],
    module: nn.Module,
    sample: Any,
    containers: tuple[str, ...],
    value_of: ValueOf | None,
) -> None:
    """Let code that looks at values be answered in forwards to come as in one of a sample, whose values are known.

    Raises:
        ModelError: the forward fails.
        NeedsValuesError: it looks at values that are not known.
    """
    found = ForwardTracer(module, lambda block: None, {}, keeps_all=True)
    found.has_backward = False
    with snapshot.preserved(module):
        watch_forward(module, sample, 1, "the model", containers, found, value_of)
    for watch in watches:
        watch.looks.known = deque(found.looks.answers)


def _given_back(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a watch that goes back"
    return tensor


@contextmanager
def _hooks(module: nn.Module, containers: tuple[str, ...], watch: ForwardTracer) -> Iterator[None]:
    """Report every module that is entered and left to `watch`."""
    with ExitStack() as hooks:
        for path, part in module.named_modules():
            outside = is_outside(path, containers)
            enter = functools.partial(
                lambda path, outside, part, *given: watch.enter(path, part, outside, given), path, outside
            )
            leave = functools.partial(
                lambda outside, part, given, output: watch.leave(outside, part, given, output), outside
            )
            hooks.enter_context(part.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(leave))
        yield


def is_outside(path: str, containers: tuple[str, ...]) -> bool:
    """Return whether a module is the model itself, a container of blocks, or holds such a container."""
    return not path or any(is_below(container, path) for container in containers)
