"""The two sides of a proof, as the workers run them: each writes its observation into a folder, and one compares them.

```
one device ── steps with SGD ── the job's optimizer on the gradients found ───────► PRECISION-one
plain torch loop ── the same, without samestep ──────────────────────────────────► PRECISION-one
the layout ── the same, on its ranks ── a checkpoint ─────────────────────────────► PRECISION-rank-N
one device ── reads the checkpoint ── compares everything ── looks for the cause of the first difference
```
If a job has `numerics.replicas`, each of them is one rank with a whole model, and these ranks take the place of one device.
In float64 the limit is fixed. In float32 or bf16 no fixed limit is right, so it is measured: eight times the largest
deviation of eight runs on one device whose first weights are perturbed by one rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource
from samestep.datasets import Batch, Dataset, batches
from samestep.errors import CheckpointError
from samestep.examination.examine import Source
from samestep.independence.roundings import EXACT, NUM_PERTURBED, allowance
from samestep.job import OF_SEVERAL, Job
from samestep.job_tables import NumericsTable
from samestep.layout import Layout
from samestep.models.spec import ModelSpec, is_below
from samestep.program.program import Program
from samestep.proof import causes, comparison, held_tensors, observation, plain_loop, resumes
from samestep.proof.comparison import BatchPart, Comparison, Evidence
from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import Observation, ObservedRun, ObservedStep, Output, PlainSteps
from samestep.proof.verdict import Cause, Check
from samestep.randomness import masks
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.pipeline.recorded_flows import trace_for_layout
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.checkpoints import checkpoint, manifests, writer
from samestep.runtime.optimizers.optimizer_source import check_optimizer, member_of_weight
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.optimizers.whole_optimizer import WholeOptimizer
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.messages import Packer, unpack_plain
from samestep.runtime.run import Run
from samestep.strategies import programs_of

FLOAT64_ALLOWANCE = EXACT
"""The largest error that is allowed in float64."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model, data, job and layout of a proof; forked workers inherit it."""

    source: Source
    """The model, loss and optimizer, with the model traced for the layout."""
    dataset: Dataset
    example: Any
    job: Job
    layout: Layout
    folder: Path
    """The folder that ranks write their observations into."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A traced module has hooks, which cannot be sent: a spawned worker traces the model again.
        source = dataclasses.replace(self.source, prepared=None)
        return _trace_again, (source, self.dataset, self.example, self.job, self.layout, self.folder)

    def observed(self, layout: Layout, job: Job, place: RankInfo) -> ObservedRun:
        """Return a run that takes its steps with SGD, over weights in the groups of the subject's optimizer.

        The learning rate is set once the first gradients are known. Collective over the world: every rank must call it;
        if one does not, the others wait for it.
        """
        observed = ObservedRun(self.source, layout, job, place, self.example)
        observed.run.adopt(lambda assembly: _with_optimizer(assembly, _sgd, job.numerics))
        return observed

    @property
    def base(self) -> Layout:
        """The layout that the proven one is compared with: one device, or one for each contribution or replica of the job."""
        return Layout(dp_replicate=self.job.numerics.replicas)

    @property
    def job_of_base(self) -> Job:
        """The job as the base runs it: no block is compiled."""
        return self.job.model_copy(update={"run": self.job.run.model_copy(update={"compile": "none"})})

    @property
    def spec(self) -> ModelSpec:
        """The shape of the traced model."""
        assert self.source.prepared is not None
        return self.source.prepared.spec

    def note(self, name: str) -> Path:
        """Return the path of a note, named by the precision of this subject's job."""
        return self.folder / f"{self.job.numerics.precision}-{name}"

    def programs(self) -> list[Program]:
        """Return the program of every pipeline stage.

        Raises:
            InputError: the model, the job or its optimizer rules the layout out.
        """
        spec = check_optimizer(self.source.optimizer, self.spec, self.layout)
        return list(programs_of(spec, self.job, self.layout, self.job.run.ranks_per_node))


