"""PowerSGD: what a sum of matrices is decoded as, for any shapes, and what is left of it for the next step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from samestep.errors import JobError, LayoutError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.decoder_spec import spec
from samestep.models.presets import DECODERS
from samestep.program.codecs import CodedPart, Matrix, is_factored
from samestep.program.step import StepSpec
from samestep.strategies import program_of
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.simulation.collectives import collective_s, group_of
from samestep.wings.plan.simulation.cost import seconds
from samestep.wings.plan.simulation.simulate import predict
from samestep.wings.slow_links.powersgd import SMALLEST_SINE_SQUARED, FactoredExchange, first_directions, orthonormalise


@pytest.fixture(autouse=True, scope="module")
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def exchange_of(shape: tuple[int, int], rank: int, plain: int = 3) -> FactoredExchange:
    """An exchange on one rank, of a buffer with some elements in front of a matrix and behind it."""
    matrix = Matrix("weight", plain, *shape, rank)
    like = torch.empty(0, dtype=torch.float64)
    part = CodedPart(matrix.numel + 2 * plain, 1, (matrix,))
    return FactoredExchange(part, dist.group.WORLD, like, gathers=True)


def decoded(exchange: FactoredExchange, matrix: Tensor, plain: int = 3) -> Tensor:
    """What a matrix is decoded as."""
    around = matrix.new_ones(plain)
    exchange.begin_step()
    buffer = torch.cat([around, matrix.flatten(), around])
    for _ in range(2):
        exchange.send([buffer]).wait()
    exchange.finish([buffer])
    assert torch.equal(buffer[:plain], around)
    assert torch.equal(buffer[-plain:], around)
    return buffer[plain:-plain].view_as(matrix)


def rest_of(exchange: FactoredExchange) -> Tensor:
    (rest,) = exchange.residuals(0)
    return rest.values


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """A matrix of any shape and scale that has fewer elements as factors, some of its rows zero, and their rank."""
    rank = draw(st.integers(1, 6))
    rows, columns = (draw(st.integers(2 * rank + 1, 60)) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-30, 30))
    values[torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    if draw(st.booleans()):
        values[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] *= 1e6
    return values, rank


@given(matrices())
def test_it_is_a_projection_and_the_rest_is_kept(drawn: tuple[Tensor, int]) -> None:
    values, rank = drawn
    exchange = exchange_of((len(values), values.shape[1]), rank)
    found, size = decoded(exchange, values), float(values.norm())
    assert is_factored(values.shape, rank)
    assert torch.linalg.matrix_rank(found, rtol=1e-6) <= rank
    assert (found + rest_of(exchange).view_as(values) - values).norm() <= 1e-12 * size
    assert abs(float((found * (values - found)).sum())) <= 1e-7 * size**2
    assert float((values - found).norm()) <= size * (1 + 1e-9)


@given(matrices(), st.integers(1, 6))
def test_a_matrix_of_a_smaller_rank_is_exact(drawn: tuple[Tensor, int], true_rank: int) -> None:
    values, rank = drawn
    generator = torch.Generator().manual_seed(true_rank)
    left, right = (
        torch.randn(size, min(true_rank, rank), generator=generator, dtype=torch.float64) for size in values.shape
    )
    low, exchange = left @ right.T, exchange_of((len(values), values.shape[1]), rank)
    for _ in range(3):
        ((_, directions),) = exchange.directions()
        found = low @ directions.T[:, : left.shape[1]]
        cosines = (found / found.norm(dim=0)).T @ (found / found.norm(dim=0))
        least = float(torch.linalg.eigvalsh(cosines)[0])
        assume(least > 100 * SMALLEST_SINE_SQUARED)  # else a direction may count as one of rounding errors
        # Each cosine's eigenvalue x becomes x / (x + the shift), which is how much of its direction is decoded.
        limit = (1e-12 + 1e-13) / least + 1e-12
        before = rest_of(exchange).clone().view_as(low)
        assert (decoded(exchange, low) - low - before).norm() <= limit * low.norm()
        assert rest_of(exchange).norm() <= limit * low.norm()


@given(matrices(), st.integers(-20, 20))
def test_a_loss_scale_changes_no_direction(drawn: tuple[Tensor, int], exponent: int) -> None:
    values, rank = drawn
    once, scaled = (exchange_of((len(values), values.shape[1]), rank) for _ in range(2))
    for _ in range(2):
        expected = decoded(once, values) * 2.0**exponent
        assert torch.equal(decoded(scaled, values * 2.0**exponent), expected)


def test_zeros_stay_zeros_and_leave_the_directions() -> None:
    exchange = exchange_of((12, 9), 2)
    (before,) = [directions.values.clone() for directions in exchange.directions()]
    assert torch.equal(decoded(exchange, torch.zeros(12, 9, dtype=torch.float64)), torch.zeros(12, 9).double())
    (after,) = exchange.directions()
    assert torch.equal(before, after.values)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_and_is_not_kept(bad: float) -> None:
    exchange, generator = exchange_of((30, 20), 4), torch.Generator().manual_seed(0)
    values = torch.randn(30, 20, generator=generator, dtype=torch.float64)
    decoded(exchange, values)
    (before,) = [directions.values.clone() for directions in exchange.directions()]
    broken = values.clone()
    broken[3, 4] = bad
    assert not decoded(exchange, broken).isfinite().any()
    (after,) = exchange.directions()
    assert torch.equal(before, after.values)
    assert torch.equal(rest_of(exchange), torch.zeros(600).double())
    assert decoded(exchange, values).isfinite().all()


def test_it_finds_the_largest_singular_vectors_and_sends_the_others_in_their_turn() -> None:
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(40, 20, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(30, 20, generator=generator, dtype=torch.float64))
    values = left @ torch.diag(torch.logspace(0, -2, 20, dtype=torch.float64)) @ right.T
    exchange, total = exchange_of((40, 30), 3), torch.zeros_like(values)
    best = left[:, :3] @ torch.diag(torch.logspace(0, -2, 20, dtype=torch.float64)[:3]) @ right[:, :3].T
    for step in range(40):  # without what was left the iteration converges
        exchange._kept.zero_()
        found = decoded(exchange, values)
        if step == 0:
            assert (found - best).norm() > 1e-2 * best.norm()
    assert (found - best).norm() < 1e-4 * best.norm()
    exchange._kept.zero_()
    for _ in range(300):
        total += decoded(exchange, values)
    assert (total / 300 - values).norm() < 0.03 * values.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_orthonormal_and_those_that_depend_on_others_are_zeros(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(5, 50, generator=generator, dtype=dtype)
    factor[2] = 3 * factor[0] - factor[1]
    factor[3] *= 1e-20
    orthonormalise([factor[None]])
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=dtype))
    assert torch.allclose(factor @ factor.T, expected, atol=1e-6)


def test_first_directions_are_those_of_the_name() -> None:
    one, same, other = (first_directions(name, 7, 3) for name in ("a", "a", "b"))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((64, 64), 4, True),
        ((64,), 1, False),
        ((8, 8), 4, False),
        ((8, 9), 4, True),
        ((16, 3, 3, 3), 4, True),
        ((), 1, False),
    ],
)
def test_what_saves_nothing_is_sent_as_it_is(shape: tuple[int, ...], rank: int, expected: bool) -> None:
    assert is_factored(shape, rank) is expected


def _job(**numerics: object) -> Job:
    return Job(numerics={"compression": "powersgd", "replicas": 2, **numerics}, train={"global_batch": 8})


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=2 tp=2", "Use tp=1"),
        ("dp_replicate=2 dp_shard=2 zero=3", "Use dp=2 zero=1"),
        ("dp_replicate=2 dp_shard=2 zero=1", "Use dp=2 zero=1"),
        ("dp=2 zero=2", "Use dp=2 zero=1"),
        ("dp=2 reduce=root", "Use reduce=ring"),
    ],
)
def test_a_layout_that_divides_matrices_is_refused(layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        program_of(spec(DECODERS["gpt2"], "gpt2"), _job(), Layout(layout))


@pytest.mark.parametrize("layout", ["dp=2 zero=2", "dp=2 zero=3"])
def test_a_layout_that_scatters_codes_is_refused_where_no_matrix_is_factored_too(layout: str) -> None:
    job = Job(numerics={"compression": "powersgd", "compression_rank": 10_000, "replicas": 2})
    model = spec(DECODERS["llama3-8b"], 8)
    assert not any(is_factored(param.shape, 10_000) for param in model.params)
    with pytest.raises(LayoutError, match=r"factors whole matrices, and zero=. divides .*Use .*zero=1"):
        program_of(model, job, Layout(layout))


@pytest.mark.parametrize("layout", ["dp=4 microbatch=1", "dp=4 zero=1 microbatch=1", "dp=4 pp=2 microbatch=1"])
def test_its_products_are_priced_and_bounds_of_the_search_hold(layout: str) -> None:
    model, hardware = spec(DECODERS["gpt2"], "gpt2"), load("a100-80x8")
    job = _job(replicas=4)
    step = StepSpec.of(model, job, Layout(layout), hardware.devices_per_node)
    bounds, played = Bounds(Prices(model, job, hardware)), predict(model, job, step.layout, hardware)
    assert bounds.step_s(step) <= played.step_s * (1 + 1e-9)
    program = played.programs[0]
    ops = [op for _, op in program.ops() if op.codec == "powersgd"]
    sent_s = sum(
        collective_s(op.kind, op.size_bytes, group_of("dp_replicate", 4, step, hardware), hardware) for op in ops
    )
    read_once_s = 4 * sum(param.numel for param in program.step.model.params) / hardware.memory_bytes_per_s
    assert sum(seconds(op, program, hardware) for op in ops) > sent_s + 4 * read_once_s


def test_a_rank_of_zero_is_refused() -> None:
    with pytest.raises(JobError, match="compression_rank"):
        _job(compression_rank=0)
