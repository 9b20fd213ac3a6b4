"""The statistics of groups of samples, of which a batch norm computes, and the running statistics that it keeps of them.

    forward     count, mean, variance of each run ──► all_gather ──► w = n_i / n    m = sum of w m_i    v = sum of w (v_i + (m_i - m)^2)
    backward    sums of g and g x' ──► all_reduce ──► s, t (over n)    gradient of x = k g - k (s + t x')      k = weight r

Running statistics are kept at the end of the forward, those of all norms together, and so are the counters of batches; or as soon as code asks
a norm for its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class GroupStatistics(NamedTuple):
    """The statistics of one group of samples, in the dtype in which they are merged."""

    elements: Tensor
    """Elements of a channel [1]."""
    mean: Tensor
    """[C]."""
    variance: Tensor
    """The mean squared deviation [C]."""


def statistics_of_run(x: Tensor) -> Tensor:
    """Return the count, the mean and the variance of a run x [B, C, ...], as one row [1 + 2 C]."""
    values = x if x.dtype.itemsize >= 4 else x.float()
    mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    return torch.cat([mean.new_full((1,), x.numel() // x.shape[1]), mean, variance])


def merge_runs(rows: Tensor) -> GroupStatistics:
    """Merge the statistics of some runs [R, 1 + 2 C]; a run of other samples, which does not count, is zeros."""
    channels = rows.shape[1] // 2
    counts, means, variances = rows.split_with_sizes([1, channels, channels], dim=1)
    count = counts.sum(0)
    weights = counts / count
    mean = (weights * means).sum(0)
    apart = means - mean
    return GroupStatistics(count, mean, (weights * torch.addcmul(variances, apart, apart)).sum(0))


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
        counts = torch.cat([call.found.elements for call in kept_calls])
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
