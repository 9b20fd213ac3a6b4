"""What a loop hands to the methods of one run, as the batches of its steps: a batch of `samestep.batches`, or the values of one.

    equal on all ranks         each reads its share of what it holds; nothing is sent
    on rank 0, None elsewhere  rank 0 sends the values to all ranks in every step
    local=True                 each data rank trains on the samples that it is given, and the batch is all of them in the order
                               of ranks; in every step the ranks exchange how many they hold

Lanes and `batch_dim` follow only where a loop asks for them, as the model is then called in another way, and at last labels of the next
token, where the data has aligned ones. In the first step and in steps under watch ranks compare what they were given, and those of
`local=True` exchange their samples, so that whatever is repeated or compared there knows the whole batch.

Only labels that a causal model of transformers is trained on with the cross entropy can stand for the tokens at their own place; which they do
is found out once for each dataset (`datasets/labels.py`). A loss pairs the output at a place with the label there, so such labels are moved.

A run of `samestep train` knows the source of its data from the start. A user's loop reads the dataset of its batches, which is known in
its first step; so a loop which has loaded a checkpoint is refused there, if the dataset is another one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from samestep.building.loss import cross_entropy
from samestep.building.model import BatchDim
from samestep.building.model_loss import ModelLoss, moves_labels
from samestep.datasets import stamps
from samestep.datasets.batch import GivenBatch
from samestep.datasets.labels import LOOKED_AT, LabelBatch, convention_of, convention_of_samples
from samestep.datasets.opening import check_batch
from samestep.datasets.values import Parted, dims_of, num_samples, tensors_of_arrays, together
from samestep.errors import CheckpointError, DataError, ModelError
from samestep.examination.examine import Loss
from samestep.job import Job
from samestep.job_tables import Convention
from samestep.program.ranks import Ranks
from samestep.runtime.axes.lanes import CarriedLanes, LaneBatch
from samestep.runtime.guards.step_guards import StepGuards
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.messages import broadcast_from, gather_values
from samestep.runtime.step_observer import StepBatch
from samestep.state.fingerprints import digest
from samestep.state.snapshot import preserve_generators

_KEPT = 8
"""Datasets whose convention is kept: those that a run trains on and evaluates."""


def check_labels(module: nn.Module, loss: Loss, job: Job, dataset: Any) -> None:
    """Refuse a dataset that does not show which token its labels are, before a process starts.

    Raises:
        DataError: it does not, or its labels contradict `data.labels`.
    """
    if loss is cross_entropy and moves_labels(module):
        convention_of(dataset, job.data.labels)
    if isinstance(loss, ModelLoss) and moves_labels(module):
        _refuse_next_labels(dataset)


def _refuse_next_labels(dataset: Any) -> None:
    """Refuse a source whose labels are the next tokens already, for a model whose loss shifts them.

    Raises:
        DataError: it is one.
    """
    if any(getattr(part, "label_convention", None) == "next" for part in (dataset, *getattr(dataset, "parts", ()))):
        raise DataError(
            "labels-shift",
            'loss = "model": the labels of this source are the next tokens, and the model shifts labels itself. Set loss = '
            '"cross_entropy", or a data set with labels that are the inputs at the same place',
        )


class NextLabels:
    """The datasets of a run, and which token the labels of each are."""

    def __init__(self, loss: Loss, job: Job) -> None:
        self._is_cross_entropy, self._word = loss is cross_entropy, job.data.labels
        self._is_within = isinstance(loss, ModelLoss)
        self._moves: bool | None = None
        self._found: deque[tuple[Any, Convention]] = deque(maxlen=_KEPT)

    def of(self, batch: StepBatch, module: nn.Module) -> StepBatch:
        """Return the batch with labels of the next token: itself, if its dataset says that it has them.

        Raises:
            DataError: the samples do not show which token their labels are, or contradict `data.labels`.
        """
        if self._moves is None:
            self._moves = self._is_cross_entropy and moves_labels(module)
            self._is_within &= moves_labels(module)
        if self._is_within:
            _refuse_next_labels(getattr(batch, "dataset", None))
        if not self._moves or isinstance(batch, LabelBatch):
            return batch
        dataset = getattr(batch, "dataset", None)
        if getattr(dataset, "label_convention", None) is not None and self._word != "aligned":
            return batch
        form = next((convention for known, convention in self._found if known is dataset), None)
        if form is None:
            if dataset is None:
                samples = batch.samples(batch.shares(0, 1, 1)[0][:LOOKED_AT])
                form = convention_of_samples(samples, self._word)
            else:
                form = convention_of(dataset, self._word)
            self._found.append((dataset, form))
        return LabelBatch(batch, form, self._word)


class _SavedStamp(NamedTuple):
    """The stamp in the checkpoint from which a run goes on."""

    folder: Path
    step: int
    stamp: stamps.Stamp


class TrainedData:
    """The data of one run; every rank has one, and rank 0 takes its stamp."""

    def __init__(self, job: Job, place: RankInfo) -> None:
        self._job, self._place = job, place
        self._take: Callable[[], stamps.Stamp] | None = None
        self._stamp: stamps.Stamp | None = None
        self._dataset: Any = None
        self._saved: _SavedStamp | None = None
        self._stream: Any = None
        """The stream of the last step's batch, if it is one that has a place."""
        self._stored_state: Any = None
        """The state of the stream in the checkpoint from which the run goes on."""

    def continues_stream(self, state: Any) -> None:
        """Keep the state of the stream in a checkpoint for the stream of the next batch."""
        self._stored_state = state

    def place(self, batch: Any) -> None:
        """Let the stream of a batch begin at the state in the checkpoint from which the run goes on, if there is one."""
        stream: Any = getattr(batch, "stream", None)
        if hasattr(stream, "resume"):
            self._stream = stream
            if self._stored_state is not None:
                stream.resume(self._stored_state)
                self._stored_state = None

    def stream_state(self, steps_taken: int) -> Any:
        """Return the state of the stream after so many steps; None on other ranks than 0, and where it has none."""
        if self._place.rank or self._stream is None:
            return None
        with preserve_generators():
            return self._stream.state(steps_taken)

    def is_of(self, take: Callable[[], stamps.Stamp]) -> None:
        """Take the stamp of the source of a job's data, by a function, before the first step reads it.

        Collective over the world where it has several hosts, whose data must be the same, see [Note: collective calls].

        Raises:
            DataError: a host has other data than rank 0.
        """
        self._take = take
        self.stamp()
        if self._place.ranks_per_node < self._place.world_size:
            self._compare_hosts(take)

    def _compare_hosts(self, take: Callable[[], stamps.Stamp]) -> None:
        """Compare the stamps that the first rank of each host takes."""
        is_first = self._place.rank % self._place.ranks_per_node == 0
        with preserve_generators():
            stamp = self._stamp or (take() if is_first else [])
        first, *others = gather_values(stamp, self._place.world_size)
        for rank, theirs in enumerate(others, 1):
            if theirs and (text := stamps.difference(first, theirs)):
                raise DataError(
                    "hosts-differ",
                    f"the host of rank {rank} has other data than the host of rank 0: {text} on rank 0. Use the same on all hosts",
                )

    def stamp(self) -> stamps.Stamp:
        """Return the stamp on rank 0, which takes it once; empty on others, and where no step has read data yet."""
        if self._place.rank == 0 and self._stamp is None:
            with preserve_generators():
                if self._take is not None:
                    self._stamp = self._take()
                elif self._dataset is not None:
                    self._stamp = stamps.of_dataset(self._dataset, self._job.train.seed)
        return self._stamp or []

    def resumes_from(self, folder: Path, step: int, stamp: stamps.Stamp) -> tuple[str, ...]:
        """Compare the data with the stamp in a checkpoint, now or in the first step; return the differences that are
        allowed.

        Collective over the world, see [Note: collective calls].

        Raises:
            CheckpointError: the data is other, and nothing allows that.
        """
        self._saved = _SavedStamp(folder, step, stamp) if stamp else None
        return self._compare_stamps() if self._take is not None else ()

    def begin_step(self, batch: StepBatch) -> tuple[str, ...]:
        """Note the dataset of a step; in the first one after a load compare it with the checkpoint, as `resumes_from`
        says.

        Collective over the world in the first step after a load: every rank calls it with the same batch.
        """
        if self._take is not None:
            return ()
        dataset = getattr(batch, "dataset", None)
        if dataset is not None and dataset is not self._dataset:
            self._dataset, self._stamp = dataset, None
        return self._compare_stamps() if self._saved is not None else ()

    def _compare_stamps(self) -> tuple[str, ...]:
        saved, self._saved = self._saved, None
        if saved is None:
            return ()
        stamp = self.stamp()
        is_source = self._take is not None or {part["kind"] for part in saved.stamp} == {"samples"}
        text = stamps.difference(saved.stamp, stamp) if stamp and is_source else ""
        text = gather_values(text, self._place.world_size)[0]
        if not text:
            return ()
        if "data" not in self._job.run.allow:
            raise CheckpointError(
                "checkpoint-other-job",
                f"{text}, when {saved.folder} was written, so the run would continue with other samples. Use that data. If the "
                'change is intended, use --allow data, or run.allow = ["data"]',
            )
        return (f"after step {saved.step}: {text} (allowed)",)


