"""Ring attention on real tensors in the order of `program/ring_visits.py`: keys and values pass from rank to rank while their blocks are computed.

    hop 0     own keys                    │ send to the next rank, receive from the one before
    hop 1     keys of the rank before     │ ...
    hop N-1   keys of the next rank       │ nothing

In the backward the gradients of keys follow them from hop 1 on and come back with the last message, beside which a rank computes half of
the block of its own keys: the other half is computed beside the first message.

The message of a hop is under way while the block that is there is computed. A message is an all_to_all in which each rank sends
to one rank alone: NCCL carries it out as one send and one receive, and gloo beside the compute.

A block runs in torch's flash kernel, which returns the log-sum-exp and whose backward takes that of all keys; with dropout on GPUs in
ours (`building/attention/fused.py`); else, where there is a mask, a bias, a cap, packed documents or dropout, by the formula of
`building/attention/formula.py`. A sink is a key that every query
has seen before the first hop. Sums are in float32 at least.

Legend: B samples, A heads, L queries and S keys of a block, D features of a head; K heads of keys, G = A / K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention import AttentionSpec
from samestep.building.attention.formula import (
    AttentionTile,
    Gradients,
    Pairs,
    Sum,
    add_gradients,
    blocks,
    cut,
    dropped_of,
    hides_all,
    mask_part,
    output_of,
    scale_of,
    scores_of,
    weights_given,
    weights_of,
)
from samestep.building.attention.fused import fits_dropped_flash, fits_flash, flash_backward, flash_form, flash_forward
from samestep.building.attention.head_products import wide, widen
from samestep.building.torch_seams import disable_current_modes
from samestep.kernels import flash_launches
from samestep.kernels.flash_launches import FlashForm
from samestep.program.ring_visits import RingVisit, SlicePlacement, source_at, visit
from samestep.runtime.axes.context.neighbours import shift
from samestep.strategies.context import OF_GRADIENTS

_Given = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries of this rank, keys and values of a rank, and the mask of the whole sequence."""


class Ring(NamedTuple):
    """A rank's place in the ring; the carrier of attentions across ranks (`building/attention/carriers.py`)."""

    placement: SlicePlacement
    rank: int
    group: dist.ProcessGroup
    owner: str

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the attention of this rank's queries to all tokens; query, key and value are [B, A, T/N, D], a mask is whole.

        Collective over the group, in the backward too, see [Note: collective calls].
        """
        if key.shape[1] != value.shape[1]:
            heads = query.shape[1]
            key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        how = RingForm(self, spec.but(mask=None), scale_of(spec, query))
        output: Tensor = _RingAttention.apply(query, key, value, spec.mask, how)
        return output

    @property
    def degree(self) -> int:
        """Number of ranks of the ring."""
        return self.placement.degree

    def pairs(self, source: int) -> Pairs:
        """Return the tokens of this rank's queries and of the keys of another one."""
        return Pairs(self.placement.runs(self.rank), self.placement.runs(source))


class RingForm(NamedTuple):
    """The form of an attention around the ring: all of it but the tensors that take gradients."""

    ring: Ring
    spec: AttentionSpec
    scale: float

    def visits(self) -> Iterator[tuple[int, int, RingVisit | None]]:
        """Yield each hop with the rank whose keys are here, and what is computed with them."""
        ring = self.ring
        for hop in range(ring.degree):
            source = source_at(hop, ring.rank, ring.degree)
            yield hop, source, visit(ring.placement, ring.rank, source, is_causal=self.spec.causal)

    def halves_of_own(self, by_flash: bool) -> tuple[tuple[RingVisit, ...], tuple[RingVisit, ...]]:
        """Return the two parts of a backward over the keys of this rank: one while keys are sent, one while their gradients come back.

        The kernel of causal attention takes as many queries as keys; the formula takes the keys of some queries by itself.
        """
        size = self.ring.placement.size
        half, everything = size // 2, slice(0, size)
        first, second = slice(0, half), slice(half, size)
        if not by_flash or not self.spec.causal:
            return (RingVisit(second, everything, is_causal=False),), (RingVisit(first, everything, is_causal=False),)
        late = RingVisit(first, first, is_causal=True), RingVisit(second, second, is_causal=True)
        return (RingVisit(second, first, is_causal=False),), late

    def shift(self, buffer: Tensor, owner: str = "") -> Callable[[], Tensor]:
        """Begin to pass a buffer to the next rank."""
        return shift(buffer, self.ring.group, self.ring.owner + owner)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: RingForm) -> Tensor:
        ctx.how = how
        output, log_sum_exp = ring_forward(how, (query, key, value, mask))
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, *result = ctx.saved_tensors
        needs = ctx.needs_input_grad[1] or ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        return *ring_backward(ctx.how, gradients[0], (query, key, value, mask), (result[0], result[1]), needs), None


