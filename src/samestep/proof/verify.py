"""The verb `verify`: prove on a user's job that a layout computes what one device computes.

```
one device ── takes the steps in float64 and in the job's own precision, and eight times perturbed by one rounding
           ── takes them in a plain torch loop too, without samestep (`plain_loop.py`)
the layout ── takes the same steps on its ranks, and saves a checkpoint
one device ── reads the checkpoint, compares everything, looks for the cause of the first difference
```
In float64, with the model's conversions to float32 raised to float64, two orders of the same sums differ by about 1e-16
and a wrong sum by 1e-3 and more: the limit of 1e-9 is far from both. Weights are compared after SGD steps, whose
updates are as exact as the gradients. Adam turns a gradient error of 1e-9 near its epsilon into 0.1 of a step, so the
job's optimizer is proven on equal gradients instead. In the job's precision, a second check, the limit is measured
(`sides.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import calls
from samestep.building.families import DEPTH_FIELDS
from samestep.building.loss import loss_from, loss_of
from samestep.building.model import configuration_of, model_source
from samestep.building.optimizer import optimizer_of
from samestep.building.over_samples import scoped
from samestep.datasets import Dataset, example_of, open_dataset
from samestep.enumeration import valid_layouts
from samestep.errors import InputError, JobError, LayoutError, ModelError, WorkerError
from samestep.examination.examine import Loss, Source, with_new_blueprint
from samestep.job import Job
from samestep.job_tables import RunTable
from samestep.layout import Layout, layout_from
from samestep.optimizer_tables import ScheduleTable
from samestep.output import temporary_folder
from samestep.output.text import readable
from samestep.proof import record, sides
from samestep.proof.sides import Subject
from samestep.proof.verdict import Cause, Check, Verdict
from samestep.runtime.assembly import store_of
from samestep.runtime.axes import compiled_blocks
from samestep.runtime.axes.pipeline.recorded_flows import trace_for_layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.processes import join
from samestep.runtime.processes import workers as launch
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run_batches import check_labels

Precision = Literal["job", "float64"]


@calls.checked
def verify(
    job: Job | None = None,
    *,
    layout: str | Layout | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Loss | str | None = None,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer | None = None,
    dataset: Dataset | None = None,
    steps: int = 3,
    precision: Precision = "job",
    device: str | None = None,
    stages: Sequence[str] | None = None,
) -> Verdict:
    """Prove that `layout` computes the result of one device; the call starts workers on this machine.

    Args:
        job: the computation; by default the default job.
        layout: the layout to prove; by default the job's own.
        model: a function that builds the model, or an instance; by default the job's model.
        loss: as for `parallelize`; by default the loss of the job.
        optimizer: a function of a list of parameters, or an instance over `model` that has not taken a step; by default
            the job's optimizer.
        dataset: a map-style dataset; by default the job's data.
        steps: the number of steps to compare, at least two, since a stale weight shows in the second step.
        precision: `float64` leaves out the second check, in the job's own precision.
        device: cpu, cuda or auto, for the proof; by default the device of the job. A layout is the same on both.
        stages: names of modules at which pipeline stages may begin; by default `job.model.stages`.

    Raises:
        InputError: the layout cannot be tried; the text has the reason and a fix.
        WorkerError: a worker process died.
    """
    began = time.perf_counter()
    job = (job or Job()).with_modules(stages=stages)
    loss = None if loss is None else scoped(loss_from(loss), job)
    job, notes = _on_device(job, device, steps)
    where = _proven_layout(job, layout)
    compiled_blocks.check(job.run)
    inputs = (model, loss, optimizer, dataset)
    folder = temporary_folder.make()
    try:
        subject, from_job = _subject(job, where, inputs, steps, folder)
        subject.programs()  # refuses a layout that the model or the job rules out
        try:
            verdict = _prove(subject, job, precision)
        except WorkerError as error:
            raise WorkerError("layout-could-not-tried", f"layout {str(where)!r} could not be tried: {error}") from error
        notes = (*notes, *from_job, *verdict.notes)
        verdict = dataclasses.replace(verdict, notes=notes, seconds=time.perf_counter() - began)
        if verdict.proven and all(
            value is None for value in inputs
        ):  # otherwise the job does not describe the proven run
            record.keep(record.record_of(job, verdict))
        return verdict
    finally:
        temporary_folder.remove(folder)


def _proven_layout(job: Job, layout: str | Layout | None) -> Layout:
    """Return the layout to prove; None stands for that of the job."""
    if layout is None and not job.layout:
        raise LayoutError(
            "command-options",
            'verify compares a layout with one device, and the job has none. Use --layout "dp=2 tp=2", or --all --devices 4 for all '
            "layouts of 4 devices",
        )
    return layout_from(job.layout if layout is None else layout)


def _on_device(job: Job, device: str | None, steps: int) -> tuple[Job, tuple[str, ...]]:
    """Return the job as it is proven on a device, None for the job's, and a note on that."""
    if steps < 2:
        raise JobError(
            "value-out-of-range",
            f"steps={steps} is too few, since a stale weight shows in the second step. Use steps=2 or more",
        )
    if device is None:
        return job, ()
    moved = job.model_copy(update={"run": job.run.model_copy(update={"device": device})})
    return moved, (f"run on {join.resolve_device(device)}",)


