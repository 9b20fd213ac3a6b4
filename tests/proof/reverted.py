"""The mends of the causes that the reviews found, each taken back for the length of one proof.

Where `faults.py` plants a mistake into a right run, this takes away what makes code of a user right or refused: a proof is not
made, a hook is not carried over, a refusal is waived. The code is that of `reproductions.py`. `verify` must find what comes
of it and name the cause; `test_reverted.py` proves every row, and that nothing is found while the mend stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.datasets import reading, streams
from samestep.errors import ModelError
from samestep.examination import plan_search
from samestep.independence import cut_proof, dimension_maps, unit_rules
from samestep.independence.unit_walk import PartialGradients
from samestep.proof.verdict import Cause
from samestep.randomness import mode as dropout
from samestep.runtime import assembly
from samestep.runtime.axes import applied_axes, expert, recompute, weight_gradients
from samestep.runtime.axes.pipeline import recorded_flows, stage
from samestep.runtime.checkpoints import checkpoint, other_state
from samestep.runtime.optimizers import optimizer_source, optimizer_step, used_weights, whole_optimizer
from samestep.runtime.optimizers.update_rule import UpdateRule
from samestep.runtime.weights import fsdp_units, replicated
from samestep.schedules import Action, TaskKind
from samestep.tracing import watched_forward
from tests.proof.planting import PLANTED, Kind, around, mend
from tests.proof.reproductions import carry_out

Patch = pytest.MonkeyPatch


def _with_text(kind: Kind, mends: str, case: str, layout: str, text: str) -> Any:
    return mend(kind, mends, case, layout, text=text)


reverted = functools.partial(mend, "reverted")
resumed = functools.partial(mend, "resumed", cause=Cause.CHECKPOINT)
broken, missed = (functools.partial(_with_text, kind) for kind in ("broken", "missed"))
PP = "dp=1 pp=2 microbatch=4"


# -- pipelines -------------------------------------------------------------------------------------


@reverted("A1 families-1 families-7", "sum of all hidden states", PP, Cause.FORWARD)
def only_the_hidden_state_crosses_a_boundary(patch: Patch) -> None:
    def received(original: Any, self: Any, action: Action, *args: Any) -> list[Tensor]:
        came: list[Tensor] = original(self, action, *args)
        if action.kind is TaskKind.FORWARD:
            for tensor in came[1:]:
                tensor.detach().zero_()
        return came

    around(patch, stage.Stage, "_received", received)


@reverted("D1 C", "bf16 stream in float64", PP, Cause.FORWARD)
def a_boundary_is_read_in_another_dtype(patch: Patch) -> None:
    def received(original: Any, self: Any, action: Action, *args: Any) -> list[Tensor]:
        came: list[Tensor] = original(self, action, *args)
        if action.kind is TaskKind.FORWARD:
            for tensor in (one.detach() for one in came if one.dtype is torch.bfloat16):
                tensor.copy_(tensor.view(torch.float16))
        return came

    around(patch, stage.Stage, "_received", received)


@reverted("D2", "weight used twice", "dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble", Cause.BACKWARD)
def a_gradient_is_taken_to_be_whole_after_the_first_backward(patch: Patch) -> None:
    patch.setattr(replicated, "is_postponed", lambda *args: False)


# -- optimizers ------------------------------------------------------------------------------------


@reverted(
    "A2",
    "LARS of matrices alone",
    "dp=2 zero=3",
    Cause.UPDATE,
    is_refused=True,
    name="a_rule_of_matrices_is_taken_for_elementwise",
)
@reverted(
    "A3",
    "rule that starts late",
    "dp=2 zero=1",
    Cause.UPDATE,
    steps=8,
    is_refused=True,
    name="a_rule_that_starts_late_is_taken_for_elementwise",
)
@reverted(
    "B", "optimizer that draws noise", "dp=2", Cause.UPDATE, is_refused=True, name="an_optimizer_draws_on_every_rank"
)
def _every_rule_is_elementwise(patch: Patch) -> None:
    def read(original: Any, *args: Any, **named: Any) -> UpdateRule:
        return replace(original(*args, **named), whole={}, coupled="", draws="")

    around(patch, optimizer_source, "read_rule", read)


@reverted("A3", "groups by size", "dp=2 zero=1", Cause.UPDATE)
def groups_are_made_of_the_pieces_of_a_rank(patch: Patch) -> None:
    patch.setattr(optimizer_source.WholeWeights, "of", lambda *args: optimizer_source.ALONE)
    around(patch, whole_optimizer, "check_optimizer", lambda check, source, model, *rest: model)


@reverted("A19", "parameters' hooks", "dp=2", Cause.PLAIN, one_device=True)
def hooks_of_parameters_are_lost(patch: Patch) -> None:
    patch.setattr(assembly, "gradient_hooks", lambda *args: {})


@reverted("A20", "parameters' tags", "dp=2", Cause.PLAIN, one_device=True)
def tags_of_parameters_are_lost(patch: Patch) -> None:
    patch.setattr(assembly, "attributes_of", lambda marks: {})


@reverted("A24", "unused weights under decay", "dp=2", Cause.PLAIN, one_device=True)
def unused_weights_have_gradients_of_zeros(patch: Patch) -> None:
    patch.setattr(used_weights.UsedWeights, "agreed", property(lambda used: frozenset(), lambda used, names: None))


# -- what a model is given -------------------------------------------------------------------------


def _calls(patch: Patch, call: Callable[[nn.Module, Any], Any]) -> None:
    patch.setattr(applied_axes, "call_model", call)
    patch.setattr(watched_forward, "call_model", call)


@reverted("A21", "forward(**batch)", "dp=2", Cause.PLAIN, one_device=True)
def a_forward_of_keywords_is_given_tokens_alone(patch: Patch) -> None:
    _calls(patch, lambda model, batch, **_: model(input_ids=batch["input_ids"]))


@reverted("A22", "third part of a tuple", "dp=2", Cause.PLAIN, one_device=True)
def later_parts_of_a_tuple_are_dropped(patch: Patch) -> None:
    _calls(patch, lambda model, batch, **_: model(batch[0], torch.zeros_like(batch[2])))


# -- refusals that the job waives ------------------------------------------------------------------


@reverted("B", "contrastive loss", "dp=2", Cause.COUPLED, allow=("loss",), name="a_contrastive_loss_is_waived")
@reverted("B", "expert capacity", "dp=2", Cause.COUPLED, allow=("samples",), name="a_capacity_of_experts_is_waived")
@reverted(
    "A9 A10",
    "numpy's random numbers",
    "dp=2",
    Cause.COUPLED,
    allow=("random",),
    name="random_numbers_of_the_forward_are_waived",
)
@reverted(
    "A12", "running mean of its own", "dp=2", Cause.COUPLED, allow=("state", "samples"), name="a_running_mean_is_waived"
)
@reverted(
    "A12 A13",
    "weights normalised in the forward",
    "dp=2 zero=3",
    Cause.BACKWARD,
    allow=("state",),
    name="weights_written_in_a_forward_are_waived",
)
def _nothing(patch: Patch) -> None:
    """Leave the code as it is: the job waives its refusal."""


# -- samples, the loss, data -----------------------------------------------------------------------


@reverted("B", "augmentation in __getitem__", "dp=2", Cause.DATA, allow=("data",))
def data_draws_from_unseeded_generators(patch: Patch) -> None:
    """Reading a sample leaves the generators of the process as they are, and the job waives the refusal."""
    patch.setattr(reading, "drawing_from", lambda key: nullcontext())


# -- random numbers and state ----------------------------------------------------------------------


@reverted("A8", "dropout on two views", "dp=2", Cause.LOSS)
def dropout_takes_the_first_dimension_for_the_samples(patch: Patch) -> None:
    patch.setattr(dropout, "place_samples", lambda *args: None)


@reverted("A11", "reentrant checkpointing", "dp=2", Cause.BACKWARD)
def checkpointing_repeats_outside_of_the_modes(patch: Patch) -> None:
    patch.setattr(recompute, "in_our_modes", lambda *args, **named: nullcontext())


# -- what tp cuts ----------------------------------------------------------------------------------


@reverted("A5", "heads counted by another name", "dp=1 tp=2", Cause.FORWARD)
def heads_are_not_counted_on_a_rank(patch: Patch) -> None:
    patch.setattr(plan_search, "try_degree", lambda built, proof, shareable, degree: replace(proof, degree=degree))


@reverted("A6", "norm of hidden neurons", "dp=1 tp=2", Cause.FORWARD)
def a_norm_of_cut_neurons_is_taken_for_whole(patch: Patch) -> None:
    def mapped(original: Any, flow: Any, op: Any, *args: Any) -> Any:
        return None if op.name == "linalg_vector_norm" else original(flow, op, *args)

    around(patch, unit_rules, "_map_units", mapped)
    patch.setattr(cut_proof, "partial_gradients", lambda *args: PartialGradients())


@reverted("A7", "log_softmax behind a cut head", "dp=1 tp=2", Cause.FORWARD)
def log_probabilities_are_taken_to_be_of_each_word(patch: Patch) -> None:
    patch.setitem(dimension_maps.MAPS, torch.ops.aten._log_softmax, dimension_maps.elementwise)


# -- tokens, experts -------------------------------------------------------------------------------


@broken("A4 families-2", "convolution over tokens", "dp=1 tp=2 sequence_parallel", "channels")
def no_module_mixes_tokens(patch: Patch) -> None:
    _without(patch, "sequence_refusal")


@reverted("A14", "factor by length", "dp=1 cp=2", Cause.FORWARD, is_refused=True)
def no_module_counts_tokens(patch: Patch) -> None:
    _without(patch, "slice_refusal", slices=(("[0][0]", 1),))


def _without(patch: Patch, field: str, **fields: Any) -> None:
    def sliced(original: Any, *args: Any) -> Any:
        traced = original(*args)
        spec = replace(traced.spec, **{field: ""}, **fields)
        return replace(traced, analysis=replace(traced.analysis, spec=spec))

    around(patch, assembly, "examine", sliced)
    around(patch, recorded_flows, "examine", sliced)


@reverted("D3", "experts that weigh by themselves", "dp=2 ep=2", Cause.FORWARD, is_refused=True)
def experts_are_taken_to_weigh_as_others_do(patch: Patch) -> None:
    patch.setattr(expert, "check_experts", lambda *args: None)


# -- what a resume restores --------------------------------------------------------------------------


def _forgets(patch: Patch, key: str) -> None:
    def read(original: Any, folder: Path) -> dict[str, Any]:
        return {name: value for name, value in original(folder).items() if name != key}

    around(patch, checkpoint, "read_manifest", read)


@resumed("A15 A18", "counters in an optimizer's groups", "dp=1")
def options_of_groups_are_not_restored(patch: Patch) -> None:
    _forgets(patch, "ranks")


@resumed("R1", "rate that a loop lowers", "dp=1")
def rates_that_were_set_from_outside_are_lost(patch: Patch) -> None:
    patch.setattr(optimizer_step.GroupRates, "from_outside", lambda self: {})


@resumed("R5", "stream whose state lacks its buffer", "dp=1")
def the_buffer_of_a_stream_is_lost(patch: Patch) -> None:
    patch.setattr(streams.StreamSteps, "_continue", lambda self: self._start(self._stored) or True)


@resumed("A16", "teacher that follows", "dp=1")
def frozen_weights_are_not_saved(patch: Patch) -> None:
    patch.setattr(other_state, "changed_frozen_weights", lambda run: [])


@resumed("A17", "buffers of later stages", "dp=1 pp=2 microbatch=8")
def buffers_of_later_stages_are_not_saved(patch: Patch) -> None:
    around(patch, other_state, "kept_buffers", lambda kept, run: {} if run.place.rank else kept(run))


@resumed("D4", "loss scale of the first sample", "dp=1")
def the_loss_scale_is_that_of_the_first_sample_read(patch: Patch) -> None:
    _forgets(patch, "nominal_count")


def resume(rank: int, world: int, name: str, is_mended: bool) -> float:
    """Return by how much the losses of a resumed run differ from those of one that was not interrupted."""
    row = PLANTED[name]
    with pytest.MonkeyPatch.context() as patch:
        if not is_mended:
            row.install(patch)
        return max(map(abs, carry_out(rank, world, row.code, row.layout).losses))


# -- what ends in an error ---------------------------------------------------------------------------


ZERO_BUBBLE = "dp=1 pp=2 microbatch=2 schedule=zero-bubble"


@broken("D6", "experts without rows", "dp=2 ep=2", "not finite|nan")
def experts_without_rows_compute_one_of_zeros(patch: Patch) -> None:
    def own(original: Any, again: Any, module: Any, rows: Tensor, index: Tensor, chosen: Tensor, dtype: Any) -> Tensor:
        if len(rows):
            return original(again, module, rows, index, chosen, dtype)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 1))
        return again(padded, chosen.new_zeros(1, 1), rows.new_ones(1, 1))[:0]

    around(patch, expert, "_own", own)


@broken("D7", "linear under its own autocast", ZERO_BUBBLE, "dtype")
def a_split_backward_takes_the_weight_as_it_is(patch: Patch) -> None:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        x, weight = ctx.saved_tensors
        ctx.deferred.postpone(ctx.weight, x, gradient, ctx.is_transposed)
        return gradient @ weight, gradient.flatten(0, -2).sum(0), None

    patch.setattr(weight_gradients._SplitBackward, "backward", staticmethod(backward))


@broken("D8", "linear called by keyword", ZERO_BUBBLE, "keyword argument")
def a_split_backward_takes_inputs_by_position(patch: Patch) -> None:
    def positional(original: Any, module: nn.Module, *args: Any) -> None:
        original(module, *args)
        call = module.forward
        module.forward = lambda x: call(x)

    around(patch, weight_gradients, "postpone_weights", positional)


@broken("D9", "arguments in another order", "dp=2 ep=2", "int|index|dtype|shape")
def arguments_of_experts_are_taken_in_the_order_of_the_call(patch: Patch) -> None:
    patch.setattr(expert, "routing_arguments", lambda args, named: (*args, *named.values()))


def end(rank: int, world: int, name: str) -> None:
    """Run one rank of a row's layout without the mend, until it ends in an error."""
    row = PLANTED[name]
    with pytest.MonkeyPatch.context() as patch:
        row.install(patch)
        carry_out(rank, world, row.code, row.layout)


@broken("D5", "unused layer in bf16", "dp=2 zero=3", "uniform gradient dtype")
def unused_weights_have_zeros_in_their_own_dtype(patch: Patch) -> None:
    def complete(original: Any, unit: Any) -> None:
        for weight in unit.group.fsdp_params if unit._in_backward else ():
            if weight._unsharded_param.grad is None and weight.unsharded_accumulated_grad is None:
                weight._unsharded_param.grad = torch.zeros_like(weight._unsharded_param)
        original(unit)

    around(patch, fsdp_units.RunningUnit, "complete", complete)
    unused_weights_have_gradients_of_zeros(patch)


@missed("A23", "optimizer over other weights", "dp=1", "was not given")
def an_optimizer_of_other_weights_is_taken(patch: Patch) -> None:
    def read(original: Any, *args: Any, **named: Any) -> UpdateRule:
        with suppress(ModelError):
            return original(*args, **named)
        return UpdateRule("SGD")

    around(patch, optimizer_source, "read_rule", read)
    patch.setattr(optimizer_source, "_check_holds", lambda *args, **named: None)
