"""The verb `train`: from a job to a trained model, a loop over steps and the files it leaves.

```
train ── checks everything, builds and traces the model once ── run_workers ──► _work on every rank
                                                                                  for report in steps(run, ...): log
```
What a worker needs is made before the workers are forked, so that `import torch`, the build and the trace are paid
once. Started by torchrun or srun, this process is a worker already and does the same work itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.datasets import Batch, Dataset, batches, open_dataset, open_tokenizer, sample_indices
from samestep.errors import CheckpointError, JobError, LayoutError, ModelError, SamestepError
from samestep.job import Job
from samestep.layout import Layout
from samestep.model import ModelSpec
from samestep.program import Program
from samestep.report import Metrics, Screen
from samestep.runtime import checkpoint, launch
from samestep.runtime.build import loss_of, model_source, optimizer_of
from samestep.runtime.launch import Place
from samestep.runtime.run import Run, Source, StepReport, prepare
from samestep.strategies import program_of


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run ended with."""

    folder: Path
    steps: int
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
        self.held_out = open_dataset(job, "held_out") if job.train.evaluate_samples else None
        optimizer = optimizer_of(job)
        self.example = Batch(0, np.arange(1), self.dataset).samples([0])
        source = Source(model_source(job), loss_of(job), optimizer, job.model.source)
        prepared = prepare(source, job, self.example)
        _check_vocabulary(job, prepared[0].module)
        self.source = Source(source.model, source.loss, optimizer, source.name, prepared)

    def __reduce__(self) -> tuple[Any, ...]:
        return Workload, (self.job,)

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        assert self.source.prepared is not None
        return self.source.prepared[1]


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
        layout: where; without it the job's own, and without that replicas over all ranks.
        ranks: worker processes; without it as many as the layout has.
        steps: end after this step; the learning rate goes on as if the job's own number were meant.
        out: the run folder; without it a new one below `runs`.
        resume: go on from the newest checkpoint in the run folder (without `out`: the newest run).

    Returns:
        What the run ended with; None on ranks other than 0.

    Raises:
        SamestepError: the job, layout or data cannot run; nothing has been started or written.
        WorkerError: a worker died.
    """
    outside = launch.launched_from_outside()
    place = (
        launch.join(job.run.device, timeout_s=job.run.timeout_s, ranks_per_node=job.run.ranks_per_node)
        if outside
        else None
    )
    where, ranks = resolve_layout(job, layout, place.world_size if place else ranks)
    folder = _run_folder(out, resume)
    workload = Workload(job)
    program_of(workload.spec, job, where, place.ranks_per_node if place else None)
    if where.offload and (
        place.device.type == "cpu" if place else job.run.device != "cuda" and not torch.cuda.is_available()
    ):
        warnings.warn(
            "offload moves optimizer state to the host, where a CPU has it already: it saves nothing", stacklevel=2
        )
    arguments = (workload, where, folder, min(steps or job.train.steps, job.train.steps), resume)
    if place is not None:
        try:
            return _work(place, *arguments)
        finally:
            launch.leave()
    if warning := launch.oversubscribed(ranks, job.run.threads):
        warnings.warn(warning, stacklevel=2)
    return launch.run_workers(
        _work,
        arguments,
        ranks=ranks,
        device=job.run.device,
        threads=job.run.threads,
        timeout_s=job.run.timeout_s,
        ranks_per_node=job.run.ranks_per_node,
    )


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


def _work(place: Place, workload: Workload, layout: Layout, folder: Path, until: int, resume: bool) -> Summary | None:
    """Do one rank's part of a run."""
    job = workload.job
    run = Run(workload.source, layout, job, place)
    run.prepare(workload.example)
    if resume:
        run_checkpoint = checkpoint.list_checkpoints(folder / "checkpoints")
        if not run_checkpoint:
            raise CheckpointError(f"{folder} holds no complete checkpoint to go on from; leave --resume out to start")
        checkpoint.load(run, run_checkpoint[-1])
    first = run.steps_taken
    screen = metrics = None
    if place.rank == 0:
        _write_head(folder, job, run.program)
        screen, metrics = Screen(first, until), Metrics(folder, first)
        screen.say(f"{workload.spec.name}: {workload.spec.num_params:,} weights, layout {str(layout)!r}, {folder}")
    _say_sample(run, workload, screen, "before" if first == 0 else "resumed")
    report = _loop(run, workload, folder, until, screen, metrics)
    if run.steps_taken > first:
        checkpoint.save(run, folder / "checkpoints", job.checkpoint.keep)
    stopped = run.steps_taken < until
    held_out = None if stopped else _held_out_loss(run, workload)
    _say_sample(run, workload, screen, "after")
    if screen is None or metrics is None:
        return None
    metrics.close()
    if held_out is not None:
        screen.say(f"held-out loss {held_out:.4f}")
    if stopped:
        screen.say(f"stopped after step {run.steps_taken}; go on with --resume --out {folder}")
    summary = Summary(folder, run.steps_taken, report.loss if report else None, held_out, stopped)
    (folder / "summary.json").write_text(json.dumps({**_plain(summary)}, indent=1) + "\n")
    return summary


