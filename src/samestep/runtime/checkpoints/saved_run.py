"""The weights of a run as its loop sets, saves and reads them: from files and dicts, whole, or their moving averages.

`SavedRun` has the methods of a run for them. A run that is not prepared has no weights yet. What it is given is kept until its model
is built:

    load(folder)             reads the step from the checkpoint    ─┐
    load_state_dict(dict)    copies the dict                       ─┼─► prepare ─► begin: the first, then the second
    gathered()               copies what is written, as a dict     ─┘

What it is asked for meanwhile is that of a plain model, which has the values that the run will begin with.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep import calls
from samestep.building.initial_values import fill
from samestep.building.owned_model import OwnedModel
from samestep.building.pretrained_form import PretrainedForm
from samestep.building.several_models import as_given
from samestep.errors import ModelError
from samestep.examination.examine import build_blueprint
from samestep.runtime.checkpoints import checkpoint, manifests, other_state, whole_state
from samestep.runtime.checkpoints.prepared_run import PreparedRun, TrainedData
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.optimizers.optimizer_source import given_sources
from samestep.runtime.optimizers.optimizer_step import set_options
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.moving_averages import WeightAverages


class SavedRun:
    """The weights and states of a run, as its loop saves, loads and reads them."""

    data: TrainedData
    _stepper: Stepper
    _refuse_waiting: Callable[[str], None]
    _state: RunState
    _owner: OwnedModel | None

    @calls.checked
    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint below `folder`, named by the steps taken, and return its folder.

        The newest `checkpoint.keep` checkpoints of the job stay there.

        Raises:
            LayoutError: the run is not prepared yet.
            CheckpointError: the optimizer keeps state that no file can hold.
            SaveError: the file system does not allow it; earlier checkpoints are untouched.
        """
        self._state.refuse("save")
        self._refuse_waiting("save")
        return self._state.save(Path(folder))

    @calls.checked
    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model as a new folder that transformers' `from_pretrained` loads as it is, and return it.

        The folder must lie where all ranks can write; each of them writes files of its own.

        Raises:
            LayoutError: the run is not prepared yet.
            ModelError: the model is not one of transformers.
            SaveError: the folder exists, or the file system does not allow it.
        """
        self._state.refuse("save_pretrained")
        return self._state.save_pretrained(Path(folder))

    @calls.checked
    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint that any layout has saved; of a folder of checkpoints, from the newest.

        `steps_taken` is then the first step of `samestep.batches`. A run that is not prepared reads the files when it is.

        Raises:
            CheckpointError: there is none, or it is damaged, lacks a tensor, or belongs to a job with another result.
        """
        self._state.refuse("load")
        path = checkpoint.find_checkpoint(Path(folder))
        self._state.load(path)
        self._stepper.wait_for_first_update()
        self.data.continues_stream(checkpoint.of_records(path, other_state.stream_state))

    @calls.checked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the model's weights and buffers from a dict of `run.state_dict()`, or of a plain module's `state_dict()`.

        All ranks have the dict, or rank 0 does and the others have an empty one. The optimizer's state and the number of steps stay.
        A run that is not prepared sets them when it is.

        Raises:
            ModelError: names are missing or unexpected, or a tensor has another shape.
        """
        self._state.refuse("load_state_dict")
        self._state.load_state_dict(state)

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """Return a context with all weights of `run.model`, full and in master precision, to be read and written.

        It works in every layout, on every rank: in a pipeline it has the weights of all stages. Equal writes of all ranks are kept at its end. The
        run takes no step within it. A forward pass of the model or of a part of it equals a plain module with these weights, on each rank
        separately. `copy.deepcopy`, as `AveragedModel` makes, `torch.save` and pickle give plain modules that the loop may keep. Before the
        first step it is the model with its initial values.

        Raises:
            ModelError: ranks have written different values; or the context is entered within another one.
        """
        self._state.refuse("gathered")
        return self._state.gathered()

    def state_dict(self, *, on_every_rank: bool = False) -> dict[str, Tensor]:
        """Return the whole model's weights and persistent buffers, on the host, for `load_state_dict` of the plain module.

        Ranks other than 0 return an empty dict, unless `on_every_rank`. Weights are in master precision; before the first step they are
        those that the run will begin with.
        """
        self._state.refuse("state_dict", Lent.WHOLE)
        return self._state.state_dict(on_every_rank=on_every_rank)

    def release(self) -> nn.Module:
        """Give the model back: the instance that the run was given, or the result of its build function, full on every rank.

        It has the trained weights and buffers, in the dtypes that it was given with. The run takes no more steps.

        Raises:
            ModelError: gradients wait for an update, or the run has other tensors than the trained ones.
        """
        self._state.refuse("release")
        self._refuse_waiting("release")
        model = self._state.release()
        if self._owner is not None:
            self._owner.end()
        return model

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context that puts the moving averages of its weights (`train.ema`) into the model, to evaluate or read them.

        Raises:
            ModelError: when it is entered, the job averages no weights.
        """
        return self._state.averaged()


