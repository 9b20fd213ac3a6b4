"""Recompute: the products that a backward repeats are those that the program lists, and so are the FLOPs of its repeated forwards."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from samestep.building.torch_seams import DispatchMode
from samestep.datasets import batches
from samestep.job import Job
from samestep.models.layer_parts import Product
from samestep.program.ops import OpKind
from samestep.program.repeated_products import KeptProducts, repeated_products
from samestep.runtime.axes.chunked_mlp import _Part
from samestep.runtime.axes.context import ring_attention
from samestep.runtime.run import Run
from tests.covering import daily
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens

_OF_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)


class Products(DispatchMode):
    """Counts the products of weights that run, and their FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _OF_WEIGHTS:
            self.seen["products"] += 1
            self.seen["flops"] += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def _step(run: Run, job: Job) -> Counter[str]:
    """Return the products of one step."""
    first, second = list(batches(Tokens(), job))[:2]
    run.step(first)
    with Products() as found:
        run.step(second)
    return found.seen


def _repeated(rank: int, world: int, model: str, layout: str, job: Job, recompute: str) -> list[Counter[str]]:
    """Return the products that a rank's step has more of than without recompute, and those of its program."""
    plain = _step(make_run(rank, world, model, layout, job), job)
    run = make_run(rank, world, model, f"{layout} recompute={recompute}", job)
    seen, step = _step(run, job), run.program.step
    listed: Counter[str] = Counter({"products": 0, "flops": 0})
    for _, op in run.program.ops():
        if op.kind is OpKind.RECOMPUTE:
            found = [one for one in repeated_products(step, step.model.layers[op.layer or 0]) if _is_counted(one)]
            listed["products"] += len(found)
            listed["flops"] += sum(one.flops for one in found) * step.microbatch_samples
    seen.subtract(plain)
    return [seen, listed]


def _is_counted(product: Product) -> bool:
    return not (product.is_attention or product.is_batched or product.chunk_rows)


CASES = [
    ("dp=1", "alternate", "llama"),
    ("dp=1 microbatch=2", "selective", "llama"),
    ("dp=1", "full", "llama"),
    ("dp=1", "alternate", "gpt2_with_dropout"),
    ("dp=1", "full", "gpt2_with_dropout"),
    ("dp=1 microbatch=4", "alternate", "deep_gemma3"),
    ("dp=1 mlp_chunk=4", "alternate", "deep_gemma"),
    ("dp=2 zero=3", "alternate", "plain"),
    ("tp=2 sequence_parallel", "alternate", "deep_llama"),
    ("tp=2", "full", "gpt2_even"),
    ("pp=2 microbatch=2 schedule=zero-bubble", "alternate", "deep_llama"),
    ("cp=2 exchange=ring", "alternate", "deep_llama"),
]


@pytest.mark.parametrize(("layout", "recompute", "model"), daily(CASES))
def test_a_backward_repeats_the_products_that_the_program_lists(layout: str, recompute: str, model: str) -> None:
    job = job_of("float64", steps=2)
    for seen, listed in on_ranks(layout, _repeated, model, job, recompute):
        assert dict(seen) == dict(listed)
        assert recompute == "selective" or listed["flops"]


def _calls_of_functions(rank: int, world: int, model: str, layout: str, job: Job) -> dict[str, int]:
    """Return how often a step computes forwards of functions with a backward of their own, which hide their products."""
    run, calls = make_run(rank, world, model, layout, job), Counter[str]()
    first, second = list(batches(Tokens(), job))[:2]
    run.step(first)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    chunks = patch.object(_Part, "computed", counted("chunks", _Part.computed))
    visits = patch.object(ring_attention, "_visit_forward", counted("visits", ring_attention._visit_forward))
    with chunks, visits:
        run.step(second)
    repeated = [
        one
        for _, op in run.program.ops()
        if op.kind is OpKind.RECOMPUTE and op.layer is not None
        for one in repeated_products(run.program.step, run.program.step.model.layers[op.layer])
    ]
    listed = {
        "chunks": bool([one for one in repeated if one.chunk_rows]),
        "visits": any(one.is_hidden for one in repeated),
    }
    return {**calls, **{f"{name} are listed": said for name, said in listed.items()}}


@pytest.mark.parametrize(
    ("layout", "model", "of"),
    [("dp=1 mlp_chunk=4", "deep_gemma", "chunks"), ("cp=2 exchange=ring", "deep_llama", "visits")],
)
def test_functions_with_a_backward_of_their_own_are_repeated(layout: str, model: str, of: str) -> None:
    job = job_of("float64", steps=2)
    plain = on_ranks(layout, _calls_of_functions, model, job)
    for seen, once in zip(
        on_ranks(f"{layout} recompute=alternate", _calls_of_functions, model, job), plain, strict=True
    ):
        assert seen[of] == 2 * once[of] > 0
        assert seen[f"{of} are listed"]
        assert not once[f"{of} are listed"]


def test_every_second_product_is_kept_counted_back_from_the_last_that_is_repeated() -> None:
    kept = KeptProducts(every=2, repeated=6, total=7)
    assert [kept.keeps(number) for number in range(7)] == [False, True, False, True, False, True, False]
    assert all(KeptProducts(1, 6, 7).keeps(number) for number in range(6))
    assert not KeptProducts(1, 6, 7).keeps(6)
    beyond = [kept.keeps(number) for number in range(7, 11)]  # of experts that the traced sample did not choose
    assert beyond == [True, False, True, False]
