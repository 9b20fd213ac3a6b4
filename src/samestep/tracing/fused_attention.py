"""A forward in which attention is computed as the fused kernels do: no matrix of scores is made.

They keep queries, keys, values, output, one log-sum-exp a row and the given mask; of packed documents there is no mask, and only
pairs within a document are computed (`building/document_mask.py`). On the meta device torch itself runs plain products instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from samestep.building.document_mask import DocumentMask, lengths_of
from samestep.models.layer_spec import Product
from samestep.tracing.attention import AttentionCall
from samestep.tracing.forward import ForwardTracer


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
            owner=watch.innermost, cut="count" if watch.key(query) in watch.cut else "",
        )  # fmt: skip
        given = [query, key, value, *([] if mask is None else [mask])]
        watch.record(given, [output, log_sum_exp], flops, product)
        watch.attend(query, key, value, output, mask)
        watch.pairs |= {watch.key(one) for one in masks}
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = [torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]]
        for read in (*ctx.saved_tensors, *gradients):
            read.detach()
        return None, None, *found, None


def _within_documents(watch: ForwardTracer, mask: Tensor | None) -> float:
    """Return the part of all pairs of tokens whose tokens share a document; 1 where it is not known, or there are none."""
    if not isinstance(mask, DocumentMask) or not watch.values.knows(documents := mask.documents):
        return 1.0
    with _disable_current_modes():
        pairs = sum(length**2 for of_sample in lengths_of(watch.values.of(documents)) for length in of_sample)
    return pairs / (documents.shape[0] * documents.shape[1] ** 2)


def _known_mask(watch: ForwardTracer, mask: Tensor | None) -> Tensor | None:
    """Return the values of a mask."""
    if not isinstance(mask, DocumentMask):
        return None if mask is None else watch.values.of(mask)
    documents = watch.values.of(mask.documents)
    return DocumentMask.of(documents, lengths_of(documents))


@contextmanager
def fused_attention(watch: ForwardTracer) -> Iterator[None]:
    """Trace scaled_dot_product_attention as a fused kernel; on the meta device torch itself uses plain products."""
    held = weakref.ref(watch)  # torch keeps a reference to the last replacement of an operator

    def attention(*args: Any, **named: Any) -> Tensor:
        call = AttentionCall(*args, **named)
        query, key, value, mask = call[:4]
        if not torch._C._len_torch_dispatch_stack():  # called outside the trace, as for the shape of a dropout mask
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        watch = held()
        assert watch is not None, "it watches this forward"
        watch.check_attention(call)
        output: Tensor = _Attention.apply(watch, call, query, key, value, mask)
        if watch.recorder is not None:
            watch.recorder.record("attention", watch.where, tuple(call), {}, output)
        values = watch.values
        if values.keeps_all and all(tensor is None or values.knows(tensor) for tensor in call[:4]):
            with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                known = call._replace(
                    query=values.of(query),
                    key=values.of(key),
                    value=values.of(value),
                    attn_mask=_known_mask(watch, mask),
                )
                values.learn(output, known.run(nn.functional.scaled_dot_product_attention))
        return output

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        yield