def _subject(
    job: Job, where: Layout, inputs: tuple[Any, Any, Any, Any], steps: int, folder: Path
) -> tuple[Subject, tuple[str, ...]]:
    """Return the run to be proven, in float64 where its model can be, and smaller where it is the job's; and notes on both."""
    notes: tuple[str, ...] = ()
    proving = _proving(job, steps)
    try:
        source, data, example = _prepare_inputs(proving, where, *inputs)
    except ModelError as error:
        if job.numerics.precision == "float64":
            raise
        proving = _proving(job, steps, job.numerics.precision)
        source, data, example = _prepare_inputs(proving, where, *inputs)  # raises if that is no reason
        notes = (_without_float64(error, job),)
    subject = Subject(source, data, example, proving, where, folder)
    if inputs[0] is None and (smaller := shrunk(subject)):
        subject, note = smaller
        notes = (*notes, note)
    return subject, notes


def verify_all(
    job: Job, devices: int, *, steps: int = 3, precision: Precision = "job", device: str | None = None
) -> Iterator[Verdict]:
    """Prove every legal split of a number of devices, and each switch separately; yield each verdict once it is known.

    Raises:
        InputError: the job cannot run.
        WorkerError: a worker process died; the text names the layout.
    """
    for row in valid_layouts.layouts(job, devices, switches=True):
        if not row.reason:
            yield verify(job, layout=row.layout, steps=steps, precision=precision, device=device)


_MOST_APART = 2
"""Steps after which independently trained replicas exchange in a proof, at the latest."""


def _proving(job: Job, steps: int, precision: str = "float64") -> Job:
    """Return the job to compare: the first steps of the given one, in float64, at a constant learning rate.

    Independently trained replicas exchange at least after every second step, so that some steps follow an exchange.
    """
    return job.model_copy(
        update={
            "train": job.train.model_copy(update={"steps": steps}),
            "schedule": ScheduleTable(),
            "numerics": job.numerics.model_copy(
                update={
                    "precision": precision,
                    "exchange_every": min(job.numerics.exchange_every, _MOST_APART),
                    "on_spike": "continue",
                }
            ),
        }
    )


def _without_float64(error: Exception, job: Job) -> str:
    reason = str(error).splitlines()[0]
    return f"the model cannot run in float64 ({reason}): it is proven in {job.numerics.precision} alone, up to rounding"


