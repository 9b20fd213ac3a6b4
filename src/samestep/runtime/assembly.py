"""What a run is made of: a model built on the meta device, traced, cut, filled by this rank's part, and given a holder.

prepare    the blueprint and its ModelSpec, once for all ranks: a forked worker inherits them
assemble   each axis's twin at work on the modules, from the inside out: precision, the cuts of tp, cp and ep,
           recomputation around them, and around all what holds the weights of the data axis
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.analysis import ModelAnalysis
from samestep.job import Job
from samestep.layout import Layout
from samestep.model import ModelSpec
from samestep.program import Program
from samestep.ranks import Ranks
from samestep.runtime import (
    context,
    cuts,
    dropout,
    expert,
    locality,
    pipeline,
    placement,
    precision,
    recompute,
    sequence,
    tensor,
)
from samestep.runtime import mesh as meshes
from samestep.runtime.build import cross_entropy, learning_rate_factor
from samestep.runtime.data import Replicated
from samestep.runtime.deferred import Deferred
from samestep.runtime.families import facts_of
from samestep.runtime.init import Blueprint, blueprint, fill_rest
from samestep.runtime.joining import Place
from samestep.runtime.masks import Part
from samestep.runtime.trace import samples_traced, trace
from samestep.runtime.traced_model import TracedModel
from samestep.runtime.update import OptimizerSource, Updater, check_optimizer
from samestep.strategies import program_of

if TYPE_CHECKING:
    from samestep.runtime.shard import Sharded

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


@dataclass(frozen=True, slots=True)
class Source:
    """What a run is made from."""

    model: Callable[[], nn.Module] | nn.Module
    loss: Loss
    optimizer: OptimizerSource
    name: str = "model"
    prepared: TracedModel | None = None
    """Built and traced already: a forked worker inherits it."""


@dataclass(slots=True)
class Assembly:
    """What a prepared run consists of."""

    model: nn.Module
    spec: ModelSpec
    """The whole model."""
    program: Program
    mesh: meshes.Mesh
    holder: Replicated | Sharded
    updater: Updater
    stage: pipeline.Stage | None
    """What passes between pipeline stages; None where one rank runs all layers."""
    slicing: context.Slicing | None
    """This rank's slice of sequences; None where it has them whole."""
    deferred: Deferred
    """Gradients of weights that backwards leave for later."""
    loss: Loss
    balance: expert.Balance | None
    """What the job adds to its loss so that experts are chosen alike; None where it asks for nothing."""
    lr_factor: Callable[[int], float]
    nominal_count: float
    """A power of two near the count of a whole step: dividing by it costs no bit."""
    master: torch.dtype
    modes: dict[nn.Module, bool]
    """Which modules train: a batch norm that was built frozen stays so."""
    running: list[Tensor]
    """Running statistics, which a skipped step leaves as they were."""
    draws: bool | None
    """Whether forwards draw dropout masks; None until the first step has shown it."""
    mask_part: Part | None
    """Which part of each mask this rank of a tensor cut, or of a cut of the sequence, draws."""


def prepare(source: Source, job: Job, example: Any) -> TracedModel:
    """Build the model on the meta device and trace it on one sample: it is looked at here, and nowhere else."""
    plan = _built(source, job)
    dtype = next((param.dtype for param in plan.module.parameters() if param.is_floating_point()), torch.float32)
    one = _first_of(example, dtype)
    experts = expert.experts_of(plan.module)
    planned = cuts.cuts_of(plan.module, experts.counts)
    shareable = {} if planned.refusal else cuts.shareable_heads(plan.module, planned)
    value_of = functools.partial(plan.materialize, device=torch.device("cpu"))
    with ExitStack() as stack:
        seen = stack.enter_context(cuts.watching(plan.module, planned))
        calls = stack.enter_context(sequence.watching(plan.module))
        masks = stack.enter_context(dropout.noting(plan.module, samples_traced(plan.module)))
        dealings = stack.enter_context(expert.watching(plan.module, experts))
        spec = trace(plan.module, one, source.name, value_of, seen.keep, planned.styles, seen.use)
    spec = expert.with_experts(spec, dealings, plan.module if source.loss is cross_entropy else None)
    spec = _with_loss(cuts.with_cuts(spec, plan.module, planned, seen, shareable))
    spec, parts = sequence.with_sequence(spec, plan.module, planned.styles, calls, experts.counts)
    analysis = ModelAnalysis(
        spec=replace(spec, masks=tuple(masks)),
        cut_styles=planned.styles,
        shareable_heads=shareable,
        sequence_parts=parts,
        experts=experts,
        has_dropout=dropout.has_dropout(plan.module),
    )
    return TracedModel(plan, analysis, facts_of(plan.module))


def copied(source: Source, job: Job) -> TracedModel:
    """Return the source's traced model with a blueprint of its own, for another run: what was learned stays."""
    assert source.prepared is not None
    return replace(source.prepared, blueprint=_built(source, job))


def _built(source: Source, job: Job) -> Blueprint:
    plan = blueprint(source.model, job.train.seed)
    if not plan.module.training:
        plan.module.train()  # loaded for inference as a whole; in a model that trains, a part in evaluation mode is meant
    return plan


