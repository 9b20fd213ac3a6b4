"""Which models work on slices of a sequence is found by a trace: what mixes tokens is refused by name, what does not is not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.loss import cross_entropy
from samestep.datasets import Batch
from samestep.examination.examine import Source, examine
from samestep.independence.sliced_shapes import tokens_of
from samestep.layout import Layout
from samestep.models.spec import ModelSpec, from_json, to_json
from tests.laboratory import job_of
from tests.models import EVEN, MODELS, AttentiveBlock, Tokens, hf
from tests.parts import Words


def shown(build: Callable[[], nn.Module]) -> ModelSpec:
    example = Batch(0, [0], Tokens()).samples([0])  # type: ignore[arg-type]
    source = Source(build, cross_entropy, lambda named: torch.optim.SGD([t for _, t in named], lr=0.1))
    return examine(source, job_of(), example, Layout(cp=2)).spec


class Odd(Words):
    """A decoder whose first block is followed by something odd."""

    def __init__(self, odd: Callable[[Tensor], Tensor] | None = None, part: nn.Module | None = None) -> None:
        super().__init__(lambda: OddBlock(odd, part), lambda: OddBlock(None, None), width=16, entries=64)


class OddBlock(AttentiveBlock):
    def __init__(self, odd: Callable[[Tensor], Tensor] | None, part: nn.Module | None) -> None:
        super().__init__(16, 4)
        self.odd, self.part = odd, part

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.odd is None else self.odd(x)
        x = x if self.part is None else self.part(x)
        return super().forward(x)


class Convolution(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(super().forward(x.mT), (2, 0)).mT


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Cycles(Odd):
    """The first turns of the blocks take no gradients, and between them is added what stands before the blocks."""

    def __init__(self, adds_again: bool = True, by_length: int = 0) -> None:
        super().__init__()
        self.adds_again, self.by_length = adds_again, by_length

    def forward(self, input_ids: Tensor) -> Tensor:
        whole = x = self.embed(input_ids)
        with torch.set_grad_enabled(False):
            for block in self.blocks:
                x = block(x + whole) if self.adds_again else block(x)
        for block in self.blocks:
            with torch.set_grad_enabled(x.shape[1] > self.by_length):
                x = block(x + whole)
        return self.head(x)


def with_positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]


def with_positions_written(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., torch.tensor([0, 1])] = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    return x


def with_a_first_token_of_its_own(x: Tensor) -> Tensor:
    return torch.cat([2 * x[:, :1], x[:, 1:]], 1)


def with_a_first_token_cleared(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return x


def with_tokens_by_number(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, torch.tensor([0, 3])] *= 2
    return x


def with_tokens_by_a_mask_of_numbers(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, torch.arange(x.shape[1], device=x.device) < 3] = 0
    return x


def with_a_first_token_of_zeros(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1)


def with_the_first_tokens_left_out(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 2:] = x[:, 2:]
    return out


def written_by_halves_of_two(x: Tensor) -> Tensor:
    out, half = torch.empty_like(x), x.shape[1] // 2
    out[:, :half] = x.tanh()[:, :half]
    out[:, half:] = x.sin()[:, half:]
    return out


def in_chunks(x: Tensor) -> Tensor:
    return torch.cat([part.tanh() for part in x.chunk(2, 1)], 1)


def written_in_chunks(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    half = x.shape[1] // 2
    out[:, :half] = x[:, :half].sin()
    out[:, half:] = x[:, half:].sin()
    return out


def with_memory(x: Tensor) -> Tensor:
    rows = torch.cat([x.new_ones(len(x), 2, 16), x], 1)
    return F.rms_norm(rows, (16,)).square().mean(-1, keepdim=True)[:, 2:] * x


def by_threes(x: Tensor) -> Tensor:
    return x.reshape(-1, 4, 16).softmax(-1).reshape(x.shape)


class Masked(Odd):
    """Makes its mask from the slice, in each block."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            q = x.unflatten(-1, (4, 4)).transpose(1, 2)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            x = block(x) + F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).flatten(2)
        return self.head(x)


