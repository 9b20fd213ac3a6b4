"""Quantiles of gamma and Poisson distributions, which torch lacks: with them a draw is a function of one uniform number.

The quantile x of Gamma(a) at u is found by Newton's method on t = log x, in float64 and with a fixed number of turns, so that it is
the same whatever else is drawn:

    log P(a, e^t) = log u          concave in t, since the logarithm of a gamma variable has a log-concave density
    t = (log u + log Gamma(a + 1)) / a        at first, below a = 1: exact for small x
    x = a (1 - 1/(9 a) + z / (3 sqrt(a)))^3   at first, else (Wilson and Hilferty 1931), z the normal quantile at u

A Dirichlet variable is the softmax of logarithms of gamma variables, so none of it is lost where a is small. The gradient of a draw
is that of the quantile (implicit reparametrisation, Figurnov, Mohamed and Mnih 2018), by torch's own functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_TURNS = 24
_TURNS_OF_COUNTS = 48
"""Halvings of the range of a Poisson variable: as many as whole numbers in float64 may need."""


def log_gamma_quantile(shape: Tensor, centred: Tensor) -> Tensor:
    """Return the logarithm of the quantile of Gamma(shape) at u = (1 + centred) / 2, in float64."""
    a, v = shape.double(), centred.double()
    log_u = ((v + 1.0) * 0.5).log()
    small = (log_u + torch.lgamma(a + 1.0)) / a
    z = torch.erfinv(v) * math.sqrt(2.0)
    cube = (1.0 - 1.0 / (9.0 * a) + z / (3.0 * a.sqrt())).clamp_min(1e-2)
    t = torch.where(a < 1.0, small, a.log() + 3.0 * cube.log())
    for _ in range(_TURNS):
        x = t.exp()
        p = torch.special.gammainc(a, x)
        slope = (a * t - x - torch.lgamma(a)).exp() / p
        step = ((log_u - p.log()) / slope).clamp(-1.0, 1.0)
        t = t + torch.where(torch.isfinite(step) & (p > 0), step, 0.0)  # P(a, x) is 0 only where the start is exact
    return t


class Gamma(torch.autograd.Function):
    """A draw of Gamma(shape), with the gradient of its quantile."""

    @staticmethod
    def forward(ctx: Any, shape: Tensor, centred: Tensor) -> Tensor:
        """Return the draw, at least the smallest normal number of its dtype, as torch does."""
        found = log_gamma_quantile(shape, centred).exp().to(shape.dtype).clamp_min(torch.finfo(shape.dtype).tiny)
        ctx.save_for_backward(shape, found)
        return found

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        """Return the gradient of the shape."""
        shape, found = ctx.saved_tensors
        wide = torch.promote_types(shape.dtype, torch.float32)
        return above[0] * torch._standard_gamma_grad(shape.to(wide), found.to(wide)).to(shape.dtype), None


def dirichlet(concentration: Tensor, centred: Tensor) -> Tensor:
    """Return a draw of Dirichlet(concentration) [.., K]."""
    return log_gamma_quantile(concentration, centred).softmax(-1).to(concentration.dtype)


def poisson_quantile(rate: Tensor, centred: Tensor) -> Tensor:
    """Return the least k with P(X <= k) >= u = (1 + centred) / 2 for X of Poisson(rate), in float64."""
    mean, u = rate.double(), (centred.double() + 1.0) * 0.5
    low = torch.full_like(mean, -1.0)
    high = (mean + 12.0 * mean.sqrt() + 40.0).ceil()
    for _ in range(_TURNS_OF_COUNTS):
        middle = ((low + high) * 0.5).floor()
        reaches = torch.special.gammaincc(middle + 1.0, mean) >= u
        moves = (middle > low) & (middle < high)
        high = torch.where(moves & reaches, middle, high)
        low = torch.where(moves & ~reaches, middle, low)
    return high
