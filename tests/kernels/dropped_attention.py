"""Our kernels of attention with dropout are the float64 formula with the same masks. Run by `tests/unit/test_kernels.py` in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from samestep.building.attention import AttentionSpec, fused
from samestep.building.attention.carriers import Asked, carrier_of
from samestep.building.attention.formula import Gradients, Sum, attend_by_formula
from samestep.building.attention.fused import attend_dropped, fits_dropped_flash
from samestep.kernels import flash_launches
from samestep.program.ring_visits import SlicePlacement
from samestep.randomness.masks import MaskCuts
from samestep.randomness.mode import Draw, DropoutMode
from samestep.runtime.axes.context import ring_attention
from samestep.runtime.axes.context.ring_attention import Ring, RingForm

LIMITS = {torch.float32: 3e-6, torch.float16: 6e-3, torch.bfloat16: 4e-2}
SAMPLES = torch.tensor([5, 2**40 + 3])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16, so that a short attention has several of them."""
    blocks = flash_launches._Blocks(16, 16, 4, 1)
    for table in ("_HALF", "_FULL"):
        monkeypatch.setattr(flash_launches, table, {256: flash_launches._Sizes(blocks, blocks, blocks)})


class Counted(nn.Module):
    """A module whose forward asks for the masks of two attentions."""

    def forward(self, query: Tensor, shape: torch.Size, p: float) -> list[Any]:
        return [source().drop_weights(query, shape, p, "attention") for _ in range(2)]


def source() -> DropoutMode:
    return ACTIVE[-1]


ACTIVE: list[DropoutMode] = []


def drawn(samples: int, shape: tuple[int, ...], p: float, cuts: MaskCuts = ()) -> Any:
    """The second mask of a forward for weights of a shape, of which a rank may have a part."""
    return both(samples, shape, p, cuts)[1]


def both(
    samples: int, shape: tuple[int, ...], p: float, cuts: MaskCuts = (), model: nn.Module | None = None
) -> list[Any]:
    model = model or Counted()
    part: Any = SimpleNamespace(cuts=lambda mask, shape: cuts) if cuts else None
    with DropoutMode(model, Draw(3, 1, SAMPLES[:samples]), part) as mode:
        ACTIVE.append(mode)
        dropped = model(torch.ones(1), torch.Size((samples, *shape)), p)
        ACTIVE.pop()
    return dropped


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def given(samples: int, heads: tuple[int, int], lengths: tuple[int, int], widths: tuple[int, int]) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    shapes = [(heads[0], lengths[0], widths[0]), (heads[1], lengths[1], widths[0]), (heads[1], lengths[1], widths[1])]
    shapes.append((heads[0], lengths[0], widths[1]))
    # As code has them: the heads of a token side by side.
    return [
        numbers(samples, length, some, width, seed=seed).transpose(1, 2)
        for seed, (some, length, width) in enumerate(shapes)
    ]


