"""Laws of memory: the classic tables, to the byte, and what comes and goes within a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import (
    at_rest,
    classic_bytes_per_param,
    during_step,
    held_bytes_per_param,
    saving_host_bytes,
)
from samestep.models import catalog
from samestep.models.layer_parts import WorkingSet
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.output.text import readable
from samestep.program.ops import BYTES_OF
from samestep.strategies import programs_of
from tests.laws.models import LAW, Case, block, blocks, case, cases, data_cases


def trainable_numel(case: Case) -> int:
    return sum(param.numel for param in case.model.params if param.trainable)


def master_copies_bytes(case: Case) -> int:
    step = case.program.step
    each = {"bf16": 2, "fp16": 4}.get(step.precision, 0)  # of bf16 the weight is the other half
    return sum(p.numel for p in case.model.params if p.trainable and step.working_dtype(p) != step.master_dtype) * each


# -- the tables --------------------------------------------------------------------------------------------------------


def test_bytes_are_written_without_powers_of_ten() -> None:
    sizes = [12, 1023 * 2**10, 1.5 * 2**20, 79.6 * 2**30, 99.96 * 2**30, 1350 * 2**30]
    assert [*map(readable, sizes)] == ["12 B", "1,023 KiB", "1.5 MiB", "79.6 GiB", "100 GiB", "1,350 GiB"]


def test_the_limits_of_many_ranks() -> None:
    """4 times, 8 times, and N-fold less."""
    n = 2**20
    assert classic_bytes_per_param(0, n) == 16
    assert classic_bytes_per_param(0, n) / classic_bytes_per_param(1, n) == pytest.approx(4, rel=1e-5)
    assert classic_bytes_per_param(0, n) / classic_bytes_per_param(2, n) == pytest.approx(8, rel=1e-5)
    assert classic_bytes_per_param(0, n) / classic_bytes_per_param(3, n) == n
    assert held_bytes_per_param(0, n) / held_bytes_per_param(1, n) == pytest.approx(16 / 6, rel=1e-5)
    assert held_bytes_per_param(0, n) / held_bytes_per_param(2, n) == pytest.approx(8, rel=1e-5)
    assert held_bytes_per_param(0, n) / held_bytes_per_param(3, n) == n


@pytest.mark.parametrize(("layout", "parts"), [("dp=2", 1), ("dp=2 zero=1", 1), ("dp=2 zero=3", 2), ("tp=2", 1)])
def test_tables_of_embeddings_are_parts_of_their_own(layout: str, parts: int) -> None:
    """GPT-2 has 50,257 tokens, which two ranks of tp do not divide, and 1,024 positions."""
    job = Job(model={"source": "preset:gpt2"})
    use = at_rest(next(iter(programs_of(catalog.model_spec(job), job, Layout(layout)))))
    rows = -(-50257 // parts)
    held = {name: size for name, size in use.parts().items() if name.endswith("embeddings")}
    assert held == {"token embeddings": rows * 768 * 4, "position embeddings": 1024 // parts * 768 * 4}
    assert use.parts()["weights"] + sum(held.values()) == use.weights


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("zero", range(4))
def test_a_rank_holds_what_the_table_says(zero: int, n: int) -> None:
    one = case(blocks(3), f"dp={n} zero={zero}", precision="bf16")
    held = at_rest(one.program).total + (during_step(one.program).buffers if zero == 2 else 0)
    assert held == held_bytes_per_param(zero, n) * one.model.num_params
    assert classic_bytes_per_param(zero, 1) == 16
    assert held_bytes_per_param(zero, 1) == (18 if zero == 2 else 16)


# -- at rest -----------------------------------------------------------------------------------------------------------


@LAW
@given(data_cases(0), st.integers(0, 3))
def test_zero_0_by_hand(case: Case, states: int) -> None:
    step = case.program.step
    master = BYTES_OF[step.master_dtype]
    rest = at_rest(case.program, states)
    padded = sum(b.padded_numel for b in case.program.buckets) if case.layout.dp > 1 else trainable_numel(case)
    assert rest.weights == sum(p.numel * BYTES_OF[step.working_dtype(p)] for p in case.model.params)
    assert rest.gradients == padded * master
    assert rest.optimizer == states * trainable_numel(case) * master + master_copies_bytes(case)
    assert (rest.activations, rest.buffers, rest.peak_at) == (0, case.model.buffer_bytes, "at rest")


@LAW
@given(data_cases(1, 2, 3), st.integers(0, 3))
def test_shards_add_up_to_the_whole_state_without_padding(case: Case, states: int) -> None:
    copies = master_copies_bytes(case) if case.layout.zero == 1 else 0
    held = [at_rest(case.program, states, rank).optimizer for rank in range(case.layout.dp_shard)]
    assert sum(held) == states * trainable_numel(case) * BYTES_OF[case.program.step.master_dtype] + copies
    if (
        case.layout.zero > 1
    ):  # elsewhere weights begin at multiples of 16 bytes, so that a chunk in the middle may hold less
        assert held == sorted(held, reverse=True)


@LAW
@given(data_cases(1, 2, 3))
def test_replicas_of_a_shard_hold_the_same(case: Case) -> None:
    shards = case.layout.dp_shard
    for rank in range(case.layout.dp):
        assert at_rest(case.program, rank=rank) == at_rest(case.program, rank=rank % shards)


@LAW
@given(data_cases(1))
def test_zero_1_weights_and_gradients_are_whole(case: Case) -> None:
    step = case.program.step
    rest = at_rest(case.program)
    exact = sum(p.numel * BYTES_OF[step.working_dtype(p)] for p in case.model.params)
    each = sum(max(16 // BYTES_OF[bucket.dtype] - 1, 0) * (len(bucket.members) - 1) for bucket in case.program.buckets)
    padding = (len(case.program.buckets) * (case.layout.dp - 1) + each) * BYTES_OF[step.master_dtype]
    assert exact <= rest.weights <= exact + padding
    gradients = trainable_numel(case) * BYTES_OF[step.master_dtype]
    assert gradients <= rest.gradients <= gradients + padding


@LAW
@given(data_cases(2, 3))
def test_zero_2_and_3_weights_and_gradients_are_cut_by_rows(case: Case) -> None:
    shards, master = case.layout.dp_shard, BYTES_OF[case.program.step.master_dtype]
    part = {p.name: -(-p.shape[0] // shards) * (p.numel // p.shape[0]) for p in case.model.params}
    rest = at_rest(case.program)
    assert rest.weights == sum(part.values()) * master
    assert rest.gradients == sum(part[p.name] for p in case.model.params if p.trainable) * master


def test_fsdp_leaves_the_last_ranks_short_or_empty() -> None:
    """5 rows on 4 ranks: 2 2 1 0."""
    program = case(blocks(1, 5, 3), "dp=4 zero=3").program
    assert [at_rest(program, 1, rank).optimizer for rank in range(4)] == [rows * 3 * 4 for rows in (2, 2, 1, 0)]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_offload_moves_states_and_masters_to_the_host(zero: int, precision: str) -> None:
    model, numel = blocks(3), blocks(3).num_params
    here, moved = (
        at_rest(case(model, f"dp=4 zero={zero} {word}", precision=precision).program) for word in ("", "offload")
    )
    shards = 4 if zero else 1
    assert (moved.optimizer, moved.host) == (0, (4 + 8) * numel // shards)  # masters of its own, and two states
    assert here.host == 0
    assert (moved.weights, moved.gradients) == (here.weights, here.gradients)
    assert moved.total == here.total - here.optimizer


# -- in the step -------------------------------------------------------------------------------------------------------


@LAW
@given(cases())
def test_a_step_holds_at_least_what_is_held_at_rest_and_its_parts_add_up(case: Case) -> None:
    rest, most = at_rest(case.program), during_step(case.program)
    assert (most.weights, most.optimizer) == (rest.weights, rest.optimizer)
    assert most.gradients >= rest.gradients or most.gradients + most.activations + most.logits >= rest.gradients
    assert most.buffers >= rest.buffers
    assert most.total >= rest.total
    assert most.peak_at in {op.name for _, op in case.program.ops()}
    assert sum(most.parts().values()) == most.total
    assert min(most.parts().values()) >= 0


@LAW
@given(data_cases(0, 1))
def test_activations_stand_highest_between_forward_and_backward(case: Case) -> None:
    step = case.program.step
    one = step.microbatch_samples * BYTES_OF[step.compute_dtype]
    most = during_step(case.program)
    whole = sum(layer.saved_elements for layer in case.model.layers) * one
    if most.peak_at == "update:optimizer":  # the masters that it joins are more than the activations
        assert not case.program.buckets or most.total - at_rest(case.program).total >= whole
    elif case.layout.recompute == "none" and case.program.buckets:  # a gradient may be larger than what is freed for it
        assert most.activations + most.gradients - at_rest(case.program).gradients >= whole
    assert most.activations <= whole


@LAW
@given(data_cases(0, 1))
def test_recompute_never_holds_more(drawn: Case) -> None:
    held = [
        during_step(
            case(
                drawn.model,
                str(replace(drawn.layout, recompute=recompute)),
                drawn.program.step.ranks_per_node,
                global_batch=drawn.job.train.global_batch,
                precision=drawn.job.numerics.precision,
            ).program
        ).activations
        for recompute in ("full", "alternate", "selective", "none")
    ]
    assert held == sorted(held)


def test_full_recompute_keeps_inputs_and_one_block() -> None:
    model = blocks(6, 8, 8, saved_elements=100_000, saved_selective_elements=30_000, input_elements=1000)
    held = [
        during_step(case(model, f"dp=2 {text}", global_batch=2).program).activations
        for text in ("", "recompute=selective", "recompute=full")
    ]
    assert held == [6 * 100_000 * 4, (5 * 30_000 + 100_000) * 4, (5 * 1000 + 100_000) * 4]


def test_a_smaller_microbatch_holds_less() -> None:
    model = blocks(4, saved_elements=1000)
    held = [during_step(case(model, f"microbatch={n}", global_batch=8).program).activations for n in (8, 4, 2, 1)]
    assert held == [8 * 16000, 4 * 16000, 2 * 16000, 16000]


def uneven(trainable: bool = True) -> ModelSpec:
    """Embedding, four blocks and a head, each of another size."""
    sizes = (30, 10, 50, 20, 40, 70)
    names = ("embed", *(f"layers.{index}" for index in range(4)), "head")
    layers = (
        LayerSpec(name="embed", modules=("embed",), backward_reads_weights=False),
        *(block(index) for index in range(4)),
        LayerSpec(name="head", modules=("head",)),
    )
    params = tuple(
        ParamSpec(name=f"{name}.weight", shape=(2 * size,), layer=index, trainable=trainable)
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
    return ModelSpec(name="uneven", layers=layers, params=params)


def test_zero_2_gathers_every_unit_and_zero_3_two_in_a_row() -> None:
    """Without gradients the peak is that of the gathered weights: blocks 40 and the head 70, of 220 in all."""
    held = [during_step(case(uneven(trainable=False), f"dp=2 zero={zero}").program) for zero in (2, 3)]
    assert [use.buffers for use in held] == [220 * 2 * 4, (40 + 70) * 2 * 4]
    assert held[1].peak_at == "all_gather:head"


def test_units_that_samples_call_in_turn_stay_gathered_to_the_end_of_the_forward() -> None:
    """One sample calls them once: then two in a row are gathered. Several hold the three blocks of a group, and the head."""
    model = replace(uneven(trainable=False), called_again=(("layers.1", "layers.2", "layers.3"),))
    held = [during_step(case(model, f"dp=2 zero=3 microbatch={size}").program).buffers for size in (1, 2)]
    assert held == [(40 + 70) * 2 * 4, (50 + 20 + 40 + 70) * 2 * 4]


def test_a_unit_holds_its_whole_gradient_until_it_is_scattered() -> None:
    """sharded: one unit at a time, and the one before it, which FSDP2 keeps. full: all of them from the first micro-batch
    to the last, where the head's is kept when a rank has its part already, and the last block's comes once more."""
    held = {}
    for accumulate in ("sharded", "full"):
        program = case(uneven(), f"dp=2 zero=2 microbatch=1 accumulate={accumulate}").program
        held[accumulate] = during_step(program).gradients - at_rest(program).gradients
    head, block = 70 * 2 * 4, 40 * 2 * 4
    assert held == {"sharded": head + block, "full": 220 * 2 * 4 + head // 2 + block - 220 * 4}


# -- what a backward works on ------------------------------------------------------------------------------------------


def test_a_backward_works_on_gradients_beside_what_is_kept() -> None:
    """The last block's comes first, when nothing is freed yet; or where there is less, the loss's."""
    model = blocks(4, saved_elements=100_000, working=WorkingSet(30_000))
    assert during_step(case(model, "dp=2", global_batch=2).program).activations == 430_000 * 4
    *others, last = model.layers
    heavy = replace(model, layers=(*others, replace(last, loss_elements=50_000, loss_working_elements=100_000)))
    most = during_step(case(heavy, "dp=2", global_batch=2).program)
    assert (most.activations, most.logits) == (400_000 * 4, 150_000 * 4)


def test_norms_keep_twice_the_bytes_where_weights_are_of_half_precision() -> None:
    plain = blocks(4, saved_elements=10_000)
    raised = blocks(4, saved_elements=10_000, saved_norm_elements=100)
    for precision, more in (("float32", 0), ("bf16", 4 * 100 * 2)):
        held = [
            during_step(case(model, "dp=2", global_batch=2, precision=precision).program).activations
            for model in (plain, raised)
        ]
        assert held[1] - held[0] == more


def test_gradients_in_no_bucket_come_with_the_backward() -> None:
    """Behind the last forward there is none but its own in the first micro-batch, and in the second all and its own."""
    model = blocks(4, 64, saved_elements=10**6)
    once, twice = (during_step(case(model, f"microbatch={n}", global_batch=2).program) for n in (2, 1))
    each = 64 * 64 * 4
    assert (once.gradients, twice.gradients) == (each, 5 * each)
    assert once.activations == 2 * twice.activations


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=1", "dp=2 zero=3"])
def test_a_group_has_the_states_of_its_own_optimizer(layout: str) -> None:
    """Muon keeps one state of a matrix, where AdamW keeps two of all else; where ranks hold parts, its owner a whole copy too."""
    model = blocks(3)
    first = model.params[0]
    groups = [{"match": [first.name], "name": "muon"}]
    jobs = [Job(optimizer={"groups": some}, train={"global_batch": 8}) for some in (groups, [])]
    muon, adamw = (programs_of(model, job, Layout(layout))[0] for job in jobs)
    held = [sum(at_rest(program, 2, rank).optimizer for rank in range(2)) for program in (adamw, muon)]
    saved = [sum(saving_host_bytes(program, 2, rank) for rank in range(2)) for program in (adamw, muon)]
    copies = 2 if "zero" not in layout else 1
    matrix = first.numel * 4
    assert saved[0] - saved[1] == copies * matrix
    assert held[0] - held[1] == copies * matrix - ("zero=3" in layout) * matrix
