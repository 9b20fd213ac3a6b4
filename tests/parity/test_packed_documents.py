"""Documents packed into samples stay apart, and compute in every layout what a mask of all pairs of tokens computes.

One device with transformers' own mask is the reference: no document is attended alone there. float64, 1e-9. Known silent errors:
documents that see each other, a mask of a slice instead of the sample, boundaries of one sample for all samples of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

import samestep
from samestep.building import model as calls
from samestep.building.attention import DocumentMask, fused
from samestep.building.attention.fused import lengths_of
from samestep.building.model import call_model
from samestep.datasets.batch import example_of
from samestep.errors import ModelError
from samestep.job import Job
from samestep.layout import Layout
from tests.device.real_gpu import refusal
from tests.laboratory import (
    TOLERANCE,
    Observed,
    assert_ledger,
    assert_same,
    clipped,
    follow,
    make_run,
    reference,
    source_of,
)
from tests.models import DEEP, LENGTH, MODELS, Tokens, hf
from tests.models import PackedTokens as Packed
from tests.pool import pool


def observed(rank: int, world: int, model: str, layout: str, job: Job) -> Observed:
    """The steps of a run, and in its notes the attentions of single documents."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        attend = fused.attend_each
        patch.setattr(fused, "attend_each", lambda *given, **how: (seen.append("attended"), attend(*given, **how))[1])
        found = follow(make_run(rank, world, model, layout, job, Packed), Packed(), job, record=True)
    return Observed(**{**vars(found), "notes": seen})


@functools.cache
def dense(model: str) -> Observed:
    """What one device computes with transformers' own mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "packed_documents", lambda *_, **__: nullcontext())
        found = observed(0, 1, model, "dp=1", clipped())
    assert not found.notes
    return found


CASES = [
    ("dp=1 microbatch=4", "llama"),
    ("cp=2", "deep_gpt2"),
    ("tp=2 sequence_parallel recompute=selective", "llama"),
    ("pp=2 microbatch=2 recompute=full", "llama"),
    ("cp=2 exchange=ring", "deep_gpt2"),
]
NIGHTLY = [
    ("dp=2 cp=2 zero=3", "deep_qwen3"),
    ("cp=3", "deep_llama"),
    ("cp=4", "deep_llama"),
    ("pp=2 cp=2 microbatch=4", "deep_llama"),
    ("pp=2 schedule=zero-bubble microbatch=2", "deep_gpt2"),
    ("dp=2 zero=3 recompute=selective", "deep_qwen3"),
    ("tp=2 cp=2", "deep_llama"),
    ("dp=2", "deep_mixtral"),
]


@pytest.mark.parametrize(
    ("layout", "model"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_documents_packed_into_a_sample_stay_apart(layout: str, model: str) -> None:
    ranks = of_ranks(layout, model, clipped())
    assert_same(ranks, dense(model), TOLERANCE)
    assert dense(model).losses != reference(model).losses
    assert_ledger(ranks, layout)
    assert all(seen.notes for seen in ranks) or "ring" in layout or layout == "cp=3"


def of_ranks(layout: str, model: str, job: Job, device: str = "cpu") -> list[Observed]:
    where = Layout(layout)
    source_of(model, where, job, Packed)  # which the ranks inherit
    if where.world_size == 1:
        return [observed(0, 1, model, layout, job)]
    return pool(where.world_size, device).run(observed, model, layout, job)


def test_weights_are_dropped_within_documents() -> None:
    assert_same(of_ranks("cp=2 microbatch=2", "dropping_llama", clipped()), dense("dropping_llama"), TOLERANCE)


@pytest.mark.nightly
def test_no_graph_is_made_anew_for_other_documents() -> None:
    job = Job(**{**clipped().model_dump(), "run": {"compile": "blocks", "compile_backend": "aot_eager"}})
    run = make_run(0, 1, "llama", "dp=1 microbatch=2", job, Packed)
    assert_same([follow(run, Packed(), job)], dense("llama"), TOLERANCE)
    compiler = run.assembly.model.compiled.compiler
    assert compiler.num_graphs
    assert (compiler.num_again, compiler.uncompiled) == (0, {})


@pytest.mark.nightly
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_documents_on_a_device_are_those_of_a_cpu() -> None:
    assert_same(of_ranks("tp=2", "llama", clipped(), "cuda"), dense("llama"), TOLERANCE)


# -- the mask ------------------------------------------------------------------------------------------


def masks_of(build: Callable[[], nn.Module], **batch: Tensor) -> list[Any]:
    """Return the masks that a model gives to its attentions."""
    seen = []

    def attention(*args: Any, attn_mask: Any = None, **named: Any) -> Tensor:
        seen.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **named)

    attend = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        call_model(build(), {"input_ids": Tokens().input_ids[:2], **batch})
    return seen


def positions(*runs: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(run) for run in sample]) for sample in runs])


def test_a_mask_of_documents_is_that_of_transformers() -> None:
    packed = positions((3, 9), (LENGTH,))
    (ours, *_), (theirs, *_) = (of(masks_of, MODELS["llama"], position_ids=packed) for of in (_with, _without))
    assert isinstance(ours, DocumentMask)
    assert ours.lengths == [[3, 9], [LENGTH]]
    assert type(theirs) is Tensor
    assert torch.equal(ours.dense(), theirs)
    assert torch.equal(ours & True, theirs)  # whatever else reads it
    assert ours.untyped_storage().nbytes() == 2 * LENGTH


@pytest.mark.parametrize(("window", "is_dense"), [(LENGTH, False), (LENGTH - 1, True)])
def test_a_window_as_long_as_a_sample_hides_nothing(window: int, is_dense: bool) -> None:
    windowed = functools.partial(hf, "mistral", num_key_value_heads=2, sliding_window=window, **DEEP)
    packed = positions((3, 9), (LENGTH,))
    ours, theirs = (of(masks_of, windowed, position_ids=packed)[0] for of in (_with, _without))
    assert isinstance(ours, DocumentMask) is not is_dense
    assert torch.equal(ours & True, theirs)
    assert bool(theirs[1, 0, -1, 0]) is not is_dense


def _with(function: Any, *args: Any, **named: Any) -> Any:
    return function(*args, **named)


def _without(function: Any, *args: Any, **named: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "packed_documents", lambda *_, **__: nullcontext())
        return function(*args, **named)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        ("llama", {}),
        ("llama", {"position_ids": positions((LENGTH,), (LENGTH,))}),
        ("llama", {"attention_mask": torch.ones(2, LENGTH), "position_ids": positions((3, 9), (4, 8))}),
        ("deep_gemma", {"position_ids": positions((3, 9), (4, 8))}),
    ],
)
def test_other_masks_are_what_they_were(model: str, batch: dict[str, Tensor]) -> None:
    ours, theirs = (of(masks_of, MODELS[model], **batch) for of in (_with, _without))
    assert [type(one) for one in ours if not isinstance(one, DocumentMask)] == [
        type(other) for one, other in zip(ours, theirs, strict=True) if not isinstance(one, DocumentMask)
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one is other is None or torch.equal(one & True, other)


@pytest.mark.parametrize("lengths", [[[5], [2, 3], [1, 1, 1, 1, 1]], [[1, 4], [4, 1], [5]]])
def test_boundaries_are_those_of_each_sample(lengths: list[list[int]]) -> None:
    q, k, v = torch.randn(3, 3, 2, 5, 4, dtype=torch.float64)
    documents = torch.stack([torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in lengths])
    assert lengths_of(documents) == lengths
    mask = DocumentMask.of(documents, lengths)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense()))


# -- the example ---------------------------------------------------------------------------------------


class FirstIsOne(Tokens):
    """A first sample that is one document, and others of several."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        runs = (LENGTH,) if index == 0 else (2, LENGTH - 2) if index % 2 else (6, LENGTH - 6)
        return {**super().__getitem__(index), "position_ids": positions(runs)[0]}