def _with_loss(spec: ModelSpec) -> ModelSpec:
    """Add the loss to what is behind the last block: log-probabilities of the output are written, and kept.

    That is what a cross entropy does, and little less than others do. Its backward has their gradient and its own result.
    """
    *others, last = spec.layers
    moved = 2 * last.output_elements
    last = replace(
        last,
        loss_elements=last.output_elements,
        loss_working_elements=2 * last.output_elements,
        moved_elements=last.moved_elements + moved,
        moved_cut_elements=last.moved_cut_elements + (moved if spec.logit_rows else 0),
        kernels=last.kernels + 3,
    )
    return replace(spec, layers=(*others, last))


def with_slices(traced: TracedModel, layout: Layout, example: Any) -> TracedModel:
    """Find out whether blocks work token by token, where the layout asks it of them and nobody has found out yet."""
    analysis, spec = traced.analysis, traced.spec
    gives_experts_parts = layout.sequence_parallel and any(layer.dealings for layer in spec.layers)
    if analysis.knows_slices or (layout.cp == 1 and not gives_experts_parts):
        return traced
    value_of = functools.partial(traced.blueprint.materialize, device=torch.device("cpu"))
    spec = locality.prove(traced.module, _first_of(example, torch.float32), spec, value_of, analysis.experts)
    return replace(traced, analysis=replace(analysis, spec=spec, knows_slices=True))


def _first_of(example: Any, dtype: torch.dtype) -> Any:
    """Return a batch of one sample."""
    return precision.cast_floating(tree_map_only(Tensor, lambda tensor: tensor[:1], example), dtype)


def assemble(source: Source, layout: Layout, job: Job, place: Place, example: Any) -> Assembly:
    """Build, cut and fill the model of one rank."""
    traced = with_slices(source.prepared or prepare(source, job, example), layout, example)
    plan, spec = traced.blueprint, traced.spec
    ranks = Ranks.of(layout)
    stage, replica = ranks.coordinate(place.rank, "pp"), ranks.coordinate(place.rank, "dp")
    program = program_of(spec, job, layout, place.ranks_per_node, source.loss is cross_entropy, stage, replica)
    check_optimizer(source.optimizer, spec, layout)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job.numerics.tf32
    mesh = meshes.build(program, place.device)
    model = plan.module
    assert all(param.is_meta for param in model.parameters()), "a blueprint is cut and filled by one run alone"
    precision.apply(model, program)
    if layout.pp > 1:
        pipeline.check(model, program)
    tensor.apply(traced, program, mesh)
    slicing = context.Slicing(model, program, mesh) if layout.cp > 1 else None
    expert.apply(traced, program, mesh)
    dropout.track_modules(model)
    deferred = Deferred(model, program)
    recompute.apply(model, program, functools.partial(_recompute_contexts, model, job, slicing))

    def materialize(name: str, dtype: torch.dtype) -> Tensor:
        whole, cut = plan.materialize(name, place.device, dtype), params[name]
        return placement.local_part(whole, cut, program.step.holding(cut), mesh)

    params = {param.name: param for param in program.step.model.params}
    holder = holder_of(layout)(model, program, mesh, materialize)
    fill_rest(plan, place.device, torch.float64 if job.numerics.precision == "float64" else None)
    return Assembly(
        model=model,
        spec=spec,
        program=program,
        mesh=mesh,
        holder=holder,
        updater=Updater.over(holder.pieces, source.optimizer, job.numerics),
        stage=pipeline.Stage(model, program, mesh, slicing) if layout.pp > 1 else None,
        slicing=slicing,
        deferred=deferred,
        loss=functools.partial(tensor.cut_loss, mesh) if tensor.cuts_logits(program) else source.loss,
        balance=expert.Balance.of(traced, program, mesh),
        lr_factor=learning_rate_factor(job.schedule, job.train.steps),
        nominal_count=_nominal_count(example, job.train.global_batch),
        master=precision.DTYPES[program.step.master_dtype],
        modes={module: module.training for module in model.modules()},
        running=[buffer for path in spec.coupled_modules for buffer in model.get_submodule(path).buffers()],
        draws=True if spec.masks or traced.analysis.has_dropout else None,
        mask_part=Part(
            spec, mesh.size("tp"), mesh.index("tp"), layout.sequence_parallel, mesh.size("cp"), mesh.index("cp")
        )
        if mesh.size("tp") * mesh.size("cp") > 1
        else None,
    )


def holder_of(layout: Layout) -> type[Replicated] | type[Sharded]:
    """Return what holds the weights. FSDP2 and DTensor take a second to import, which replicated runs need not pay.

    A process that forks workers calls it first, so that they need not pay either.
    """
    if layout.zero < 2 or layout.num_shards == 1:
        return Replicated
    from samestep.runtime.shard import Sharded  # noqa: PLC0415

    return Sharded


def _recompute_contexts(model: nn.Module, job: Job, slicing: context.Slicing | None) -> recompute.Contexts:
    """Surround a forward, and its repetition inside backward, where the modes of the forward are not active."""
    first, again = dropout.recompute_contexts(model)
    inner = again if slicing is None else recompute.nested(again, slicing.again())
    return first, recompute.nested(precision.RaiseIslands(), inner) if job.numerics.precision == "float64" else inner


def _nominal_count(example: Any, global_batch: int) -> float:
    """Return a power of two near the count of a step, from shapes alone: the same in every layout."""
    labels = example.get("labels") if isinstance(example, dict) else None
    if labels is None:
        labels = tree_leaves(example)[-1]
    each = labels.numel() / max(1, labels.shape[0]) if isinstance(labels, Tensor) and labels.dim() else 1.0
    return float(2 ** round(math.log2(max(1.0, global_batch * each))))