def _trace_again(source: Source, dataset: Dataset, example: Any, job: Job, layout: Layout, folder: Path) -> Subject:
    """Return a subject in a worker that inherits nothing from its parent."""
    prepared = trace_for_layout(source, layout, job, example)
    return Subject(dataclasses.replace(source, prepared=prepared), dataset, example, job, layout, folder)


def _sgd(named: list[tuple[str, Tensor]]) -> Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=1.0, momentum=0.9)


_CLASSES = (Observation, ObservedStep, PlainSteps, HeldTensor, Output, Check)


def write_note(note: Path, value: Any) -> None:
    """Write a value, replacing an earlier note: NOTE.json, and NOTE.safetensors with its tensors. Both are plain data, and run no code when they are read."""
    packer = Packer("", _CLASSES)
    record = packer.packed(value)
    for path in (text := note.with_suffix(".json"), tensors := note.with_suffix(".safetensors")):
        path.unlink(missing_ok=True)
    writer.write(tensors, {name: tensor.cpu() for name, tensor in packer.tensors.items()})
    text.write_text(json.dumps(record), encoding="utf-8")


def read_note(note: Path) -> Any:
    """Return the value of a note; its tensors are mapped from the file, of which only the used pages are read."""
    record = json.loads(note.with_suffix(".json").read_text(encoding="utf-8"))
    with safe_open(note.with_suffix(".safetensors"), "pt") as file:
        return unpack_plain(record, file.get_tensor, _CLASSES)


# -- the tasks of workers ---------------------------------------------------------------------------


def one_device(place: RankInfo, subject: Subject) -> None:
    """Run one device's side, and the plain torch loop that it is compared with, and write both observations.

    Collective over the ranks of `Subject.base`, see [Note: collective calls].
    """
    observed = subject.observed(subject.base, subject.job_of_base, place)
    seen = _observe_steps(observed, subject, None)
    if place.rank == 0:
        seen.plain = plain_loop.follow(observed.run, subject.source, subject.dataset, seen)
    write_note(subject.note(f"one-{place.rank}"), seen)


def _base_of(subject: Subject) -> Observation:
    """Return the observation of one device, joined from the ranks of the base."""
    return observation.joined([read_note(subject.note(f"one-{rank}")) for rank in range(subject.base.world_size)])


def in_layout(place: RankInfo, subject: Subject) -> None:
    """Run one rank of the layout, write its observation, and save a checkpoint.

    Collective over the world, see [Note: collective calls].
    """
    base = _base_of(subject)
    observed = subject.observed(subject.layout, subject.job, place)
    seen = _observe_steps(observed, subject, base)
    if base.updated:
        if place.rank == 0:
            shutil.rmtree(subject.folder / "checkpoints", ignore_errors=True)
            shutil.rmtree(subject.folder / "resumed", ignore_errors=True)
        checkpoint.save(observed.run, subject.folder / "checkpoints", keep=1)
        gradients = comparison.whole_of(comparison.unclip_gradients(base, -1))
        folders = (subject.folder / "checkpoints", subject.folder / "resumed")
        seen.resumed = list(resumes.compare_resumes(observed.run, gradients, base.steps[-1].unused, folders))
    write_note(subject.note(f"rank-{place.rank}"), seen)


def _observe_steps(observed: ObservedRun, subject: Subject, base: Observation | None) -> Observation:
    """Take the steps with SGD, then the job's optimizer on one device's gradients; return the observation of both."""
    run = observed.run
    start = [piece.master().clone() for piece in run.updater.pieces]
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    observed.learning_rate = base.learning_rate if base else None
    if subject.job.numerics.precision != "float64" and any(layer.dispatches for layer in subject.spec.layers):
        observed.routes = [step.routes for step in base.steps] if base else [{} for _ in range(subject.job.train.steps)]
    seen = observation.observe(observed, subject.dataset)
    if subject.job.numerics.precision != "float64":
        return seen
    observation.restart(run, start, buffers)
    run.adopt(lambda assembly: _with_optimizer(assembly, subject.source.optimizer, subject.job.numerics))
    gradients = [comparison.whole_of(comparison.unclip_gradients(base or seen, i)) for i in range(len(seen.steps))]
    seen.updated = list(observation.feed(run, gradients, [step.unused for step in (base or seen).steps]))
    seen.state = held_tensors.held_state(run)
    return seen