def with_gradients(attend: Any, tensors: list[Tensor], spec: AttentionSpec, dtype: torch.dtype) -> list[Tensor]:
    leaves = [one.to(dtype).requires_grad_() for one in tensors[:3]]
    output = attend(*leaves, spec)
    output.backward(tensors[3].to(dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def compare(mine: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    for ours, other in zip(mine, theirs, strict=True):
        most = other[other.isfinite()].abs().max()
        seen = other.isfinite()
        assert torch.equal(ours.isfinite(), seen)
        assert (ours.double() - other)[seen].abs().max() < LIMITS[dtype] * max(float(most), 1.0)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 13, [0] * 17 + [1]])
FORMS: dict[str, tuple[dict[str, Any], Any, float, torch.dtype]] = {
    "causal, shared heads": ({"causal": True}, (2, (2, 1), (18, 18), (5, 5)), 0.1, torch.float32),
    "of all": ({"scale": 0.3}, (1, (1, 1), (18, 37), (16, 20)), 0.5, torch.float32),
    "documents": ({"causal": True, "documents": DOCUMENTS}, (2, (1, 1), (18, 18), (8, 8)), 0.3, torch.float32),
    "padding": ({"mask": (torch.arange(17) < torch.tensor([[17], [9]]))[:, None, None]}, (2, (2, 2), (9, 17), (4, 4)), 0.3, torch.float32),
    "bias and blind rows": ({"mask": numbers(2, 18, 18, seed=9).float().masked_fill(torch.arange(18)[:, None] < 2, -torch.inf), "causal": True}, (1, (2, 2), (18, 18), (8, 8)), 0.3, torch.float32),
    "more keys than queries": ({"causal": True}, (1, (2, 1), (7, 20), (8, 8)), 0.1, torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_kernels_are_the_formula(name: str) -> None:
    form, (samples, heads, lengths, widths), p, dtype = FORMS[name]
    tensors = given(samples, heads, lengths, widths)
    spec = AttentionSpec(**form, dropout=drawn(samples, (heads[0], *lengths), p))
    query, key, value = (one.to(dtype) for one in tensors[:3])
    assert fits_dropped_flash(query, key, value, spec)
    found = with_gradients(attend_dropped, tensors, spec, dtype)
    mask = spec.mask
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.double()
    theirs = with_gradients(attend_by_formula, tensors, spec.but(mask=mask), torch.float64)
    compare(found, theirs, dtype)
    assert found[0].transpose(1, 2).is_contiguous()


def test_repetitions_have_equal_bits() -> None:
    tensors = given(1, (2, 1), (18, 18), (8, 8))
    spec = AttentionSpec(causal=True, dropout=drawn(1, (2, 18, 18), 0.3))
    once, again = (with_gradients(attend_dropped, tensors, spec, torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def kept(dropped: Any, heads: int, num_queries: int, num_keys: int, samples: int) -> Tensor:
    """Which weights the kernel keeps: those of the output of equal scores, where each key's value is its own unit vector."""
    query, key = torch.zeros(samples, heads, num_queries, 4), torch.zeros(samples, heads, num_keys, 4)
    value = torch.eye(num_keys).expand(samples, heads, -1, -1)
    return attend_dropped(query, key, value, AttentionSpec(dropout=dropped)) > 0


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5])
def test_the_mask_is_that_of_torch_in_every_bit(p: float) -> None:
    dropped = drawn(2, (2, 18, 21), p)
    assert torch.equal(kept(dropped, 2, 18, 21, 2), ~dropped.part(0, 18, 21))


def test_the_mask_of_a_part_is_that_part() -> None:
    whole = drawn(2, (4, 10, 20), 0.5).part(0, 10, 20)
    mine = kept(drawn(2, (2, 10, 20), 0.5, cuts=((1, 2, 1),)), 2, 10, 20, 2)
    assert torch.equal(mine, ~whole[:, 2:])
    mine = kept(drawn(2, (4, 5, 20), 0.5, cuts=((2, 2, 1),)), 4, 5, 20, 2)
    assert torch.equal(mine, ~whole[:, :, 5:])


def test_later_forwards_hash_the_rows_of_all_masks_at_once_and_no_elements() -> None:
    model, masks = Counted(), []
    for _ in range(3):
        first, dropped = both(2, (2, 9, 20), 0.3, model=model)
        first.hashes()
        hashes = dropped.hashes()
        masks.append(~kept(dropped, 2, 9, 20, 2))
    assert torch.equal(masks[0], masks[2])
    layout = next(iter(DropoutMode(model, Draw(3, 1, SAMPLES))._tracker.known._layouts.values()))[1]
    assert layout is not None
    assert not layout.alike
    assert hashes.halves.untyped_storage().nbytes() == 2 * 2 * 2 * 9 * 8  # of both masks


def around(rank: int, tensors: list[Tensor], spec: AttentionSpec, cuts: MaskCuts, dtype: torch.dtype) -> list[Tensor]:
    """The output and gradients of a rank's queries in a ring of two, whose messages this process has."""
    placement = SlicePlacement.of(tensors[0].shape[2], 2, may_split=False)
    (mine,) = placement.runs(rank)
    assert spec.dropout is not None
    shape = (tensors[0].shape[1], len(mine), tensors[0].shape[2])
    form = spec.but(mask=None, dropout=drawn(2, shape, spec.dropout.p, cuts))
    how = RingForm(Ring(placement, rank, Any, "block"), form, 0.4)
    query, key, value, gradient = (one.to(dtype) for one in tensors)
    query, gradient = query[:, :, mine.start : mine.stop], gradient[:, :, mine.start : mine.stop]
    sums = ring_attention._Softmax.of(query, value)
    parts = {}
    for _, source, seen in how.visits():
        if seen is not None:
            (theirs,) = placement.runs(source)
            keys, values = key[:, :, theirs.start : theirs.stop], value[:, :, theirs.start : theirs.stop]
            parts[source] = seen, (query, keys, values, spec.mask)
            assert fits_dropped_flash(query, keys, values, form.but(mask=spec.mask))
            ring_attention._visit_forward(how, source, *parts[source], sums)
    output, products = sums.output.to(dtype), (gradient * sums.output).sum(-1, keepdim=True)
    into = Gradients(query, key, value, None)
    back = ring_attention._Back(gradient, output, sums.log_sum_exp, products, into)
    of_keys, of_values = torch.zeros_like(key), torch.zeros_like(value)
    for source, (seen, four) in parts.items():
        (theirs,) = placement.runs(source)
        into.of_keys, into.of_values = Sum(four[1]), Sum(four[2])
        ring_attention._visit_backward(how, source, seen, four, back)
        of_keys[:, :, theirs.start : theirs.stop] = into.of_keys.value
        of_values[:, :, theirs.start : theirs.stop] = into.of_values.value
    return [output, into.of_queries.value, of_keys, of_values]


@pytest.mark.parametrize("form", ["causal", "padding"])
def test_visits_of_a_ring_are_the_attention_of_one_device(form: str) -> None:
    tensors = given(2, (2, 1), (24, 24), (8, 8))
    mask = (torch.arange(24) < torch.tensor([[24], [15]]))[:, None, None] if form == "padding" else None
    spec = AttentionSpec(causal=form == "causal", mask=mask, scale=0.4, dropout=drawn(2, (2, 24, 24), 0.3))
    whole = with_gradients(attend_by_formula, tensors, spec, torch.float64)
    ranks = [around(rank, tensors, spec, ((2, 2, rank),), torch.float32) for rank in range(2)]
    joined = [torch.cat([tensors[index] for tensors in ranks], 2) for index in range(2)]
    compare([*joined, *(ranks[0][index] + ranks[1][index] for index in (2, 3))], whole, torch.float32)


def test_products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interpreter that multiplies numbers of bfloat16, which Triton's takes for integers: no job runs them so."""
    plain = InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        import triton.language as tl

        def wide(x: Any) -> Any:
            if x.dtype.scalar is not tl.bfloat16:
                return x
            return TensorHandle(_convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32)

        return plain(self, wide(a), wide(b), *rest)

    tensors = given(1, (2, 1), (18, 18), (8, 8))
    spec = AttentionSpec(causal=True, dropout=drawn(1, (2, 18, 18), 0.3))
    halves = [one.bfloat16() for one in tensors]
    query, key, value = halves[:3]
    assert carrier_of(Asked(query, key, value, spec)).name == "formula"
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    found = with_gradients(attend_dropped, tensors, spec, torch.bfloat16)
    compare(
        found,
        with_gradients(attend_by_formula, [half.double() for half in halves], spec, torch.float64),
        torch.bfloat16,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_that_differ_from_the_formula_on_a_device_do_not_run(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    assert fused.agrees.__wrapped__(device, torch.float32, (16, 24), causal)
    backward = flash_launches.backward
    monkeypatch.setattr(flash_launches, "backward", lambda *given: (*backward(*given)[:2], torch.zeros(2, 2, 40, 24)))
    assert not fused.agrees.__wrapped__(device, torch.float32, (16, 24), causal)
    monkeypatch.setattr(flash_launches, "forward", lambda *given: 1 / 0)
    assert not fused.agrees.__wrapped__(device, torch.float32, (16, 24), causal)
