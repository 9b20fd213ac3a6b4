"""The verb `train`: from a job to a trained model, a loop over steps and the files it leaves.

```
train ── check: everything, before anything starts ── run_workers ──► _work on every rank
         builds and traces the model once                                for report in steps_of(run, ...): log, save
```
What a worker needs is made before the workers are forked, so that `import torch`, the build and the trace are paid
once. Started by torchrun or srun, this process is a worker already and does the same work itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep import hardware, memory, ranking, run_folder, search
from samestep.datasets import Batch, Dataset, batches, open_dataset, open_tokenizer, sample_indices
from samestep.errors import (
    CheckpointError,
    JobError,
    LayoutError,
    ModelError,
    OutOfMemoryError,
    SamestepError,
    WorkerError,
)
from samestep.job import Job
from samestep.layout import Layout
from samestep.model import ModelSpec
from samestep.nearest import nearest
from samestep.output_file import write_whole
from samestep.prediction import predict
from samestep.report import Metrics, Screen
from samestep.runtime import checkpoint, joining, launch, shortage
from samestep.runtime.assembly import Source, prepare, store_of, with_slices
from samestep.runtime.build import loss_of, model_source, optimizer_of
from samestep.runtime.families import facts_of
from samestep.runtime.joining import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.runtime.update import check_optimizer
from samestep.strategies import program_of

T = TypeVar("T")
AUTO = "auto"
"""The word for a layout that is searched for."""
_TRIED_LAYOUTS = 40
"""The fastest of a search: some may not suit the optimizer."""
_CLEARLY_LESS = 0.8
"""Of the memory that was foreseen for a layout that ran out of it."""
_TOKENS_LOOKED_AT = 2**24
"""Of a file of tokens, which may be far larger than memory."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run ended with."""

    folder: Path
    steps: int
    """Taken in all, those before a resume included."""
    loss: float | None
    """Of the last step."""
    held_out_loss: float | None
    stopped: bool
    """It was asked to stop before its last step."""


class Workload:
    """A job made ready to run: data opened, model built on the meta device and traced.

    A forked worker inherits it; where workers are spawned it is made again from the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.dataset = open_dataset(job, "train")
        evaluates = job.train.evaluate_samples and job.data.held_out
        self.held_out = open_dataset(job, "held_out") if evaluates else None
        optimizer = optimizer_of(job)
        self.example = Batch(0, np.arange(1), self.dataset).samples([0])
        source = Source(model_source(job), loss_of(job), optimizer, job.model.source)
        prepared = prepare(source, job, self.example)
        _check_fit(job, prepared.module, self.dataset, self.example)
        if ":" not in job.optimizer.name:  # a class of torch.optim says at once whether its settings and shapes fit
            shapes = [(param.name, torch.empty(param.shape, device="meta")) for param in prepared.spec.params]
            optimizer([(name, torch.nn.Parameter(weight)) for name, weight in shapes])
        self.source = Source(source.model, source.loss, optimizer, source.name, prepared)

    def __reduce__(self) -> tuple[Any, ...]:
        return Workload, (self.job,)

    def slice(self, layout: Layout) -> None:
        """Find out how the model's sequences can be sliced, where the layout asks for it."""
        assert self.source.prepared is not None
        self.source = dataclasses.replace(self.source, prepared=with_slices(self.source.prepared, layout, self.example))

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        assert self.source.prepared is not None
        return self.source.prepared.spec


@dataclass(frozen=True, slots=True)
class Checked:
    """A run of which all has been checked that can be before a worker starts."""

    workload: Workload
    layout: Layout
    folder: Path
    until: int
    """The last step."""
    resume_from: Path | None
    """The checkpoint to go on from."""
    why: str = ""
    """Of a layout that was searched for: what was chosen, and why."""

    @property
    def job(self) -> Job:
        """The job with the layout that it runs in, so that the file in the run folder alone repeats the run."""
        words = {
            field.name: getattr(self.layout, field.name)
            for field in dataclasses.fields(self.layout)
            if field.name == "dp_replicate" or getattr(self.layout, field.name) != field.default
        }
        return self.workload.job.model_copy(update={"layout": words})


