"""The verb `verify`: prove on a user's own job that a layout computes what one device computes.

```
one device ── steps by SGD in float64 ── the job's optimizer, fed with the gradients found ──► what is right
the layout ── the same, on its ranks ── a checkpoint ──────────────────────────────────────► what is held against it
one device ── reads the checkpoint ── compares everything ── looks for the cause of the first difference
then again in the job's own precision, against what one rounding does to one device
```
In float64, with the model's float32 islands raised, two orders of the same sums differ by some 1e-16, a wrong sum by
1e-3 and more: the limit of 1e-9 lies far from both. Weights are compared after steps of SGD, whose updates are as exact
as the gradients; Adam, which makes 0.1 of a step of 1e-9 near its epsilon, is proven on equal gradients instead. In
float32 or bf16 no fixed limit is right, so it is measured: eight times the largest deviation of eight runs on one device
whose first weights are each off by one rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import causes, comparison, observation
from samestep.causes import Case, Part
from samestep.comparison import Comparison
from samestep.datasets import Batch, Dataset, batches, open_dataset
from samestep.errors import CheckpointError, JobError, WorkerError
from samestep.job import Job, ScheduleTable
from samestep.layout import Layout
from samestep.model import ModelSpec
from samestep.observation import Observation
from samestep.program import Program
from samestep.runtime import checkpoint, dropout, launch
from samestep.runtime.build import loss_of, model_source, optimizer_of
from samestep.runtime.launch import Place
from samestep.runtime.precision import DTYPES
from samestep.runtime.run import Loss, Run, Source, holder_of, prepare, with_slices
from samestep.runtime.update import Updater, optimizer_source
from samestep.strategies import programs_of
from samestep.verdict import Cause, Check, Verdict

FLOAT64_ALLOWANCE = 1e-9
PERTURBED_RUNS = 8
ALLOWANCE_FACTOR = 8
FIRST_MOVE = 0.01
"""How far the first step of SGD moves the weights, against their own size: enough to see, too little to diverge."""

Precision = Literal["job", "float64"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is proven: a worker inherits it."""

    source: Source
    dataset: Dataset
    example: Any
    job: Job
    layout: Layout
    folder: Path
    """Where ranks write what they have noted."""

    @property
    def steps_by_sgd(self) -> Source:
        """The source with plain SGD for its optimizer; its learning rate is set once gradients are known."""
        return dataclasses.replace(self.source, optimizer=_sgd)

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        prepared = self.source.prepared or prepare(self.source, self.job, self.example)
        return with_slices(prepared, self.layout, self.example)[1]

    def programs(self) -> list[Program]:
        """The step of every pipeline stage."""
        return list(programs_of(self.spec, self.job, self.layout, self.job.run.ranks_per_node))


def _sgd(named: list[tuple[str, Tensor]]) -> Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=1.0, momentum=0.9)


