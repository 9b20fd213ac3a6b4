"""Forwards without gradients in any layout: held-out loss, outputs for samples that every rank holds, of weights or averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.loss import as_number, check_results_of
from samestep.building.named_tensors import cast_floating
from samestep.errors import ModelError
from samestep.examination.examine import Loss
from samestep.randomness.mode import Draw, DropoutMode
from samestep.runtime import microbatches
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision, tensor
from samestep.runtime.axes.forward_only import forward_only
from samestep.runtime.held_assembly import PreparedRun
from samestep.runtime.microbatches import StepBatch
from samestep.runtime.step_observer import Indices
from samestep.runtime.weights.pieces import Piece, WeightAverages
from samestep.trees import map_tensors, tree_leaves, tree_map_only


def evaluate(assembly: Assembly, batch: StepBatch, seed: int, measure: Loss | None = None) -> tuple[float, float]:
    """Return the sum of the loss over a batch, and the tokens or samples it counts, without gradients.

    `measure` is summed in place of the loss: like it a function of (outputs, batch) -> (sum, count), given whole logits.
    Random numbers that the model draws in evaluation too are functions of `seed` and sample, the same at every call.

    Collective over the world, see [Note: collective calls].
    """
    parallel = assembly.parallel
    mesh, dp = parallel.mesh, parallel.program.step.layout.dp
    size = parallel.batch_norms.num_evaluated_at_once(parallel.program.step.microbatch_samples * dp)
    everything = batch.shares(0, 1, 1)[0]
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    used = assembly.objective.loss if measure is None else check_results_of(measure, "measure")
    with _forward_only(assembly):
        for start in range(0, max(1, len(everything)), size):
            part = everything[start : start + size]
            mine = np.array_split(part, dp)[mesh.index("dp")]
            samples, weight = microbatches.read(assembly, batch, mine)
            drawing = _drawing(assembly, seed, mine if len(mine) else everything[:1])
            with drawing, parallel.slicing.of(samples), parallel.batch_norms.of_evaluation(len(part)):
                outputs = forward(assembly, samples, nullcontext if measure else parallel.pending)
            if outputs is not None:
                if measure is not None:
                    outputs = tensor.whole_logits(outputs, parallel.program, mesh)
                loss_sum, count = used(outputs, parallel.slicing.part(samples))
                totals += torch.stack([as_number(loss_sum, totals), as_number(count, totals)]) * weight
    if mesh.size("world") > 1:
        dist.all_reduce(totals)
    loss_sum, count = (totals / mesh.size("model")).tolist()  # which count the same samples
    return loss_sum, count


def outputs_of(assembly: Assembly, samples: Any, seed: int) -> Any:
    """Run the model forward on samples that every rank holds; return its outputs, or in a pipeline its logits.

    Collective over the world: every rank calls it and is given the outputs. If one does not, the ranks that share
    layers or sharded weights with it wait until the time limit.
    """
    parallel = assembly.parallel
    with _forward_only(assembly):
        moved = tree_map_only(Tensor, lambda leaf: leaf.to(parallel.mesh.device), samples)
        rows = next((len(leaf) for leaf in tree_leaves(moved) if isinstance(leaf, Tensor) and leaf.dim()), 1)
        with _drawing(assembly, seed, range(rows)):
            outputs = forward(assembly, cast_floating(moved, assembly.model.master_dtype))
        if outputs is not None:
            outputs = tensor.whole_logits(outputs, parallel.program, parallel.mesh)
    return parallel.stage.from_last(outputs)


def forward(assembly: Assembly, samples: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
    """Run samples forward through all stages; return the outputs on ranks of the last stage, and None on the others.

    `around` makes the context of the forward of each chunk. Called without gradients, and collective over the ranks
    that share the model's layers and weights: if one does not call it, the others wait until the time limit. A model that
    takes gradients within its forward can, and its outputs come detached.
    """
    stage, outputs = assembly.parallel.stage, None
    takes_gradients = bool(assembly.model.spec.differentiates_at)
    for chunk in range(stage.num_chunks):
        with around(), forward_only(takes_gradients=takes_gradients):
            outputs = stage.forward(0, chunk, samples)
    stage.finish_forward()
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
    mode = DropoutMode(model.module, Draw(seed, _EVALUATION, samples), model.mask_part)
    mode.allows_random = True
    return mode


@contextmanager
def _forward_only(assembly: Assembly) -> Iterator[None]:
    """Put the model into evaluation mode inside, without gradients, and restore its modes afterwards."""
    module = assembly.model.module
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), precision.raise_islands(assembly.parallel.program):
            yield
    finally:
        for part, training in modes.items():
            part.training = training
    assembly.weights.store.end_forward_only()


@contextmanager
def use_averages(run: PreparedRun) -> Iterator[None]:
    """Let a run's model have the averages of its weights inside, which hold the weights meanwhile.

    Before the first update the average of a weight is the weight.

    Collective over the world, see [Note: collective calls].

    Raises:
        ModelError: the job averages none, or they are in use already.
    """
    updater = run.updater
    averages = updater.averages
    if averages is None:
        raise ModelError("the weights of this run are not averaged: train.ema = 0.999 works")
    averages.refuse_in_use("averaged")
    _exchange(run, averages, updater.pieces)
    averages.are_in_use = True
    try:
        yield
    finally:
        averages.are_in_use = False
        _exchange(run, averages, updater.pieces)


@torch.no_grad()
def _exchange(run: PreparedRun, averages: WeightAverages, pieces: Sequence[Piece]) -> None:
    """Exchange masters and averages, one piece at a time, and publish the masters."""
    for piece in pieces:
        if (average := averages.of(piece)) is None:
            continue
        before = piece.master().clone()
        piece.set_master(average)
        average.copy_(before)
    run.assembly.weights.updater.publish()
    run.assembly.weights.store.publish()
