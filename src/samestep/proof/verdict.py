"""The verdict of a proof: its checks in the order of a step, the first that failed, and the likely cause. No torch.

```
start ── data ── forward ── loss ── gradients ── norm ── weights ── optimizer ── buffers ── checkpoint ── resume ── plain torch ── own precision
```
A check compares the largest error of its kind with the allowance. The fault lies where the first check fails; later
failures follow from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from samestep import wings


class Cause(StrEnum):
    """The classes of faults that the shape of an error distinguishes; the value is the text that a user reads."""

    START = "different start"
    DATA = "different data"
    RANDOM = "different random numbers or dropout masks"
    FORWARD = "a module computes something else"
    STALE_WEIGHT = "weights of an earlier step were used"
    COUPLED = "samples of a batch influence each other"
    LOSS = "the loss is summed or divided otherwise"
    MISSING_REDUCTION = "a missing reduction"
    GRADIENT_SUM = "parts of the batch do not count once each in a gradient"
    BACKWARD = "a module's backward computes something else"
    DRIFT = "copies of one weight differ between ranks"
    CLIP_NORM = "the clipping norm does not span every axis, each weight once"
    SKIP = "ranks disagree whether to skip the step"
    UPDATE = "the optimizer computes a different update"
    BUFFER = "a buffer that is not synchronised"
    PLAIN = "one device computes something else than a plain torch loop of the same code"
    CHECKPOINT = "a checkpoint does not restore the saved values"
    RESUME = "a resumed run continues at another step"
    REPLICAS = "replicas that are trained apart compute something else than one device for each"
    PRECISION = "beyond rounding in the job's own precision, though float64 agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kind of comparison: the largest error that was found, and the largest that is allowed."""

    what: str
    """The kind, such as `gradients`."""
    error: float
    allowance: float
    compared: int
    """The number of tensors, outputs or numbers that were compared."""
    where: str = ""
    """The first tensor, output or number beyond its allowance, with step and rank; empty where there is none."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the allowance; an error that is not a number never is."""
        return self.error <= self.allowance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a proof: whether a layout equals one device."""

    verb: ClassVar[str] = "verify"

    layout: str
    job: str
    """The model's name."""
    steps: int
    """The number of steps that were compared."""
    precision: str
    """The precision of the first comparison: float64, or the job's own if the model cannot run in float64."""
    checks: tuple[Check, ...]
    cause: Cause | None = None
    explanation: str = ""
    """One sentence about the cause, with names and numbers; empty if everything passed."""
    notes: tuple[str, ...] = ()
    """Restrictions of this proof, such as a model with fewer layers; one line each."""
    seconds: float = 0.0
    """The duration of the proof."""

    @property
    def proven(self) -> bool:
        """Whether every check passed."""
        return self.cause is None and all(check.passed for check in self.checks)

    @property
    def _proven(self) -> str:
        return "proven" if self.precision == "float64" else f"proven in {self.precision} alone, up to rounding"

    def to_text(self) -> str:
        """Return the report for a terminal, one line for each check."""
        width = max((len(check.what) for check in self.checks), default=0)
        lines = [f'{self.job}, layout "{self.layout}" against one device, {self.steps} steps']
        lines += [f"  note: {note}" for note in self.notes]
        for check in self.checks:
            mark = "ok    " if check.passed else "DIFFER"
            number = f"error {check.error:.1e} of {check.allowance:.1e} allowed"
            where = f"  {check.where}" if check.where and not check.passed else ""
            lines.append(f"  {mark} {check.what.ljust(width)}  {number}, {check.compared} compared{where}")
        if self.proven:
            lines.append(f"{self._proven}: the same result ({self.seconds:.1f} s)")
        else:
            cause = self.cause or Cause.FORWARD
            lines += [f"differs: {cause}", f"  {self.explanation}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("page", self)

    def to_line(self) -> str:
        """Return the report in one line: layout, largest error, result."""
        worst = max((check.error for check in self.checks), default=0.0)
        what = self._proven if self.proven else f"differs: {self.cause}: {self.explanation}"
        return f"{self.layout:<48} {worst:8.1e}  {what}"

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        record = dataclasses.asdict(self)
        record["checks"] = [{**dataclasses.asdict(check), "passed": check.passed} for check in self.checks]
        return {**record, "cause": self.cause.name.lower() if self.cause else None, "proven": self.proven}
