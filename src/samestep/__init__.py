"""Distributed training for PyTorch: changing the layout never changes the result.

The job says what is computed, the layout says on which ranks:

```python
run = samestep.parallelize(model, loss, optimizer, layout="dp=2 zero=3", job=job)
for batch in samestep.batches(dataset, job):
    report = run.step(batch)
run.save("checkpoints")                 # run.load(samestep.latest("checkpoints")) continues, in any layout
```
Each verb of the command line is a function of the same name: `plan`, `simulate`, `train`, `verify`, `explain`, `measure`,
`layouts`, `inspect`, `export`, `sample`, `evaluate`, `doctor`. Names that need torch are imported on first use.
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

    __version__: str
    from samestep.building.loss_scope import whole_batch
    from samestep.building.model_loss import model_loss
    from samestep.building.over_samples import after_step, batch_cat, batch_mean, batch_sum
    from samestep.datasets import batches
    from samestep.diagnosis.doctor import doctor
    from samestep.engines.launch import launch
    from samestep.engines.ray_worker import ray_worker
    from samestep.explanation.explain import explain
    from samestep.independence.row_rules import independent
    from samestep.measurement.profile import measure
    from samestep.planning.legality import layouts
    from samestep.planning.plan import plan
    from samestep.proof.verify import verify
    from samestep.runtime.checkpoints.manifests import latest
    from samestep.runtime.run import parallelize
    from samestep.simulation.simulate import simulate
    from samestep.training.evaluations import HeldOut
    from samestep.training.export import export
    from samestep.training.inspection import inspect
    from samestep.training.tracking import track
    from samestep.training.train import train
    from samestep.training.trained import evaluate, sample

_LAZY = {
    "HeldOut": ("samestep.training.evaluations", "HeldOut"),
    "after_step": ("samestep.building.over_samples", "after_step"),
    "batch_cat": ("samestep.building.over_samples", "batch_cat"),
    "batch_mean": ("samestep.building.over_samples", "batch_mean"),
    "batch_sum": ("samestep.building.over_samples", "batch_sum"),
    "batches": ("samestep.datasets", "batches"),
    "calibrate": ("samestep.planning.calibration.calibrate", "calibrate"),
    "doctor": ("samestep.diagnosis.doctor", "doctor"),
    "evaluate": ("samestep.training.trained", "evaluate"),
    "explain": ("samestep.explanation.explain", "explain"),
    "export": ("samestep.training.export", "export"),
    "inspect": ("samestep.training.inspection", "inspect"),
    "independent": ("samestep.independence.row_rules", "independent"),
    "latest": ("samestep.runtime.checkpoints.manifests", "latest"),
    "launch": ("samestep.engines.launch", "launch"),
    "layouts": ("samestep.planning.legality", "layouts"),
    "measure": ("samestep.measurement.profile", "measure"),
    "model_loss": ("samestep.building.model_loss", "model_loss"),
    "parallelize": ("samestep.runtime.run", "parallelize"),
    "plan": ("samestep.planning.plan", "plan"),
    "ray_worker": ("samestep.engines.ray_worker", "ray_worker"),
    "sample": ("samestep.training.trained", "sample"),
    "simulate": ("samestep.simulation.simulate", "simulate"),
    "track": ("samestep.training.tracking", "track"),
    "train": ("samestep.training.train", "train"),
    "verify": ("samestep.proof.verify", "verify"),
    "whole_batch": ("samestep.building.loss_scope", "whole_batch"),
}

__all__ = [
    "CheckpointError",
    "DataError",
    "DriftError",
    "HeldOut",
    "InputError",
    "Job",
    "JobError",
    "Layout",
    "LayoutError",
    "ModelError",
    "NonFiniteError",
    "OutOfMemoryError",
    "RecordError",
    "RepeatError",
    "RunError",
    "SamestepError",
    "SaveError",
    "SpikeError",
    "UnprovenError",
    "WorkerError",
    "after_step",
    "batch_cat",
    "batch_mean",
    "batch_sum",
    "batches",
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
    "measure",
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
]


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        return _import_module("importlib.metadata").version("samestep")
    if name == "losses":
        return _import_module("samestep.losses")
    if name not in _LAZY:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(_import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
