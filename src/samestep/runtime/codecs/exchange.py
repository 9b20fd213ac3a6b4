"""The exchange of encoded contributions: collectives that sum some buffers over ranks, and the residuals of their codes.

With N ranks, each of them with a buffer of N chunks (`program/contributions.py` has the formula):

```
rank r      G_r + e_r ─ encode ─► [ c_0 | c_1 | ... ] ─ all_to_all ─► chunk r of all ranks ─ decode, sum, + s, encode
            ─ all_gather ─► all chunks ─ decode ─► D
```
Codes are decoded before they are added up, in float32 and in the order of contributions: the same in every layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.codecs import CODECS, PLAIN, CodedPart
from samestep.program.contributions import Contributions
from samestep.runtime.codecs.codec import SUM, BufferResidual, Directions, codec_of
from samestep.runtime.processes.mesh import all_gather
from samestep.wings import required


class PlainExchange:
    """The sum of one buffer without a codec, through all steps of a run: over a rank's contributions first, then over ranks."""

    def __init__(self, contributions: Contributions, group: dist.ProcessGroup | None) -> None:
        """Make an exchange over `group`, None for a single rank."""
        self._made, self._group = contributions, group
        self.begin_step()

    def residuals(self, number: int) -> Iterator[BufferResidual]:
        """Yield nothing, since nothing is lost."""
        yield from ()

    def directions(self) -> Iterator[Directions]:
        """Yield nothing, since nothing is projected."""
        yield from ()

    def scale(self, factor: float) -> None:
        """Do nothing, since nothing is lost."""

    def begin_step(self) -> None:
        """Discard the contributions of the previous step."""
        self._total: Tensor | None = None

    @torch.no_grad()
    def add(self, values: Sequence[Tensor]) -> None:
        """Add this rank's next contribution, whose buffer may then be overwritten if it is not the last one."""
        (value,) = values
        if self._total is not None:
            self._total += value
        else:
            self._total = value.clone() if self._made.each > 1 else value

    def send(self, values: Sequence[Tensor]) -> dist.Work:
        """Add the last contribution, and start to sum those of all ranks.

        Collective over the group, see [Note: collective calls].
        """
        self.add(values)
        work = dist.all_reduce(self._total, group=self._group, async_op=True)
        assert work is not None
        return work

    @torch.no_grad()
    def finish(self, values: Sequence[Tensor]) -> None:
        """Write the sum to the buffer; called once the collectives of `send` have ended."""
        if self._made.ranks == 1:
            self.add(values)
        (value,) = values
        if self._total is not None and self._total is not value:
            value.copy_(self._total)
        self.begin_step()


