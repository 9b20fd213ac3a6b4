"""The prover of independence: what it claims of a forward holds for every value, and what is independent it does not refuse.

Programs of random operations run twice: on the meta device, followed by the prover, and on real values, of which one
sample at a time is changed. The second run is the truth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from samestep.independence.operation_trial import LARGEST, Given, RowsAlong, try_apart, try_sums
from samestep.independence.row_rules import DECLARED, independent
from samestep.independence.samples import NUM_SAMPLES, Findings, examine
from samestep.models.spec import ExpertModules

NO_EXPERTS = ExpertModules({}, ())
Step = Callable[[Tensor], Tensor]

torch.library.define("samestep_tests::twice", "(Tensor x) -> Tensor")
torch.library.impl("samestep_tests::twice", "CompositeExplicitAutograd", lambda x: x * 2)


def _per_dim(name: str, step: Callable[[Tensor, int], Tensor]) -> list[tuple[str, Step]]:
    """Return an operation along each of the first three dimensions, or the last one of tensors with fewer."""
    return [(f"{name} {dim}", lambda t, dim=dim: step(t, min(dim, t.dim() - 1))) for dim in range(3)]


def _halves(t: Tensor, dim: int) -> Tensor:
    if t.shape[dim] % 2:
        return t
    first, second = t.chunk(2, dim)
    return first - 2 * second


def _written_back(t: Tensor) -> Tensor:
    mask = t.flatten(1).sum(1) > 0
    out = t.clone()
    out[mask] = torch.tanh(t[mask])
    return out


def _written_by_the_next(t: Tensor) -> Tensor:
    mask = t.flatten(1).sum(1) > 0
    out = t.clone()
    out[mask.roll(1, 0)] = 0
    return out


def _tokens_of_experts(t: Tensor) -> Tensor:
    """Picked by a mask of tokens that is laid flat, and added by the mask itself to what begins with zeros."""
    out = torch.zeros_like(t)
    if t.dim() < 3:
        return out + t
    for mask in (t.sum(-1) > 0, t.sum(-1) <= 0):
        picked = t.flatten(0, 1)[mask.view(-1)]
        out[mask] += torch.tanh(picked)
    return out


def _tokens_laid_flat(t: Tensor) -> Tensor:
    """Picked by a mask of tokens, and written by the mask laid flat."""
    if t.dim() < 3:
        return t.clone()
    mask, out = t.sum(-1) > 0, t.clone()
    out.view(-1, t.shape[-1])[mask.view(-1)] = torch.tanh(t[mask])
    return out


def _tokens_of_the_next(t: Tensor) -> Tensor:
    """Picked by a mask of tokens, and written by that of the next sample, which has as many."""
    if t.dim() < 3:
        return t.roll(1, 0)
    mask, out = torch.arange(t.shape[1], device=t.device) < t.sum((1, 2), keepdim=True)[..., 0].sign() + 2, t.clone()
    out[mask.roll(1, 0)] = t[mask]
    return out


def _of_the_best(t: Tensor) -> Tensor:
    best = t.flatten(1).sum(1).topk(min(2, t.shape[0])).indices
    return t.index_add(0, best, torch.sin(t.index_select(0, best)))


def _by_number(t: Tensor) -> Tensor:
    """Index as a mask of packed documents is: one index counts the samples, the other one picks."""
    samples = torch.arange(t.shape[0], device=t.device).view(-1, *[1] * (t.dim() - 1))
    return t if t.dim() < 2 else t[samples, torch.arange(t.shape[1] - 1, -1, -1, device=t.device)]


def _by_other_numbers(t: Tensor) -> Tensor:
    """Pick another feature for each sample."""
    numbers = torch.arange(t.shape[0], device=t.device)
    return t if t.dim() < 2 else t[numbers, numbers % t.shape[1]].unsqueeze(1)


def _added_back(t: Tensor) -> Tensor:
    flat = t.reshape(-1, t.shape[-1])
    (places,) = torch.where(flat.sum(-1) > 0)
    return torch.zeros_like(flat).index_add_(0, places, torch.sin(flat[places])).view(t.shape)


def _sorted_and_back(t: Tensor) -> Tensor:
    flat = t.reshape(-1, t.shape[-1])
    order = flat.sum(-1).argsort()
    out = torch.empty_like(flat)
    out[order] = torch.tanh(flat[order])
    return out.view(t.shape)


def _in_parts(t: Tensor, dim: int) -> Tensor:
    out = torch.zeros_like(t)
    for at in range(t.shape[dim]):
        out.select(dim, at).copy_(torch.sin(t.select(dim, at)))
    return out


STEPS: dict[str, Step] = dict(
    [
        *_per_dim("mean", lambda t, d: t + t.mean(d, keepdim=True)),
        *_per_dim("softmax", lambda t, d: t + t.softmax(d)),
        *_per_dim("cumsum", lambda t, d: t.cumsum(d)),
        *_per_dim("largest", lambda t, d: t - t.amax(d, keepdim=True) * 0.5),
        *_per_dim("sort", lambda t, d: t.sort(d).values),
        *_per_dim("best", lambda t, d: t + t.gather(d, t.argmax(d, keepdim=True))),
        *_per_dim("roll", lambda t, d: t + 0.5 * t.roll(1, d)),
        *_per_dim("roll away", lambda t, d: t.roll(1, d)),
        *_per_dim("flip", lambda t, d: t.flip(d)),
        *_per_dim("halves", _halves),
        *_per_dim("cat", lambda t, d: torch.cat([t, -0.5 * t], d)),
        *_per_dim("cat of rolled", lambda t, d: torch.cat([t, t.roll(1, d)], d)),
        *_per_dim("stack", lambda t, d: torch.stack([t, t.sin()], d).sum(d)),
        *_per_dim("stack of selected", lambda t, d: torch.stack([row.sin() for row in t.unbind(d)], d)),
        *_per_dim("writing in parts", _in_parts),
        *_per_dim("first", lambda t, d: t * t.narrow(d, 0, 1)),
        *_per_dim("repeat_interleave", lambda t, d: t.repeat_interleave(2, d)),
        *_per_dim("drop the first", lambda t, d: t.narrow(d, 1, t.shape[d] - 1) if t.shape[d] > 2 else t),
        *_per_dim("index", lambda t, d: t.index_select(d, torch.arange(t.shape[d], device=t.device))),
        *_per_dim("swap", lambda t, d: t.transpose(0, d)),
        ("swap and copy", lambda t: t.transpose(0, 1).contiguous() if t.dim() > 1 else t),
        ("flatten", lambda t: t.flatten(0, 1) if t.dim() > 1 else t),
        ("flatten the end", lambda t: t.flatten(1) if t.dim() > 1 else t),
        ("samples first again", lambda t: t.reshape(NUM_SAMPLES, -1, t.shape[-1]) if t.numel() % (4 * t.shape[-1]) == 0 else t),
        ("in two groups", lambda t: t.reshape(2, -1, t.shape[-1]) if t.numel() % (2 * t.shape[-1]) == 0 else t),
        ("linear", lambda t: t @ torch.ones(t.shape[-1], 4, device=t.device, dtype=t.dtype).tril()),
        ("self product", lambda t: t @ t.mT if t.dim() > 1 else t),
        ("norm of features", lambda t: F.layer_norm(t, t.shape[-1:])),
        ("statistics of a channel", lambda t: _normalised(t) if t.dim() in (2, 3) else t),
        ("statistics of a sample", lambda t: F.instance_norm(t) if t.dim() == 3 and t.shape[-1] > 1 else t),
        ("convolution", lambda t: F.conv1d(t, torch.ones(2, t.shape[1], 1, device=t.device, dtype=t.dtype)) if t.dim() == 3 else t),
        ("pooling", lambda t: F.avg_pool1d(t, 2) if t.dim() == 3 and t.shape[-1] > 1 else t),
        ("mask and write", _written_back),
        ("mask and write into the next", _written_by_the_next),
        ("mask tokens laid flat and add", _tokens_of_experts),
        ("mask tokens and write laid flat", _tokens_laid_flat),
        ("mask tokens and write into the next", _tokens_of_the_next),
        ("add to the best", _of_the_best),
        ("each by its number", _by_number),
        ("numbers of its own", _by_other_numbers),
        ("lower triangle", lambda t: t.tril() if t.dim() > 1 else t),
        ("places and add", _added_back),
        ("order and back", _sorted_and_back),
        ("a number of all", lambda t: t * t.sum()),
        ("an operation without a rule", lambda t: torch.ops.samestep_tests.twice(t)),
    ]
)  # fmt: skip


RESTORING = {
    "mask and write",
    "mask tokens laid flat and add",
    "mask tokens and write laid flat",
    "places and add",
    "order and back",
}
"""Steps in an order that depends on all samples, and has no effect in the end."""
CHOOSING = {"mask and write into the next", "mask tokens and write into the next", "add to the best"}
"""Steps in which another sample's values choose, which few of its values show."""


