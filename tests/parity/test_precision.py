"""Mixed precision by one rule in every layout: bf16 and fp16 with float32 masters, sums, norms and losses.

What separates two layouts is the order of sums and the shapes of matrix products: `tests/rounding.py` says how far they
may part. Where every micro-batch holds the same sample in both layouts even those roundings are equal, and what is left are sums in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import cross_entropy, loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.axes.precision import for_loss
from tests import rounding, traced
from tests.code import odd_models  # noqa: F401, which enters its models into MODELS
from tests.covering import daily
from tests.laboratory import Observed, code_of, follow, job_of, largest_error, make_run, run_from, whole
from tests.models import VOCABULARY, Tokens
from tests.pool import pool


def job_for(model: str, precision: str) -> Job:
    loss = (code_of(model).job or job_of()).train.loss
    numerics = {"loss_scale": 1024.0} if precision == "fp16" else {}
    return job_of(precision, 2, train={"loss": loss}, numerics=numerics, optimizer={"clip_norm": 0.5})


def watch(rank: int, world: int, model: str, layout: str, precision: str, record: bool = False) -> Observed:
    job = job_for(model, precision)
    return follow(make_run(rank, world, model, layout, job), code_of(model).data(), job, record)


@functools.cache
def bound(model: str, precision: str) -> tuple[Observed, rounding.Limits]:
    job = job_for(model, precision)
    return rounding.allowed(functools.partial(make_run, 0, 1, model, "dp=1", job), code_of(model).data(), job)


EVERY = [
    "dp=2",
    "dp=2 reduce=root",
    "dp=2 zero=1",
    "dp=2 zero=2 microbatch=1",
    "dp=2 zero=2 microbatch=2 accumulate=full",
    "dp=2 zero=3 recompute=selective microbatch=2",
    "dp=2 zero=3 offload",
    "dp_replicate=2 dp_shard=2 microbatch=1 accumulate=full recompute=full",
    "dp_replicate=2 dp_shard=2 zero=1",
]
SOME = [
    "dp=2 recompute=full",
    "dp=2 zero=1 microbatch=2",
    "dp=2 zero=2 microbatch=1",
    "dp=2 zero=3 recompute=selective",
    "dp=2 zero=3 loss_chunk=7",
]
FEW = ["dp=2", "dp=2 zero=1 microbatch=1", "dp=2 zero=3 microbatch=2"]
CASES = [("plain", "bf16", EVERY), ("gpt2", "bf16", SOME), ("llama", "bf16", FEW), ("gpt2", "fp16", SOME)]
CASES += [("odd flat_with_root", "bf16", FEW), ("odd flat", "fp16", FEW)]


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        case
        for model, precision, some in CASES
        for case in daily([(model, precision, layout) for layout in some], beside_products=True)
    ],
)
def test_a_layout_deviates_by_roundings_alone(model: str, precision: str, layout: str) -> None:
    allowed = bound(model, precision)
    ranks = pool(Layout(layout).world_size).run(watch, model, layout, precision, True)
    rounding.assert_within(ranks, allowed)
    for seen in ranks:
        assert seen.ledger == seen.predicted
        for rows in seen.ledger.values():
            # Gradients travel in float32; weights in the compute dtype, but for those in which gradients meet.
            assert {row.dtype for row in rows if row.kind != "all_gather"} <= {"float32", "float64"}
            assert all(row.dtype == "float32" for row in rows if row.kind == "reduce_scatter")
        assert all(tensor.dtype is torch.float32 for _, _, _, tensor in (*seen.gradients[0], *seen.weights))


SINGLES = ["dp=2 microbatch=1", "dp=2 zero=1 microbatch=1", "dp=2 zero=2 microbatch=1", "dp=2 zero=3 microbatch=1"]
SINGLES += ["dp=2 zero=3 microbatch=1 accumulate=full", "dp_replicate=2 dp_shard=2 microbatch=1"]


@pytest.mark.parametrize("layout", daily(SINGLES))
def test_gradients_are_added_in_float32(layout: str) -> None:
    """One sample a micro-batch: every product is the same in all layouts, to the bit."""
    reference = watch(0, 1, "gpt2", "dp=1 microbatch=1", "bf16")
    ranks = pool(Layout(layout).world_size).run(watch, "gpt2", layout, "bf16")
    error, name = largest_error(whole([seen.gradients[0] for seen in ranks]), whole([reference.gradients[0]]))
    assert error <= 100 * torch.finfo(torch.float32).eps, f"{name}: {error:.1e}"


# -- what is computed in which dtype -----------------------------------------------------------------------------------

SPIED: set[tuple[str, torch.dtype, torch.dtype | None]] = set()


def spy(name: str, kind: type[nn.Module]) -> type[nn.Module]:
    """Note the dtypes of a module's input and weight."""

    def forward(self: nn.Module, x: Tensor, *more: Tensor) -> Any:
        weight = next(iter(self._parameters.values()), None)
        SPIED.add((name, x.dtype, None if weight is None else weight.dtype))
        return kind.forward(self, x, *more)

    return type(f"Spied{kind.__name__}", (kind,), {"forward": forward})