def ring_forward(how: RingForm, operands: _Given) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exps of this rank's queries over the keys of all ranks.

    Collective over the group of the ring, see [Note: collective calls].
    """
    query, key, value, mask = operands
    sums = _Softmax.of(query, value)
    here = _packed(key, value)
    for hop, source, seen in how.visits():
        arriving = how.shift(here) if hop < how.ring.degree - 1 else None
        if seen is not None:
            keys, values = _unpacked(here, key, value)
            with disable_current_modes():  # selective recompute would keep the products of all blocks
                _visit_forward(how, source, seen, (query, keys, values, mask), sums)
        here = here if arriving is None else arriving()
    # The heads of a token side by side, as the kernels write them: code may view the output so.
    output = sums.output.transpose(1, 2).to(query.dtype).contiguous().transpose(1, 2)
    return output, sums.log_sum_exp


def ring_backward(
    how: RingForm, gradient: Tensor, tensors: _Given, result: tuple[Tensor, Tensor], needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of queries, keys, values and mask, given that of the output and the `result` of the forward.

    `needs` says whether keys and values, and the mask, take one. Collective over the group of the ring, see [Note: collective calls].
    """
    (query, key, value, mask), (output, log_sum_exp), (returns, of_mask) = tensors, result, needs
    of_output = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    products = (widen(of_output) * widen(output)).sum(-1)
    into = Gradients(query, key, value, mask if of_mask else None)
    back = _Back(of_output, output, log_sum_exp, products.unsqueeze(-1), into)
    here = packed = _packed(key, value)
    sums = Sum(key), Sum(value)
    early, late = how.halves_of_own(fits_flash(query, value, how.spec.but(mask=mask)))
    coming: Callable[[], Tensor] | None = None

    def add(source: int, message: Tensor, seen: RingVisit | None) -> None:
        if seen is not None:
            keys, values = _unpacked(message, key, value)
            with disable_current_modes():
                _visit_backward(how, source, seen, (query, keys, values, mask), back)

    for hop, source, seen in how.visits():
        arriving = how.shift(here) if hop < how.ring.degree - 1 else None
        into.of_keys, into.of_values = (Sum(key), Sum(value)) if hop else sums
        for part in (seen,) if hop else early:
            add(source, here, part)
        if hop and returns:
            total = coming() if coming is not None else torch.zeros_like(here, dtype=wide(key))
            for summed, some in zip(_unpacked(total, key, value), (into.of_keys, into.of_values), strict=True):
                if not some.is_empty:
                    summed.add_(some.value)
            coming = how.shift(total, OF_GRADIENTS)
        here = here if arriving is None else arriving()
    into.of_keys, into.of_values = sums
    for part in late:  # while the gradients of this rank's keys come back
        add(how.ring.rank, packed, part)
    back_home = (None, None) if coming is None else _unpacked(coming(), key, value)
    of_keys, of_values = (
        None if some is None else (some if part.is_empty else some.add_(part.value)).to(key.dtype)
        for some, part in zip(back_home, sums, strict=True)
    )
    return into.of_queries.like(query), of_keys, of_values, into.of_mask


# -- messages --------------------------------------------------------------------------------------


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as one message."""
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _unpacked(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a message as views like these keys and values."""
    first, second = message.split((key.numel(), value.numel()))
    return first.view(key.shape), second.view(value.shape)


# -- one block -------------------------------------------------------------------------------------


class _Softmax(NamedTuple):
    """The output and the log-sum-exp over the keys that have come by so far."""

    output: Tensor
    log_sum_exp: Tensor

    @classmethod
    def of(cls, query: Tensor, value: Tensor) -> _Softmax:
        """Return those of no keys."""
        shape, dtype = query.shape[:-1], wide(query)
        log_sum_exp = query.new_full(shape, -math.inf, dtype=dtype)
        return cls(query.new_zeros((*shape, value.shape[-1]), dtype=dtype), log_sum_exp)

    def add(self, rows: slice, output: Tensor, log_sum_exp: Tensor) -> None:
        """Add the attention of some queries to further keys."""
        previous, total = self.log_sum_exp[:, :, rows], self.output[:, :, rows]
        both = torch.logaddexp(previous, log_sum_exp.to(previous.dtype))
        finite = both.masked_fill(both == -math.inf, 0.0)  # of queries that have seen no key
        total.mul_((previous - finite).exp().unsqueeze(-1))
        total.add_(output * (log_sum_exp - finite).exp().unsqueeze(-1))
        previous.copy_(both)


