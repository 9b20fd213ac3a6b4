"""The `StepBatch` of what a loop hands to a run: a batch of `samestep.batches`, or the values of a whole batch.

    equal on all ranks         each reads its share of what it holds; nothing is sent
    on rank 0, None elsewhere  rank 0 sends the values to all ranks in every step
    local=True                 each data rank trains on the samples that it is given, and the batch is all of them in the order
                               of ranks; in every step the ranks exchange how many they hold

In the first step and in steps under watch ranks compare what they were given, and those of `local=True` exchange their samples,
so that whatever is repeated or compared there knows the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from samestep.building.batch_dim import BatchDim
from samestep.datasets.given_batch import GivenBatch
from samestep.datasets.opening import check_batch
from samestep.datasets.values import joined, num_samples, tensors_of_arrays
from samestep.errors import DataError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ranks import Ranks
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.messages import broadcast_from, gather_values
from samestep.runtime.step_batch import StepBatch
from samestep.state.fingerprints import digest

_UNSENT = "a batch that rank 0 alone is given holds {}, which is not sent to the other ranks"


class GivenBatches:
    """The batches that one run is given. Every rank has one, and all call its methods alike."""

    def __init__(self, job: Job, place: RankInfo, turn: BatchDim | None = None) -> None:
        self._job, self._place, self._turn = job, place, turn
        self._sends = dict[str, bool]()
        """Whether rank 0 alone is given values, by method, as the ranks have agreed last: a loop may predict from values that every
        rank has, and step with those of rank 0."""

    def batch_of(
        self, given: Any, method: str, step: int, layout: Layout, *, local: bool = False, compares: bool = True
    ) -> StepBatch:
        """Return what `method` was given as a batch of the step with this index; with `compares` ranks compare it.

        Collective over the world where it is no batch of `samestep.batches`, see [Note: collective calls].

        Raises:
            DataError: it is neither a batch nor the values of one, or ranks were given different ones without `local`.
        """
        if hasattr(given, "shares") and hasattr(given, "samples"):
            held = getattr(given, "held", None)
            if held is not None and self._place.world_size > 1:
                self._compare_ends(given.stream, given.step, given.num_samples)
                if compares:
                    self._compare_stream(held, method)
            return self._first_of(given)
        with outside_step():
            given = tensors_of_arrays(given)
            given = given if self._turn is None or given is None else self._turn.first(given)
            return self._of_values(given, method, step, layout, local, compares)

    def _first_of(self, batch: Any) -> Any:
        """Return a batch whose samples come first where they are read."""
        if self._turn is None:
            return batch
        if not isinstance(batch, GivenBatch):
            return self._turn.batch(batch)
        values = self._turn.first(batch.values)
        return replace(batch, values=values, count=num_samples(values) or batch.count)

    def _of_values(self, given: Any, method: str, step: int, layout: Layout, local: bool, compares: bool) -> GivenBatch:
        world = self._place.world_size
        compares = compares or method not in self._sends
        wrong, count = check_batch(given, method), num_samples(given)
        if not wrong and given is not None and count is None:
            wrong = (
                f"{method} was given values of which no number of samples can be told: tensors with as many rows as there are samples "
                "work, and lists of one item for each"
            )
        if count == 0 and (not local or world == 1):
            wrong = f"{method} was given a batch without samples; one sample is the least that works"
        if world == 1 and given is None:
            wrong = f"{method} was given None on the only rank: a batch of samestep.batches works, or the values of a whole batch"
        if local and world > 1:
            return self._local(given, wrong, count or 0, method, step, layout, compares)
        if compares and world > 1:
            self._compare(given, wrong, method)
        elif wrong or (given is None and not (self._sends.get(method) and self._place.rank)):
            raise DataError(wrong or f"{method} was given None here, and values in the steps before; values work")
        if self._sends.get(method) and world > 1:
            given = broadcast_from(0, given, None, self._place.device, what=_UNSENT, kind=DataError)
            count = num_samples(given)
        assert count, "values were checked"
        return GivenBatch(step, given, count, by_microbatch=self._is_grouped)

    @property
    def _is_grouped(self) -> bool:
        return self._job.numerics.coupled_samples is not None

    def _compare(self, given: Any, wrong: str, method: str) -> None:
        """Compare what all ranks were given, and note whether that is rank 0 alone."""
        mine = (wrong, None if given is None or wrong else digest(given))
        everyone = gather_values(mine, self._place.world_size)
        if reason := next((reason for reason, _ in everyone if reason), ""):
            raise DataError(reason)
        first, *others = (one for _, one in everyone)
        if first is None:
            raise DataError(
                f"{method} was given None on rank 0: values on rank 0 work, which sends them, or equal ones on all ranks"
            )
        self._sends[method] = all(one is None for one in others)
        other = next((rank for rank, one in enumerate(others, 1) if one != first), None)
        if other is not None and not self._sends[method]:
            raise DataError(
                f"{method} was given other values on rank {other} than on rank 0: the whole batch on every rank works, or on rank 0 "
                f"alone and None elsewhere; {method}(batch, local=True) takes each rank's own samples"
            )

    def _compare_ends(self, stream: Any, step: int, count: int) -> None:
        """Compare how many samples of a step all ranks have read of a stream: where it ends on some rank alone, that rank takes part
        instead of its step, so that no other waits for it.

        Collective over the world, see [Note: collective calls].

        Raises:
            DataError: ranks have read different numbers.
        """
        if stream.compared == step:
            return
        stream.compared, stream.at_end = step, lambda ended: self._compare_ends(stream, ended, 0)
        with outside_step():
            counts = gather_values(count, self._place.world_size)
        other = next((rank for rank, one in enumerate(counts) if one != counts[0]), None)
        if other is not None:
            raise DataError(
                f"for step {step + 1} a stream has {_samples(counts[0])} on rank 0 and {_samples(counts[other])} on rank {other}: one that "
                "has as many on every rank works, since each keeps its own samples of it; so do batches that rank 0 alone reads and hands "
                "over, with None on the others"
            )

    def _compare_stream(self, held: Any, method: str) -> None:
        """Compare the samples of a step that all ranks have read of a stream."""
        with outside_step():
            first, *others = gather_values(digest(held), self._place.world_size)
        other = next((rank for rank, one in enumerate(others, 1) if one != first), None)
        if other is not None:
            raise DataError(
                f"{method} was given a batch of a stream that is another one on rank {other} than on rank 0: a stream that is the same "
                "on every rank works, since each keeps its own samples of it; so do batches that rank 0 alone reads and hands over, "
                f"with None on the others, and {method}(samples, local=True), which takes each rank's own"
            )

    # -- each rank's own samples -------------------------------------------------------------------

    def _local(
        self, given: Any, wrong: str, count: int, method: str, step: int, layout: Layout, compares: bool
    ) -> GivenBatch:
        """Return the batch that consists of the samples which each data rank was given."""
        ranks = Ranks.of(layout)
        if given is None:
            wrong = f"{method} was given None with local=True: each rank's own samples work, of which there may be none"
        print_of = digest(given) if compares and not wrong else None
        everyone = gather_values((wrong, count, print_of), self._place.world_size)
        reason = next((reason for reason, _, _ in everyone if reason), "")
        if reason or not any(count for _, count, _ in everyone):
            raise DataError(reason or f"{method} was given no samples on any rank; one sample is the least that works")
        data_ranks = [ranks.coordinate(rank, "dp") for rank in range(self._place.world_size)]
        leaders = [data_ranks.index(index) for index in range(layout.dp)]
        for rank, index in enumerate(data_ranks):
            if everyone[rank] != everyone[leaders[index]]:
                raise DataError(
                    f"{method} was given other samples on rank {rank} than on rank {leaders[index]}, and both compute the same data "
                    f"rank's part of the model in {str(layout)!r}: equal samples on both work"
                )
        sizes = tuple(everyone[leader][1] for leader in leaders)
        mine = data_ranks[self._place.rank]
        if compares or self._is_grouped or not all(sizes):
            device = self._place.device
            parts = [broadcast_from(leader, given, None, device, what=_UNSENT, kind=DataError) for leader in leaders]
            return GivenBatch(step, joined(parts, sizes), sum(sizes), by_microbatch=self._is_grouped)
        return GivenBatch(step, given, count, sizes, mine)


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}" if count else "nothing more"
