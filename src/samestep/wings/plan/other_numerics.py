"""Seconds that other numerics would save: reported with a plan, never applied, since only the job says what is computed.

Four changes are known to pay. TensorFloat-32 multiplies float32 with 10 bits of mantissa, on the units that are made for
half precision, and leaves memory as it is. Half precision makes matrix products faster and halves activations and working
weights; gradients of one byte (int8 with a scale for each block) are a quarter of what data parallelism sends, and what
their codes lose takes memory. Where a job compresses gradients and the link is fast, its codecs may take longer than what they save: then
to send gradients as they are is what would save. Each is priced in the layout at hand, whose programs are written, played and added up anew: what
a search under the other numerics would find may be better still.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.models.spec import ModelSpec
from samestep.output.text import gib
from samestep.program.exchange_times import Contributions
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
        line = f"{self.change}: {self.step_s:.4g} s a step, {part:.0%} less"
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
    savings = [
        saving
        for saving in (
            _try_tf32(best, model, job, hardware, states_per_param),
            _try_half_precision(best, model, job, hardware, states_per_param),
            _of_bytes(best, model, job, hardware, states_per_param),
            _as_they_are(best, model, job, hardware, states_per_param),
        )
        if saving is not None and saving.step_s < (1 - WORTH) * saving.before_s
    ]
    return sorted(savings, key=lambda saving: saving.step_s)


def _try_tf32(best: Prediction, model: ModelSpec, job: Job, hardware: Hardware, states: int) -> Saving | None:
    """Round the factors of products as they are multiplied."""
    if job.numerics.precision != "float32" or job.numerics.tf32 or TF32 not in hardware.flops_per_s:
        return None
    said = predict(model, _under(job, tf32=True), best.layout, hardware, states)
    return Saving(change="numerics.tf32=true", step_s=said.step_s, before_s=best.step_s, before_bytes=best.peak.total)


def _try_half_precision(best: Prediction, model: ModelSpec, job: Job, hardware: Hardware, states: int) -> Saving | None:
    """Compute in half precision, with masters, gradients and reductions as they are."""
    if job.numerics.precision != "float32":
        return None  # float64 is asked for by who wants every digit
    kinds = (("bf16", "bfloat16"), ("fp16", "float16"))
    precision = next((name for name, dtype in kinds if dtype in hardware.flops_per_s), None)
    if precision is None:
        return None
    said = predict(model, _under(job, precision=precision), best.layout, hardware, states)
    return Saving(
        change=f"numerics.precision={precision}",
        step_s=said.step_s,
        before_s=best.step_s,
        peak_bytes=said.peak.total,
        before_bytes=best.peak.total,
    )


def _under(job: Job, **numerics: object) -> Job:
    return job.model_copy(update={"numerics": job.numerics.model_copy(update=numerics)})


def _as_they_are(best: Prediction, model: ModelSpec, job: Job, hardware: Hardware, states: int) -> Saving | None:
    """Send what a codec of the job compresses as it is."""
    if job.numerics.compression == "none":
        return None
    replicas = 1 if job.numerics.exchange_every == 1 else job.numerics.replicas
    said = predict(model, _under(job, compression="none", replicas=replicas), best.layout, hardware, states)
    return Saving(
        change=f"numerics.compression=none in place of {job.numerics.compression}, which costs more than it saves",
        step_s=said.step_s,
        before_s=best.step_s,
        peak_bytes=said.peak.total,
        before_bytes=best.peak.total,
    )


def _of_bytes(best: Prediction, model: ModelSpec, job: Job, hardware: Hardware, states: int) -> Saving | None:
    """Send gradients between the outermost data ranks as one byte each."""
    step = best.programs[0].step
    ranks = Contributions.of(best.layout, step.zero, 1).ranks
    if job.numerics.compression != "none" or ranks == 1 or job.train.global_batch % ranks:
        return None
    try:
        said = predict(model, _under(job, compression="int8", replicas=ranks), best.layout, hardware, states)
    except LayoutError:
        return None
    return Saving(
        change=f"numerics.compression=int8 with numerics.replicas={ranks}",
        step_s=said.step_s,
        before_s=best.step_s,
        peak_bytes=said.peak.total,
        before_bytes=best.peak.total,
    )