def _observations(subject: Subject) -> tuple[Observation, list[Observation]]:
    ranks = [read_note(subject.note(f"rank-{rank}")) for rank in range(subject.layout.world_size)]
    observation.join_slices(ranks)
    return _base_of(subject), ranks


def compiler_results(subject: Subject) -> tuple[str, ...]:
    """Return the compiler's report on the blocks of the layout's first rank."""
    seen: Observation = read_note(subject.note("rank-0"))
    return seen.compiled


def hindrance(subject: Subject) -> str:
    """Return why one device could not be compared with a plain torch loop; empty where it was."""
    first: Observation = read_note(subject.note("one-0"))
    return first.plain.hindrance if first.plain else ""


Judgement = tuple[tuple[Check, ...], Cause | None, str]
"""The checks, the cause of the first difference or None, and its explanation."""


def judge(place: RankInfo, subject: Subject) -> Judgement:
    """Compare the observations, read the layout's checkpoint on one device, and find the cause of the first difference."""
    base, ranks = _observations(subject)
    run = Run(subject.source, Layout(), subject.job_of_base.of_one_model, place)
    run.prepare(subject.example)
    start = [piece.master().clone() for piece in run.updater.pieces]
    limit = comparison.constant(FLOAT64_ALLOWANCE)
    steps = comparison.compare(base, ranks, limit)
    updates = comparison.compare_updates(base, ranks, limit)
    loaded, refusal = _load_on_one_device(run, subject)
    names, is_apart = {tensor.name for tensor in loaded.updated[-1]}, subject.job.numerics.exchange_every > 1
    saved = [tensor for tensor in base.updated[-1] if tensor.name in names]
    given_back = [comparison.compare_held("checkpoint", None, saved, [(0, loaded.updated[-1])], limit)]
    if not is_apart:  # each replica has states of its own, which resumes compare
        given_back.append(comparison.compare_held("checkpoint state", None, base.state, [(0, loaded.state)], limit))
    resumed = resumes.compare(ranks, FLOAT64_ALLOWANCE)
    plainly = plain_loop.compare(base, limit)
    everything = [*steps, *updates, *given_back, *resumed, *plainly]
    checks = comparison.checks_of(everything)
    first = next((one_kind for one_kind in everything if one_kind.misfits), None)
    if first is None:
        return checks, None, ""
    if first in plainly:
        return checks, *plain_loop.cause(base, first)
    if first in resumed:
        return checks, *resumes.cause(first)
    if is_apart:
        cause = Cause.CHECKPOINT if first in given_back else Cause.REPLICAS
        return checks, cause, refusal or f"{first.what}: {first.misfits[0].name} is off by {first.misfits[0].error:.1e}"
    if first in given_back:
        return checks, *((Cause.CHECKPOINT, refusal) if refusal else causes.find_checkpoint_cause(base, loaded, first))
    diagnosis = causes.find_cause(_evidence(run, subject, base, ranks, [*steps, *updates], start))
    assert diagnosis is not None
    return checks, *diagnosis


def _load_on_one_device(run: Run, subject: Subject) -> tuple[Observation, str]:
    """Read the layout's checkpoint on one device; return the loaded weights and state, and the error's text if it failed."""
    refusal = ""
    try:
        checkpoint.load(run, manifests.list_checkpoints(subject.folder / "checkpoints")[-1], may_change=OF_SEVERAL)
    except CheckpointError as error:
        refusal = str(error)
    loaded = Observation(0, {}, {})
    loaded.updated, loaded.state = [held_tensors.held_weights(run)], held_tensors.held_state(run)
    return loaded, refusal


