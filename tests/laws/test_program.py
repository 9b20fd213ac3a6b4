"""Laws of the step as a program: nothing is lost, nothing is sent twice, nothing is used before it is there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given

from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, from_json, to_json
from samestep.program import buckets
from samestep.program.ops import BYTES_OF, BodyKey, OpKind
from samestep.program.program import Program
from samestep.program.ranks import stages_of
from samestep.schedules import TaskKind
from samestep.strategies import program_of, programs_of
from tests.laws.models import LAW, PIPELINES, Case, blocks, case, cases, data_cases, decoders

ZERO_01 = data_cases(0, 1)
ZERO_23 = data_cases(2, 3)


def sent(program: Program) -> Counter[tuple[str, str | None]]:
    """Bytes of a step by (kind, axis)."""
    found: Counter[tuple[str, str | None]] = Counter()
    for _, op in program.ops():
        if op.axis is not None and op.owner != "scalars":
            found[str(op.kind), op.axis] += op.size_bytes
    return +found


def trainable(case: Case) -> list[ParamSpec]:
    return [param for param in case.model.params if param.trainable]


def master_bytes(case: Case) -> int:
    return BYTES_OF[case.program.step.master_dtype]


# -- geometry ----------------------------------------------------------------------------------------------------------


def every_gradient_lies_in_one_bucket(case: Case) -> None:
    found = [member.name for bucket in case.program.buckets for member in bucket.members]
    has_buckets = case.layout.zero == 1 or case.layout.dp > 1 or case.program.step.is_mixed
    assert sorted(found) == (sorted(p.name for p in trainable(case)) if has_buckets else [])
    assert not case.program.units


def every_weight_lies_in_one_unit(case: Case) -> None:
    found = [name for unit in case.program.units for name in unit.params]
    assert sorted(found) == sorted(param.name for param in case.model.params)
    assert not case.program.buckets


def members_lie_side_by_side_and_the_padding_divides(case: Case) -> None:
    """Under zero=1 the weights lie there too, each at a multiple of 16 bytes."""
    numel = {param.name: param.numel for param in case.model.params}
    for bucket in case.program.buckets:
        each = 16 // BYTES_OF[bucket.dtype] if bucket.holding.num_shards > 1 else 1
        end = 0
        for member in bucket.members:
            assert (member.offset, member.numel) == (-(-end // each) * each, numel[member.name])
            end = member.offset + member.numel
        assert bucket.padded_numel % case.layout.dp == 0
        assert 0 <= bucket.padded_numel - end < case.layout.dp


def a_bucket_has_one_dtype(case: Case) -> None:
    params = {param.name: param for param in case.model.params}
    for bucket in case.program.buckets:
        assert {case.program.step.working_dtype(params[m.name]) for m in bucket.members} == {bucket.dtype}


def units_pad_rows_to_the_ranks(case: Case) -> None:
    shards = case.layout.dp_shard
    for unit in case.program.units:
        params = [param for param in case.model.params if param.name in unit.params]
        padded = {p.name: -(-p.shape[0] // shards) * shards * (p.numel // p.shape[0]) for p in params}
        assert unit.padded_numel == sum(padded.values())
        assert unit.padded_grad_numel == sum(padded[p.name] for p in params if p.trainable)


# -- order -------------------------------------------------------------------------------------------------------------


def buckets_stand_in_the_order_of_the_backward(case: Case) -> None:
    layer = {param.name: param.layer for param in case.model.params}
    order = [layer[member.name] for bucket in case.program.buckets for member in bucket.members]
    assert order == sorted(order, reverse=True)


def buckets_of_a_stage_stand_in_the_order_of_its_backwards(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "bucket_bytes", lambda num_shards: 2**12)  # a stage of these small models has several
        programs = programs_of(case.model, case.job, case.layout, case.program.step.ranks_per_node)
    for program in programs:
        layer = {param.name: param.layer for param in program.step.model.params}
        early = [bucket for bucket in program.buckets if not bucket.is_late]
        ends = [min(layer[member.name] for member in bucket.members) for bucket in early]
        assert ends == sorted(ends, reverse=True)
        assert program.buckets[: len(early)] == tuple(early)


def stages_come_to_what_they_share_in_one_order(case: Case) -> None:
    """So that no two wait for each other; and what they reduce together is of one size."""
    shared: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for stage, program in enumerate(case.programs):
        members = {bucket.name: str(bucket.members) for bucket in program.buckets}
        for _, op in program.ops():
            if op.axis is not None and stages_of(op.axis):
                of_stage = shared.setdefault(op.axis, {}).setdefault(stage, [])
                of_stage.append((members.get(op.owner, op.owner), op.size_bytes))
    for axis, rows in shared.items():
        assert tuple(rows) == stages_of(axis)
        assert len({str(row) for row in rows.values()}) == 1


def no_reduction_precedes_the_backward_that_finishes_it(case: Case) -> None:
    layer = {param.name: param.layer for param in case.model.params}
    first = {b.name: min(layer[m.name] for m in b.members) for b in case.program.buckets}
    last_microbatch = case.program.step.num_microbatches - 1
    done: set[tuple[int, int | None]] = set()
    reduced = []
    for task, op in case.program.ops():
        if op.kind is OpKind.BACKWARD:
            done.add((task.microbatch, op.layer))
        elif op.owner in first and task.kind is TaskKind.BACKWARD:
            assert (last_microbatch, first[op.owner]) in done
            reduced.append(op.owner)
    assert list(dict.fromkeys(reduced)) == [bucket.name for bucket in case.program.buckets if case.layout.dp > 1]


@LAW
@given(ZERO_01)
def test_buckets_of_gradients(case: Case) -> None:
    """Where they lie, and when they are reduced."""
    for law in (
        every_gradient_lies_in_one_bucket,
        members_lie_side_by_side_and_the_padding_divides,
        a_bucket_has_one_dtype,
        buckets_stand_in_the_order_of_the_backward,
        no_reduction_precedes_the_backward_that_finishes_it,
    ):
        law(case)


def every_layer_goes_forward_then_backward_in_every_microbatch(case: Case) -> None:
    """On one of the stages, and where the schedule splits the backward, the gradients of weights come behind it."""
    compute = (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.WEIGHT)
    seen: dict[tuple[int, int | None], list[OpKind]] = {}
    for program in case.programs:
        here = {op.layer for _, op in program.ops() if op.kind is OpKind.FORWARD}
        before = {layer for _, layer in seen}
        assert not here & before, "a layer is computed on one stage"
        for task, op in program.ops():
            if op.kind in compute and op.axis is None:
                seen.setdefault((task.microbatch, op.layer), []).append(op.kind)
    step = case.program.step
    assert len(seen) == step.num_microbatches * len(case.model.layers)
    for (_, index), kinds in seen.items():
        again = index is not None and case.model.layers[index].is_block and case.layout.recompute != "none"
        expected = [OpKind.FORWARD, *([OpKind.RECOMPUTE] if again else []), OpKind.BACKWARD]
        assert [kind for kind in kinds if kind is not OpKind.WEIGHT] == expected
        assert kinds.count(OpKind.WEIGHT) == (1 if step.splits_backward else 0)
        assert OpKind.WEIGHT not in kinds or kinds[-1] is OpKind.WEIGHT


def weights_are_gathered_before_they_are_used(case: Case) -> None:
    """Follow what is freed: after the forward unless kept, after the backward, and under zero=2 never in the step."""
    gathered: set[str] = set()
    for _, op in case.program.ops():
        if op.kind is OpKind.ALL_GATHER:
            assert op.owner not in gathered, "gathered twice"
            gathered.add(op.owner)
        for unit in case.program.units:
            if op.kind is OpKind.FORWARD and unit.first_layer <= (op.layer or 0) <= unit.last_layer:
                assert unit.name in gathered
                if op.layer == unit.last_layer and not unit.keep_after_forward:
                    gathered.remove(unit.name)
            if op.kind is OpKind.BACKWARD and unit.first_layer <= (op.layer or 0) <= unit.last_layer:
                reads = case.model.layers[op.layer or 0].backward_reads_weights
                assert unit.name in gathered or not reads
                if op.layer == unit.first_layer and case.layout.zero == 3:
                    gathered.discard(unit.name)


def what_units_allocate_is_freed_within_the_step(case: Case) -> None:
    """Under zero=2 all but the gathered weights, which a rank keeps to the end of the step."""
    live: set[str] = set()
    for _, op in case.program.ops():
        live -= {*op.frees_before}
        live |= {buffer.name for buffer in op.allocates}
        assert op.kind is not OpKind.REDUCE_SCATTER or live.issuperset(op.frees), "what is scattered is there"
        live -= {*op.frees}
    assert live == ({unit.name for unit in case.program.units} if case.layout.zero == 2 else set())


def an_op_waits_only_for_what_was_issued(case: Case) -> None:
    for program in case.programs:
        issued: set[str] = set()
        for _, op in program.ops():
            assert issued.issuperset(op.after)
            issued.add(op.name)


def compute_waits_for_the_gathers_of_its_layer(case: Case) -> None:
    for body in case.program.bodies.values():
        issued: set[str] = set()
        for op in body:
            issued.add(op.name)
            for unit in case.program.units:
                gather = f"all_gather:{unit.name}"
                uses = {OpKind.FORWARD: unit.first_layer, OpKind.BACKWARD: unit.last_layer}
                if gather in issued and uses.get(op.kind) == op.layer and op.axis is None:
                    assert gather in op.after


@pytest.mark.parametrize("last_has_weights", [True, False])
def test_recompute_waits_for_its_weights(last_has_weights: bool) -> None:
    whole = blocks(3)
    params = whole.params if last_has_weights else whole.params[:-1]
    model = ModelSpec(name="blocks", layers=whole.layers, params=params)
    body = case(model, "dp=2 zero=3 recompute=full").program.bodies[BodyKey(TaskKind.BACKWARD, position="only")]
    issued: set[str] = set()
    for op in body:
        issued.add(op.name)
        if op.kind is OpKind.BACKWARD and f"all_gather:{op.owner}" in issued:
            again = next(other for other in body if other.name == f"recompute:{op.owner}")
            assert f"all_gather:{op.owner}" in again.after


@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=2 reduce=root", "dp=2 zero=1", "dp=2 zero=3", "dp_replicate=2 dp_shard=2"]
)
def test_the_update_waits_for_every_reduction(layout: str) -> None:
    waits: dict[str, set[str]] = {}
    reductions = set()
    for _, op in case(blocks(3), layout).program.ops():
        waits[op.name] = set(op.after).union(*(waits[name] for name in op.after))
        if op.kind is OpKind.UPDATE:
            break
        if op.kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, OpKind.BROADCAST) and op.owner != "scalars":
            reductions.add(op.name)
    assert reductions
    assert waits["update:optimizer"] >= reductions


# -- conservation ------------------------------------------------------------------------------------------------------


def flops_are_conserved(case: Case) -> None:
    """Over all ranks that read samples each is computed once, and one of another rank where a micro-batch is empty."""
    step = case.program.step
    each = [layer.forward_flops for layer in case.model.layers if layer.is_block]
    again = {"full": sum(each), "offload": sum(each), "alternate": sum(flops // 2 for flops in each)}
    once, total = again.get(case.layout.recompute, 0), 0
    for replica in range(case.layout.dp):
        program = program_of(case.model, case.job, case.layout, step.ranks_per_node, replica=replica)
        sizes = program.step.microbatch_sizes
        flops: Counter[OpKind] = Counter()
        for _, op in program.ops():
            flops[op.kind] += op.flops
        assert flops[OpKind.FORWARD] == case.model.forward_flops * sum(sizes)
        assert flops[OpKind.BACKWARD] == 2 * flops[OpKind.FORWARD]
        assert flops[OpKind.RECOMPUTE] == once * sum(sizes)
        assert max(sizes) <= step.microbatch_samples
        total += sum(sizes)
    assert total >= step.global_batch
    if step.global_batch >= case.layout.dp * step.num_microbatches:
        assert total == step.global_batch


def test_micro_batches_of_other_sizes_send_others() -> None:
    program = case(blocks(2, forward_flops=10), "dp=1 microbatch=3", global_batch=8).program
    assert [str(task.body) for task in program.tasks] == [
        "F.first",
        "B.first",
        "F.middle",
        "B.middle",
        "F.of2.last",
        "B.of2.last",
        "U",
    ]
    first, last = BodyKey(TaskKind.FORWARD, position="first"), BodyKey(TaskKind.FORWARD, size=2, position="last")
    assert program.bodies[last][0].flops * 3 == program.bodies[first][0].flops * 2


@LAW
@given(cases())
def test_microbatches_hold_every_sample_and_hardly_more(case: Case) -> None:
    step = case.program.step
    assert step.rank_samples * case.layout.dp >= step.global_batch
    assert step.num_microbatches * step.microbatch_samples >= step.rank_samples
    assert step.num_microbatches * (step.microbatch_samples - 1) < step.rank_samples
    assert case.layout.microbatch is None or step.microbatch_samples <= case.layout.microbatch


def one_all_reduce_of_scalars_where_there_are_others(case: Case) -> None:
    for program in case.programs:
        found = [op for _, op in program.ops() if op.owner == "scalars"]
        assert len(found) == (case.layout.world_size > 1)
        assert all((op.kind, op.axis, op.dtype) == (OpKind.ALL_REDUCE, "world", "float64") for op in found)


def every_gradient_is_reduced_and_every_weight_gathered_where_ranks_share_it(case: Case) -> None:
    """On each stage that uses it; in one bucket or unit, never in both."""
    found: Counter[str] = Counter()
    tied: dict[str, int] = {}
    for program in case.programs:
        tied |= {param.name: len(param.stages) for param in program.step.model.params if param.stages}
        in_buckets = [member.name for bucket in program.buckets for member in bucket.members]
        in_units = [name for unit in program.units for name in unit.params]
        assert len({*in_buckets, *in_units}) == len(in_buckets) + len(in_units)
        found.update((*in_buckets, *in_units))
    assert all(times == tied.get(name, 1) for name, times in found.items())
    if case.layout.dp_cp_size > 1:
        assert {param.name for param in trainable(case)} <= set(found)


def stages_receive_what_is_sent(case: Case) -> None:
    """As many bytes on one stage as on the other, forward and backward, for every micro-batch."""
    moved: dict[OpKind, Counter[tuple[str, int]]] = {OpKind.SEND: Counter(), OpKind.RECV: Counter()}
    for program in case.programs:
        for task, op in program.ops():
            if op.kind in moved:
                moved[op.kind][op.owner, task.microbatch] += op.size_bytes
    assert moved[OpKind.SEND]
    assert moved[OpKind.SEND] == moved[OpKind.RECV]


@LAW
@given(PIPELINES)
def test_stages(case: Case) -> None:
    """What they reduce and send each other."""
    for law in (
        buckets_of_a_stage_stand_in_the_order_of_its_backwards,
        stages_come_to_what_they_share_in_one_order,
        stages_receive_what_is_sent,
    ):
        law(case)


@LAW
@given(PIPELINES)
def test_stages_share_the_work_of_one(case: Case) -> None:
    """A pipeline adds and leaves out no FLOP of what one stage with the same micro-batches would compute."""
    layout = replace(case.layout, pp=1, schedule="1f1b", virtual_stages=1)
    alone = programs_of(case.model, case.job, layout)
    assume(alone[0].step.num_microbatches == case.program.step.num_microbatches)
    # A split backward asks for a repeated forward to its end, whose last product then counts among every second one.
    assume(not case.program.step.splits_backward or case.layout.recompute in ("none", "selective"))

    def flops(programs: tuple[Program, ...]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for program in programs:
            for _, op in program.ops():
                # what a split backward leaves for later is a part of it
                found["backward" if op.kind is OpKind.WEIGHT else str(op.kind)] += op.flops
        return +found

    assert flops(case.programs) == flops(alone)


@LAW
@given(data_cases(0))
def test_bytes_of_replication(case: Case) -> None:
    """ring: S once. root: S there and back. hierarchical: S in the node both ways, a rank's part between nodes."""
    size = sum(bucket.padded_numel for bucket in case.program.buckets) * master_bytes(case)
    inside = case.program.step.ranks_per_node
    if case.layout.dp == 1:
        expected = {}
    elif case.layout.reduce == "ring":
        expected = {("all_reduce", "dp_replicate"): size}
    elif case.layout.reduce == "root":
        expected = {("reduce", "dp_replicate"): size, ("broadcast", "dp_replicate"): size}
    else:
        within = size if inside > 1 else 0
        between = size // inside if inside < case.layout.dp else 0
        expected = {
            ("reduce_scatter", "dp_intra"): within,
            ("all_reduce", "dp_inter"): between,
            ("all_gather", "dp_intra"): within,
        }
    assert sent(case.program) == {key: value for key, value in expected.items() if value}


