"""Batch norm over one group of samples of which every rank has one run: the usual case, in few operations.

    forward     count, mean, variance of the run ──► all_gather ──► w = n_i / n    m = sum of w m_i    v = sum of w (v_i + (m_i - m)^2)
    backward    sums of g and g x' ──► all_reduce ──► s, t (over n)    gradient of x = k g - k (s + t x')      k = weight r

Each direction has twelve operations of torch and one collective. Running statistics are kept at the end of the forward, those of all
norms together, and so are the counters of batches; or as soon as code asks a norm for its buffers. A norm of torch's own class runs by
`OneGroupNorm`, which has made what it needs once; in code of another kind the calls of batch norm are found by the mode of
`batch_norm.py`, which also has groups of which a rank has several runs.
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


class _Shape(NamedTuple):
    """The small tensors that norms need for inputs of one shape, which none but a gather writes."""

    wide: torch.dtype
    """The dtype in which statistics are merged."""
    elements: Tensor
    """The number of elements of a channel on this rank [1]."""
    ones: Tensor
    """[C]."""
    nothing: Tensor
    """The count, mean and variance of a rank without samples: zeros [1 + 2 C]."""
    gathered: Tensor
    """What a gather writes, until the next with as many channels: [R (1 + 2 C)], the ranks one after the other."""
    counts: Tensor
    """A view of it [R, 1]."""
    means: Tensor
    """A view of it [R, C]."""
    variances: Tensor
    """A view of it [R, C]."""

    @classmethod
    def of(cls, x: Tensor, num_ranks: int, buffers: dict[Any, Tensor]) -> _Shape:
        """Return those for inputs like x; norms share the `buffers` that gathers write."""
        wide = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        channels, like = x.shape[1], torch.empty(0, dtype=wide, device=x.device)
        key = channels, wide, x.device
        if key not in buffers:
            buffers[key] = like.new_empty(num_ranks, 1 + 2 * channels)
        rows = buffers[key]
        count = like.new_full((1,), x.numel() // channels)
        nothing = like.new_zeros(1 + 2 * channels)
        parts = rows.split_with_sizes([1, channels, channels], dim=1)
        return cls(wide, count, like.new_ones(channels), nothing, rows.view(-1), *parts)


_MOST_SHAPES = 64
"""Shapes that a norm keeps tensors for; where images have any size, they are made anew from time to time."""


class StatisticsExchange:
    """Exchanges of a norm with the ranks that have other samples of its group; created once, used in every call."""

    __slots__ = ("_buffers", "_gathering", "_ranks", "_shapes", "_summing")

    def __init__(self, ranks: DataRanks, owner: str, buffers: dict[Any, Tensor]) -> None:
        """All norms of a model share the `buffers` that gathers write."""
        self._ranks, self._buffers = ranks, buffers
        self._shapes: dict[Any, _Shape] = {}
        self._gathering, self._summing = owned(owner), owned(owner)

    def shape_of(self, x: Tensor) -> _Shape:
        """Return what the norm needs for inputs like x."""
        key = x.shape, x.dtype, x.device
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) == _MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = _Shape.of(x, self._ranks.num_ranks, self._buffers)
        return shape

    def statistics(self, x: Tensor, *, counts: bool) -> GroupStatistics:
        """Return the statistics of the runs x [B, C, ...] of all ranks; that of a rank without samples does not count.

        Collective over `dp`, see [Note: collective calls].
        """
        shape = self.shape_of(x)
        if counts:
            values = x if x.dtype is shape.wide else x.to(shape.wide)
            values_here = torch.cat([shape.elements, *torch.batch_norm_update_stats(values, None, None, 0.0)])
        else:
            values_here = shape.nothing
        self._ranks.gather_into(shape.gathered, values_here, self._gathering)
        count, means = shape.counts.sum(0), shape.means
        weights = shape.counts / count
        mean = (weights * means).sum(0)
        apart = means - mean
        return GroupStatistics(count, mean, (weights * torch.addcmul(shape.variances, apart, apart)).sum(0))

    def sum(self, sums: Tensor) -> None:
        """Sum what the backward of each rank has found, in its place; collective over `dp`, see [Note: collective calls]."""
        self._ranks.sum_under(sums, self._summing)


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Return a run normalised by statistics, in whose dtype it is computed."""
    wide = mean.dtype
    if x.dtype is wide and (weight is None or weight.dtype is wide):
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)
    w, b = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
    return torch.batch_norm(x.to(wide), w, b, mean, variance, False, 0.0, eps, False).to(x.dtype)


