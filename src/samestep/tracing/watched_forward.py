"""A model's forward on the meta device under a `ForwardTracer`, which records it.

Attention is traced as the fused kernels compute it, without a matrix of scores: they keep queries, keys, values, output, one
log-sum-exp a row and the given mask. Packed documents have no mask, and pairs within a document alone are computed
(`building/attention/`). On the meta device torch itself runs plain products instead.

Torch has no autocast on the meta device, and code enters that of the device that its tensors are on:

    with torch.autocast(x.device.type, enabled=False): ...

In a trace such code enters the autocast of the host, which casts no tensor of the meta device. The first step finds the dtypes that
the forward really has.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode

from samestep.building.attention import AttentionCall, DocumentMask
from samestep.building.attention.fused import lengths_of
from samestep.building.model import call_model, why_unfit
from samestep.building.over_samples import Keeping, within
from samestep.building.surface import process_randomness
from samestep.building.torch_seams import (
    Replaced,
    disable_compiler,
    disable_current_modes,
    distributions_unchecked,
    num_dispatch_modes,
    transforms_beside_hooks,
)
from samestep.errors import ModelError, SamestepError, line_of
from samestep.models.layer_parts import Product
from samestep.models.spec import is_below
from samestep.state import snapshot
from samestep.tracing.arranged_layers import containers_of
from samestep.tracing.checkpointed import Begin, ContextFn, replaced_checkpoint
from samestep.tracing.custom_functions import report_functions, report_hooks
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.meta_tensors import NeedsValuesError
from samestep.trees import tensors_in


class _Attention(torch.autograd.Function):
    """The tensors that the fused kernels of attention make and keep."""

    @staticmethod
    def forward(
        ctx: Any,
        watch: ForwardTracer,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        # Queries come as [..., head, token, features]; the kernels write the heads of a token side by side.
        *batch, num_heads, length = query.shape[:-1] if query.dim() > 3 else (*query.shape[:-2], 1, query.shape[-2])
        output = query.new_empty((*batch, length, num_heads, value.shape[-1])).transpose(-3, -2)
        output = output if query.dim() > 3 else output.squeeze(-3)
        log_sum_exp = query.new_empty(query.shape[:-1])
        packed = isinstance(mask, DocumentMask) and query.dim() == 4
        # A boolean mask is converted to a floating one, at every call.
        masks = () if mask is None or packed else (query.new_empty(mask.shape) if mask.dtype is torch.bool else mask,)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, *masks)
        products = query.shape[:-1].numel() * key.shape[-2]
        flops = 2 * products * (query.shape[-1] + value.shape[-1])
        product = Product(
            rows=query.shape[-2], inner=query.shape[-1] + value.shape[-1], columns=key.shape[-2],
            count=query.shape[:-2].numel(), factors="causal" if call.is_causal or packed else "attention",
            within=1.0 if call.dropout_p else _within_documents(watch, mask),
            owner=watch.modules.innermost, cut="count" if watch.key(query) in watch.cut.storages else "",
        )  # fmt: skip
        tensors = [query, key, value, *([] if mask is None else [mask])]
        watch.record(tensors, [output, log_sum_exp], flops, product)
        watch.exchange(query, key, value, output)
        watch.events.pairs |= {watch.key(tensor) for tensor in masks}
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        results = [torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]]
        for read in (*ctx.saved_tensors, *gradients):
            read.detach()
        return None, None, *results, None


def _within_documents(watch: ForwardTracer, mask: Tensor | None) -> float:
    """Return the part of all pairs of tokens whose tokens share a document; 1 where it is not known, or there are none."""
    if not isinstance(mask, DocumentMask) or not watch.values.knows(documents := mask.documents):
        return 1.0
    with disable_current_modes():
        pairs = sum(length**2 for of_sample in lengths_of(watch.values.of(documents)) for length in of_sample)
    return pairs / (documents.shape[0] * documents.shape[1] ** 2)


def _known_mask(watch: ForwardTracer, mask: Tensor | None) -> Tensor | None:
    """Return the values of a mask."""
    if not isinstance(mask, DocumentMask):
        return None if mask is None else watch.values.of(mask)
    documents = watch.values.of(mask.documents)
    return DocumentMask.of(documents, lengths_of(documents))


def _check_mask(call: AttentionCall) -> None:
    """Fail as torch's kernels do where a mask is of other heads than the queries, such as one of all heads on a rank that has some.

    Its tokens are not looked at: under `cp` a mask of all tokens stands beside the queries of some.
    """
    heads, mask = call.query.shape[:-2], call.attn_mask
    if isinstance(mask, DocumentMask) or mask is None or mask.shape[:-2] == heads:
        return
    if torch.broadcast_shapes(mask.shape[:-2], heads) != heads:
        raise RuntimeError(f"a mask {[*mask.shape]} has other heads than queries {[*call.query.shape]}")


@contextmanager
def trace_fused_attention(watch: ForwardTracer) -> Iterator[None]:
    """Trace scaled_dot_product_attention as a fused kernel; on the meta device torch itself uses plain products."""
    reference = weakref.ref(watch)  # torch keeps a reference to the last replacement of an operator

    def attention(*args: Any, **named: Any) -> Tensor:
        call = AttentionCall(*args, **named)
        query, key, value, mask = call[:4]
        if not num_dispatch_modes():  # called outside the trace, as for the shape of a dropout mask
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        watch = reference()
        assert watch is not None, "it watches this forward"
        _check_mask(call)
        watch.analysis.check_attention(call)
        output: Tensor = _Attention.apply(watch, call, query, key, value, mask)
        watch.attended(call, output)
        values = watch.values
        if values.keeps_all and all(tensor is None or values.knows(tensor) for tensor in call[:4]):
            with disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                known = call._replace(
                    query=values.of(query),
                    key=values.of(key),
                    value=values.of(value),
                    attn_mask=_known_mask(watch, mask),
                )
                values.learn(output, known._replace(dropout_p=0.0).attend())
        return output

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        yield


_SEED = 0
"""Of what code draws in a traced forward: the same on all ranks."""


@contextmanager
def _on_meta(module: nn.Module, watch: ForwardTracer, value_of: ValueOf | None) -> Iterator[None]:
    """Let a model's code run on the meta device inside, with the values that `watch` knows."""
    with (
        process_randomness(_SEED),
        disable_compiler(),
        autocast_on_meta(),
        watch.knowing(module, value_of),
        trace_fused_attention(watch),
        torch.enable_grad(),
    ):
        yield


