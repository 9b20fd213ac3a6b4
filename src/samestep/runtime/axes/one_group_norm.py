"""Batch norm over one group of samples of which every rank has one run: the usual case, in few operations.

    forward     count, mean, variance of the run ──► all_gather ──► w = n_i / n    m = sum of w m_i    v = sum of w (v_i + (m_i - m)^2)
    backward    sums of g and g x' ──► all_reduce ──► s, t (over n)    gradient of x = k g - k (s + t x')      k = weight r

Each direction has twelve operations of torch and one collective. Running statistics are kept at the end of the forward, those of all
norms together, and so are the counters of batches. A norm of torch's own class runs by `OneGroupNorm`, which has made what it needs
once; in code of another kind the calls of batch norm are found by the mode of `batch_norm.py`, which also has groups of which a rank has
several runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.forward_only import has_backward
from samestep.runtime.ledger import owned


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The statistics of the samples of all ranks, in the dtype in which they are merged."""

    count: Tensor
    """Elements of a channel [1]."""
    mean: Tensor
    """[C]."""
    variance: Tensor
    """The mean squared deviation [C]."""


class _Gathered(NamedTuple):
    """A buffer for the counts, means and variances of all ranks, and views of it."""

    everything: Tensor
    """[R (1 + 2 C)], the ranks one after the other."""
    counts: Tensor
    """[R, 1]."""
    means: Tensor
    """[R, C]."""
    variances: Tensor
    """[R, C]."""


class Constants:
    """Small tensors that many norms read and none writes: counts and ones; and the buffers that gathers write."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}
        self._buffers: dict[tuple[Any, ...], _Gathered] = {}

    def filled(self, value: float, number: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `number` equal values on the device of another tensor, and in its dtype if no other one is given."""
        key = value, number, dtype or like.dtype, like.device
        if key not in self._held:
            self._held[key] = torch.full((number,), value, dtype=dtype or like.dtype, device=like.device)
        return self._held[key]

    def buffer(self, num_ranks: int, channels: int, like: Tensor) -> _Gathered:
        """Return a buffer that keeps its values until the next call with these numbers."""
        key = num_ranks, channels, like.dtype, like.device
        if key not in self._buffers:
            rows = torch.empty(num_ranks, 1 + 2 * channels, dtype=like.dtype, device=like.device)
            self._buffers[key] = _Gathered(rows.view(-1), *rows.split_with_sizes([1, channels, channels], dim=1))
        return self._buffers[key]


