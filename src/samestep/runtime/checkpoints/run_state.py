"""The weights of a run as its loop sets, saves and reads them: from files and dicts, whole, or their moving averages.

A run that is not prepared has no weights yet. What it is given is kept until its model is built:

    load(folder)             reads the step from the checkpoint    ─┐
    load_state_dict(dict)    copies the dict                       ─┼─► prepare ─► begin: the first, then the second
    gathered()               copies what is written, as a dict     ─┘

What it is asked for meanwhile is that of a plain model, which has the values that the run will begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.pretrained_form import PretrainedForm
from samestep.errors import ModelError
from samestep.examination.examine import build_blueprint
from samestep.runtime.checkpoints import checkpoint, given_weights, manifests, plain_copies, whole_state
from samestep.runtime.checkpoints.prepared_run import PreparedRun
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.weights.moving_averages import WeightAverages


class Lent(Enum):
    """The tensors that the model of a run has in place of the weights that are trained, with the words of an error.

    NOTHING ─┬─ run.gathered() ─► WHOLE ────┬─► NOTHING
             └─ run.averaged() ─► AVERAGES ─┘
    """

    NOTHING = ""
    WHOLE = "run.gathered(): the model has whole weights there"
    AVERAGES = "run.averaged(): the model has the averages there"


class RunState:
    """The weights, optimizer states and checkpoints of one run. Every rank has one, and all call its methods alike."""

    def __init__(self, run: PreparedRun, own: HeldAssembly, note_written: Callable[[], None]) -> None:
        """Keep the state of a run; `note_written` is called where the weights of its prepared model were set."""
        self._run, self._own, self._note_written = run, own, note_written
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
        if self._lent in (lent or (Lent.WHOLE, Lent.AVERAGES)):
            raise ModelError(f"run.{word} within {self._lent.value}; behind it, it works")

    # -- from files and dicts ----------------------------------------------------------------------

    def load(self, found: Path) -> None:
        """Continue from a checkpoint, at once or when the model is built.

        Collective over the world, see [Note: collective calls].

        Raises:
            CheckpointError: it is damaged, lacks a tensor, or belongs to a job with another result.
        """
        if self._own.is_prepared:
            checkpoint.load(self._run, found)
        else:
            self._run.steps_taken = checkpoint.step_of(found, self._own.job)
            self._checkpoint, self._dict = found, None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set weights and buffers to those of a dict, at once or when the model is built.

        Collective over the world, see [Note: collective calls].

        Raises:
            ModelError: names are missing or unexpected, or a tensor has another shape.
        """
        if self._own.is_prepared:
            given_weights.load(self._run, given_weights.checked_state(state), self._note_written)
        else:
            self._dict = given_weights.copied(state)

    def begin(self) -> None:
        """Set what the run was given before its model was built.

        Collective over the world, see [Note: collective calls].
        """
        if self._checkpoint is not None:
            checkpoint.load(self._run, self._checkpoint)
        if self._dict is not None:
            given_weights.load(self._run, self._dict, self._note_written)
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
        job = self._own.job
        form = self._run.assembly.model.form or PretrainedForm.of(build_blueprint(self._own.source, job), job)
        checkpoint.save_pretrained(self._run, form, folder)
        return folder

    def state_dict(self, *, on_every_rank: bool) -> dict[str, Tensor]:
        """Return the whole model's weights and persistent buffers on the host, on rank 0 or on every rank.

        Collective over the world, see [Note: collective calls].
        """
        if (unread := self._unread) is not None:
            return self._stored(unread) if on_every_rank or self._own.place.rank == 0 else {}
        if not self._own.is_prepared:
            found = given_weights.copied(self._first(torch.device("cpu")).state_dict())
            return found if on_every_rank or self._own.place.rank == 0 else {}
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
            with self._lending(Lent.WHOLE), given_weights.kept(self._run, self._first(self._own.place.device)) as first:
                yield first.model
            self._dict = first.written or self._dict
            return
        with (
            given_weights.gathered(self._run, self._note_written) as model,
            self._lending(Lent.WHOLE),
            plain_copies.allowed(model, self._own),
        ):
            yield model

    def _first(self, device: torch.device) -> nn.Module:
        """Return a plain model with the values that a run which is not prepared will begin with.

        Raises:
            ModelError: the run was given the state dict of another model.
        """
        model = plain_copies.first_model(self._own, device)
        if self._checkpoint is not None:
            model.load_state_dict(self._stored(self._checkpoint))
        if self._dict is not None:
            given_weights.load_into(model, given_weights.of_all_ranks(self._run, self._dict))
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
            raise ModelError("the weights of this run are not averaged: train.ema = 0.999 works")
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
            before = piece.master().clone()
            piece.set_master(average)
            average.copy_(before)
        weights.updater.publish()
        weights.store.publish()
