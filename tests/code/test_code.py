"""Code that people write is equal to one device in every layout, or refused by name: the rows of the modules beside this one."""

from __future__ import annotations

import pytest

from samestep.datasets import batches
from samestep.errors import InputError, UnprovenError
from samestep.job import Job
from tests.code import (
    checkpointing,
    hooks,
    odd_models,
    published,
    random_numbers,
    repeated_calls,
    samples,
    stages,
    state,
)
from tests.code.rows import parameter
from tests.laboratory import job_for, job_of, observe, on_ranks, prepared_run, prove, prove_refused, reference
from tests.models import Tokens

MODULES = (samples, stages, state, random_numbers, checkpointing, odd_models, repeated_calls, hooks, published)


@pytest.mark.parametrize(("layout", "code"), [parameter(row) for module in MODULES for row in module.EQUAL])
def test_code_is_equal_to_one_device(layout: str, code: str) -> None:
    prove(layout, code)


@pytest.mark.parametrize(
    ("layout", "code", "words", "error", "waiver"),
    [parameter(row) for module in MODULES for row in getattr(module, "REFUSED", ())],
)
def test_code_is_refused_by_name(layout: str, code: str, words: str, error: type[InputError], waiver: str) -> None:
    prove_refused(layout, code, words, error, waiver)


@pytest.mark.parametrize(
    ("layout", "code", "words"),
    [parameter(row) for module in (state, random_numbers, checkpointing) for row in module.REMARKED],
)
def test_what_is_allowed_or_has_no_effect_is_named(layout: str, code: str, words: str) -> None:
    remarks = on_ranks(layout, observe, code, job_for(code))[0].remarks
    assert any(words in remark for remark in remarks) if words else not remarks


def test_reentrant_checkpoints_train_nothing_without_a_gradient() -> None:
    held = {name: tensor for name, _, _, tensor in reference(checkpointing.FROZEN_START).gradients[0]}
    assert not held["blocks.0.mix.weight"].any(), "no gradient reaches it"
    assert held["head.weight"].any()


def test_a_trace_puts_back_what_it_changed() -> None:
    kept = list(state.KEPT)
    prove_refused("dp=1 microbatch=2", "CallsInGlobal", "keeps .*KEPT", UnprovenError, "state")
    assert kept == state.KEPT


def test_a_waiver_lets_code_be_different() -> None:
    with pytest.raises(AssertionError):
        prove("dp=2", "between minus_the_batch", job_of(steps=2, run={"allow": ["samples"]}))


def _forward_only(rank: int, world: int, model: str, layout: str, job: Job) -> list[float]:
    """Return the means of a validation loss, and of what the model returns for five samples, before and after a step."""
    run, found = prepared_run(rank, world, model, layout, job), list[float]()
    for batch in batches(Tokens(), job):
        found.append(run.evaluate(batch)["loss"])
        found.append(float(run.outputs({"input_ids": batch.samples(range(5))["input_ids"]}).square().sum()))
        run.step(batch)
    return found


@pytest.mark.parametrize("code", ["repeats each_sample_through_all", "repeats chunks_of_two"])
def test_forwards_outside_of_steps_take_more_samples_than_a_micro_batch(code: str) -> None:
    """One sample calls each module once, so that a step frees its weights at once: five samples in turn need them again."""
    job = job_for(code)
    expected = _forward_only(0, 1, code, "dp=1", job)
    for found in on_ranks("dp=2 zero=3 microbatch=1", _forward_only, code, job):
        assert found == pytest.approx(expected, rel=1e-9)
