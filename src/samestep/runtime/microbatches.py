"""The samples of a step, as one rank reads them: its share of the global batch, micro-batch by micro-batch."""

from __future__ import annotations

import time
from typing import Any

import torch

from samestep.building.named_tensors import cast_batch
from samestep.building.torch_seams import DisableTorchFunction
from samestep.randomness.mode import active_mode
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.host_copies import batch_to_device
from samestep.runtime.recording import marks
from samestep.runtime.step_observer import Indices, StepBatch
from samestep.trees import tensors_in


def read(assembly: Assembly, batch: StepBatch, indices: Indices) -> tuple[Any, float]:
    """Read a micro-batch onto the device; return its samples and the weight of its loss.

    An empty micro-batch runs a sample of another rank with weight 0, so that all ranks issue the same collectives.
    """
    # A stage may ask for the shapes of the next micro-batch inside a forward, whose modes refuse random numbers.
    with DisableTorchFunction(), precision.default_outside():
        samples = batch.samples(indices if len(indices) else batch.shares(0, 1, 1)[0][:1])
    model = assembly.model
    cast = cast_batch(samples, model.master_dtype, keeps_double=model.keeps_double)  # on the host, which need not wait
    return batch_to_device(cast, assembly.parallel.mesh.device), 1.0 if len(indices) else 0.0


class Microbatches:
    """The micro-batches of a rank in one step, each read once, at its first use."""

    def __init__(self, assembly: Assembly, batch: StepBatch) -> None:
        self.batch = batch
        self._assembly = assembly
        step, mesh = assembly.parallel.program.step, assembly.parallel.mesh
        mine = *mesh.data_share, step.num_microbatches
        self.shares = batch.shares(*mine)
        """The global indices of each micro-batch's samples; there may be none."""
        batch.read_ahead(*mine, pin=mesh.device.type == "cuda")
        self.wait_s = 0.0
        """Seconds spent so far until samples were read and on their way to the device."""
        self._held: dict[int, tuple[Any, float]] = {}
        self._shapes: dict[int, tuple[torch.Size, ...]] = {}

    def drawn(self, microbatch: int) -> Indices:
        """Return the global indices of the samples that run, for which dropout draws masks; at least one."""
        share = self.shares[microbatch]
        return share if len(share) else self.batch.shares(0, 1, 1)[0][:1]

    def samples(self, microbatch: int, *, is_last: bool = False) -> tuple[Any, float]:
        """Return the samples of a micro-batch, and the weight of its loss; they are not kept after their last use."""
        if microbatch not in self._held:
            began = time.perf_counter()
            with marks.region("data"):
                self._held[microbatch] = read(self._assembly, self.batch, self.shares[microbatch])
            if (mode := active_mode(self._assembly.model.module)) is not None:
                mode.settle()  # a reading may move the generator
            self.wait_s += time.perf_counter() - began
            self._shapes[microbatch] = tuple([leaf.shape for leaf in tensors_in(self._held[microbatch][0])])
        return self._held.pop(microbatch) if is_last else self._held[microbatch]

    def samples_again(self, microbatch: int) -> Any:
        """Return the samples of a micro-batch, which may be forgotten, without the weight of its loss."""
        return read(self._assembly, self.batch, self.shares[microbatch])[0]

    def shapes_of(self, microbatch: int) -> tuple[torch.Size, ...]:
        """Return the shapes of the tensors in a micro-batch."""
        if microbatch not in self._shapes:
            self.samples(microbatch)
        return self._shapes[microbatch]
