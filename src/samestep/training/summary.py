"""The result of a run, as `train` returns it and `summary.json` in its folder has it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.output.page.page import in_notebook


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run: its folder, its steps and its losses."""

    folder: Path
    steps: int
    """The number of steps taken in all, including those before a resume."""
    loss: float | None
    """The training loss of the last step, a mean over counted tokens; None where it was not finite."""
    held_out_loss: float | None
    """The mean loss over the held-out samples, of several sets the one that decides (`train.judged_by`); None where nothing is
    held out or the run was stopped."""
    held_out_accuracy: float | None
    """The fraction of the held-out samples whose class is found; None where a sample has no class."""
    stopped: bool
    """Whether the run was asked to stop before its last step."""
    proof: str = ""
    """When and how the layout was proven to give one device's result, or that it is not proven."""
    waived: tuple[str, ...] = ()
    """The refusals that the run met and `run.allow` waived."""
    tried: tuple[str, ...] = ()
    """What a trial has passed and no rule shows, such as an operation of a library."""
    remarks: tuple[str, ...] = ()
    """Tensors that the folder of `model.source` lacks, which were made as in a new model, and those that it has besides."""
    started_from: str = ""
    """The weights of another run or folder from which it started, as `--init-from` says."""
    changes: tuple[str, ...] = ()
    """What resumes have changed of the job and its layout, and after which steps."""
    held_out_losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The mean loss of each held-out set, by name; `held_out` is the part of the data that is held out."""
    goodput: float = 1.0
    """The part of the run's time, over all its starts, in which it took steps that count."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by what they were spent on, as `training/goodput.py` names it."""
    stop_signal: int = 0
    """The signal that stopped it, with whose status the command ends; 0 without one, and under torchrun."""

    def to_record(self) -> dict[str, Any]:
        """Return it as plain data, but for its path."""
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str:
        return in_notebook("samestep.training.summary_page", self)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_record(), indent=1, default=str)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Summary:
        """Return it from what `to_json` wrote."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**{**values, "folder": Path(record["folder"])})
