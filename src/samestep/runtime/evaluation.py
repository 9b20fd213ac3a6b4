"""Forwards without gradients in any layout: validation loss, outputs for samples that every rank holds, of weights or averages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.loss import values_of
from samestep.building.loss_result import UNNAMED, VALUES, Amount, LossResult, as_number, loss_result
from samestep.building.named_tensors import cast_batch
from samestep.datasets.values import are_by_sample, joined
from samestep.errors import DataError, RunError
from samestep.examination.examine import Loss
from samestep.randomness.mode import Draw
from samestep.runtime import microbatches
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision, tensor
from samestep.runtime.axes.forward_only import forward_only
from samestep.runtime.axes.whole_batch import WholeBatch
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.processes.messages import broadcast_from, gather_values
from samestep.runtime.step_observer import Indices, StepBatch
from samestep.runtime.weights.unit_order import CalledAgainError
from samestep.trees import keystr, map_tensors, tensors_in, tree_flatten_with_path, tree_unflatten


def evaluate(assembly: Assembly, batch: StepBatch, seed: int, measure: Loss | None) -> dict[str, float]:
    """Return the mean of the loss over a batch, and those of what `measure` sums up, without gradients; each sample counts once.

    Terms and values that the loss names are among them; "loss" is the whole loss. `measure` is given whole logits, and returns
    {"name": (sum, count), ...}, or (sum, count) under its own name.
    Random numbers that the model draws in evaluation too are functions of `seed` and sample, the same at every call.

    Collective over the world, see [Note: collective calls].
    """
    used = None if measure is None else Measure(measure)
    terms = assembly.objective.names.terms or (UNNAMED,)
    means = None
    while means is None:  # once more after a rank has found which weights its samples need again
        totals = _totals(assembly, batch, seed, (*terms, *assembly.objective.names.values), used)
        means = _means(assembly, totals, used)
    counted = [mean for name in terms if not math.isnan(mean := means[name])]
    loss = sum(counted) if counted else math.nan
    return {
        "loss": loss,
        **{name: mean for name, mean in means.items() if name and (name != "loss" or name not in terms)},
    }


class Measure:
    """A measure of one evaluation on this rank."""

    def __init__(self, measure: Loss) -> None:
        self._measure, self._sums, self.watch = measure, values_of(measure), LossWatch()
        self.failure: Exception | None = None
        """The first error of the measure, which all ranks raise together."""

    def __call__(self, outputs: Any, samples: Any) -> LossResult:
        """Return the sums and counts of some samples."""
        return self.watch.result(self._measure, lambda: self._sums(outputs, samples), "the measure")

    def terms(self, outputs: Any, samples: Any) -> Mapping[str, Amount]:
        """Return the sums and counts of some samples by name; none if the measure fails, which is kept."""
        try:
            return self(outputs, samples).terms
        except Exception as error:  # of the user's own code
            self.failure = self.failure or error
            return {}


def is_parted(assembly: Assembly, batch: StepBatch) -> bool:
    """Return whether the samples of a batch are evaluated in several parts."""
    return assembly.parallel.program.step.layout.dp_cp_size > 1 or len(list(_parts(assembly, batch))) > 1


_GAVE_UP = "\0"
"""The name of the number of forwards that ranks have given up."""


def _totals(
    assembly: Assembly, batch: StepBatch, seed: int, names: Sequence[str], used: Measure | None
) -> dict[str, Tensor]:
    """Return this rank's sums and counts by name, and the number of forwards that it has given up (float64 [2] each).

    Collective over the world, see [Note: collective calls].
    """
    parallel, sums = assembly.parallel, assembly.objective.sums
    zeros = torch.zeros(2, dtype=torch.float64, device=parallel.mesh.device)
    totals = {name: zeros.clone() for name in (*names, _GAVE_UP)}

    def add(amounts: Mapping[str, Amount]) -> None:
        for name, pair in amounts.items():
            like = totals.setdefault(name, zeros.clone())
            like += torch.stack([as_number(value, like) for value in pair])

    with evaluating(assembly):
        for index, (part, indices) in enumerate(_parts(assembly, batch)):
            samples, weight = microbatches.read(assembly, batch, indices)
            drawing = _drawing(assembly, seed, indices if len(indices) else part[:1])
            with drawing, parallel.slicing.of(samples), parallel.batch_norms.of_evaluation(len(part)):
                try:
                    outputs = forward(assembly, samples, nullcontext if used else parallel.pending)
                except CalledAgainError:
                    assembly.weights.store.give_up_forward()
                    totals[_GAVE_UP] += 1.0
                    continue
            if outputs is None:
                continue
            if isinstance(sums, WholeBatch):
                add(sums.evaluated(index, outputs, samples, assembly.objective.loss))
            if weight:
                add(_values(assembly, outputs, parallel.slicing.part(samples), used))
    return totals


def _parts(assembly: Assembly, batch: StepBatch, size: int | None = None) -> Iterator[tuple[Indices, Indices]]:
    """Yield the samples that run at once, at most `size`, and those of them that are this rank's, which may be none."""
    parallel = assembly.parallel
    dp = parallel.program.step.layout.dp
    most = size or parallel.program.step.microbatch_samples * dp
    at_once = parallel.batch_norms.num_evaluated_at_once(most)
    everything = batch.shares(0, 1, 1)[0]
    ends = assembly.objective.sums.ends(len(everything), at_once)
    parts = [everything[start:stop] for start, stop in itertools.pairwise((0, *ends))]
    assembly.objective.sums.begin_evaluation([np.array_split(part, dp) for part in parts])
    for part in parts:
        yield part, np.array_split(part, dp)[parallel.mesh.index("dp")]