def _prepare_inputs(
    job: Job,
    layout: Layout,
    model: Callable[[], nn.Module] | nn.Module | None,
    loss: Loss | None,
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer | None,
    dataset: Dataset | None,
) -> tuple[Source, Dataset, Any]:
    """Return model source, dataset and one example, from the job where not given; the model is traced for the layout."""
    data = open_dataset(job, "train") if dataset is None else dataset
    example = example_of(data)
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    named = model.func if isinstance(model, functools.partial) else model
    name = job.model.source if named is None else getattr(named, "__name__", type(named).__name__)
    source = Source(
        model_source(job) if model is None else model,
        loss_of(job) if loss is None else loss,
        optimizer_of(job) if optimizer is None else optimizer_source(optimizer, names),
        name,
    )
    traced = trace_for_layout(source, layout, job, example)
    check_labels(traced.module, source.loss, job, data)
    return dataclasses.replace(source, prepared=traced), data, example


# -- a model too large for one device --------------------------------------------------------------

_COPIES = 11
"""The float64 copies of all weights that a proof holds: weights, gradients, two states, the records of the steps, and the
weights, gradients and momentum of the plain torch loop."""


def shrunk(subject: Subject) -> tuple[Subject, str] | None:
    """Return the subject with fewer layers and a note that says so; None where the whole model fits one device.

    Raises:
        JobError: the model does not fit, and its depth cannot be reduced far enough.
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
    gibibytes = f"{readable(sum(of_layers))} in float64 of {readable(free)} free"
    key = _depth_key(subject.job)
    if key is None:
        raise JobError(
            "proof-too-large",
            f"a proof on one device needs {gibibytes}, and model.config has no key for the number of layers "
            f"({', '.join(DEPTH_FIELDS)}). Use a smaller model or a smaller train.global_batch",
        )
    if rest + depth * a_block > free or depth >= len(blocks):
        raise JobError("proof-too-large", f"a proof on one device needs {gibibytes}. Use a smaller train.global_batch")
    table = subject.job.model
    smaller = table.model_copy(update={"config": {**table.config, key: depth}})
    job = subject.job.model_copy(update={"model": smaller})
    source, data, example = _prepare_inputs(job, subject.layout, None, None, None, None)
    note = f"the whole model needs {gibibytes}: proven with {depth} of {len(blocks)} layers, at full width"
    return dataclasses.replace(subject, source=source, dataset=data, example=example, job=job), note


def _proof_bytes(subject: Subject, index: int) -> int:
    """Return the float64 bytes of a layer in a proof: all copies of its weights, and its activations of a whole
    batch."""
    weights = sum(param.numel for param in subject.spec.params_of(index))
    ranks = subject.layout.dp_cp_size if subject.layout.zero == 0 else subject.layout.dp_replicate
    # Ranks on a CPU share its memory.
    whole = max(ranks, subject.base.world_size, _workers(subject.job.run)) if _on_cpu(subject.job.run.device) else 1
    saved = subject.spec.layers[index].saved_elements * subject.job.train.global_batch
    return 8 * (weights * _COPIES * whole + saved)


def _depth_key(job: Job) -> str | None:
    keys = [key for key in DEPTH_FIELDS if key in job.model.config]
    if keys or not job.model.source.startswith("hf:"):
        return next(iter(keys), None)
    config = configuration_of(job)
    return next((key for key in DEPTH_FIELDS if hasattr(config, key)), None)


def _on_cpu(device: str) -> bool:
    return join.resolve_device(device) == "cpu"


def _free_bytes(device: str) -> int:
    return psutil.virtual_memory().available if _on_cpu(device) else torch.cuda.mem_get_info()[0]


# -- the course of a proof -------------------------------------------------------------------------


def _prove(subject: Subject, job: Job, precision: Precision) -> Verdict:
    """Run one device and the layout, in float64 and in the job's precision, and return the verdict."""
    layout, precision_of_job = subject.layout, job.numerics.precision
    notes: list[str] = []
    exact = subject if subject.job.numerics.precision == "float64" else None
    rounded = _in_precision(subject, precision_of_job) if precision_of_job != "float64" else None
    if exact is None:
        precision = "job"
    try:
        _on_one_device(exact, rounded if precision == "job" else None)
    except (WorkerError, InputError) as error:
        if exact is None or rounded is None:
            raise
        exact, precision = None, "job"
        _on_one_device(None, rounded)  # which raises in its turn where float64 is not the reason
        notes.append(_without_float64(error, job))
    subjects = [judged for judged in (exact, rounded if precision == "job" else None) if judged]
    _launch(subject, layout.world_size, _in_layout, subjects)
    checks, cause, explanation = _judge_all(subjects)
    if exact and (why := sides.hindrance(exact)):
        notes.append(f"not held against a plain torch loop, which fails: {why}")
    notes += sides.compiler_results(subjects[0])
    if (ranks := subject.base.world_size) > 1:
        notes.append(
            f"numerics.replicas = {ranks}: compared with {ranks} devices, each with a whole model, in place of one"
        )
    if (every := job.numerics.exchange_every) > _MOST_APART:
        notes.append(
            f"proven with numerics.exchange_every = {_MOST_APART}, not {every}, so that steps after an exchange are compared"
        )
    return Verdict(
        layout=str(layout),
        job=subject.source.name,
        steps=subject.job.train.steps,
        precision="float64" if exact else precision_of_job,
        checks=checks,
        cause=cause,
        explanation=explanation,
        notes=tuple(notes),
    )