_UNSENT = "a batch that rank 0 alone is given holds {}, which is not sent to the other ranks"


class RunBatches:
    """The batches that one run is given. Every rank has one, and all call its methods alike."""

    def __init__(self, assemblies: HeldAssembly, guards: StepGuards, batch_dim: int) -> None:
        self._own, self._guards = assemblies, guards
        self.data = TrainedData(assemblies.job, assemblies.place)
        """The data that the run is trained on, as checkpoints note it."""
        self.lanes = CarriedLanes()
        """The state that samples hand to those of the next step."""
        self._turn = BatchDim(batch_dim) if batch_dim else None
        self._place = assemblies.place
        self._sends = dict[str, bool]()
        """Whether rank 0 alone is given values, by method, as the ranks have agreed last: a loop may predict from values that every
        rank has, and step with those of rank 0."""
        self._loss = assemblies.source.loss
        """The loss of the run, as it was given."""
        self.labels = NextLabels(assemblies.source.loss, assemblies.job)
        self.dims: dict[str, int] = {}
        """The number of dimensions of each tensor of a batch by its place; empty in a run that is not prepared."""

    def of(self, values: Any, method: str, step: int, *, local: bool) -> StepBatch:
        """Return what `method` was given as the batch of the step with this index.

        Collective over the world where it is no batch of `samestep.batches`, see [Note: collective calls].

        Raises:
            DataError: it is neither a batch nor the values of one.
            ModelError: it has lanes, and the run was prepared for samples without.
        """
        self.data.place(values)
        if hasattr(values, "shares") and hasattr(values, "samples"):
            samples = getattr(values, "held", None) if self._place.world_size > 1 else None
            if samples is not None:
                self._compare_ends(values.stream, values.step, values.num_samples)
                if self._compares(method, step):
                    self._compare_stream(samples, method)
            batch = values if self._turn is None else self._first_of(values, self._turn)
        else:
            with outside_step():
                tensors = tensors_of_arrays(values)
                tensors = tensors if self._turn is None or tensors is None else self._turn.first(tensors)
                batch = self._of_values(tensors, method, step, local)
        batch = self.lanes.of(batch)
        if isinstance(batch, LaneBatch) and not self.lanes.are_ready:
            self._begin_lanes(batch)
        return batch

    def _begin_lanes(self, batch: LaneBatch) -> None:
        """Let the run's model be called with the state of lanes.

        Raises:
            ModelError: the model is built.
        """
        assemblies = self._own
        if assemblies.is_prepared:
            raise ModelError(
                "lanes",
                "the run was prepared for samples without lanes. Use batches(..., lanes=True) from the first step on",
            )
        first = batch.samples(batch.shares(0, 1, 1)[0][:1])
        assemblies.source = self.lanes.source_of(
            assemblies.source, assemblies.job, assemblies.layout, first, self._turn
        )

    def loss_of(self, loss: Loss | None) -> Loss | None:
        """Return the loss of a backward as the run's model is called: given its outputs without the state of lanes, and both in the
        dimension that it knows; None for the run's own."""
        if loss is None or loss is self._loss:
            return None
        loss = loss if self._turn is None else self._turn.loss_of(loss)
        return self.lanes.loss_of(loss)

    def begin(self, example: Any) -> None:
        """Let the run's model and loss be given samples as the example has them, in the dimension that they know; lanes have done so
        already."""
        self.dims = dims_of(example)
        if self._turn is not None and not self.lanes.are_ready:
            source = self._own.source
            model, loss = self._turn.around(source.model, source.loss)
            self._own.source = replace(source, model=model, loss=loss)

    def begin_step(self, batch: StepBatch) -> tuple[str, ...]:
        """Take notice of the batch of a step: what its stream has to say, and whose data it is; return what a resume has changed."""
        stream = getattr(batch, "stream", None)
        if stream is not None and stream.remarks:
            for line in stream.remarks:
                self._guards.refusals.remark(line)
                if self._own.place.rank == 0:
                    print(f"samestep: {line}", file=sys.stderr, flush=True)
            stream.remarks = ()
        return self.data.begin_step(batch)

    # -- values as a batch -------------------------------------------------------------------------

    def _compares(self, method: str, step: int) -> bool:
        """Return whether ranks compare what `method` was given for the step with this index."""
        if method != "run.step" or not self._own.is_prepared:
            return True
        return self._guards.looks_closer(step) or self._own.current.parallel.batch_norms.takes_statistics

    def _first_of(self, batch: Any, turn: BatchDim) -> Any:
        """Return a batch whose samples come first where they are read."""
        if not isinstance(batch, GivenBatch):
            return turn.batch(batch)
        values = turn.first(batch.values)
        return replace(batch, values=values, count=num_samples(values) or batch.count)

    def _of_values(self, broadcast: Any, method: str, step: int, local: bool) -> GivenBatch:
        world = self._place.world_size
        compares = method not in self._sends or self._compares(method, step)
        wrong, count = check_batch(broadcast, method), num_samples(broadcast)
        if not wrong and broadcast is not None and count is None:
            wrong = (
                f"{method} was given values without a number of samples. Use tensors with as many rows as there are samples"
                ", and lists of one item for each. If a batch has fewer pictures than samples, use a data set with a method read that puts it "
                "together"
            )
        if count == 0 and (not local or world == 1):
            wrong = f"{method} was given a batch without samples. Use at least one sample"
        if world == 1 and broadcast is None:
            wrong = f"{method} was given None on the only rank. Use a batch of samestep.batches, or the values of a whole batch"
        if local and world > 1:
            return self._local(broadcast, wrong, count or 0, method, step, compares)
        if compares and world > 1:
            self._compare(broadcast, wrong, method)
        elif wrong or (broadcast is None and not (self._sends.get(method) and self._place.rank)):
            raise DataError(
                "batch-values", wrong or f"{method} was given None here, and values in the steps before. Use values"
            )
        if self._sends.get(method) and world > 1:
            broadcast = broadcast_from(0, broadcast, None, self._place.device, what=_UNSENT, kind=DataError)
            count = num_samples(broadcast)
        assert count, "values were checked"
        return GivenBatch(step, broadcast, count, by_microbatch=self._is_grouped)

    @property
    def _is_grouped(self) -> bool:
        return self._own.job.numerics.batch_norm_group is not None

    def _compare(self, values: Any, wrong: str, method: str) -> None:
        """Compare what all ranks were given, and note whether that is rank 0 alone."""
        digests = (wrong, None if values is None or wrong else digest(values))
        everyone = gather_values(digests, self._place.world_size)
        if reason := next((reason for reason, _ in everyone if reason), ""):
            raise DataError("batch-values", reason)
        first, *others = (other for _, other in everyone)
        if first is None:
            raise DataError(
                "ranks-given-different-data",
                f"{method} was given None on rank 0. Use values on rank 0, which sends them, or equal ones on all ranks",
            )
        self._sends[method] = all(other is None for other in others)
        other = next((rank for rank, other in enumerate(others, 1) if other != first), None)
        if other is not None and not self._sends[method]:
            raise DataError(
                "ranks-given-different-data",
                f"{method} was given other values on rank {other} than on rank 0. Use the whole batch on every rank, or on rank 0 "
                f"alone and None elsewhere; {method}(batch, local=True) takes each rank's own samples",
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
        other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        if other is not None:
            raise DataError(
                "ranks-given-different-data",
                f"for step {step + 1} a stream has {_samples(counts[0])} on rank 0 and {_samples(counts[other])} on rank {other}. Use one that "
                "has as many on every rank, since each keeps its own samples of it. Or let rank 0 alone read batches, with None on the others",
            )

    def _compare_stream(self, samples: Any, method: str) -> None:
        """Compare the samples of a step that all ranks have read of a stream."""
        with outside_step():
            first, *others = gather_values(digest(samples), self._place.world_size)
        other = next((rank for rank, other in enumerate(others, 1) if other != first), None)
        if other is not None:
            raise DataError(
                "ranks-given-different-data",
                f"{method} was given a batch of a stream that is another one on rank {other} than on rank 0. Use a stream that is the same on every "
                f"rank, or a batch on rank 0 and None on the others, or {method}(samples, local=True) with each rank's own samples",
            )

    # -- each rank's own samples -------------------------------------------------------------------

    def _local(self, samples: Any, wrong: str, count: int, method: str, step: int, compares: bool) -> GivenBatch:
        """Return the batch that consists of the samples which each data rank was given."""
        layout = self._own.layout
        ranks = Ranks.of(layout)
        if samples is None:
            wrong = f"{method} was given None with local=True. Use each rank's own samples (possibly none)"
        print_of = digest(samples) if compares and not wrong else None
        everyone = gather_values((wrong, count, print_of), self._place.world_size)
        reason = next((reason for reason, _, _ in everyone if reason), "")
        if reason or not any(count for _, count, _ in everyone):
            raise DataError(
                "batch-values", reason or f"{method} was given no samples on any rank. Use at least one sample"
            )
        data_ranks = [ranks.coordinate(rank, "dp") for rank in range(self._place.world_size)]
        leaders = [data_ranks.index(index) for index in range(layout.dp)]
        for rank, index in enumerate(data_ranks):
            if everyone[rank] != everyone[leaders[index]]:
                raise DataError(
                    "ranks-given-different-data",
                    f"{method} was given other samples on rank {rank} than on rank {leaders[index]}, and both compute the same data "
                    f"rank's part of the model in {str(layout)!r}. Use equal samples on both",
                )
        sizes = tuple(everyone[leader][1] for leader in leaders)
        data_rank = data_ranks[self._place.rank]
        if compares or self._is_grouped or not all(sizes):
            device = self._place.device
            parts = [broadcast_from(leader, samples, None, device, what=_UNSENT, kind=DataError) for leader in leaders]
            values = together(parts, sizes)
            if isinstance(values, Parted) and not self._is_grouped:
                return GivenBatch(step, values, sum(sizes), sizes)
            return GivenBatch(step, values, sum(sizes), by_microbatch=self._is_grouped)
        return GivenBatch(step, samples, count, sizes, data_rank)


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}" if count else "nothing more"
