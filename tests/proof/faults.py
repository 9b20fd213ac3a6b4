"""Deliberate faults of the classes that were found in the wild, each put into the runtime for the length of one run.

A fault is a function of a monkeypatch; it runs on every rank of the layout, never on the one device that it is held
against. The table of them stands in docs/verify.md; `test_faults.py` proves every row of it.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint
from samestep.building.loss import cross_entropy
from samestep.datasets import Batch
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ParamSpec
from samestep.program.bodies import ends_step
from samestep.program.holding import Holding
from samestep.program.step import StepSpec
from samestep.proof import sides, verify
from samestep.proof.verdict import Cause, Verdict
from samestep.runtime import assembly, checkpoint, optimizer_step, placement
from samestep.runtime.axes import context, pipeline, sequence, tensor
from samestep.runtime.axes.data import Replicated
from samestep.runtime.axes.expert import Balance
from samestep.runtime.axes.weight_gradients import Deferred
from samestep.runtime.dropout import mode as dropout
from samestep.runtime.optimizer_step import Updater
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_observer import StepScalars
from samestep.schedules import Action, TaskKind
from samestep.tracing.attention import AttentionCall
from tests.laboratory import job_of, on_ranks, source_of
from tests.models import Tokens

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """One fault: where it shows, what it is, what `verify` must call it."""

    cause: Cause
    layout: str
    install: Callable[[Patch], None]
    model: str = "plain"
    job: dict[str, Any] = field(default_factory=dict)
    own_precision: bool = False
    """It shows in the job's own precision alone."""


FAULTS: dict[str, Fault] = {}