def _loop(
    run: Run, workload: Workload, folder: Path, until: int, screen: Screen | None, metrics: Metrics | None
) -> StepReport | None:
    """Take the steps, logging each and saving now and then; return the last report."""
    every = run.job.checkpoint.every
    report = None
    if screen is None or metrics is None:
        for report in steps_of(run, workload.dataset, until):
            if every and report.step % every == 0 and report.step < until:
                checkpoint.save(run, folder / "checkpoints", run.job.checkpoint.keep)
        return report
    with screen.live():
        for report in steps_of(run, workload.dataset, until):
            metrics.write(report)
            screen.show(report)
            if every and report.step % every == 0 and report.step < until:
                checkpoint.save(run, folder / "checkpoints", run.job.checkpoint.keep)
    return report


def _held_out_loss(run: Run, workload: Workload) -> float | None:
    """Return the mean loss over held-out samples, the same ones in every layout. Collective over the world."""
    if workload.held_out is None:
        return None
    count = min(run.job.train.evaluate_samples, len(workload.held_out))
    indices = sample_indices(0, count, len(workload.held_out), run.job.train.seed)
    loss, tokens = run.evaluate(Batch(0, indices, workload.held_out))
    return loss / tokens if tokens else math.nan


def _say_sample(run: Run, workload: Workload, screen: Screen | None, when: str) -> None:
    """Print a text sample of a language model. Collective over the world: every rank runs the same forwards."""
    train = run.job.train
    is_text = isinstance(workload.example, dict) and "input_ids" in workload.example
    if not train.sample_tokens or not is_text or run.job.data.source.startswith("tokens:"):
        return
    text = sample_text(run, train.prompt, train.sample_tokens, train.sample_temperature)
    if screen is not None:
        screen.say(f"--- sample, {when}\n{text}\n---")


def sample_text(run: Run, prompt: str, num_tokens: int, temperature: float) -> str:
    """Continue `prompt` by `num_tokens` tokens. Collective over the world: every rank must call it alike."""
    tokenizer = open_tokenizer(run.job)
    tokens = tokenizer.encode(prompt) or [tokenizer.end_id or 0]
    generator = torch.Generator().manual_seed(run.job.train.seed)
    window = run.job.data.sequence_length
    for _ in range(num_tokens):
        outputs = run.outputs({"input_ids": torch.tensor([tokens[-window:]])})
        logits = getattr(outputs, "logits", outputs)[0, -1].double().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        chances = torch.softmax(logits / temperature, dim=-1).nan_to_num(1.0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokenizer.decode(tokens)


def _check_vocabulary(job: Job, model: torch.nn.Module) -> None:
    """Refuse a tokenizer with more tokens than a transformers model has embeddings."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(words, int) or job.data.source.startswith("tokens:") or ":" in job.data.source.replace("hf:", ""):
        return
    known = open_tokenizer(job).vocab_size
    if known > words:
        raise ModelError(f"the tokenizer has {known} tokens, but model.config.vocab_size = {words}: {known} works")


def _run_folder(out: str | Path | None, resume: bool) -> Path:
    """Return the run folder; a new run never writes into one that holds a run."""
    if out is None and resume:
        runs = sorted(path.parent for path in Path("runs").glob("*/job.toml"))
        if not runs:
            raise CheckpointError("there is no run below runs/ to go on with; --out names another folder")
        return runs[-1]
    # Under torchrun each rank comes here by itself: the launcher's start is the same for all of them, a clock is not.
    folder = Path(out) if out is not None else Path("runs") / os.environ.get("TORCHELASTIC_RUN_ID", _now())
    if folder.exists() and not folder.is_dir():
        raise JobError(f"--out {folder} is a file; a run needs a folder")
    if resume and not (folder / "job.toml").exists():
        raise CheckpointError(f"{folder} holds no run to go on with")
    if not resume and (folder / "job.toml").exists():
        raise JobError(f"{folder} holds a run already: --resume goes on with it, another --out starts anew")
    return folder


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _write_head(folder: Path, job: Job, program: Program) -> None:
    """Write what the run is: the resolved job, and the layout it runs in."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(job.to_toml(), encoding="utf-8")
    (folder / "layout.txt").write_text(f"{program.step.layout}\n", encoding="utf-8")


def _plain(summary: Summary) -> dict[str, Any]:
    return {
        "folder": str(summary.folder),
        "steps": summary.steps,
        "loss": summary.loss,
        "held_out_loss": summary.held_out_loss,
        "stopped": summary.stopped,
    }


def write_spec(job_json: str) -> None:
    """Trace the model of a job given as JSON and print its spec: what `catalog` runs in a subprocess."""
    try:
        spec = Workload(Job.model_validate_json(job_json)).spec
    except SamestepError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    print(spec.to_json())


def step_samples(job: Job, layout: Layout, dataset: Dataset) -> Sequence[np.ndarray[Any, Any]]:
    """Return the sample indices that each rank reads in step 1."""
    batch = next(iter(batches(dataset, job)))
    return [np.concatenate(batch.shares(rank, layout.dp, 1)) for rank in range(layout.dp)]
