"""The methods of a run for its weights outside of steps: in checkpoints, in folders of transformers, in dicts, whole, averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep import calls
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.checkpoints.run_state import Lent, RunState
from samestep.runtime.checkpoints.trained_data import TrainedData
from samestep.runtime.stepper import Stepper


class SavedRun:
    """The weights and states of a run, as its loop saves, loads and reads them."""

    data: TrainedData
    _stepper: Stepper
    _refuse_waiting: Callable[[str], None]
    _state: RunState

    @calls.checked
    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint below `folder`, named by the steps taken, and return its folder.

        Of the earlier ones there the job's `checkpoint.keep` newest stay.

        Raises:
            LayoutError: the run is not prepared yet.
            CheckpointError: the optimizer keeps state that no file can hold.
            SaveError: the file system does not allow it; what was saved before is untouched.
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
            ModelError: the model is none of transformers.
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
        found = checkpoint.find_checkpoint(Path(folder))
        self._state.load(found)
        self._stepper.wait_for_first_update()
        self.data.continues_stream(checkpoint.stream_state_of(found))

    @calls.checked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the model's weights and buffers to those of a dict, which `run.state_dict()` or a plain module's `state_dict()` gives.

        All ranks have the dict, or rank 0 does and the others have an empty one. The optimizer's state and the number of steps stay.
        A run that is not prepared sets them when it is.

        Raises:
            ModelError: names are missing or unexpected, or a tensor has another shape.
        """
        self._state.refuse("load_state_dict")
        self._state.load_state_dict(state)

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """Return a context in which `run.model` has all weights, whole and in master precision, to be read and written.

        It is so in every layout, on every rank: in a pipeline the weights of all stages. What all ranks write alike is kept at
        its end. Within it the run takes no step. A forward of the model or of a part of it is that of a plain module with these
        weights, on each rank by itself, and `copy.deepcopy`, as `AveragedModel` makes, `torch.save` and pickle give plain modules
        that the loop may keep. Before the first step it is the model that the run will begin with.

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

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the moving averages of its weights (`train.ema`), to evaluate or read them.

        Raises:
            ModelError: when it is entered, the job averages no weights.
        """
        return self._state.averaged()
