"""Every public name in code as users write it, for `mypy --strict`: `make check` checks the types, and `test_public.py` that no name is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import samestep

ERRORS: tuple[type[samestep.SamestepError], ...] = (
    samestep.CheckpointError,
    samestep.DataError,
    samestep.DriftError,
    samestep.InputError,
    samestep.JobError,
    samestep.LayoutError,
    samestep.ModelError,
    samestep.NonFiniteError,
    samestep.OutOfMemoryError,
    samestep.RecordError,
    samestep.RepeatError,
    samestep.RunError,
    samestep.SamestepError,
    samestep.SaveError,
    samestep.SpikeError,
    samestep.UnprovenError,
    samestep.WorkerError,
)


def accuracy(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs.argmax(-1) == batch["labels"]).sum(), len(outputs)


def mean(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return outputs.mean()


def spread(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return outputs.std()


class Centred(nn.Module):
    centre: Tensor

    def forward(self, x: Tensor) -> Tensor:
        samestep.after_step(self.centre, samestep.batch_mean(x) + samestep.batch_sum(x) + samestep.batch_cat(x).sum(0))
        return x - self.centre


def states() -> None:
    samestep.independent(torch.ops.aten.relu, along=0)


def loop(place: Any, dataset: torch.utils.data.Dataset[Any]) -> float:
    job = samestep.Job(
        model=samestep.ModelTable(),
        data=samestep.DataTable(sequence_length=16),
        train={"global_batch": 8, "steps": 3},
        optimizer=samestep.OptimizerTable(clip_norm=1.0),
        schedule=samestep.ScheduleTable(warmup_steps=1),
        numerics=samestep.NumericsTable(precision="bf16"),
        checkpoint=samestep.CheckpointTable(),
        run=samestep.RunTable(device="cpu"),
    )
    train: samestep.TrainTable = job.train
    layout: samestep.Layout = samestep.Layout(dp=2, zero=3)
    model = nn.Linear(2, 2)
    for loss in (
        nn.CrossEntropyLoss(),
        nn.functional.mse_loss,
        samestep.mean_over("samples", mean),
        samestep.whole_batch(spread),
        samestep.model_loss(),
        "cross_entropy",
    ):
        run: samestep.Run = samestep.parallelize(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), layout=str(layout), job=job
        )
    samestep.track(run, "progress", samestep.EarlyStopping(dataset, metrics=accuracy, monitor="accuracy", mode="max"))
    losses: list[float] = []
    for batch in samestep.batches(dataset, job, first_step=run.steps_taken):
        values: samestep.Batch = batch
        report: samestep.StepReport = run.step(values)
        losses.append(report.loss)
    run.save("folder")
    newest = samestep.latest("folder")
    run.load(newest if newest is not None else "folder")
    weights: Mapping[str, Tensor] = run.state_dict()
    return sum(losses) / train.steps + len(weights) + run.evaluate(dataset, accuracy)["accuracy"]


def commands() -> list[str]:
    job = samestep.load("job.toml", ["train.steps=5"])
    samestep.launch(loop, (None,), ranks=2)
    samestep.train(job, layout="dp=2", out="runs/one")
    verdict: samestep.Verdict = samestep.verify(job, layout="dp=2")
    machine: samestep.Hardware = samestep.benchmark_hardware(ranks=2, device="cpu")
    plan: samestep.Plan = samestep.plan(job, devices=8, hardware=machine)
    best: samestep.Prediction = plan.best[0]
    times = samestep.benchmark_layouts(job, [best.layout, "dp=2"])
    return [
        verdict.to_text(),
        times.to_text(),
        str(samestep.simulate(job, layout="dp=2")),
        str(samestep.layouts(job, devices=4)),
        str(samestep.explain("runs/one", step="2:4")),
        str(samestep.inspect(job)),
        str(samestep.calibrate(["rows.csv"])),
        str(samestep.doctor()),
        str(samestep.export(None, "out")),
        str(samestep.sample(None, prompt="a")),
        str(samestep.evaluate()),
        str(samestep.write_submission(job, "slurm")),
        str(samestep.ray_worker(job, layout="dp=2", out="runs/ray")),
    ]
