"""The search for a plan of tensor parallelism that is proven: parts of a plan whose proof fails are gathered, or stay whole.

Where a model has no plan, one is read from the data flow between its linear layers. The output of the first layers of a block's
attention or MLP reaches the last one, and nothing else:

    q, k, v = x Wq, x Wk, x Wv      by columns: each rank computes the features of some heads
    y = attention(q, k, v) Wo       by rows: each rank computes a summand of y; their sum over ranks is y

So a linear layer is cut by rows if all that reaches its input left linear layers of the blocks, and the stream of hidden states that
blocks hand on is not among it. A layer is cut by columns if all that reads it is cut by rows. Layers are decided from the last to the
first: of three in a row the last two are cut. The head is the linear layer with the prediction as its output; it is cut along the
vocabulary with the embedding of as many rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from samestep.building.families import is_transposed
from samestep.building.loss import cross_entropy
from samestep.building.model_changes import cuts_of_parts, path_without_adapters
from samestep.building.model_loss import ModelLoss
from samestep.building.named_tensors import address
from samestep.examination.traced_forward import BuiltModel, TracedForward, trace_forward
from samestep.independence import cut_proof, sequence_proof, tensor_plan
from samestep.independence.cut_proof import CutProof
from samestep.independence.rank_trial import DiffersError
from samestep.independence.samples import storages_read
from samestep.independence.tensor_plan import Cuts
from samestep.models.spec import ModelSpec, is_below, owner_of
from samestep.tracing.arranged_layers import block_of, containers_of
from samestep.tracing.looks import Looks, paths_within
from samestep.tracing.operations import Operation, Recorder, View
from samestep.tracing.watched_forward import outputs_on_meta
from samestep.trees import tensors_in


@dataclass(frozen=True, slots=True)
class ProvenPlan:
    """A plan of tensor parallelism and its proof, which may be a refusal."""

    cuts: Cuts
    proof: CutProof
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
        with built.repeating():
            spec = built.trace(planned.styles, keeps_all=bool(planned.looking))
        forward = replace(forward, spec=spec)
    return built, forward, plan


def with_plan(
    spec: ModelSpec, module: nn.Module, forward: TracedForward, plan: ProvenPlan | None
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec with the cuts of a plan and the boundaries of sequences, and the fields of the analysis that follow from the plan.

    What a block sends is divided among its calls once experts and cuts are known, and the boundaries depend on which weights are cut.
    """
    calls, recorder = forward.calls, forward.recorder
    if plan is None or recorder is None:
        reason = "its plan of tensor parallelism was not examined"
        sequence_refusal = f"{spec.name} cannot be cut, {reason}"
        return replace(spec, cut_refusal=reason, sequence_refusal=sequence_refusal), {}
    proof = plan.proof
    spec = tensor_plan.with_cuts(spec, module, plan.cuts, calls, plan.shareable, proof)
    spec, parts = sequence_proof.with_sequence(spec, module, plan.cuts.styles, proof, calls, recorder.operations)
    return spec, {
        "cut_styles": plan.cuts.styles,
        "gathered": plan.cuts.gathered,
        "copied": proof.copied,
        "counts": {proof.degree: proof.divided(module)} if proof.degree > 1 else {},
        "shareable_heads": plan.shareable,
        "sequence_parts": parts,
    }


def find_plan(built: BuiltModel) -> Cuts:
    """Return the plan of tensor parallelism of a model; where it has none, the one that its data flow shows."""
    module, counts = built.module, built.experts.counts
    if (planned := tensor_plan.cuts_of(module)) is not None:
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
            break
    return Cuts(
        refusal="its blocks have no column-row pair: linear layers, and a linear layer that reads only their outputs"
    )


def prove_or_change(built: BuiltModel, forward: TracedForward, planned: Cuts) -> ProvenPlan | Cuts:
    """Return the proof of the plan with which a forward was traced, or another plan, with which to trace it anew.

    Another plan is one that leaves whole what the trace has seen to look at values, or of which a smaller part is proven:
    the costs of a plan are those of the forward that was traced with it.
    """
    if not planned.refusal and not {*forward.spec.looks_in} <= {*planned.looking}:
        return tensor_plan.without_looking(built.module, planned, forward.spec.looks_in)
    reads = functools.cache(functools.partial(_outputs_read, built, keeps_all=bool(planned.looking)))
    proven = _prove(built, forward, planned, reads)
    fewer, refusal = planned, proven.proof.refusal
    while refusal and (smaller := tensor_plan.smaller(built.module, fewer, refusal)):
        fewer, refusal = smaller, _prove(built, forward, smaller, reads).proof.refusal
    return proven if refusal or fewer is planned else fewer


