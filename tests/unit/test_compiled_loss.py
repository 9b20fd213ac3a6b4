"""The loss as a graph: the bits of a run without, and what its lines say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.building.chunked_cross_entropy import LOGITS, Chunking, Elementwise, Head, row_losses
from samestep.errors import JobError
from samestep.job import Job
from samestep.job_tables import CompileMode
from samestep.runtime.axes.compiled_blocks import LOSS, CompiledBlocks
from tests.laboratory import clipped, in_loop, make_run, on_ranks
from tests.models import Tokens

Seen = tuple[list[float], list[Tensor], list[str]]
"""The losses of a rank's steps, its weights after them, and what its steps remarked of compiling."""


def job(precision: str, backend: str = "aot_eager", **tables: Any) -> Job:
    return Job(
        **{**clipped(precision).model_dump(), "run": {"compile": "blocks", "compile_backend": backend}, **tables}
    )


def stepped(rank: int, world: int, model: str, layout: str, job: Job) -> Seen:
    run = make_run(rank, world, model, layout, job)
    reports = [run.step(batch) for batch in samestep.batches(Tokens(), job)]
    said = [line for report in reports for line in report.remarks if line.startswith("run.compile")]
    return [report.loss for report in reports], [*run.state_dict().values()], said


@pytest.mark.usefixtures("ranks_inherit_the_compiler")
@pytest.mark.parametrize(
    ("layout", "model", "precision", "graphs"),
    [
        ("dp=1 loss_chunk=5", "llama", "bf16", "4 graphs"),
        ("tp=2", "llama_even", "bf16", "2 graphs"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("dp=1", "llama", "float32", "1 graph"),
                ("dp=1 loss_chunk=5", "capped", "float32", "4 graphs"),
                ("tp=2", "llama_even", "float32", "2 graphs"),
                ("tp=2 loss_chunk=5", "llama_even", "bf16", "4 graphs"),
                ("pp=2 microbatch=4", "llama", "bf16", "1 graph"),
            ]
        ),
    ],
)
def test_a_loss_that_is_a_graph_gives_the_same_bits(layout: str, model: str, precision: str, graphs: str) -> None:
    compiled = on_ranks(layout, stepped, model, job(precision))
    plainly = on_ranks(layout, stepped, model, clipped(precision))
    for (losses, weights, _), (others, theirs, _) in zip(compiled, plainly, strict=True):
        assert losses == others
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
    said = [line for _, _, lines in compiled for line in lines if line.startswith(f"run.compile: {LOSS} ")]
    assert said
    assert all(line.startswith(f"run.compile: {LOSS} as {graphs} of aot_eager") for line in said), said


def test_a_loss_that_the_compiler_cannot_take_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch._dynamo.lookup_backend("aot_eager")

    def failing(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if any(node.target is nn.functional.cross_entropy for node in graph.graph.nodes):
            raise RuntimeError("no kernel here")
        return usual(graph, inputs)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: failing)
    losses, weights, said = stepped(0, 1, "plain", "dp=1", job("float32"))
    assert f"run.compile: {LOSS} runs uncompiled: aot_eager fails for it and its like: no kernel here" in said
    others, theirs, _ = stepped(0, 1, "plain", "dp=1", clipped("float32"))
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def test_held_out_losses_compile_nothing_and_a_step_one_graph_with_the_same_bits() -> None:
    run = make_run(0, 1, "plain", "dp=1", job("float32"))
    batches = [*samestep.batches(Tokens(), run.job)]
    run.prepare(batches[0].samples([0]))
    run.evaluate(batches[0])
    assert run.assembly.model.compiled.of_loss.num_graphs == 0
    losses = [run.step(batch).loss for batch in batches]
    assert run.assembly.model.compiled.of_loss.num_graphs == 1
    assert losses == stepped(0, 1, "plain", "dp=1", clipped("float32"))[0]


def test_no_mode_captures_cuda_graphs() -> None:
    for mode in get_args(CompileMode):
        compiled = CompiledBlocks("inductor", mode)
        for compiler in (compiled.compiler, compiled.of_loss):
            assert not compiler._options.get("config_patches", {}).get("triton.cudagraphs"), mode


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("functions", "smoothing", "has_means"),
    [((torch.tanh, Tensor.float), 0.0, True), ((Tensor.double, Tensor.float), 0.1, False)],
)
def test_rows_of_a_graph_are_those_without_to_the_bit(functions: Any, smoothing: float, has_means: bool) -> None:
    compiled = CompiledBlocks("aot_eager")
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 6, generator=generator).bfloat16() for size in (7, 9))
    labels = torch.arange(7) - (torch.arange(7) == 3) * 103

    def found(chunking: Chunking) -> list[Tensor]:
        head = Head(chunking, tuple(Elementwise(one, (LOGITS,), {}, writes=False) for one in functions))
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        results = row_losses(head, *leaves, None, (), labels, smoothing, has_means=has_means)
        used = results if has_means else results[:2]
        total = sum((index + 1.0) * one.double().sum() for index, one in enumerate(used))
        return [*(one.detach() for one in used), *torch.autograd.grad(total, leaves)]

    for own, other in zip(found(Chunking(3, run=compiled.run)), found(Chunking(3)), strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)
    assert compiled.of_loss.num_graphs >= 2
    assert not compiled.of_loss.uncompiled


class Sloped(nn.Module):
    """Returns its input, too, of which a loss can take the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.requires_grad_()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden), x


class Kept(Sloped):
    """Its blocks keep what they return for their backward, so that torch refuses a second one before it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Tanh()) for _ in range(2)
        )


def penalised(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    scores, x = outputs
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return (scores * slope.square().sum(1, keepdim=True)).sum(), len(scores)


@pytest.mark.parametrize("model", [Sloped, Kept])
def test_a_loss_that_takes_gradients_through_blocks_is_refused_with_what_works(model: type[nn.Module]) -> None:
    data = [(one, one[:1]) for one in torch.randn(8, 8)]
    run_job = Job(train={"global_batch": 4, "steps": 1}, run={"compile": "blocks", "compile_backend": "aot_eager"})
    run = samestep.parallelize(model, penalised, lambda weights: torch.optim.SGD(weights), job=in_loop(run_job))
    batch = next(iter(samestep.batches(data, run_job)))
    with pytest.raises(JobError, match=r"differentiated once, by the step. Set run.compile = 'none'"):
        run.step(batch)
