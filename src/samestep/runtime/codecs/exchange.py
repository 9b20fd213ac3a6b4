"""The exchange of encoded contributions: collectives that sum some buffers over ranks, and the residuals of their codes.

With N ranks, each of them with a buffer of N chunks (`program/contributions.py` has the formula):

```
rank r      G_r + e_r ─ encode ─► [ c_0 | c_1 | ... ] ─ all_to_all ─► chunk r of all ranks ─ decode, sum, + s, encode
            ─ all_gather ─► all chunks ─ decode ─► D
```
Codes are decoded before they are added up, in float32 and in the order of contributions: the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.codecs import CODECS, PLAIN, CodedPart
from samestep.runtime.codecs.codec import SUM, BufferResidual, Directions, codec_of
from samestep.runtime.processes.mesh import all_gather
from samestep.wings import required


class PlainExchange:
    """The sum of one buffer over ranks without a codec, through all steps of a run."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Make an exchange over `group`."""
        self._group = group

    def residuals(self, number: int) -> Iterator[BufferResidual]:
        """Yield nothing, since nothing is lost."""
        yield from ()

    def directions(self) -> Iterator[Directions]:
        """Yield nothing, since nothing is projected."""
        yield from ()

    def scale(self, factor: float) -> None:
        """Do nothing, since nothing is lost."""

    def begin_step(self) -> None:
        """Do nothing, since nothing is left of the previous step."""

    def send(self, values: Sequence[Tensor]) -> dist.Work:
        """Start to sum the buffers of all ranks.

        Collective over the group, see [Note: collective calls].
        """
        (value,) = values
        work = dist.all_reduce(value, group=self._group, async_op=True)
        assert work is not None
        return work

    def finish(self, values: Sequence[Tensor]) -> None:
        """Do nothing, since the buffer has the sum once the collectives of `send` have ended."""


class CodedExchange:
    """The exchange of the buffers of one bucket or unit, through all steps of a run."""

    def __init__(
        self,
        name: str,
        parts: Sequence[CodedPart],
        group: dist.ProcessGroup,
        like: Tensor,
        *,
        gathers: bool,
        backend: str = "",
        scratch: Tensor | None = None,
    ) -> None:
        """Make an exchange over `group` of buffers in the dtype and on the device of `like`.

        Unless it `gathers`, each rank gets only its chunk of the sum. A `backend` of `torch.compile` makes fused kernels. Codes
        are written to `scratch`, uint8, which consecutive exchanges share; None allocates memory for this one.
        """
        spec = CODECS[name]
        self._like = like.new_empty(0)
        self._codec, self._parts, self._group, self._gathers = codec_of(name, backend), parts, group, gathers
        self._index, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        sizes = [spec.size_bytes(self._chunk(part), part.block) for part in parts]
        self._windows = [slice(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]

        size, counts = sum(sizes), [self._ranks, self._ranks, self._ranks if gathers else 1]
        if scratch is None:
            scratch = torch.zeros(sum(counts) * size, dtype=torch.uint8, device=like.device)
        self._sent, self._received, self._sums = scratch[: sum(counts) * size].view(sum(counts), size).split(counts)
        self._lost: list[Tensor] = []
        self._lost_by_sum: list[Tensor] = []
        if spec.feeds_back:
            self._lost = [like.new_zeros(self._ranks, self._chunk(part)) for part in parts]
            self._lost_by_sum = [like.new_zeros(1, self._chunk(part)) for part in parts]
        self.begin_step()

    def _chunk(self, part: CodedPart) -> int:
        """Return the elements of a part that each rank sums."""
        return part.numel // self._ranks

    def residuals(self, number: int) -> Iterator[BufferResidual]:
        """Yield this rank's residuals of one of the parts: views, flat."""
        if self._lost:
            lost_by_sum = self._lost_by_sum[number]
            yield BufferResidual(str(self._index), 0, self._lost[number].view(-1))
            yield BufferResidual(SUM, self._index * lost_by_sum.numel(), lost_by_sum.view(-1))

    def directions(self) -> Iterator[Directions]:
        """Yield nothing, since nothing is projected."""
        yield from ()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all residuals, as the gradients will be from now on."""
        if lost := [*self._lost, *self._lost_by_sum]:
            torch._foreach_mul_(lost, factor)

    def begin_step(self) -> None:
        """Discard the contribution of the previous step."""
        self._is_sent = self._is_summed = False

    @torch.no_grad()
    def _encode(self, values: Sequence[Tensor]) -> None:
        """Encode this rank's contribution: a flat buffer for each part."""
        for number, (part, value, window) in enumerate(zip(self._parts, values, self._windows, strict=True)):
            lost = self._lost[number] if self._lost else None
            self._codec.encode(value.view(self._ranks, -1), part.block, self._sent[:, window], lost)

    def send(self, values: Sequence[Tensor]) -> dist.Work:
        """Encode this rank's contribution and start to send every rank its chunk; called again once that has
        ended, sum this rank's chunk and start to gather the sums.

        Collective over the group, see [Note: collective calls].
        """
        if not self._is_sent:
            self._is_sent = True
            self._encode(values)
            work = dist.all_to_all_single(self._received, self._sent, group=self._group, async_op=True)
            assert work is not None
            return work
        self._sum()
        gathered: dist.Work = all_gather(self._sums.view(-1), self._sums[self._index], group=self._group, async_op=True)
        return gathered

    @torch.no_grad()
    def finish(self, values: Sequence[Tensor]) -> None:
        """Write the sums to the buffers, or only this rank's chunks; called once the collectives of `send` have ended."""
        if not self._is_summed:
            self._sum()
        for part, value, window in zip(self._parts, values, self._windows, strict=True):
            rows = value.view(self._ranks, -1)
            rows = rows if self._gathers else rows[self._index, None]
            self._codec.decode(self._sums[:, window], part.block, rows.zero_())

    @torch.no_grad()
    def _sum(self) -> None:
        """Add up this rank's chunk of all contributions in their order, and encode the sum."""
        assert self._is_sent, "a contribution is missing"
        sum_ = self._sums[self._index if self._gathers else 0, None]
        for number, (part, window) in enumerate(zip(self._parts, self._windows, strict=True)):
            total = self._like.new_zeros(1, self._chunk(part))
            for received in self._received:
                self._codec.decode(received[None, window], part.block, total)
            lost = self._lost_by_sum[number] if self._lost_by_sum else None
            self._codec.encode(total, part.block, sum_[:, window], lost)
        self._is_summed = True


Exchange = CodedExchange | PlainExchange


def exchange_of(
    name: str, parts: Sequence[CodedPart], group: dist.ProcessGroup, like: Tensor, *, gathers: bool, backend: str
) -> Exchange:
    """Return the exchange of buffers by the codec `name`, or without one if it is `PLAIN`; a `backend` of `torch.compile`
    makes fused kernels, where there are any.

    Raises:
        InputError: the codec is one of the wing `slow_links`, which is not installed.
    """
    if name == PLAIN:
        return PlainExchange(group)
    if CODECS[name].factors:
        (part,) = parts
        factored: Exchange = required("slow_links", "powersgd").FactoredExchange(part, group, like, gathers=gathers)
        return factored
    return CodedExchange(name, parts, group, like, gathers=gathers, backend=backend)
