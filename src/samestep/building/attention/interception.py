"""Written attentions that a trace has found, intercepted in later forwards of the same blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.attention.attention_call import AttentionCall, multi_head_attention
from samestep.building.attention.score_form import WrittenCall
from samestep.building.attention.written_out import Formulas
from samestep.models.written_attention import WrittenAttention

Found = Mapping[str, tuple[WrittenAttention, ...]]
"""The attentions that each block writes out, by its path."""


class KnownFormulas(Formulas):
    """The attentions that were found, as the products of a block that begin them."""

    def __init__(
        self,
        found: Found | Iterable[tuple[str, tuple[WrittenAttention, ...]]],
        attend: Callable[..., Tensor],
        num_samples: int = 1,
    ) -> None:
        super().__init__(num_samples)
        self._attend = attend
        self._by_number = {path: {one.number: one for one in some} for path, some in dict(found).items()}
        self.runs_part = False
        """Whether a part runs that computes all tokens."""

    @property
    def is_within(self) -> bool:
        """Whether a part runs that computes all tokens, whose products are not counted."""
        return self.runs_part

    @property
    def are_here(self) -> bool:
        """Whether the block that was entered last writes attentions out."""
        return self.path in self._by_number

    def begins(self, first: Tensor, second: Tensor) -> tuple[int, int] | None:
        """Return the dimensions of tokens of a product that begins an attention."""
        one = self._by_number.get(self.path, {}).get(self.count)
        return None if one is None else one.tokens

    def attend(self, written: WrittenCall) -> Tensor | None:
        """Compute an attention with the masks that are given; those that the block makes are rules."""
        rules = self._by_number[self.path][written.number].masks
        if len(rules) != len(written.masks):
            self.reject("another number of masks")
            return None
        pairs = [*zip(written.masks, rules, strict=True)]
        written = written.with_keys([mask for mask, rule in pairs if rule is not None and rule.by_key])
        made = [rule for rule in rules if rule is not None]
        call = written.masked_by([mask for mask, rule in pairs if rule is None])
        windows = [rule.window for rule in made if rule.window is not None]
        call = call._replace(is_causal=any(rule.causal for rule in made), window=min(windows, default=None))
        return self._attend(call, written)

    def reject(self, what: str) -> None:
        """Let the elements be computed as the code says."""

    def number_in(self, tensor: Tensor, hides: float) -> float | None:
        """Return a number that hides a key, since the trace has shown that it does: to read the tensor, a host would wait."""
        return float(tensor) if tensor.device.type == "cpu" else hides


class Intercepting(TorchFunctionMode):
    """A function mode in which attentions that are written out are intercepted."""

    def __init__(self, formulas: Formulas) -> None:
        super().__init__()
        self._formulas = formulas

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self, *args, **kwargs)
        found = self._formulas.intercept(func, args, kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


def without_values(call: AttentionCall, written: WrittenCall) -> Tensor:
    """Return a tensor of the shape of an attention's output."""
    return call.query.new_empty((*call.query.shape[:-1], call.value.shape[-1]))


def as_fused(call: AttentionCall, written: WrittenCall) -> Tensor:
    """Return the output of a fused kernel, as a trace records it."""
    return F.scaled_dot_product_attention(*call[:3], call.attn_mask, call.dropout_p, call.is_causal, scale=call.scale)