def _evidence(
    run: Run,
    subject: Subject,
    reference: Observation,
    ranks: Sequence[Observation],
    comparisons: Sequence[Comparison],
    start: Sequence[Tensor],
) -> Evidence:
    """Return the evidence for the search of a cause; further runs on one device take place only on request."""
    model = run.model
    spec = subject.spec
    buffers = [buffer.clone() for buffer in model.buffers()]

    def parts(step: int) -> Sequence[BatchPart]:
        weights = comparison.whole_of(reference.steps[step - 1].weights) if step else None
        values = start if weights is None else [weights[piece.name] for piece in run.updater.pieces]
        observation.restart(run, values, buffers)
        return _parts(run, subject, step)

    def draws(path: str) -> bool:
        numbers = [mask.owner for mask in spec.masks if mask.is_numbers]
        return masks.has_dropout(model.get_submodule(path)) or any(is_below(owner, path) for owner in numbers)

    return Evidence(
        reference=reference,
        ranks=ranks,
        comparisons=comparisons,
        layers={param.name: param.layer for param in spec.params},
        draws=draws,
        collectives=functools.partial(_collectives, subject.programs()),
        parts=functools.lru_cache(parts),
        balances=spec.balanced_experts > 0,
        shares_values=spec.uses_batch_values,
    )


def _collectives(programs: Sequence[Program], path: str) -> str:
    """Return text that lists the collectives that the program sends for a module; empty if there are none."""
    sent = dict.fromkeys(
        f"{op.kind} over {op.axis}" for program in programs for _, op in program.ops() if op.axis and op.owner == path
    )
    return f"; its collectives are {', '.join(sent)}" if sent else ""


def _batch(subject: Subject, step: int) -> Batch:
    return next(iter(batches(subject.dataset, subject.job, first_step=step)))


def _with_optimizer(assembly: Assembly, source: OptimizerSource, numerics: NumericsTable) -> Assembly:
    """Return an assembly with another optimizer over the same weights; its state is empty."""
    weights = assembly.weights
    weights_whole = weights.updater.whole.weights
    updater = Updater.over(
        weights.store.pieces,
        WholeOptimizer(source, weights_whole, member_of_weight(source, weights_whole)),
        numerics,
        codes=weights.store.codes,
        packing=weights.updater.packing,
    )
    return dataclasses.replace(assembly, weights=dataclasses.replace(weights, updater=updater))


def _without_balance(assembly: Assembly) -> Assembly:
    """Return an assembly without the auxiliary loss that balances experts."""
    return dataclasses.replace(assembly, objective=dataclasses.replace(assembly.objective, balance=None))


def _parts(run: Run, subject: Subject, step: int) -> list[BatchPart]:
    """Run each micro-batch of each data rank by itself, on one device."""
    layout, count = subject.layout, subject.programs()[0].step.num_microbatches
    batch = _batch(subject, step)
    run.adopt(_without_balance)  # the balancing loss of a part is not a part of the batch's
    parts = []
    for rank in range(layout.dp):
        for microbatch, indices in enumerate(batch.shares(rank, layout.dp, count)):
            gradients, loss, counted = _gradients(
                run, Batch(step, indices, subject.dataset, seed=subject.job.train.seed)
            )
            parts.append(BatchPart(rank, microbatch, gradients, loss, counted))
    return parts


def _gradients(run: Run, batch: Batch) -> tuple[Mapping[str, Tensor], float, float]:
    """Return the sums of gradients, loss and count over a batch."""
    pieces = run.updater.pieces
    if not len(batch.indices):
        return {piece.name: torch.zeros_like(piece.value) for piece in pieces}, 0.0, 0.0
    totals = run.forward_backward(batch)
    scale = run.assembly.objective.nominal_count
    return {piece.name: piece.gradient().detach() * scale for piece in pieces}, float(totals[0]), float(totals[1])


