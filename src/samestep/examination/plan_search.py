"""The search for a plan of tensor parallelism that is proven: parts of a plan whose proof fails are gathered, or stay whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from samestep.building.loss import cross_entropy
from samestep.building.model_loss import ModelLoss
from samestep.building.named_tensors import address
from samestep.examination.traced_forward import BuiltModel, TracedForward, trace_forward
from samestep.independence import cut_proof, sequence_boundaries, tensor_plan
from samestep.independence.cut_proof import CutProof
from samestep.independence.rank_trial import DiffersError
from samestep.independence.structural_plan import structural_plan
from samestep.independence.tensor_plan import Cuts
from samestep.models.spec import ModelSpec, owner_of
from samestep.state.snapshot import preserve_function
from samestep.tracing.arranged_layers import spread_over_calls
from samestep.tracing.checkpointed import TracedPlaces
from samestep.tracing.custom_functions import FollowedCalls
from samestep.tracing.looks import Looks, paths_within
from samestep.tracing.operations import Recorder
from samestep.tracing.watched_forward import outputs_on_meta
from samestep.trees import operands, tensors_in

Counts = dict[int, tuple[tuple[str, str, int], ...]]
"""The attributes that a rank divides, by the degree of the cut: path, name, divisor."""


@dataclass(frozen=True, slots=True)
class ProvenPlan:
    """A plan of tensor parallelism and its proof, which may be a refusal."""

    cuts: Cuts
    proof: CutProof
    counts: Counts = field(default_factory=dict)
    shareable: dict[str, int] = field(default_factory=dict)
    """Number of heads of keys or values that ranks may share, by the path of the projection."""


def trace_with_plan(build: Callable[[], BuiltModel]) -> tuple[BuiltModel, TracedForward, ProvenPlan]:
    """Build and trace a model, anew until a plan of tensor parallelism is proven for the forward that was traced, or refused."""
    planned = find_plan(built := build())
    while True:
        forward = trace_forward(built, planned)
        plan = prove_or_change(built, forward, planned)
        if isinstance(plan, ProvenPlan):
            break
        planned, built = plan, build()
    if planned.gathered:  # what a rank holds and sends is that of the gathered modules
        assert forward.cuts is not None
        places = TracedPlaces()
        with built.repeating(), tensor_plan.record_cuts(built.module, planned, places) as costs:
            spec = built.trace(places, planned.styles, keeps_all=bool(planned.looking))
        forward = replace(forward, spec=spec, cuts=replace(forward.cuts, costs=costs))
    return built, forward, plan


def with_plan(
    spec: ModelSpec, module: nn.Module, forward: TracedForward, plan: ProvenPlan | None
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec with the cuts of a plan and the boundaries of sequences, and the fields of the analysis that follow from the plan.

    What a block sends is divided among its calls once experts and cuts are known, and the boundaries depend on which weights are cut.
    """
    if plan is None or forward.cuts is None:
        reason = "its plan of tensor parallelism was not examined"
        return spread_over_calls(
            replace(spec, cut_refusal=reason, sequence_refusal=f"{spec.name} cannot be cut, {reason}")
        ), {}
    seen = forward.cuts
    spec = tensor_plan.with_cuts(spec, module, plan.cuts, seen.costs, plan.shareable, plan.proof)
    spec, parts = sequence_boundaries.with_sequence(
        spread_over_calls(spec), module, plan.cuts.styles, plan.proof, seen.calls, seen.recorder.operations
    )
    return spec, {
        "cut_styles": plan.cuts.styles,
        "gathered": plan.cuts.gathered,
        "copied": plan.proof.copied,
        "counts": plan.counts,
        "shareable_heads": plan.shareable,
        "sequence_parts": parts,
    }


def find_plan(built: BuiltModel) -> Cuts:
    """Return the plan of tensor parallelism of a model; where it has none, the one that its data flow shows."""
    module, counts = built.module, built.experts.counts
    planned = tensor_plan.cuts_of(module, counts)
    if not planned.is_open:
        return planned
    for keeps_all in (False, True):
        recorder = Recorder()
        with suppress(DiffersError):  # the trace says why the forward fails
            looking = _run_forward(built, {}, recorder, keeps_all=keeps_all).paths
            planning = functools.partial(structural_plan, module, recorder.operations, counts)
            if styles := planning(paths_within(module, looking)):
                return Cuts(styles, may_shrink=True, looking=looking)
            if looking and (styles := planning()):  # which the code that looks leaves nothing of
                return tensor_plan.without_looking(module, Cuts(styles, may_shrink=True), looking)
            return planned
    return planned


def prove_or_change(built: BuiltModel, forward: TracedForward, planned: Cuts) -> ProvenPlan | Cuts:
    """Return the proof of the plan with which a forward was traced, or another plan, with which to trace it anew.

    Another plan is one that leaves whole what the trace has seen to look at values, or of which a smaller part is proven:
    the costs of a plan are those of the forward that was traced with it.
    """
    if not planned.refusal and not {*forward.spec.looks_in} <= {*planned.looking}:
        return tensor_plan.without_looking(built.module, planned, forward.spec.looks_in)
    reads = functools.cache(functools.partial(_outputs_read, built, keeps_all=bool(planned.looking)))
    found = _prove(built, forward, planned, reads)
    fewer, refusal = planned, found.proof.refusal
    while refusal and (smaller := tensor_plan.smaller(built.module, fewer, refusal)):
        fewer, refusal = smaller, _prove(built, forward, smaller, reads).proof.refusal
    return found if refusal or fewer is planned else fewer