class CodedExchange:
    """The exchange of the buffers of one bucket or unit, through all steps of a run."""

    def __init__(
        self,
        name: str,
        parts: Sequence[CodedPart],
        contributions: Contributions,
        group: dist.ProcessGroup | None,
        like: Tensor,
        *,
        gathers: bool,
        backend: str = "",
        scratch: Tensor | None = None,
    ) -> None:
        """Make an exchange over `group`, None for a single rank, of buffers in the dtype and on the device of `like`.

        Unless it `gathers`, each rank gets only its chunk of the sum. A `backend` of `torch.compile` makes fused kernels. Codes
        are written to `scratch`, uint8, which consecutive exchanges share; None allocates memory for this one.
        """
        spec = CODECS[name]
        self._like = like.new_empty(0)
        self._codec, self._parts, self._made, self._group = codec_of(name, backend), parts, contributions, group
        self._index = dist.get_rank(group) if group is not None else 0
        self._gathers = gathers or contributions.ranks == 1
        sizes = [spec.size_bytes(self._chunk(part), part.block) for part in parts]
        self._windows = [slice(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]

        num_sent, size = contributions.ranks * contributions.each, sum(sizes)
        counts = [num_sent, num_sent if contributions.ranks > 1 else 0, contributions.ranks if self._gathers else 1]
        if scratch is None:
            scratch = torch.zeros(sum(counts) * size, dtype=torch.uint8, device=like.device)
        sent, received, self._sums = scratch[: sum(counts) * size].view(sum(counts), size).split(counts)
        self._sent = sent.view(contributions.ranks, contributions.each, size)
        self._received = (
            received.view(contributions.ranks, contributions.each, size) if contributions.ranks > 1 else self._sent
        )
        self._lost: list[list[Tensor]] = []
        self._lost_by_sum: list[Tensor] = []
        if spec.feeds_back:
            self._lost = [
                [like.new_zeros(contributions.ranks, self._chunk(part)) for part in parts]
                for _ in range(contributions.each)
            ]
            self._lost_by_sum = [like.new_zeros(1, self._chunk(part)) for part in parts]
        self.begin_step()

    def _chunk(self, part: CodedPart) -> int:
        """Return the elements of a part that each rank sums."""
        return part.numel // self._made.ranks

    def residuals(self, number: int) -> Iterator[BufferResidual]:
        """Yield this rank's residuals of one of the parts: views, flat."""
        for contribution, lost in enumerate(self._lost, self._index * self._made.each):
            yield BufferResidual(str(contribution), 0, lost[number].view(-1))
        if self._lost_by_sum:
            lost_by_sum = self._lost_by_sum[number]
            yield BufferResidual(SUM, self._index * lost_by_sum.numel(), lost_by_sum.view(-1))

    def directions(self) -> Iterator[Directions]:
        """Yield nothing, since nothing is projected."""
        yield from ()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all residuals, as the gradients will be from now on."""
        lost = [*itertools.chain.from_iterable(self._lost), *self._lost_by_sum]
        if lost:
            torch._foreach_mul_(lost, factor)

    def begin_step(self) -> None:
        """Discard the contributions of the previous step."""
        self._num_added, self._is_summed = 0, False

    @torch.no_grad()
    def add(self, values: Sequence[Tensor]) -> None:
        """Encode this rank's next contribution: a flat buffer for each part, which may then be overwritten."""
        for number, (part, value, window) in enumerate(zip(self._parts, values, self._windows, strict=True)):
            lost = self._lost[self._num_added][number] if self._lost else None
            sent = self._sent[:, self._num_added, window]
            self._codec.encode(value.view(self._made.ranks, -1), part.block, sent, lost)
        self._num_added += 1

    def send(self, values: Sequence[Tensor]) -> dist.Work:
        """Encode the last contribution and start to send every rank its chunk of all of them; called again once that has
        ended, sum this rank's chunk and start to gather the sums.

        Collective over the group, see [Note: collective calls].
        """
        assert self._group is not None
        if self._num_added < self._made.each:
            self.add(values)
            work = dist.all_to_all_single(self._received, self._sent, group=self._group, async_op=True)
            assert work is not None
            return work
        self._sum()
        gathered: dist.Work = all_gather(self._sums.view(-1), self._sums[self._index], group=self._group, async_op=True)
        return gathered

    @torch.no_grad()
    def finish(self, values: Sequence[Tensor]) -> None:
        """Write the sums to the buffers, or only this rank's chunks; called once the collectives of `send` have ended."""
        if self._made.ranks == 1:
            self.add(values)
        if not self._is_summed:
            self._sum()
        for part, value, window in zip(self._parts, values, self._windows, strict=True):
            rows = value.view(self._made.ranks, -1)
            rows = rows if self._gathers else rows[self._index, None]
            self._codec.decode(self._sums[:, window], part.block, rows.zero_())

    @torch.no_grad()
    def _sum(self) -> None:
        """Add up this rank's chunk of all contributions in their order, and encode the sum."""
        assert self._num_added == self._made.each, "a contribution is missing"
        sum_ = self._sums[self._index if self._gathers else 0, None]
        for number, (part, window) in enumerate(zip(self._parts, self._windows, strict=True)):
            total = self._like.new_zeros(1, self._chunk(part))
            for received in self._received.flatten(0, 1):
                self._codec.decode(received[None, window], part.block, total)
            lost = self._lost_by_sum[number] if self._lost_by_sum else None
            self._codec.encode(total, part.block, sum_[:, window], lost)
        self._is_summed = True


Exchange = CodedExchange | PlainExchange


def exchange_of(
    name: str,
    parts: Sequence[CodedPart],
    contributions: Contributions,
    group: dist.ProcessGroup | None,
    like: Tensor,
    *,
    gathers: bool,
    backend: str,
) -> Exchange:
    """Return the exchange of buffers by the codec `name`, or without one if it is `PLAIN`; a `backend` of `torch.compile`
    makes fused kernels, where there are any.

    Raises:
        InputError: the codec is one of the wing `slow_links`, which is not installed.
    """
    if name == PLAIN:
        return PlainExchange(contributions, group)
    if CODECS[name].factors:
        (part,) = parts
        factored: Exchange = required("slow_links", "powersgd").FactoredExchange(
            part, contributions, group, like, gathers=gathers
        )
        return factored
    return CodedExchange(name, parts, contributions, group, like, gathers=gathers, backend=backend)
