"""Laws of `loss_chunk`: it changes no collective and no other layer, costs one more product of the head, and saves the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.enumeration import candidates
from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import during_step
from samestep.program.ops import OpKind
from samestep.strategies import program_of, programs_of
from samestep.wings.plan.search import plan
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import LAW, MACHINES, MODELS, Case, cases, job_of, predictions


@LAW
@given(cases(loss_chunk=st.sampled_from([1, 3, 16, 1000])))
def test_a_rank_sends_what_it_sends_without_chunks(case: Case) -> None:
    plain = programs_of(case.model, case.job, replace(case.layout, loss_chunk=None), case.program.step.ranks_per_node)
    assert [program.ledger() for program in case.programs] == [program.ledger() for program in plain]


@LAW
@given(cases(loss_chunk=st.sampled_from([1, 3, 16, 1000])))
def test_a_step_has_one_product_of_the_head_more(case: Case) -> None:
    step = case.program.step
    plain = programs_of(case.model, case.job, replace(case.layout, loss_chunk=None), step.ranks_per_node)
    last = case.programs[-1]
    head = next(one for one in last.step.model.layers[-1].products if one.owner == "lm_head")
    once = sum(head.flops * size for size in last.step.microbatch_sizes)

    def flops(program: object) -> int:
        return sum(op.flops for _, op in program.ops())  # type: ignore[attr-defined]

    assert [flops(one) for one in case.programs[:-1]] == [flops(one) for one in plain[:-1]]
    assert flops(last) == flops(plain[-1]) + once


@pytest.mark.parametrize("what", ["tiny", "tied", "wide"])
@pytest.mark.parametrize("words", ["dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4", "cp=2"])
def test_chunks_take_no_less_time(what: str, words: str) -> None:
    layout, model, hardware = Layout(words), MODELS[what], MACHINES["slow"]
    plain_s = predict(model, job_of(), layout, hardware).step_s
    for chunk in (16, 1024, 4096):
        assert predict(model, job_of(), replace(layout, loss_chunk=chunk), hardware).step_s >= plain_s


def test_the_logits_are_in_no_peak() -> None:
    model = MODELS["wide"]
    plain, chunked = (
        during_step(program_of(model, job_of(), Layout(words))) for words in ("dp=1", "dp=1 loss_chunk=1024")
    )
    head = model.layers[-1].head
    assert head is not None
    assert plain.total > 16 * head.logits * 4 > chunked.total
    assert chunked.logits < plain.logits / 8


def test_a_backward_that_is_split_leaves_the_head_in_one_piece() -> None:
    layout = "pp=2 microbatch=4 schedule=zero-bubble"
    for words, is_apart in ((layout, True), (f"{layout} loss_chunk=8", False)):
        last = programs_of(MODELS["tiny"], job_of(), Layout(words))[-1]
        weights = [op for _, op in last.ops() if op.kind is OpKind.WEIGHT and op.owner == "norm+lm_head"]
        assert any(op.flops for op in weights) == is_apart


def test_a_plan_for_few_classes_has_no_chunks_and_one_for_many_has() -> None:
    for what, has_chunks in (("tiny", False), ("vision", False), ("wide", True)):
        listed = candidates.layouts_of(2, MODELS[what], job_of(), thin=MACHINES["a100"])
        assert any(one.loss_chunk for one in listed) == has_chunks


@pytest.mark.parametrize("part", [0.9, 0.4, 0.1])
def test_where_memory_is_short_a_plan_takes_chunks_and_finds_the_best_that_fits(part: float) -> None:
    model, given_job = MODELS["wide"], job_of(8)
    roomy = plan(model, given_job, MACHINES["slow"], 1, top=1).best[0]
    assert roomy.layout.loss_chunk is None
    hardware = replace(MACHINES["slow"], memory_bytes=int(part * roomy.peak.total))
    found = plan(model, given_job, hardware, 1, top=1)
    considered = candidates.layouts_of(1, model, given_job, thin=hardware)
    fitting = [one.step_s for one in predictions(model, given_job, hardware, considered)]
    assert bool(found.best) == bool(fitting)
    if fitting:
        assert found.best[0].step_s == pytest.approx(min(fitting))
    if part == 0.1:
        assert found.best[0].layout.loss_chunk is not None


@pytest.mark.parametrize(
    ("what", "words", "loss", "text"),
    [
        ("vision", "dp=2 loss_chunk=64", "cross_entropy", "it is not proven that its loss needs logits row by row"),
        ("tiny", "tp=2 loss_chunk=64", "own:loss", "Set train.loss = 'cross_entropy', or tp=1"),
    ],
)
def test_what_cannot_be_chunked_is_refused_with_what_works(what: str, words: str, loss: str, text: str) -> None:
    job = Job(train={"global_batch": 8, "loss": loss})
    with pytest.raises(LayoutError, match=text):
        program_of(MODELS[what], job, Layout(words))
