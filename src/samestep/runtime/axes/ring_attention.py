"""Ring attention on real tensors in the order of `program/ring_visits.py`: keys and values pass from rank to rank while their blocks are computed.

    hop 0     own keys                    │ send to the next rank, receive from the one before
    hop 1     keys of the rank before     │ ...
    hop N-1   keys of the next rank       │ nothing

The message of a hop is under way while the block that is there is computed. A message is an all_to_all in which each rank sends
to one rank alone: NCCL carries it out as one send and one receive, and gloo beside the compute.

A block runs in torch's flash kernel, which returns the log-sum-exp and whose backward takes that of all keys; where there is a
mask, a bias, packed documents or dropout, by the formula, for some queries at a time. Sums are in float32 at least.

Legend: B samples, A heads, L queries and S keys of a block, D features of a head; K heads of keys, G = A / K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.attention import AttentionCall
from samestep.building.packed_positions import DocumentMask
from samestep.building.torch_seams import (
    current_function_modes,
    disable_current_modes,
    flash_attention,
    flash_attention_backward,
)
from samestep.program.ring_visits import RingVisit, SlicePlacement, source_at, visit
from samestep.randomness.dropped_attention import DropPart, MaskSource, broadcast
from samestep.runtime.ledger import owned
from samestep.strategies.context import OF_GRADIENTS

BLOCK_ELEMENTS = 2**24
"""Elements of the scores that the formula computes at once, of all samples and heads."""
WIDEST_FLASH = 256
"""The largest head of torch's flash kernel on GPUs; the width of a head is a multiple of 8 there."""


class _Ring(NamedTuple):
    """What an attention around the ring is, besides its tensors."""

    placement: SlicePlacement
    rank: int
    group: dist.ProcessGroup
    owner: str
    is_causal: bool
    scale: float
    documents: Tensor | None
    """The document of each token of the whole sequence, int64 [B, T]."""
    drop: DropPart | None
    p: float

    @property
    def degree(self) -> int:
        """Number of ranks of the ring."""
        return self.placement.degree

    def visits(self) -> Iterator[tuple[int, int, RingVisit | None]]:
        """Yield each hop with the rank whose keys are here, and what is computed with them."""
        for hop in range(self.degree):
            source = source_at(hop, self.rank, self.degree)
            yield hop, source, visit(self.placement, self.rank, source, is_causal=self.is_causal)


def attend(call: AttentionCall, placement: SlicePlacement, rank: int, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return the attention of this rank's queries to all tokens; query, key and value are [B, A, T/N, D], a mask is whole.

    Collective over `group`, in the backward too, see [Note: collective calls].
    """
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    heads = query.shape[1]
    if key.shape[1] != value.shape[1]:
        key, value = (one.repeat_interleave(heads // one.shape[1], 1) for one in (key, value))
    documents = mask.documents if isinstance(mask, DocumentMask) else None
    how = _Ring(
        placement,
        rank,
        group,
        owner,
        call.is_causal or documents is not None,
        query.size(-1) ** -0.5 if call.scale is None else call.scale,
        documents,
        _drop_part(call, placement.length),
        call.dropout_p,
    )
    output: Tensor = _RingAttention.apply(query, key, value, None if documents is not None else mask, how)
    return output


def _drop_part(call: AttentionCall, length: int) -> DropPart | None:
    """Return what makes the masks of dropped weights of this rank's queries and all keys; None where none are dropped."""
    if not call.dropout_p:
        return None
    source = next((mode for mode in reversed(current_function_modes()) if isinstance(mode, MaskSource)), None)
    assert source is not None, "a training forward that may drop weights runs under a mode"
    shape = torch.Size((*call.query.shape[:-1], length))
    if call.attn_mask is not None:
        shape = torch.Size((*broadcast(shape[:-2], call.attn_mask.shape[:-2]), *shape[-2:]))
    return source.drop_part(call.query, shape, call.dropout_p, "scaled_dot_product_attention")


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _Ring) -> Tensor:
        ctx.how = how
        sums = _Softmax.of(query, value)
        here = _packed(key, value)
        for hop, source, seen in how.visits():
            arriving = _shift(here, how.group, how.owner) if hop < how.degree - 1 else None
            if seen is not None:
                keys, values = _unpacked(here, key, value)
                with disable_current_modes():  # selective recompute would keep the products of all blocks
                    _visit_forward(how, source, seen, (query, keys, values, mask), sums)
            here = here if arriving is None else arriving()
        # The heads of a token side by side, as the kernels write them: code may view the output so.
        output = sums.output.transpose(1, 2).to(query.dtype).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, output, sums.log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, output, log_sum_exp = ctx.saved_tensors
        how: _Ring = ctx.how
        given = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        back = _Back(
            given, output, log_sum_exp, torch.zeros_like(query, dtype=_wide(query)),
            torch.zeros_like(mask) if ctx.needs_input_grad[3] else None,
        )  # fmt: skip
        here, returns = _packed(key, value), ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        total = torch.zeros_like(here, dtype=_wide(key))
        coming: Callable[[], Tensor] | None = None
        for hop, source, seen in how.visits():
            arriving = _shift(here, how.group, how.owner) if hop < how.degree - 1 else None
            found = None
            if seen is not None:
                keys, values = _unpacked(here, key, value)
                with disable_current_modes():
                    found = _visit_backward(how, source, seen, (query, keys, values, mask), back)
            if returns:
                total = coming() if coming is not None else total
                if seen is not None and found is not None:
                    for sum_, part in zip(_unpacked(total, key, value), found, strict=True):
                        sum_[:, :, seen.keys].add_(part)
                coming = _shift(total, how.group, how.owner + OF_GRADIENTS)
            here = here if arriving is None else arriving()
        of_keys, of_values = _unpacked(coming(), key, value) if coming is not None else (None, None)
        of_keys, of_values = (None if one is None else one.to(key.dtype) for one in (of_keys, of_values))
        return back.of_queries.to(query.dtype), of_keys, of_values, back.of_mask, None