@LAW
@given(data_cases(1))
def test_bytes_of_zero_1(case: Case) -> None:
    """Gradients scattered, weights gathered in their own dtype, the rank's part summed over the replicas."""
    buckets = case.program.buckets
    gradients = sum(bucket.padded_numel for bucket in buckets) * master_bytes(case)
    expected = {
        ("reduce_scatter", "dp_shard"): gradients,
        ("all_gather", "dp_shard"): sum(bucket.padded_numel * BYTES_OF[bucket.dtype] for bucket in buckets),
        ("all_reduce", "dp_replicate"): gradients // case.layout.dp_shard if case.layout.dp_replicate > 1 else 0,
    }
    assert sent(case.program) == {key: value for key, value in expected.items() if value}


def bytes_of_zero_2_and_3(case: Case) -> None:
    """zero=2 gathers once a step. zero=3 twice a micro-batch, but once what the last layer uses or an embedding is."""
    step = case.program.step
    last = case.model.layers[-1]
    reads_in_backward = {m: layer.backward_reads_weights for layer in case.model.layers for m in layer.modules}
    gathers = gradients = 0
    for unit in case.program.units:
        kept = "" in unit.modules or any(module in last.modules for module in unit.modules)
        again = not kept and any(reads_in_backward[module] for module in unit.modules)
        times = 1 if case.layout.zero == 2 else step.num_microbatches * (2 if again else 1)
        gathers += times * unit.padded_numel * BYTES_OF[unit.dtype]
        gradients += unit.padded_grad_numel * master_bytes(case)
    scatters = step.num_microbatches if case.layout.accumulate == "sharded" else 1
    expected = {
        ("all_gather", "dp_shard"): gathers,
        ("reduce_scatter", "dp_shard"): scatters * gradients,
        ("all_reduce", "dp_replicate"): gradients // case.layout.dp_shard if case.layout.dp_replicate > 1 else 0,
    }
    assert sent(case.program) == {key: value for key, value in expected.items() if value}


