"""The floating-point operations of a step, as TFLOP/s and as a fraction of the device's peak (MFU).

    FLOPs of a step = samples x sum over layers (forward + backward - 3 x what attention masks)

The forward counts 2 for each multiplication and addition of a matrix product; the backward twice that, or once where the
weight is not trained; recompute is not counted (Chowdhery et al. 2022, arXiv:2204.02311). The positions that a causal
attention masks are half of its products, and of packed documents more, which the kernel skips: they are not counted, in the
forward or in the backward.
A count that includes them, as in many published tables, gives a higher MFU for the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samestep import hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.program.ops import COMPUTE_DTYPE, TF32


@dataclass(frozen=True, slots=True)
class Speed:
    """The FLOPs of one step over all devices, and the peak of one device."""

    flops: int
    devices: int
    peak_flops_per_s: float | None
    """None where neither a measured profile nor a data sheet tells it."""

    def tflops_per_device(self, step_s: float) -> float:
        """Return the FLOP/s of one device in units of 10^12, from the seconds of a step."""
        return self.flops / step_s / self.devices / 1e12 if step_s else 0.0

    def mfu(self, step_s: float) -> float | None:
        """Return the fraction of the device's peak that a step reaches (model FLOPs utilisation); None without a peak.

        None too where a step is faster than the peak: a profile that was measured on a busy machine holds less than it.
        """
        share = self.tflops_per_device(step_s) * 1e12 / self.peak_flops_per_s if self.peak_flops_per_s else None
        return None if share is None or share > 1 else share


def flops_of_sample(model: ModelSpec) -> int:
    """Return the FLOPs of one sample's forward and backward."""
    products = [product for layer in model.layers for product in layer.products]
    masked = sum(product.flops - round(product.flops * product.attended_part) for product in products)
    return sum(layer.forward_flops + layer.backward_flops for layer in model.layers) - 3 * masked


def speed_of(model: ModelSpec, job: Job, layout: Layout, device: torch.device) -> Speed:
    """Return the FLOPs of a job's step, and the peak of `device` in the job's precision where it is known."""
    return Speed(flops_of_sample(model) * job.train.global_batch, layout.world_size, _peak(job, device))


def _peak(job: Job, device: torch.device) -> float | None:
    """Return the FLOP/s of a device by its data sheet, or, on a CPU, as `measure` has measured them."""
    is_gpu = device.type == "cuda"
    machine = hardware.of_device(torch.cuda.get_device_name(device)) if is_gpu else hardware.own()
    if machine is None:
        return None
    dtype = COMPUTE_DTYPE[job.numerics.precision]
    rates = machine.flops_per_s
    return rates.get(TF32 if dtype == "float32" and job.numerics.tf32 else dtype, rates.get(dtype))
