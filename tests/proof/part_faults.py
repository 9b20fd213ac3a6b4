"""Deliberate faults in one part of a step: a factor of a stage, an expert or a chunk of the loss; a norm that lacks an axis;
random numbers of a rank's part; and in what a run goes on from: weights without a gradient, resumes, calls of one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist  # under whose name a step does not look who calls it
from torch import Tensor

from samestep.building import chunked_cross_entropy
from samestep.proof.verdict import Cause
from samestep.randomness.masks import MaskSlice
from samestep.runtime.axes.batch_values import BatchValues
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.run import Run
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.pieces import Piece
from tests.models import AdaptedLayer
from tests.proof.planting import Patch, around, changed, fault, rank

# -- a factor of one part --------------------------------------------------------------------------


def _scaled(patch: Patch, scale: Callable[[Updater, Piece], None]) -> None:
    """Change gradients behind their reductions, before the optimizer has them."""

    def step(original: Any, self: Updater, factor: float, **more: Any) -> None:
        for piece in self.pieces:
            scale(self, piece)
        original(self, factor, **more)

    around(patch, Updater, "step", step)


@fault(Cause.GRADIENT_SUM, "dp=2 pp=2 zero=1 microbatch=1", "deep_llama")
def the_first_stage_divides_by_its_microbatches_once_more(patch: Patch) -> None:
    _scaled(patch, lambda updater, piece: piece.gradient().div_(4.0 if rank() < 2 else 1.0))  # type: ignore[arg-type, return-value]


@fault(Cause.BACKWARD, "dp=2", "centred")
def gradients_of_values_of_all_samples_are_scaled_by_dp(patch: Patch) -> None:
    around(patch, BatchValues, "sum_back", lambda summed, self, gradient: summed(self, gradient) * 2.0)


@fault(Cause.GRADIENT_SUM, "dp=2 ep=2", "mixtral")
def gradients_of_experts_are_scaled_by_ep(patch: Patch) -> None:
    _scaled(patch, lambda updater, piece: piece.gradient().mul_(2.0 if ".experts." in piece.name else 1.0))  # type: ignore[arg-type, return-value]


@fault(Cause.GRADIENT_SUM, "dp=2 zero=3 loss_chunk=5", "plain")
def the_first_chunk_of_the_loss_counts_twice(patch: Patch) -> None:
    _scale_chunks(patch, lambda number: 2.0 if number == 0 else 1.0)


def _scale_chunks(patch: Patch, factor: Callable[[int], float]) -> None:
    def add(original: Any, self: Any, rows: slice, product: Any, logits: Tensor, gradient: Tensor) -> Any:
        return original(self, rows, product, logits, gradient * factor(rows.start // self._head.chunking.tokens))

    around(patch, chunked_cross_entropy._Gradients, "add", add)


# -- a norm that lacks an axis ---------------------------------------------------------------------


def _norm_without(patch: Patch, axis: str) -> None:
    """Let each rank have the norm of what the ranks with its own place on an axis hold."""

    def agree(original: Any, self: Stepper, own: Any, *rest: bool) -> Tensor:
        found, mesh = original(self, own, *rest), self.held.parallel.mesh
        everyone = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.stack([own[0][2].double(), torch.tensor(float(mesh.index(axis))).double()]))
        mine = sum(float(norm) for norm, index in everyone if int(index) == mesh.index(axis))
        return changed(found, norm_squared=mine)

    around(patch, Stepper, "_agree", agree)


CLIPPED = {"clip_norm": 0.05}


@fault(Cause.CLIP_NORM, "dp=1 tp=2", "llama_even", optimizer=CLIPPED)
def the_norm_lacks_the_other_tp_ranks(patch: Patch) -> None:
    _norm_without(patch, "tp")


@fault(Cause.CLIP_NORM, "dp=2 ep=2", "mixtral", optimizer=CLIPPED)
def the_norm_lacks_the_experts_of_other_ranks(patch: Patch) -> None:
    _norm_without(patch, "ep")


@fault(Cause.CLIP_NORM, "dp=1 tp=2 pp=2 microbatch=4", "deep_llama", optimizer=CLIPPED)
def the_norm_is_summed_over_tp_alone(patch: Patch) -> None:
    _norm_without(patch, "pp")


# -- random numbers of a rank's part ---------------------------------------------------------------


@fault(Cause.RANDOM, "dp=1 tp=2", "dropping_attentive")
@fault(
    Cause.RANDOM, "dp=1 tp=2 sequence_parallel", "dropping_gpt2", name="ranks_of_sequence_parallel_drop_the_same_tokens"
)
@fault(Cause.FORWARD, "dp=1 cp=2", "dropping_llama", name="cp_ranks_drop_the_same_keys")
def tp_ranks_drop_the_same_neurons(patch: Patch) -> None:
    """Let every rank draw the numbers of the first one's part."""

    def cuts(original: Any, self: MaskSlice, *args: Any) -> Any:
        return tuple((dim, degree, 0) for dim, degree, _ in original(self, *args))

    around(patch, MaskSlice, "cuts", cuts)


# -- weights without a gradient --------------------------------------------------------------------


@fault(Cause.UPDATE, "dp=2", "sometimes")
@fault(Cause.UPDATE, "dp=2 zero=3", "sometimes", name="a_shard_without_a_gradient_is_moved")
@fault(
    Cause.UPDATE,
    "dp=2",
    "idle_head",
    optimizer={"name": "adamw", "weight_decay": 0.5, "options": {}},
    name="weight_decay_moves_a_head_that_no_loss_reads",
)
def momentum_moves_a_weight_without_a_gradient(patch: Patch) -> None:
    """Let the optimizer update weights that a step gave no gradient, as if it were zero."""

    def update(original: Any, self: Updater, *args: Any, **more: Any) -> None:
        self.unused = frozenset()
        original(self, *args, **more)

    around(patch, Updater, "update", update)


# -- calls of one module ---------------------------------------------------------------------------


@fault(Cause.FORWARD, "dp=2", "adapted")
def the_reference_runs_with_its_adapters_on(patch: Patch) -> None:
    around(patch, AdaptedLayer, "turned", lambda turned, self, is_on: turned(self, True))


# -- resumes ---------------------------------------------------------------------------------------


def _behind_load(patch: Patch, change: Callable[[Run], None]) -> None:
    def load(original: Any, run: Run, *args: Any, **more: Any) -> None:
        original(run, *args, **more)
        change(run)

    around(patch, checkpoint, "load", load)


@fault(Cause.RESUME, "dp=2")
def a_resume_counts_the_steps_twice(patch: Patch) -> None:
    _behind_load(patch, lambda run: setattr(run, "steps_taken", 2 * run.steps_taken))


@fault(Cause.CHECKPOINT, "dp=2 zero=3", optimizer={"name": "adamw", "options": {}})
def a_resume_counts_a_step_of_the_optimizer_twice(patch: Patch) -> None:
    def change(run: Run) -> None:
        assert run.updater.optimizer is not None
        for state in run.updater.optimizer.state.values():
            state["step"] += 1

    _behind_load(patch, change)


@fault(Cause.CHECKPOINT, "dp=2")
def a_second_resume_begins_without_momentum(patch: Patch) -> None:
    def change(run: Run) -> None:
        run.__dict__["resumes"] = run.__dict__.get("resumes", 0) + 1
        assert run.updater.optimizer is not None
        if run.__dict__["resumes"] == 2:
            run.updater.optimizer.state.clear()

    _behind_load(patch, change)
