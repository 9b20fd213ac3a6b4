"""One run of a few steps, as a case of plain data that any pool of ranks can carry out, and its comparison.

`observe` runs the product's own path (blueprint, program, mesh, steps) and returns everything a proof compares: losses,
norms, each rank's runs of every gradient and weight. `whole` puts the runs of all ranks together.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import Dataset, batches
from samestep.errors import InputError, LayoutError, UnprovenError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.param_spec import Cut
from samestep.program.program import LedgerRow, Program
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.ledger import Ledger
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.weights.pieces import Piece
from samestep.strategies import program_of
from tests import traced
from tests.device import real_gpu
from tests.models import MODELS, Tokens
from tests.pool import pool

Runs = list[tuple[str, int, int, Tensor]]
"""(name, start, stop, elements) of each run that a rank holds of a weight, or of its part of one that is cut."""
TOLERANCE = 1e-9
"""The design's limit in float64: what is left there is the order of sums."""
Cuts = dict[str, tuple[Cut, tuple[int, ...]]]
"""For weights cut over tp: how, and the shape of what a rank holds."""


@dataclass
class Observed:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Runs] = field(default_factory=list)
    weights: Runs = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What would have been refused, and is allowed or has no effect."""
    ledger: dict[str, list[LedgerRow]] = field(default_factory=dict)
    predicted: dict[str, list[LedgerRow]] = field(default_factory=dict)
    cuts: Cuts = field(default_factory=dict)
    index: int = 0
    """Position on tp."""
    picks: bool = False
    """Whether values pick how many rows the model works on."""


def job_of(precision: str = "float64", steps: int = 3, **tables: Any) -> Job:
    """A small job; SGD with momentum, so that weights can be compared after separate backward passes.

    Samples run again in the first step alone unless `watch_every` says so: to repeat the second one too takes as long as two steps.
    """
    train = {"global_batch": 8, "steps": steps, "seed": 3, "watch_every": 0, **tables.pop("train", {})}
    optimizer = {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}, **tables.pop("optimizer", {})}
    numerics = {"precision": precision, **tables.pop("numerics", {})}
    return Job(train=train, optimizer=optimizer, numerics=numerics, **tables)


def in_loop(job: Job) -> Job:
    """Return a job as a loop of one's own takes it: `parallelize` rejects keys that its arguments replace."""
    kept = {
        "optimizer": {"clip_norm": job.optimizer.clip_norm},
        "model": {"stages": job.model.stages, "offload": job.model.offload},
    }
    return Job(**{**job.model_dump(exclude={"train": {"loss", "loss_over"}}), **kept})


def clipped(precision: str = "float64", **train: Any) -> Job:
    """A small job of two steps that clips, so that the norm has an effect."""
    return job_of(precision, 2, optimizer={"clip_norm": 0.5}, train=train)


def watched(job: Job, every: int) -> Job:
    """Return a job that runs samples again, and compares ranks, in every so many steps."""
    return job.model_copy(update={"train": job.train.model_copy(update={"watch_every": every})})


def combinations(layouts: Sequence[str], models: Sequence[str]) -> list[Any]:
    """Every layout with every model; outside `make parity` each layout with one model, in turn."""
    return [
        pytest.param(layout, model, marks=() if index % len(models) == turn else pytest.mark.nightly)
        for index, layout in enumerate(layouts)
        for turn, model in enumerate(models)
    ]


def without(kinds: Iterable[Any], cases: Sequence[Any]) -> list[Any]:
    """Kinds that no default row of `cases` has, and the first kind; in `make parity` all.

    Where rows of several ranks are held against the same plain loop as one rank, one rank has the others alone by default.
    """
    held = {value for case in cases if not case.marks for value in case.values}
    return [
        kind if index == 0 or kind not in held else pytest.param(kind, marks=pytest.mark.nightly)
        for index, kind in enumerate(kinds)
    ]


