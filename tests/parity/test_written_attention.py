"""Attentions that blocks write out, in many spellings, are exchanged between ranks of cp: equal to one device, ledger included."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from samestep import Job, parallelize
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.models.spec import with_attentions
from samestep.models.written_attention import MadeMask
from tests.laboratory import clipped, code_of, make_run, prove, source_of
from tests.models import MODELS
from tests.parity.written_models import HEADS, LENGTH, SPELLINGS, Spelled, Written, heads_first
from tests.pool import pool

WITHOUT_DROPOUT = ("grouped", "by_hand", "everything")
for name, spelling in SPELLINGS.items():
    drops, shared = 0.0 if name in WITHOUT_DROPOUT else 0.2, 2 if name in ("grouped", "repeated") else HEADS
    MODELS[f"written {name}"] = functools.partial(Written, spelling, drops, shared)

MODELS["written heads first"] = functools.partial(Written, heads_first, 0.2, HEADS)

ROWS = [
    ("cp=2", "flattened"),
    ("cp=2 zero=3 recompute=full", "sunk"),
    ("cp=2 exchange=ring recompute=selective", "repeated"),
    ("cp=2 exchange=ring microbatch=2", "summed"),
    ("tp=2 cp=2", "nano"),
    ("pp=2 cp=2 microbatch=2", "einsums"),
    ("cp=4 exchange=hybrid zero=1", "keys_masked"),
]
REST = [
    (layout, name)
    for layout in ("cp=2", "cp=2 exchange=ring recompute=full", "cp=4 exchange=hybrid", "tp=2 cp=2 zero=2")
    for name in SPELLINGS
    if (layout, name) != ("cp=4 exchange=hybrid", "one_head")  # groups that exchange heads need several of them
]


@pytest.mark.parametrize(
    ("layout", "model"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.nightly) for row in REST if row not in ROWS)],
)
def test_attentions_in_any_spelling_compute_what_one_device_computes(layout: str, model: str) -> None:
    prove(layout, f"written {model}")


def heads_first_steps(rank: int, world: int) -> str:
    run = make_run(rank, world, "written heads first", "cp=2", clipped())
    try:
        run.step(next(batches(code_of("written heads first").data(), run.job)))
    except LayoutError as error:
        return str(error)
    return ""


def test_dropout_of_weights_with_heads_first_goes_by_a_ring_and_says_so() -> None:
    prove("cp=2 exchange=ring", "written heads first")
    for text in pool(2).run(heads_first_steps):
        assert "the first dimension must hold the" in text
        assert "exchange=ring works" in text


CAUSAL = (MadeMask(causal=True),)
RULES = {
    "nano": CAUSAL,
    "one_head": CAUSAL,
    "flattened": CAUSAL,
    "einsums": CAUSAL,
    "grouped": CAUSAL,
    "repeated": (MadeMask(causal=True, window=3),),
    "added": (None,),
    "sunk": (None,),
    "summed": (MadeMask(by_key=True), MadeMask(causal=True)),
    "by_hand": CAUSAL,
    "keys_masked": (MadeMask(by_key=True),),
    "everything": (),
}


@pytest.mark.parametrize("model", SPELLINGS)
def test_attentions_are_found_by_their_formula(model: str) -> None:
    prepared = source_of(f"written {model}", Layout.parse("cp=2"), clipped()).prepared
    assert prepared is not None
    spec = with_attentions(prepared.spec)
    blocks = [layer for layer in spec.layers if layer.is_block]
    for layer in blocks:
        ((_, found),) = layer.written
        assert [one.masks for one in found] == [RULES[model]] * (HEADS if model == "one_head" else 1)
        assert not layer.gathered_parts
        assert not any(product.factors == "pair" for product in layer.products)
        assert len(layer.exchanges) == 4 * len(found)
    assert [layer.exchanges for layer in prepared.spec.layers if layer.is_block] == [()] * len(blocks)


def test_a_window_wider_than_a_slice_is_found_in_the_whole_sequence() -> None:
    prepared = source_of("written repeated", Layout.parse("cp=4"), clipped()).prepared
    assert prepared is not None
    assert not prepared.spec.slice_refusal
    found = [dict(layer.written) for layer in with_attentions(prepared.spec).layers if layer.is_block]
    assert [one.masks for block in found for calls in block.values() for one in calls] == [RULES["repeated"]] * len(
        found
    )


def read(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Weights that are used for something else, too."""
    weights = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1)
    return (weights @ v.transpose(1, 2)).transpose(1, 2) * weights.amax((1, 2, 3))[:, None, None, None]