def _outputs_read(built: BuiltModel, *, keeps_all: bool) -> frozenset[int] | None:
    """Return the numbers of the outputs, among all of their tensors, that a loss reads besides the prediction; None for all."""
    loss = built.loss
    if loss is cross_entropy or isinstance(loss, ModelLoss):
        return frozenset()
    try:
        outputs, batch = outputs_on_meta(built.module, built.sample, built.num_samples, built.value_of, keeps_all)
    except Exception:  # of the user's own code, which may look at values
        return None
    read = storages_read(loss, outputs, batch)
    if read is None:
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
        owner_of(name): f"{follower} follows {followed}, and only one of them would be cut so"
        for follower, followed in pairs
        if proof.cuts.get(follower) != proof.cuts.get(followed)
        or proof.groups.get(follower) != proof.groups.get(followed)
        for name in (follower, followed)
    }


def _prove(
    built: BuiltModel, forward: TracedForward, planned: Cuts, reads: Callable[[], frozenset[int] | None]
) -> ProvenPlan:
    """Return the proof of a plan, the counts of a rank, and the heads that ranks may share. A weight and its moving average are cut alike.

    Where the code behind a cut needs more than a rank's part, the outputs of the modules that it reads are gathered, those of
    the head first; where that does not help, these modules stay whole.
    """
    module, recorder = built.module, forward.recorder
    assert recorder is not None
    first: CutProof | None = None
    while True:
        shareable = {} if planned.refusal else tensor_plan.shareable_heads(module, planned)
        proofs: list[CutProof] = []
        for cuts_logits in (True, False):
            proof = tensor_plan.proof_of(forward.spec, module, planned, shareable, recorder, cuts_logits)
            if proof.refusal and proof.cuts_logits:  # the code behind the head may need them whole
                continue
            if degree := cut_proof.smallest_degree(proof):
                proof = try_degree(built, proof, shareable, degree)
            proof = _with_whole_outputs(proof, reads)
            if unlike := {} if proof.refusal else _cut_unlike(forward.spec, proof):
                planned.styles = {path: style for path, style in planned.styles.items() if path not in unlike}
                planned.gathered |= unlike
                break
            if not proof.refusal:
                return ProvenPlan(planned, proof, shareable)
            proofs.append(proof)
            if not proof.cuts_logits:
                break
        if unlike:
            if planned.styles:
                continue
            return ProvenPlan(planned, CutProof({}))
        proof = proofs[0]
        first = first or proof
        planned.gather(paths := cut_proof.to_gather(module, proof), proof.refusal)
        if proof.cut_outputs and not planned.styles:  # the loss reads all that could be cut: it stays whole
            return ProvenPlan(planned, CutProof({}))
        if not paths or not planned.styles:
            planned.styles = dict(first.styles)
            planned.gathered.clear()
            return ProvenPlan(planned, first, shareable)


def try_degree(built: BuiltModel, proof: CutProof, shareable: Mapping[str, int], degree: int) -> CutProof:
    """Return the proof of a plan with the counts of a rank of a degree, or why it fails."""
    shared = {path: heads for path, heads in shareable.items() if heads < degree}
    forward = functools.partial(_run_forward, built, proof.styles, looking=proof.looking)
    try:
        looks = forward(recorder := Recorder(), keeps_all=bool(proof.looking))
        forward = functools.partial(forward, answers=looks.answers if proof.looking else None)
        return cut_proof.with_degree(proof, built.module, shared, recorder.operations, forward, degree)
    except DiffersError as error:
        return replace(proof, refusal=str(error), refused_at=error.where, fails_after=error.after)


def _run_forward(built: BuiltModel, styles: Mapping[str, str], recorder: Recorder, **looks: Any) -> Looks:
    """Record the operations of a forward on the meta device, with the ends of the modules that have a cut style.

    `looks` are the arguments of `cut_proof.run_forward` about code that looks at values.

    Raises:
        DiffersError: it fails.
    """
    with built.repeating():
        return cut_proof.run_forward(built.module, built.sample, styles, built.value_of, recorder, **looks)


_aten = torch.ops.aten

OUTSIDE = ""
"""Stands for the weights outside the blocks, such as embeddings, among what reaches a tensor."""


@dataclass(slots=True)
class _LinearFlow:
    """The layers whose outputs reach each linear layer without another linear layer in between."""

    reaching: dict[str, set[str]] = field(default_factory=dict)
    """By the path of a linear layer: linear layers, or `OUTSIDE`; in the order of the forward."""
    prediction: frozenset[str] = frozenset()
    """What reaches the model's prediction."""

    def readers_of(self, path: str) -> list[str]:
        """Return the linear layers that read what a layer computes."""
        return [reader for reader, sources in self.reaching.items() if path in sources]


