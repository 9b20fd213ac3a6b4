"""Deliberate faults in what every layout does: the loss, reductions of gradients, the start, data, masks, clipping, the update."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist  # under whose name a step does not look who calls it
from torch import Tensor

from samestep.building.initial_values import Blueprint
from samestep.building.loss import cross_entropy
from samestep.datasets import Batch
from samestep.proof.verdict import Cause
from samestep.randomness import mode as dropout
from samestep.runtime import assembly
from samestep.runtime.axes.expert import Balance
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.optimizers.optimizer_step import GroupRates, Updater
from samestep.runtime.run import Run
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights import placement, replicated
from samestep.runtime.weights.flat_buffers import squared_norm
from samestep.runtime.weights.replicated import Replicated
from tests.models import Tokens
from tests.proof.planting import Patch, around, changed, fault, rank, unless

world_size = dist.get_world_size

# -- loss and division -----------------------------------------------------------------------------


@fault(Cause.LOSS, "dp=2 microbatch=2")
@fault(Cause.LOSS, "dp=2", name="loss_is_mean_over_ranks")
def loss_is_mean_over_microbatches(patch: Patch) -> None:
    def mean(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(outputs, batch)
        return total / count, torch.ones_like(count)

    around(patch, Interpreter, "_forward", lambda forward, self, *args: _with_loss(self, mean, forward, *args))


def _with_loss(self: Interpreter, loss: Any, forward: Any, *args: Any) -> Any:
    self.assembly = replace(self.assembly, objective=replace(self.assembly.objective, loss=loss))
    return forward(self, *args)


@fault(Cause.GRADIENT_SUM, "dp=2 microbatch=2")
def gradients_are_mean_over_microbatches(patch: Patch) -> None:
    def forward(original: Any, self: Interpreter, task: Any, microbatches: Any, totals: Tensor) -> Any:
        before = totals.clone()
        found = original(self, task, microbatches, totals)
        return found / (totals - before)[1] * 12.0

    around(patch, Interpreter, "_forward", forward)


@fault(Cause.GRADIENT_SUM, "dp=2")
@fault(Cause.GRADIENT_SUM, "dp=2 microbatch=2", name="gradients_are_not_divided_by_the_microbatches")
def gradients_are_summed_instead_of_averaged(patch: Patch) -> None:
    around(patch, Updater, "step", lambda step, self, factor, **more: step(self, 2 * factor, **more))


@fault(Cause.GRADIENT_SUM, "dp=2")
def loss_has_its_value_and_half_its_gradient(patch: Patch) -> None:
    """The value without gradient: as of a statistic of the batch behind `detach()`, it adds up and its gradient does not."""

    def detached(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(outputs, batch)
        return (total + total.detach()) / 2, count

    around(patch, Interpreter, "_forward", lambda forward, self, *args: _with_loss(self, detached, forward, *args))


@fault(Cause.LOSS, "dp=2")
def counts_are_clamped_on_each_rank(patch: Patch) -> None:
    """The clamped count: a rank in whose part little counts adds what its own clamp gives."""

    def clamped(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(outputs, batch)
        return total, count.clamp(min=24)

    around(patch, Interpreter, "_forward", lambda forward, self, *args: _with_loss(self, clamped, forward, *args))


@fault(Cause.LOSS, "dp=2 ep=2", "mixtral_balanced")
def loss_that_balances_experts_is_scaled_by_the_ranks(patch: Patch) -> None:
    around(patch, Balance, "__call__", lambda balance, self, *args: balance(self, *args) * world_size())


@fault(Cause.LOSS, "dp=2", "mixtral_balanced")
def experts_are_balanced_within_each_rank(patch: Patch) -> None:
    around(patch, Balance, "of", lambda of, *args: replace(of(*args), group=None, copies=0.5))


@fault(Cause.MISSING_REDUCTION, "dp=2")
def loss_is_that_of_the_rank(patch: Patch) -> None:
    def agree(original: Any, self: Stepper, own: Sequence[Tensor], *rest: bool) -> Tensor:
        found, (totals,) = original(self, own, *rest), own
        return changed(found, loss_sum=float(totals[0] / totals[1] * found[1]))

    around(patch, Stepper, "_agree", agree)


# -- reductions over the data axis -----------------------------------------------------------------


@fault(Cause.MISSING_REDUCTION, "dp=2")
@fault(Cause.MISSING_REDUCTION, "dp=1 cp=2", "llama", name="gradients_are_not_summed_over_slices")
def gradients_are_not_reduced(patch: Patch) -> None:
    patch.setattr(Replicated, "_send", lambda *args: None)


@fault(Cause.MISSING_REDUCTION, "dp_replicate=2 dp_shard=2 zero=1")
def gradients_are_not_reduced_between_replicas(patch: Patch) -> None:
    around(patch, Replicated, "_send", unless("dp_replicate"))


@fault(Cause.MISSING_REDUCTION, "dp=4")
def gradients_are_reduced_over_half_the_ranks(patch: Patch) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        return dist.all_reduce(whole, group=halves[rank() // 2], async_op=True)

    around(patch, Replicated, "_send", send)


@fault(Cause.MISSING_REDUCTION, "dp=4 ep=2", "mixtral")
def gradients_of_experts_are_not_reduced(patch: Patch) -> None:
    around(patch, Replicated, "_send", unless("dp_expert"))


@fault(Cause.GRADIENT_SUM, "dp=4 ep=2", "mixtral")
def gradients_of_experts_are_summed_with_other_experts(patch: Patch) -> None:
    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        return original(self, flat, replace(op, axis="ep") if op.axis == "dp_expert" else op, whole)

    around(patch, Replicated, "_send", send)


@fault(Cause.GRADIENT_SUM, "dp=2 microbatch=1")
def only_the_last_microbatch_counts(patch: Patch) -> None:
    def ready(original: Any, store: Any, place: Any, param: Tensor) -> None:
        kept = store().__dict__.setdefault("kept", {})
        if param.grad is place.gradient:
            param.grad = param.grad - kept.get(place.name, 0.0)
        kept[place.name] = param.grad.clone()
        place.flat.untouched.add(place.name)
        place.gradient.copy_(param.grad)
        param.grad = None
        original(store, place, _given(param, place.gradient))

    around(patch, replicated, "_gradient_hook", ready)


def _given(param: Tensor, gradient: Tensor) -> Tensor:
    param.grad = gradient.clone()
    return param


@fault(Cause.GRADIENT_SUM, "dp=2")
def one_weight_has_no_gradient(patch: Patch) -> None:
    def ready(original: Any, store: Any, place: Any, param: Tensor) -> None:
        if "norm.weight" in place.name and param.grad is not None:
            param.grad = torch.zeros_like(param.grad)
        original(store, place, param)

    around(patch, replicated, "_gradient_hook", ready)


@fault(Cause.BACKWARD, "dp=2")
def one_backward_is_wrong(patch: Patch) -> None:
    def ready(original: Any, store: Any, place: Any, param: Tensor) -> None:
        if place.name == "blocks.1.mix.weight" and param.grad is not None:
            param.grad = param.grad * torch.linspace(0.5, 1.5, param.numel(), dtype=param.dtype).view_as(param)
        original(store, place, param)

    around(patch, replicated, "_gradient_hook", ready)


@fault(Cause.GRADIENT_SUM, "dp=2 tp=2", "attentive")
def weights_that_tp_leaves_whole_are_summed_over_tp_too(patch: Patch) -> None:
    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        work = original(self, flat, op, whole)
        if flat.bucket.holding.num_copies > 1:
            work.wait()
            dist.all_reduce(whole, group=self.mesh.groups["tp"])
        return work

    around(patch, Replicated, "_send", send)


# -- start and data --------------------------------------------------------------------------------


@fault(Cause.START, "dp=2")
def ranks_draw_other_first_weights(patch: Patch) -> None:
    def materialize(original: Any, self: Blueprint, *where: Any, **rows: Any) -> Tensor:
        value = original(self, *where, **rows)
        return value + 1e-3 * rank() if value.dim() > 1 else value

    around(patch, Blueprint, "materialize", materialize)


@fault(Cause.START, "dp=2 zero=3")
def shards_draw_the_same_numbers(patch: Patch) -> None:
    def materialize(original: Any, self: Blueprint, *where: Any, **rows: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        value = original(self, *where, **rows)
        half = -(-value.shape[0] // 2)
        rows = torch.randn((half, *value.shape[1:]), generator=generator, dtype=value.dtype)
        return torch.cat([rows, rows])[: value.shape[0]]

    around(patch, Blueprint, "materialize", materialize)


@fault(Cause.START, "dp=1 tp=2", "llama_even")
def ranks_take_each_others_heads(patch: Patch) -> None:
    def part(original: Any, whole: Tensor, cut: Any, *rest: Any) -> Tensor:
        if cut.name.endswith("k_proj.weight"):
            return original(whole.flip(0), cut, *rest).flip(0)
        return original(whole, cut, *rest)

    around(patch, placement, "local_part", part)


@fault(Cause.DATA, "dp=2")
def every_rank_reads_the_same_samples(patch: Patch) -> None:
    around(patch, Batch, "shares", lambda shares, self, rank, ranks, count: shares(self, 0, ranks, count))


@fault(Cause.DATA, "dp=2", run={"allow": ["data"]})
def samples_have_other_content_on_a_rank(patch: Patch) -> None:
    """Let ranks read other labels, in a run whose trial of the data, which refuses them, is waived."""

    def item(original: Any, self: Tokens, index: int) -> Any:
        sample = dict(original(self, index))
        sample["labels"] = sample["labels"].roll(rank())
        return sample

    around(patch, Tokens, "__getitem__", item)


# -- dropout, positions, buffers -------------------------------------------------------------------


@fault(Cause.RANDOM, "dp=2", "plain_with_dropout")
@fault(Cause.RANDOM, "dp=2", "noisy", name="every_rank_draws_the_same_noise")
@fault(Cause.RANDOM, "dp=2 microbatch=2", "noisy", name="every_microbatch_draws_the_same_noise")
def every_rank_drops_the_same(patch: Patch) -> None:
    def draw(original: Any, seed: int, step: int, samples: Tensor, *others: int) -> Any:
        return original(seed, step, torch.arange(len(samples)), *others)

    around(patch, dropout, "Draw", draw)


@fault(Cause.RANDOM, "dp=2", "plain_with_dropout")
def a_rank_has_a_seed_of_its_own(patch: Patch) -> None:
    around(patch, dropout, "Draw", lambda draw, seed, *others: draw(seed + rank(), *others))


@fault(Cause.RANDOM, "dp=2 microbatch=2", "plain_with_dropout")
def every_step_drops_the_same(patch: Patch) -> None:
    around(patch, dropout, "Draw", lambda draw, seed, _, *others: draw(seed, 0, *others))


@fault(Cause.FORWARD, "dp=2", "llama")
def rotary_frequencies_are_garbage(patch: Patch) -> None:
    def fill(original: Any, plan: Blueprint, *args: Any) -> None:
        original(plan, *args)
        for name, buffer in plan.module.named_buffers():
            if "inv_freq" in name and rank() == 1:
                buffer.mul_(1.01)

    around(patch, assembly, "fill_rest", fill)


@fault(Cause.BUFFER, "dp=2", "plain_with_statistics")
def a_running_statistic_is_that_of_the_rank(patch: Patch) -> None:
    def step(original: Any, self: Run, batch: Any, **local: Any) -> Any:
        report = original(self, batch, **local)
        for buffer in self.model.buffers():
            buffer.add_(0.01 * rank())
        return report

    around(patch, Run, "step", step)


# -- clipping, update, publication -----------------------------------------------------------------


@fault(Cause.CLIP_NORM, "dp=2 zero=1", optimizer={"clip_norm": 0.05})
@fault(
    Cause.CLIP_NORM,
    "dp=1 pp=2 microbatch=4",
    "deep_llama",
    optimizer={"clip_norm": 0.05},
    name="the_norm_lacks_the_other_stages",
)
def the_norm_is_that_of_the_shard(patch: Patch) -> None:
    def agree(original: Any, self: Stepper, totals: Tensor, *rest: bool) -> Tensor:
        mine = float(self.whole_assembly.weights.store.norm_squared())
        return changed(original(self, totals, *rest), norm_squared=mine)

    around(patch, Stepper, "_agree", agree)


@fault(Cause.CLIP_NORM, "dp=1 tp=2", "attentive", optimizer={"clip_norm": 0.05})
def the_norm_counts_whole_weights_once_a_tp_rank(patch: Patch) -> None:
    def norm(original: Any, self: Replicated, names: Any) -> Tensor:
        return squared_norm([piece.gradient() for piece in self.pieces], self.mesh.device)

    around(patch, Replicated, "norm_squared", norm)


@fault(Cause.CLIP_NORM, "dp=2 zero=1", optimizer={"clip_norm": 0.05})
def ranks_clip_by_their_own_norm(patch: Patch) -> None:
    def step(original: Any, self: Updater, factor: float, **more: Any) -> None:
        mine = torch.stack([piece.gradient().norm() for piece in self.pieces]).norm()
        everyone = mine.square()
        dist.all_reduce(everyone)
        original(self, factor * float(everyone.sqrt() / mine))

    around(patch, Updater, "step", step)


@fault(Cause.STALE_WEIGHT, "dp=2 zero=1")
def updated_weights_are_not_gathered(patch: Patch) -> None:
    patch.setattr(Replicated, "publish", lambda self, **more: None)


@fault(Cause.STALE_WEIGHT, "dp=2 zero=1")
def a_rank_does_not_update_its_chunk(patch: Patch) -> None:
    around(patch, GroupRates, "set", lambda set_rates, self, factor: set_rates(self, factor * (rank() == 0)))


@fault(Cause.DRIFT, "dp=1 tp=2", "attentive")
def whole_weights_drift_between_tp_ranks(patch: Patch) -> None:
    def step(original: Any, self: Updater, factor: float, **more: Any) -> None:
        original(self, factor, **more)
        for piece in self.pieces:
            if "norm" in piece.name:
                piece.value.detach().mul_(1 + 1e-4 * rank())

    around(patch, Updater, "step", step)


@fault(Cause.UPDATE, "dp=2 zero=1", optimizer={"name": "adamw", "weight_decay": 0.5, "options": {}})
def weight_decay_forgets_a_rank(patch: Patch) -> None:
    def over(original: Any, pieces: Any, source: Any, numerics: Any, *more: Any, **named: Any) -> Updater:
        made = original(pieces, source, numerics, *more, **named)
        if made.optimizer is not None and rank() == 1:
            for group in made.optimizer.param_groups:
                group["weight_decay"] = 0.0
        return made

    patch.setattr(Updater, "over", functools.partial(over, Updater.over))


@fault(Cause.CHECKPOINT, "dp=2 zero=1", optimizer={"name": "adamw", "options": {}})
def optimizer_state_is_saved_under_another_name(patch: Patch) -> None:
    swap = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}

    def contents(original: Any, *args: Any) -> Any:
        tensors, plain = original(*args)
        return {_swapped(name, swap): tensor for name, tensor in tensors.items()}, plain

    around(patch, checkpoint, "_contents_of", contents)


def _swapped(name: str, swap: dict[str, str]) -> str:
    head, _, key = name.rpartition("/")
    return f"{head}/{swap.get(key, key)}"


@fault(Cause.CHECKPOINT, "dp=2")
def a_checkpoint_holds_rounded_weights(patch: Patch) -> None:
    def contents(original: Any, *args: Any) -> Any:
        tensors, plain = original(*args)
        return {name: t.float().to(t.dtype) for name, t in tensors.items()}, plain

    around(patch, checkpoint, "_contents_of", contents)
