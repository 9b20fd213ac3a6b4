"""Blocks that run as graphs: the result, the masks and what is sent are those of a run without.

Most run on torch's backend `aot_eager`, which makes the graphs of forward and backward and needs no compiler; where a block
has no islands it computes the same bits. `inductor`, which fuses kernels, is for `make parity`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.models import LENGTH, MODELS, PackedTokens, Tokens
from tests.parity import axes  # noqa: F401 (it adds models)
from tests.parts import Words

Case = tuple[Observed, list[str], int]
"""What a rank has observed, its run's remarks, and the number of its graphs."""
pytestmark = pytest.mark.usefixtures("ranks_inherit_the_compiler")
NOT_OF_MODULES = ("run.compile: the loss ", "run.compile: the update ")
ONE_GRAPH = "run.compile: 2 blocks as 1 graph of aot_eager, with 0 islands, compiled in "


def job_of(backend: str, precision: str = "float64", **train: Any) -> Job:
    """The job of `clipped`, with compiled blocks unless the backend is empty."""
    run = {"compile": "blocks", "compile_backend": backend} if backend else {}
    return Job(**{**clipped(precision, **train).model_dump(), "run": run})


def observed(rank: int, world: int, model: str, layout: str, job: Job, data: Callable[[], Any] = Tokens) -> Case:
    run = make_run(rank, world, model, layout, job, data)
    seen = follow(run, data(), job, record=True)
    said = run._stepper.refusals.remarks
    remarks = [line for line in said if line.startswith("run.compile") and not line.startswith(NOT_OF_MODULES)]
    return seen, remarks, run.assembly.model.compiled.compiler.num_graphs


def prove_compiled(layout: str, model: str, backend: str, **train: Any) -> list[list[str]]:
    """Hold a layout with graphs against one device without, and what is sent against the program; return the ranks' remarks."""
    seen: list[Case] = on_ranks(layout, observed, model, job_of(backend, **train))
    assert_same([one for one, _, _ in seen], reference(model, job_of("", **train)), TOLERANCE)
    assert_ledger([one for one, _, _ in seen], layout)
    for _, remarks, graphs in seen:
        assert graphs, remarks
        assert len(remarks) == 1, remarks  # all in the first step, each once, and nothing is left uncompiled
    return [remarks for _, remarks, _ in seen]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2 zero=3 microbatch=2", "plain_with_dropout"),
        ("tp=2 sequence_parallel recompute=full", "llama"),
        ("tp=2 recompute=selective", "gpt2_with_dropout"),
        *(
            pytest.param(layout, model, marks=pytest.mark.nightly)
            for layout, model in [
                ("dp=1 pp=2 microbatch=2", "plain"),
                ("dp=2", "llama"),
                ("dp=2 zero=1 offload", "plain"),
                ("dp=2 zero=2 microbatch=2", "gpt2_with_dropout"),
                ("dp=2 zero=3 recompute=full", "gpt2_with_dropout"),
                ("tp=2", "gpt2_with_dropout"),
                ("tp=2 dp=1 pp=2 microbatch=2", "llama"),
                ("tp=2 sequence_parallel recompute=selective", "llama"),
                ("tp=2 recompute=alternate", "gpt2_with_dropout"),
                ("dp=2 zero=3 recompute=selective", "llama"),
                ("dp=1 pp=2 microbatch=2 recompute=selective", "plain_with_dropout"),
            ]
        ),
    ],
)
def test_a_layout_of_graphs_is_one_device_without(layout, model):
    for remarks in prove_compiled(layout, model, "aot_eager"):
        if "tp=2" in layout and model == "gpt2_with_dropout":
            assert remarks[0].startswith(ONE_GRAPH), "blocks under tp are one graph without islands"


@pytest.mark.nightly
def test_blocks_under_tp_and_sequence_parallel_are_one_graph_without_islands():
    for remarks in prove_compiled("tp=2 sequence_parallel", "llama", "aot_eager"):
        assert remarks[0].startswith(ONE_GRAPH)


@pytest.mark.parametrize("layout", ["dp=1 microbatch=8", pytest.param("dp=2 ep=2", marks=pytest.mark.nightly)])
def test_experts_run_outside_of_graphs(layout):
    # Without the canary, whose steps record the experts that routers choose, and run uncompiled.
    prove_compiled(layout, "mixtral_balanced", "aot_eager", watch_every=0)


@pytest.mark.nightly
@pytest.mark.time_limit(900)
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs g++ or clang++")
@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=3", "tp=2", "dp=1 pp=2 microbatch=4"])
def test_a_layout_of_fused_kernels_is_one_device_without(layout):
    prove_compiled(layout, "llama", "inductor")


@pytest.mark.parametrize(
    ("layout", "model", "precision"),
    [
        ("cp=2 exchange=heads recompute=selective", "gpt2_with_dropout", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("cp=2 exchange=heads", "llama", "float32"),
                ("cp=2 exchange=heads", "dropping_llama", "bf16"),
                ("cp=2 exchange=heads recompute=full", "llama", "bf16"),
                ("cp=2 exchange=heads recompute=alternate", "llama", "float32"),
                ("tp=2 cp=2 exchange=heads recompute=selective", "llama_even", "float32"),
                ("dp=2 cp=2 zero=3 exchange=heads", "llama", "bf16"),
                ("pp=2 cp=2 microbatch=4 exchange=heads", "llama", "float32"),
            ]
        ),
    ],
)
def test_graphs_of_slices_of_sequences_give_the_bits_of_code_that_is_not_compiled(layout, model, precision):
    for _, remarks, graphs in slices_with_the_same_bits(layout, model, precision):
        assert graphs == 1
        assert " as 1 graph of aot_eager, with 0 islands" in remarks[0]