def structural_plan(
    model: nn.Module, operations: list[Operation], experts: Collection[str], whole: Collection[str] = ()
) -> dict[str, str]:
    """Return the cut style of each module of a plan, by its path; empty where nothing in the blocks can be cut.

    `operations` are those of a forward of the whole model. Modules that route tokens to `experts` stay whole, with all below them, so that
    under `sequence_parallel` each rank routes its own tokens; so do modules in `whole`. A layer with adapters is one layer. Blocks that
    the forward does not run, as of another kind of data, are left out.
    """
    computed, linears = _by_module(operations), dict[str, nn.Module]()
    containers = containers_of(model)
    routing = {_router_of(model, path, containers) for path in experts}
    for path, part in model.named_modules():
        if (
            (_adds_nothing_else(part, computed.get(path, ())) or is_transposed(part))
            and not any(is_below(path, router) for router in routing)
            and path not in whole
        ):
            linears.setdefault(path_without_adapters(path), part)
    blocks = tuple(path for path in containers if any(is_below(op.where, path) for op in operations))
    flow = _flow(model, operations, linears, blocks)
    heads = flow.prediction if containers else ()
    inside = [path for path in flow.reaching if (block_of(path, blocks) if blocks else path not in heads)]
    rows: set[str] = set()
    columns: set[str] = set()
    for path in reversed(inside):
        sources = flow.reaching[path]
        readers = flow.readers_of(path)
        if readers and rows.issuperset(readers):
            columns.add(path)
        elif sources and sources <= {*inside} - {path}:
            rows.add(path)
    rows = {path for path in rows if columns & flow.reaching[path]}
    if not rows:
        return {}
    plan = {path: "column" for path in inside if path in columns} | {path: "row" for path in inside if path in rows}
    plan |= {path: "vocab" for path in _vocabulary(model, linears, inside, flow) if path not in whole}
    return {part: cut for path, style in plan.items() for part, cut in cuts_of_parts(model, path, style).items()}


def _router_of(model: nn.Module, expert: str, containers: Sequence[str]) -> str:
    """Return the path of the module whose code calls a module of experts; if a block or the model does, that of the experts themselves."""
    owner = owner_of(expert)
    if isinstance(model.get_submodule(owner), nn.ModuleList | nn.ModuleDict):
        owner = owner_of(owner)
    return expert if owner in ("", block_of(expert, containers)) else owner


def _by_module(operations: list[Operation]) -> dict[str, list[Operation]]:
    """Return the operations that each module's code runs outside of its submodules, by its path."""
    by_module: dict[str, list[Operation]] = {}
    for op in operations:
        if op.func not in ("left", "outputs"):
            by_module.setdefault(op.where, []).append(op)
    return by_module


def _adds_nothing_else(part: nn.Module, computed: Sequence[Operation]) -> bool:
    """Return whether a module is a linear layer with torch's forward, or one whose bias a row cut can postpone: it has none, or each of
    its calls is one product to which it is added, as of a layer that casts its weights."""
    if not isinstance(part, nn.Linear):
        return False
    if type(part).forward is nn.Linear.forward or part.bias is None:
        return True
    bias = part.bias.untyped_storage()._cdata
    adds = [any(view.storage == bias for view in op.given) and not op.kwargs for op in computed]
    calls = [(op.func, is_added) for op, is_added in zip(computed, adds, strict=True)]
    fused, *apart = (_aten.addmm.default, True), (_aten.mm.default, False), (_aten.add.Tensor, True)
    return bool(calls) and calls in ([fused] * len(calls), apart * (len(calls) // 2))


def _vocabulary(
    model: nn.Module, linears: Mapping[str, nn.Module], inside: Collection[str], flow: _LinearFlow
) -> list[str]:
    """Return the paths of the head and of the embedding of the same vocabulary; the largest embedding without a head."""
    outside = ((path, part) for path, part in model.named_modules() if not block_of(path, containers_of(model)))
    tables = {path_without_adapters(path): part for path, part in outside if isinstance(part, nn.Embedding)}
    heads = [path for path in flow.prediction if path in linears and path not in inside]
    if len(heads) == 1 and flow.prediction == {heads[0]} and isinstance(head := linears[heads[0]], nn.Linear):
        return [*(path for path, table in tables.items() if table.num_embeddings == head.out_features), heads[0]]
    largest = max(tables, key=lambda path: tables[path].weight.numel(), default=None)
    return [largest] if largest is not None else []


def _flow(
    model: nn.Module, operations: list[Operation], linears: Mapping[str, nn.Module], blocks: Collection[str]
) -> _LinearFlow:
    weights = {
        param.untyped_storage()._cdata: path
        for path, part in model.named_modules()
        for param in part.parameters(recurse=False)
    }
    outside = {key for key, path in weights.items() if not block_of(path, blocks)}
    reached: dict[int, frozenset[str]] = {}
    flow = _LinearFlow()
    for op in operations:
        if op.func == "outputs":
            prediction = op.args[0]
            if isinstance(prediction, View):
                flow.prediction = reached.get(prediction.storage, frozenset())
            continue
        if op.func == "left":
            continue
        sources: frozenset[str] = frozenset().union(*(reached.get(view.storage, frozenset()) for view in op.given))
        if (path := path_without_adapters(op.where)) in linears:
            flow.reaching.setdefault(path, set()).update(sources - {path})
            sources = frozenset({path})
        elif not sources and any(view.storage in outside for view in op.given):
            sources = frozenset({OUTSIDE})
        for view in op.results:
            if view.storage not in weights:
                reached[view.storage] = reached.get(view.storage, frozenset()) | sources if op.writes else sources
    return flow
