"""Deliberate faults in what cuts a model: tensor cuts, slices of sequences, pipelines; and in the job's own precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.models.param_spec import ParamSpec
from samestep.program.holding import Holding
from samestep.program.ops import ends_step
from samestep.program.step import StepSpec
from samestep.proof.verdict import Cause
from samestep.runtime.axes import sequence, tensor
from samestep.runtime.axes.context import slicing as context
from samestep.runtime.axes.pipeline import stage, stand_ins
from samestep.runtime.axes.weight_gradients import Deferred
from samestep.runtime.guards import nonfinite
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.replicated import Replicated
from samestep.schedules import Action, TaskKind
from tests.code import hooks
from tests.proof.planting import Patch, around, changed, fault, rank, unless

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
    patch.setattr(sequence.Shared, "__call__", lambda self, path, x: x)


@fault(Cause.MISSING_REDUCTION, "dp=1 tp=2", "llama_even")
def outputs_of_row_cuts_are_not_summed(patch: Patch) -> None:
    patch.setattr(tensor, "_sum_of_product", lambda *args: lambda x: x)


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


@fault(Cause.BACKWARD, "dp=1 tp=2", "llama_tied")
def a_tied_head_is_cut_for_itself(patch: Patch) -> None:
    def fill(original: Any, self: Replicated, model: nn.Module, materialize: Any) -> None:
        original(self, model, materialize)
        for alias in (name for param in self.program.step.model.params for name in param.aliases):
            path, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(model.get_parameter(alias).detach().clone()))

    around(patch, Replicated, "_fill", fill)


# -- hooks on gradients ----------------------------------------------------------------------------


@fault(Cause.BACKWARD, "dp=1 tp=2", hooks.UNIT_NORM)
def a_hook_acts_on_the_part_of_a_rank(patch: Patch) -> None:
    def register(original: Any, tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> Any:
        def on_parts(gradient: Tensor) -> Tensor:
            return torch.cat([hook(part) for part in gradient.chunk(2, dim=-1)], dim=-1)

        return original(tensor, on_parts if hook is hooks.to_unit_norm else hook)

    around(patch, Tensor, "register_hook", register)


@fault(Cause.GRADIENT_SUM, "dp=1 pp=2 microbatch=4", hooks.TRIPLED)
def a_hook_acts_on_two_stages(patch: Patch) -> None:
    def passed(original: Any, self: Any, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        is_passed_on = len(args) == 1 and args[0].is_floating_point() and not isinstance(module, nn.Linear)
        return args[0] if is_passed_on else original(self, module, call, args, kwargs)

    around(patch, stand_ins.StageLayers, "_passed", passed)


# -- slices of sequences ---------------------------------------------------------------------------


@fault(Cause.FORWARD, "dp=1 cp=2", "llama")
def every_slice_has_the_rotary_angles_of_the_first(patch: Patch) -> None:
    def sliced(original: Any, self: Any, place: str, leaf: Tensor) -> Tensor:
        if "position_embeddings" in place:
            return leaf.narrow(1, 0, self.length // self.degree)
        return original(self, place, leaf)

    around(patch, context.Slicing, "_sliced", sliced)


@fault(Cause.FORWARD, "dp=1 cp=2", "attentive")
def attention_sees_the_slice_alone(patch: Patch) -> None:
    def attend(original: Any, self: Any, call: AttentionCall, *dropped: Any) -> Tensor:
        self.exchanged += 1
        return call.attend()

    around(patch, context.Slicing, "attend", attend)


# -- pipelines -------------------------------------------------------------------------------------


@fault(Cause.FORWARD, "dp=1 pp=2 microbatch=4", "deep_granite")
def the_embedding_scale_is_applied_on_every_stage(patch: Patch) -> None:
    def received(original: Any, self: Any, action: Action, *args: Any) -> list[Tensor]:
        came: list[Tensor] = original(self, action, *args)
        return [tensor.mul_(12.0) for tensor in came] if action.kind is TaskKind.FORWARD else came

    around(patch, stage.Stage, "_received", received)


@fault(Cause.GRADIENT_SUM, "dp=1 pp=2 microbatch=4", "deep_llama")
def gradients_grow_at_the_boundary(patch: Patch) -> None:
    def received(original: Any, self: Any, action: Action, *args: Any) -> list[Tensor]:
        came: list[Tensor] = original(self, action, *args)
        return [tensor.mul_(2.0) for tensor in came] if action.kind is TaskKind.BACKWARD else came

    around(patch, stage.Stage, "_received", received)


@fault(Cause.MISSING_REDUCTION, "dp=1 pp=2 microbatch=4", "deep_tied")
def tied_weights_are_not_summed_across_stages(patch: Patch) -> None:
    around(patch, Replicated, "_send", unless("tie-0-1"))


@fault(Cause.BACKWARD, "dp=1 pp=2 microbatch=4", "deep_tied")
def tied_weights_are_counted_twice(patch: Patch) -> None:
    def send(original: Any, self: Replicated, flat: Any, op: Any, whole: Tensor) -> Any:
        if op.axis == "tie-0-1" and rank() == 0:
            whole.mul_(2.0)
        return original(self, flat, op, whole)

    around(patch, Replicated, "_send", send)


@fault(Cause.GRADIENT_SUM, "dp=2 pp=2 schedule=zero-bubble microbatch=1", "deep_llama")
def split_off_weight_gradients_come_after_the_reduction(patch: Patch) -> None:
    @contextmanager
    def running(original: Any, self: Replicated, task: Any, **more: Any) -> Iterator[None]:
        if task.kind is TaskKind.WEIGHT and ends_step(task.body):
            self.finish_gradients()
        with original(self, task, **more):
            yield

    around(patch, Replicated, "running", running)


@fault(Cause.GRADIENT_SUM, "dp=2 pp=2 zero=1 schedule=zero-bubble microbatch=1", "deep_llama")
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
    def agree(original: Any, self: Stepper, totals: Tensor, *rest: bool) -> Tensor:
        found = original(self, totals, *rest)
        return changed(found, norm_squared=float("inf")) if rank() == 1 and self.steps_taken == 1 else found

    around(patch, Stepper, "_agree", agree)
    patch.setattr(nonfinite, "cause_of_nonfinite", lambda *_: "overflow")


@fault(Cause.SKIP, "dp=1 pp=2 microbatch=4", "llama", own_precision=True, numerics=FP16)
def a_stage_skips_by_itself(patch: Patch) -> None:
    def agree(original: Any, self: Stepper, totals: Tensor, *rest: bool) -> Tensor:
        found = original(self, totals, *rest)
        overflows = self.whole_assembly.parallel.stage.is_last(0) and self.steps_taken == 1
        return changed(found, norm_squared=float("inf")) if overflows else found

    around(patch, Stepper, "_agree", agree)
    patch.setattr(nonfinite, "cause_of_nonfinite", lambda *_: "overflow")