class Lent(Enum):
    """The tensors that the model of a run has in place of the weights that are trained, with the words of an error.

    NOTHING ─┬─ run.gathered() ─► WHOLE ────┬─► NOTHING
             ├─ run.averaged() ─► AVERAGES ─┘
             └─ run.release()  ─► RELEASED
    """

    NOTHING = ""
    WHOLE = "run.gathered(): the model has whole weights there"
    AVERAGES = "run.averaged(): the model has the averages there"
    RELEASED = "run.release(): the model is the code's again"


class RunState:
    """The weights, optimizer states and checkpoints of one run. Every rank has one, and all call its methods alike."""

    def __init__(self, run: PreparedRun, assemblies: HeldAssembly, note_written: Callable[[], None]) -> None:
        """Keep the state of a run; `note_written` is called where the weights of its prepared model were set."""
        self._run, self._own, self._note_written = run, assemblies, note_written
        self._lent = Lent.NOTHING
        self._checkpoint: Path | None = None
        """The checkpoint from which the run goes on once its model is built."""
        self._dict: dict[str, Any] | None = None
        """The state dict that is set after that."""

    def refuse(self, word: str, *lent: Lent) -> None:
        """Refuse a call while the model has other tensors than those that are trained: one of `lent`, or any.

        Raises:
            ModelError: it has.
        """
        if self._lent is Lent.RELEASED:
            raise ModelError(
                "run-call-time",
                f"run.{word} behind {self._lent.value}. Use samestep.parallelize, which makes another run.",
            )
        if self._lent in (lent or (Lent.WHOLE, Lent.AVERAGES)):
            raise ModelError("run-call-time", f"run.{word} within {self._lent.value}. Call it after that")

    # -- from files and dicts ----------------------------------------------------------------------

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, at once or when the model is built.

        Collective over the world, see [Note: collective calls].

        Raises:
            CheckpointError: it is damaged, lacks a tensor, or belongs to a job with another result.
        """
        if self._own.is_prepared:
            checkpoint.load(self._run, path)
            return
        self._run.steps_taken = checkpoint.step_of(path, self._own.job)
        self._checkpoint, self._dict = path, None
        if makers := given_sources(self._own.source.optimizer):
            checkpoint.of_records(path, functools.partial(other_state.give_back_to_instances, [*makers.values()]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set weights and buffers to those of a dict, at once or when the model is built.

        Collective over the world, see [Note: collective calls].

        Raises:
            ModelError: names are missing or unexpected, or a tensor has another shape.
        """
        if self._own.is_prepared:
            whole_state.load(self._run, whole_state.checked_state(state), self._note_written)
        else:
            self._dict = whole_state.copied(state)

    def begin(self) -> None:
        """Set what the run was given before its model was built.

        Collective over the world, see [Note: collective calls].
        """
        if self._checkpoint is not None:
            groups = [
                g for maker in given_sources(self._own.source.optimizer).values() for g in maker.instance.param_groups
            ]
            options = [copy.deepcopy({key: value for key, value in g.items() if key != "params"}) for g in groups]
            checkpoint.load(self._run, self._checkpoint)
            for group, of_loop in zip(groups, options, strict=True):  # what the loop has set since the load stays
                set_options(group, of_loop)
        if self._dict is not None:
            whole_state.load(self._run, self._dict, self._note_written)
            self._dict = None

    # -- to files and dicts ------------------------------------------------------------------------

    @property
    def _unread(self) -> Path | None:
        """The checkpoint of a run that was loaded and is not prepared, so that all of its values are in the files."""
        return None if self._own.is_prepared or self._dict is not None else self._checkpoint

    def save(self, folder: Path) -> Path:
        """Write a checkpoint below a folder, or where no step was left to take, copy the one that was loaded; return its folder.

        Collective over the world, see [Note: collective calls].

        Raises:
            CheckpointError: the optimizer keeps state that no file can hold.
            SaveError: the file system does not allow it.
        """
        if (unread := self._unread) is not None:
            return checkpoint.copy_checkpoint(self._run, unread, folder)
        return checkpoint.save(self._run, folder, self._own.job.checkpoint.keep)

    def save_pretrained(self, folder: Path) -> Path:
        """Write the model as a new folder for transformers, and return it.

        Collective over the world, see [Note: collective calls].

        Raises:
            ModelError: the model is none of transformers.
            SaveError: the folder exists, or the file system does not allow it.
        """
        job, form = self._own.job, self._run.assembly.model.form
        if form is None:
            is_taken = self._own.source.owner is not None
            with self.gathered() if is_taken else nullcontext():
                form = PretrainedForm.of(build_blueprint(self._own.source, job), job)
        checkpoint.save_pretrained(self._run, form, folder)
        return folder

    def state_dict(self, *, on_every_rank: bool) -> dict[str, Tensor]:
        """Return the whole model's weights and persistent buffers on the host, on rank 0 or on every rank.

        Collective over the world, see [Note: collective calls].
        """
        if (unread := self._unread) is not None:
            return self._stored(unread) if on_every_rank or self._own.place.rank == 0 else {}
        if not self._own.is_prepared:
            state = whole_state.copied(self._first(torch.device("cpu")).state_dict())
            return state if on_every_rank or self._own.place.rank == 0 else {}
        with self._run.replicas.outer():
            return whole_state.state_dict(self._run, on_every_rank=on_every_rank)

    def _stored(self, folder: Path) -> dict[str, Tensor]:
        """Return the state dict of a run that was loaded and is not prepared, read from its checkpoint."""
        manifests.check_digests(manifest := manifests.read_manifest(folder), folder)
        blueprint = build_blueprint(self._own.source, self._own.job)
        return whole_state.stored_state_dict(blueprint, manifest, folder, self._own.job.numerics)

    # -- in the model ------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Return a context in which the run's model has all weights, whole and in master precision.

        Collective over the world, see [Note: collective calls].

        Raises:
            ModelError: ranks have written different values.
        """
        if not self._own.is_prepared:
            with self._lending(Lent.WHOLE), whole_state.kept(self._run, self._first(self._own.place.device)) as first:
                yield first.model
            self._dict = first.written or self._dict
            return
        with whole_state.gathered(self._run, self._note_written) as model, self._lending(Lent.WHOLE):
            yield model

    def release(self) -> nn.Module:
        """Give the model back with trained values, whole on every rank.

        Collective over the world, see [Note: collective calls].
        """
        source, device = self._own.source, self._own.place.device
        if not self._own.is_prepared:
            model = source.model if isinstance(source.model, nn.Module) and self._dict is None else self._first(device)
            self._lent = Lent.RELEASED
            return model
        model = self._run.model
        values = {name: value.to(device) for name, value in self.state_dict(on_every_rank=True).items()}
        self._run.assembly.model.plain.give_back(values)
        self._lent = Lent.RELEASED
        if source.owner is not None:
            source.owner.form = None
        return model

    def _first(self, device: torch.device) -> nn.Module:
        """Return a plain model with the values that a run which is not prepared will begin with.

        Raises:
            ModelError: the run was given the state dict of another model.
        """
        plan = build_blueprint(self._own.source, self._own.job)
        wide = torch.float64 if self._own.job.numerics.precision == "float64" else None
        fill(plan, lambda name: plan.materialize(name, device, wide or torch.float32), device, wide)
        model = as_given(plan.module)
        if self._checkpoint is not None:
            model.load_state_dict(self._stored(self._checkpoint))
        if self._dict is not None:
            whole_state.load_into(model, whole_state.of_all_ranks(self._run, self._dict))
        return model

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which the run's model has the averages of its weights, which hold the weights meanwhile.

        Before the first update the average of a weight is the weight.

        Collective over the world, see [Note: collective calls].

        Raises:
            ModelError: the job averages none, or other tensors are lent already.
        """
        averages = self._run.updater.averages
        if averages is None:
            raise ModelError("no-averages", "the weights of this run are not averaged. Set train.ema = 0.999")
        self.refuse("averaged")
        self._exchange(averages)
        try:
            with self._lending(Lent.AVERAGES):
                yield
        finally:
            self._exchange(averages)

    @contextmanager
    def _lending(self, lent: Lent) -> Iterator[None]:
        self._lent = lent
        try:
            yield
        finally:
            self._lent = Lent.NOTHING

    @torch.no_grad()
    def _exchange(self, averages: WeightAverages) -> None:
        """Exchange masters and averages, one piece at a time, and publish the masters."""
        weights = self._run.assembly.weights
        for piece in weights.updater.pieces:
            if (average := averages.of(piece)) is None:
                continue
            values = piece.master().clone()
            piece.set_master(average)
            average.copy_(values)
        weights.updater.publish()
        weights.store.publish()
