"""What a proof found: checks in the order in which a step runs, the first that failed, and its likely cause. No torch.

```
start ── data ── forward ── loss ── gradients ── norm ── weights ── optimizer ── buffers ── checkpoint ── own precision
```
A check holds the largest error of its kind against the allowance; what fails first is where the fault lies, and what
fails after it follows from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Classes of faults, as the shape of an error tells them apart."""

    START = "different start"
    ROWS_SWAPPED = "rows or heads of a weight in the wrong place"
    DATA = "different data"
    DROPOUT = "different dropout masks"
    POSITIONS = "wrong positions or position-dependent buffers"
    BORDER = "wrong activations across a pipeline boundary"
    FORWARD = "a module computes something else"
    STALE_WEIGHT = "weights of an earlier step were used"
    MEAN_OF_MEANS = "mean of means: parts with different counts weigh the same"
    LOSS_SCALE = "the loss is scaled"
    AUXILIARY_LOSS = "the loss that balances experts depends on the layout"
    LAST_MICROBATCH = "not every micro-batch counts"
    MISSING_REDUCTION = "a missing reduction"
    WRONG_GROUP = "a reduction over the wrong group"
    DOUBLE_REDUCTION = "reduced, or counted, more than once"
    GRADIENT_SCALE = "gradients divided by the wrong number"
    TIED = "a tied weight's gradients are not summed exactly once"
    BACKWARD = "a module's backward computes something else"
    MISSING_GRADIENT = "a missing gradient"
    DRIFT = "copies of one weight differ between ranks"
    CLIP_NORM = "the clipping norm does not span every axis, each weight once"
    SKIP = "ranks disagree whether to skip the step"
    UPDATE = "the optimizer makes another update"
    STATE_SWAPPED = "optimizer state in the wrong place"
    BUFFER = "a buffer that is not synchronised"
    CHECKPOINT = "a checkpoint gives back something else"
    PRECISION = "beyond rounding in the job's own precision, though float64 agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kind of comparison: the largest error found, and what is allowed."""

    what: str
    error: float
    allowance: float
    compared: int
    """Numbers or tensors that were compared."""
    where: str = ""
    """What has the largest error, and on which ranks."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the allowance; what is not a number is not."""
        return self.error <= self.allowance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a layout computes what one device computes."""

    layout: str
    job: str
    steps: int
    precision: str
    """Of the first proof: float64, or float32 where the model cannot run in float64."""
    checks: tuple[Check, ...]
    cause: Cause | None = None
    explanation: str = ""
    """The likely cause in a sentence, with names and numbers."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def proven(self) -> bool:
        """Whether every check passed."""
        return self.cause is None and all(check.passed for check in self.checks)

    @property
    def first_failure(self) -> Check | None:
        """The check that failed first in the order of a step."""
        return next((check for check in self.checks if not check.passed), None)

    def to_text(self) -> str:
        """Write the report for a terminal."""
        width = max((len(check.what) for check in self.checks), default=0)
        lines = [f'{self.job}, layout "{self.layout}" against one device, {self.steps} steps']
        lines += [f"  note: {note}" for note in self.notes]
        for check in self.checks:
            mark = "ok    " if check.passed else "DIFFER"
            number = f"error {check.error:.1e} of {check.allowance:.1e} allowed"
            where = f"  {check.where}" if check.where and not check.passed else ""
            lines.append(f"  {mark} {check.what.ljust(width)}  {number}, {check.compared} compared{where}")
        if self.proven:
            lines.append(f"proven: the same result ({self.seconds:.1f} s)")
        else:
            cause = self.cause or Cause.FORWARD
            lines += [f"differs: {cause}", f"  {self.explanation}"]
        return "\n".join(lines)

    def to_line(self) -> str:
        """Write the report in one line, for a table of many."""
        worst = max((check.error for check in self.checks), default=0.0)
        what = "proven" if self.proven else f"differs: {self.cause}: {self.explanation}"
        return f"{self.layout:<48} {worst:8.1e}  {what}"

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        record = dataclasses.asdict(self)
        record["checks"] = [{**dataclasses.asdict(check), "passed": check.passed} for check in self.checks]
        return {**record, "cause": self.cause.name.lower() if self.cause else None, "proven": self.proven}