@LAW
@given(ZERO_23)
def test_units_of_weights(case: Case) -> None:
    """What they hold, when they are gathered and freed, and what they send."""
    for law in (
        every_weight_lies_in_one_unit,
        units_pad_rows_to_the_ranks,
        weights_are_gathered_before_they_are_used,
        what_units_allocate_is_freed_within_the_step,
        bytes_of_zero_2_and_3,
    ):
        law(case)


def test_no_collective_is_empty() -> None:
    whole = blocks(3)
    frozen = ParamSpec(name="layers.1.weight", shape=(8, 8), layer=1, trainable=False)
    model = ModelSpec(name="blocks", layers=whole.layers, params=(whole.params[0], frozen, whole.params[2]))
    assert all(op.size_bytes for _, op in case(model, "dp=2 zero=3").program.ops() if op.axis)


def test_every_device_count_has_the_same_program_length() -> None:
    """A program is that of one stage: thousands of ranks add no ops."""
    lengths = {sum(1 for _ in case(blocks(4), f"dp={n} microbatch=1", global_batch=n).program.ops()) for n in (2, 4096)}
    assert len(lengths) == 1


@LAW
@given(data_cases(), decoders())
def test_a_model_spec_reads_back(case: Case, decoder: ModelSpec) -> None:
    for model in (case.model, decoder):
        assert from_json(to_json(model)) == model


