"""Batch norm over one group of samples of which every rank has one run: the usual case, in few operations.

    forward     count, mean, variance of the run ──► all_gather ──► w = n_i / n    m = sum of w m_i    v = sum of w (v_i + (m_i - m)^2)
    backward    sums of g and g x' ──► all_reduce ──► s, t (over n)    gradient of x = k g - k (s + t x')      k = weight r

Each direction has twelve operations of torch and one collective. Running statistics are kept at the end of the forward, those of all
norms together. Groups of which a rank has several runs are the affair of `batch_norm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.runtime.axes.data_ranks import DataRanks


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The statistics of the samples of all ranks, in the dtype in which they are merged."""

    count: Tensor
    """Elements of a channel [1]."""
    mean: Tensor
    """[C]."""
    variance: Tensor
    """The mean squared deviation [C]."""


class Constants:
    """Small tensors that many norms read and none writes: counts and ones; and the buffers that gathers write."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}
        self._buffers: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def filled(self, value: float, number: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `number` equal values on the device of another tensor, and in its dtype if no other one is given."""
        key = value, number, dtype or like.dtype, like.device
        if key not in self._held:
            self._held[key] = torch.full((number,), value, dtype=dtype or like.dtype, device=like.device)
        return self._held[key]

    def buffer(self, shape: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tensor of one dimension, and of this shape, that keeps its values until the next call with this shape."""
        key = shape, like.dtype, like.device
        if key not in self._buffers:
            rows = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._buffers[key] = rows.view(-1), rows
        return self._buffers[key]


def gathered(
    x: Tensor | None, channels: int, like: Tensor, ranks: DataRanks, owner: str, held: Constants
) -> GroupStatistics:
    """Return the statistics of the runs x [B, C, ...] of all ranks; None is the run of a rank without samples.

    Collective over `dp`, see [Note: collective calls].
    """
    if x is None:
        mine = held.filled(0.0, 1 + 2 * channels, like)
    else:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        mine = torch.cat([held.filled(float(x.numel() // channels), 1, like), mean, variance])
    everything, rows = held.buffer((ranks.num_ranks, 1 + 2 * channels), like)
    ranks.gather_into(everything, mine, owner)
    counts, means, variances = rows.split_with_sizes([1, channels, channels], dim=1)
    count = counts.sum(0)
    weights = counts / count
    mean = (weights * means).sum(0)
    apart = means - mean
    return GroupStatistics(count, mean, (weights * torch.addcmul(variances, apart, apart)).sum(0))


class NormalisedGroup(torch.autograd.Function):
    """The normalised run of a rank; the gradient goes through the statistics to every sample, on whatever rank it is."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        found: GroupStatistics,
        over: tuple[DataRanks | None, str, bool, Constants],
    ) -> Tensor:
        """`over` are the ranks over which the backward sums, the owner of that, whether samples count, and constants."""
        ctx.found, ctx.eps, ctx.over, ctx.bias_dtype = found, eps, over, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        return _affine(x, weight, bias, found, eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of x, weight and bias; collective over `dp` where other ranks have samples of the group."""
        x, weight = ctx.saved_tensors
        found, (ranks, owner, counts, held) = ctx.found, ctx.over
        wide = found.mean.dtype
        given, values = gradients[0].to(wide), x.to(wide)
        inverse = (found.variance + ctx.eps).rsqrt()
        # With weights of ones the kernel returns the sums of g and of g x' over these rows.
        ones = held.filled(1.0, len(inverse), inverse)
        _, of_product, of_g = torch.ops.aten.native_batch_norm_backward(
            given, values, ones, None, None, found.mean, inverse, True, ctx.eps, [False, True, True]
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_g, of_product])
            if ranks is not None:
                ranks.sum(sums, owner)
            if not counts:  # no statistic depends on what it runs
                sums.zero_()
            scale = inverse if weight is None else inverse * weight.to(wide)
            s, t = (scale * (sums / found.count)).unbind()
            through = _affine(values, t, s, found, ctx.eps)
            of_x = (given * scale.view(-1, *[1] * (x.dim() - 2))).sub_(through).to(x.dtype)
        of_weight = of_product.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, of_g.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None, None, None, None


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, found: GroupStatistics, eps: float) -> Tensor:
    """Return w (x - m) r + b, in the dtype of the statistics."""
    wide = found.mean.dtype
    w = None if weight is None else weight.to(wide)
    b = None if bias is None else bias.to(wide)
    return torch.batch_norm(x.to(wide), w, b, found.mean, found.variance, False, 0.0, eps, False)


@dataclass(slots=True)
class KeptStatistics:
    """The running statistics that a forward has to update: they are written at its end, all together."""

    _kept: list[tuple[Tensor, Tensor, float, GroupStatistics]] = field(default_factory=list)
    _owners: set[int] = field(default_factory=set)

    def add(self, norm: nn.Module, mean: Tensor, variance: Tensor, momentum: float, found: GroupStatistics) -> None:
        """Add what one call has found; a norm that is called again first takes what its call before has found."""
        if id(norm) in self._owners:
            self.write()
        self._owners.add(id(norm))
        self._kept.append((mean, variance, momentum, found))

    @torch.no_grad()
    def write(self) -> None:
        """Write what was added, and forget it."""
        kept, self._kept = self._kept, []
        self._owners.clear()
        for momentum in dict.fromkeys(one[2] for one in kept):
            alike = [one for one in kept if one[2] == momentum]
            counts = [found.count for *_, found in alike]
            unbiased = torch._foreach_div(counts, torch._foreach_sub(counts, 1.0))
            variances = torch._foreach_mul([found.variance for *_, found in alike], unbiased)
            running = [one[0] for one in alike] + [one[1] for one in alike]
            new = torch._foreach_mul([*(found.mean for *_, found in alike), *variances], momentum)
            torch._foreach_mul_(running, 1.0 - momentum)
            torch._foreach_add_(running, _alike(new, running))

    def drop(self) -> None:
        """Forget what was added, where the forward has failed."""
        self._kept.clear()
        self._owners.clear()


def _alike(values: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    return [value.to(target.dtype) for value, target in zip(values, targets, strict=True)]