@dataclass(frozen=True)
class Code:
    """A model in `MODELS` that a user trains in a way of its own; what is not given is that of the job."""

    build: Callable[[], nn.Module]
    data: Callable[[], Any] = Tokens
    loss: Callable[..., Any] | None = None
    optimizer: Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer] | None = None
    each: Callable[[Run], None] | None = None
    """What the user's loop does after every step."""
    job: Job | None = None
    like: str = ""
    """The model whose result on one device it must have, if that is another."""
    is_cut: bool = False
    """Whether its plan of tensor parallelism is proven with the first trace, for any layout."""

    def __call__(self) -> nn.Module:
        return self.build()


def code_of(model: str) -> Code:
    """Return a model of `MODELS` with what it is trained by."""
    known = MODELS[model]
    return known if isinstance(known, Code) else Code(known, is_cut=True)


def job_for(model: str) -> Job:
    """Return the job in which a model is held against one device."""
    return code_of(model).job or clipped()


def source_of(model: str, layout: Layout, job: Job, dataset: Callable[[], Any] | None = None) -> Source:
    """Return a model of `MODELS`, traced on a sample."""
    code = code_of(model)
    dataset = dataset or code.data
    source = Source(perturbed(code.build), code.loss or loss_of(job), code.optimizer or optimizer_of(job), model)
    example = next(batches(dataset(), job)).samples([0])
    key = (model if code.is_cut else code.build, dataset, code.loss)
    for_any = code.is_cut and model not in _uncut
    return replace(source, prepared=traced.prepared(key, source, job, example, layout, for_any=for_any))


def program_in(layout: str, model: str) -> Program:
    """The program of a rank in a layout that cuts tensors; whichever test comes first, the model's plan of tensor parallelism is proven."""
    source = source_of(model, Layout("tp=2"), clipped())
    assert source.prepared is not None
    return program_of(source.prepared.spec, clipped(), Layout(layout))


def program_traced_in(layout: str, model: str) -> Program:
    """The program of a rank of a model that is traced in its layout."""
    where = Layout(layout)
    source = source_of(model, where, clipped())
    assert source.prepared is not None
    return program_of(source.prepared.spec, clipped(), where)


_ahead: dict[tuple[str, str], None] = {}
"""Each model and layout that the tests of the session name together, until they are traced."""
_uncut: set[str] = set()
"""The models that they name with layouts of which none cuts tensors: to prove a plan would be a third of their traces."""


def note_ahead(items: Iterable[pytest.Item]) -> None:
    """Note the models and layouts of tests that will run."""
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        words = [value for value in given if isinstance(value, str)]
        layouts = [word for word in words if "=" in word]
        _ahead.update(dict.fromkeys(itertools.product((word for word in words if word in MODELS), layouts)))
    cut = {model for model, layout in _ahead if "tp=" in layout}
    _uncut.update({model for model, _ in _ahead} - cut)


def trace_ahead() -> None:
    """Trace what is noted, once, before ranks are forked: they would be forked again after each model that is new to them."""
    while _ahead:
        (model, layout), _ = _ahead.popitem()
        with contextlib.suppress(Exception):  # the test that asks for it finds it out itself
            source_of(model, Layout(layout), job_for(model))


def make_run(
    rank: int, world: int, model: str, layout: str | Layout, job: Job, dataset: Callable[[], Any] | None = None
) -> Run:
    per_node = job.run.ranks_per_node or world
    place = RankInfo(rank, rank % per_node, world, per_node, device_of_ranks())
    where = Layout(layout) if isinstance(layout, str) else layout
    return Run(source_of(model, where, job, dataset), where, job, place)


def run_from(source: Source, layout: str | Layout, job: Job, rank: int = 0, world: int = 1) -> Run:
    """Return a run of a source on a rank of one host."""
    where = Layout(layout) if isinstance(layout, str) else layout
    return Run(source, where, job, RankInfo(rank, rank, world, world, torch.device("cpu")))


def traced_run(
    key: Any, source: Source, data: Any, layout: str, job: Job, rank: int, world: int, *, for_any: bool = False
) -> Run:
    """Return a run of a source that is traced on a sample, once for all ranks that are forked later (`traced.prepared`)."""
    example = next(batches(data, job)).samples([0])
    prepared = traced.prepared(key, source, job, example, Layout(layout), for_any=for_any)
    return run_from(replace(source, prepared=prepared), layout, job, rank, world)