def sums_of_run(g: Tensor, x: Tensor, ones: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums over a run of g and of g x': the kernel returns them with weights of ones."""
    sums = torch.ops.aten.native_batch_norm_backward.default(
        g, x, ones, None, None, mean, r, True, eps, [False, True, True]
    )
    return sums[2], sums[1]


def gradient_of_run(
    g: Tensor, x: Tensor, scale: Tensor, sums: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Return k g - k (s + t x') of a run, with `sums` s and t over n [2, C], and `scale` k [C]."""
    s, t = (scale * sums).unbind()
    through = torch.batch_norm(x, t, s, mean, variance, False, 0.0, eps, False)
    return (g * scale.view(-1, *[1] * (x.dim() - 2))).sub_(through)


class NormalisedGroup(torch.autograd.Function):
    """The normalised run of a rank; the gradient goes through the statistics to every sample, on whatever rank it is."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        how: tuple[StatisticsExchange, bool, bool, GroupStatistics, float],
    ) -> Tensor:
        """`how` is the exchange, whether the backward sums over ranks, whether samples count, the statistics, and eps: one argument,
        since torch looks through each in Python.
        """
        ctx.how, ctx.bias_dtype = how, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        *_, group, eps = how
        return normalised(x, weight, bias, group.mean, group.variance, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of x, weight and bias; collective over `dp` where other ranks have samples of the group."""
        x, weight = ctx.saved_tensors
        exchange, is_summed, counts, group, eps = ctx.how
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        mean, variance, g, values = group.mean, group.variance, gradients[0], x
        if x.dtype is not mean.dtype:
            g, values = g.to(mean.dtype), x.to(mean.dtype)
        inverse = (variance + eps).rsqrt()
        of_g, of_product = sums_of_run(g, values, exchange.shape_of(x).ones, mean, inverse, eps)
        of_x = None
        if needs_x:
            sums = torch.stack([of_g, of_product])
            if is_summed:
                exchange.sum(sums)
            if not counts:  # no statistic depends on what it runs
                sums.zero_()
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            of_x = gradient_of_run(g, values, scale, sums / group.count, mean, variance, eps).to(x.dtype)
        of_weight = of_product.to(weight.dtype) if needs_weight else None
        return of_x, of_weight, of_g.to(ctx.bias_dtype) if needs_bias else None, None


_OWN_CLASSES = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


class OneGroupNorm:
    """The training forward of a norm whose class is from torch, on one group of samples of which this rank and others have some.

    It does what the class does, without the mode that finds calls in other code.
    """

    __slots__ = ("_exchange", "_kept", "_norm", "_takes_gradient")

    def __init__(
        self, norm: nn.Module, exchange: StatisticsExchange, kept: KeptStatistics, *, takes_gradient: bool
    ) -> None:
        """`takes_gradient` says whether the norm's input takes one on other ranks, if not on this one."""
        assert isinstance(norm, _BatchNorm)
        self._norm, self._exchange, self._kept, self._takes_gradient = norm, exchange, kept, takes_gradient

    @staticmethod
    def serves(norm: nn.Module) -> bool:
        """Return whether a norm computes with the code of torch's class, before its forward is replaced."""
        return type(norm) in _OWN_CLASSES and "forward" not in vars(norm)

    def can_run(self) -> bool:
        """Return whether the norm is as its class has it, and takes statistics that it keeps by a momentum."""
        norm, buffers = self._norm, self._norm._buffers
        keeps = buffers.get("running_mean") is not None and buffers.get("running_var") is not None
        has_own = "weight" in norm._parameters and "bias" in norm._parameters  # which code may compute of others
        return norm.training and keeps and has_own and norm.momentum is not None and type(norm) in _OWN_CLASSES

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised input; collective over `dp`, see [Note: collective calls]."""
        norm, exchange = self._norm, self._exchange
        norm._check_input_dim(x)
        if self._takes_gradient and not x.requires_grad and has_backward():
            x = x.detach().requires_grad_()
        group = exchange.statistics(x.detach(), counts=True)
        self._kept.add(norm, norm.momentum, group, counts_batches=True)
        weights = norm._parameters
        how = exchange, True, True, group, norm.eps
        normalised: Tensor = NormalisedGroup.apply(x, weights["weight"], weights["bias"], how)
        return normalised


class _KeptCall(NamedTuple):
    """The running statistics of a norm, and what one call has found."""

    mean: Tensor
    variance: Tensor
    momentum: Any
    found: GroupStatistics
    counter: Tensor | None
    """The number of batches, where it is yet to be raised."""


class _UnwrittenBuffers(dict[str, Any]):
    """The buffers of a norm that is yet to take what a call has found: whoever asks the norm for one gets it as torch leaves it."""

    __slots__ = ("kept",)
    kept: KeptStatistics

    def __getitem__(self, name: str) -> Any:
        self.kept.write()
        return super().__getitem__(name)

    def items(self) -> Any:
        self.kept.write()
        return super().items()


@dataclass(slots=True)
class KeptStatistics:
    """The running statistics that a forward has to update: they are written at its end, all together, or when code reads them."""

    _kept: list[_KeptCall] = field(default_factory=list)
    _owners: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    """The norms in `_kept`, and the dicts of their buffers, in whose places they have such as see who reads them."""
    _places: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    """The number of the norm of each channel, by the channels of the norms."""

    def add(self, norm: nn.Module, momentum: Any, group: GroupStatistics, *, counts_batches: bool = False) -> None:
        """Add what one call has found for a norm's buffers, and raise its number of batches where that `counts_batches`; a norm that is
        called again first takes what its call before has found.
        """
        if norm in self._owners:
            self.write()
        buffers: dict[str, Any] = norm._buffers
        self._owners[norm] = buffers
        counter = buffers["num_batches_tracked"] if counts_batches else None
        self._kept.append(_KeptCall(buffers["running_mean"], buffers["running_var"], momentum, group, counter))
        unwritten = _UnwrittenBuffers(buffers)
        unwritten.kept = self
        norm.__dict__["_buffers"] = unwritten

    @torch.no_grad()
    def write(self) -> None:
        """Write what was added, and forget it."""
        calls = self._kept
        self.drop()
        alike: dict[tuple[Any, ...], list[_KeptCall]] = {}
        for call in calls:
            alike.setdefault((call.momentum, call.found.mean.dtype, call.found.mean.device), []).append(call)
        for (momentum, *_), together in alike.items():
            self._write(together, momentum)
        counters = [call.counter for call in calls if call.counter is not None]
        if counters:
            torch._foreach_add_(counters, 1)

    def _write(self, kept_calls: Sequence[_KeptCall], momentum: float) -> None:
        """Write the running statistics of norms with one momentum, as torch does: r (1 - momentum) + new momentum."""
        sizes = [len(call.found.mean) for call in kept_calls]
        counts = torch.cat([call.found.count for call in kept_calls])
        unbiased = (counts / (counts - 1.0))[self._norm_of_each_channel(sizes, counts.device)]
        new = torch.cat([*(call.found.mean for call in kept_calls), *(call.found.variance for call in kept_calls)])
        new[sum(sizes) :].mul_(unbiased)
        running = [call.mean for call in kept_calls] + [call.variance for call in kept_calls]
        torch._foreach_mul_(running, 1.0 - momentum)
        parts = new.mul_(momentum).split(sizes * 2)
        torch._foreach_add_(running, [part.to(buffer.dtype) for part, buffer in zip(parts, running, strict=True)])

    def _norm_of_each_channel(self, sizes: list[int], device: torch.device) -> Tensor:
        key = (*sizes, device)
        if key not in self._places:
            norms = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            self._places[key] = norms.to(device)
        return self._places[key]

    def drop(self) -> None:
        """Forget what was added, as where the forward has failed."""
        for norm, buffers in self._owners.items():
            buffers.update(norm._buffers)
            norm.__dict__["_buffers"] = buffers
        self._kept = []
        self._owners.clear()
