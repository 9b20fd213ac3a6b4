"""Blocks that run as graphs: the result, the masks and what is sent are those of a run without.

Most run on torch's backend `aot_eager`, which makes the graphs of forward and backward and needs no compiler; where a block
has no islands it computes the same bits. `inductor`, which fuses kernels, is for `make parity`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from samestep.datasets import batches
from samestep.job import Job
from samestep.runtime.checkpoints import checkpoint, manifests
from tests.laboratory import (
    TOLERANCE,
    Observed,
    assert_ledger,
    assert_same,
    clipped,
    follow,
    make_run,
    on_ranks,
    reference,
)
from tests.models import LENGTH, MODELS, Tokens
from tests.parity import axes  # noqa: F401 (it adds models)
from tests.parts import Words

Case = tuple[Observed, list[str], int]
"""What a rank has observed, its run's remarks, and the number of its graphs."""
pytestmark = pytest.mark.usefixtures("ranks_inherit_the_compiler")
NOT_OF_MODULES = ("run.compile: the loss ", "run.compile: the update ")
ONE_GRAPH = "run.compile: 2 blocks as 1 graph of aot_eager, with 0 islands, compiled in "


def job_of(backend: str, precision: str = "float64", **train: int) -> Job:
    """The job of `clipped`, with compiled blocks unless the backend is empty."""
    run = {"compile": "blocks", "compile_backend": backend} if backend else {}
    return Job(**{**clipped(precision, **train).model_dump(), "run": run})


def observed(rank: int, world: int, model: str, layout: str, job: Job) -> Case:
    run = make_run(rank, world, model, layout, job)
    seen = follow(run, Tokens(), job, record=True)
    said = run._stepper.refusals.remarks
    remarks = [line for line in said if line.startswith("run.compile") and not line.startswith(NOT_OF_MODULES)]
    return seen, remarks, run.assembly.model.compiled.compiler.num_graphs


LAYOUTS = [
    ("dp=2 zero=3 microbatch=2", "plain_with_dropout"),
    ("tp=2 sequence_parallel recompute=full", "llama"),
    ("tp=2 recompute=selective", "gpt2_with_dropout"),
    ("dp=1 microbatch=8", "mixtral_balanced"),  # whose experts run outside of graphs
]
NIGHTLY = [
    ("dp=2 zero=1 offload", "plain"),
    ("dp=2 zero=2 microbatch=2", "gpt2_with_dropout"),
    ("dp=2 zero=3 recompute=selective", "llama"),
    ("dp=2 ep=2", "mixtral_balanced"),
    ("tp=2 sequence_parallel", "llama"),
    ("tp=2 recompute=alternate", "gpt2_with_dropout"),
    ("tp=2 pp=2 microbatch=2", "llama"),
    ("pp=2 microbatch=2 recompute=selective", "plain_with_dropout"),
]
FUSED = [(layout, "llama") for layout in ("dp=2 zero=3", "tp=2", "pp=2 microbatch=4")]
NO_COMPILER = not (shutil.which("g++") or shutil.which("clang++"))


@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    ("layout", "model", "backend"),
    [
        *((*row, "aot_eager") for row in LAYOUTS),
        *(pytest.param(*row, "aot_eager", marks=pytest.mark.nightly) for row in NIGHTLY),
        *(
            pytest.param(
                *row,
                "inductor",
                marks=[pytest.mark.nightly, pytest.mark.skipif(NO_COMPILER, reason="inductor needs g++ or clang++")],
            )
            for row in FUSED
        ),
    ],
)
def test_a_layout_of_graphs_is_one_device_without(layout: str, model: str, backend: str) -> None:
    seen: list[Case] = on_ranks(layout, observed, model, job_of(backend))
    assert_same([one for one, _, _ in seen], reference(model, job_of("")), TOLERANCE)
    assert_ledger([one for one, _, _ in seen], layout)
    for _, remarks, graphs in seen:
        assert graphs, remarks
        assert len(remarks) == 1, remarks  # all in the first step, each once, and nothing is left uncompiled
        if (
            backend == "aot_eager"
            and "tp=2" in layout
            and (model == "gpt2_with_dropout" or layout == "tp=2 sequence_parallel")
        ):
            assert remarks[0].startswith(ONE_GRAPH), "blocks under tp are one graph without islands"


IN_GRAPH, ISLANDS, ANY = " as 1 graph of aot_eager, with 0 islands", "islands", ""
"""What is said of blocks: one graph holds each, some code stands between their graphs, or another line."""
SLICES = [
    ("cp=2 exchange=heads recompute=selective", "gpt2_with_dropout", "bf16", IN_GRAPH),
    ("cp=2 exchange=ring", "gpt2_with_dropout", "bf16", "it draws masks of dropout, and its graph breaks"),
    ("cp=2 exchange=ring", "odd_by_module", "float64", ISLANDS),
    ("cp=2", "neighbours", "float32", "uncompiled: it needs tokens of neighbours under cp"),
    ("cp=2 exchange=ring", "odd_shaped", "float32", ANY),
]
NIGHTLY_SLICES = [
    ("cp=2 exchange=heads", "llama", "float32", IN_GRAPH),
    ("cp=2 exchange=heads", "dropping_llama", "bf16", IN_GRAPH),
    ("cp=2 exchange=heads recompute=full", "llama", "bf16", IN_GRAPH),
    ("cp=2 exchange=heads recompute=alternate", "llama", "float32", IN_GRAPH),
    ("tp=2 cp=2 exchange=heads recompute=selective", "llama_even", "float32", IN_GRAPH),
    ("dp=2 cp=2 zero=3 exchange=heads", "llama", "bf16", IN_GRAPH),
    ("pp=2 cp=2 microbatch=4 exchange=heads", "llama", "float32", IN_GRAPH),
    ("cp=2 exchange=ring recompute=selective", "llama", "bf16", "it is recomputed, and its graph breaks"),
    ("cp=2", "squared", "float64", ISLANDS),  # parts that all ranks compute on all tokens
    ("cp=2", "fused recurrence", "float64", ISLANDS),
    ("cp=2 exchange=ring recompute=full", "llama", "float64", ISLANDS),
    ("cp=4 exchange=hybrid", "many_heads", "float64", ISLANDS),
    ("tp=2 cp=2 sequence_parallel exchange=ring", "llama_even", "float64", ISLANDS),
    ("cp=2 exchange=ring", "odd_placed", "float32", ANY),
    ("cp=2 exchange=ring", "llama", "float64", ISLANDS),
]