def slices_with_the_same_bits(layout: str, model: str, precision: str) -> list[Case]:
    """Hold slices of sequences with graphs against the same without, and what is sent against the program; return the cases."""
    with_graphs, without = slices_with_and_without(layout, model, precision)
    for (ours, _, _), (theirs, _, _) in zip(with_graphs, without, strict=True):
        assert ours.losses == theirs.losses
        assert all(torch.equal(a, b) for a, b in zip(bits(ours), bits(theirs), strict=True))
    return with_graphs


def slices_with_and_without(
    layout: str, model: str, precision: str, data: Callable[[], Any] = Tokens
) -> tuple[list[Case], list[Case]]:
    """Return the cases of slices of sequences with graphs, which send what the program says, and without."""
    with_graphs, without = (
        on_ranks(layout, observed, model, job_of(backend, precision), data) for backend in ("aot_eager", "")
    )
    assert_ledger([seen for seen, _, _ in with_graphs], layout)
    return with_graphs, without


def test_blocks_of_which_cp_computes_single_operations_run_uncompiled():
    for _, remarks, graphs in slices_with_the_same_bits("cp=2", "neighbours", "float32"):
        assert not graphs
        assert remarks[0].endswith("uncompiled: it needs tokens of neighbours under cp")


@pytest.mark.parametrize(
    ("layout", "model", "reason"),
    [
        ("cp=2 exchange=ring", "gpt2_with_dropout", "it draws masks of dropout, and its graph breaks"),
        pytest.param(
            "cp=2 exchange=ring recompute=selective",
            "llama",
            "it is recomputed, and its graph breaks",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_blocks_that_a_ring_would_break_run_uncompiled(layout, model, reason):
    for _, remarks, graphs in slices_with_the_same_bits(layout, model, "bf16"):
        assert not graphs
        assert reason in remarks[0]


@pytest.mark.parametrize(
    ("layout", "model", "data"),
    [
        ("cp=2 exchange=ring", "llama", Tokens),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("cp=2", "squared", Tokens),  # parts that all ranks compute on all tokens
                ("cp=2", "fused recurrence", Tokens),
                ("cp=2 exchange=heads", "deep_llama", PackedTokens),
                ("cp=2 exchange=ring", "deep_llama", PackedTokens),
                ("cp=2 exchange=ring recompute=full", "llama", Tokens),
                ("cp=4 exchange=hybrid", "many_heads", Tokens),
                ("tp=2 cp=2 sequence_parallel exchange=ring", "llama_even", Tokens),
                ("pp=2 cp=2 microbatch=4 exchange=ring", "llama", Tokens),
            ]
        ),
    ],
)
def test_what_no_graph_of_slices_holds_is_an_island_in_it(layout, model, data):
    """Graphs that end within a block add its gradients up in another order."""
    for (ours, remarks, graphs), (theirs, _, _) in zip(
        *slices_with_and_without(layout, model, "float64", data), strict=True
    ):
        assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
        pairs = zip(bits(ours), bits(theirs), strict=True)
        assert all(torch.allclose(a, b, rtol=TOLERANCE, atol=1e-12) for a, b in pairs)
        assert graphs
        assert len(remarks) == 1
        assert "with 0 islands" not in remarks[0]


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


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.nightly if name != "odd_shaped" else ()) for name in ODD]
)
def test_code_of_slices_that_is_adapted_outside_of_graphs_is_adapted_in_them(model):
    """A compiler sees no mode of a run: a reshape to all tokens would take some for samples, and an attention would see a slice."""
    for _, remarks, _ in slices_with_the_same_bits("cp=2 exchange=ring", model, "float32"):
        assert remarks


# -- one device ------------------------------------------------------------------------------------


def bits(seen: Observed) -> list[torch.Tensor]:
    return [run[3] for runs in (*seen.gradients, seen.weights) for run in runs]


@pytest.mark.parametrize(
    ("model", "precision"),
    [pytest.param("llama", "bf16", marks=pytest.mark.nightly), ("gpt2_with_dropout", "bf16")],
)
def test_graphs_without_fusion_give_the_same_bits(model, precision):
    with_graphs, remarks, graphs = observed(0, 1, model, "dp=1", job_of("aot_eager", precision))
    without, _, none = observed(0, 1, model, "dp=1", job_of("", precision))
    assert none == 0
    assert with_graphs.losses == without.losses
    assert all(torch.equal(a, b) for a, b in zip(bits(with_graphs), bits(without), strict=True))
    assert remarks[0].startswith(ONE_GRAPH)  # casts to bf16 run in it
    assert graphs == 1


@pytest.mark.parametrize(
    "model",
    [
        "gpt2_with_dropout",
        pytest.param("llama", marks=pytest.mark.nightly),
        pytest.param("plain_with_dropout", marks=pytest.mark.nightly),
    ],
)
def test_graphs_of_batches_of_changing_shapes_are_compiled(model):
    """Torch makes sizes that have changed symbols, of which masks and the scores of attention are made in a graph, too."""
    compiled_job = job_of("aot_eager")
    tokens, runs = Tokens(), [make_run(0, 1, model, "dp=1", job) for job in (compiled_job, job_of(""))]
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