def outputs_on_meta(module: nn.Module, sample: Any, num_samples: int, value_of: ValueOf | None, keeps_all: bool) -> Any:
    """Run the forward on the meta device, on copies of a sample, and return the outputs and the batch; nothing is recorded.

    `keeps_all` follows the values of all tensors, for models whose code looks at them.

    Raises:
        NeedsValuesError: it looks at values that are not known.
    """
    watch = ForwardTracer(module, {}, keeps_all=keeps_all)
    batch = watch.copies_of(sample, num_samples)
    with _on_meta(module, watch, value_of), watch, watch.flow_recorder:
        return call_model(module, batch), batch


@distributions_unchecked()
def watch_forward(
    module: nn.Module,
    sample: Any,
    num_samples: int,
    watch: ForwardTracer,
    value_of: ValueOf | None,
    name: str = "the model",
    containers: tuple[str, ...] | None = None,
) -> Any:
    """Run the forward under `watch`, on `num_samples` copies of the sample, and return its outputs.

    The children of `containers` make calls: by default those of the containers of blocks.

    Raises:
        ModelError: the forward fails.
        NeedsValuesError: it looks at values that `watch` does not know.
    """
    containers = containers_of(module) if containers is None else containers
    batch = watch.copies_of(sample, num_samples)
    for key, value in batch.items() if isinstance(batch, Mapping) else [("", batch)]:
        tensors = tensors_in(value)
        watch.inputs.of_sample |= {
            watch.key(tensor): "positions" if key == "position_ids" else "tokens" for tensor in tensors
        }
    try:
        with ExitStack() as stack:
            stack.enter_context(_on_meta(module, watch, value_of))
            for path, part in module.named_modules():
                enter = functools.partial(watch.enter, path, is_outside(path, containers))
                stack.enter_context(part.register_forward_pre_hook(enter, with_kwargs=True))
                leave = functools.partial(watch.leave, path)
                stack.enter_context(part.register_forward_hook(leave, with_kwargs=True))
            stack.enter_context(replaced_checkpoint(functools.partial(_checkpoint, watch)))
            stack.enter_context(report_functions(watch.applied))
            stack.enter_context(report_hooks(watch.hooked))
            stack.enter_context(watch.flow_recorder.over(module, functools.partial(is_outside, containers=containers)))
            stack.enter_context(within(TracedValues(watch.take_values)))
            stack.enter_context(Keeping(watch))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.save, _unpack_saved))
            stack.enter_context(transforms_beside_hooks())
            stack.enter_context(watch)
            watch.analysis.given(batch)
            outputs = call_model(module, batch)
    except (SamestepError, NeedsValuesError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        unfit = f"; {why}" if (why := why_unfit(module, batch)) else ""
        raise ModelError(
            "trace-failed",
            f"{name} cannot be traced: {watch.reached} fails: {type(error).__name__}: {reason}{line_of(error)}{unfit}",
        ) from error
    watch.events.returned = {watch.key(tensor) for tensor in tensors_in(outputs)}
    watch.flow_recorder.finish(outputs)
    return outputs


def answer_alike(watches: Iterable[ForwardTracer], module: nn.Module, sample: Any, value_of: ValueOf | None) -> None:
    """Let code that looks at values be answered in forwards to come as in one of a sample, whose values are known.

    Raises:
        ModelError: the forward fails.
        NeedsValuesError: it looks at values that are not known.
    """
    tracer = ForwardTracer(module, {}, keeps_all=True, has_backward=False)
    with snapshot.preserve_modules(module):
        watch_forward(module, sample, 1, tracer, value_of)
    for watch in watches:
        watch.looks.known = deque(tracer.looks.answers)


def _checkpoint(watch: ForwardTracer, begin: Begin, contexts: ContextFn) -> Iterator[None]:
    """Report a checkpoint of the model's code to `watch`; without gradients it keeps nothing."""
    with watch.places.checkpoint(watch.modules.top_most) if torch.is_grad_enabled() else nullcontext():
        yield from begin(contexts)


def _unpack_saved(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a watch that goes back"
    return tensor


def is_outside(path: str, containers: tuple[str, ...]) -> bool:
    """Return whether a module is the model itself, a container of blocks, or holds such a container."""
    return not path or any(is_below(container, path) for container in containers)


_ASKED = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
"""Functions of torch whose first argument is the type of a device."""


def autocast_on_meta() -> Replaced:
    """Let code that runs inside use autocast of the meta device."""
    return Replaced(
        *((torch, name, _asking) for name in _ASKED),
        *((module, "is_autocast_available", _asking) for module in (torch.amp, autocast_mode)),
        (autocast_mode.autocast, "__init__", _entering),
    )


def _entering(enter: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(enter)
    def entered(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            if device_type == "meta":  # another device may take dtypes that the host does not
                warnings.simplefilter("ignore")
            enter(self, _of_host(device_type), *args, **kwargs)

    return entered


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = "cpu"
        return function(*map(_of_host, args[:1]), *args[1:], **kwargs)

    return asked


def _of_host(device_type: Any) -> Any:
    return "cpu" if device_type == "meta" else device_type


Report = Callable[[Literal["sum", "cat"], Tensor, Tensor], None]
"""Is told of a call: its kind, what it is given, and its result."""


@dataclass(frozen=True, slots=True)
class TracedValues:
    """Computes with the samples at hand, and reports each call."""

    report: Report

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows."""
        result = x.sum(0)
        self.report("sum", x, result)
        return result

    def cat(self, x: Tensor) -> Tensor:
        """Return a copy of the rows: what is known of the result is known of all samples."""
        result = x.clone()
        self.report("cat", x, result)
        return result

    def num_rows(self, x: Tensor) -> int:
        """Return the number of rows."""
        return len(x)
