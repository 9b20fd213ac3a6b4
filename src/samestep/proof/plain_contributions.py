"""Compressed gradients in the plain torch loop: one whole weight after another, without buckets, ranks or messages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from samestep.program.codecs import CODECS, is_factored
from samestep.program.step import StepSpec
from samestep.runtime.codecs.codec import codec_of
from samestep.runtime.codecs.powersgd import first_directions, next_directions, orthonormalise


class PlainContributions:
    """The gradients of the contributions to each step, and the losses of their codes."""

    def __init__(self, step: StepSpec, canonical: Mapping[str, str]) -> None:
        """Follow the codec of a step; `canonical` gives the name in its model of each weight's name in the loop."""
        self.number = step.sharing.replicas
        self._rank, self._canonical = step.sharing.rank, canonical
        self._blocks = {name: step.sharing.blocks.get(known, 1) for name, known in canonical.items()}
        self._spec = CODECS[step.sharing.codec]
        self._codec = None if self._spec.factors else codec_of(step.sharing.codec)
        self._lost: dict[tuple[str, int], Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._directions: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, index: int, params: Mapping[str, nn.Parameter]) -> None:
        """Add the decoded gradients of one contribution, and clear them."""
        for name, param in params.items():
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            self._sums[name] = self._sums.get(name, 0.0) + self._coded(name, index, gradient)
            param.grad = None

    @torch.no_grad()
    def finish(self, params: Mapping[str, nn.Parameter], count: float) -> None:
        """Set gradients to their decoded sums, divided by the count."""
        for name, param in params.items():
            total = self._sums.pop(name)
            factors = self._rank and is_factored(total.shape, self._rank)
            param.grad = (self._projected(name, total) if factors else self._coded(name, self.number, total)) / count

    def _coded(self, name: str, index: int, gradient: Tensor) -> Tensor:
        """Return a gradient as it is decoded, and keep the loss of its code."""
        if self._codec is None:
            return gradient.detach()
        values = gradient.detach().reshape(1, -1)
        lost = self._lost.setdefault((name, index), torch.zeros_like(values)) if self._spec.feeds_back else None
        size = self._spec.size_bytes(values.numel(), self._blocks[name])
        wire = torch.zeros((1, size), dtype=torch.uint8, device=values.device)
        self._codec.encode(values, self._blocks[name], wire, lost)
        decoded = torch.zeros_like(values)
        self._codec.decode(wire, self._blocks[name], decoded)
        return decoded.view_as(gradient)

    def _projected(self, name: str, total: Tensor) -> Tensor:
        """Return the projection of a sum of contributions, and keep the remainder."""
        whole = total.detach().reshape(len(total), -1) + self._lost.get((name, self.number), 0.0)
        if name not in self._directions:
            drawn = first_directions(self._canonical[name], self._rank, whole.shape[1])
            self._directions[name] = drawn.to(whole)
        left = self._directions[name] @ whole.T
        orthonormalise([left[None]])
        right = left @ whole
        decoded = left.T @ right
        self._lost[name, self.number] = whole - decoded
        next_directions([right[None]], [self._directions[name][None]])
        return decoded.view_as(total)
