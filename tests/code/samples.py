"""Models whose code does unusual things with the samples of a batch: equal where they keep them apart, else refused by name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import UnprovenError
from tests.code.rows import Equal, Refused, of_cases
from tests.covering import daily
from tests.laboratory import Code
from tests.models import MODELS, VOCABULARY

WIDTH = 8


class Language(nn.Module):
    """Embedding, something in between, head: [B, T] tokens to [B, T, V] logits."""

    def __init__(self, between: Callable[[Language, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.drop = nn.Dropout(0.4)
        self.between = between

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.between(self, self.embed(input_ids)))


def groups_of_four(net: Language, x: Tensor) -> Tensor:
    """Takes no fewer than four samples, so that one is not traced alone."""
    groups = x.view(-1, 4, *x.shape[1:])
    return net.mix(x) - groups.mean(1, keepdim=True).expand_as(groups).reshape(x.shape)


def every_second(net: Language, x: Tensor) -> Tensor:
    """Code that takes two samples at least, and gives both the features of the first."""
    assert len(x) > 1, "pairs of samples"
    return torch.stack([net.mix(x[::2]), net.other(x[::2])], 1).flatten(0, 1)[: len(x)] + x


def samples_second(net: Language, x: Tensor) -> Tensor:
    return net.drop(torch.tanh(net.mix(x.transpose(0, 1)))).transpose(0, 1)


def two_views(net: Language, x: Tensor) -> Tensor:
    first, second = net.drop(torch.tanh(net.mix(torch.cat([x, -x])))).chunk(2)
    return first - 0.5 * second


def all_tokens_as_rows(net: Language, x: Tensor) -> Tensor:
    return net.drop(net.mix(x.flatten(0, 1)).relu()).view(x.shape)


def tokens_before_samples_as_rows(net: Language, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1).reshape(-1, WIDTH)
    return net.drop(net.mix(rows)).view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1).tanh()


def dropped_weights(net: Language, x: Tensor) -> Tensor:
    return F.linear(x, F.dropout(net.mix.weight, 0.3, net.training)).sin()


def one_after_the_other(net: Language, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(net.mix(sample)) for sample in x])


def experts_by_masks(net: Language, x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    chosen = rows.sum(-1) > 0
    out = torch.zeros_like(rows)
    out[chosen] = net.mix(rows[chosen])
    out[~chosen] = net.other(rows[~chosen])
    return out.view(x.shape)


def experts_by_order(net: Language, x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    order = (rows.sum(-1) > 0).to(torch.int64).argsort(stable=True)
    return torch.zeros_like(rows).index_add(0, order, torch.sin(net.mix(rows[order]))).view(x.shape)


def its_own_last_token(net: Language, x: Tensor) -> Tensor:
    last = torch.full((x.shape[0],), x.shape[1] - 1, device=x.device)
    return net.mix(x) + x[torch.arange(x.shape[0], device=x.device), last][:, None]


def repeated_samples(net: Language, x: Tensor) -> Tensor:
    return torch.tanh(net.mix(x.repeat_interleave(3, 0))).unflatten(0, (-1, 3)).mean(1)


def values_of_a_table(net: Language, x: Tensor) -> Tensor:
    """Look a number up for each sample, in all the ways in which code for diffusion does."""
    table = torch.linspace(0.1, 1.0, 5, device=x.device, dtype=x.dtype)
    chosen = (x.sum((1, 2)) > 0).long() + 2 * (x[:, 0].sum(-1) > 0)
    of_rows = table.expand(len(x), -1).gather(1, chosen[:, None])[:, 0]
    found = table.gather(-1, chosen) * torch.take(table, chosen) + table.take_along_dim(chosen, 0) * of_rows
    return net.mix(x) * (found + table.index_select(0, chosen) * table[chosen])[:, None, None]


def minus_the_batch(net: Language, x: Tensor) -> Tensor:
    return net.mix(x) - x.mean(0, keepdim=True)


def the_first_sample_is_kept(net: Language, x: Tensor) -> Tensor:
    net.seen = x.detach()[0].square()  # to be looked at, and not to be computed with
    return net.mix(x).relu()


def other_code_for_the_second_half(net: Language, x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([torch.tanh(net.mix(x[:half])), torch.sin(net.mix(x[half:]))])


def the_first_sample_is_cleared(net: Language, x: Tensor) -> Tensor:
    x = net.mix(x)
    x[0] = 0.0
    return x


APART = [
    samples_second, two_views, all_tokens_as_rows, tokens_before_samples_as_rows, dropped_weights, one_after_the_other,
    experts_by_masks, experts_by_order, its_own_last_token, repeated_samples, the_first_sample_is_kept, values_of_a_table,
]  # fmt: skip
COUPLED = {
    minus_the_batch: "mean", other_code_for_the_second_half: "tanh|addmm", the_first_sample_is_cleared: "copy_|fill_",
}  # fmt: skip


# -- what no rule shows, but real values do ----------------------------------------------------------

torch.library.define("samestep_tests::centred", "(Tensor x) -> Tensor")
torch.library.impl("samestep_tests::centred", "CompositeExplicitAutograd", lambda x: x - x.mean(0, keepdim=True))
torch.library.define("samestep_tests::doubled", "(Tensor x) -> Tensor")
torch.library.impl("samestep_tests::doubled", "CompositeExplicitAutograd", lambda x: x * 2)


def an_operation_without_a_rule(net: Language, x: Tensor) -> Tensor:
    return net.mix(x) + torch.ops.samestep_tests.doubled(x.detach())


def one_that_mixes(net: Language, x: Tensor) -> Tensor:
    return net.mix(x) + torch.ops.samestep_tests.centred(x.detach())


def a_branch_on_a_value(net: Language, x: Tensor) -> Tensor:
    return net.mix(x) if float(x.detach().abs().max()) < 1e6 else net.other(x)


def a_count_of_samples(net: Language, x: Tensor) -> Tensor:
    return net.mix(x) * torch.linspace(1.0, 2.0, x.shape[0], device=x.device, dtype=x.dtype)[:, None, None]


class Function(torch.autograd.Function):
    """Its forward takes each sample by itself, and so does its backward for a limit of infinity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm() / ctx.limit), None


