"""How far layouts may part where numbers are rounded: as far as one device does that starts off by one rounding.

The bound is derived, not tuned: what separates two layouts is the order of sums and the shapes of matrix products,
roundings of the compute dtype. So eight runs on one device are perturbed by one rounding of every weight, and a layout
may deviate by 8 times the largest of their deviations, in every loss, norm, gradient and weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from samestep.datasets import Dataset, batches
from samestep.job import Job
from samestep.runtime.run import Run
from tests.laboratory import Observed, assert_ledger, clipped, follow, make_run, observe, on_ranks, whole
from tests.models import Tokens

EPS = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}
NUM_PERTURBED, ALLOWANCE = 8, 8.0

Limits = dict[str, float]
"""The most by which each loss, norm, gradient and weight may differ."""


def nudged(run: Run, dataset: Dataset, job: Job, draw: int) -> Observed:
    """One device, every weight off by one rounding of the compute dtype, up or down."""
    run.prepare(next(batches(dataset, job)).samples([0]))
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for piece in run.updater.pieces:
            signs = torch.randint(0, 2, piece.value.shape, generator=generator) * 2 - 1
            piece.set_master(piece.master() * (1 + signs * EPS[job.numerics.precision] / 2))
    run.updater.live.publish()
    return follow(run, dataset, job)


def deviations(ranks: list[Observed], reference: Observed) -> Limits:
    """The largest difference in each loss, norm, gradient and weight."""
    found: Limits = {}
    for kind in ("losses", "norms"):
        for step, expected in enumerate(getattr(reference, kind)):
            found[f"{kind} {step}"] = max(abs(getattr(seen, kind)[step] - expected) for seen in ranks)
    cuts = {name: cut for seen in ranks for name, cut in seen.cuts.items()}
    indices = [seen.index for seen in ranks]
    pairs = [
        (f"gradient {step} ", [seen.gradients[step] for seen in ranks], g) for step, g in enumerate(reference.gradients)
    ]
    for kind, ours, theirs in (*pairs, ("weight ", [seen.weights for seen in ranks], reference.weights)):
        candidate, expected = whole(ours, cuts, indices), whole([theirs])
        assert candidate.keys() == expected.keys()
        found |= {kind + name: float((candidate[name] - expected[name]).abs().max()) for name in expected}
    return found


def allowed(open_run: Callable[[], Run], dataset: Dataset, job: Job) -> tuple[Observed, Limits]:
    """What one device computes, and how far a layout may be from it."""
    reference = follow(open_run(), dataset, job)
    seen = [deviations([nudged(open_run(), dataset, job, draw)], reference) for draw in range(NUM_PERTURBED)]
    return reference, {key: ALLOWANCE * max(one[key] for one in seen) for key in seen[0]}


def assert_within(ranks: list[Observed], bound: tuple[Observed, Limits]) -> None:
    """No loss, norm, gradient or weight deviates by more than it may."""
    reference, limits = bound
    for key, found in deviations(ranks, reference).items():
        assert found <= limits[key], f"{key}: {found:.1e}, allowed {limits[key]:.1e}"


@functools.cache
def _allowed(model: str, precision: str) -> tuple[Observed, Limits]:
    job = clipped(precision)
    return allowed(functools.partial(make_run, 0, 1, model, "dp=1", job), Tokens(), job)


def prove(layout: str, model: str, precision: str, device: str = "cpu") -> None:
    """Hold the ranks of a layout against one device in a precision with roundings, and what they sent."""
    ranks = on_ranks(layout, observe, model, clipped(precision), True, device=device)
    assert_within(ranks, _allowed(model, precision))
    assert_ledger(ranks, layout)