def verify(
    job: Job | None = None,
    *,
    layout: str | Layout,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer | None = None,
    dataset: Dataset | None = None,
    steps: int = 3,
    precision: Precision = "job",
) -> Verdict:
    """Prove that `layout` computes what one device computes; starts its own workers on this machine.

    Args:
        job: what is computed; model, loss, optimizer and data may be given by themselves instead.
        layout: where.
        model: a build function or an instance.
        loss: (outputs, batch) -> (sum, count).
        optimizer: a function of a list of parameters, or an instance over the model instance that has not stepped.
        dataset: map-style.
        steps: how many are compared; at least two, since a stale weight shows in the second.
        precision: `float64` leaves out the second check, in the job's own precision.

    Raises:
        SamestepError: the layout cannot be tried; the text says why and what would work.
        WorkerError: a worker died.
    """
    began = time.perf_counter()
    job = job or Job()
    if steps < 2:
        raise JobError(f"steps={steps}: a stale weight shows in the second step; steps=2 is the least that proves")
    where = Layout.parse(layout) if isinstance(layout, str) else layout
    folder = Path(tempfile.mkdtemp(prefix="samestep-proof-"))
    try:
        proving = _proving(job, steps)
        source, data, example = _given(proving, model, loss, optimizer, dataset)
        subject = Subject(source, data, example, proving, where, folder)
        notes: tuple[str, ...] = ()
        if model is None and (smaller := shrunk(subject)):
            subject, note = smaller
            notes = (note,)
        subject.programs()  # refuses what cannot be
        verdict = _prove(subject, job, precision)
        return dataclasses.replace(verdict, notes=(*notes, *verdict.notes), seconds=time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _proving(job: Job, steps: int) -> Job:
    """Return the job that is compared: its first steps in float64, at a constant learning rate."""
    return job.model_copy(
        update={
            "train": job.train.model_copy(update={"steps": steps}),
            "schedule": ScheduleTable(),
            "numerics": job.numerics.model_copy(update={"precision": "float64"}),
        }
    )


def _given(
    job: Job,
    model: Callable[[], nn.Module] | nn.Module | None,
    loss: Loss | None,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer | None,
    dataset: Dataset | None,
) -> tuple[Source, Dataset, Any]:
    """Take from the job what is not given, and trace the model once, before workers are forked."""
    data = open_dataset(job, "train") if dataset is None else dataset
    example = Batch(0, np.arange(1), data).samples([0])
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    named = model.func if isinstance(model, functools.partial) else model
    name = job.model.source if named is None else getattr(named, "__name__", type(named).__name__)
    source = Source(
        model_source(job) if model is None else model,
        loss_of(job) if loss is None else loss,
        optimizer_of(job) if optimizer is None else optimizer_source(optimizer, names),
        name,
    )
    return dataclasses.replace(source, prepared=prepare(source, job, example)), data, example


# -- a model too large for one device --------------------------------------------------------------

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_COPIES = 8
"""Of the weights, in float64: themselves, gradients, two states, and what is noted of three steps, on disk or mapped."""


def shrunk(subject: Subject) -> tuple[Subject, str] | None:
    """Return the subject with fewer layers, and how many, where the whole model does not fit one device.

    Raises:
        JobError: it does not fit, and its depth cannot be changed or not enough.
    """
    free = _free_bytes(subject.job.run.device)
    blocks = [index for index, layer in enumerate(subject.spec.layers) if layer.is_block]
    of_layers = [_proof_bytes(subject, index) for index in range(len(subject.spec.layers))]
    if sum(of_layers) <= free or not blocks:
        return None
    a_block = max(of_layers[index] for index in blocks)
    rest = sum(of_layers) - sum(of_layers[index] for index in blocks)
    least = max(2, subject.layout.pp * subject.layout.virtual_stages)
    depth = max(least, int((free - rest) // a_block))
    gibibytes = f"{sum(of_layers) / 2**30:.3g} GiB in float64 of {free / 2**30:.3g} free"
    key = _depth_key(subject.job)
    if key is None:
        raise JobError(
            f"a proof on one device needs {gibibytes}, and model.config has no key for the depth "
            f"({', '.join(_DEPTHS)}); a smaller model or train.global_batch works"
        )
    if rest + depth * a_block > free or depth >= len(blocks):
        raise JobError(f"a proof on one device needs {gibibytes}; a smaller train.global_batch works")
    table = subject.job.model
    smaller = table.model_copy(update={"config": {**table.config, key: depth}})
    job = subject.job.model_copy(update={"model": smaller})
    source, data, example = _given(job, None, None, None, None)
    note = f"the whole model needs {gibibytes}: proven with {depth} of {len(blocks)} layers, at full width"
    return dataclasses.replace(subject, source=source, dataset=data, example=example, job=job), note


def _proof_bytes(subject: Subject, index: int) -> int:
    """Bytes that a layer takes in a proof: its weights in copies, what it saves of a whole batch, in float64."""
    weights = sum(param.numel for param in subject.spec.params_of(index))
    ranks = subject.layout.num_summed if subject.layout.zero == 0 else subject.layout.dp_replicate
    replicas = ranks if _on_cpu(subject.job.run.device) else 1  # ranks of a CPU share its memory
    saved = subject.spec.layers[index].saved_elements * subject.job.train.global_batch
    return 8 * (weights * _COPIES * replicas + saved)


def _depth_key(job: Job) -> str | None:
    given = [key for key in _DEPTHS if key in job.model.config]
    if given or not job.model.source.startswith("hf:"):
        return next(iter(given), None)
    config = getattr(model_source(job), "args", (None,))[0]
    return next((key for key in _DEPTHS if hasattr(config, key)), None)


def _on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _free_bytes(device: str) -> int:
    return psutil.virtual_memory().available if _on_cpu(device) else torch.cuda.mem_get_info()[0]


# -- the course of a proof -------------------------------------------------------------------------


def _prove(subject: Subject, job: Job, precision: Precision) -> Verdict:
    """Run one device and the layout, first in float64, then in the job's own precision."""
    layout, steps = subject.layout, subject.job.train.steps
    own = job.numerics.precision
    notes: list[str] = []
    first: str = "float64"
    run = functools.partial(_launch, subject)
    try:
        run(1, one_device, subject)
    except WorkerError as error:
        if own == "float64" or not any(word in str(error) for word in ("Double", "float64", "torch.float64")):
            raise
        notes.append(f"cannot run in float64 ({str(error).splitlines()[0]}); proven in {own} alone")
        first = own
    checks: tuple[Check, ...] = ()
    cause, explanation = None, ""
    if first == "float64":
        run(layout.world_size, in_layout, subject)
        checks, cause, explanation = run(1, judge, subject)
    if cause is None and own != "float64" and (precision == "job" or first != "float64"):
        rounding = dataclasses.replace(subject, job=_in_precision(subject.job, own))
        run(1, measure_rounding, rounding)
        run(layout.world_size, in_layout, rounding)
        more, cause, explanation = run(1, judge_rounding, rounding)
        checks = (*checks, *more)
    return Verdict(
        layout=str(layout),
        job=subject.source.name,
        steps=steps,
        precision=first,
        checks=checks,
        cause=cause,
        explanation=explanation,
        notes=tuple(notes),
    )


def _in_precision(job: Job, precision: str) -> Job:
    return job.model_copy(update={"numerics": job.numerics.model_copy(update={"precision": precision})})


def _launch(subject: Subject, ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    run = subject.job.run
    holder_of(subject.layout)
    return launch.run_workers(
        work,
        args,
        ranks=ranks,
        device=run.device,
        threads=run.threads,
        timeout_s=run.timeout_s,
        ranks_per_node=run.ranks_per_node if ranks == subject.layout.world_size else None,
    )


# -- what workers do -------------------------------------------------------------------------------


def one_device(place: Place, subject: Subject) -> Observation:
    """Note what one device computes, and write it down."""
    run = observation.open_run(subject.steps_by_sgd, Layout(), subject.job, place, subject.example)
    rate = _first_rate(run, subject)
    seen = _noted(run, subject, rate, None)
    torch.save(seen, subject.folder / "one.pt")
    return seen


def in_layout(place: Place, subject: Subject) -> Observation:
    """Note what one rank of the layout computes, write it down, and save a checkpoint with the others."""
    one: Observation = _read(subject.folder / "one.pt")
    run = observation.open_run(subject.steps_by_sgd, subject.layout, subject.job, place, subject.example)
    seen = _noted(run, subject, one.learning_rate, one)
    torch.save(seen, subject.folder / f"rank-{place.rank}.pt")
    if one.updated:
        shutil.rmtree(subject.folder / "checkpoints", ignore_errors=True) if place.rank == 0 else None
        checkpoint.save(run, subject.folder / "checkpoints", keep=1)
    return seen


def _noted(run: Any, subject: Subject, rate: float, one: Observation | None) -> Observation:
    """Take the steps, then feed the job's own optimizer with one device's gradients."""
    start = [piece.value.detach().clone() for piece in run.updater.pieces]
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    run.updater.first_lr = [rate] * len(run.updater.first_lr)
    seen = observation.observe(run, subject.dataset)
    seen.learning_rate = rate
    if subject.job.numerics.precision != "float64":
        return seen
    observation.restart(run, start, buffers)
    run.made.updater = Updater.over(run.made.holder.pieces, subject.source.optimizer, subject.job.numerics)
    given = [comparison.whole_of(comparison.unclipped(one or seen, i)) for i in range(len(seen.steps))]
    seen.updated = list(observation.feed(run, given))
    seen.state = observation.held_state(run)
    return seen


def _first_rate(run: Run, subject: Subject) -> float:
    """Return the learning rate with which the first step moves the weights by a fixed share of their size."""
    start = [piece.value.detach().clone() for piece in run.updater.pieces]
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    totals = run._forward_backward(next(iter(batches(subject.dataset, subject.job))))
    scale = run.made.nominal_count / max(1.0, float(totals[1]))
    norm = math.sqrt(float(run.made.holder.norm_squared())) * scale
    norm = min(norm, subject.job.optimizer.clip_norm or norm)
    size = float(torch.stack([value.double().norm() for value in start]).norm()) if start else 1.0
    observation.restart(run, start, buffers)
    return FIRST_MOVE * size / norm if norm > 0.0 else FIRST_MOVE


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False, mmap=True)


def _observations(subject: Subject) -> tuple[Observation, list[Observation]]:
    ranks = [_read(subject.folder / f"rank-{rank}.pt") for rank in range(subject.layout.world_size)]
    observation.join_slices(ranks)
    return _read(subject.folder / "one.pt"), ranks


Found = tuple[tuple[Check, ...], Cause | None, str]


def judge(place: Place, subject: Subject) -> Found:
    """Compare what was noted, read the checkpoint of the layout, and look for the cause of the first difference."""
    one, ranks = _observations(subject)
    run = observation.open_run(subject.source, Layout(), subject.job, place, subject.example)
    start = [piece.value.detach().clone() for piece in run.updater.pieces]
    limit = comparison.constant(FLOAT64_ALLOWANCE)
    steps = comparison.compare(one, ranks, limit)
    updates = comparison.compare_updates(one, ranks, limit)
    loaded, refusal = _given_back(run, subject)
    given_back = [
        comparison.held_comparison("checkpoint", None, one.updated[-1], [(0, loaded.updated[-1])], limit),
        comparison.held_comparison("checkpoint state", None, one.state, [(0, loaded.state)], limit),
    ]
    everything = [*steps, *updates, *given_back]
    checks = comparison.checks_of(everything)
    first = next((one_kind for one_kind in everything if one_kind.misfits), None)
    if first is None:
        return checks, None, ""
    if first in given_back:
        return checks, *((Cause.CHECKPOINT, refusal) if refusal else causes.explain_checkpoint(one, loaded, first))
    found = causes.explain(_case(run, subject, one, ranks, [*steps, *updates], start))
    assert found is not None
    return checks, *found


def _given_back(run: Run, subject: Subject) -> tuple[Observation, str]:
    """Read the layout's checkpoint on one device; return what came back, and why nothing did."""
    refusal = ""
    try:
        checkpoint.load(run, checkpoint.list_checkpoints(subject.folder / "checkpoints")[-1])
    except CheckpointError as error:
        refusal = str(error)
    loaded = Observation(0, {}, {})
    loaded.updated, loaded.state = [observation.held_weights(run)], observation.held_state(run)
    return loaded, refusal


def _case(
    run: Run,
    subject: Subject,
    one: Observation,
    ranks: Sequence[Observation],
    comparisons: Sequence[Comparison],
    start: Sequence[Tensor],
) -> Case:
    """Put together what a cause is looked for in; further runs on one device are made only when asked for."""
    model = run.model
    spec = subject.spec
    programs = subject.programs()
    layers = spec.layers
    buffers = [buffer.clone() for buffer in model.buffers()]

    def before(step: int) -> None:
        weights = comparison.whole_of(one.steps[step - 1].weights) if step else None
        values = start if weights is None else [weights[piece.name] for piece in run.updater.pieces]
        observation.restart(run, values, buffers)

    def parts(step: int) -> Sequence[Part]:
        before(step)
        return _parts(run, subject, step)

    def uses(name: str, step: int) -> Sequence[Tensor]:
        before(step)
        return _uses(run, subject, (name, *aliases[name]), step)

    aliases = {param.name: param.aliases for param in spec.params}
    return Case(
        reference=one,
        ranks=ranks,
        comparisons=comparisons,
        layers={param.name: param.layer for param in spec.params},
        aliases=aliases,
        dropout=lambda path: dropout.has_dropout(model.get_submodule(path)),
        weighted=lambda path: any(True for _ in model.get_submodule(path).parameters()),
        borders=[layers[chunk.start].modules for p in programs for chunk in p.chunks if chunk.start],
        collectives=functools.partial(_collectives, programs),
        parts=functools.lru_cache(parts),
        uses=uses,
        clips=subject.job.optimizer.clip_norm is not None,
        balances=spec.balanced_experts > 0,
    )


def _collectives(programs: Sequence[Program], path: str) -> str:
    """Say what the program sends for a module."""
    sent = dict.fromkeys(
        f"{op.kind} over {op.axis}" for program in programs for _, op in program.ops() if op.axis and op.owner == path
    )
    return f"; beside it stands {', '.join(sent)}" if sent else ""


def _batch(subject: Subject, step: int) -> Batch:
    return next(iter(batches(subject.dataset, subject.job, first_step=step)))


def _parts(run: Run, subject: Subject, step: int) -> list[Part]:
    """Run each micro-batch of each data rank by itself, on one device."""
    layout, count = subject.layout, subject.programs()[0].step.num_microbatches
    batch = _batch(subject, step)
    run.made.balance = None  # of a part it would be another one
    found = []
    for rank in range(layout.dp):
        for microbatch, indices in enumerate(batch.shares(rank, layout.dp, count)):
            gradients, loss, counted = _gradients(run, Batch(step, indices, subject.dataset))
            found.append(Part(rank, microbatch, gradients, loss, counted))
    return found


def _uses(run: Run, subject: Subject, names: Sequence[str], step: int) -> list[Tensor]:
    """Give every use of a tied weight a weight of its own, and return the gradient of each."""
    model = run.model
    tied = model.get_parameter(names[0])
    single = [nn.Parameter(tied.detach().clone()) for _ in names]
    homes = [name.rpartition(".")[::2] for name in names]
    try:
        for (path, leaf), param in zip(homes, single, strict=True):
            setattr(model.get_submodule(path), leaf, param)
        run._forward_backward(_batch(subject, step))
    finally:
        for path, leaf in homes:
            setattr(model.get_submodule(path), leaf, tied)
    return [torch.zeros_like(param) if param.grad is None else param.grad for param in single]


def _gradients(run: Run, batch: Batch) -> tuple[Mapping[str, Tensor], float, float]:
    """Return the sums of gradients, loss and count over a batch."""
    pieces = run.updater.pieces
    if not len(batch.indices):
        return {piece.name: torch.zeros_like(piece.value) for piece in pieces}, 0.0, 0.0
    totals = run._forward_backward(batch)
    scale = run.made.nominal_count
    return {piece.name: piece.gradient().detach() * scale for piece in pieces}, float(totals[0]), float(totals[1])


# -- the job's own precision -----------------------------------------------------------------------


def measure_rounding(place: Place, subject: Subject) -> None:
    """Take the steps on one device, and again from weights that are off by one rounding; write down how far they part."""
    run = observation.open_run(subject.steps_by_sgd, Layout(), subject.job, place, subject.example)
    start = [piece.value.detach().clone() for piece in run.updater.pieces]
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    rate = _first_rate(run, subject)
    seen = _noted(run, subject, rate, None)
    rounding = torch.finfo(DTYPES[run.program.step.compute_dtype]).eps
    deviations: dict[tuple[str, str, int], float] = {}
    for seed in range(PERTURBED_RUNS):
        generator = torch.Generator().manual_seed(seed)
        signs = [torch.randint(0, 2, v.shape, generator=generator).to(v) * 2 - 1 for v in start]
        observation.restart(run, [v * (1 + rounding * s) for v, s in zip(start, signs, strict=True)], buffers)
        off = observation.observe(run, subject.dataset)
        for one in comparison.compare(seen, [off], comparison.constant(-1.0)):
            for misfit in one.misfits:
                key = (one.what, misfit.name, one.step or 1)
                deviations[key] = max(deviations.get(key, 0.0), misfit.error)
    torch.save(seen, subject.folder / "one.pt")
    torch.save((rounding, deviations), subject.folder / "rounding.pt")


def judge_rounding(place: Place, subject: Subject) -> Found:
    """Hold the layout in the job's own precision against what one rounding does."""
    one, ranks = _observations(subject)
    rounding, deviations = _read(subject.folder / "rounding.pt")
    largest: dict[tuple[str, int], float] = {}
    for (what, _, step), error in deviations.items():
        largest[what, step] = max(largest.get((what, step), 0.0), error)

    def limit(what: str, name: str, step: int) -> float:
        measured = deviations.get((what, name, step), largest.get((what, step), 0.0))
        return float(ALLOWANCE_FACTOR * max(measured, rounding))

    compared = [one_kind for one_kind in comparison.compare(one, ranks, limit) if one_kind.what != "start"]
    checks = tuple(
        dataclasses.replace(check, what=f"{check.what} in {subject.job.numerics.precision}")
        for check in comparison.checks_of(compared)
    )
    skipped = [tuple(step.skipped for step in seen.steps) for seen in ranks]
    if len(set(skipped)) > 1:
        return checks, Cause.SKIP, f"ranks skip different steps: {', '.join(map(str, sorted(set(skipped))))}"
    first = next((one_kind for one_kind in compared if one_kind.misfits), None)
    if first is None:
        return checks, None, ""
    misfit = first.misfits[0]
    return (
        checks,
        Cause.PRECISION,
        f"{first.what} {misfit.name} in step {misfit.step} on rank {misfit.rank}: {misfit.error:.1e}",
    )
