"""Every carrier of attention is the float64 formula: outputs and gradients, for generated forms, heads, lengths and dtypes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.building.attention import AttentionSpec, DroppedWeights, carriers, formula, fused
from samestep.building.attention.carriers import CARRIERS, Asked, carrier_of
from samestep.randomness.mode import Draw, DropoutMode

LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 6e-2}
P = 0.3


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def written_out(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """The formula with all scores, in float64, by torch's own autograd."""
    times, length, num_keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    assert times
    scores = query @ key.transpose(-2, -1) * (spec.scale if spec.scale is not None else query.shape[-1] ** -0.5)
    if spec.mask is not None and spec.mask.dtype is not torch.bool:
        scores = scores + spec.mask
    distance = torch.arange(length)[:, None] - torch.arange(num_keys)
    seen = torch.ones(1, 1, length, num_keys, dtype=torch.bool)
    if spec.causal:
        seen = seen & (distance >= 0)
    if spec.documents is not None:
        seen = seen & (spec.documents[:, None, :, None] == spec.documents[:, None, None, :])
    if spec.mask is not None and spec.mask.dtype is torch.bool:
        seen = seen & spec.mask
    scores = scores.masked_fill(~seen, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if spec.dropout is not None:
        weights = weights.masked_fill(spec.dropout.part(0, length, num_keys), 0.0) / (1 - spec.dropout.p)
    return weights @ value


@st.composite
def forms(draw: Any) -> tuple[list[Tensor], AttentionSpec]:
    samples, heads, times = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3]))
    length, width = draw(st.integers(1, 9)), draw(st.sampled_from([2, 8]))
    is_square = draw(st.booleans())
    num_keys = length if is_square else draw(st.integers(1, 9))
    wide = draw(st.sampled_from([width, 4]))
    shapes = [(heads * times, length, width), (heads, num_keys, width), (heads, num_keys, wide)]
    tensors = [drawn(samples, *shape, seed=index) for index, shape in enumerate(shapes)]
    documents = None
    if is_square and draw(st.booleans()):
        documents = torch.tensor([[token // draw(st.integers(1, 4)) for token in range(length)]]).cummax(1).values
        documents = documents.expand(samples, -1).contiguous()
    mask = draw(st.sampled_from(["", "", "bool", "bias", "keys"]))
    kinds = {
        "bool": drawn(samples, 1, length, num_keys, seed=5) > -0.5,
        "bias": drawn(heads * times, length, num_keys, seed=6),
        "keys": drawn(samples, 1, 1, num_keys, seed=7) > -0.5,
    }
    drop = drawn(samples, heads * times, length, num_keys, seed=8) > 0.5
    dropout = DroppedWeights(P, lambda start, stop, count: drop[..., start:stop, :count])
    return tensors, AttentionSpec(
        causal=documents is not None or draw(st.booleans()),
        documents=documents,
        scale=draw(st.sampled_from([None, 0.3])),
        dropout=dropout if draw(st.booleans()) else None,
        mask=kinds.get(mask),
    )


def with_gradients(function: Any, tensors: list[Tensor], spec: AttentionSpec, dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of all that takes any."""
    leaves = [one.detach().clone().to(dtype).requires_grad_() for one in tensors]
    extra: dict[str, Tensor] = {}
    if spec.mask is not None and spec.mask.is_floating_point():
        extra["mask"] = spec.mask.detach().clone().to(dtype).requires_grad_()
    output = function(*leaves, spec.but(**extra))
    weights = drawn(*output.shape, seed=11)
    (output.double() * weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in (*leaves, *extra.values()))]


def compare(mine: list[Tensor], theirs: list[Tensor], limit: float) -> None:
    for ours, other in zip(mine, theirs, strict=True):
        if ours.numel():
            torch.testing.assert_close(ours.double(), other, rtol=limit, atol=limit)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(forms(), st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]), st.booleans())
def test_every_carrier_is_the_formula(form: Any, dtype: torch.dtype, few: bool) -> None:
    tensors, spec = form
    before = formula.BLOCK_ELEMENTS, formula.LEAST_QUERIES, formula.KEPT_ELEMENTS
    if few:
        formula.BLOCK_ELEMENTS, formula.LEAST_QUERIES, formula.KEPT_ELEMENTS = 1, 2, 0
    try:
        compare(
            with_gradients(formula.attend_by_formula, tensors, spec, dtype),
            with_gradients(written_out, tensors, spec, torch.float64),
            LIMITS[dtype],
        )
        for carrier in CARRIERS:
            if dtype is torch.float64 and carrier.fits(Asked(*tensors, spec)):
                run = lambda *of, carrier=carrier: carrier.run(Asked(*of))  # noqa: E731
                found = with_gradients(run, tensors, spec, dtype)
                compare(found, with_gradients(written_out, tensors, spec, dtype), 1e-9)
    finally:
        formula.BLOCK_ELEMENTS, formula.LEAST_QUERIES, formula.KEPT_ELEMENTS = before


class Calls(TorchDispatchMode):
    """Counts the operations of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Attentions one after another; torch's own dropout where no mode computes masks."""

    def __init__(self, number: int = 8) -> None:
        super().__init__()
        self.number = number

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for _ in range(self.number):
            query = F.scaled_dot_product_attention(query, key, value, dropout_p=P, is_causal=True)
        return query


def test_dropout_of_a_small_attention_calls_no_more_operations_than_torchs_own() -> None:
    tensors = [drawn(1, 2, 8, 4, seed=index).float().requires_grad_() for index in range(3)]
    model = Layers()

    def calls(mode: AbstractContextManager[Any]) -> int:
        with Calls() as seen:
            with mode:
                output = model(*tensors)
            output.sum().backward()
        return seen.count

    def ours() -> int:
        return calls(DropoutMode(model, Draw(1, 0, torch.zeros(1, dtype=torch.int64))))

    ours()  # what later steps find ready is made
    assert ours() <= calls(nullcontext())


def test_a_forward_of_one_small_attention_hashes_its_mask_in_few_operations() -> None:
    """What a forward does once, beside its attentions, was half of its operations."""
    tensors = [drawn(1, 2, 8, 4, seed=index).float().requires_grad_() for index in range(3)]
    model = Layers(1)

    def forward() -> int:
        with Calls() as seen, DropoutMode(model, Draw(1, 0, torch.zeros(1, dtype=torch.int64))):
            model(*tensors)
        return seen.count

    with Calls() as theirs:
        model(*tensors)
    counts = [forward() for _ in range(3)]  # the second one lays out what the third hashes at once
    assert counts[2] <= 1.5 * theirs.count


def test_documents_on_gpus_of_variable_length_have_their_offsets_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float) -> Any:
        """The formula in place of torch's kernel, which CPUs do not have."""
        seen.append((offsets.tolist(), longest))
        documents = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())[None]
        spec = AttentionSpec(True, documents, scale)
        output = formula.attend_by_formula(*(tensor.transpose(0, 1)[None] for tensor in (q, k, v)), spec)
        return output[0].transpose(0, 1)

    monkeypatch.setattr(fused, "variable_length", kernel)
    tensors = [drawn(2, heads, 7, 8, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    spec = AttentionSpec(True, documents, lengths=[[3, 2, 2], [1, 6]])
    found = with_gradients(fused.attend_by_length, tensors, spec, torch.float64)
    compare(found, with_gradients(written_out, tensors, spec, torch.float64), 1e-9)
    assert seen == [([0, 3, 5, 7, 8, 14], 6)]


def test_documents_of_gpus_take_one_kernel_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(device: str, dtype: torch.dtype, **form: Any) -> str:
        fields = {
            "is_cuda": device == "cuda",
            "device": torch.device(device),
            "dtype": dtype,
            "shape": torch.Size((2, 4, 7, 8)),
        }
        query: Any = SimpleNamespace(**fields)
        spec = AttentionSpec(True, documents=documents, **form)
        return carrier_of(Asked(query, query, query, spec)).name

    documents, lengths = torch.zeros(2, 7, dtype=torch.int64), [[7], [7]]
    for has, found in ((True, "variable length"), (False, "by documents")):
        monkeypatch.setattr(carriers, "has_variable_length", lambda has=has: has)
        assert name("cuda", torch.bfloat16, lengths=lengths) == found
        assert name("cuda", torch.float32, lengths=lengths) == "by documents"
        assert name("cuda", torch.bfloat16) == "torch"  # with the dense mask, since the host knows no lengths
        assert name("cpu", torch.bfloat16) == "by documents"