def _values(assembly: Assembly, outputs: Any, samples: Any, measure: Measure | None) -> dict[str, Amount]:
    """Return the sums and counts of the loss's terms and values, and those of a measure, of this rank's samples."""
    program, loss = assembly.parallel.program, assembly.objective.loss
    is_whole = assembly.objective.sums.is_whole  # a loss that sees other samples too
    if measure is None:
        return {} if is_whole else _amounts(assembly, loss(outputs, samples))
    whole = tensor.whole_logits(outputs, program, assembly.parallel.mesh)
    # The loss of a layout with loss_chunk is that of whole logits, where these exist.
    loss_outputs = outputs if program.step.layout.loss_chunk is None else whole
    return {**({} if is_whole else _amounts(assembly, loss(loss_outputs, samples))), **measure.terms(whole, samples)}


def _amounts(assembly: Assembly, returned: Any) -> dict[str, Amount]:
    """Return the sums and counts of what a loss has returned."""
    result = loss_result(returned).checked(assembly.objective.names)
    return {**result.terms, **result.values}


def _means(assembly: Assembly, totals: Mapping[str, Tensor], used: Measure | None) -> dict[str, float] | None:
    """Return the means over all ranks by name, or None if one has given a forward up.

    Ranks of other stages than the last, and without samples, know no names of a measure.

    Raises:
        RunError: the measure failed on another rank; on this one its own error is raised.
    """
    mesh, least = assembly.parallel.mesh, {**assembly.objective.watch.agreed}
    names = [*totals]
    if used is not None:
        failure = used.failure
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        everyone = gather_values((names, used.watch.least, text), mesh.size("world"))
        if failure is not None:
            raise failure
        if texts := {rank: text for rank, (*_, text) in enumerate(everyone) if text}:
            rank = min(texts)
            raise RunError("worker-error", f"the metric of run.evaluate failed on rank {rank}: {texts[rank]}")
        names = [*dict.fromkeys(name for listed, *_ in everyone for name in listed)]
        least |= {name: number for _, numbers, _ in everyone for name, number in numbers.items()}
    like = next(iter(totals.values()))
    sums = torch.stack([totals.get(name, torch.zeros_like(like)) for name in names])
    if mesh.size("world") > 1:
        dist.all_reduce(sums)
    pairs = dict(zip(names, sums.tolist(), strict=True))
    if pairs.pop(_GAVE_UP)[0]:
        return None
    counts = {name: max(pair[1], least.get(name, least.get(f"{VALUES}{name}", 0.0))) for name, pair in pairs.items()}
    return {name: total / counts[name] if counts[name] else math.nan for name, (total, _) in pairs.items()}


