"""Gradient codecs, of any values in any blocks: how far a decoded element may lie from what was encoded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samestep.errors import JobError
from samestep.job import Job
from samestep.job_tables import Compression
from samestep.layout import Layout
from samestep.models.decoder_spec import spec
from samestep.models.presets import DECODERS
from samestep.program.buckets import CODED_BUCKETS
from samestep.program.codecs import CODECS
from samestep.program.update_rules import block_of
from samestep.runtime.codecs import int8
from samestep.runtime.codecs.codec import codec_of
from samestep.strategies import program_of

BOUNDS = {"bf16": 2.0**-8, "int8": 1 / 127}
"""Of an element, or of the largest of its block."""
SMALLEST = {"bf16": 1e-38, "int8": 2.0**-126}
"""What is smaller is lost: the smallest number or scale."""
_EXAMPLES = settings(max_examples=25)


def there_and_back(name: str, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """What rows are decoded as, and what was lost."""
    given, lost, codec = values.clone(), torch.zeros_like(values), codec_of(name)
    wire = torch.zeros((len(values), CODECS[name].size_bytes(values.shape[1], block)), dtype=torch.uint8)
    codec.encode(given, block, wire, lost)
    assert given.equal(values) or not given.isfinite().all()
    decoded = torch.zeros_like(values)
    codec.decode(wire, block, decoded)
    return decoded, lost


@st.composite
def gradients(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Rows of blocks of all sizes, between 1e-30 and 1e30, with zeros and outliers."""
    block = draw(st.sampled_from([1, 2, 16, 256]))
    shape = draw(st.integers(1, 3)), block * draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(shape, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    values *= 10.0 ** draw(st.integers(-30, 30))
    values[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    if draw(st.booleans()):
        values[0, draw(st.integers(0, shape[1] - 1))] *= draw(st.sampled_from([1e3, 1e6]))
    return values, block


@_EXAMPLES
@pytest.mark.parametrize("name", BOUNDS)
@given(gradients())
def test_an_element_is_as_near_as_its_codec_says(name: str, drawn: tuple[Tensor, int]) -> None:
    values, block = drawn
    decoded, rest = there_and_back(name, values, block)
    scale = values.view(-1, block).abs().amax(1, keepdim=True).expand(-1, block).reshape(values.shape)
    scale = scale if CODECS[name].block_bytes else values.abs()
    assert ((decoded - values).abs() <= BOUNDS[name] * scale * (1 + 1e-6) + SMALLEST[name]).all()
    if CODECS[name].feeds_back:
        assert torch.equal(rest, values - decoded)


@pytest.mark.parametrize("name", BOUNDS)
def test_zeros_stay_zeros_and_blocks_stay_apart(name: str) -> None:
    values = torch.zeros(2, 64)
    assert torch.equal(there_and_back(name, values, 16)[0], values)
    values[1, 20] = 1e4
    decoded, _ = there_and_back(name, values, 16)
    assert torch.equal(decoded == 0, values == 0)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_and_is_not_fed_back(name: str, bad: float) -> None:
    values = torch.randn(1, 64)
    values[0, 20] = bad
    decoded, rest = there_and_back(name, values, 16)
    is_bad = ~decoded.isfinite()
    assert is_bad[0, 20]
    assert not is_bad[0, :16].any()
    assert not is_bad[0, 32:].any()
    if CODECS[name].feeds_back:
        assert rest.isfinite().all()


@_EXAMPLES
@given(gradients(), st.booleans(), st.sampled_from([0.0, math.inf, math.nan]))
def test_fused_kernels_give_the_same_codes(drawn: tuple[Tensor, int], feeds_back: bool, bad: float) -> None:
    rows = drawn[0].view(-1, drawn[1])
    rows[0, 0] = bad or rows[0, 0]
    usual, fused = (int8._quantise, int8._add_scaled), (int8._quantise_at_once, int8._add_scaled_at_once)
    found = [_codes_of(int8.Kernels(*one), rows, feeds_back) for one in (usual, fused)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["aot_eager", "no_compiler_here"])
def test_compiled_codecs_send_the_same_bytes(backend: str) -> None:
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(no_compiler_here)
    for block, ranks, dtype in ((64, 2, torch.float32), (16, 1, torch.float32)):
        values = torch.randn(ranks, 4 * block, dtype=dtype)
        found = []
        for codec in (codec_of("int8"), codec_of("int8", backend)):
            wire = torch.zeros((ranks, CODECS["int8"].size_bytes(4 * block, block)), dtype=torch.uint8)
            lost, decoded = torch.ones_like(values), torch.ones_like(values)
            codec.encode(values, block, wire, lost)
            codec.decode(wire, block, decoded)
            found.append((wire, lost, decoded))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def no_compiler_here(*_: Any) -> Any:
    raise RuntimeError("no compiler here")


def _codes_of(kernels: int8.Kernels, rows: Tensor, feeds_back: bool) -> tuple[Tensor, ...]:
    """Codes of blocks with finite values, exponents, what was lost, and what they are decoded as, with 7 for nan."""
    lost = 0.25 * rows.nan_to_num(0.0, 0.0, 0.0) if feeds_back else None
    codes, exponents = torch.zeros(rows.shape, dtype=torch.int8), torch.zeros(len(rows), dtype=torch.int8)
    kernels.quantise(rows, lost, codes, exponents)
    decoded = torch.ones_like(rows)
    kernels.add_scaled(decoded, codes, exponents)
    codes.masked_fill_((exponents == 127)[:, None], 0)
    return codes, exponents, torch.zeros(0) if lost is None else lost, decoded.nan_to_num(7.0)


@_EXAMPLES
@given(gradients(), st.integers(-20, 20))
def test_codes_of_twice_a_gradient_are_twice_those_of_it(drawn: tuple[Tensor, int], exponent: int) -> None:
    """So a loss scale, a power of two, changes no code."""
    values, block = drawn
    values = values.clamp(-1e20, 1e20)
    values[values.abs() < 1e-20] = 0.0
    once, scaled = (there_and_back("int8", values * factor, block)[0] for factor in (1.0, 2.0**exponent))
    assert torch.equal(once * 2.0**exponent, scaled)


def test_a_sum_over_steps_loses_nothing() -> None:
    """What codes lose comes back: after many steps the sum of what was decoded is off by one quantisation step."""
    lost, total, sent = torch.zeros(1, 256), torch.zeros(1, 256), torch.zeros(1, 256)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, 256, generator=generator) * torch.logspace(-4, 0, 256)
    for _ in range(50):
        decoded, lost = there_and_back("int8", gradient + lost, 256)
        total, sent = total + gradient, sent + decoded
    assert (total - sent).abs().max() <= (gradient.abs().max() + lost.abs().max()) * BOUNDS["int8"]


def test_every_word_of_a_job_is_a_row() -> None:
    assert {*get_args(Compression)} == {"none", *CODECS}


def test_encoded_gradients_are_in_buckets_that_overlap() -> None:
    layout, wide = Layout("dp=2"), replace(DECODERS["gpt2"], layers=12, hidden=256, heads=4, vocab=256)
    model = spec(wide, "wide")
    one, largest = sum(param.numel for param in model.params) // CODED_BUCKETS, max(p.numel for p in model.params)
    coded, plain = (program_of(model, job, layout).buckets for job in (_job("int8", 2), _job("none", 1)))
    assert len(plain) < 4 < CODED_BUCKETS - 4 < len(coded)
    assert all(bucket.numel <= one + largest for bucket in coded)
    assert sorted(m.name for b in coded for m in b.members) == sorted(m.name for b in plain for m in b.members)


def _job(compression: str, replicas: int) -> Job:
    return Job(numerics={"compression": compression, "replicas": replicas}, train={"global_batch": 8})


def test_weights_of_usual_shapes_have_large_blocks() -> None:
    assert [block_of(shape) for shape in ((4096, 4096), (768, 768), (256, 64), (64,))] == [256, 64, 16, 0]


@pytest.mark.parametrize(
    ("numerics", "said"),
    [
        ({"replicas": 2}, 'compression = "int8"'),
        ({"compression": "int8"}, "Set replicas = 2 or more"),
        ({"compression": "int8", "replicas": 5}, "Set global_batch = 35"),
    ],
)
def test_a_job_says_what_would_work(numerics: dict[str, object], said: str) -> None:
    with pytest.raises(JobError, match=said):
        Job(numerics=numerics)
