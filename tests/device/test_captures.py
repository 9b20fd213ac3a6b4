"""What a CUDA graph of a micro-batch's forward and backward needs, held on the simulated device; nothing is captured here.

`strategies/whole_graph.py` says where nothing prevents one. There the host neither waits nor copies in a forward or a backward,
weights, buffers and buckets keep their addresses over steps, and what graphs return is gone before they run again. Where it
names a reason, something of this kind is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from samestep.datasets import batches
from samestep.job import Job
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.ledger import Ledger
from samestep.runtime.microbatches import Microbatches
from samestep.runtime.run import Run
from samestep.strategies.whole_graph import why_not_captured
from tests.device import waits
from tests.device.real_gpu import refusal
from tests.laboratory import clipped, job_of, make_run, on_ranks
from tests.models import MODELS, BatchNormed, Tokens

on_the_device = pytest.mark.skipif(bool(refusal()), reason=refusal())

Seen = tuple[str, Counter[waits.Place], int, list[tuple[int, ...]]]
"""Why no CUDA graph is possible, the waits and copies within the tasks of all steps but the first two, the collectives there,
and the addresses after each of these steps."""


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def addresses(run: Run) -> tuple[int, ...]:
    """Return where weights, buffers, and gradients are between two steps."""
    held = run.assembly
    flats = getattr(held.weights.store, "_flats", [])
    tensors = [*held.model.module.parameters(), *held.model.module.buffers(), *(flat.gradients for flat in flats)]
    return tuple(one.data_ptr() for one in tensors)


def followed(rank: int, world: int, model: str, layout: str, job: Job) -> Seen:
    """Take steps, and look at what happens within their forwards and backwards; samples are read before them."""
    run = make_run(rank, world, model, layout, job)
    within: Counter[waits.Place] = Counter()
    number = 0

    def looking(task: Callable[..., None]) -> Callable[..., None]:
        def looked(self: Interpreter, which: Any, microbatches: Microbatches, totals: Tensor) -> None:
            nonlocal number
            if which.microbatch not in microbatches._held and which.body.kind.name == "FORWARD":
                microbatches.samples(which.microbatch)
            before = Counter(waits.counted)
            with Ledger() as ledger:
                task(self, which, microbatches, totals)
            within.update(Counter(waits.counted) - before)
            number += sum(map(len, ledger.rows.values()))

        return looked

    found = []
    with waits.counting(), replaced(Interpreter, "_run", looking):
        for step, batch in enumerate(batches(Tokens(), job)):
            if step == 2:
                within.clear()
                number = 0
            run.step(batch)
            if step >= 2:
                found.append(addresses(run))
    return why_not_captured(run.assembly.parallel.program.step), within, number, found


def running_ahead(precision: str, steps: int = 5) -> Job:
    return job_of(precision, steps, optimizer={"clip_norm": 0.5}, train={"watch_every": 0})


@on_the_device
@pytest.mark.parametrize(
    ("layout", "model", "precision"),
    [
        ("dp=1 microbatch=4", "llama", "bf16"),
        ("dp=1 recompute=full loss_chunk=5", "llama", "float32"),
        ("dp=2 zero=1 microbatch=2", "plain", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("dp=1", "llama", "float32"),
                ("dp=2", "llama", "bf16"),
                ("dp=2 microbatch=2", "plain", "float32"),
                ("dp=1", "own_batch_norm", "float32"),
                ("dp=1 microbatch=4", "capped", "bf16"),
            ]
        ),
    ],
)
def test_where_nothing_prevents_a_capture_the_host_is_not_needed_and_nothing_moves(
    layout: str, model: str, precision: str
) -> None:
    for reason, within, _, found in on_ranks(layout, followed, model, running_ahead(precision), device="cuda"):
        assert reason == ""
        assert not waits.by_function(within)
        assert not within, "copies that the host asks for"
        assert len(found) == 3
        assert len(set(found)) == 1, "weights, buffers or gradients have moved"


class TokenNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class NormedTokens(BatchNormed):
    """Batch norm of torch over all tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = TokenNorm(10)  # type: ignore[assignment]


MODELS["batch norm of tokens"] = NormedTokens


@on_the_device
@pytest.mark.parametrize(
    ("layout", "model", "reason"),
    [
        ("dp=1 microbatch=4", "gpt2_with_dropout", "draws masks (dropout)"),
        ("dp=2 ep=2", "mixtral_balanced", "ep=2 moves tensors"),
        ("tp=2", "llama", "tp=2 moves tensors"),
        pytest.param("dp=2", "batch norm of tokens", "statistics over ranks", marks=pytest.mark.nightly),
        pytest.param("dp=2 zero=3", "llama", "zero=3 moves tensors", marks=pytest.mark.nightly),
    ],
)
def test_where_a_reason_is_named_the_host_or_another_rank_is_needed(layout: str, model: str, reason: str) -> None:
    for named, within, number, _ in on_ranks(layout, followed, model, running_ahead("bf16"), device="cuda"):
        assert reason in named
        assert within or number, "nothing was seen that prevents it"


# -- what a graph returns --------------------------------------------------------------------------


def kept_beyond(layout: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how often the graph of a whole model has run forward, and how many results of graphs were still held when it ran again."""
    returned: list[StorageWeakRef] = []
    forwards: list[torch.fx.GraphModule] = []  # of the model, and of the loss, which runs in between
    calls = held = 0

    def watched(graph: torch.fx.GraphModule, inputs: Any, *, is_forward: bool) -> Callable[..., Any]:
        if is_forward:
            forwards.append(graph)

        def run(*args: Any) -> Any:
            nonlocal calls, held
            if graph is forwards[0]:
                calls += 1
                held += sum(not one.expired() for one in returned)
                returned.clear()
            given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
            results = graph.forward(*args)
            made = [one.untyped_storage() for one in results if isinstance(one, Tensor)]
            returned.extend(StorageWeakRef(one) for one in made if one._cdata not in given)
            return results

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: watched(graph, inputs, is_forward=True),
        bw_compiler=lambda graph, inputs: watched(graph, inputs, is_forward=False),
    )
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda *given, **options: backend(*given))
    run = make_run(0, 1, "llama", layout, job)
    for batch in batches(Tokens(), job):
        run.step(batch)
    assert not run.assembly.model.compiled.compiler.uncompiled
    return calls, held


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        ("float32", "reduce-overhead"),
        ("float32", "default"),
        pytest.param("bf16", "default", marks=pytest.mark.nightly),
    ],
)
def test_what_a_graph_returns_is_gone_before_it_runs_again(
    precision: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is written anew then, in a CUDA graph: gradients have been copied by that time, and no loss is kept.

    Without CUDA graphs a rank alone leaves float32 gradients where autograd has put them, which is what the copies are for.
    """
    run = {"compile": "model", "compile_mode": mode}
    calls, held = kept_beyond("dp=1 microbatch=4", Job(**{**clipped(precision).model_dump(), "run": run}), monkeypatch)
    assert calls > 3
    assert bool(held) is (precision == "float32" and mode == "default")
