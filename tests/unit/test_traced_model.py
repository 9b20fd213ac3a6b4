"""A model is looked at once: what was learned of it is frozen, and a run that is given it asks the modules nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.examination import traced_forward
from samestep.examination.examine import Source, build_blueprint, examine, with_new_blueprint
from samestep.independence import sequence_proof, tensor_plan, token_slices
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest, during_step
from samestep.randomness import masks
from samestep.runtime.axes.pipeline.recorded_flows import trace_for_layout
from samestep.strategies import programs_of
from samestep.tracing import experts
from tests.laboratory import clipped, run_from
from tests.models import MODELS, ExpertDispatch, Tokens
from tests.pool import pool

EXAMINATIONS = [
    (experts, "experts_of"), (tensor_plan, "cuts_of"), (tensor_plan, "shareable_heads"), (sequence_proof, "_parts"),
    (token_slices, "prove"), (masks, "has_dropout"), (traced_forward, "trace"),
]  # fmt: skip
"""Functions that find something out about a model."""


def source_of(model: str, layout: str) -> Source:
    source = Source(MODELS[model], loss_of(clipped()), optimizer_of(clipped()), model)
    example = next(batches(Tokens(), clipped())).samples([0])
    traced = examine(source, clipped(), example, Layout(layout))
    return dataclasses.replace(source, prepared=traced)


def examined(patch: pytest.MonkeyPatch, called: list[str]) -> None:
    """Note every call of a function that finds something out about a model."""
    for home, name in EXAMINATIONS:
        original = getattr(home, name)

        def noting(*args: Any, original: Any = original, name: str = name, **named: Any) -> Any:
            called.append(name)
            return original(*args, **named)

        patch.setattr(home, name, noting)


def step_of_a_traced_model(rank: int, world: int, model: str, layout: str) -> tuple[list[str], list[str]]:
    """Return which examinations tracing made, and which a step of a run of the traced model."""
    before: list[str] = []
    after: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        examined(patch, before)
        source = source_of(model, layout)
    run = run_from(source, layout, clipped(), rank, world)
    with pytest.MonkeyPatch.context() as patch:
        examined(patch, after)
        run.step(next(batches(Tokens(), clipped())))
    return before, after


@pytest.mark.parametrize(("model", "layout"), [("mixtral", "tp=2 sequence_parallel"), ("llama_even", "cp=2")])
def test_a_run_of_a_traced_model_examines_nothing(model: str, layout: str) -> None:
    for before, after in pool(2).run(step_of_a_traced_model, model, layout):
        assert before.count("experts_of") == before.count("has_dropout") == before.count("trace") == 1
        assert before.count("cuts_of") == ("tp=" in layout)  # a layout without tp needs no plan
        assert not after


def test_what_was_learned_holds_of_another_copy_of_the_model() -> None:
    source = source_of("mixtral", "cp=2")
    again = with_new_blueprint(source, clipped())
    assert source.prepared is not None
    assert again.analysis is source.prepared.analysis
    assert again.module is not source.prepared.module


def test_a_model_without_sequences_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is nothing to slice is known from then on too."""
    called: list[str] = []
    examined(monkeypatch, called)
    source = Source(MODELS["mixtral"], loss_of(clipped()), optimizer_of(clipped()))
    example = next(batches(Tokens(), clipped())).samples([0])
    short = {name: tensor[:, :1] for name, tensor in example.items()}
    once = dataclasses.replace(source, prepared=examine(source, clipped(), short, Layout("cp=2")))
    assert examine(once, clipped(), short, Layout("cp=2")) is once.prepared
    assert called.count("prove") == 1


