"""Models whose weights follow those of another model of the same run: teachers and target networks.

Behind each step t, with w the weights of a trained model and m those of the one that follows it, which is frozen,

    m = d m + (1 - d) w          d a number, or a function of the step, counted from 0

Both models have the same weights by name, and a layout cuts them alike, so that each rank averages the parts that it holds and sends
nothing (Tarvainen and Valpola 2017, arXiv:1703.01780; He et al. 2020, arXiv:1911.05722).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout

Decay = float | Callable[[int], float]
Following = Mapping[str, tuple[str, Decay]]
"""The model that each one follows by name, and the decay."""


@dataclass(frozen=True, slots=True)
class ModelAverages:
    """The models of a run that follow others."""

    following: Following = field(default_factory=dict)

    def check(self, layout: Layout, job: Job) -> None:
        """Refuse a layout or a precision in which the models cannot be averaged where they are.

        Raises:
            LayoutError: it is one.
        """
        name = next(iter(self.following), "")
        if not name:
            return
        if layout.pp > 1:
            raise LayoutError(
                f"ema: {name} follows a model whose weights may be on other stages (pp={layout.pp}): pp=1 works"
            )
        if job.numerics.precision not in ("float32", "float64"):
            raise LayoutError(
                f"ema: {name} is frozen, so it has no master weights, and {job.numerics.precision} would round away what a step moves "
                'it by: numerics.precision = "float32" works'
            )
        if job.numerics.exchange_every > 1:
            raise LayoutError(
                f"ema: {name} follows a model that replicas train apart: numerics.exchange_every = 1 works"
            )

    @torch.no_grad()
    def follow(self, module: nn.Module, step: int) -> None:
        """Move each model that follows another towards it, after a step counted from 0.

        Raises:
            LayoutError: a rank holds other parts of the two.
        """
        for name, (source, decay) in self.following.items():
            share = 1.0 - (decay(step) if callable(decay) else decay)
            weights = dict(module.get_submodule(source).named_parameters())
            for key, average in module.get_submodule(name).named_parameters():
                if average.shape != weights[key].shape:
                    raise LayoutError(
                        f"ema: a rank holds {list(average.shape)} of {name}.{key} and {list(weights[key].shape)} of {source}.{key}: tp=1 works"
                    )
                average.lerp_(weights[key], share)