def prepared_run(rank: int, world: int, model: str, layout: str, job: Job) -> Run:
    """A run that has its weights, before its first step."""
    run = make_run(rank, world, model, layout, job)
    run.prepare(next(batches(code_of(model).data(), job)).samples([0]))
    return run


def losses_of_steps(run: Run, dataset: Any, start: int, stop: int) -> list[float]:
    """Take the steps from `start` to before `stop` of a run's job; return their losses."""
    found = []
    for batch in batches(dataset, run.job, first_step=start):
        if batch.step == stop:
            break
        found.append(run.step(batch).loss)
    return found


def resume(
    rank: int, world: int, model: str, layout: str, job: Job, begin: str | None, until: int, end: str | None
) -> tuple[Run, list[float]]:
    """Take the steps after the newest checkpoint in `begin` up to `until`, and save to `end`; return the run and its losses."""
    run = prepared_run(rank, world, model, layout, job)
    if begin is not None:
        checkpoint.load(run, manifests.list_checkpoints(Path(begin))[-1])
    stream = itertools.islice(batches(Tokens(), job, first_step=run.steps_taken), until - run.steps_taken)
    losses = [run.step(batch).loss for batch in stream]
    if end is not None:
        checkpoint.save(run, Path(end), keep=1)
    return run, losses


def resumed_losses(rank: int, world: int, *args: Any) -> list[float]:
    """What `resume` returns without the run, which stays on its rank."""
    return resume(rank, world, *args)[1]


def device_of_ranks() -> torch.device:
    """Return where this process computes: on the CPU, but for the ranks of a pool on a simulated device."""
    bound = dist.group.WORLD.bound_device_id if dist.is_initialized() and dist.group.WORLD else None
    return bound or torch.device("cpu")


def on_ranks(
    layout: str, function: Callable[..., Any], model: str, job: Job, *args: Any, device: str = "cpu"
) -> list[Any]:
    """Return what `function(rank, world, model, layout, job, *args)` returns on each rank; all inherit the traced model."""
    where = Layout(layout)
    if device == "cuda" and (reason := real_gpu.refusal(where.world_size)):
        pytest.skip(reason)
    source_of(model, where, job)
    if where.world_size == 1 and device == "cpu":
        return [function(0, 1, model, layout, job, *args)]
    return pool(where.world_size, device).run(function, model, layout, job, *args)


def perturbed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Norm weights of ones and biases of zeros hide errors: shift them all."""

    def built() -> nn.Module:
        module = build()
        with torch.no_grad():
            for param in module.parameters():
                if param.dim() <= 1:
                    param.add_(0.1 * torch.randn(param.shape, dtype=param.dtype))
        return module

    return built


def observe(rank: int, world: int, model: str, layout: str, job: Job, record: bool = False) -> Observed:
    """Take the job's steps; with `record`, keep the ledger of the last one."""
    code = code_of(model)
    with seeded(rank) if isinstance(MODELS[model], Code) else contextlib.nullcontext():
        return follow(make_run(rank, world, model, layout, job), code.data(), job, record, code.each)


@contextlib.contextmanager
def seeded(rank: int) -> Iterator[None]:
    """Give each rank random numbers of its own, as processes that are started apart have."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(1000 + rank)
    random.seed(1000 + rank)
    np.random.seed(1000 + rank)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def reference(model: str, job: Job | None = None) -> Observed:
    """What one device computes, or a device with a whole model for each of the job's replicas."""
    return _reference(model, (job or job_for(model)).model_dump_json())


@functools.cache
def _reference(model: str, job: str) -> Observed:
    parsed = Job.model_validate_json(job)
    if (replicas := parsed.numerics.replicas) > 1:
        return on_ranks(f"dp={replicas}", observe, model, parsed)[0]
    return observe(0, 1, model, "dp=1", parsed)


def prove(layout: str, model: str, job: Job | None = None, device: str = "cpu") -> None:
    """Hold the ranks of a layout against one CPU in float64, and what they sent against the program."""
    job = job or job_for(model)
    ranks = on_ranks(layout, observe, model, job, True, device=device)
    assert_same(ranks, reference(code_of(model).like or model, job), TOLERANCE)
    assert_ledger(ranks, layout)


