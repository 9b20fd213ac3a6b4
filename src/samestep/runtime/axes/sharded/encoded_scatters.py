"""Gradients of units that all data ranks shard and scatter encoded, under zero=2 and zero=3: what takes the place of a reduce_scatter.

FSDP2 lays a unit's whole gradient out by rank and hands it over behind the unit's backward; each rank keeps what codes lose of
its whole contribution, and of the sum of its own rows.

```
unit      [ rank 0's rows of each weight | rank 1's rows | ... ]  ─ encode ─► all_to_all ─► decode, sum, encode, decode ─► own rows
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from samestep.models.param_spec import ParamSpec
from samestep.program.codecs import CodedPart, coded_bytes
from samestep.program.program import Program
from samestep.program.units import Unit, coded_parts, padded_rows
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.codecs.exchange import CodedExchange
from samestep.runtime.codecs.rests import GivenBack, of_weights
from samestep.runtime.processes.mesh import Mesh


class EncodedScatters:
    """The scatters of all units of a rank, through all steps of a run."""

    def __init__(self, program: Program, mesh: Mesh, laid_out: Sequence[tuple[Unit, Sequence[str]]]) -> None:
        """Make the scatter of each unit, whose weights FSDP2 lays out in the order of the names beside it."""
        self.of_unit: dict[str, EncodedScatter] = {}
        step, made = program.step, program.step.contributions
        if made is None or not step.scatters_codes:
            return
        trained = {param.name: param for param in step.model.params if param.trainable}
        units = [unit for unit, _ in laid_out if unit.padded_grad_numel]
        sizes = [coded_bytes(unit.codec, [*coded_parts(step, made, unit)]) for unit in units]
        largest = max((made.code_bytes(size, gathers=False) for size in sizes), default=0)
        scratch = torch.zeros(largest, dtype=torch.uint8, device=mesh.device)
        for unit, names in laid_out:
            params = [trained[name] for name in names if name in trained]
            if params:
                self.of_unit[unit.name] = EncodedScatter(unit, params, program, mesh, scratch)

    def begin_step(self) -> None:
        """Forget the contributions of the previous step."""
        for scatter in self.of_unit.values():
            scatter.exchange.begin_step()

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of each weight."""
        for scatter in self.of_unit.values():
            yield from scatter.given_back()

    def scale_given_back(self, factor: float) -> None:
        """Multiply what codes have lost."""
        for scatter in self.of_unit.values():
            scatter.exchange.scale(factor)


class EncodedScatter:
    """The scatter of one unit's gradients, through all steps of a run."""

    def __init__(self, unit: Unit, params: Sequence[ParamSpec], program: Program, mesh: Mesh, scratch: Tensor) -> None:
        """Scatter the gradients of the unit's trained weights, in the order in which FSDP2 lays them out."""
        step, made = program.step, program.step.contributions
        assert made is not None
        self._num_shards = unit.num_shards
        self._runs = [
            [(param, padded_rows(param, unit.num_shards) // unit.num_shards) for param in run]
            for _, run in itertools.groupby(params, key=step.gradient_block)
        ]
        """Weights next to each other with blocks of one size, with their elements on each rank, padding included."""
        widths = [sum(numel for _, numel in run) for run in self._runs]
        ends = [0, *itertools.accumulate(widths)]
        self._windows = [slice(first, last) for first, last in itertools.pairwise(ends)]
        parts = [
            CodedPart(width * unit.num_shards, step.gradient_block(run[0][0]))
            for width, run in zip(widths, self._runs, strict=True)
        ]
        assert sum(part.numel for part in parts) == unit.padded_grad_numel, f"weights of {unit.name} are missing"
        like = torch.empty(0, dtype=DTYPES[step.master_dtype], device=mesh.device)
        group, backend = mesh.groups[made.sent_over], step.codec_backend
        self.exchange = CodedExchange(
            unit.codec, parts, made, group, like, gathers=False, backend=backend, scratch=scratch
        )
        self._index = mesh.index(made.axis)

    @torch.no_grad()
    def scatter(self, own: Tensor, whole: Tensor) -> None:
        """Write the sum of this rank's rows of all contributions to `own`; `whole`, this rank's contribution, is written over.

        Collective over the axis of the contributions: if a rank does not call it, the others wait for it.
        """
        rows = whole.view(self._num_shards, -1)
        values = [rows[:, window] for window in self._windows]
        self.exchange.send(values).wait()
        self.exchange.finish(values)
        own.copy_(rows[self._index])

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of each weight."""
        for number, run in enumerate(self._runs):
            for rest in self.exchange.rests(number):
                for name, first, numel, start in self._places(run):
                    for one in of_weights(rest, [(name, first, numel)]):
                        yield one._replace(start=start + one.start)

    def _places(self, run: Sequence[tuple[ParamSpec, int]]) -> Iterator[tuple[str, int, int, int]]:
        """Yield each rank's rows of each weight: first element in the buffer, their elements, first element in the weight."""
        width = sum(numel for _, numel in run)
        for rank in range(self._num_shards):
            first = rank * width
            for param, numel in run:
                start = min(rank * numel, param.numel)
                stop = min(start + numel, param.numel)
                if start < stop:
                    yield param.name, first, stop - start, start
                first += numel
