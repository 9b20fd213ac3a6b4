"""Distributed training for PyTorch: changing the layout never changes the result.

The job says what is computed, the layout says on which ranks:

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
run.save("checkpoints")                 # run.load(samestep.latest("checkpoints")) continues, in any layout
```
Most verbs of the command line are functions of the same name: `plan`, `simulate`, `train`, `verify`, `explain`, `launch`,
`layouts`, `inspect`, `export`, `sample`, `evaluate`, `doctor`. `measure` is `benchmark_hardware`. Names that need torch are imported on first use.
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
from samestep.job_tables import CheckpointTable, DataTable, ModelTable, NumericsTable, RunTable, TrainTable
from samestep.layout import Layout
from samestep.optimizer_tables import OptimizerTable, ScheduleTable

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
    from samestep.enumeration.valid_layouts import layouts
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
    "samestep.building.model_loss": "model_loss",
    "samestep.building.over_samples": "after_step batch_cat batch_mean batch_sum whole_batch",
    "samestep.building.torch_losses": "mean_over",
    "samestep.datasets": "batches",
    "samestep.datasets.batch": "Batch",
    "samestep.enumeration.valid_layouts": "layouts",
    "samestep.hardware": "Hardware",
    "samestep.independence.row_rules": "independent",
    "samestep.proof.verdict": "Verdict",
    "samestep.proof.verify": "verify",
    "samestep.runtime.checkpoints.manifests": "latest",
    "samestep.runtime.run": "Run parallelize",
    "samestep.runtime.step_report": "StepReport",
    "samestep.training.evaluations": "EarlyStopping",
    "samestep.training.inspection": "inspect",
    "samestep.training.launch": "launch write_submission",
    "samestep.training.tracking": "track",
    "samestep.training.train": "train",
    "samestep.training.trained": "evaluate export sample",
    "samestep.wings.cluster.diagnosis.doctor": "doctor",
    "samestep.wings.cluster.engines.ray_job": "ray_worker",
    "samestep.wings.explain.explain": "explain",
    "samestep.wings.plan.calibrate": "calibrate",
    "samestep.wings.plan.measurement.profile": "benchmark_hardware benchmark_layouts",
    "samestep.wings.plan.plan": "plan",
    "samestep.wings.plan.search": "Plan",
    "samestep.wings.plan.simulation.simulate": "Prediction simulate",
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names.split()}

__all__ = [
    "Batch",
    "CheckpointError",
    "CheckpointTable",
    "DataError",
    "DataTable",
    "DriftError",
    "EarlyStopping",
    "Hardware",
    "InputError",
    "Job",
    "JobError",
    "Layout",
    "LayoutError",
    "ModelError",
    "ModelTable",
    "NonFiniteError",
    "NumericsTable",
    "OptimizerTable",
    "OutOfMemoryError",
    "Plan",
    "Prediction",
    "RecordError",
    "RepeatError",
    "Run",
    "RunError",
    "RunTable",
    "SamestepError",
    "SaveError",
    "ScheduleTable",
    "SpikeError",
    "StepReport",
    "TrainTable",
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
    if name not in _MODULES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    module = _MODULES[name]
    if not module.startswith("samestep.wings."):
        return getattr(_import_module(module), name)
    wing, _, file = module.removeprefix("samestep.wings.").partition(".")
    return getattr(_import_module("samestep.wings").required(wing, file), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
