"""The part of a run that checkpoints read, and set again: weights, optimizer, data with its stamp, and the number of steps taken.

A run of `samestep train` knows the source of its data from the start. A user's loop reads the dataset of its batches, which is known in
its first step; so a loop which has loaded a checkpoint is refused there, if the dataset is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from samestep.datasets import stamps
from samestep.errors import CheckpointError, DataError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.lanes import CarriedLanes
from samestep.runtime.guards.unusual_steps import SpikeWatch
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.open_step import Progress
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.stepper import Stepper
from samestep.state.snapshot import preserve_generators


class PreparedRun:
    """The parts of a run that checkpoints, and the methods of a run, read and set."""

    _own: HeldAssembly
    _stepper: Stepper
    job: Job
    place: RankInfo
    changes: tuple[str, ...]
    """What resumes have changed of the job and its layout, and after which steps."""
    data: TrainedData
    """The data that the run is trained on."""
    lanes: CarriedLanes
    """The state that samples hand to those of the next step."""

    def _forget_gradients(self) -> None:
        """Forget the gradients that wait, if the loop calls backwards by itself."""

    @property
    def spikes(self) -> SpikeWatch:
        """The losses of the last steps, used to detect a spike."""
        return self._stepper.guards.spikes

    @property
    def replicas(self) -> HeldAssembly:
        """All replicas on this rank; `replicas[0] is run.model`. More than one only if the job trains several replicas independently."""
        return self._own.prepared()

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has built the model."""
        return self._own.is_prepared

    @property
    def assembly(self) -> Assembly:
        """The prepared model, mesh, program and optimizer; its weights are whole.

        Raises:
            LayoutError: the run is not prepared yet.
        """
        return self._stepper.whole_assembly

    @property
    def program(self) -> Program:
        """The program of this rank's pipeline stage: the operations of one step."""
        return self._stepper.held.parallel.program

    @property
    def model(self) -> nn.Module:
        """The model instance of the run, or the result of its build function, with sharded weights. With `tp` and `ep` a weight may be the shard of
        this rank. A loop may change each element of it separately. Code that reads several elements, such as a norm of rows or
        pruning by rank, is rejected; use `gathered()`. If a rank has a shard of the gradient, a norm of `param.grad` is rejected too;
        use `report.grad_norm`.
        """
        if not self.is_prepared and self._own.source.owner is not None:
            instance = self._own.source.model
            assert isinstance(instance, nn.Module)
            return instance
        return self.assembly.model.module

    @property
    def updater(self) -> Updater:
        """The optimizer over the weights that this rank updates, including writes into the model."""
        if self._stepper.progress is Progress.BETWEEN:
            for reason in self.assembly.model.replaced.take_over(inside=False):
                self.job.run.waived("state", "forward-state", reason)
        self.assembly.weights.store.take_back()
        updater = self.assembly.weights.updater
        updater.live.reread()
        return replace(updater, optimizer=updater.in_loop)

    def adopt(self, change: Callable[[Assembly], Assembly]) -> None:
        """Continue with an assembly that was derived from the run's, for example one with another optimizer."""
        self.assembly.weights.store.settle()
        self.replicas.change(change)

    @property
    def layout(self) -> Layout:
        """The layout; once the run is prepared, with additional options that the model needs."""
        return self._own.layout

    @property
    def steps_taken(self) -> int:
        """The number of steps that were taken, in this process or before."""
        return self._stepper.steps_taken

    @steps_taken.setter
    def steps_taken(self, number: int) -> None:
        self._stepper.steps_taken = number
        self._own.forget_loop()
        self._forget_gradients()


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
                f"{text}, when {saved.folder} was written, so the run would continue with other samples: resume with the data that "
                'stood there; --allow data, or run.allow = ["data"], lets it be other',
            )
        return (f"after step {saved.step}: {text} (allowed)",)