def train(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> Summary | None:
    """Train `job` in a layout, on this machine's workers or as one rank of torchrun or srun.

    Args:
        job: what to compute.
        layout: where; without it the job's own, and without that replicas over all ranks. `auto` searches for it.
        ranks: worker processes; without it as many as the layout has.
        steps: end after this step; the learning rate goes on as if the job's own number were meant.
        out: the run folder; without it a new one below `runs`.
        resume: go on from the newest checkpoint in `out`; without `out`, in the newest run below `runs`.

    Returns:
        What the run ended with; None on ranks other than 0.

    Raises:
        InputError: the job, layout or data cannot run; nothing has been started or written.
        WorkerError: a worker died.
    """
    run = job.run
    place = None
    if joining.launched_from_outside():
        place = joining.join(
            run.device, timeout_s=run.timeout_s, ranks_per_node=run.ranks_per_node, threads=run.threads
        )
    checked = check(job, layout=layout, ranks=ranks, steps=steps, out=out, resume=resume, place=place)
    if place is None or place.rank == 0:
        if checked.why:
            print(checked.why, flush=True)
        _warn(checked, place)
        run_folder.make(checked.folder)
    if place is not None:
        try:
            return _work(place, checked)
        finally:
            joining.leave()
    store_of(checked.layout)
    try:
        return launch.run_workers(
            _work,
            (checked,),
            ranks=checked.layout.world_size,
            device=run.device,
            threads=run.threads,
            timeout_s=run.timeout_s,
            ranks_per_node=run.ranks_per_node,
        )
    except WorkerError as error:
        if "out of memory?" not in str(error).partition("\n")[0]:
            raise
        cause = str(error)
    # The kernel kills without a word: what was foreseen is all there is to say.
    raise WorkerError(f"{cause}\n{_less_memory(checked, joining.resolve_device(run.device))}")


def check(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    place: RankInfo | None = None,
) -> Checked:
    """Check what `train` is given; nothing is started or written. Collective where there is a `place`.

    Raises:
        InputError: the job, layout or data cannot run; the text says what would.
    """
    ranks = place.world_size if place else ranks
    where = None if layout == AUTO else resolve_layout(job, layout, ranks)[0]
    until = job.train.steps if steps is None else steps
    if until > job.train.steps:
        raise JobError(
            f"--steps {until} is beyond train.steps = {job.train.steps}, where the learning rate ends: "
            f"--set train.steps={until} works"
        )
    folder = _agreed(lambda: run_folder.chosen(out, resume), place)
    resume_from = _resume_from(folder, job, until) if resume else None
    workload = Workload(job)
    why = ""
    if where is None:
        where, why = _agreed(lambda: _searched(workload, ranks or job.run.ranks), place)
    workload.slice(where)
    program_of(workload.spec, job, where, place.ranks_per_node if place else job.run.ranks_per_node)
    check_optimizer(workload.source.optimizer, workload.spec, where)
    return Checked(workload, where, folder, until, resume_from, why)


def _searched(workload: Workload, ranks: int | None) -> tuple[Layout, str]:
    """Search the fastest layout of so many ranks on this machine that the optimizer can follow; say what it was."""
    job, count = workload.job, ranks or launch.default_ranks(workload.job.run.device)
    machine = hardware.own_or("cpu-laptop")
    states = memory.states_per_param(job)
    found = search.plan(workload.spec, job, machine, count, top=_TRIED_LAYOUTS, states_per_param=states)
    reason = found.nearest
    for best in found.best:
        try:
            check_optimizer(workload.source.optimizer, workload.spec, best.layout)
        except LayoutError as error:
            reason = str(error)
            continue
        said = (
            f'layout "{best.layout}", the fastest of {found.considered} on {count} devices of {machine.name}: '
            f"{best.step_s:.3g} s a step foreseen, bound by {ranking.binds(best)}"
        )
        return best.layout, "\n".join([said, *hardware.cautions_here(machine, count)])
    raise LayoutError(f"--layout auto found none for {count} ranks: {reason}")


def resolve_layout(job: Job, layout: Layout | str | None, ranks: int | None) -> tuple[Layout, int]:
    """Return the layout and the number of its ranks; either of them may say what the other leaves open.

    Raises:
        LayoutError: they contradict each other.
    """
    ranks = ranks or job.run.ranks
    given = Layout.parse(layout) if isinstance(layout, str) else layout
    if given is None and job.layout:
        given = Layout.of(job.layout)
    if given is None:
        given = Layout(dp_replicate=ranks or launch.default_ranks(job.run.device))
    if ranks is not None and ranks != given.world_size:
        words = str(given)
        raise LayoutError(
            f"layout {words!r} has {given.world_size} rank{'s' if given.world_size > 1 else ''}, not {ranks}: "
            f"--ranks {given.world_size} works, or a layout whose degrees multiply to {ranks}, as dp={ranks}"
        )
    return given, given.world_size


def steps_of(run: Run, dataset: Dataset, until: int) -> Iterator[StepReport]:
    """Take the steps up to number `until`, from where the run stands; end early when a rank was asked to stop."""
    for batch in batches(dataset, run.job, first_step=run.steps_taken):
        if batch.step >= until:
            return
        report = run.step(batch)
        yield report
        if report.stop:
            return


def _less_memory(checked: Checked, device_type: str) -> str:
    """Say what was foreseen of the memory of a layout that ran out of it, and the nearest layout that needs less."""
    spec, job, layout = checked.workload.spec, checked.job, checked.layout
    machine, states = hardware.own_or("cpu-laptop"), memory.states_per_param(job)
    room = shortage.limit_bytes(torch.device(device_type))
    room //= 1 if device_type == "cuda" else min(layout.world_size, job.run.ranks_per_node or layout.world_size)
    peak = predict(spec, job, layout, machine, states).peak
    parts = ", ".join(f"{name} {memory.readable(size)}" for name, size in peak.parts().items())
    total = memory.readable(peak.total)
    lines = [f"  foreseen   {parts}; {total} in all at {peak.peak_at}, of {memory.readable(room)} a rank"]
    # What was foreseen to fit and did not is no guide: then what needs clearly less is.
    smaller = dataclasses.replace(machine, memory_bytes=max(1, int(min(room, _CLEARLY_LESS * peak.total))))
    near = nearest(spec, job, smaller, layout, layout.world_size, states)
    if near is not None:
        needs, step_s = memory.readable(near.peak.total), f"{near.step_s:.3g} s"
        lines.append(f'  "{near.layout}" needs {needs} as foreseen, and {step_s} a step')
    else:
        lines.append(f"  no layout of {layout.world_size} ranks needs clearly less")
    return "\n".join(lines)


def _work(place: RankInfo, checked: Checked) -> Summary | None:
    """Do one rank's part of a run.

    Raises:
        OutOfMemoryError: memory ran out here.
    """
    run = Run(checked.workload.source, checked.layout, checked.workload.job, place)
    try:
        return _trained(run, place, checked)
    except Exception as error:
        if not shortage.is_shortage(error):
            raise
        text = shortage.told(error, run)
    # Behind the clause, so that what the failed step held is free: the search for another layout needs room too.
    raise OutOfMemoryError(f"{text}\n{_less_memory(checked, place.device.type)}")


def _trained(run: Run, place: RankInfo, checked: Checked) -> Summary | None:
    """Train from where the run stands to its end, with all that is told and written on the way."""
    workload, folder, until = checked.workload, checked.folder, checked.until
    run.prepare(workload.example)
    if checked.resume_from is not None:
        checkpoint.load(run, checked.resume_from)
    first = run.steps_taken
    screen = metrics = None
    if place.rank == 0:
        _write_head(checked)
        screen, metrics = Screen(first, until), Metrics(folder, first)
        words = f"{workload.spec.name}: {workload.spec.num_params:,} weights, layout {str(checked.layout)!r}, {folder}"
        screen.say(words if checked.resume_from is None else f"{words}, goes on after step {first}")
        if first == until:
            screen.say(f"step {first} was the last: there is nothing left to train")
    if first < until:
        _say_sample(run, workload, screen, "before" if first == 0 else "resumed")
    _loop(run, workload, folder, until, screen, metrics)
    stopped = run.steps_taken < until
    held_out = None if stopped else _held_out_loss(run, workload)
    if not stopped:
        _say_sample(run, workload, screen, "after")
    if screen is None or metrics is None:
        return None
    metrics.close()
    if held_out is not None:
        screen.say(f"held-out loss {held_out:.4f}")
    if stopped:
        screen.say(f"stopped after step {run.steps_taken}; go on with --resume --out {folder}")
    summary = Summary(folder, run.steps_taken, metrics.last_loss, held_out, stopped)
    write_whole(folder / "summary.json", json.dumps(dataclasses.asdict(summary), indent=1, default=str) + "\n")
    return summary


def _loop(
    run: Run, workload: Workload, folder: Path, until: int, screen: Screen | None, metrics: Metrics | None
) -> None:
    """Take the steps, logging each; save now and then and after the last."""
    every = run.job.checkpoint.every
    with screen.live() if screen else contextlib.nullcontext():
        for report in steps_of(run, workload.dataset, until):
            if screen is not None and metrics is not None:
                metrics.write(report)
                screen.show(report)
            if report.stop or report.step == until or (every and report.step % every == 0):
                if metrics is not None:
                    metrics.sync()  # first: a checkpoint is never ahead of the log
                checkpoint.save(run, folder / "checkpoints", run.job.checkpoint.keep)


def _held_out_loss(run: Run, workload: Workload) -> float | None:
    """Return the mean loss over held-out samples, the same ones in every layout. Collective over the world."""
    if workload.held_out is None:
        return None
    count = min(run.job.train.evaluate_samples, len(workload.held_out))
    indices = sample_indices(0, count, len(workload.held_out), run.job.train.seed)
    loss, tokens = run.evaluate(Batch(0, indices, workload.held_out))
    return loss / tokens if tokens else math.nan


def _say_sample(run: Run, workload: Workload, screen: Screen | None, when: str) -> None:
    """Print a text sample of a language model. Every rank calls it; where weights are cut, every rank is needed."""
    train = run.job.train
    if not train.sample_tokens or not _is_text(run.job):
        return
    layout = run.layout
    if screen is None and layout.zero < 2 and not layout.borrows_data_ranks and layout.num_summed == layout.world_size:
        return  # rank 0 has the weights whole, and the cores to itself
    text = sample_text(run, train.prompt, train.sample_tokens, train.sample_temperature)
    if screen is not None and text is not None:
        screen.say(f"--- sample, {when}\n{_printable(text)}\n---")


def sample_text(run: Run, prompt: str, num_tokens: int, temperature: float) -> str | None:
    """Continue `prompt` by `num_tokens` tokens. Collective over the world where weights are cut.

    Returns:
        The text, prompt included; None where the model gives no logits [batch, sequence, vocabulary].
    """
    tokenizer = open_tokenizer(run.job)
    tokens = tokenizer.encode(prompt) or [tokenizer.end_id or 0]
    generator = torch.Generator().manual_seed(run.job.train.seed)
    window = run.job.data.sequence_length
    for _ in range(num_tokens):
        outputs = run.outputs({"input_ids": torch.tensor([tokens[-window:]])})
        found = getattr(outputs, "logits", outputs)
        if not isinstance(found, Tensor) or found.dim() != 3:
            return None
        # A model may have more embeddings than the tokenizer has tokens.
        logits = found[0, -1, : tokenizer.vocab_size].double().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        chances = torch.softmax(logits / temperature, dim=-1).nan_to_num(1.0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokenizer.decode(tokens)


def _printable(text: str) -> str:
    """Replace what a terminal would obey: an untrained model writes escape sequences too."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _is_text(job: Job) -> bool:
    """Whether the samples are made by the job's tokenizer."""
    return job.data.source.partition(":")[0] in ("topics", "stdlib", "text", "jsonl", "hf")


def _check_fit(job: Job, model: torch.nn.Module, dataset: Dataset, example: Any) -> None:
    """Refuse tokens and sequences that a transformers model has no embeddings for."""
    facts = facts_of(model)
    words, positions = facts.setting(model, facts.vocabulary_field), facts.setting(model, facts.positions_field)
    if isinstance(words, int):
        known, whose = 0, job.data.source
        if _is_text(job):
            known, whose = open_tokenizer(job).vocab_size, "the tokenizer"
        elif isinstance(tokens := getattr(dataset, "tokens", None), np.ndarray):
            known = int(tokens[:_TOKENS_LOOKED_AT].max()) + 1
        if known > words:
            raise ModelError(
                f"{whose} has tokens up to {known - 1}, but model.config.{facts.vocabulary_field} = {words}; {known} works"
            )
    length = example["input_ids"].shape[-1] if isinstance(example, dict) and "input_ids" in example else 0
    if isinstance(positions, int) and length > positions > 0:
        raise ModelError(
            f"samples of {length} tokens are longer than model.config.{facts.positions_field} = {positions}; "
            f"data.sequence_length = {positions} works, or {facts.positions_field} = {length}"
        )


def _agreed(decide: Callable[[], T], place: RankInfo | None) -> T:
    """Return what rank 0 decides: clocks and profiles differ, and the others may look when it has begun to write."""
    if place is None or place.world_size == 1:
        return decide()
    told: list[Any] = [None]
    if place.rank == 0:
        try:
            told = [decide()]
        except SamestepError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0, device=place.device)
    if isinstance(told[0], SamestepError):
        raise told[0]
    return cast(T, told[0])


def _resume_from(folder: Path, job: Job, until: int) -> Path:
    """Return the newest checkpoint of a run, if the job can go on from it."""
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{folder} holds no checkpoint to go on from: another --out starts anew")
    manifest = checkpoint.read_manifest(newest)
    checkpoint.check_job(manifest, job, newest)
    if manifest["step"] > until:
        raise CheckpointError(
            f"{newest} is after step {until}, where the run would end; at least {manifest['step']} works"
        )
    return newest


def _warn(checked: Checked, place: RankInfo | None) -> None:
    """Say once what will have no effect, or a bad one."""
    run = checked.workload.job.run
    on_cpu = place.device.type == "cpu" if place else run.device == "cpu" or not torch.cuda.device_count()
    if checked.layout.offload and on_cpu:
        warnings.warn(
            "offload moves optimizer state to the host, where a CPU has it already: it saves nothing", stacklevel=3
        )
    if place is None and on_cpu and (text := launch.oversubscribed(checked.layout.world_size, run.threads)):
        warnings.warn(text, stacklevel=3)


def _write_head(checked: Checked) -> None:
    """Write what the run is."""
    write_whole(checked.folder / run_folder.JOB, checked.job.to_toml())
    write_whole(checked.folder / "layout.txt", f"{checked.layout}\n")


def write_spec(job_json: str) -> None:
    """Trace the model of a job given as JSON and print its spec: what `catalog` runs in a subprocess.

    Exits with 2 and prints the error instead where the model cannot be built. Whatever else speaks goes to stderr.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = _traced(Job.model_validate_json(job_json)).to_json()
    except SamestepError as error:
        print(error)
        raise SystemExit(2) from None
    print(answer)


def _traced(job: Job) -> ModelSpec:
    """Return the model's shape; that of a transformers model needs none of the data."""
    if not job.model.source.startswith("hf:"):
        return Workload(job).spec
    tokens = torch.zeros(1, job.data.sequence_length, dtype=torch.int64)
    source = Source(model_source(job), loss_of(job), optimizer_of(job), job.model.source)
    example = {"input_ids": tokens, "labels": tokens}
    return with_slices(prepare(source, job, example), Layout(cp=2), example).spec


def step_samples(job: Job, layout: Layout, dataset: Dataset) -> Sequence[np.ndarray[Any, Any]]:
    """Return the sample indices that each rank of the data axis reads in step 1."""
    batch = next(iter(batches(dataset, job)))
    return [np.concatenate(batch.shares(rank, layout.dp, 1)) for rank in range(layout.dp)]