class WithAuxiliary(torch.autograd.Function):
    """Adds a loss of its own to whatever the model is trained with, by its gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones((), dtype=gradient.dtype)


def a_backward_of_each(net: Language, x: Tensor) -> Tensor:
    return Function.apply(net.mix(x), float("inf"))


def a_backward_of_all(net: Language, x: Tensor) -> Tensor:
    return Function.apply(net.mix(x), 1.0)


def a_loss_by_its_gradient(net: Language, x: Tensor) -> Tensor:
    return WithAuxiliary.apply(net.mix(x), net.other(x).square().mean())


class Rounded(torch.autograd.Function):
    """Signs of a weight, and its own gradient (a straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def a_weight_of_signs(net: Language, x: Tensor) -> Tensor:
    return F.linear(x, Rounded.apply(net.mix.weight)).tanh()


def a_weight_with_a_normed_gradient(net: Language, x: Tensor) -> Tensor:
    return F.linear(x, Function.apply(net.mix.weight, 1.0)).tanh()


def a_weight_with_a_clamped_gradient(net: Language, x: Tensor) -> Tensor:
    weight = net.mix.weight * 1.0
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return F.linear(x, weight).tanh()


# -- numbers of all samples at which code looks --------------------------------------------------------


def a_branch_near_a_value(net: Language, x: Tensor) -> Tensor:
    return net.mix(x) if x.detach().abs().max() < 1.0 else net.other(x)


def a_fixed_point(net: Language, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(20):
        z, before = torch.tanh(0.2 * net.mix(z) + x), z
        if (z - before).detach().norm() < 1e-3:
            break
    return z


def until_no_one_moves(net: Language, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(20):
        z, before = torch.tanh(0.2 * net.mix(z) + x), z
        if not ((z - before).detach().norm(dim=-1) > 1e-2).any():
            break
    return z


def a_check_of_values(net: Language, x: Tensor) -> Tensor:
    assert x.detach().abs().max() < 10.0, "values are near one"
    assert not torch.isnan(x).any()
    assert x.detach().sum().isfinite()
    return net.mix(x).sin()


def a_number_that_is_noted(net: Language, x: Tensor) -> Tensor:
    net.noted = float(x.detach().abs().max())
    return net.mix(x).sin()


def samples_until_all_are_done(net: Language, x: Tensor) -> Tensor:
    done = torch.zeros(len(x), 1, 1, dtype=torch.bool, device=x.device)
    for _ in range(8):
        x = torch.where(done, x, x + 0.5 * torch.tanh(net.mix(x)))
        done = done | (x.detach().abs().amax((1, 2), keepdim=True) > 1.5)
        if done.all():
            break
    return x


def a_short_way_for_all(net: Language, x: Tensor) -> Tensor:
    is_small = x.detach().abs() < 2.0
    return net.mix(x) if is_small.all() else torch.where(is_small, net.mix(x), net.mix(x).clamp(max=9.0))


def those_that_are_picked(net: Language, x: Tensor) -> Tensor:
    x, picked = net.mix(x), x.detach().mean((1, 2)) > 1.0
    return x.index_put((picked,), net.other(x[picked])) if picked.any() else x


ACTING = {
    a_branch_near_a_value: "max", a_fixed_point: "norm", until_no_one_moves: "any",
}  # fmt: skip
TRIED = [
    an_operation_without_a_rule, a_branch_on_a_value, a_backward_of_each, a_weight_of_signs,
    a_check_of_values, a_number_that_is_noted, samples_until_all_are_done, a_short_way_for_all, those_that_are_picked,
]  # fmt: skip
FOUND = [a_count_of_samples]
MIXING = {
    one_that_mixes: "centred",
    a_backward_of_all: "Function",
    a_loss_by_its_gradient: "WithAuxiliary",
    a_weight_with_a_normed_gradient: "Function",
    a_weight_with_a_clamped_gradient: "a hook on a gradient",
}
PARTS = (*APART, *COUPLED, *TRIED, *FOUND, *MIXING, *ACTING)
PARTS = (*PARTS, groups_of_four, every_second)
MODELS |= {f"between {part.__name__}": Code(functools.partial(Language, part)) for part in PARTS}
LAYOUTS = ["dp=2", "dp=1 microbatch=1", "dp=2 zero=3 microbatch=2"]


def _in_turn(parts: list[Callable[..., Tensor]]) -> list[Any]:
    return daily((layout, part.__name__) for layout, part in itertools.product(LAYOUTS, parts))


EQUAL = [
    *of_cases("between ", _in_turn(APART)),
    *of_cases("between ", _in_turn(TRIED)),
    *(Equal("dp=1 microbatch=8", f"between {name}") for name in ("minus_the_batch", "groups_of_four", "every_second")),
]
INFLUENCE = "lets the samples of a batch influence each other by"
REFUSED = [
    *(
        Refused("dp=2", f"between {part.__name__}", rf"{INFLUENCE} \w*({words}).*Use one rank with microbatch=8")
        for part, words in COUPLED.items()
    ),
    *(Refused("dp=2", f"between {part.__name__}", rf"{INFLUENCE} .*{words}") for part, words in MIXING.items()),
    Refused("dp=2", "between groups_of_four", rf"{INFLUENCE} .*Use one rank with microbatch=8"),
    *(
        Refused(
            "dp=2",
            f"between {part.__name__}",
            rf"{INFLUENCE} \w*{words}\w*, and its code acts on the (number|answer) for all of them \(tests/[^ ]+:\d+\)",
        )
        for part, words in ACTING.items()
    ),
    *(
        Refused(
            row.layout, row.code, r"samples influence each other|deviates", UnprovenError, is_nightly=row.is_nightly
        )
        for row in of_cases("between ", _in_turn(FOUND))
    ),
]