class Program(nn.Module):
    """Applies steps one after the other."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.scale = nn.Parameter(torch.ones((), device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = STEPS[name](x)
        return x * self.scale


def _findings(program: Program) -> Findings:
    value_of = {"scale": torch.ones(())}.__getitem__
    sample = (torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(7)), torch.zeros(1))
    return examine(program, sample, _first, NO_EXPERTS, value_of, keeps_all=True)


def _first(outputs: Tensor, _: object) -> Tensor:
    return outputs.sum()


def _truth(program: Program) -> bool | None:
    """Return whether splitting the batch changes nothing; None if the program does not run on a part of it."""
    program.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    x = torch.randn(NUM_SAMPLES, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = program(x)
    for sample in range(NUM_SAMPLES):
        changed = x.clone()
        changed[sample] += torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(sample))
        difference = program(changed) != whole
        rows = [dim for dim in range(whole.dim()) if whole.shape[dim] % NUM_SAMPLES == 0]
        if not any(_stays(difference, dim, sample) for dim in rows):
            return False
    return True


def _stays(difference: Tensor, dim: int, sample: int) -> bool:
    """Return whether all differences are in the rows of one sample, merged with others in any way."""
    where = difference.movedim(dim, 0).flatten(1).any(1)
    for inner in range(1, len(where) + 1):
        if len(where) % (inner * NUM_SAMPLES) == 0:
            places = torch.arange(len(where)) // inner % NUM_SAMPLES == sample
            if not (where & ~places).any():
                return True
    return False


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_claims_hold_for_every_value(names: list[str]) -> None:
    found = _findings(Program(*names))
    try:
        truth = _truth(Program(*names))
    except (RuntimeError, IndexError, ValueError):
        return
    if not found.refusal and not found.tried:
        assert truth, f"{names} is claimed to be independent"
    if truth and not set(names) & (RESTORING | CHOOSING):
        assert not found.refusal, f"{names} is refused: {found.refusal}"


def _normalised(t: Tensor) -> Tensor:
    """Batch norm by the operation itself, which no layout replaces."""
    return torch.native_batch_norm(t, None, None, None, None, True, 0.1, 1e-5)[0]


LEGAL = {
    "samples second": ["swap and copy", "linear", "norm of features", "swap 1"],
    "merged with tokens": ["flatten", "linear", "samples first again"],
    "two views": ["cat 0", "linear", "halves 0"],
    "mixing tokens": ["cumsum 1", "mean 1", "softmax 1", "roll 1", "sort 1", "self product"],
    "tokens with views": ["cat of rolled 1", "halves 1"],
    "each sample by itself": ["stack of selected 0", "writing in parts 0"],
    "packed documents": ["each by its number", "norm of features"],
    "experts by masks": ["mask and write", "places and add"],
    "experts of tokens": ["mask tokens laid flat and add", "linear", "mask tokens and write laid flat", "mean 1"],
    "images": ["statistics of a sample", "convolution", "pooling"],
}
MIXING = {
    "the mean of the batch": (["mean 0"], "mean"),
    "its statistics": (["statistics of a channel"], "batch_norm"),
    "no places by its statistics": (["statistics of a channel", "places and add"], "batch_norm"),
    "the next sample": (["roll 0"], "add"),
    "a running sum": (["cumsum 0"], "cumsum"),
    "through merged tokens": (["flatten", "softmax 0"], "softmax"),
    "through swapped dimensions": (["swap 1", "mean 1"], "mean"),
    "the largest of all": (["largest 0"], "amax"),
    "a product of samples": (["swap 1", "self product", "linear"], "bmm"),
    "the sum of all": (["a number of all"], "sum"),
    "the next sample's mask": (["mask and write into the next"], "index_put"),
    "the best samples": (["add to the best"], "topk"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_independent_programs_are_proven(name: str) -> None:
    assert _findings(Program(*LEGAL[name])) == Findings()


def test_an_index_that_differs_between_samples_is_listed() -> None:
    assert _findings(Program("numbers of its own")).tried == (
        "the model itself, which uses a constant with a row for each sample",
    )


def test_batch_norm_takes_groups_of_samples_where_they_are_the_rows() -> None:
    def normed(t: Tensor) -> Tensor:
        return F.batch_norm(t, None, None, training=True)

    def samples_as_channels(t: Tensor) -> Tensor:
        return normed(t.transpose(0, 1)).transpose(0, 1)

    STEPS["batch norm"], STEPS["batch norm of each sample"] = normed, samples_as_channels
    try:
        assert _findings(Program("batch norm")).batch_norms == {"": 1}
        assert not _findings(Program("batch norm")).refusal
        assert _findings(Program("batch norm of each sample")) == Findings()
        assert "batch_norm" in _findings(Program("batch norm", "batch norm of each sample")).refusal
        assert _findings(Program("cat 0", "batch norm", "halves 0")).batch_norms == {"": 2}  # two views of each sample
    finally:
        del STEPS["batch norm"], STEPS["batch norm of each sample"]


def _one_by_one(t: Tensor, first: Callable[[Tensor], Tensor] = torch.sin) -> Tensor:
    out = torch.empty_like(t)
    for at in range(len(t)):
        out[at] = (first if at == 0 else torch.sin)(t[at])
    return out


def _some_left_out(t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    out[2:] = t.tanh()[2:]
    return out


ALIKE = {
    "in chunks": lambda t: torch.cat([part.tanh() for part in t.chunk(2)]),
    "in uneven chunks": lambda t: torch.cat([t[:1].tanh(), t[1:].tanh()]),
    "one by one": _one_by_one,
    "two views of each": lambda t: torch.cat([t.tanh(), t.sin()]),
    "padded, and cut again": lambda t: torch.cat([t, torch.zeros_like(t[:2])]).tanh()[:NUM_SAMPLES],
}
APART = {
    "the first in another way": (lambda t: torch.cat([t[:1].tanh(), t[1:]]), "tanh"),
    "the first of another tensor": (lambda t: torch.cat([t.tanh()[:1], t[1:]]), "tanh"),
    "zeros for the first": (lambda t: torch.cat([torch.zeros_like(t[:1]), t.tanh()[1:]]), "tanh"),
    "one by one, the first in another way": (functools.partial(_one_by_one, first=torch.cos), "cos"),
    "some left out": (_some_left_out, "tanh"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_samples_may_be_computed_apart_if_all_are_computed_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "apart", ALIKE[name])
    assert _findings(Program("apart")) == Findings()


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_computed_otherwise_than_others_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, operation = APART[name]
    monkeypatch.setitem(STEPS, "apart", step)
    assert f"by {operation}, which computes some samples otherwise" in _findings(Program("apart", "linear")).refusal


@pytest.mark.parametrize("name", MIXING)
def test_mixing_programs_are_refused_with_the_operation(name: str) -> None:
    names, operation = MIXING[name]
    assert operation in _findings(Program(*names)).refusal


def test_an_operation_without_a_rule_is_listed_and_one_with_a_stated_rule_is_not() -> None:
    assert _findings(Program("an operation without a rule")).tried == ("the model itself by twice",)
    independent(torch.ops.samestep_tests.twice, along=0)
    try:
        assert _findings(Program("an operation without a rule")) == Findings()
        assert _findings(Program("swap 1", "an operation without a rule")).refusal
    finally:
        DECLARED.clear()


# -- places that the batch names ------------------------------------------------------------------------

NUM_PLACES = 5
"""Places of one sample, as the vertices of a graph, or classes of a batch."""


def _wide(index: Tensor, x: Tensor) -> Tensor:
    return index[:, None].expand(-1, x.shape[1])


BY_PLACES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda table, at, x: table.index_add(0, at, x)[at],
    "index_copy": lambda table, at, x: table.index_copy(0, at, x)[at],
    "index_put": lambda table, at, x: table.index_put((at,), x, accumulate=True)[at],
    "index_put of elements": lambda table, at, x: table.index_put(
        (at[:, None], torch.arange(x.shape[1], device=x.device)), x
    )[at],
    "index_reduce": lambda table, at, x: table.index_reduce(0, at, x, "amax")[at],
    "scatter": lambda table, at, x: table.scatter(0, _wide(at, x), x)[at],
    "scatter_add": lambda table, at, x: table.scatter_add(0, _wide(at, x), x).index_select(0, at),
    "scatter_reduce": lambda table, at, x: table.scatter_reduce(0, _wide(at, x), x, "mean", include_self=False)[at],
    "scatter_add of ones": lambda table, at, x: x / table[:, 0].scatter_add(0, at, torch.ones_like(x[:, 0]))[at, None],
    "bincount": lambda table, at, x: x / torch.bincount(at, minlength=len(table))[at, None],
}
READ_AT_PLACES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, at: x.gather(0, _wide(at, x)),
    "index": lambda x, at: x[at],
    "index_select": lambda x, at: x.index_select(0, at),
}


class ByPlaces(nn.Module):
    """Rows of all samples [samples * places, 4] that read each other at places, or meet there: each sample's own ones, or the same."""

    def __init__(self, name: str, are_shared: bool) -> None:
        super().__init__()
        self.name, self.are_shared = name, are_shared
        self.scale = nn.Parameter(torch.ones((), device="meta"))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        rows, of_each = x.flatten(0, 1) * self.scale, NUM_PLACES * torch.arange(len(x), device=x.device)[:, None]
        at = (places if self.are_shared else places + of_each).flatten()
        if self.name in READ_AT_PLACES:
            return (rows + READ_AT_PLACES[self.name](rows, at)).view(x.shape)
        return BY_PLACES[self.name](rows.new_ones(NUM_PLACES * len(x), x.shape[-1]), at, rows).view(x.shape)