class _Back(NamedTuple):
    """The gradient of an output, what is known of it, and the gradients that blocks have given."""

    given: Tensor
    output: Tensor
    log_sum_exp: Tensor
    products: Tensor
    """Of gradient and output, summed over features [B, A, L, 1]."""
    into: Gradients


def _blocks(
    how: RingForm, source: int, seen: RingVisit, operands: _Given
) -> Iterator[tuple[AttentionSpec, Pairs, AttentionTile]]:
    """Yield the blocks of a visit in which a query may see a key."""
    spec, pairs = how.spec.but(mask=operands[3]), how.ring.pairs(source)
    for block in blocks(spec, pairs, seen.queries, operands[0].shape[0] * operands[0].shape[1] * operands[1].shape[2]):
        if not hides_all(spec, pairs, block):
            yield spec, pairs, block


def _dropped_form(how: RingForm, source: int, seen: RingVisit, operands: _Given) -> FlashForm | None:
    """Return the form of a visit that our kernels of dropout compute; None where they do not."""
    query, key, value, mask = operands
    spec, pairs = how.spec.but(mask=mask), how.ring.pairs(source)
    if not fits_dropped_flash(query, key, value, spec):
        return None
    if mask is not None:
        spec = spec.but(mask=mask_part(mask, pairs, AttentionTile(seen.queries, seen.keys)))
    # Models that drop have contiguous slices.
    (queries,), (keys,) = cut(pairs.queries, seen.queries), cut(pairs.keys, seen.keys)
    return flash_form(spec, how.scale, queries, keys, seen.queries)


def _visit_forward(how: RingForm, source: int, seen: RingVisit, operands: _Given, sums: _Softmax) -> None:
    """Add the attention to the keys and values of one rank."""
    query, key, value, mask = operands
    if fits_flash(query, value, how.spec.but(mask=mask)):
        some = query[:, :, seen.queries], key[:, :, seen.keys], value[:, :, seen.keys]
        sums.add(seen.queries, *flash_forward(*some, is_causal=seen.is_causal, scale=how.scale))
        return
    if (form := _dropped_form(how, source, seen, operands)) is not None:
        some = query[:, :, seen.queries], key[:, :, seen.keys], value[:, :, seen.keys]
        sums.add(seen.queries, *flash_launches.forward(*some, form))
        return
    key, value = widen(key), widen(value)
    for spec, pairs, block in _blocks(how, source, seen, operands):
        scores = scores_of(spec, how.scale, pairs, block, query, key)
        weights, log_sum_exp = weights_of(spec, scores, needs_lse=True)
        assert log_sum_exp is not None
        output = output_of(spec, weights, dropped_of(spec, pairs, block), value[:, :, block.keys])
        sums.add(block.rows, output, log_sum_exp)


def _visit_backward(how: RingForm, source: int, seen: RingVisit, operands: _Given, back: _Back) -> None:
    """Add the gradients of queries and mask, and those of the keys and values of one rank that are seen."""
    query, key, value, mask = operands
    into, rows = back.into, seen.queries
    if fits_flash(query, value, how.spec.but(mask=mask)):
        parts = [x[:, :, rows] for x in (back.given, query, back.output, back.log_sum_exp)]
        gradients = flash_backward(
            parts[0],
            parts[1],
            key[:, :, seen.keys],
            value[:, :, seen.keys],
            *parts[2:],
            is_causal=seen.is_causal,
            scale=how.scale,
        )
        _add(into, seen, gradients)
        return
    if (form := _dropped_form(how, source, seen, operands)) is not None:
        three = query[:, :, rows], key[:, :, seen.keys], value[:, :, seen.keys]
        known = back.log_sum_exp[:, :, rows], back.products[:, :, rows, 0]
        _add(into, seen, flash_launches.backward(back.given[:, :, rows], three, *known, form, in_float32=True))
        return
    key, value = widen(key), widen(value)
    for spec, pairs, block in _blocks(how, source, seen, operands):
        scores = scores_of(spec, how.scale, pairs, block, query, key)
        weights = weights_given(scores, back.log_sum_exp[:, :, block.rows])
        gradient, products = widen(back.given[:, :, block.rows]), back.products[:, :, block.rows]
        computed = weights, dropped_of(spec, pairs, block)
        add_gradients(spec, how.scale, pairs, block, (query, key, value), computed, gradient, products, into)


def _add(into: Gradients, seen: RingVisit, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add the gradients of the queries, keys and values of a visit."""
    into.of_queries.add(seen.queries, gradients[0])
    into.of_keys.add(seen.keys, gradients[1])
    into.of_values.add(seen.keys, gradients[2])