# -- the precision of the job ------------------------------------------------------------------------


def measure_rounding(place: RankInfo, subject: Subject) -> None:
    """Run one device's side in the job's precision, and the runs whose first weights are perturbed by one rounding.

    Several workers, each a separate world, share the perturbed runs; the first one writes the unperturbed observation. If the base has
    several ranks, they are one world.
    """
    observed = subject.observed(subject.base, subject.job_of_base, place)
    run = observed.run
    start = [piece.master().clone() for piece in run.updater.pieces]
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    seen = _observe_steps(observed, subject, None)
    is_alone = place.world_size == 1
    if place.local_rank == 0 or not is_alone:
        write_note(subject.note(f"one-{place.rank}"), seen)
    rounding = _rounding(subject)
    for seed in _claim_seeds(subject) if is_alone else range(NUM_PERTURBED):
        generator = torch.Generator().manual_seed(seed)
        signs = [torch.randint(0, 2, v.shape, generator=generator).to(v) * 2 - 1 for v in start]
        observation.restart(run, [v * (1 + rounding * s) for v, s in zip(start, signs, strict=True)], buffers)
        compared = comparison.compare(seen, [observation.observe(observed, subject.dataset)], comparison.constant(-1.0))
        deviations: dict[tuple[str, str, int], float] = {}
        for check in compared:
            for misfit in check.misfits:  # of a module, one for each sample
                key = check.what, misfit.name, check.step or 1
                deviations[key] = max(deviations.get(key, 0.0), misfit.error)
        write_note(subject.note(f"off-{seed}-{place.rank}"), deviations)


def _rounding(subject: Subject) -> float:
    """Return the distance between two neighbouring numbers near 1 in the job's compute dtype."""
    return torch.finfo(DTYPES[subject.programs()[0].step.compute_dtype]).eps


def _claim_seeds(subject: Subject) -> Iterator[int]:
    """Yield the seeds of the perturbed runs that no other worker has claimed."""
    for seed in range(NUM_PERTURBED):
        try:
            subject.note(f"begun-{seed}").touch(exist_ok=False)
        except FileExistsError:
            continue
        yield seed


def judge_rounding(place: RankInfo, subject: Subject) -> Judgement:
    """Compare the layout in the job's precision, with limits from the perturbed runs."""
    reference, ranks = _observations(subject)
    deviations: dict[tuple[str, str, int], float] = {}
    largest: dict[tuple[str, int], float] = {}
    for seed, rank in itertools.product(range(NUM_PERTURBED), range(subject.base.world_size)):
        for (what, name, step), error in read_note(subject.note(f"off-{seed}-{rank}")).items():
            deviations[what, name, step] = max(deviations.get((what, name, step), 0.0), error)
            largest[what, step] = max(largest.get((what, step), 0.0), error)
    rounding = _rounding(subject)

    def limit(what: str, name: str, step: int) -> float:
        """Return the largest relative error that is allowed."""
        measured = deviations.get((what, name, step), largest.get((what, step), 0.0))
        return allowance(rounding, measured)

    compared = [check for check in comparison.compare(reference, ranks, limit) if check.what != "start"]
    checks = tuple(
        dataclasses.replace(check, what=f"{check.what} in {subject.job.numerics.precision}")
        for check in comparison.checks_of(compared)
    )
    skipped = [tuple(step.skipped for step in seen.steps) for seen in ranks]
    if len(set(skipped)) > 1:
        return checks, Cause.SKIP, f"ranks skip different steps: {', '.join(map(str, sorted(set(skipped))))}"
    first = next((check for check in compared if check.misfits), None)
    if first is None:
        return checks, None, ""
    misfit = first.misfits[0]
    return (
        checks,
        Cause.PRECISION,
        f"{first.what} {misfit.name} in step {misfit.step} on rank {misfit.rank}: {misfit.error:.1e}",
    )
