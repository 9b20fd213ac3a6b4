"""The weights of a run as its loop sets, saves and reads them: from files and dicts, whole, or their moving averages.

A run that is not prepared has no weights yet. What it is given is kept until its model is built:

    load(folder)             reads the step from the checkpoint    ─┐
    load_state_dict(dict)    copies the dict                       ─┼─► prepare ─► _set_kept: the first, then the second
    gathered()               copies what is written, as a dict     ─┘

What it is asked for meanwhile is that of a plain model, which has the values that the run will begin with.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from samestep.runtime.optimizers.optimizer_source import given_sources
from samestep.runtime.optimizers.optimizer_step import set_options
from samestep.runtime.prepared_run import PreparedRun
from samestep.runtime.weights.moving_averages import WeightAverages
from samestep.state.fingerprints import fingerprint


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


class SavedRun(PreparedRun):
    """The weights and states of a run, as its loop saves, loads and reads them."""

    _owner: OwnedModel | None
    _lent = Lent.NOTHING
    _checkpoint: Path | None = None
    """The checkpoint from which the run goes on once its model is built."""
    _dict: dict[str, Any] | None = None
    """The state dict that is set after that."""

    @abstractmethod
    def _refuse_waiting(self, method: str) -> None:
        """Refuse a call while gradients wait."""

    def _refuse_lent(self, word: str, *lent: Lent) -> None:
        """Refuse a call while the model has other tensors than those that are trained: one of `lent`, or any.

        Raises:
            ModelError: it has.
        """
        if self._lent is Lent.RELEASED:
            raise ModelError(
                "run-call-time",
                f"run.{word} after {self._lent.value}. Use samestep.parallelize, which makes another run.",
            )
        if self._lent in (lent or (Lent.WHOLE, Lent.AVERAGES)):
            raise ModelError("run-call-time", f"run.{word} within {self._lent.value}. Call it after that")

    # -- from files and dicts ----------------------------------------------------------------------

    @calls.checked
    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint that any layout has saved; of a folder of checkpoints, from the newest.

        `steps_taken` is then the first step of `samestep.batches`. A run that is not prepared reads the files when it is.

        Raises:
            CheckpointError: there is none, or it is damaged, lacks a tensor, or belongs to a job with another result.
        """
        self._refuse_lent("load")
        path = checkpoint.find_checkpoint(Path(folder))
        if self._own.is_prepared:
            checkpoint.load(self, path)
        else:
            self.steps_taken = checkpoint.step_of(path, self.job)
            self._checkpoint, self._dict = path, None
            if makers := given_sources(self._own.source.optimizer):
                checkpoint.of_records(path, functools.partial(other_state.give_back_to_instances, [*makers.values()]))
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
        self._refuse_lent("load_state_dict")
        if self._own.is_prepared:
            whole_state.load(self, whole_state.checked_state(state))
        else:
            self._dict = whole_state.copied(state)

    @contextmanager
    def _trained_as_saved(self) -> Iterator[None]:
        """Plan the weights that the run has trained before its checkpoint as trained; a loop that has frozen some since freezes them afterwards."""
        instance = self._own.source.model
        if self._checkpoint is None or not isinstance(instance, nn.Module):
            yield
            return
        saved = manifests.read_manifest(self._checkpoint)["shapes"]
        frozen = [name for name, param in instance.named_parameters() if name in saved and not param.requires_grad]
        for name in frozen:
            instance.get_parameter(name).requires_grad_(True)
        yield
        for name in frozen:
            self.assembly.model.module.get_parameter(name).requires_grad_(False)

    def _set_kept(self) -> None:
        """Set what the run was given before its model was built; collective over the world, see [Note: collective calls]."""
        if self._checkpoint is not None:
            makers = given_sources(self._own.source.optimizer).values()
            groups = [group for maker in makers for group in maker.instance.param_groups]
            options = [copy.deepcopy({key: value for key, value in g.items() if key != "params"}) for g in groups]
            checkpoint.load(self, self._checkpoint)
            for group, of_loop in zip(groups, options, strict=True):  # what the loop has set since the load stays
                set_options(group, of_loop)
        if self._dict is not None:
            whole_state.load(self, self._dict)
            self._dict = None

    # -- to files and dicts ------------------------------------------------------------------------

    @property
    def _unread(self) -> Path | None:
        """The checkpoint of a run that was loaded and is not prepared, so that all of its values are in the files."""
        return None if self._own.is_prepared or self._dict is not None else self._checkpoint

    @calls.checked
    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint below `folder`, named by the steps taken, and return its folder.

        The newest `checkpoint.keep` checkpoints of the job stay there.

        Raises:
            LayoutError: the run is not prepared yet.
            CheckpointError: the optimizer keeps state that no file can hold.
            SaveError: the file system does not allow it; earlier checkpoints are untouched.
        """
        self._refuse_lent("save")
        self._refuse_waiting("save")
        if (unread := self._unread) is not None:  # no step was left to take
            return checkpoint.copy_checkpoint(self, unread, Path(folder))
        return checkpoint.save(self, Path(folder), self.job.checkpoint.keep)

    @calls.checked
    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model as a new folder that transformers' `from_pretrained` loads as it is, and return it.

        All ranks must share the folder; each of them writes its own files.

        Raises:
            LayoutError: the run is not prepared yet.
            ModelError: the model is not one of transformers.
            SaveError: the folder exists, or the file system does not allow it.
        """
        self._refuse_lent("save_pretrained")
        form = self.assembly.model.form
        if form is None:
            with self.gathered() if self._own.source.owner is not None else nullcontext():
                form = PretrainedForm.of(build_blueprint(self._own.source, self.job), self.job)
        checkpoint.save_pretrained(self, form, Path(folder))
        return Path(folder)

    def state_dict(self, *, on_every_rank: bool = False) -> dict[str, Tensor]:
        """Return all weights and persistent buffers of the model, in CPU memory, for `load_state_dict` of the plain module.

        Ranks other than 0 return an empty dict, unless `on_every_rank`. Weights are in master precision; before the first step they are
        those that the run will begin with.
        """
        self._refuse_lent("state_dict", Lent.WHOLE)
        if self._own.is_prepared:
            with self.held.outer():
                return whole_state.state_dict(self, on_every_rank=on_every_rank)
        if (unread := self._unread) is not None:
            return self._stored(unread) if on_every_rank or self.place.rank == 0 else {}
        state = whole_state.copied(self._first(torch.device("cpu")).state_dict())
        return state if on_every_rank or self.place.rank == 0 else {}

    def _stored(self, folder: Path) -> dict[str, Tensor]:
        """Return the state dict of a run that was loaded and is not prepared, read from its checkpoint."""
        manifests.check_digests(manifest := manifests.read_manifest(folder), folder)
        blueprint = build_blueprint(self._own.source, self.job)
        return whole_state.stored_state_dict(blueprint, manifest, folder, self.job.numerics)

    # -- in the model ------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Return a context with all weights of `run.model`, full and in master precision, to be read and written.

        It works in every layout, on every rank: in a pipeline it has the weights of all stages. Equal writes of all ranks are kept at its end. The
        run takes no step within it. A forward pass of the model or of a part of it equals a plain module with these weights, on each rank
        separately. `copy.deepcopy`, as `AveragedModel` makes, `torch.save` and pickle give plain modules that the loop may keep. Before the
        first step it is the model with its initial values.

        Raises:
            ModelError: ranks have written different values; or the context is entered within another one.
        """
        self._refuse_lent("gathered")
        if self._own.is_prepared:
            with whole_state.gathered(self) as model, self._lending(Lent.WHOLE):
                yield model
            return
        model = self._first(self.place.device)
        fingerprints = {name: fingerprint(tensor) for name, tensor in whole_state.tensors_of(model).items()}
        with self._lending(Lent.WHOLE):
            yield model
        if whole_state.compare(self, whole_state.tensors_of(model)) != fingerprints:
            self._dict = whole_state.copied(model.state_dict())

    def release(self) -> nn.Module:
        """Give the model back: the instance that the run was given, or the result of its build function, full on every rank.

        It has the trained weights and buffers, in the dtypes that it was given with. The run takes no more steps.

        Raises:
            ModelError: gradients wait for an update, or the run has other tensors than the trained ones.
        """
        self._refuse_lent("release")
        self._refuse_waiting("release")
        source, device = self._own.source, self.place.device
        if self._own.is_prepared:
            model = self.model
            values = {name: value.to(device) for name, value in self.state_dict(on_every_rank=True).items()}
            self.assembly.model.plain.give_back(values)
            if source.owner is not None:
                source.owner.form = None
        else:
            model = source.model if isinstance(source.model, nn.Module) and self._dict is None else self._first(device)
        self._lent = Lent.RELEASED
        if self._owner is not None:
            self._owner.end()
        return model

    def _first(self, device: torch.device) -> nn.Module:
        """Return a plain model with the values that a run which is not prepared will begin with.

        Raises:
            ModelError: the run was given the state dict of another model.
        """
        plan = build_blueprint(self._own.source, self.job)
        wide = torch.float64 if self.job.numerics.precision == "float64" else None
        fill(plan, lambda name: plan.materialize(name, device, wide or torch.float32), device, wide)
        model = as_given(plan.module)
        if self._checkpoint is not None:
            model.load_state_dict(self._stored(self._checkpoint))
        if self._dict is not None:
            whole_state.load_into(model, whole_state.of_all_ranks(self, self._dict))
        return model

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context that puts the moving averages of its weights (`train.ema`) into the model, to evaluate or read them.

        Before the first update the average of a weight is the weight.

        Raises:
            ModelError: when it is entered, the job averages no weights.
        """
        averages = self.updater.averages
        if averages is None:
            raise ModelError("no-averages", "the weights of this run are not averaged. Set train.ema = 0.999")
        self._refuse_lent("averaged")
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
        weights = self.assembly.weights
        for piece in weights.updater.pieces:
            if (average := averages.of(piece)) is None:
                continue
            values = piece.master().clone()
            piece.set_master(average)
            average.copy_(values)
        weights.updater.live.publish()
        weights.store.publish()