def predict(assembly: Assembly, batch: StepBatch, seed: int) -> Any:
    """Return the outputs of all samples of a batch in order, on every rank's host, without gradients.

    They are one tree of tensors with all samples; a list with the tree of each sample, where samples have different sizes.

    Collective over the world, see [Note: collective calls].

    Raises:
        DataError: an output has no dimension of samples, and is not the same for all of them.
    """
    parallel, alone = assembly.parallel, _have_own_sizes(assembly, batch)
    parts: list[_Outputs] = []
    with evaluating(assembly):
        for part, indices in _parts(assembly, batch, parallel.program.step.layout.dp if alone else None):
            samples, _ = microbatches.read(assembly, batch, indices)
            drawing = _drawing(assembly, seed, indices if len(indices) else part[:1])
            with drawing, parallel.batch_norms.of_evaluation(len(part)):
                outputs = forward(assembly, samples)
            if outputs is not None:
                outputs = _plain(tensor.whole_logits(outputs, parallel.program, parallel.mesh))
            parts += _exchanged(assembly, outputs, len(indices))
    return [_joined([sample], drops=True) for sample in parts] if alone else _joined(parts)


class _Outputs(NamedTuple):
    """The outputs of some samples on the host."""

    tree: Any
    num_samples: int


def _have_own_sizes(assembly: Assembly, batch: StepBatch) -> bool:
    """Return whether samples that are read alone have different sizes: a `read` of the data set may pad them together."""
    if not hasattr(getattr(batch, "dataset", None), "read"):
        return False
    mesh = assembly.parallel.mesh
    indices = batch.shares(*mesh.data_share, 1)[0]
    sizes = {tuple(tuple(leaf.shape) for leaf in tensors_in(batch.samples([index]))) for index in indices}
    everyone = gather_values(sorted(sizes)[:2], mesh.size("world"))
    return len({size for some in everyone for size in some}) > 1


