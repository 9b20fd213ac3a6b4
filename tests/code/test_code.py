"""Code that people write is equal to one device in every layout, or refused by name: the rows of the modules beside this one."""

from __future__ import annotations

import pytest

from samestep.errors import InputError, UnprovenError
from tests.code import checkpointing, odd_models, random_numbers, samples, stages, state
from tests.code.rows import parameter
from tests.laboratory import job_for, job_of, observe, on_ranks, prove, prove_refused, reference

MODULES = (samples, stages, state, random_numbers, checkpointing, odd_models)


@pytest.mark.parametrize(("layout", "code"), [parameter(row) for module in MODULES for row in module.EQUAL])
def test_code_is_equal_to_one_device(layout: str, code: str) -> None:
    prove(layout, code)


@pytest.mark.parametrize(
    ("layout", "code", "words", "error", "waiver"), [parameter(row) for module in MODULES for row in module.REFUSED]
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
