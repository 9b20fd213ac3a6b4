"""Batch norm over groups of samples that ranks share (twin of `strategies/batch_norm.py`, which has the formulas).

The code of a module that calls batch norm stays as it is; a function mode replaces `torch.nn.functional.batch_norm` inside
its forward, and with it what torch's own modules do. Each forward of a micro-batch runs in a context that says which samples
of which groups this rank has (`program/step.py`). Outside of one, as for samples that every rank holds, batch norm
computes as it always does.

    part        runs of rows, one a group ──► (count, mean, M) of each ──► all_gather ──► mean, M / n of each group
    normalise   y = w (x - m) r + b           backward: local sums ──► all_reduce ──► gradient of x
    keep        running statistics, with each group in turn; a module's counter counts groups

A place without samples runs one that another rank has too: it is normalised, and counts nowhere. The first forward of a
checkpointed one records the statistics, and its repetition takes them: no rank sends them again or keeps them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from samestep.building.torch_seams import disable_current_modes
from samestep.errors import DataError, ModelError
from samestep.models.spec import ModelSpec
from samestep.program.program import Program
from samestep.program.step import GroupPart, SampleGroups
from samestep.runtime.axes.batch_values import BatchValues, StageBuffers
from samestep.runtime.axes.data_ranks import DataRanks
from samestep.runtime.axes.forward_only import has_backward
from samestep.runtime.axes.one_group_norm import (
    GroupStatistics,
    KeptStatistics,
    NormalisedGroup,
    OneGroupNorm,
    StatisticsExchange,
    gradient_of_run,
    normalised,
    sums_of_run,
)
from samestep.runtime.axes.step_part import RepeatedValues, ShapesOf, SharedSamples, nest_pairs
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.step_observer import StepBatch
from samestep.tracing.batch_norms import FUNCTIONS, bind_batch_norm
from samestep.tracing.checkpointed import Contexts
from samestep.tracing.flow import takes_statistics

# Shapes: N samples of a micro-batch, B rows of the input, R runs of a rank, G groups, C channels.


@dataclass(frozen=True, slots=True)
class _MicrobatchPart:
    """This rank's part of a micro-batch, and the runs of all ranks in it."""

    groups: SampleGroups
    runs: tuple[GroupPart, ...]
    """Its runs of samples; one sample of the first group where it has none."""
    counts: bool
    """Whether its samples count."""
    slots: tuple[range, ...]
    """The slots of each group among those of all ranks."""
    is_one_group: bool
    """Whether ranks share one group of which this one has samples, in one run."""

    @classmethod
    def of(cls, groups: SampleGroups, rank: int, microbatch: int) -> _MicrobatchPart:
        """Return the part of a data rank."""
        runs = groups.runs(rank, microbatch)
        is_one = bool(runs) and groups.spans_ranks and groups.num_groups == groups.num_slots == 1
        return cls(groups, runs or (GroupPart(0, 1),), bool(runs), groups.slots(microbatch), is_one)

    def rows(self, x: Tensor, owner: str, views: int) -> list[tuple[int, Tensor]]:
        """Return the group and the rows of each run, of x [B, C, ...] in which all samples stand so many times in a row.

        Raises:
            ModelError: the number of rows is no multiple of that of the samples.
        """
        count = sum(run.num_samples for run in self.runs)
        if x.shape[0] % (count * views):
            raise ModelError(
                "batch-norm-rows",
                f"{owner or 'the model itself'} takes statistics (batch norm) of {x.shape[0]} rows, and the samples in them are not known. Use rows of equally many positions for each sample, and for statistics of parts of a batch one "
                "call on all of it with numerics.batch_norm_group",
            )
        if len(self.runs) == 1:
            return [(self.runs[0].group, x)]
        each = x.shape[0] // (count * views)
        parts = x.unflatten(0, (views, -1)).split([run.num_samples * each for run in self.runs], dim=1)
        return [(run.group, part.flatten(0, 1)) for run, part in zip(self.runs, parts, strict=True)]

    def joined(self, parts: list[Tensor], views: int) -> Tensor:
        """Return the rows of all runs, split by `rows`, in their places."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(0, (views, -1)) for part in parts], dim=1).flatten(0, 1)


class _Statistics(NamedTuple):
    """The statistics of each group of samples, in the dtype in which they are merged."""

    counts: Tensor
    """Elements of a channel [G, 1]."""
    means: Tensor
    """[G, C]."""
    variances: Tensor
    """The mean squared deviation [G, C]."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The statistics that one call has found or taken, and the part of the micro-batch that it normalises."""

    statistics: _Statistics | GroupStatistics
    part: _MicrobatchPart
    ranks: DataRanks | None
    """The ranks over which the backward sums; None where it sums nowhere."""
    owner: str
    views: int

    def rows(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """Return the group and the rows of each run of the call's input, or of what has its shape."""
        return self.part.rows(x, self.owner, self.views)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return the rows of all runs in their places."""
        return self.part.joined(parts, self.views)


def running_buffers(model: nn.Module, spec: ModelSpec) -> list[Tensor]:
    """Return the running statistics of the modules whose calls take some of samples."""
    paths = dict.fromkeys((*spec.coupled_modules, *spec.batch_norm_owners))
    return [buffer for path in paths for buffer in model.get_submodule(path).buffers(recurse=False)]


def shared_samples(model: nn.Module, program: Program, mesh: Mesh) -> SharedSamples:
    """Return what a rank's forwards ask of the samples that others have."""
    step, spec = program.step, program.step.model
    if step.global_batch > step.microbatch_samples:
        _refuse_others(model, spec)
    asks = step.sample_groups is not None or spec.uses_batch_values or spec.kept_after
    return BatchNorms(model, program, mesh) if asks else SharedSamples()


def _refuse_others(model: nn.Module, spec: ModelSpec) -> None:
    """Let the norms that the traced forward has not called refuse samples that a layout spreads over ranks or micro-batches."""

    def check(path: str, module: nn.Module, _: Any) -> None:
        if module.training or getattr(module, "running_mean", None) is None:
            raise ModelError(
                "batch-norm-layout",
                f"{path} takes statistics of samples (batch norm), and the forward did not call it when the model was traced. Use one rank with "
                "all samples in one micro-batch, or a forward that calls it in every step",
            )

    for path, module in model.named_modules():
        if takes_statistics(module) and path not in (*spec.coupled_modules, *spec.batch_norm_owners):
            module.register_forward_pre_hook(functools.partial(check, path))


class BatchNorms(SharedSamples):
    """The batch norms of a rank's model that take statistics of samples. Every data rank runs the same calls in one order."""

    are_used = True

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh) -> None:
        """Replace the forwards of the modules that call batch norm."""
        super().__init__()
        step = program.step
        self._groups, self._data_rank = step.sample_groups, mesh.index("dp") if step.layout.dp > 1 else 0
        self._job_groups = step.sample_groups
        self._ranks, self._layout = DataRanks(mesh, step.layout.dp), step.layout
        self.values = BatchValues(program, self._ranks)
        """Sums and rows of all samples, for which code asks by name."""
        self._of_stages = StageBuffers.of(model, program, mesh)
        self._size = step.batch_norm_group
        self._part: _MicrobatchPart | None = None
        self._found = RepeatedValues[_Found]()
        """The statistics of checkpointed forwards."""
        self.kept = KeptStatistics()
        calls = [call for layer in step.model.layers for call in layer.batch_norms]
        self._summed = {call.owner for call in calls if call.takes_gradient}
        """The modules whose backward sums over ranks."""
        self._views = {call.owner: call.views for call in calls}
        buffers: dict[Any, Tensor] = {}
        sending = step.model.batch_norm_owners if self._ranks.send else ()
        self.exchanges = {path: StatisticsExchange(self._ranks, path, buffers) for path in sending}
        """What norms over one group exchange, where there are ranks to exchange it with."""
        for path in step.model.batch_norm_owners:
            self._replace_forward(model.get_submodule(path), path)

    def _replace_forward(self, module: nn.Module, path: str) -> None:
        direct = None
        if path in self.exchanges and OneGroupNorm.serves(module):
            direct = OneGroupNorm(module, self.exchanges[path], self.kept, takes_gradient=path in self._summed)
        module.forward = functools.partial(self._forward, module, path, module.forward, direct)

    def begin_step(self, batch: StepBatch, shapes_of: ShapesOf) -> None:
        """Follow the size of a step's batch where it is another one than the job's.

        Raises:
            DataError: its samples are no whole groups in each micro-batch.
        """
        self.values.begin_step(batch)
        if self._groups is None or self._job_groups is None:
            return
        count, shares = batch.num_samples, self._job_groups.shares
        if count == self._groups.shares.global_batch:
            return
        is_whole = self._size == shares.global_batch
        groups = SampleGroups.of(count, count if is_whole else self._size, shares.num_ranks, shares.num_microbatches)
        if not groups.fit:
            raise DataError(
                "batch-indivisible",
                f"a batch of {count} samples in {shares.num_microbatches} micro-batches is not divided into groups of "
                f"{groups.size}, the groups of batch norm's statistics. Use a batch of {shares.global_batch} samples, as the job has",
            )
        self._groups = groups

    def end_update(self) -> None:
        """Write the next values into the buffers."""
        self.values.write()
        self._of_stages.share()

    @property
    def takes_statistics(self) -> bool:
        """Whether the model has a batch norm that takes statistics of samples in training."""
        return self._groups is not None

    @property
    def sends(self) -> bool:
        """Whether a training forward waits for other ranks."""
        return (self._groups is not None or self.values.are_used) and self._ranks.send

    def of(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a training forward of a micro-batch; collective over `dp` where it runs a batch norm."""
        if self._groups is None or self._groups.is_one_forward:
            return self.values.of_step()
        return self._taking(_MicrobatchPart.of(self._groups, self._data_rank, microbatch), microbatch)

    def of_loss(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of the loss of a micro-batch; collective over `dp` where it asks for values of all samples."""
        return self.values.of_loss()

    def of_evaluation(self, num_samples: int) -> AbstractContextManager[None]:
        """Return the context of a forward of held-out samples, which ranks share as one micro-batch.

        Only batch norms without running statistics take any there; collective as `of` is.
        """
        if self._groups is None:
            return self.values.of(num_samples)
        groups = SampleGroups.of(num_samples, self._size, self._layout.dp, 1)
        return self._taking(_MicrobatchPart.of(groups, self._data_rank, 0))

    def num_evaluated_at_once(self, most: int) -> int:
        """Return how many held-out samples run at once, at most so many unless a group is larger."""
        return most if self._groups is None else max(1, most // self._size) * self._size

    def recompute_contexts(self) -> Contexts:
        """Return the contexts of a checkpointed forward, which records statistics, and of its repetition, which takes them."""
        return nest_pairs(self._found.contexts(), self.values.recompute_contexts())

    @contextmanager
    def _taking(self, part: _MicrobatchPart, microbatch: int | None = None) -> Iterator[None]:
        previous, self._part = self._part, part
        try:
            with self.values.of(part.groups.shares.global_batch) if microbatch is None else self.values.of_step():
                yield
            self.kept.write()
        finally:
            self.kept.drop()
            self._part = previous

    def _forward(
        self,
        module: nn.Module,
        path: str,
        forward: Callable[..., Any],
        direct: OneGroupNorm | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replace the forward of a module that calls batch norm."""
        if self._found.is_repeating:
            with _BatchNormMode(self, module, path), _buffers_of_a_copy(module):
                return forward(*args, **kwargs)
        part = self._part
        if part is None:
            return forward(*args, **kwargs)
        # A forward that is recorded runs the module's own code, as its repetition will.
        is_direct = direct is not None and part.is_one_group and not self._found.is_recording and not kwargs
        if is_direct and direct is not None and direct.can_run():
            part.rows(args[0], path, self._views[path])
            return direct(*args)
        with _BatchNormMode(self, module, path):
            return forward(*args, **kwargs)

    def with_gradient(self, x: Tensor, owner: str) -> Tensor:
        """Return the input of a call with a gradient, where the backward sums over ranks: theirs may take one."""
        is_summed = owner in self._summed and self._ranks.send and has_backward() and not x.requires_grad
        return x.detach().requires_grad_() if is_summed else x

    def found(self, x: Tensor, owner: str, keeps: bool) -> tuple[_Found | None, bool]:
        """Return the statistics of a call's input, and whether they are those of a forward that is repeated.

        None where the call computes as it always does.
        """
        call = self._found.left()
        is_repeated = call is not None
        if call is None and self._part is not None:
            ranks = self._ranks if self._part.groups.spans_ranks else None
            statistics = self._taken(x.detach(), self._part, owner, keeps)
            call = _Found(statistics, self._part, ranks, owner, self._views[owner])
        return None if call is None else self._found.add(call), is_repeated

    def _taken(self, x: Tensor, part: _MicrobatchPart, owner: str, keeps: bool) -> _Statistics | GroupStatistics:
        """Return the statistics of all groups of a micro-batch; those of other ranks' groups are zeros if nobody needs them."""
        groups, is_sent = part.groups, self._ranks.send and (part.groups.spans_ranks or keeps)
        slots, channels = groups.num_slots, x.shape[1]
        if groups.size * x.shape[2:].numel() * x.shape[0] == sum(run.num_samples for run in part.runs):
            raise ModelError(
                "batch-norm-rows",
                f"{owner or 'the model itself'} takes the statistics of one value per channel (batch norm). Set "
                "numerics.batch_norm_group = 2 or more",
            )
        wide = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        if is_sent and groups.num_groups == slots == 1:
            part.rows(x, owner, self._views[owner])
            return self.exchanges[owner].statistics(x, counts=part.counts)
        runs = torch.zeros(slots, 1 + 2 * channels, dtype=wide, device=x.device)
        for row, (_, rows) in zip(runs, part.rows(x, owner, self._views[owner]), strict=False):
            if part.counts:
                mean, variance = torch.batch_norm_update_stats(rows.to(wide), None, None, 0.0)
                count = rows.numel() // channels
                torch.cat([mean.new_full((1,), count), mean, variance * count], out=row)
        everything = self._ranks.gather(runs, owner) if is_sent else runs
        ranges = part.slots if is_sent else _own_slots(part)
        merged = [_merge_runs(everything[where.start : where.stop], channels) for where in ranges]
        return _Statistics(*(torch.stack(parts) for parts in zip(*merged, strict=True)))


def _own_slots(part: _MicrobatchPart) -> tuple[range, ...]:
    """Return the slots of each group among those of this rank alone."""
    slots = {run.group: range(index, index + 1) for index, run in enumerate(part.runs)}
    return tuple(slots.get(group, range(0)) for group in range(len(part.slots)))


def _merge_runs(tensor: Tensor, channels: int) -> _Statistics:
    """Merge the count, means and sums of squared deviations of some runs [R, 1 + 2 C]."""
    counts, means, squares = tensor.split([1, channels, channels], dim=1)
    count = counts.sum(0)
    least = count.clamp_min(1.0)
    mean = (counts * means).sum(0) / least
    squares = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return _Statistics(count, mean, squares / least)


@contextmanager
def _buffers_of_a_copy(module: nn.Module) -> Iterator[None]:
    """Let a module write into copies of its buffers, inside."""
    buffers = dict(module._buffers)
    with disable_current_modes():  # that of recompute=selective takes only what the first forward has done
        module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        module._buffers.update(buffers)


class _BatchNormMode(TorchFunctionMode):
    """The function mode of a module's forward, in which the calls of batch norm by the module's code are replaced."""

    def __init__(self, norms: BatchNorms, module: nn.Module, path: str) -> None:
        super().__init__()
        self._norms, self._module, self._path = norms, module, path

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in FUNCTIONS:
            return func(*args, **(kwargs or {}))
        call = bind_batch_norm(func, *args, **(kwargs or {}))
        keeps = call["running_mean"] is not None
        if not call["training"]:
            return func(*args, **(kwargs or {}))
        of_call, is_repeated = self._norms.found(call["input"], self._path, keeps)
        if of_call is None:
            return func(*args, **(kwargs or {}))
        if keeps and not is_repeated:
            self._keep(of_call.statistics, call["running_mean"], call["running_var"], call["momentum"])
        x = self._norms.with_gradient(call["input"], self._path)
        if isinstance(of_call.statistics, GroupStatistics):
            exchange = self._norms.exchanges[of_call.owner]
            how = exchange, of_call.ranks is not None, of_call.part.counts, of_call.statistics, call["eps"]
            return NormalisedGroup.apply(x, call["weight"], call["bias"], how)
        return _Normalised.apply(x, call["weight"], call["bias"], call["eps"], of_call)

    @torch.no_grad()
    def _keep(
        self, statistics: _Statistics | GroupStatistics, mean: Tensor, variance: Tensor | None, momentum: float
    ) -> None:
        """Update running statistics with each group in turn, and correct a module's counter, which its code has
        raised by one; those of one group with torch's own code, which does not look at them, at the end of the forward."""
        norm = self._module
        counter = norm.num_batches_tracked if isinstance(norm, _BatchNorm) and norm.running_mean is mean else None
        if isinstance(statistics, GroupStatistics):
            is_own = type(norm).__module__.startswith("torch.nn.") and counter is not None
            if is_own and variance is not None and norm.momentum is not None:
                self._norms.kept.add(norm, momentum, statistics)
                return
            statistics = _Statistics(statistics.count[None], statistics.mean[None], statistics.variance[None])
        for index, (count, of_group, squared) in enumerate(zip(*statistics, strict=True)):
            if counter is not None:
                counter += index > 0
            of_new: Any = momentum
            if counter is not None and isinstance(norm, _BatchNorm) and norm.momentum is None:
                of_new = 1.0 / counter.to(mean.dtype)
            unbiased = squared * (count / (count - 1.0))
            mean.mul_(1.0 - of_new).add_((of_group * of_new).to(mean.dtype))
            if variance is not None:
                variance.mul_(1.0 - of_new).add_((unbiased * of_new).to(variance.dtype))


class _Normalised(torch.autograd.Function):
    """The normalised input; the gradient goes through the statistics to every sample of a group, on whatever rank it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, of_call: _Found) -> Tensor:
        ctx.found, ctx.eps, ctx.bias_dtype = of_call, eps, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        assert isinstance(of_call.statistics, _Statistics)
        _, means, variances = of_call.statistics
        parts = [normalised(rows, weight, bias, means[g], variances[g], eps) for g, rows in of_call.rows(x)]
        return of_call.joined(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_call: _Found = ctx.found
        assert isinstance(of_call.statistics, _Statistics)
        counts, means, variances = of_call.statistics
        wide, inverse = means.dtype, (variances + ctx.eps).rsqrt()
        rows = [(group, part.to(wide)) for group, part in of_call.rows(x)]
        gradients_of_runs = [part.to(wide) for _, part in of_call.rows(gradients[0])]
        ones = torch.ones_like(means[0])
        sums = means.new_zeros(of_call.part.groups.num_groups, 2, means.shape[1])
        for (group, part), g in zip(rows, gradients_of_runs, strict=True):
            sums[group] += torch.stack(sums_of_run(g, part, ones, means[group], inverse[group], ctx.eps))
        local = sums.sum(0)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            if of_call.ranks is not None:
                of_call.ranks.sum(sums, of_call.owner)
            if not of_call.part.counts:  # no statistic depends on what it runs
                sums = torch.zeros_like(sums)
            scale = inverse if weight is None else inverse * weight.to(wide)
            sums = sums / counts[:, None]
            parts = [
                gradient_of_run(g, part, scale[at], sums[at], means[at], variances[at], ctx.eps)
                for (at, part), g in zip(rows, gradients_of_runs, strict=True)
            ]
            x_gradient = of_call.joined(parts).to(x.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        of_weight = local[1].to(weight.dtype) if needs_weight else None
        return x_gradient, of_weight, local[0].to(ctx.bias_dtype) if needs_bias else None, None, None