def between_heads(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """An attention between the heads of a token, which mixes no tokens."""
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def of_samples(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A mask of known values that depends on the sample, made for the tokens at hand."""
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    hidden = self.tril[: q.shape[1], : q.shape[1]] + self.seen[: q.shape[1], None]
    return (scores.masked_fill(hidden == 0, float("-inf")).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def doubled(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scores that are the second operand of a sum, with a factor."""
    hidden = torch.full((q.shape[1], q.shape[1]), float("-inf"), dtype=q.dtype).triu(1)
    scores = torch.add(hidden, q.transpose(1, 2) @ k.permute(0, 2, 3, 1), alpha=2)
    return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def rounded(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scores that are divided and rounded."""
    scores = torch.div(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), 0.1, rounding_mode="floor")
    return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def raised(self: Spelled, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """A number in the place of hidden scores that a division raises, so that they count."""
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    scores = scores.masked_fill(self.tril[: q.shape[1], : q.shape[1]] == 0, -1e4) / 4000.0
    return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


class Mixing(nn.Module):
    """Products of the tokens of a sample with learnt weights, which every rank computes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, LENGTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x + self.weight[:length, :length].expand(len(x), -1, -1) @ x


class MixedFirst(Spelled):
    def __init__(self) -> None:
        super().__init__(SPELLINGS["nano"], 0.0, HEADS)
        self.mixing = Mixing()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.mixing(x), mask)


class Mixed(Written):
    def __init__(self) -> None:
        super().__init__(SPELLINGS["nano"])
        self.blocks = nn.ModuleList(MixedFirst() for _ in range(2))


class OfSamples(Written):
    def forward(self, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            block.seen = (input_ids[0] > 100).to(torch.float64)
        return super().forward(input_ids)


MODELS |= {
    "written read": lambda: Written(read),
    "written between_heads": lambda: Written(between_heads),
    "written of_samples": lambda: OfSamples(of_samples),
    "written doubled": lambda: Written(doubled),
    "written rounded": lambda: Written(rounded),
    "written raised": lambda: Written(raised),
    "written mixed": Mixed,
}


def test_products_of_parts_that_see_all_tokens_are_not_counted() -> None:
    prove("cp=2", "written mixed")


def two_lengths(rank: int, world: int) -> str:
    """Return why a second batch is refused that is longer than the traced one, which a window of its length would not show."""
    job = Job(train={"global_batch": 2, "steps": 2}, numerics={"precision": "float64"}, run={"device": "cpu"})
    build, optimizer = MODELS["written nano"], functools.partial(torch.optim.SGD, lr=0.1)
    run = parallelize(build, "cross_entropy", optimizer, layout="cp=2", job=job)
    first, second = (torch.arange(2 * length).view(2, length) % 7 for length in (6, 12))
    run.step((first, first))
    with pytest.raises(LayoutError) as refusal:
        run.step((second, second))
    return str(refusal.value)


def test_a_mask_that_the_traced_length_does_not_show_is_refused() -> None:
    for words in pool(2).run(two_lengths):
        assert words.startswith("blocks.0 makes a mask of the tokens that it sees, and the traced sample of 6 tokens")


@pytest.mark.parametrize("model", ["read", "between_heads", "of_samples", "doubled", "rounded", "raised"])
def test_what_is_no_attention_of_tokens_is_computed_as_written(model: str) -> None:
    prepared = source_of(f"written {model}", Layout.parse("cp=2"), clipped()).prepared
    assert prepared is not None
    assert prepared.spec.attending == ()
    if model == "between_heads":
        assert not prepared.spec.slice_refusal
        assert not any(layer.gathered_parts for layer in prepared.spec.layers)
    else:
        assert prepared.spec.slice_refusal


def test_scores_that_are_read_are_computed_as_written() -> None:
    """Materialised scores have the bits of the code without an interception."""
    from samestep.building.attention.interception import Intercepting, KnownFormulas, as_fused
    from samestep.models.written_attention import WrittenAttention

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)

    def code() -> Tensor:
        scores = q @ k.transpose(-1, -2) / 2
        scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        weights = nn.functional.softmax(scores, -1)
        return weights.cumsum(-1) + scores.exp().sum(-1, keepdim=True)

    formulas = KnownFormulas(
        {"": (WrittenAttention(number=1, tokens=(-2, -1), masks=(MadeMask(causal=True),)),)}, as_fused, 2
    )
    formulas.enter("")
    with Intercepting(formulas):
        found = code()
    assert torch.equal(found, code())