@pytest.mark.parametrize(
    ("layout", "model", "precision", "says"),
    [*SLICES, *(pytest.param(*row, marks=pytest.mark.nightly) for row in NIGHTLY_SLICES)],
)
def test_blocks_of_slices_of_sequences_compute_as_without_graphs(
    layout: str, model: str, precision: str, says: str
) -> None:
    """To the bit, but graphs that end within a block add its gradients up in another order.

    A compiler sees no mode of a run: a reshape to all tokens would take some for samples, and an attention would see a slice (`OddBlock`).
    """
    with_graphs, without = (
        on_ranks(layout, observed, model, job_of(backend, precision)) for backend in ("aot_eager", "")
    )
    assert_ledger([seen for seen, _, _ in with_graphs], layout)
    for (ours, remarks, graphs), (theirs, _, _) in zip(with_graphs, without, strict=True):
        if says == ISLANDS:
            assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
            pairs = zip(bits(ours), bits(theirs), strict=True)
            assert all(torch.allclose(a, b, rtol=TOLERANCE, atol=1e-12) for a, b in pairs)
            assert (bool(graphs), len(remarks)) == (True, 1)
            assert "with 0 islands" not in remarks[0]
            continue
        assert ours.losses == theirs.losses
        assert all(torch.equal(a, b) for a, b in zip(bits(ours), bits(theirs), strict=True))
        assert says in remarks[0]
        assert says == ANY or graphs == (says == IN_GRAPH)


def bits(seen: Observed) -> list[Tensor]:
    return [run[3] for runs in (*seen.gradients, seen.weights) for run in runs]


class Counting(nn.Module):
    """Its factor grows with each forward, and a gradient flows through it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls)


class CountingModel(Words):
    def __init__(self) -> None:
        super().__init__(Counting, Counting, width=16, entries=64)


MODELS["counting"] = CountingModel


def _shaped(block: nn.Module, x: Tensor) -> Tensor:
    return block.linear(x).view(-1, LENGTH, 16).tanh()  # as if the slice were whole


def _placed(block: nn.Module, x: Tensor) -> Tensor:
    return (block.linear(x) + block.places).tanh()


def _by_module(block: nn.Module, x: Tensor) -> Tensor:
    return block.attention(x, x, x, need_weights=False)[0]


class OddBlock(nn.Module):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(16, 16), compute
        if compute is _placed:
            self.places = nn.Parameter(torch.randn(1, LENGTH, 16))
        if compute is _by_module:
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self, x)


class OddBlocks(CountingModel):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock(compute) for _ in range(2))


ODD = {f"odd{one.__name__}": one for one in (_shaped, _placed, _by_module)}
MODELS |= {name: functools.partial(OddBlocks, one) for name, one in ODD.items()}


# -- one device ------------------------------------------------------------------------------------


def test_graphs_of_batches_of_changing_shapes_are_compiled() -> None:
    """Torch makes sizes that have changed symbols, of which masks and the scores of attention are made in a graph, too."""
    compiled_job = job_of("aot_eager")
    tokens, runs = Tokens(), [make_run(0, 1, "gpt2_with_dropout", "dp=1", job) for job in (compiled_job, job_of(""))]
    for samples, length in ((4, LENGTH), (2, LENGTH - 5), (4, LENGTH - 3)):
        batch = {"input_ids": tokens.input_ids[:samples, :length], "labels": tokens.labels[:samples, :length]}
        compiled, plain = (run.step(batch).loss for run in runs)
        assert compiled == pytest.approx(plain, rel=1e-12)
    assert not runs[0].assembly.model.compiled.compiler.uncompiled


def test_what_a_forward_writes_and_reads_is_read_as_it_was() -> None:
    """The graph of a backward of torch reads such a buffer anew, so modules that have one run uncompiled."""
    losses = [
        [report.loss for report in map(run.step, batches(Tokens(), run.job))]
        for job in (job_of("aot_eager"), job_of(""))
        for run in [make_run(0, 1, "counting", "dp=1", job)]
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_run_with_graphs_resumes_one_without_and_evaluates_alike(tmp_path: Path):
    plainly, compiled = job_of("", steps=2), job_of("aot_eager", steps=2)
    first, *rest = batches(Tokens(), plainly)
    run = make_run(0, 1, "plain", "dp=1", plainly)
    run.step(first)
    checkpoint.save(run, tmp_path, keep=1)
    resumed = make_run(0, 1, "plain", "dp=1", compiled)
    resumed.prepare(first.samples([0]))
    checkpoint.load(resumed, manifests.latest(tmp_path))
    assert resumed.step(rest[0]).loss == run.step(rest[0]).loss
    assert [name for name, _ in run.model.named_parameters()] == [name for name, _ in resumed.model.named_parameters()]
    graphs = resumed.assembly.model.compiled.compiler.num_graphs
    assert graphs
    assert resumed.evaluate(first) == run.evaluate(first)
    assert resumed.assembly.model.compiled.compiler.num_graphs == graphs  # evaluation compiles nothing