class Exchange:
    """How a norm exchanges something with the ranks that have other samples of its group; made once, used in every call."""

    __slots__ = ("_gathering", "_ranks", "_summing", "held")

    def __init__(self, ranks: DataRanks, owner: str, held: Constants) -> None:
        self._ranks, self.held = ranks, held
        self._gathering, self._summing = owned(owner), owned(owner)

    def statistics(self, x: Tensor | None, channels: int, like: Tensor) -> GroupStatistics:
        """Return the statistics of the runs x [B, C, ...] of all ranks; None is the run of a rank without samples.

        Collective over `dp`, see [Note: collective calls].
        """
        held = self.held
        if x is None:
            mine = held.filled(0.0, 1 + 2 * channels, like)
        else:
            mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
            mine = torch.cat([held.filled(float(x.numel() // channels), 1, like), mean, variance])
        everything, counts, means, variances = held.buffer(self._ranks.num_ranks, channels, like)
        self._ranks.gather_into(everything, mine, self._gathering)
        count = counts.sum(0)
        weights = counts / count
        mean = (weights * means).sum(0)
        apart = means - mean
        return GroupStatistics(count, mean, (weights * torch.addcmul(variances, apart, apart)).sum(0))

    def sum(self, sums: Tensor) -> None:
        """Sum what the backward of each rank has found, in its place; collective over `dp`, see [Note: collective calls]."""
        self._ranks.sum_under(sums, self._summing)


class NormalisedGroup(torch.autograd.Function):
    """The normalised run of a rank; the gradient goes through the statistics to every sample, on whatever rank it is."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        how: tuple[Exchange, bool, bool, GroupStatistics],
    ) -> Tensor:
        """`how` is the exchange, whether the backward sums over ranks, whether samples count, and the statistics: one argument, since
        torch looks through each in Python.
        """
        ctx.exchange, ctx.is_summed, ctx.counts, found = how
        ctx.found, ctx.eps = found, eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        return _affine(x, weight, bias, found, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of x, weight and bias; collective over `dp` where other ranks have samples of the group."""
        x, weight = ctx.saved_tensors
        found, exchange, eps = ctx.found, ctx.exchange, ctx.eps
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        wide = found.mean.dtype
        given, values = _in(wide, gradients[0]), _in(wide, x)
        inverse = (found.variance + eps).rsqrt()
        # With weights of ones the kernel returns the sums of g and of g x' over these rows.
        ones = exchange.held.filled(1.0, x.shape[1], inverse)
        _, of_product, of_g = torch.ops.aten.native_batch_norm_backward(
            given, values, ones, None, None, found.mean, inverse, True, eps, [False, True, True]
        )
        of_x = None
        if needs_x:
            sums = torch.stack([of_g, of_product])
            if ctx.is_summed:
                exchange.sum(sums)
            if not ctx.counts:  # no statistic depends on what it runs
                sums.zero_()
            scale = inverse if weight is None else inverse * _in(wide, weight)
            s, t = (scale * (sums / found.count)).unbind()
            through = torch.batch_norm(values, t, s, found.mean, found.variance, False, 0.0, eps, False)
            of_x = _in(x.dtype, (given * scale.view(-1, *[1] * (x.dim() - 2))).sub_(through))
        of_weight = _in(weight.dtype, of_product) if needs_weight else None
        return of_x, of_weight, _in(ctx.bias_dtype, of_g) if needs_bias else None, None, None


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, found: GroupStatistics, eps: float) -> Tensor:
    """Return w (x - m) r + b, computed in the dtype of the statistics."""
    wide = found.mean.dtype
    w = None if weight is None else _in(wide, weight)
    b = None if bias is None else _in(wide, bias)
    return _in(x.dtype, torch.batch_norm(_in(wide, x), w, b, found.mean, found.variance, False, 0.0, eps, False))


_OWN_CLASSES = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


class OneGroupNorm:
    """The training forward of a norm whose class is torch's own, on one group of samples of which this rank and others have some.

    It does what the class does, without the mode that finds calls in other code.
    """

    __slots__ = ("_exchange", "_kept", "_norm", "_takes_gradient")

    def __init__(self, norm: nn.Module, exchange: Exchange, kept: KeptStatistics, *, takes_gradient: bool) -> None:
        """`takes_gradient` says whether the norm's input takes one on other ranks, if not on this one."""
        assert isinstance(norm, _BatchNorm)
        self._norm, self._exchange, self._kept, self._takes_gradient = norm, exchange, kept, takes_gradient

    @staticmethod
    def serves(norm: nn.Module) -> bool:
        """Return whether a norm computes with the code of torch's own class, before its forward is replaced."""
        return type(norm) in _OWN_CLASSES and "forward" not in vars(norm)

    def can_run(self) -> bool:
        """Return whether the norm is as its class has it, and takes statistics that it keeps by a momentum."""
        norm = self._norm
        kept = norm._buffers
        return (
            norm.training
            and norm.momentum is not None
            and kept.get("running_mean") is not None
            and kept.get("running_var") is not None
            and type(norm) in _OWN_CLASSES
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised input; collective over `dp`, see [Note: collective calls]."""
        norm, exchange = self._norm, self._exchange
        norm._check_input_dim(x)
        kept, weights = norm._buffers, norm._parameters
        if self._takes_gradient and not x.requires_grad and has_backward():
            x = x.detach().requires_grad_()
        wide = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        channels = x.shape[1]
        found = exchange.statistics(_in(wide, x.detach()), channels, exchange.held.filled(0.0, 1, x, wide))
        self._kept.add(
            norm, kept["running_mean"], kept["running_var"], norm.momentum, found, kept["num_batches_tracked"]
        )
        how = exchange, True, True, found
        normalised: Tensor = NormalisedGroup.apply(x, weights["weight"], weights["bias"], norm.eps, how)
        return normalised


class _Kept(NamedTuple):
    """The running statistics of a norm, and what one call has found."""

    mean: Tensor
    variance: Tensor
    momentum: Any
    found: GroupStatistics
    counter: Tensor | None
    """The number of batches, where it is yet to be raised."""


@dataclass(slots=True)
class KeptStatistics:
    """The running statistics that a forward has to update: they are written at its end, all together."""

    _kept: list[_Kept] = field(default_factory=list)
    _owners: set[int] = field(default_factory=set)
    _places: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    """The number of the norm of each channel, by the channels of the norms."""

    def add(
        self,
        norm: nn.Module,
        mean: Any,
        variance: Any,
        momentum: Any,
        found: GroupStatistics,
        counter: Tensor | None = None,
    ) -> None:
        """Add what one call has found; a norm that is called again first takes what its call before has found."""
        if id(norm) in self._owners:
            self.write()
        self._owners.add(id(norm))
        self._kept.append(_Kept(mean, variance, momentum, found, counter))

    @torch.no_grad()
    def write(self) -> None:
        """Write what was added, and forget it."""
        kept, self._kept = self._kept, []
        self._owners.clear()
        alike: dict[tuple[Any, ...], list[_Kept]] = {}
        for one in kept:
            alike.setdefault((one.momentum, one.found.mean.dtype, one.found.mean.device), []).append(one)
        for (momentum, *_), together in alike.items():
            self._write(together, momentum)
        counters = [one.counter for one in kept if one.counter is not None]
        if counters:
            torch._foreach_add_(counters, 1)

    def _write(self, kept: Sequence[_Kept], momentum: float) -> None:
        """Write the running statistics of norms with one momentum, as torch does: r (1 - momentum) + new momentum."""
        sizes = [len(one.found.mean) for one in kept]
        counts = torch.cat([one.found.count for one in kept])
        unbiased = (counts / (counts - 1.0))[self._norm_of_each_channel(sizes, counts.device)]
        new = torch.cat([*(one.found.mean for one in kept), *(one.found.variance for one in kept)])
        new[sum(sizes) :].mul_(unbiased)
        running = [one.mean for one in kept] + [one.variance for one in kept]
        torch._foreach_mul_(running, 1.0 - momentum)
        parts = new.mul_(momentum).split(sizes * 2)
        torch._foreach_add_(running, [_in(held.dtype, part) for part, held in zip(parts, running, strict=True)])

    def _norm_of_each_channel(self, sizes: list[int], device: torch.device) -> Tensor:
        key = (*sizes, device)
        if key not in self._places:
            norms = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            self._places[key] = norms.to(device)
        return self._places[key]

    def drop(self) -> None:
        """Forget what was added, where the forward has failed."""
        self._kept.clear()
        self._owners.clear()
