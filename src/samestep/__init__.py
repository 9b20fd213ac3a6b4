"""Distributed training for PyTorch: changing the layout never changes the result.

The job says what is computed, the layout says on which ranks:

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
run.save("checkpoints")                 # run.load(samestep.latest("checkpoints")) continues, in any layout
```
Each verb of the command line is a function of the same name: `plan`, `simulate`, `train`, `verify`, `explain`, `measure`,
`launch`, `layouts`, `inspect`, `export`, `sample`, `evaluate`, `doctor`. Names that need torch are imported on first use.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from samestep.errors import (
    CheckpointError,
    DataError,
    DriftError,
    InputError,
    JobError,
    LayoutError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    RecordError,
    RepeatError,
    RunError,
    SamestepError,
    SaveError,
    SpikeError,
    UnprovenError,
    WorkerError,
)
from samestep.job import Job
from samestep.job_files import load
from samestep.layout import Layout

if TYPE_CHECKING:
    from samestep import losses as losses
    from samestep.datasets.batch import Batch
    from samestep.hardware import Hardware
    from samestep.proof.verdict import Verdict
    from samestep.runtime.run import Run
    from samestep.runtime.step_report import StepReport
    from samestep.wings.plan.search import Plan
    from samestep.wings.plan.simulation.simulate import Prediction

    __version__: str
    from samestep.building.model_loss import model_loss
    from samestep.building.over_samples import after_step, batch_cat, batch_mean, batch_sum, whole_batch
    from samestep.building.torch_losses import mean_over
    from samestep.datasets import batches
    from samestep.enumeration.legality import layouts
    from samestep.independence.row_rules import independent
    from samestep.proof.verify import verify
    from samestep.runtime.checkpoints.manifests import latest
    from samestep.runtime.run import parallelize
    from samestep.training.evaluations import EarlyStopping
    from samestep.training.inspection import inspect
    from samestep.training.launch import launch, write_submission
    from samestep.training.tracking import track
    from samestep.training.train import train
    from samestep.training.trained import evaluate, export, sample
    from samestep.wings.cluster.diagnosis.doctor import doctor
    from samestep.wings.cluster.engines.ray_job import ray_worker
    from samestep.wings.explain.explain import explain
    from samestep.wings.plan.calibrate import calibrate
    from samestep.wings.plan.measurement.profile import benchmark_hardware, benchmark_layouts
    from samestep.wings.plan.plan import plan
    from samestep.wings.plan.simulation.simulate import simulate

_LAZY = {
    "Batch": "samestep.datasets.batch",
    "Hardware": "samestep.hardware",
    "EarlyStopping": "samestep.training.evaluations",
    "Plan": "samestep.wings.plan.search",
    "Prediction": "samestep.wings.plan.simulation.simulate",
    "Run": "samestep.runtime.run",
    "StepReport": "samestep.runtime.step_report",
    "Verdict": "samestep.proof.verdict",
    "after_step": "samestep.building.over_samples",
    "batch_cat": "samestep.building.over_samples",
    "batch_mean": "samestep.building.over_samples",
    "batch_sum": "samestep.building.over_samples",
    "batches": "samestep.datasets",
    "calibrate": "samestep.wings.plan.calibrate",
    "doctor": "samestep.wings.cluster.diagnosis.doctor",
    "evaluate": "samestep.training.trained",
    "explain": "samestep.wings.explain.explain",
    "export": "samestep.training.trained",
    "independent": "samestep.independence.row_rules",
    "inspect": "samestep.training.inspection",
    "latest": "samestep.runtime.checkpoints.manifests",
    "launch": "samestep.training.launch",
    "layouts": "samestep.enumeration.legality",
    "benchmark_hardware": "samestep.wings.plan.measurement.profile",
    "benchmark_layouts": "samestep.wings.plan.measurement.profile",
    "model_loss": "samestep.building.model_loss",
    "mean_over": "samestep.building.torch_losses",
    "parallelize": "samestep.runtime.run",
    "plan": "samestep.wings.plan.plan",
    "ray_worker": "samestep.wings.cluster.engines.ray_job",
    "sample": "samestep.training.trained",
    "simulate": "samestep.wings.plan.simulation.simulate",
    "track": "samestep.training.tracking",
    "train": "samestep.training.train",
    "verify": "samestep.proof.verify",
    "write_submission": "samestep.training.launch",
    "whole_batch": "samestep.building.over_samples",
}

__all__ = [
    "Batch",
    "CheckpointError",
    "DataError",
    "DriftError",
    "EarlyStopping",
    "Hardware",
    "InputError",
    "Job",
    "JobError",
    "Layout",
    "LayoutError",
    "ModelError",
    "NonFiniteError",
    "OutOfMemoryError",
    "Plan",
    "Prediction",
    "RecordError",
    "RepeatError",
    "Run",
    "RunError",
    "SamestepError",
    "SaveError",
    "SpikeError",
    "StepReport",
    "UnprovenError",
    "Verdict",
    "WorkerError",
    "after_step",
    "batch_cat",
    "batch_mean",
    "batch_sum",
    "batches",
    "benchmark_hardware",
    "benchmark_layouts",
    "calibrate",
    "doctor",
    "evaluate",
    "explain",
    "export",
    "independent",
    "inspect",
    "latest",
    "launch",
    "layouts",
    "load",
    "mean_over",
    "model_loss",
    "parallelize",
    "plan",
    "ray_worker",
    "sample",
    "simulate",
    "track",
    "train",
    "verify",
    "whole_batch",
    "write_submission",
]


_RENAMED = {
    "HeldOut": "EarlyStopping(sets, metrics=, monitor=, mode=)",
    "measure": "benchmark_hardware() or benchmark_layouts(job, layouts)",
}
"""Names before 0.1.0, and their names now."""


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        return _import_module("importlib.metadata").version("samestep")
    if name == "losses":
        return _import_module("samestep.losses")
    if name in _RENAMED:
        raise AttributeError(f"samestep.{name} has a new name: use samestep.{_RENAMED[name]}")
    if name not in _LAZY:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    module = _LAZY[name]
    if not module.startswith("samestep.wings."):
        return getattr(_import_module(module), name)
    wing, _, file = module.removeprefix("samestep.wings.").partition(".")
    return getattr(_import_module("samestep.wings").required(wing, file), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