def prove_refused(layout: str, model: str, words: str, error: type[InputError] = LayoutError, waiver: str = "") -> None:
    """Hold a layout to a refusal of a model, by these words and, if one is given, with this waiver.

    What the program refuses needs no ranks; rows with `zero` run on them.
    """
    with pytest.raises(error, match=words) as refusal:
        _start(layout, model, job_for(model))
    if waiver:
        assert isinstance(refusal.value, UnprovenError)
        assert refusal.value.waiver == waiver


def _start(layout: str, model: str, job: Job) -> None:
    where = Layout(layout)
    found = source_of(model, where, job).prepared
    if found is not None and not where.zero:
        program_of(found.spec, job, where)
    on_ranks(layout, observe, model, job)


def prove_ledger(layout: str, model: str, precision: str = "bf16") -> list[Observed]:
    """Hold what the ranks of a layout sent against the program, in another precision."""
    ranks = on_ranks(layout, observe, model, clipped(precision), True)
    assert_ledger(ranks, layout)
    return ranks


def follow(
    run: Run, dataset: Dataset, job: Job, record: bool = False, each: Callable[[Run], None] | None = None
) -> Observed:
    """Take the steps of a run over a dataset, and note what a proof compares; `each` acts after every step."""
    seen = Observed()
    for batch in batches(dataset, job):
        if record and batch.step == job.train.steps - 1:
            with Ledger() as ledger:
                report = run.step(batch)
            seen.ledger = ledger.rows
            program = run.held.program_behind(run.steps_taken)
            seen.predicted = program.ledger(group_of=run.assembly.parallel.mesh.group_of)
        else:
            report = run.step(batch)
        seen.losses.append(report.loss)
        seen.norms.append(report.grad_norm)
        seen.notes.append(report.note)
        pieces = run.updater.pieces
        seen.gradients.append([(p.name, *_place(run, p), p.gradient().detach().cpu().clone()) for p in pieces])
        if each is not None:
            each(run)
    seen.weights = [(p.name, *_place(run, p), p.master().cpu().clone()) for p in run.updater.pieces]
    seen.remarks = run._stepper.refusals.remarks
    seen.picks = bool(run.program.step.model.picks_at)
    seen.cuts, seen.index = cuts_of(run)
    return seen


def cuts_of(run: Run) -> tuple[Cuts, int]:
    """Return how the weights are cut over tp, and the rank's position there."""
    uncut = {member.name for owners in run.program.owners if owners.is_cut for member in owners.members}
    cut = [p for p in run.program.step.model.params if p.cut and run.layout.tp > 1 and p.name not in uncut]
    return {p.name: (p.cut, p.shape) for p in cut}, run.assembly.parallel.mesh.index("tp")


def _place(run: Run, piece: Piece) -> tuple[int, int]:
    """Where a piece stands: experts of other ranks, which lie before its own, are counted too."""
    spec = next(param for param in run.program.step.model.params if param.name == piece.name)
    mesh = run.assembly.parallel.mesh
    is_part = run.program.step.holding(spec).is_expert_sharded and not piece.is_uncut
    before = mesh.index("ep") * spec.numel if is_part else 0
    return before + piece.start, before + piece.stop


def whole(runs_of_ranks: list[Runs], cuts: Cuts | None = None, indices: list[int] | None = None) -> dict[str, Tensor]:
    """Put runs together; runs that several ranks hold must be equal: to the bit, or where a tensor cut computes them
    twice, up to the order of sums."""
    parts: dict[str, dict[int, dict[int, Tensor]]] = {}
    for runs, index in zip(runs_of_ranks, indices or [0] * len(runs_of_ranks), strict=True):
        for name, start, stop, tensor in runs:
            if start == stop:  # a weight without elements, which some layouts hold nowhere
                continue
            flat = tensor.flatten()
            known = parts.setdefault(name, {}).setdefault(index, {}).setdefault(start, flat)
            assert torch.equal(known, flat), f"{name} differs between the ranks that hold it"
    found_whole = {}
    for name, by_index in parts.items():
        flats = [torch.cat([found[start] for start in sorted(found)]) for _, found in sorted(by_index.items())]
        if cuts and name in cuts:
            cut, shape = cuts[name]
            found_whole[name] = join_parts([flat.view(shape) for flat in flats], cut).flatten()
            continue
        found_whole[name] = flats[0]
        for other in flats[1:]:
            assert torch.allclose(flats[0], other, rtol=1e-9, atol=1e-9 * float(flats[0].abs().max())), name
    return found_whole