def _plain(value: Any) -> Any:
    """Return outputs as nested dicts, lists and tuples of tensors, numbers and text; other objects, such as caches, are left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, list | tuple):
        items = [_plain(item) if _is_plain(item) else None for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    return value


def _is_plain(value: Any) -> bool:
    known = (Tensor, Mapping, list, tuple, int, float, str, type(None))
    return isinstance(value, known) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _exchanged(assembly: Assembly, outputs: Any, num_samples: int) -> list[_Outputs]:
    """Return the outputs of each data rank's samples in order; `outputs` is None but on ranks of the last stage.

    Collective over the world, see [Note: collective calls].
    """
    mesh, world = assembly.parallel.mesh, dist.group.WORLD
    if mesh.size("world") == 1:
        return [_Outputs(map_tensors(outputs, Tensor.cpu), num_samples)]
    shares = gather_values((mesh.index("dp") if outputs is not None else -1, num_samples), mesh.size("world"))
    parts = []
    for index in range(assembly.parallel.program.step.layout.dp):
        source = next(rank for rank, (position, _) in enumerate(shares) if position == index)
        if count := shares[source][1]:
            assert world is not None
            tree = broadcast_from(source, outputs if mesh.rank == source else None, world, mesh.device)
            parts.append(_Outputs(map_tensors(tree, Tensor.cpu), count))
    return parts


def _joined(parts: Sequence[_Outputs], *, drops: bool = False) -> Any:
    """Return outputs of successive samples as one tree; with `drops` the outputs of one sample without their first dimension.

    Raises:
        DataError: an output has no dimension of samples, and is not the same for all of them.
    """
    trees, counts = [part.tree for part in parts], [part.num_samples for part in parts]
    if len(parts) > 1 and are_by_sample(trees, counts):
        return joined(trees, counts)
    flat = [tree_flatten_with_path(part.tree) for part in parts]
    leaves: list[Any] = []
    for column in zip(*(paths for paths, _ in flat), strict=True):
        values = [value for _, value in column]
        rows = [
            value.shape[:1] == (part.num_samples,) for value, part in zip(values, parts, strict=True) if _has(value)
        ]
        if len(rows) == len(values) and all(rows):
            leaves.append(values[0][0] if drops else torch.cat(values))
            continue
        first = values[0]
        if any(not _is_equal(first, other) for other in values):
            raise DataError(
                "prediction-rows",
                f"run.predict: outputs{keystr(column[0][0])} has no dimension of samples, and differs between samples that run "
                "together. Use an output with one value for each sample, or a metric of run.evaluate",
            )
        leaves.append(first)
    return tree_unflatten(leaves, flat[0][1])


def _has(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _is_equal(first: Any, other: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return torch.equal(first, other)
    return type(first) is type(other) and bool(first == other)


def outputs_of(assembly: Assembly, samples: Any, seed: int) -> Any:
    """Run the model forward on samples that every rank holds; return its outputs, or in a pipeline its logits.

    Collective over the world: every rank calls it and is given the outputs. If one does not, the ranks that share
    layers or sharded weights with it wait until the time limit.
    """
    parallel, model = assembly.parallel, assembly.model
    with evaluating(assembly):
        moved = map_tensors(samples, lambda leaf: leaf.to(parallel.mesh.device))
        rows = next((len(leaf) for leaf in tensors_in(moved) if leaf.dim()), 1)
        with _drawing(assembly, seed, range(rows)):
            outputs = forward(assembly, cast_batch(moved, model.master_dtype, keeps_double=model.keeps_double))
        if outputs is not None:
            outputs = tensor.whole_logits(outputs, parallel.program, parallel.mesh)
            # A weight that the forward returns may be freed when it ends.
            outputs = map_tensors(outputs, lambda leaf: leaf.clone() if _is_of_weight(leaf) else leaf)
    return parallel.stage.from_last(outputs)


def _is_of_weight(tensor: Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def forward(assembly: Assembly, samples: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
    """Run samples forward through all stages; return the outputs on ranks of the last stage, and None on the others.

    `around` makes the context of the forward of each chunk. Called without gradients, and collective over the ranks
    that share the model's layers and weights: if one does not call it, the others wait until the time limit. A model that
    takes gradients within its forward can, and its outputs come detached.
    """
    stage, outputs = assembly.parallel.stage, None
    takes_gradients = bool(assembly.model.spec.differentiates_at)
    failure: Exception | None = None
    for chunk in range(stage.num_chunks):
        with around(), forward_only(takes_gradients=takes_gradients):
            try:
                outputs = stage.forward(0, chunk, samples)
            except Exception as error:  # other stages wait for the messages of all chunks
                failure = failure or error
    stage.finish_forward()
    if failure is not None:
        raise failure
    if outputs is None:
        return None
    return precision.for_loss(map_tensors(outputs, Tensor.detach) if takes_gradients else outputs)


_EVALUATION = -1
"""The step of random numbers that an evaluation draws."""


def _drawing(assembly: Assembly, seed: int, indices: Sequence[int] | Indices) -> AbstractContextManager[Any]:
    """Return the context in which a forward of samples draws the random numbers that the model draws in training too."""
    model = assembly.model
    if not any(mask.is_numbers for mask in model.spec.masks):
        return nullcontext()
    samples = torch.as_tensor(indices, device=assembly.parallel.mesh.device)
    mode = model.dropout.mode(Draw(seed, _EVALUATION, samples))
    mode.allows_random = True
    return mode


@contextmanager
def evaluating(assembly: Assembly) -> Iterator[None]:
    """Put the model into evaluation mode inside, without gradients, and restore its modes afterwards."""
    module = assembly.model.module
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), assembly.parallel.precise.of_forward():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
    assembly.weights.store.end_forward_only()