def _outputs_read(built: BuiltModel, *, keeps_all: bool) -> frozenset[int] | None:
    """Return the numbers of the outputs, among all of their tensors, that a loss reads besides the prediction; None for all."""
    loss = built.loss
    if loss is cross_entropy or isinstance(loss, ModelLoss):
        return frozenset()
    read = set[int]()

    def ran(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        read.update(address(tensor) for tensor in operands(*args, *kwargs.values()))

    try:
        outputs, batch = outputs_on_meta(built.module, built.sample, built.num_samples, built.value_of, keeps_all)
        with preserve_function(loss), torch.enable_grad(), FollowedCalls(ran):
            loss(outputs, batch)
    except Exception:  # of the user's own code, which may look at values
        return None
    return frozenset(index for index, tensor in enumerate(tensors_in(outputs)) if address(tensor) in read)


def _with_whole_outputs(proof: CutProof, reads: Callable[[], frozenset[int] | None]) -> CutProof:
    """Return a proof, or its refusal where a rank would have a part of an output that the loss reads."""
    if proof.refusal or not proof.cut_outputs:
        return proof
    read = reads()
    for index, names in proof.cut_outputs.items():
        if index < 0 or read is None or index in read:
            where = owner_of(min(names))
            reason = (
                f"the loss reads an output of the model that is cut as {min(names)} is, and a rank has a part of it"
            )
            return replace(proof, refusal=reason, refused_at=where, refused=names)
    return proof


def _cut_unlike(spec: ModelSpec, proof: CutProof) -> dict[str, str]:
    """Return the modules whose weights are cut otherwise than those that follow them, or that they follow, and why they stay whole."""
    pairs = [(param.name, param.follows) for param in spec.params if param.follows]
    return {
        owner_of(name): f"{one} follows {other}, and only one of them would be cut so"
        for one, other in pairs
        if proof.cuts.get(one) != proof.cuts.get(other) or proof.groups.get(one) != proof.groups.get(other)
        for name in (one, other)
    }


def _prove(
    built: BuiltModel, forward: TracedForward, planned: Cuts, reads: Callable[[], frozenset[int] | None]
) -> ProvenPlan:
    """Return the proof of a plan, the counts of a rank, and the heads that ranks may share. A weight and its moving average are cut alike.

    Where the code behind a cut needs more than a rank's part, the outputs of the modules that it reads are gathered, those of
    the head first; where that does not help, these modules stay whole.
    """
    module, observed = built.module, forward.cuts
    assert observed is not None
    first: CutProof | None = None
    while True:
        shareable = {} if planned.refusal else tensor_plan.shareable_heads(module, planned)
        proofs: list[CutProof] = []
        for cuts_logits in (True, False):
            counts: Counts = {}
            proof = tensor_plan.proof_of(forward.spec, module, planned, shareable, observed.recorder, cuts_logits)
            if degree := cut_proof.smallest_degree(proof):
                proof, counts = try_degree(built, proof, shareable, degree)
            proof = _with_whole_outputs(proof, reads)
            if unlike := {} if proof.refusal else _cut_unlike(forward.spec, proof):
                planned.styles = {path: style for path, style in planned.styles.items() if path not in unlike}
                planned.gathered |= unlike
                break
            if not proof.refusal:
                return ProvenPlan(planned, proof, counts, shareable)
            proofs.append(proof)
            if not proof.cuts_logits:  # else the code behind the head may need them whole
                break
        if unlike:
            if planned.styles:
                continue
            return ProvenPlan(planned, CutProof({}), {}, {})
        proof = proofs[0]
        first = first or proof
        planned.gather(paths := cut_proof.to_gather(module, proof), proof.refusal)
        if proof.cut_outputs and not planned.styles:  # the loss reads all that could be cut: it stays whole
            return ProvenPlan(planned, CutProof({}), {}, {})
        if not paths or not planned.styles:
            planned.styles = dict(first.styles)
            planned.gathered.clear()
            return ProvenPlan(planned, first, {}, shareable)


def try_degree(
    built: BuiltModel, proof: CutProof, shareable: Mapping[str, int], degree: int
) -> tuple[CutProof, Counts]:
    """Return the proof of a plan with the counts of a rank of a degree, or why it fails, and the counts by module."""
    shared = {path: heads for path, heads in shareable.items() if heads < degree}
    forward = functools.partial(_run_forward, built, proof.styles, looking=proof.looking)
    try:
        looks = forward(recorder := Recorder(), keeps_all=bool(proof.looking))
        forward = functools.partial(forward, answers=looks.answers if proof.looking else None)
        proof = cut_proof.with_degree(proof, built.module, shared, recorder.operations, forward, degree)
    except DiffersError as error:
        return replace(proof, refusal=str(error), refused_at=error.where, fails_after=error.after), {}
    return proof, {degree: proof.divided(built.module)}


def _run_forward(built: BuiltModel, styles: Mapping[str, str], recorder: Recorder, **looks: Any) -> Looks:
    """Record the operations of a forward on the meta device, with the ends of the modules that have a cut style.

    `looks` are the arguments of `cut_proof.run_forward` about code that looks at values.

    Raises:
        DiffersError: it fails.
    """
    with built.repeating():
        return cut_proof.run_forward(built.module, built.sample, styles, built.value_of, recorder, **looks)