def join_parts(cuts: Sequence[Tensor], cut: Cut) -> Tensor:
    """Return the whole weight from the parts of all ranks, in their order: the inverse of `placement.local_part`."""
    parts = zip(*(part.chunk(cut.parts, dim=cut.dim) for part in cuts), strict=True)
    return torch.cat([torch.cat(part, dim=cut.dim) for part in parts], dim=cut.dim)


def largest_error(candidate: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """The design's measure: |difference| against the tensor's own largest, or 1e-6 of the model's largest."""
    assert candidate.keys() == reference.keys(), f"missing: {candidate.keys() ^ reference.keys()}"
    most = max(float(tensor.abs().max()) for tensor in reference.values())
    errors = {}
    for name, expected in reference.items():
        assert candidate[name].numel() == expected.numel(), f"{name} has elements missing"
        scale = max(float(expected.abs().max()), 1e-6 * most)
        errors[name] = float((candidate[name].double() - expected.double()).abs().max()) / scale
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def assert_ledger(ranks: list[Observed], layout: str) -> None:
    """Every rank sent what its program lists; an exchange of experts as much over its group, whatever was chosen.

    Where values pick rows, the sums of cut parts have a size of their own, the same on all ranks of a group.
    """
    if ranks[0].picks:
        _assert_picked_ledger(ranks)
        return
    if Layout(layout).ep == 1:
        for rank, seen in enumerate(ranks):
            assert seen.ledger == seen.predicted, f"rank {rank}"
        return
    exchanged: dict[str, list[list[int]]] = {}
    for seen in ranks:
        assert seen.ledger.keys() == seen.predicted.keys()
        for group, listed in seen.predicted.items():
            sent = seen.ledger[group]
            assert [_unsized(row) for row in sent] == [_unsized(row) for row in listed]
            more = [s.size_bytes - p.size_bytes for s, p in zip(sent, listed, strict=True) if p.kind == "all_to_all"]
            exchanged.setdefault(group, []).append(more)
    for group, of_members in exchanged.items():
        assert not any(map(sum, zip(*of_members, strict=True))), f"the ranks {group} sent more or less than is listed"


def _assert_picked_ledger(ranks: list[Observed]) -> None:
    of_group: dict[str, list[LedgerRow]] = {}
    for rank, seen in enumerate(ranks):
        assert seen.ledger.keys() == seen.predicted.keys(), f"rank {rank}"
        for group, listed in seen.predicted.items():
            sent = seen.ledger[group]
            assert [row._replace(size_bytes=0) for row in sent] == [row._replace(size_bytes=0) for row in listed]
            assert of_group.setdefault(group, sent) == sent, f"the ranks {group} sent more or less than each other"


def _unsized(row: LedgerRow) -> LedgerRow:
    return row._replace(size_bytes=0) if row.kind == "all_to_all" else row


def assert_same(ranks: list[Observed], reference: Observed, tolerance: float) -> None:
    """Losses, norms, every gradient of every step and every weight of `ranks` are those of `reference`."""
    for seen in ranks:
        for ours, theirs in zip(seen.losses + seen.norms, reference.losses + reference.norms, strict=True):
            assert abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)), (seen.losses, reference.losses)
    cuts = {name: cut for seen in ranks for name, cut in seen.cuts.items()}
    indices = [seen.index for seen in ranks]
    for step, expected in enumerate(reference.gradients):
        error, name = largest_error(whole([seen.gradients[step] for seen in ranks], cuts, indices), whole([expected]))
        assert error <= tolerance, f"gradient of {name} in step {step + 1}: {error:.1e}"
    error, name = largest_error(whole([seen.weights for seen in ranks], cuts, indices), whole([reference.weights]))
    assert error <= tolerance, f"weight {name}: {error:.1e}"
