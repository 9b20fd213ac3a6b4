"""The inputs of a search for the cause of a difference: both sides' observations, and runs on one device that it may
request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from samestep.proof.comparison import Comparison, Misfit
from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import Observation
from samestep.proof.verdict import Cause

CLOSE = 1e-6
"""The largest relative difference of coefficients and ratios that count as equal; they come from rounded sums."""
Found = tuple[Cause, str]
"""A cause, and its explanation in one sentence with names and numbers."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The loss and gradients of one micro-batch of one data rank, computed on one device as sums, not means."""

    dp_index: int
    microbatch: int
    """The index of the micro-batch on its data rank, counted from 0."""
    gradients: Mapping[str, Tensor]
    """The sum of the gradients over counted tokens, by parameter."""
    loss: float
    """The sum of the losses of counted tokens."""
    count: float
    """The number of counted tokens."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All inputs of the search for a cause: both sides' observations, and runs that it may request."""

    reference: Observation
    ranks: Sequence[Observation]
    comparisons: Sequence[Comparison]
    layers: Mapping[str, int]
    """The index of the layer of each parameter, in the order of the forward."""
    aliases: Mapping[str, tuple[str, ...]]
    """The other names of each tied weight, by parameter."""
    dropout: Callable[[str], bool]
    """Return whether the module at a path applies dropout."""
    weighted: Callable[[str], bool]
    """Return whether the module at a path has parameters."""
    draws: Mapping[str, bool]
    """Whether a module, by its path, draws random numbers other than masks of dropout."""
    positional: Callable[[str], bool]
    """Return whether the output of the module at a path depends on positions alone, as known of the model's family."""
    boundaries: Sequence[tuple[str, ...]]
    """The modules of the first layer of each pipeline chunk but the first."""
    collectives: Callable[[str], str]
    """Describe the collectives that the program sends for a module, bucket or unit."""
    parts: Callable[[int], Sequence[BatchPart]]
    """Compute the parts of a step on one device; steps count from 0."""
    uses: Callable[[str, int], Sequence[Tensor]]
    """Compute the gradient of each single use of a tied weight in a step; steps count from 0."""
    chunks: Callable[[str, int], Sequence[Tensor]]
    """Compute the gradient of a weight from each chunk of the loss in a step; empty where the loss has no chunks."""
    stages: Sequence[Set[str]]
    """The parameters of each pipeline stage; empty without a pipeline."""
    experts: Callable[[str], tuple[int, str]]
    """Return how many experts a parameter holds along its first dimension, and as text the index of its expert where
    it belongs to one alone; (0, "") where it belongs to none."""
    clips: bool
    """Whether the job clips gradients."""
    balances: bool
    """Whether the job adds a loss that balances experts; a single part of a batch has none."""


def held_part(evidence: Evidence, misfit: Misfit, of: Callable[[Observation], Sequence[HeldTensor]]) -> HeldTensor:
    """Return the held part of a misfit's tensor on the misfit's rank."""
    seen = next(one for one in evidence.ranks if one.rank == misfit.rank)
    return next(held for held in of(seen) if held.name == misfit.name)


def numbers(values: Iterable[float]) -> str:
    """Return numbers as text, the smallest first."""
    return ", ".join(f"{value:.6g}" for value in sorted(values))
