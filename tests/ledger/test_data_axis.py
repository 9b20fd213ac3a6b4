"""The ledger: what torch really sent equals what the program lists, for every data-axis layout; and the bytes held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.tensor import DTensor

from samestep.datasets import batches
from samestep.job import Job
from samestep.memory.memory_use import at_rest
from samestep.program.ops import Op
from samestep.program.program import LedgerRow
from samestep.runtime.axes.pipeline.stage_messages import Messages
from samestep.runtime.ledger import Ledger
from samestep.runtime.weights.replicated import Replicated
from samestep.schedules import Action
from tests.laboratory import combinations, job_of, make_run, on_ranks, prove_ledger
from tests.models import Tokens
from tests.parity.axes import DATA, MODELS_HERE


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "model"), combinations(DATA, MODELS_HERE))
def test_what_was_sent_is_what_the_program_lists(layout: str, model: str) -> None:
    """In mixed precision, beside those of `test_precision.py`; in float64 every parity test holds it."""
    assert all(seen.ledger for seen in prove_ledger(layout, model))


def _order(rank: int, world: int, model: str, layout: str, job: Job) -> list[str]:
    """List what a rank issues in one step: messages to the stage before, and reductions of gradients."""
    run, issued = make_run(rank, world, model, layout, job), []
    step, send = Replicated._send, Messages.send

    def reduces(store: Replicated, flat: Any, op: Op, whole: Any) -> Any:
        issued.append(op.name)
        return step(store, flat, op, whole)

    def sends(messages: Messages, action: Action, *given: Any) -> None:
        issued.append(f"message of {action.kind}{action.microbatch}")
        send(messages, action, *given)

    with patch.object(Replicated, "_send", reduces), patch.object(Messages, "send", sends):
        run.step(next(iter(batches(Tokens(), job))))
    return issued


@pytest.mark.parametrize("layout", ["dp=2 pp=2 microbatch=2", "dp=2 pp=2 zero=1 microbatch=2"])
def test_a_stage_sends_the_gradient_of_its_input_before_it_reduces(layout: str) -> None:
    """The stage before waits for it: otherwise stages would reduce one after the other."""
    for rank, issued in enumerate(on_ranks(layout, _order, "llama", job_of("float32", steps=1))):
        reductions = [index for index, name in enumerate(issued) if "bucket" in name]
        backward = [index for index, name in enumerate(issued) if name.startswith("message of B")]
        assert reductions
        assert bool(backward) is (rank >= 2)
        assert max(backward, default=-1) < reductions[0]


def _rows_in_parts(
    rank: int, world: int, model: str, layout: str, job: Job
) -> tuple[list[LedgerRow], list[LedgerRow], list[LedgerRow]]:
    """Return what is sent for gradients and weights by two backwards, by the update behind them, and in the program of a step."""
    run = make_run(rank, world, model, layout, job)
    sent: list[list[LedgerRow]] = []
    for batch in batches(Tokens(), run.job):
        sent = []
        for act in (lambda batch=batch: [run.backward(batch) for _ in "ab"], run.update):
            with Ledger() as ledger:
                act()
            sent.append(_of_buckets(ledger.rows))
    return sent[0], sent[1], _of_buckets(run.program.ledger(group_of=run.assembly.parallel.mesh.group_of))


def _of_buckets(rows: Mapping[str, list[LedgerRow]]) -> list[LedgerRow]:
    return [row for group in sorted(rows) for row in rows[group] if row.owner.startswith("bucket")]


@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=2 zero=1 microbatch=1", "dp=2 pp=2 zero=1 microbatch=2", "dp_replicate=2 tp=2"]
)
def test_several_backwards_are_reduced_once_as_the_program_lists(layout: str) -> None:
    for backwards, update, predicted in on_ranks(layout, _rows_in_parts, "llama", job_of("float32", steps=2)):
        assert not backwards
        assert update == predicted != []


def _held(rank: int, world: int, model: str, layout: str, job: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Count, tensor by tensor, the bytes a rank holds after a step, and what the program says."""
    run = make_run(rank, world, model, layout, job)
    for batch in batches(Tokens(), job):
        run.step(batch)
    storages: dict[int, int] = {}
    for param in run.model.parameters():
        local = param._local_tensor if isinstance(param, DTensor) else param
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    held = {"weights": sum(storages.values())}
    tensors = [param.grad._local_tensor for param in run.model.parameters() if isinstance(param, DTensor)]
    tensors += [piece.gradient() for piece in run.updater.pieces]
    gradients = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    states = 0
    for piece in run.updater.pieces:
        states += sum(
            value.numel() * value.element_size()
            for value in run.updater.optimizer.state[piece.value].values()
            if value.shape == piece.value.shape
        )
        if piece.split is not None:
            remainders, _ = piece.split[0].tensors
            states += piece.value.numel() * remainders.element_size()
        elif piece.target is not None:
            states += piece.value.numel() * piece.value.element_size()
    held["gradients"], held["optimizer"] = sum(gradients.values()), states
    use = at_rest(run.program, rank=rank)
    return held, {"weights": use.weights, "gradients": use.gradients, "optimizer": use.optimizer}


HELD = ["dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=4 zero=1", "dp=4 zero=3"]
HELD += ["dp_replicate=2 dp_shard=2"]


@pytest.mark.parametrize(("layout", "model"), combinations(HELD, MODELS_HERE))
def test_bytes_held_are_those_the_program_says(model: str, layout: str) -> None:
    _assert_held(model, layout, "float32")


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2 zero=1", "plain"),
        ("dp=4 zero=3", "gpt2"),
        *(pytest.param(layout, "llama", marks=pytest.mark.nightly) for layout in HELD),
    ],
)
def test_bytes_held_in_bf16_are_those_the_program_says(model: str, layout: str) -> None:
    _assert_held(model, layout, "bf16")


def _assert_held(model: str, layout: str, precision: str) -> None:
    job = job_of(precision, 2, optimizer={"name": "adamw", "options": {}})
    for held, said in on_ranks(layout, _held, model, job):
        assert held == said


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp=4 ep=2", "bf16"),
        ("dp=4 ep=4 zero=1", "bf16"),
        ("dp=4 ep=2 zero=3", "bf16"),
        ("dp=2 cp=2 ep=4 zero=2", "float32"),
        pytest.param("dp=4 ep=2", "float32", marks=pytest.mark.nightly),
        pytest.param("dp=4 ep=4 zero=1", "float32", marks=pytest.mark.nightly),
        pytest.param("dp=4 ep=2 zero=3", "float32", marks=pytest.mark.nightly),
        pytest.param("dp=2 cp=2 ep=4 zero=2", "bf16", marks=pytest.mark.nightly),
    ],
)
def test_bytes_held_of_dealt_experts(layout: str, precision: str) -> None:
    job = job_of(precision, 2, optimizer={"name": "adamw", "options": {}})
    for held, said in on_ranks(layout, _held, "mixtral", job):
        assert held == said
