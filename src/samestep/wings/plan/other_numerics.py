"""Seconds that other numerics would save: reported with a plan, never applied, since only the job says what is computed.

Four changes are known to pay. TensorFloat-32 multiplies float32 with 10 bits of mantissa, on the units that are made for
half precision, and leaves memory as it is. Half precision makes matrix products faster and halves activations and working
weights; gradients of one byte (int8 with a scale for each block) are a quarter of what data parallelism sends, and what
their codes lose takes memory. Where a job compresses gradients and the link is fast, its codecs may take longer than what they save: then
to send gradients as they are is what would save. Each is priced in the layout at hand, whose programs are written, played and added up anew: what
a search under the other numerics would find may be better still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.models.spec import ModelSpec
from samestep.output.text import gib
from samestep.program.contributions import Contributions
from samestep.program.ops import TF32
from samestep.wings.plan.simulation.simulate import Prediction, predict

WORTH = 0.03
"""Part of a step below which a saving is not worth another arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One change of the job's numerics, and what a step would be."""

    change: str
    step_s: float
    before_s: float
    peak_bytes: int | None = None
    """Bytes saved on the rank that holds most; None where they stay."""
    before_bytes: int = 0

    def to_line(self) -> str:
        """Return one line with the change, its seconds a step and its memory in GiB."""
        part = (self.before_s - self.step_s) / self.before_s
        line = f"{self.change}: {self.step_s:.4g} s per step, {part:.0%} less"
        if self.peak_bytes is not None:
            line += f", and {gib(self.peak_bytes)} GiB instead of {gib(self.before_bytes)}"
        return line

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"change": self.change, "step_s": self.step_s, "peak_bytes": self.peak_bytes or self.before_bytes}


def savings(
    best: Prediction, model: ModelSpec, job: Job, hardware: Hardware, states_per_param: int = 2
) -> list[Saving]:
    """List the changes of numerics that would save time worth having in this layout, the greatest first."""
    savings = []
    for change, keys in _changes(best, job, hardware):
        changed = job.model_copy(update={"numerics": job.numerics.model_copy(update=keys)})
        try:
            prediction = predict(model, changed, best.layout, hardware, states_per_param)
        except LayoutError:
            continue
        if prediction.step_s < (1 - WORTH) * best.step_s:
            peak_bytes = None if "tf32" in keys else prediction.peak.total
            times = {"step_s": prediction.step_s, "before_s": best.step_s}
            savings.append(Saving(change=change, **times, peak_bytes=peak_bytes, before_bytes=best.peak.total))
    return sorted(savings, key=lambda saving: saving.step_s)


def _changes(best: Prediction, job: Job, hardware: Hardware) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the changes of a job's numerics that may pay in a layout, as text and as keys."""
    numerics, speeds = job.numerics, hardware.flops_per_s
    if numerics.precision == "float32":  # float64 is asked for by who wants every digit
        if not numerics.tf32 and TF32 in speeds:
            yield "numerics.tf32=true", {"tf32": True}
        if halves := [name for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if dtype in speeds]:
            yield f"numerics.precision={halves[0]}", {"precision": halves[0]}
    if numerics.compression != "none":
        text = f"numerics.compression=none in place of {numerics.compression}, which costs more than it saves"
        yield text, {"compression": "none", "replicas": 1 if numerics.exchange_every == 1 else numerics.replicas}
        return
    # Gradients between the outermost data ranks as one byte each.
    ranks = Contributions.of(best.layout, best.programs[0].step.zero).ranks
    if ranks > 1 and job.train.global_batch % ranks == 0:
        text = f"numerics.compression=int8 with numerics.replicas={ranks}"
        yield text, {"compression": "int8", "replicas": ranks}