# -- messages --------------------------------------------------------------------------------------


def _shift(buffer: Tensor, group: dist.ProcessGroup, owner: str) -> Callable[[], Tensor]:
    """Begin to send a buffer to the next rank; return a function that waits for that of the rank before."""
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(buffer)
    sends, receives = [0] * degree, [0] * degree
    sends[(rank + 1) % degree] = receives[(rank - 1) % degree] = buffer.numel()
    with owned(owner) as issue:
        work = issue.sent(dist.all_to_all_single(received, buffer, receives, sends, group=group, async_op=True))
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return received

    return wait


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as one message."""
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _unpacked(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a message as views like these keys and values."""
    first, second = message.split((key.numel(), value.numel()))
    return first.view(key.shape), second.view(value.shape)


# -- one block -------------------------------------------------------------------------------------

_Given = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries of this rank, keys and values of another one, and the mask of the whole sequence."""


class _Softmax(NamedTuple):
    """The output and the log-sum-exp over the keys that have come by so far."""

    output: Tensor
    log_sum_exp: Tensor

    @classmethod
    def of(cls, query: Tensor, value: Tensor) -> _Softmax:
        """Return those of no keys."""
        shape, wide = query.shape[:-1], _wide(query)
        return cls(query.new_zeros((*shape, value.shape[-1]), dtype=wide), query.new_full(shape, -math.inf, dtype=wide))

    def add(self, rows: slice, output: Tensor, log_sum_exp: Tensor) -> None:
        """Add the attention of some queries to further keys."""
        before, total = self.log_sum_exp[:, :, rows], self.output[:, :, rows]
        both = torch.logaddexp(before, log_sum_exp.to(before.dtype))
        finite = both.masked_fill(both == -math.inf, 0.0)  # of queries that have seen no key
        total.mul_((before - finite).exp().unsqueeze(-1))
        total.add_(output * (log_sum_exp - finite).exp().unsqueeze(-1))
        before.copy_(both)


class _Back(NamedTuple):
    """The gradient of an output, what is known of it, and the gradients that stay on this rank."""

    given: Tensor
    output: Tensor
    log_sum_exp: Tensor
    of_queries: Tensor
    of_mask: Tensor | None


def _visit_forward(how: _Ring, source: int, seen: RingVisit, given: _Given, sums: _Softmax) -> None:
    """Add the attention to the keys and values of one rank."""
    query, key, value, mask = given
    key, value = key[:, :, seen.keys], value[:, :, seen.keys]
    if _fits_flash(how, query, value, mask):
        keys, values = _with_heads_of(query, key), _with_heads_of(query, value)
        found = flash_attention(query[:, :, seen.queries], keys, values, is_causal=seen.is_causal, scale=how.scale)
        sums.add(seen.queries, *found)
        return
    key, value = key.to(_wide(key)), value.to(_wide(value))
    for rows in _rows_at_once(query, key, seen):
        scores = _scores(how, source, seen, rows, query, key, mask)
        if scores is None:
            continue
        log_sum_exp = scores.logsumexp(-1)
        finite = log_sum_exp.masked_fill(log_sum_exp == -math.inf, 0.0)
        weights = _dropped(how, source, rows, seen, (scores - finite.unsqueeze(-1)).exp())
        sums.add(rows, _product(weights, value), log_sum_exp)


def _visit_backward(
    how: _Ring, source: int, seen: RingVisit, given: _Given, back: _Back
) -> tuple[Tensor, Tensor] | None:
    """Add the gradients of queries and mask; return those of the keys and values of one rank that are seen."""
    query, key, value, mask = given
    key, value = key[:, :, seen.keys], value[:, :, seen.keys]
    if _fits_flash(how, query, value, mask):
        rows = seen.queries
        query, gradient, output = (one[:, :, rows] for one in (query, back.given, back.output))
        keys, values = _with_heads_of(query, key), _with_heads_of(query, value)
        lse = back.log_sum_exp[:, :, rows].contiguous()
        found = flash_attention_backward(
            gradient, query, keys, values, output, lse, is_causal=seen.is_causal, scale=how.scale
        )
        back.of_queries[:, :, rows].add_(found[0])
        return _summed_heads(found[1], key), _summed_heads(found[2], value)
    key, value = key.to(_wide(key)), value.to(_wide(value))
    of_keys, of_values = torch.zeros_like(key), torch.zeros_like(value)
    for rows in _rows_at_once(query, key, seen):
        scores = _scores(how, source, seen, rows, query, key, mask)
        if scores is None:
            continue
        lse = back.log_sum_exp[:, :, rows]
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        gradient, output = (one[:, :, rows].to(weights.dtype) for one in (back.given, back.output))
        of_values += _by_keys(_dropped(how, source, rows, seen, weights), gradient, value)
        found_bals = _dropped(how, source, rows, seen, _by_features(gradient, value))
        found_bals = weights * (found_bals - (gradient * output).sum(-1, keepdim=True))
        if back.of_mask is not None:
            _add_to_mask(how, source, rows, seen, back.of_mask, found_bals)
        found_bals *= how.scale
        back.of_queries[:, :, rows] += _product(found_bals, key)
        of_keys += _by_keys(found_bals, query[:, :, rows].to(weights.dtype), key)
    return of_keys, of_values


def _fits_flash(how: _Ring, query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the flash kernel computes the blocks of an attention."""
    if mask is not None or how.documents is not None or how.drop is not None or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return True
    width = query.shape[-1]
    return query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= WIDEST_FLASH