@pytest.mark.parametrize(
    ("model", "layouts"), [("mixtral", ["dp=2 ep=2 zero=1"]), ("llama_even", ["cp=2", "dp=2 loss_chunk=8"])]
)
def test_without_tp_a_model_needs_no_proof_of_a_plan(model: str, layouts: list[str]) -> None:
    """The steps and their memory are then those of a model whose plan was proven; with tp the plan is proven after all."""
    source = Source(MODELS[model], loss_of(clipped()), optimizer_of(clipped()), model)
    example = next(batches(Tokens(), clipped())).samples([0])
    whole = dataclasses.replace(source, prepared=examine(source, clipped(), example))
    lean = dataclasses.replace(source, prepared=examine(source, clipped(), example, Layout()))
    for where in map(Layout, layouts):
        specs = [trace_for_layout(one, where, clipped(), example).spec for one in (whole, lean)]
        ours, theirs = (
            [(program.bodies, program.tasks, program.buckets, program.units, program.step.holdings, at_rest(program), during_step(program))
             for program in programs_of(spec, clipped(), where)]
            for spec in specs
        )  # fmt: skip
        assert ours == theirs
    cut = Layout("tp=2")
    with pytest.raises(LayoutError, match="its plan of tensor parallelism was not examined"):
        programs_of(lean.prepared.spec, clipped(), cut)  # type: ignore[union-attr]
    chunked = Layout("tp=2 loss_chunk=8")  # and whether the loss works on chunks is found out only then
    assert (
        trace_for_layout(lean, chunked, clipped(), example).spec
        == trace_for_layout(whole, chunked, clipped(), example).spec
    )


@pytest.mark.parametrize(
    ("examined_for", "lacking"),
    [
        ("dp=1", {"dp=4 zero=3": False, "dp=2 loss_chunk=8": True, "pp=2": False, "ep=2": False, "cp=2": True, "tp=2": True}),
        ("cp=2", {"dp=2": False, "dp=2 cp=2": False, "cp=4": True}),
        ("", {"dp=2": False, "dp=2 loss_chunk=8": False, "tp=2": False, "tp=4": True, "tp=2 sequence_parallel": True}),
    ],
)  # fmt: skip
def test_a_traced_model_is_examined_further_only_if_a_finding_is_missing(examined_for, lacking):
    """A model with all findings that a layout needs is returned as it is; missing ones are examined, and known from then on."""
    source = Source(MODELS["llama_even"], loss_of(clipped()), optimizer_of(clipped()), "llama_even")
    example = next(batches(Tokens(), clipped())).samples([0])
    known = examine(source, clipped(), example, Layout(examined_for) if examined_for else None)
    source = dataclasses.replace(source, prepared=known)
    for layout, lacks in ((Layout(words), lacks) for words, lacks in lacking.items()):
        found = examine(source, clipped(), example, layout)
        assert (found is not known) == lacks
        assert examine(dataclasses.replace(source, prepared=found), clipped(), example, layout) is found


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of newer torch
def test_a_part_that_torch_jit_has_compiled_is_refused_by_its_name() -> None:
    part = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.ModuleDict({"a": torch.nn.Linear(4, 8)})["a"])
    part[1] = torch.jit.script(part[1])
    for model in (part, lambda: part):
        source = Source(model, loss_of(clipped()), optimizer_of(clipped()), "parts")
        with pytest.raises(
            ModelError, match=r"^1 is compiled by torch.jit, .* Use the module that was given to torch.jit.script"
        ):
            build_blueprint(source, clipped())


class Remembering(nn.Module):
    """A forward that adds what the attention of the forward before has returned, of all samples."""

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.mask = mask
        self.register_buffer("last", torch.zeros(6, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)[:, None]
        y = F.scaled_dot_product_attention(x, x, x, self.mask)[:, 0]
        logits: torch.Tensor = self.head(y + self.last)
        self.last = y.detach().mean(0)
        return logits


@pytest.mark.parametrize("mask", [None, torch.zeros(6, 6)], ids=str)
def test_an_attention_that_a_buffer_keeps_is_of_samples(mask: torch.Tensor | None) -> None:
    example = {"tokens": torch.arange(24).view(4, 6) % 16, "labels": torch.arange(24).view(4, 6) % 16}
    source = Source(lambda: Remembering(mask), loss_of(clipped()), optimizer_of(clipped()), "remembering")
    (state,) = examine(source, clipped(), example).analysis.states
    assert (state.name, state.of_samples, state.is_restorable) == ("last", True, False)


class LookingDispatch(ExpertDispatch):
    """Its code looks at values behind the first block, so that the trace begins again with all of them."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(input_ids))
        return self.head(self.blocks[1](x if float(x.sum()) < 1e30 else -x))


def test_a_trace_that_begins_again_has_each_dispatch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "looking dispatch", LookingDispatch)
    found = source_of("looking dispatch", "dp=2").prepared
    assert found is not None
    owners = [[dispatch.owner for dispatch in layer.dispatches] for layer in found.spec.layers]
    assert owners == [[], ["blocks.0.experts"], ["blocks.1.experts"], []]