def tasks_of_a_micro_batch_stand_in_order_and_the_update_last(case: Case) -> None:
    """In each chunk of each stage: forward, backward, and the gradients of weights where they are split off."""
    kinds = [TaskKind.FORWARD, TaskKind.BACKWARD, *([TaskKind.WEIGHT] if case.program.step.splits_backward else [])]
    for program in case.programs:
        tasks = program.tasks
        assert [task.kind for task in tasks].index(TaskKind.UPDATE) == len(tasks) - 1
        order: dict[tuple[int, int], list[TaskKind]] = {}
        for task in tasks[:-1]:
            order.setdefault((task.chunk, task.microbatch), []).append(task.kind)
        assert len(order) == case.layout.virtual_stages * case.program.step.num_microbatches
        assert all(found == kinds for found in order.values())


@LAW
@given(cases() | PIPELINES)
def test_programs_of_all_stages(case: Case) -> None:
    """Order, waits and collectives over any axes."""
    for law in (
        every_layer_goes_forward_then_backward_in_every_microbatch,
        an_op_waits_only_for_what_was_issued,
        one_all_reduce_of_scalars_where_there_are_others,
        every_gradient_is_reduced_and_every_weight_gathered_where_ranks_share_it,
        tasks_of_a_micro_batch_stand_in_order_and_the_update_last,
    ):
        law(case)


def without_stages_tasks_alternate(case: Case) -> None:
    tasks = case.program.tasks
    for before, after in pairwise(tasks[:-1]):
        assert before.kind is not after.kind
        assert after.microbatch == before.microbatch + (after.kind is TaskKind.FORWARD)


@LAW
@given(data_cases())
def test_programs_of_data_axes(case: Case) -> None:
    """Waits, work and order without stages."""
    for law in (compute_waits_for_the_gathers_of_its_layer, flops_are_conserved, without_stages_tasks_alternate):
        law(case)
