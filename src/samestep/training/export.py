"""The verb `export`: the model of a checkpoint, as a folder for transformers or for torch, written by one process without a run."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from samestep.building.initial_values import Blueprint
from samestep.building.model import blueprint_of, without_adaptation
from samestep.building.pretrained_form import PretrainedForm
from samestep.errors import JobError
from samestep.job import Job
from samestep.job_tables import Precision
from samestep.output import durable_files
from samestep.runtime.checkpoints import pretrained_folder, torch_export
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint
from samestep.training.trained import StoredRun

ExportForm = Literal["transformers", "dcp"]
_DTYPES: dict[Precision, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that was written, and the checkpoint that it holds."""

    folder: Path
    checkpoint: Path
    step: int
    size_bytes: int
    """Bytes of all its files."""

    def to_text(self) -> str:
        """Return one line for the screen."""
        return f"{self.folder}: the weights after step {self.step}, {self.size_bytes:,} bytes, from {self.checkpoint}"


def export(
    run: str | Path | None,
    out: str | Path,
    *,
    dtype: Precision | None = None,
    merge: bool = False,
    ema: bool = False,
    form: ExportForm = "transformers",
    allow_code: bool = False,
) -> Exported:
    """Write the model of a run's newest checkpoint, or of one checkpoint, as a new folder for transformers.

    With `form="dcp"` it is a checkpoint of `torch.distributed.checkpoint`, of any model, with the state dict below `model`.

    Without a run, that is the newest run below `runs`; without a dtype, weights keep that of the master weights. Of a job with
    `model.lora` the adapters are written, for peft; with `merge` the whole model, with the adapters added into its weights. With
    `ema` the moving averages of the weights (`train.ema`) are written in their place. Functions that no run of yours has named
    are run where `allow_code` is set.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it holds the weights of another model, or no averages.
        JobError: the folder exists already.
        ModelError: the model is none of transformers.
    """
    folder = Path(out)
    durable_files.refuse_remote(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise JobError(f"--out {folder} exists: a new folder works")
    stored = StoredRun.of(run, allow_code=allow_code)
    job = stored.job
    plan = blueprint_of(job)
    stored.check(plan.module)
    pretrained = PretrainedForm.of(plan, job) if merge or form == "transformers" else None
    if merge and pretrained is not None:
        pretrained = _merged(pretrained, job)
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        cast = _DTYPES[dtype] if dtype else None
        if form == "dcp":
            _write_for_torch(stored, plan, pretrained, draft, cast, averaged=ema)
        elif pretrained is not None:
            pretrained_folder.write(pretrained, stored.checkpoint, stored.manifest, draft, cast, averaged=ema)
        if folder.is_dir():
            folder.rmdir()
        draft.rename(folder)
    except OSError as error:
        raise JobError(f"--out {folder} cannot be written: {error.strerror} ({error.filename})") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that failed
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, stored.checkpoint, stored.manifest["step"], size_bytes)


def _write_for_torch(
    stored: StoredRun,
    plan: Blueprint,
    merged: PretrainedForm | None,
    out: Path,
    dtype: torch.dtype | None,
    *,
    averaged: bool,
) -> None:
    """Write a checkpoint of torch.distributed.checkpoint, of the model itself or of one into which adapters are merged."""
    master = torch.float64 if stored.job.numerics.precision == "float64" else torch.float32
    with ExitStack() as stack:
        value = pretrained_folder.values(
            plan, OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack, averaged=averaged)
        )
        if merged is not None:
            plan, value = merged.plan, merged.with_merged(value)
        torch_export.write(plan.module, value, out, dtype or master)


def _merged(adapted: PretrainedForm, job: Job) -> PretrainedForm:
    """Return the form of the model without adapters, into whose weights those of `adapted` are added.

    Raises:
        JobError: it has none.
    """
    if job.model.lora is None:
        raise JobError(
            "--merge adds adapters into weights, and the run has none (model.lora): without --merge it works"
        )
    bare = without_adaptation(job)
    return replace(PretrainedForm.of(blueprint_of(bare), bare), adapted=adapted)