class Prompted(Odd):
    """Rows of its own in front of the tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = torch.cat([self.head.weight[:4].expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 4:])


class Pooled(Odd):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).mean(1, keepdim=True).expand(-1, input_ids.shape[1], -1)


class Shifted(Odd):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).roll(1, 1)


MIXING = {
    "a sum over tokens": (functools.partial(Odd, lambda x: x + x.mean(1, keepdim=True)), "blocks.0 mixes tokens by mean"),
    "scores by hand": (functools.partial(Odd, lambda x: (x @ x.mT).softmax(-1) @ x), r"mixes tokens by bmm, .*Use .*scaled_dot_product_attention .*, or none$"),
    "a softmax over tokens": (functools.partial(Odd, lambda x: x.softmax(1)), "blocks.0 mixes tokens by _softmax"),
    "positions of its own": (functools.partial(Odd, with_positions), "blocks.0 counts the tokens of a slice itself"),
    "positions written": (functools.partial(Odd, with_positions_written), "blocks.0 counts the tokens of a slice itself"),
    "a triangle of itself": (functools.partial(Odd, lambda x: x.tril()), "blocks.0 mixes tokens by tril"),
    "a mask of its own": (Masked, "makes its attention mask itself|is not between the tokens"),
    "a first token of its own": (functools.partial(Odd, with_a_first_token_of_its_own), "by mul computes some tokens"),
    "a first token of zeros": (functools.partial(Odd, with_a_first_token_of_zeros), "computes some tokens of a slice"),
    "first tokens left out": (functools.partial(Odd, with_the_first_tokens_left_out), "computes some tokens of a slice"),
    "halves of two tensors": (functools.partial(Odd, written_by_halves_of_two), "by (tanh|sin) computes some tokens of a slice"),
    "tokens by number": (functools.partial(Odd, with_tokens_by_number), "counts the tokens of a slice|mixes tokens by index_put"),
    "tokens by a mask of numbers": (functools.partial(Odd, with_tokens_by_a_mask_of_numbers), "counts the tokens of a slice"),
    "prompts before the blocks": (Prompted, "the blocks are not given a row for each of the 12 tokens of a sample"),
    "tokens of memory": (functools.partial(Odd, with_memory), "blocks.0 joins other rows to the rows of tokens by cat"),
    "chunks of three": (functools.partial(Odd, by_threes), "is given a view that crosses rows of tokens"),
    "a pooled output": (Pooled, "the model itself mixes tokens by mean"),
    "gradients by its length": (functools.partial(Cycles, by_length=8), "computes differently, or with other"),
    "outputs of other rows": (Shifted, "its outputs have no row for each token"),
}  # fmt: skip


GATHERED = {
    "a convolution": (lambda: Odd(part=Convolution(16, 16, 3)), ["blocks.0.part"], "blocks.0.part mixes tokens by convolution"),
    "eager attention": (
        functools.partial(
            hf, "llama", hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, attn_implementation="eager", **EVEN,
        ),
        ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        "mixes tokens by bmm",
    ),
    "a recurrence": (lambda: Odd(part=Recurrent(16, 8, batch_first=True, bidirectional=True)), ["blocks.0.part"], "mixes tokens|not between the tokens of one sequence"),
}  # fmt: skip


@pytest.mark.parametrize("what", MIXING)
def test_what_mixes_tokens_is_refused_by_name(what: str) -> None:
    build, words = MIXING[what]
    refusal = shown(build).slice_refusal
    assert re.search(words, refusal), refusal


@pytest.mark.parametrize("what", GATHERED)
def test_children_of_blocks_that_mix_tokens_are_given_all_of_them(what: str) -> None:
    build, owners, words = GATHERED[what]
    spec = shown(build)
    parts = [part for layer in spec.layers for part in layer.gathered_parts]
    assert spec.slice_refusal == ""
    assert [part.owner for part in parts] == owners
    assert all(re.search(words, part.reason) for part in parts), parts
    assert from_json(to_json(spec)) == spec


def test_names_do_not_decide_which_tensors_have_tokens() -> None:
    tokens = torch.ones(2, 12).long()
    batch = {"weight": torch.ones(2), "x": tokens, "y": tokens, "few": torch.ones(2, 3).long()}
    assert tokens_of(batch).shape == (2, 12)
    assert tokens_of({"x": torch.ones(2, 12, 5), "y": torch.ones(2)}).shape == (2, 12, 5)
    assert tokens_of({"images": torch.ones(2, 3, 8, 8), "labels": torch.ones(2).long()}).dim() == 1


def all_of_it(x: Tensor) -> Tensor:
    """Norms, products, halves, the best of each token, steps written in place, chunks, and constants of every token."""
    x = F.rms_norm(torch.cat([-x[..., 8:], x[..., :8]], -1) * x.sigmoid(), (16,)) + x.amax(-1, True)
    x = x + x.topk(3, -1).values.sum(-1, keepdim=True)
    x = written_in_chunks(in_chunks(x.clone().mul_(2.0).add_(x)))
    return x + torch.ones_like(x) * torch.zeros(x.shape[1], 1)


LOCAL: dict[str, Any] = {
    "the token before": functools.partial(Odd, lambda x: x + x.roll(1, 1)),
    "a first token cleared": functools.partial(Odd, with_a_first_token_cleared),
    "what computes each token by itself": functools.partial(Odd, all_of_it),
    "first turns without gradients": Cycles,
    "blocks alone without gradients": functools.partial(Cycles, adds_again=False),
    **{name: MODELS[name] for name in ("gpt2", "deep_granite", "mixtral_balanced")},
}


@pytest.mark.parametrize("what", LOCAL)
def test_what_works_token_by_token_is_shown_to(what: str) -> None:
    spec = shown(LOCAL[what])
    assert spec.slice_refusal == ""
    assert spec.length == 12
    assert ("[0][0]", 1) in spec.slices
    assert from_json(to_json(spec)) == spec
