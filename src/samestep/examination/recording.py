"""The masks and random numbers of a traced forward: which module draws them, their shapes, and where they have their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.attention import DroppedWeights
from samestep.building.torch_seams import disable_current_modes
from samestep.errors import ModelError
from samestep.independence.samples import Place, RowsOf
from samestep.models.spec import MaskSpec
from samestep.randomness.distributions import DRAWS
from samestep.randomness.mode import IN_ORDER, Draw, DrawKey, DropoutMode, track_modules
from samestep.randomness.replacements import HANDLERS
from samestep.randomness.row_hashes import OF_NO_SAMPLE
from samestep.trees import tensors_in, tree_map_only


class _RecordedError(ModelError):
    """Random numbers have been recorded, and need not be drawn."""


def _on_one_device(given: Any) -> Any:
    """Return the arguments of a call, with masks of the host moved to the meta device of the other tensors.

    Whole numbers stay where they are: recurrent layers take the sizes of a packed sequence on the host.
    """
    held = tensors_in(given)
    if len({tensor.is_meta for tensor in held}) < 2:
        return given
    of_masks = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta") if tensor.dtype in of_masks else tensor, given)


class MaskRecorder(DropoutMode):
    """A mode that records the shape of each draw, and leaves the forward unchanged."""

    def __init__(self, model: nn.Module, num_samples: int, placing: Placing | None) -> None:
        track_modules(model)
        super().__init__(model, Draw(0, 0, torch.zeros(num_samples, dtype=torch.int64)))
        self.masks: list[MaskSpec] = []
        self.shapes: dict[DrawKey, tuple[int, ...]] = {}
        """Shape of each draw, for all samples."""
        self.num_samples = num_samples
        self._placing = placing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        num_recorded = len(self.masks)
        if handler is not None:
            # A step raises its own errors, so none is raised here; nor may a trace of costs see what is only tried here.
            unseen = disable_current_modes() if self._placing is None else nullcontext()
            with suppress(ModelError), unseen, torch.no_grad():
                given, named = _on_one_device((args, kwargs or {}))
                handler(self, func, *given, **{**named, **({"inplace": False} if named.get("inplace") else {})})
        outcome = func(*args, **(kwargs or {}))
        if self._placing is not None and func in DRAWS and len(self.masks) > num_recorded:
            self._placing.place(outcome, self.masks[-1].rows)
        return outcome

    def _enter_module(self, name: str) -> None:
        """Begin anew with each forward of the whole model: a trace that needs values runs it again."""
        if not name and len(self._frames) == 1:
            self._entries.clear()
            self.masks.clear()
            self.shapes.clear()
        super()._enter_module(name)

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Record a mask, and return one that has no values."""
        self._record(self._next_draw(), x, shape)
        return torch.empty(shape, dtype=torch.bool, device=x.device)

    def drop_elements(self, x: Tensor, p: float, what: str, *, inplace: bool) -> Tensor | None:
        """Let the mask be asked of `drop`."""
        return None

    def drop_weights(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DroppedWeights:
        """Record a mask, and return one whose parts have no values."""
        drop = self.drop(x, shape, p, what)
        return DroppedWeights(p, lambda start, stop, num_keys: drop[..., start:stop, :num_keys])

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Record random numbers; the function that draws them goes on to make them itself."""
        self._record(self._next_numbers(), like, shape)
        raise _RecordedError

    def _record(self, draw: DrawKey, like: Tensor | None, shape: Sequence[int]) -> None:
        """Record a draw of this shape, which has the sample dimension of the tensor that it is modelled on."""
        self.shapes[draw] = tuple(shape)
        rows: tuple[int, int] | None = IN_ORDER
        if self._placing is not None:
            rows = (OF_NO_SAMPLE, 0) if like is None else self._placing.rows_of(like)
            rows = rows if rows is None or rows[0] < len(shape) else None  # of a mask of channels
            if rows is not None and rows[0] == OF_NO_SAMPLE:
                rows = (self._dim_by_shape(draw), 0)
        dim = 0 if rows is None else rows[0]
        each = tuple(shape)
        if shape and dim != OF_NO_SAMPLE:
            each = (*shape[:dim], shape[dim] // self.num_samples, *shape[dim + 1 :])
        owner, entry, index = draw
        self.masks.append(MaskSpec(owner=owner, entry=entry, draw=index, shape=each, rows=rows))

    def _dim_by_shape(self, draw: DrawKey) -> int:
        """Return the dimension of a draw that grows with the number of samples, if there is one.

        `torch.rand(len(x), 1)` depends on no sample's values, but its shape, beside that for another number, tells.
        """
        fewer, shape = self._placing.fewer if self._placing else self, self.shapes[draw]
        other = fewer.shapes.get(draw, ())
        differs = [dim for dim, (a, b) in enumerate(zip(other, shape, strict=False)) if a != b]
        if len(other) != len(shape) or len(differs) != 1:
            return OF_NO_SAMPLE
        grows = other[differs[0]] * self.num_samples == shape[differs[0]] * fewer.num_samples
        return differs[0] if grows else OF_NO_SAMPLE


@dataclass(frozen=True, slots=True)
class Placing:
    """The places of samples in tensors, as far as a traced forward of several samples knows them."""

    rows_of: RowsOf
    place: Place
    fewer: MaskRecorder
    """The draws of a forward of fewer samples."""


@contextmanager
def record_masks(model: nn.Module, num_samples: int = 1, placing: Placing | None = None) -> Iterator[MaskRecorder]:
    """Record every mask and tensor of random numbers that a forward of `num_samples` samples draws inside."""
    mode = MaskRecorder(model, num_samples, placing)
    with mode:
        yield mode