def _in_precision(subject: Subject, precision: str) -> Subject:
    """Return the same subject in the job's precision, with a separate copy of the traced model."""
    numerics = subject.job.numerics.model_copy(update={"precision": precision})
    job = subject.job.model_copy(update={"numerics": numerics})
    source = dataclasses.replace(subject.source, prepared=with_new_blueprint(subject.source, job))
    return dataclasses.replace(subject, source=source, job=job)


def _on_one_device(exact: Subject | None, rounded: Subject | None) -> None:
    """Run one device's side in several workers, each a world of one rank; they share the perturbed runs. A base of several ranks is one
    world."""
    subject = exact or rounded
    assert subject is not None
    for left in subject.folder.iterdir():
        left.unlink()
    if (ranks := subject.base.world_size) > 1:
        _launch(subject, ranks, _alone, exact, rounded)
        return
    workers = _workers(subject.job.run) if rounded else 1
    _launch(subject, workers, _alone, exact, rounded, apart=True)


def _workers(run: RunTable) -> int:
    """Return the number of workers for which this machine has devices, at most two: starting more takes longer than
    it saves."""
    devices = (os.cpu_count() or 1) // run.threads if _on_cpu(run.device) else torch.cuda.device_count()
    return min(2, max(1, devices))


def _alone(place: RankInfo, exact: Subject | None, rounded: Subject | None) -> None:
    if exact and (place.local_rank == 0 or place.world_size > 1):
        sides.one_device(place, exact)
    if rounded:
        sides.measure_rounding(place, rounded)


def _in_layout(place: RankInfo, subjects: Sequence[Subject]) -> None:
    for subject in subjects:
        sides.in_layout(place, subject)


def _judge_all(subjects: Sequence[Subject]) -> sides.Judgement:
    """Compare in every precision, in parallel; return the checks up to the first precision that differs, and its cause."""
    workers = min(len(subjects), _workers(subjects[0].job.run))
    _launch(subjects[0], workers, _judge, subjects, workers, apart=True)
    checks: tuple[Check, ...] = ()
    for subject in subjects:
        judged, cause, explanation = sides.read_note(subject.note("judged"))
        checks = (*checks, *judged)
        if cause:
            return checks, Cause(cause), explanation
    return checks, None, ""


def _judge(place: RankInfo, subjects: Sequence[Subject], workers: int) -> None:
    for subject in subjects[place.local_rank :: workers]:
        in_float64 = subject.job.numerics.precision == "float64"
        judge = sides.judge if in_float64 else sides.judge_rounding
        sides.write_note(subject.note("judged"), judge(place, subject))


def _launch(subject: Subject, ranks: int, work: Callable[..., Any], *args: Any, apart: bool = False) -> Any:
    run = subject.job.run
    store_of(subject.layout)
    return launch.run_workers(
        work,
        args,
        ranks=ranks,
        device=run.device,
        threads=run.threads,
        timeout_s=run.timeout_s,
        ranks_per_node=run.ranks_per_node if ranks == subject.layout.world_size and not apart else None,
        isolated=apart,
    )
