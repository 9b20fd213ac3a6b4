"""The verb `export`: the model of a checkpoint, as a folder for transformers, peft or torch, written by one process without a run."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from samestep import calls
from samestep.building.initial_values import Blueprint
from samestep.building.merging import Merged
from samestep.building.model import blueprint_of
from samestep.building.pretrained_form import PretrainedForm, is_of_transformers
from samestep.errors import JobError
from samestep.job_tables import Precision
from samestep.output import durable_files
from samestep.runtime.checkpoints import pretrained_folder, state_file, torch_checkpoint
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint
from samestep.training.trained import StoredRun

ExportForm = Literal["transformers", "safetensors", "dcp"]
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
    """The bytes of all its files."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.to_text())

    def to_text(self) -> str:
        """Return one line for the screen."""
        return f"{self.folder}: the weights after step {self.step}, {self.size_bytes:,} bytes, from {self.checkpoint}"


@calls.checked
def export(
    run: str | Path | None,
    out: str | Path,
    *,
    dtype: Precision | None = None,
    merge: bool = False,
    ema: bool = False,
    form: ExportForm | None = None,
    allow_code: bool = False,
) -> Exported:
    """Write the model of a run's newest checkpoint, or of one checkpoint, as a new folder.

    A model of transformers is written for `from_pretrained`, and adapters (`model.lora`) for peft. Of a module of
    your own the plain state dict is written, in one file of safetensors; `form="safetensors"` writes that of any
    model. With `form="dcp"` it is a checkpoint of `torch.distributed.checkpoint`, of any model, with the state dict
    below `model`.

    Without a run, that is the newest run below `runs`; without a dtype, weights keep that of the master weights. With `merge` the
    whole model of a job with adapters is written, with the adapters added into its weights. With `ema` the moving averages of the
    weights (`train.ema`) are written in their place. Functions that no run of yours has named are run where `allow_code` is set.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it holds the weights of another model, or no averages.
        JobError: the folder exists already, or there are no adapters to merge, or none that the model without them can hold.
        ModelError: the model is none of transformers, and `form` says so; or its state dict is no file of safetensors.
    """
    folder = Path(out)
    durable_files.refuse_remote(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise JobError(f"--out {folder} exists: a new folder works")
    stored = StoredRun.of(run, allow_code=allow_code)
    plan = blueprint_of(stored.job)
    stored.check(plan.module)
    merged = Merged.of(plan, stored.job) if merge else None
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        _write(stored, plan, merged, draft, _DTYPES[dtype] if dtype else None, form, averaged=ema)
        if folder.is_dir():
            folder.rmdir()
        draft.rename(folder)
    except OSError as error:
        raise JobError(f"--out {folder} cannot be written: {error.strerror} ({error.filename})") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that failed
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, stored.checkpoint, stored.manifest["step"], size_bytes)


def _write(
    stored: StoredRun,
    plan: Blueprint,
    merged: Merged | None,
    out: Path,
    dtype: torch.dtype | None,
    form: ExportForm | None,
    *,
    averaged: bool,
) -> None:
    """Write the model of a checkpoint, or the one into whose weights its adapters are added, in one of the forms."""
    written, job = (merged.plan, merged.job) if merged else (plan, stored.job)
    if form == "transformers" or (form is None and (job.model.lora is not None or is_of_transformers(written))):
        pretrained = PretrainedForm.of(written, job, merged)
        pretrained_folder.write(pretrained, stored.checkpoint, stored.manifest, out, dtype, averaged=averaged)
        return
    master = torch.float64 if job.numerics.precision == "float64" else torch.float32
    with ExitStack() as stack:
        opened = OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack, averaged=averaged)
        value = pretrained_folder.values(plan, opened)
        value = merged.values(value) if merged else value
        if form == "dcp":
            torch_checkpoint.write(written.module, value, out, dtype or master)
        else:
            state_file.write(written.module, value, out, dtype)