@pytest.mark.parametrize("are_shared", [True, False])
@pytest.mark.parametrize("name", [*BY_PLACES, *READ_AT_PLACES])
def test_samples_that_meet_at_places_which_the_batch_names_are_refused(name: str, are_shared: bool) -> None:
    drawn = torch.Generator().manual_seed(5)
    places = torch.randint(NUM_PLACES, (1, NUM_PLACES), generator=drawn)
    sample = {"x": torch.randn(1, NUM_PLACES, 4, generator=drawn), "places": places}
    value_of = {"scale": torch.ones(())}.__getitem__
    found = examine(ByPlaces(name, are_shared), sample, _first, NO_EXPERTS, value_of, keeps_all=False)
    assert (name.partition(" ")[0] in found.refusal) == are_shared, found


# -- the trial of one operation on drawn values -------------------------------------------------------


class Held(torch.autograd.Function):
    """A product with a weight whose gradient is divided by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).mean(0)


ROWS = RowsAlong(0, 2, 6)
"""Six rows of two elements side by side, and the same once more."""
X = Given((24, 4), torch.float32, True, ROWS)
WEIGHT = Given((4,), torch.float32, True)
PICKS = Given((24, 1), torch.int64, False, ROWS)
TRIALS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "each element": (torch.sin, (X,), "same"),
    "a weight": (torch.mul, (X, WEIGHT), "same"),
    "each row's elements": (lambda x: x - x.unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1), (X,), "same"),
    "the mean of all": (lambda x: x - x.mean(), (X,), "differs"),
    "positions": (lambda x: x + torch.arange(x.shape[0])[:, None], (X,), "differs"),
    "the row before": (lambda x: x.roll(2, 0), (X,), "differs"),
    "a gradient of a weight that is a mean": (Held.apply, (X, WEIGHT), "differs"),
    "a gradient to what depends on all": (torch.mul, (X, replace(WEIGHT, is_mixed=True)), "differs"),
    "noise": (lambda x: x + torch.rand(()), (X,), "fails"),
    "another shape": (lambda x: x @ torch.ones(5, 5), (X,), "fails"),
    "picks that are not known": (lambda x, at: x + x.flatten()[at], (X, PICKS), "fails"),
}  # fmt: skip


class Limited(torch.autograd.Function):
    """Its backward limits the size of each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-500, 500)


SUMS: dict[str, tuple[Callable[..., Any], int | None, str]] = {
    "a product, summed": (lambda x: x.sin() @ x.sin().mT, None, "same"),
    "a limit of elements, summed": (Limited.apply, None, "differs"),
    "a limit of elements, in parts": (Limited.apply, 0, "same"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_trial_adds_up_the_gradients_of_parts(name: str) -> None:
    compute, dim, outcome = SUMS[name]
    assert try_sums(compute, (Given((8, 8), torch.float32, True),), (), [dim]) == outcome


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_holds_parts_against_the_whole(name: str) -> None:
    compute, args, outcome = TRIALS[name]
    before = torch.random.get_rng_state()
    assert try_apart(compute, args, (), [ROWS]) == outcome
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_trial_of_a_large_operation_runs_on_smaller_sizes() -> None:
    sizes: list[torch.Size] = []

    def noted(x: Tensor) -> Tensor:
        sizes.append(x.shape)
        return x.cos()

    rows = RowsAlong(1, 1, 8192)
    assert try_apart(noted, (Given((4, 8192, 4096), torch.bfloat16, True, rows),), (), [rows]) == "same"
    assert sizes[0].numel() <= LARGEST