def test_the_example_has_documents() -> None:
    assert (example_of(FirstIsOne())["position_ids"].diff() != 1).any()
    assert torch.equal(example_of(Tokens())["input_ids"], Tokens().input_ids[:1])


# -- models that ask no positions, or have other layers than attention -------------------------------

_SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16}
_WIDE: dict[str, Any] = {**_SMALL, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
OTHERS: dict[str, tuple[Any, bool]] = {
    "Llama with a cache": (lambda: LlamaForCausalLM(LlamaConfig(**_WIDE, use_cache=True)), True),
    "Bloom": (lambda: BloomForCausalLM(BloomConfig(**_SMALL, n_layer=1, n_head=2)), False),
    "Mamba2": (
        lambda: Mamba2ForCausalLM(
            Mamba2Config(**_SMALL, num_hidden_layers=1, state_size=8, num_heads=4, head_dim=8, n_groups=1)
        ),
        False,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_documents_of_any_model_stay_apart_or_are_refused(name: str) -> None:
    build, is_exact = OTHERS[name]
    torch.manual_seed(0)
    model, ids = build(), torch.randint(0, 64, (4, 16))
    alone = nn.functional.cross_entropy(model(ids.view(8, 8)).logits.flatten(0, 1), ids.flatten()).item()
    run = samestep.parallelize(model, _of_aligned, torch.optim.SGD, layout="")
    packed = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(8).repeat(4, 2)}
    if is_exact:
        assert run.step(packed).loss == pytest.approx(alone, rel=1e-5)
        return
    with pytest.raises(
        ModelError, match=rf"position_ids begin again .* {type(model).__name__}, which makes no attention mask"
    ):
        run.step(packed)
    plain = samestep.parallelize(build(), _of_aligned, torch.optim.SGD, layout="")
    assert plain.step(packed | {"position_ids": torch.arange(16).repeat(4, 1)}).loss > 0


def _of_aligned(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels, reduction="sum"), len(labels)