def fault(cause: Cause, layout: str, model: str = "plain", *, own_precision: bool = False, **job: Any) -> Any:
    """Enter a function into the list under its own name."""

    def enter(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[install.__name__] = Fault(cause, layout, install, model, job, own_precision)
        return install

    return enter


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args)` stand in for a function."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def rank() -> int:
    return dist.get_rank()


# -- loss and division -----------------------------------------------------------------------------


@fault(Cause.MEAN_OF_MEANS, "dp=2 microbatch=2")
def loss_is_mean_over_microbatches(patch: Patch) -> None:
    def mean(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(outputs, batch)
        return total / count, torch.ones_like(count)

    around(patch, Run, "_forward", lambda forward, self, *args: _with_loss(self, mean, forward, *args))


@fault(Cause.MEAN_OF_MEANS, "dp=2")
def loss_is_mean_over_ranks(patch: Patch) -> None:
    loss_is_mean_over_microbatches(patch)


def _with_loss(self: Run, loss: Any, forward: Any, *args: Any) -> Any:
    self.adopt(replace(self.assembly, objective=replace(self.assembly.objective, loss=loss)))
    return forward(self, *args)


@fault(Cause.MEAN_OF_MEANS, "dp=2 microbatch=2")
def gradients_are_mean_over_microbatches(patch: Patch) -> None:
    def forward(original: Any, self: Run, task: Any, microbatches: Any, totals: Tensor) -> Any:
        before = totals.clone()
        found = original(self, task, microbatches, totals)
        return found / (totals - before)[1] * 12.0

    around(patch, Run, "_forward", forward)


@fault(Cause.GRADIENT_SCALE, "dp=2")
def gradients_are_summed_instead_of_averaged(patch: Patch) -> None:
    around(patch, Updater, "step", lambda step, self, factor: step(self, 2 * factor))


@fault(Cause.GRADIENT_SCALE, "dp=4 zero=1")
def gradients_are_divided_by_the_ranks_once_more(patch: Patch) -> None:
    around(patch, Updater, "step", lambda step, self, factor: step(self, factor / 4))


@fault(Cause.GRADIENT_SCALE, "dp=2 microbatch=2")
def gradients_are_not_divided_by_the_microbatches(patch: Patch) -> None:
    around(patch, Updater, "step", lambda step, self, factor: step(self, 2 * factor))


@fault(Cause.LOSS_SCALE, "dp=2")
def loss_is_divided_twice(patch: Patch) -> None:
    def agree(original: Any, self: Run, totals: Tensor) -> StepScalars:
        found = original(self, totals)
        return replace(found, count=2 * found.count)

    around(patch, Run, "_agree", agree)


@fault(Cause.AUXILIARY_LOSS, "dp=2 ep=2", "mixtral_balanced")
def loss_that_balances_experts_is_scaled_by_the_ranks(patch: Patch) -> None:
    around(patch, Balance, "__call__", lambda balance, self, *args: balance(self, *args) * dist.get_world_size())


@fault(Cause.AUXILIARY_LOSS, "dp=2", "mixtral_balanced")
def experts_are_balanced_within_each_rank(patch: Patch) -> None:
    around(patch, Balance, "of", lambda of, *args: replace(of(*args), group=None, copies=0.5))


@fault(Cause.MISSING_REDUCTION, "dp=2")
def loss_is_that_of_the_rank(patch: Patch) -> None:
    def agree(original: Any, self: Run, totals: Tensor) -> StepScalars:
        found = original(self, totals)
        return replace(found, loss_sum=float(totals[0] / totals[1]) * found.count)

    around(patch, Run, "_agree", agree)


# -- reductions over the data axis -----------------------------------------------------------------


@fault(Cause.MISSING_REDUCTION, "dp=2")
def gradients_are_not_reduced(patch: Patch) -> None:
    patch.setattr(Replicated, "_send", lambda *args: None)


@fault(Cause.MISSING_REDUCTION, "dp_replicate=2 dp_shard=2 zero=1")
def gradients_are_not_reduced_between_replicas(patch: Patch) -> None:
    around(patch, Replicated, "_send", _unless("dp_replicate"))


def _unless(axis: str) -> Callable[..., Any]:
    return lambda send, self, flat, op, whole: None if op.axis == axis else send(self, flat, op, whole)


@fault(Cause.MISSING_REDUCTION, "dp=4")
def gradients_are_reduced_over_half_the_ranks(patch: Patch) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        return dist.all_reduce(whole, group=halves[rank() // 2], async_op=True)

    around(patch, Replicated, "_send", send)


@fault(Cause.MISSING_REDUCTION, "dp=4 ep=2", "mixtral")
def gradients_of_experts_are_not_reduced(patch: Patch) -> None:
    around(patch, Replicated, "_send", _unless("dp_expert"))


@fault(Cause.WRONG_GROUP, "dp=4 ep=2", "mixtral")
def gradients_of_experts_are_summed_with_other_experts(patch: Patch) -> None:
    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        return original(self, flat, replace(op, axis="ep") if op.axis == "dp_expert" else op, whole)

    around(patch, Replicated, "_send", send)


@fault(Cause.WRONG_GROUP, "dp=4")
def gradients_are_those_of_other_ranks(patch: Patch) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        dist.all_reduce(whole, group=halves[rank() // 2])
        others = [torch.empty_like(whole) for _ in range(4)]
        dist.all_gather(others, whole)
        whole.copy_(others[(rank() + 2) % 4])

    around(patch, Replicated, "_send", send)


@fault(Cause.LAST_MICROBATCH, "dp=2 microbatch=1")
def only_the_last_microbatch_counts(patch: Patch) -> None:
    def ready(original: Any, self: Replicated, place: Any, param: Tensor) -> None:
        if param.grad is place.gradient:
            param.grad = param.grad - self.__dict__.setdefault("kept", {}).get(place.name, 0.0)
        self.__dict__.setdefault("kept", {})[place.name] = param.grad.clone()
        place.flat.untouched.add(place.name)
        place.gradient.copy_(param.grad)
        param.grad = None
        original(self, place, _given(param, place.gradient))

    around(patch, Replicated, "_gradient_ready", ready)


def _given(param: Tensor, gradient: Tensor) -> Tensor:
    param.grad = gradient.clone()
    return param


@fault(Cause.LAST_MICROBATCH, "dp=2 microbatch=1")
def the_first_microbatch_is_forgotten(patch: Patch) -> None:
    around(
        patch,
        Run,
        "_backward",
        lambda backward, self, task, loss: backward(self, task, loss * float(task.microbatch > 0)),
    )


@fault(Cause.DOUBLE_REDUCTION, "dp=2 microbatch=1")
def a_microbatch_counts_twice(patch: Patch) -> None:
    around(
        patch,
        Run,
        "_backward",
        lambda backward, self, task, loss: backward(self, task, loss * (2.0 if task.microbatch == 1 else 1.0)),
    )


@fault(Cause.MISSING_GRADIENT, "dp=2")
def one_weight_has_no_gradient(patch: Patch) -> None:
    def ready(original: Any, self: Replicated, place: Any, param: Tensor) -> None:
        if "norm.weight" in place.name and param.grad is not None:
            param.grad = torch.zeros_like(param.grad)
        original(self, place, param)

    around(patch, Replicated, "_gradient_ready", ready)


@fault(Cause.BACKWARD, "dp=2")
def one_backward_is_wrong(patch: Patch) -> None:
    def ready(original: Any, self: Replicated, place: Any, param: Tensor) -> None:
        if place.name == "blocks.1.mix.weight" and param.grad is not None:
            param.grad = param.grad * torch.linspace(0.5, 1.5, param.numel(), dtype=param.dtype).view_as(param)
        original(self, place, param)

    around(patch, Replicated, "_gradient_ready", ready)


@fault(Cause.DOUBLE_REDUCTION, "dp=2 tp=2", "attentive")
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
    def materialize(original: Any, self: Blueprint, name: str, device: Any, dtype: Any) -> Tensor:
        value = original(self, name, device, dtype)
        return value + 1e-3 * rank() if value.dim() > 1 else value

    around(patch, Blueprint, "materialize", materialize)


@fault(Cause.START, "dp=2 zero=3")
def shards_draw_the_same_numbers(patch: Patch) -> None:
    def materialize(original: Any, self: Blueprint, name: str, device: Any, dtype: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        value = original(self, name, device, dtype)
        half = -(-value.shape[0] // 2)
        rows = torch.randn((half, *value.shape[1:]), generator=generator, dtype=value.dtype)
        return torch.cat([rows, rows])[: value.shape[0]]

    around(patch, Blueprint, "materialize", materialize)


@fault(Cause.ROWS_SWAPPED, "dp=1 tp=2", "llama_even")
def ranks_take_each_others_heads(patch: Patch) -> None:
    def part(original: Any, whole: Tensor, cut: Any, *rest: Any) -> Tensor:
        if cut.name.endswith("k_proj.weight"):
            return original(whole.flip(0), cut, *rest).flip(0)
        return original(whole, cut, *rest)

    around(patch, placement, "local_part", part)


@fault(Cause.DATA, "dp=2")
def every_rank_reads_the_same_samples(patch: Patch) -> None:
    around(patch, Batch, "shares", lambda shares, self, rank, ranks, count: shares(self, 0, ranks, count))


@fault(Cause.DATA, "dp=2")
def a_rank_reads_the_samples_of_the_next_step(patch: Patch) -> None:
    def shares(original: Any, self: Batch, rank: int, ranks: int, count: int) -> Any:
        return [part + rank for part in original(self, rank, ranks, count)]

    around(patch, Batch, "shares", shares)


@fault(Cause.DATA, "dp=2")
def samples_have_other_content_on_a_rank(patch: Patch) -> None:
    def item(original: Any, self: Tokens, index: int) -> Any:
        sample = dict(original(self, index))
        sample["labels"] = sample["labels"].roll(rank())
        return sample

    around(patch, Tokens, "__getitem__", item)


# -- dropout, positions, buffers -------------------------------------------------------------------


@fault(Cause.DROPOUT, "dp=2", "plain_with_dropout")
def every_rank_drops_the_same(patch: Patch) -> None:
    def draw(original: Any, seed: int, step: int, samples: Tensor) -> Any:
        return original(seed, step, torch.arange(len(samples)))

    around(patch, dropout, "Draw", draw)


@fault(Cause.DROPOUT, "dp=2", "plain_with_dropout")
def a_rank_has_a_seed_of_its_own(patch: Patch) -> None:
    around(patch, dropout, "Draw", lambda draw, seed, step, samples: draw(seed + rank(), step, samples))


@fault(Cause.DROPOUT, "dp=2 microbatch=2", "plain_with_dropout")
def every_step_drops_the_same(patch: Patch) -> None:
    around(patch, dropout, "Draw", lambda draw, seed, step, samples: draw(seed, 0, samples))


@fault(Cause.POSITIONS, "dp=2", "llama")
def rotary_frequencies_are_garbage(patch: Patch) -> None:
    def fill(original: Any, plan: Blueprint, *args: Any) -> None:
        original(plan, *args)
        for name, buffer in plan.module.named_buffers():
            if "inv_freq" in name and rank() == 1:
                buffer.mul_(1.01)

    around(patch, assembly, "fill_rest", fill)


@fault(Cause.BUFFER, "dp=2", "plain_with_statistics")
def a_running_statistic_is_that_of_the_rank(patch: Patch) -> None:
    def step(original: Any, self: Run, batch: Any) -> Any:
        report = original(self, batch)
        for buffer in self.model.buffers():
            buffer.add_(0.01 * rank())
        return report

    around(patch, Run, "step", step)


# -- clipping, update, publication -----------------------------------------------------------------


@fault(Cause.CLIP_NORM, "dp=2 zero=1", optimizer={"clip_norm": 0.05})
def the_norm_is_that_of_the_shard(patch: Patch) -> None:
    def agree(original: Any, self: Run, totals: Tensor) -> StepScalars:
        mine = float(self.assembly.weights.store.norm_squared())
        return replace(original(self, totals), norm_squared=mine)

    around(patch, Run, "_agree", agree)


@fault(Cause.CLIP_NORM, "dp=1 tp=2", "attentive", optimizer={"clip_norm": 0.05})
def the_norm_counts_whole_weights_once_a_tp_rank(patch: Patch) -> None:
    def norm(original: Any, self: Replicated) -> Tensor:
        return optimizer_step.squared_norm([piece.gradient() for piece in self.pieces], self.mesh.device)

    around(patch, Replicated, "norm_squared", norm)


@fault(Cause.CLIP_NORM, "dp=1 pp=2 microbatch=4", "deep_llama", optimizer={"clip_norm": 0.05})
def the_norm_lacks_the_other_stages(patch: Patch) -> None:
    def agree(original: Any, self: Run, totals: Tensor) -> StepScalars:
        mine = float(self.assembly.weights.store.norm_squared())
        return replace(original(self, totals), norm_squared=mine)

    around(patch, Run, "_agree", agree)


@fault(Cause.CLIP_NORM, "dp=2 zero=1", optimizer={"clip_norm": 0.05})
def ranks_clip_by_their_own_norm(patch: Patch) -> None:
    def step(original: Any, self: Updater, factor: float) -> None:
        mine = torch.stack([piece.gradient().norm() for piece in self.pieces]).norm()
        everyone = mine.square()
        dist.all_reduce(everyone)
        original(self, factor * float(everyone.sqrt() / mine))

    around(patch, Updater, "step", step)


@fault(Cause.STALE_WEIGHT, "dp=2 zero=1")
def updated_weights_are_not_gathered(patch: Patch) -> None:
    patch.setattr(Replicated, "publish", lambda self: None)


@fault(Cause.STALE_WEIGHT, "dp=2 zero=3")
def gathered_weights_are_kept_after_the_step(patch: Patch) -> None:
    from samestep.runtime.axes.shard import _RunningUnit

    around(
        patch,
        _RunningUnit,
        "begin_backward",
        lambda begin, self, microbatch, **said: begin(self, microbatch, **{**said, "frees": False}),
    )


@fault(Cause.STALE_WEIGHT, "dp=2 zero=1")
def a_rank_does_not_update_its_chunk(patch: Patch) -> None:
    around(patch, Updater, "set_lr", lambda set_lr, self, factor: set_lr(self, factor * (rank() == 0)))


@fault(Cause.DRIFT, "dp=1 tp=2", "attentive")
def whole_weights_drift_between_tp_ranks(patch: Patch) -> None:
    def step(original: Any, self: Updater, factor: float) -> None:
        original(self, factor)
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


@fault(Cause.STATE_SWAPPED, "dp=2 zero=1", optimizer={"name": "adamw", "options": {}})
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


# -- tensor cuts -----------------------------------------------------------------------------------


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2", "qwen3")
def norms_of_heads_are_not_summed_over_tp(patch: Patch) -> None:
    _leave_parts(patch, lambda name: name.endswith("_norm.weight"))


def _leave_parts(patch: Patch, is_left: Callable[[str], bool]) -> None:
    """Take such weights for whole ones, whose gradients need no sum over tp."""

    def holding(known: Any, self: StepSpec, param: ParamSpec) -> Holding:
        held = known(self, param)
        return replace(held, partial_over=()) if is_left(param.name) else held

    around(patch, StepSpec, "holding", holding)


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2", "llama_even")
def inputs_of_column_cuts_are_not_summed_in_backward(patch: Patch) -> None:
    patch.setattr(tensor, "copy", lambda x, *args: x)


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2", "llama_even")
def outputs_of_row_cuts_are_not_summed(patch: Patch) -> None:
    patch.setattr(tensor, "reduce", lambda x, *args: x)


@fault(Cause.FORWARD, "dp=1 tp=4", "qwen3")
def every_rank_takes_the_first_key_value_head(patch: Patch) -> None:
    def shared(original: Any, module: Any, path: str, mesh: Any, *rest: Any) -> None:
        original(module, path, replace(mesh, rank=mesh.rank - mesh.index("tp")), *rest)

    around(patch, tensor, "_around_shared", shared)


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=4", "qwen3")
def key_value_heads_that_ranks_share_are_not_summed(patch: Patch) -> None:
    _leave_parts(patch, lambda name: name.endswith(("k_proj.weight", "v_proj.weight")))


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2 sequence_parallel", "llama_even")
def norms_are_not_summed_under_sequence_parallel(patch: Patch) -> None:
    _leave_parts(patch, lambda name: name.endswith("layernorm.weight"))


@fault(Cause.FORWARD, "dp=1 tp=2", "gpt2_even")
def a_row_cuts_bias_is_added_on_every_rank(patch: Patch) -> None:
    patch.setitem(tensor._AROUND, "row", _naive_row)


def _naive_row(module: Any, path: str, mesh: Any, boundaries: Any, facts: Any) -> None:
    module.register_forward_hook(lambda _, args, output: tensor.reduce(output, mesh.groups["tp"], path))


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2", "apertus")
def learned_activations_are_not_summed_over_tp(patch: Patch) -> None:
    _leave_parts(patch, lambda name: ".act_fn." in name)


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2 sequence_parallel", "gpt2_even")
def positions_are_not_summed_under_sequence_parallel(patch: Patch) -> None:
    def apply(original: Any, traced: Any, program: Any, mesh: Any) -> None:
        def of_own_tokens(_: Any, args: Any, output: Tensor) -> Tensor:
            length = output.shape[-2]
            is_own = torch.arange(length) * mesh.size("tp") // length == mesh.index("tp")
            return torch.where(is_own[:, None], output, output.detach())

        original(traced, program, mesh)
        traced.module.get_submodule("transformer.wpe").register_forward_hook(of_own_tokens)

    around(patch, sequence, "apply", apply)


@fault(Cause.TIED, "dp=1 tp=2", "llama_tied")
def a_tied_head_is_cut_for_itself(patch: Patch) -> None:
    def fill(original: Any, self: Replicated, model: nn.Module, materialize: Any) -> None:
        original(self, model, materialize)
        for alias in (name for param in self.program.step.model.params for name in param.aliases):
            path, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(model.get_parameter(alias).detach().clone()))

    around(patch, Replicated, "_fill", fill)


# -- slices of sequences ---------------------------------------------------------------------------


@fault(Cause.POSITIONS, "dp=1 cp=2", "llama")
def every_slice_has_the_rotary_angles_of_the_first(patch: Patch) -> None:
    def sliced(original: Any, self: Any, place: str, leaf: Tensor) -> Tensor:
        if "position_embeddings" in place:
            return leaf.narrow(1, 0, self.length // self.degree)
        return original(self, place, leaf)

    around(patch, context.Slicing, "_sliced", sliced)


@fault(Cause.MISSING_REDUCTION, "dp=1 cp=2", "llama")
def gradients_are_not_summed_over_slices(patch: Patch) -> None:
    patch.setattr(Replicated, "_send", lambda *args: None)


@fault(Cause.FORWARD, "dp=1 cp=2", "attentive")
def attention_sees_the_slice_alone(patch: Patch) -> None:
    def attend(original: Any, self: Any, func: Any, call: AttentionCall) -> Tensor:
        self.exchanged += 1
        return call.run(func)

    around(patch, context.Slicing, "attend", attend)


# -- pipelines -------------------------------------------------------------------------------------


@fault(Cause.BOUNDARY, "dp=1 pp=2 microbatch=4", "deep_granite")
def the_embedding_scale_is_applied_on_every_stage(patch: Patch) -> None:
    def received(original: Any, self: Any, action: Action, *args: Any) -> list[Tensor]:
        came: list[Tensor] = original(self, action, *args)
        return [tensor.mul_(12.0) for tensor in came] if action.kind is TaskKind.FORWARD else came

    around(patch, pipeline.Stage, "_received", received)


@fault(Cause.DOUBLE_REDUCTION, "dp=1 pp=2 microbatch=4", "deep_llama")
def gradients_grow_at_the_boundary(patch: Patch) -> None:
    def received(original: Any, self: Any, action: Action, *args: Any) -> list[Tensor]:
        came: list[Tensor] = original(self, action, *args)
        return [tensor.mul_(2.0) for tensor in came] if action.kind is TaskKind.BACKWARD else came

    around(patch, pipeline.Stage, "_received", received)


@fault(Cause.TIED, "dp=1 pp=2 microbatch=4", "deep_tied")
def tied_weights_are_not_summed_across_stages(patch: Patch) -> None:
    around(patch, Replicated, "_send", _unless("tie"))


@fault(Cause.TIED, "dp=1 pp=2 microbatch=4", "deep_tied")
def tied_weights_are_counted_twice(patch: Patch) -> None:
    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        if op.axis == "tie" and rank() == 0:
            whole.mul_(2.0)
        return original(self, flat, op, whole)

    around(patch, Replicated, "_send", send)


@fault(Cause.MISSING_REDUCTION, "dp=2 pp=2 schedule=zero-bubble microbatch=1", "deep_llama")
def split_off_weight_gradients_come_after_the_reduction(patch: Patch) -> None:
    @contextmanager
    def running(original: Any, self: Replicated, task: Any) -> Iterator[None]:
        if task.kind is TaskKind.WEIGHT and ends_step(task.body):
            self.finish_gradients()
        with original(self, task):
            yield

    around(patch, Replicated, "running", running)


@fault(Cause.MISSING_GRADIENT, "dp=2 pp=2 zero=1 schedule=zero-bubble microbatch=1", "deep_llama")
def split_off_weight_gradients_are_lost(patch: Patch) -> None:
    patch.setattr(Deferred, "add_up", lambda *args: None)


# -- samples that influence each other -------------------------------------------------------------


@fault(Cause.COUPLED, "dp=2", "own_batch_norm", run={"allow": ["samples"]})
def statistics_of_a_batch_are_those_of_the_rank(patch: Patch) -> None:
    """The model's own code does it, and the job waives the refusal."""


# -- the job's own precision -----------------------------------------------------------------------


@fault(Cause.PRECISION, "dp=2", own_precision=True)
def gradients_are_reduced_in_bfloat16(patch: Patch) -> None:
    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        if whole.dtype == torch.float32:
            whole.copy_(whole.bfloat16().float())
        return original(self, flat, op, whole)

    around(patch, Replicated, "_send", send)


FP16 = {"precision": "fp16", "loss_scale": 2.0**10}


@fault(Cause.SKIP, "dp=2", own_precision=True, numerics=FP16)
def a_rank_skips_by_itself(patch: Patch) -> None:
    def agree(original: Any, self: Run, totals: Tensor) -> StepScalars:
        found = original(self, totals)
        return replace(found, norm_squared=float("inf")) if rank() == 1 and self.steps_taken == 1 else found

    around(patch, Run, "_agree", agree)
    patch.setattr(Run, "_diagnose", lambda self, batch: "overflow")


@fault(Cause.SKIP, "dp=1 pp=2 microbatch=4", "llama", own_precision=True, numerics=FP16)
def a_stage_skips_by_itself(patch: Patch) -> None:
    def agree(original: Any, self: Run, totals: Tensor) -> StepScalars:
        found = original(self, totals)
        overflows = self.assembly.parallel.stage.is_last(0) and self.steps_taken == 1
        return replace(found, norm_squared=float("inf")) if overflows else found

    around(patch, Run, "_agree", agree)
    patch.setattr(Run, "_diagnose", lambda self, batch: "overflow")


# -- carrying it out -------------------------------------------------------------------------------


def subject(model: str, layout: str, job: Job, folder: Path) -> sides.Subject:
    example = Batch(0, [0], Tokens()).samples([0])  # type: ignore[arg-type]
    where = Layout.parse(layout)
    return sides.Subject(source_of(model, where, job), Tokens(), example, job, where, folder)


def on_a_rank(rank: int, world: int, model: str, layout: str, job: Job, folder: Path, name: str) -> None:
    """Run one rank of the layout with a fault in it."""
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if name:
            FAULTS[name].install(patch)
        sides.in_layout(place, subject(model, layout, job, folder))


ONE = RankInfo(0, 0, 1, 1, torch.device("cpu"))
_REFERENCES: dict[Any, Path] = {}
_KEPT = tempfile.TemporaryDirectory(prefix="samestep-references-")


def prove(model: str, layout: str, name: str = "", own_precision: bool = False, **tables: Any) -> Verdict:
    """Hold a layout with a fault in it against one device, on warm ranks; each is proven once in a session."""
    key = (model, layout, name, own_precision, repr(tables))
    if key not in _VERDICTS:
        _VERDICTS[key] = _proven(model, layout, name, own_precision, **tables)
    return _VERDICTS[key]


_VERDICTS: dict[Any, Verdict] = {}


def _proven(model: str, layout: str, name: str, own_precision: bool, **tables: Any) -> Verdict:
    numerics = tables.get("numerics", {})
    job = job_of(numerics.get("precision", "float32" if own_precision else "float64"), 3, **tables)
    if not own_precision:
        job = verify._proving(job, 3)
    folder = Path(tempfile.mkdtemp(prefix="samestep-fault-"))
    try:
        _reference(model, job, own_precision, folder)
        on_ranks(layout, on_a_rank, model, job, folder, name)
        judged = sides.judge_rounding if own_precision else sides.judge
        checks, cause, explanation = judged(ONE, subject(model, layout, job, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(
        layout=layout, job=model, steps=3, precision="float64", checks=checks, cause=cause, explanation=explanation
    )


def _reference(model: str, job: Job, own_precision: bool, folder: Path) -> None:
    """Put what one device computes into a folder; it is computed once for each model and job."""
    key = (model, job.to_toml(), own_precision)
    if key not in _REFERENCES:
        kept = _REFERENCES[key] = Path(_KEPT.name, str(len(_REFERENCES)))
        kept.mkdir()
        work = sides.measure_rounding if own_precision else sides.one_device
        work(ONE, subject(model, "dp=1", job, kept))
    for file in _REFERENCES[key].iterdir():
        shutil.copy(file, folder)
