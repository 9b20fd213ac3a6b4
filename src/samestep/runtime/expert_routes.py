"""The experts chosen for each token, recorded in one forward and replayed in another.

A router takes the k largest of its scores. Where two scores are nearly equal, one rounding sends a token to another expert,
and everything after it differs by far more than a rounding; in bf16 every batch has such tokens. Nothing is wrong then, but
nothing can be compared either. So a proof in the job's own precision replays the choices of one device, weighted by the
layout's own scores; that a layout chooses right is proven in float64 before, where scores are not that close. So does a
sample that is run again during training (`guards/canary.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.runtime.randomness.masks import MaskSlice
from samestep.runtime.randomness.mode import Draw, DropoutMode

Routes = dict[tuple[str, int, int, int], np.ndarray[Any, np.dtype[np.int16]]]
"""The chosen experts, int16 [tokens, k], by (module, index of its call, index of the choice in that call, sample)."""

_CHOOSING = (torch.topk, Tensor.topk)


class RouteMode(DropoutMode):
    """A dropout mode that also replays the choices in `routes`, or records them there: by default while it is empty."""

    sees_all = True

    def __init__(
        self,
        model: nn.Module,
        draw: Draw,
        part: MaskSlice | None,
        routes: Routes,
        slice_index: int,
        replays: bool | None = None,
    ) -> None:
        super().__init__(model, draw, part)
        self._routes = routes
        self._replays = bool(routes) if replays is None else replays
        self._slice_index = slice_index

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CHOOSING:
            return self._chosen(func, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _chosen(self, func: Callable[..., Any], scores: Tensor, k: int, dim: int = -1, **named: Any) -> Any:
        """Return the top k of scores [tokens of all samples, experts] along the last dimension, recorded or replayed."""
        frame, samples = self._frames[-1], self._draw.samples.tolist()
        if scores.dim() != 2 or dim not in (-1, 1) or len(scores) % len(samples):
            return func(scores, k, dim, **named)
        place = (frame.name, frame.entry, frame.num_choices)
        frame.num_choices += 1
        if not self._replays:
            found = func(scores, k, dim, **named)
            for sample, picks in zip(samples, found.indices.view(len(samples), -1, k), strict=True):
                self._routes[*place, sample] = picks.cpu().numpy().astype(np.int16)
            return found
        noted = torch.from_numpy(np.stack([self._routes[*place, sample] for sample in samples]))
        parts = noted.shape[1] * len(samples) // len(scores)
        mine = noted.chunk(parts, dim=1)[self._slice_index if parts > 1 else 0]
        picks = mine.reshape(-1, k).to(scores.device, torch.int64)
        return torch.return_types.topk((scores.gather(1, picks), picks))