class Sines(nn.Module):
    """No weights: times up to a thousand, which no half precision can tell apart."""

    def forward(self, times: Tensor) -> Tensor:
        return torch.sin(times[:, None] * torch.linspace(0.1, 1.0, 8))


class SpiedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = spy("norm", nn.LayerNorm)(8)
        self.linear = spy("linear", nn.Linear)(8, 8)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(self.norm(x))
        return x + self.linear2(x + self.offset) if hasattr(self, "linear2") else x


class Spied(nn.Module):
    """Tied embedding, a time embedding without weights, a block with a float32 buffer, an LSTM that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = spy("shared embedding", nn.Embedding)(VOCABULARY, 8)
        self.sines, self.time = spy("sines", Sines)(), spy("linear", nn.Linear)(8, 8)
        self.blocks = nn.ModuleList(SpiedBlock() for _ in range(2))
        self.blocks[1].linear2 = spy("linear", nn.Linear)(8, 8)
        self.lstm = spy("shared lstm", nn.LSTM)(8, 8, batch_first=True)
        self.norm = spy("norm", nn.LayerNorm)(8)
        self.head = spy("shared head", nn.Linear)(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        times = torch.linspace(1.0, 999.0, input_ids.shape[1])
        x = self.embed(input_ids) + self.time(self.sines(times))
        for block in self.blocks:
            x = block(x)
        x = self.lstm(x)[0]
        return self.head(self.norm(self.lstm(x)[0]))


def spied_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    if outputs.dtype is not torch.float64:  # in which the loss is tried, once
        SPIED.add(("loss", outputs.dtype, None))
    return cross_entropy(outputs, batch)


def spied_source(job: Job, layout: Layout) -> Source:
    source = Source(Spied, spied_loss, optimizer_of(job))
    example = next(batches(Tokens(), job)).samples([0])
    return dataclasses.replace(source, prepared=traced.prepared("spied", source, job, example, layout))


def spied_job(precision: str) -> Job:
    numerics = {"loss_scale": 256.0}  # a power of two: it takes no bit from a gradient
    adamw = {"name": "adamw", "options": {}}
    return job_of(precision, 1, train={"global_batch": 1}, optimizer=adamw, numerics=numerics)


def spied_step(rank: int, world: int, layout: str, precision: str) -> tuple[set[Any], dict[str, bool], list[str]]:
    """Run a step of one sample, which only rank 0 has; say what was seen, and whose gradients fit the compute dtype."""
    job = spied_job(precision)
    where = Layout(layout)
    batch = next(batches(Tokens(), job))
    run = run_from(spied_source(job, where), where, job, rank, world)
    run.prepare(batch.samples(batch.indices))
    SPIED.clear()  # of the trace
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    run.forward_backward(batch)
    fits = {p.name: bool((p.gradient().to(dtype).float() == p.gradient()).all()) for p in run.updater.pieces}
    run.step(batch)
    wrong = [name for name, param in run.model.named_parameters() if not isinstance(param, nn.Parameter)]
    tensors = [
        t
        for p in run.updater.pieces
        for t in (p.master(), p.gradient(), *run.updater.optimizer.state[p.value].values())
    ]
    wrong += [str(tensor.dtype) for tensor in tensors if tensor.dtype is not torch.float32]
    return set(SPIED), fits, wrong


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("fp16", "dp=2 zero=1 recompute=full"),
        pytest.param("fp16", "dp=2 zero=2", marks=pytest.mark.nightly),
        ("bf16", "dp=2 zero=3 recompute=full"),
        pytest.param("fp16", "dp=2", marks=pytest.mark.nightly),
        pytest.param("bf16", "dp=2 zero=1 recompute=full", marks=pytest.mark.nightly),
        pytest.param("bf16", "dp=2 zero=2", marks=pytest.mark.nightly),
        pytest.param("fp16", "dp=2 zero=3 recompute=full", marks=pytest.mark.nightly),
    ],
)
def test_everything_is_computed_in_its_dtype(layout: str, precision: str) -> None:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    spied_source(spied_job(precision), Layout(layout))  # which the ranks inherit
    ranks = pool(2).run(spied_step, layout, precision)
    for seen, _, wrong in ranks:
        assert seen == {
            ("loss", torch.float32, None),
            ("norm", torch.float32, torch.float32),
            ("linear", half, half),
            ("sines", torch.float32, None),
            ("shared embedding", torch.int64, half),
            ("shared head", half, half),
            ("shared lstm", half, half),
        }
        assert not wrong  # weights cast for a forward are put back, masters and all that is added up are float32
    for name in ranks[0][1].keys() | ranks[1][1].keys():
        # Two gradients of one weight meet in float32, so their sum does not fit in half.
        meet = name.startswith(("embed", "lstm"))
        assert all(fits.get(name, not meet) for _, fits, _ in ranks) != meet, name


def skips(rank: int, world: int, layout: str) -> list[bool]:
    """Take steps near the edge of float16, which a loss scale that doubles every second step keeps coming back to."""
    numerics = {"loss_scale": 2.0**21, "loss_scale_growth_steps": 2}
    job = job_of("fp16", 8, numerics=numerics, optimizer={"name": "adam", "lr": 1e-3, "options": {}})
    run = make_run(rank, world, "gpt2_even", layout, job)
    return [run.step(batch).skipped for batch in batches(Tokens(), job)]


def test_every_layout_skips_the_same_steps() -> None:
    """A micro-batch of eight samples adds more up in float16 than one of a single sample."""
    expected = skips(0, 1, "dp=1")
    assert True in expected
    assert False in expected
    assert skips(0, 1, "dp=1 microbatch=1") == expected
    for layout in ("dp=2 zero=2", "tp=2", "pp=2 microbatch=2"):
        assert pool(2).run(skips, layout) == [expected] * 2, layout


# -- small rules -------------------------------------------------------------------------------------------------------


def test_the_loss_sees_float32_in_whatever_it_is_given() -> None:
    @dataclasses.dataclass(frozen=True)
    class Output:
        logits: Tensor
        states: list[Tensor]
        words: str = "kept"

    half = torch.ones(2, dtype=torch.bfloat16)
    raised = for_loss(Output(half, [half, torch.ones(2, dtype=torch.float64)]))
    assert raised.logits.dtype is torch.float32
    assert [state.dtype for state in raised.states] == [torch.float32, torch.float64]
    assert raised.words == "kept"
    assert for_loss({"logits": (half, 3)})["logits"][0].dtype is torch.float32


@pytest.mark.parametrize(
    ("values", "works"),
    [(torch.ones(3, dtype=torch.complex64), "view_as_complex of a real parameter"), (torch.arange(3), "a buffer")],
)
def test_parameters_that_are_no_real_numbers_are_refused(values: Tensor, works: str) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 3)
            self.strange = nn.Parameter(values.clone(), requires_grad=values.is_complex())

        def forward(self, input_ids: Tensor) -> Tensor:
            return (self.embed(input_ids) * self.strange).real

    job = job_of("float32", 1)
    run = run_from(Source(Strange, loss_of(job), optimizer_of(job)), Layout(), job)
    with pytest.raises(ModelError, match=f"parameter strange is .*. Use {works}"):
        run.step(next(batches(Tokens(), job)))


@pytest.mark.parametrize("tf32", [False, True])
def test_products_of_gpus_add_in_float32(tf32: bool) -> None:
    products, job = torch.backends.cuda.matmul, job_of("float32", 1, numerics={"tf32": tf32})
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    products.allow_tf32 = torch.backends.cudnn.allow_tf32 = not tf32
    make_run(0, 1, "plain", "dp=1", job).prepare(next(batches(Tokens(), job)).samples([0]))
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
    assert (products.allow_tf32, torch.backends.cudnn.allow_tf32) == (tf32, tf32)