def _rows_at_once(query: Tensor, key: Tensor, seen: RingVisit) -> Iterator[slice]:
    """Yield the queries of a visit whose scores exist at a time."""
    each = max(1, BLOCK_ELEMENTS // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    for start in range(seen.queries.start, seen.queries.stop, each):
        yield slice(start, min(start + each, seen.queries.stop))


def _scores(
    how: _Ring, source: int, seen: RingVisit, rows: slice, query: Tensor, key: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Return the scores of some queries [B, A, L, S], -inf where a key is not seen; None where it is known that none is."""
    hidden: Tensor | None = None
    if seen.is_causal:
        num_rows = rows.stop - rows.start
        hidden = torch.ones(num_rows, key.shape[2], dtype=torch.bool, device=query.device).triu(1 + rows.start)
    if how.documents is not None:
        mine, theirs = (_taken(how.documents, 1, one) for one in _tokens(how, source, rows, seen))
        apart = mine[:, None, :, None] != theirs[:, None, None, :]
        hidden = apart if hidden is None else hidden | apart
    part = None if mask is None else _mask_part(how, source, rows, seen, mask)
    if part is not None and part.dtype == torch.bool:
        if part.device.type == "cpu" and not part.any():
            return None
        hidden = ~part if hidden is None else hidden | ~part
    scores = _by_features(query[:, :, rows].to(key.dtype) * how.scale, key)
    if part is not None and part.dtype != torch.bool:
        scores = scores + part.to(scores.dtype)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _dropped(how: _Ring, source: int, rows: slice, seen: RingVisit, weights: Tensor) -> Tensor:
    """Return weights of keys without those that dropout drops, the others scaled."""
    if how.drop is None:
        return weights
    first = source * how.placement.size + seen.keys.start  # models that drop have contiguous slices
    drop = how.drop(rows.start, rows.stop, first + weights.shape[-1])[..., first:]
    return torch.where(drop, 0.0, weights).mul(1.0 / (1.0 - how.p) if how.p < 1.0 else 0.0)


# -- parts of masks --------------------------------------------------------------------------------

_Ranges = tuple[range, ...]


def _tokens(how: _Ring, source: int, rows: slice, seen: RingVisit) -> tuple[_Ranges, _Ranges]:
    """Return the tokens of some queries of this rank, and of the keys of another one that are visited."""
    return _cut(how.placement.runs(how.rank), rows), _cut(how.placement.runs(source), seen.keys)


def _cut(runs: Sequence[range], some: slice) -> _Ranges:
    """Return the tokens at some positions of what a rank holds."""
    found, start = [], 0
    for run in runs:
        low, high = max(some.start - start, 0), min(some.stop - start, len(run))
        if low < high:
            found.append(run[low:high])
        start += len(run)
    return tuple(found)


def _taken(tensor: Tensor, dim: int, ranges: _Ranges) -> Tensor:
    """Return the elements of a tensor for some tokens."""
    parts = [tensor.narrow(dim, one.start, len(one)) for one in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _mask_part(how: _Ring, source: int, rows: slice, seen: RingVisit, mask: Tensor) -> Tensor:
    """Return the part of a whole mask [..., T or 1, T or 1] for some queries and the keys of a visit."""
    mine, theirs = _tokens(how, source, rows, seen)
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = _taken(mask, -2, mine)
    return _taken(mask, -1, theirs) if mask.shape[-1] > 1 else mask


def _add_to_mask(how: _Ring, source: int, rows: slice, seen: RingVisit, of_mask: Tensor, found: Tensor) -> None:
    """Add the gradient of scores to that of the mask that was added to them."""
    mine, theirs = _tokens(how, source, rows, seen)
    by_query, by_key = of_mask.dim() > 1 and of_mask.shape[-2] > 1, of_mask.shape[-1] > 1
    for queries, part in zip(mine, found.split([len(one) for one in mine], -2), strict=True):
        for keys, block in zip(theirs, part.split([len(one) for one in theirs], -1), strict=True):
            window = of_mask.narrow(-2, queries.start, len(queries)) if by_query else of_mask
            window = window.narrow(-1, keys.start, len(keys)) if by_key else window
            window.add_(block.sum_to_size(window.shape))


# -- products of heads that share keys -------------------------------------------------------------


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_key_heads(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [B, A, L, D] as [B, K, G L, D]: the queries of all heads that share keys one after another."""
    return tensor.reshape(key.shape[0], key.shape[1], -1, tensor.shape[-1])


def _by_features(query: Tensor, key: Tensor) -> Tensor:
    """Return products over features [B, A, L, S], of queries [B, A, L, D] and keys [B, K, S, D]."""
    found = _by_key_heads(query, key) @ key.transpose(-2, -1)
    return found.view(*query.shape[:-1], key.shape[-2])


def _product(weights: Tensor, value: Tensor) -> Tensor:
    """Return sums over keys [B, A, L, D], of weights [B, A, L, S] and values [B, K, S, D]."""
    return (_by_key_heads(weights, value) @ value).view(*weights.shape[:-1], value.shape[-1])


def _by_keys(weights: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return sums over queries [B, K, S, D], of weights [B, A, L, S] and queries [B, A, L, D]."""
    return _by_key_heads(weights, key).transpose(-2, -1) @ _by_key_heads(query, key)


def _with_heads_of(query: Tensor, one: Tensor) -> Tensor:
    """Return keys or values with a head for each of the queries."""
    times = query.shape[1] // one.shape[1]
    return one.repeat_interleave(times, 1) if times > 1 else one


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of keys or values from that of their repeated heads, summed in float32 at least."""
    times = gradient.shape[1] // like.shape[1]
    return gradient.unflatten(1, (-1, times)).sum(2, dtype=_wide(gradient)) if times > 1 else gradient
