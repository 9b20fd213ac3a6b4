"""Laws of prices, clock and timeline: textbook formulas come out of what the clock plays."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.hardware import Hardware, Link, load, profiles
from samestep.job import Job
from samestep.models import decoder_spec
from samestep.models.decoder import Decoder
from samestep.program.ops import UPDATE_BODY, Op, OpKind
from samestep.program.program import amid_steps
from samestep.program.step import StepSpec
from samestep.strategies import ProgramBuilder, programs_of, refusal_of
from samestep.wings.plan.simulation.clock import Score, play
from samestep.wings.plan.simulation.cost import price_key, seconds
from samestep.wings.plan.simulation.partition import COMPUTE, Span
from samestep.wings.plan.simulation.timeline import LETTERS, Timeline
from tests.laws.models import LAW, Case, blocks, case, cases, data_cases, machine

SLOW = machine(bytes_per_s=1e9, latency_s=1e-5, memory_bytes_per_s=1e11)
COSTLY = {"forward_flops": 10**9}


def price(kind: OpKind, layout: str, hardware: Hardware, ranks_per_node: int | None = None) -> float:
    """Seconds of the first op of this kind."""
    program = case(blocks(1, 512, 512), layout, ranks_per_node, global_batch=512).program
    return next(seconds(op, program, hardware) for _, op in program.ops() if op.kind is kind)


SIZE_BYTES = 512 * 512 * 4


# -- prices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rings_and_the_naive_way(n: int) -> None:
    a, b = 1e-5, 1e9
    hardware = machine(bytes_per_s=b, latency_s=a, devices_per_node=64)
    ring = (n - 1) * (a + SIZE_BYTES / (n * b))
    naive = (n - 1) * (a + SIZE_BYTES / b)
    assert price(OpKind.ALL_REDUCE, f"dp={n}", hardware) == pytest.approx(2 * ring)
    assert price(OpKind.REDUCE_SCATTER, f"dp={n} zero=1", hardware) == pytest.approx(ring)
    assert price(OpKind.ALL_GATHER, f"dp={n} zero=1", hardware) == pytest.approx(ring)
    assert price(OpKind.REDUCE, f"dp={n} reduce=root", hardware) == pytest.approx(naive)
    assert price(OpKind.BROADCAST, f"dp={n} reduce=root", hardware) == pytest.approx(naive)


@pytest.mark.parametrize(
    ("layout", "kind", "ranks_per_node", "crosses"),
    [
        ("dp=4", OpKind.ALL_REDUCE, None, False),
        ("dp=8", OpKind.ALL_REDUCE, None, True),
        ("dp_replicate=2 dp_shard=4", OpKind.ALL_GATHER, None, False),
        ("dp_replicate=2 dp_shard=4", OpKind.ALL_REDUCE, None, True),
        ("dp_replicate=2 dp_shard=2", OpKind.ALL_REDUCE, None, False),
        ("dp_replicate=2 dp_shard=3", OpKind.ALL_GATHER, None, True),  # ranks 3 4 5 lie on both sides of a boundary
        ("dp=8 reduce=hierarchical", OpKind.REDUCE_SCATTER, 4, False),
        ("dp=8 reduce=hierarchical", OpKind.ALL_REDUCE, 4, True),
    ],
)
def test_a_group_on_several_nodes_runs_at_the_slower_link(
    layout: str, kind: OpKind, ranks_per_node: int | None, crosses: bool
) -> None:
    far = Link(latency_s=1e-3, bytes_per_s=1e6)
    near_only, both = (machine(bytes_per_s=1e9, inter=inter, devices_per_node=4) for inter in (None, far))
    slower = price(kind, layout, both, ranks_per_node) > price(kind, layout, near_only, ranks_per_node)
    assert slower is crosses


@pytest.mark.parametrize(("layout", "shards"), [("dp=4", 1), ("dp=4 zero=1", 4), ("dp=4 zero=3", 4)])
@pytest.mark.parametrize(("precision", "passes_bytes"), [("float32", 28), ("float64", 56), ("bf16", 30)])
def test_an_update_goes_over_its_own_share(layout: str, shards: int, precision: str, passes_bytes: int) -> None:
    program = case(blocks(2), layout, precision=precision).program
    update = next(op for _, op in program.ops() if op.kind is OpKind.UPDATE)
    per_param = passes_bytes - 2 * (precision == "bf16" and "zero=3" in layout)  # there the masters are the weights
    expected = program.step.model.num_params * per_param / shards / 1e9
    assert seconds(update, program, machine(memory_bytes_per_s=1e9)) == pytest.approx(expected)


EXPERTS = Decoder(layers=2, hidden=64, heads=4, vocab=64, sequence=32, gated=True, experts=4, top_k=2)


@pytest.mark.parametrize("words", ["tp=2 recompute=full", "cp=2 zero=3", "ep=2 zero=1"])
def test_compute_waits_for_what_the_next_product_needs(words: str) -> None:
    """Sums of a tensor cut, heads of an attention and rows of experts are exposed; what is gathered ahead is not."""
    program = case(decoder_spec.spec(EXPERTS, "experts"), f"dp=2 {words}").program
    spans = [(op, span) for span, (_, op) in zip(play([program], SLOW).spans, amid_steps(program).ops(), strict=True)]
    exposed = [span for op, span in spans if op.is_exposed]
    assert exposed
    in_line = sorted((span for op, span in spans if op.axis is None or op.is_exposed), key=lambda s: s.start_s)
    assert all(after.start_s >= before.end_s for before, after in pairwise(in_line))


@pytest.mark.parametrize(
    ("words", "bytes_per_s"), [("tp=2", 1e8), ("tp=2 sequence_parallel", 1e10), ("cp=2 tp=2", 1e12), ("tp=2", 1e10)]
)
def test_gradients_of_weights_hide_sums_of_gradients_of_inputs(words: str, bytes_per_s: float) -> None:
    """A sum and what runs beside it take as long as the longer one, and a step no longer than without."""
    program = case(decoder_spec.spec(replace(EXPERTS, experts=0, top_k=0), "dense"), words).program
    hardware = replace(
        machine(bytes_per_s=bytes_per_s, latency_s=1e-6, memory_bytes_per_s=1e12), overlap=True, contention=1.0
    )
    sums = [op for _, op in program.ops() if op.beside]
    of_blocks = [product.owner for op in sums for product in op.beside]
    assert {owner.rpartition(".")[2] for owner in of_blocks} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    for op in sums:
        alone_s = seconds(op.but(beside=()), program, hardware)
        flops = sum(product.flops for product in op.beside) * program.step.microbatch_samples
        assert (
            max(0.0, alone_s - 100 * flops / hardware.flops_per_s["float32"])
            <= seconds(op, program, hardware)
            < alone_s
        )
        assert seconds(op, program, replace(hardware, overlap=False)) == alone_s
    unhidden = program.with_bodies(lambda _, ops: tuple(op.but(beside=()) for op in ops))
    assert play([program], hardware).step_s < play([unhidden], hardware).step_s
    slow = replace(hardware, contention=2.0)
    assert play([program], hardware).step_s <= play([program], slow).step_s <= play([unhidden], slow).step_s


def test_a_dtype_without_a_speed_is_refused_by_name() -> None:
    hardware = replace(machine(), flops_per_s={"float32": 1e12})
    with pytest.raises(InputError, match="no flops_per_s for bfloat16; it has float32"):
        play([case(blocks(1, **COSTLY), "dp=1", precision="bf16").program], hardware)


# -- clock -------------------------------------------------------------------------------------------------------------


@LAW
@given(data_cases(), st.booleans())
def test_streams_run_one_op_at_a_time_and_every_wait_is_kept(case: Case, overlap: bool) -> None:
    timeline = play([case.program], replace(SLOW, overlap=overlap))
    streams: dict[str, list[Span]] = defaultdict(list)
    ended: dict[str, float] = {}
    for span, (_, op) in zip(timeline.spans, amid_steps(case.program).ops(), strict=True):
        streams[span.stream if overlap else ""].append(span)
        assert all(span.start_s >= ended[name] for name in op.after)
        ended[op.name] = span.end_s
    for spans in streams.values():
        assert all(after.start_s >= before.end_s for before, after in pairwise(spans))
    for stream in timeline.streams(0):
        assert timeline.busy_s(0, stream) <= timeline.step_s * (1 + 1e-12)
    assert -1e-12 <= timeline.exposed_s(0) <= timeline.idle_s(0) + 1e-12


@LAW
@given(cases())
def test_overlap_never_makes_a_step_longer(case: Case) -> None:
    beside, after = (play(case.programs, replace(SLOW, overlap=overlap)) for overlap in (True, False))
    if case.layout.pp == 1:
        assert after.step_s == pytest.approx(sum(span.end_s - span.start_s for span in after.spans))
    assert beside.step_s <= after.step_s * (1 + 1e-12)
    assert beside.busy_s(0) == pytest.approx(after.busy_s(0))


@pytest.mark.parametrize(
    "layout", ["dp=2 zero=1", "dp=2 zero=1 microbatch=2", "dp=2 pp=2 zero=1 schedule=interleaved virtual_stages=2"]
)
def test_what_a_step_gathers_hides_behind_the_forwards_of_the_next(layout: str) -> None:
    """A layer's first forward waits for its own weights; the same is sent, and where forwards are long the first gather alone
    is exposed."""
    programs = case(blocks(8, 512, 2048, forward_flops=4 * 10**9), layout).programs
    hardware = machine(bytes_per_s=1e9, latency_s=1e-6)
    for program, played in ((program, amid_steps(program)) for program in programs):
        assert sorted(op.name for _, op in program.ops()) == sorted(op.name for _, op in played.ops())
        update = [op.kind for op in played.bodies[UPDATE_BODY]]
        assert OpKind.ALL_GATHER not in update
        held = {member.name: bucket.name for bucket in program.buckets for member in bucket.members}
        needs = {(param.layer, f"all_gather:{held[param.name]}") for param in program.step.model.params}
        waits = {
            (op.layer, name) for _, op in played.ops() if op.layer is not None for name in op.after if "gather" in name
        }
        assert waits == needs
    behind = [
        program.with_bodies(
            lambda key, ops: tuple(
                op.but(owner=f"{op.owner}.late") if op.kind is OpKind.ALL_GATHER else op for op in ops
            )
        )
        for program in programs
    ]
    one, other = (play(parts, hardware) for parts in (programs, behind))
    for stage in one.stages:
        gathers_s = [s.end_s - s.start_s for s in one.spans if s.stage == stage and "gather" in s.name]
        assert len(gathers_s) > 1
        most_s = other.step_s - sum(gathers_s) + max(gathers_s) if one.stages == (0,) else other.step_s
        assert one.step_s <= most_s * (1 + 1e-9)


@LAW
@given(cases(), st.floats(1.0, 2.0))
def test_compute_beside_communication_takes_longer_and_never_more_than_contention_says(case: Case, c: float) -> None:
    plain, crowded = (play(case.programs, replace(SLOW, overlap=True, contention=k)) for k in (1.0, c))
    assert plain.busy_s(0) * (1 - 1e-9) <= crowded.busy_s(0) <= c * plain.busy_s(0) * (1 + 1e-9)
    assert crowded.step_s >= plain.step_s * (1 - 1e-9)


def test_a_collective_as_long_as_the_compute_beside_it_slows_all_of_it() -> None:
    model = blocks(4, 4096, 2048, forward_flops=10**11)
    hardware = replace(machine(bytes_per_s=1e7), contention=1.25)
    program = case(model, "dp=2 zero=3").program
    crowded, alone = (play([program], h) for h in (hardware, replace(hardware, contention=1.0)))
    slowed = [
        (span.end_s - span.start_s) / (before.end_s - before.start_s)
        for span, before in zip(crowded.spans, alone.spans, strict=True)
        if span.stream == COMPUTE and before.end_s > before.start_s
    ]
    assert max(slowed) == pytest.approx(1.25, rel=1e-3)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("layout", ["dp={} microbatch=2", "dp={} zero=1", "dp={} zero=3 recompute=full"])
def test_with_free_communication_n_devices_are_n_times_as_fast(n: int, layout: str) -> None:
    one, many = (
        play([case(blocks(4, **COSTLY), layout.format(k), global_batch=32).program], machine()).step_s for k in (1, n)
    )
    assert one / many == pytest.approx(n, rel=1e-12)


def test_reduction_hides_behind_the_rest_of_the_backward() -> None:
    """Only the last bucket, that of the first layer, has no compute left to hide behind."""
    model = blocks(4, 4096, 2048, forward_flops=10**11)
    hardware = machine(bytes_per_s=1e9)
    timeline = play([case(model, "dp=2").program], hardware)
    last = next(span for span in reversed(timeline.spans) if span.stream == "dp_replicate")
    assert timeline.exposed_s(0) == pytest.approx(last.end_s - last.start_s, rel=1e-3)


def test_full_recompute_costs_a_third_more() -> None:
    plain, again = (play([case(blocks(4, **COSTLY), text).program], machine()) for text in ("", "recompute=full"))
    assert again.step_s == pytest.approx(plain.step_s * 4 / 3)


def test_a_wait_without_end_is_named() -> None:
    program = case(blocks(2), "").program
    stuck = program.with_bodies(lambda _, ops: tuple(replace(op, after=("all_gather:nowhere",)) for op in ops))
    with pytest.raises(RuntimeError, match=r"forward:layers\.0 of task F0 .* waits for all_gather:nowhere"):
        play([stuck], machine())


def test_a_wait_binds_to_the_latest_op_of_the_name_in_any_task() -> None:
    program = case(blocks(1, **COSTLY), "microbatch=4").program
    waiting = Op(kind=OpKind.UPDATE, owner="optimizer", axis="world", after=("forward:layers.0",))
    program = replace(program, bodies={**program.bodies, UPDATE_BODY: (waiting,)}, axes={"world": 1})
    timeline = play([program], machine())
    latest = max(span.end_s for span in timeline.spans if span.name == "forward:layers.0")
    assert timeline.spans[-1].start_s == latest == timeline.spans[2].end_s


# -- timeline ----------------------------------------------------------------------------------------------------------


@LAW
@given(cases(), st.integers(60, 200))
def test_a_chrome_trace_has_every_span_and_a_picture_keeps_its_width(case: Case, width: int) -> None:
    timeline = play(case.programs, SLOW)
    _, *rows, _ = timeline.to_text(width).splitlines()
    assert {len(row) for row in rows} == {width}
    assert len(rows) == sum(len(timeline.streams(stage)) for stage in timeline.stages)
    events = json.loads(json.dumps(timeline.to_chrome_trace()))["traceEvents"]
    streams = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    drawn = [one for one in events if one["ph"] == "X"]
    assert [(one["pid"], streams[one["pid"], one["tid"]], one["name"], one["args"]["task"]) for one in drawn] == [
        (s.stage, s.stream, s.name, s.task) for s in timeline.spans
    ]
    times = [time_s for span in timeline.spans for time_s in (span.start_s, span.end_s)]
    assert [time_us / 1e6 for one in drawn for time_us in (one["ts"], one["ts"] + one["dur"])] == pytest.approx(times)


def span(stream: str, start_s: float, end_s: float, stage: int = 0) -> Span:
    name = "forward:a" if stream == COMPUTE else "all_gather:a"
    return Span(stage=stage, stream=stream, name=name, task="F0", start_s=start_s, end_s=end_s)


def test_exposed_is_communication_with_no_compute_beside_it() -> None:
    timeline = Timeline(
        (
            span(COMPUTE, 0, 2),
            span(COMPUTE, 5, 6),
            span("x", 1, 4),
            span("y", 3, 4.5),
            span("y", 8, 9),
            span("x", 0, 10, stage=1),
        )
    )
    assert timeline.step_s == 10
    assert timeline.exposed_s(0) == 2.5 + 1
    assert timeline.exposed_s(1) == 10
    assert timeline.idle_s(0) == 7
    assert timeline.streams(0) == (COMPUTE, "x", "y")


def test_the_picture_shows_what_ran_when() -> None:
    text = Timeline((span(COMPUTE, 0, 0.001), span("dp_shard", 0.001, 0.002))).to_text(41)
    assert text.splitlines() == [
        "2 ms per step, 1 ms of exposed communication",
        "stage 0 compute  FFFFFFFFF·········   50%",
        "stage 0 dp_shard ·········ggggggggg   50%",
        "F forward  g all_gather",
    ]
    assert Timeline(()).to_text() == "an empty step"
    assert {*LETTERS} == {*OpKind}


def test_a_picture_of_many_stages_shows_their_compute() -> None:
    stages = [Span(stage, stream, "forward:a", "F0", 0, 1) for stage in range(25) for stream in (COMPUTE, "dp_shard")]
    _, *rows, legend = Timeline(tuple(stages)).to_text().splitlines()
    assert [row.split()[:3] for row in rows] == [["stage", str(stage), COMPUTE] for stage in range(25)]
    assert legend == "F forward; 25 rows of communication are left out"


# -- hardware ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", profiles())
def test_every_number_of_a_profile_has_its_source(name: str) -> None:
    table = tomllib.loads((files("samestep") / "profiles" / f"{name}.toml").read_text(encoding="utf-8"))
    sources = table.pop("sources")
    table.pop("device_names", None)
    keys = {
        f"{key}.{part}" if isinstance(value, dict) else key
        for key, value in table.items()
        for part in (value if isinstance(value, dict) else [""])
    }
    assert keys == set(sources)
    assert load(name).name == name


def test_a_profile_of_your_own(tmp_path: Path) -> None:
    text = (files("samestep") / "profiles" / "h100x8.toml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace("devices_per_node = 8", "devices_per_node = 4"), encoding="utf-8")
    assert load(mine) == load(str(mine)) == replace(load("h100x8"), name="mine", devices_per_node=4)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("memory_bytes = 8", "memry_bytes = 8"), "memory_bytes: field required; memry_bytes"),
        (("latency_s = 3.4e-6", "latency_s = -1"), "intra.latency_s: .*greater than or equal to 0"),
        (("overlap = true", "overlap = "), "is not TOML"),
    ],
)
def test_mistakes_in_a_profile_are_named(tmp_path: Path, change: tuple[str, str], what: str) -> None:
    text = (files("samestep") / "profiles" / "h100x8.toml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace(*change, 1), encoding="utf-8")
    with pytest.raises(InputError, match=what):
        load(mine)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved virtual_stages=2"])
def test_without_overlap_a_stage_waits_for_what_it_sends_by_nccl(schedule: str) -> None:
    """NCCL sends by a kernel, which is one of the stage's queue; gloo by threads of the host."""
    given_case = case(blocks(8, **COSTLY), f"dp=1 pp=4 microbatch=1 schedule={schedule}", global_batch=8)
    slow = replace(SLOW, overlap=False)
    timelines = {name: play(given_case.programs, replace(slow, library=name)) for name in ("nccl", "gloo")}
    assert timelines["nccl"].step_s > timelines["gloo"].step_s

    def overlapping(timeline: Timeline) -> bool:
        sends = [span for span in timeline.spans if span.name.startswith("send")]
        works = [span for span in timeline.spans if span.stream == COMPUTE]
        return any(
            send.stage == work.stage and send.start_s < work.end_s - 1e-12 and work.start_s < send.end_s - 1e-12
            for send in sends
            for work in works
        )

    assert overlapping(timelines["gloo"])
    assert not overlapping(timelines["nccl"])


@LAW
@given(cases(), st.floats(1.0, 3.0))
def test_a_score_is_played_at_other_speeds_as_if_it_were_new(case: Case, c: float) -> None:
    """Ops that share a price are those that take the same time on any machine."""
    score = Score(case.programs, SLOW)
    other = replace(load("h100x8"), name="other", contention=c, kernel_launch_s=1e-4)
    for hardware in (SLOW, other, load("a100-80x8")):
        played = score.play(hardware)
        assert played.spans == play(case.programs, hardware).spans
        assert score.step_s(hardware) == played.step_s
        for program in case.programs:
            times = {
                (op.name, id(op)): (price_key(op, program), seconds(op, program, hardware)) for _, op in program.ops()
            }
            assert len({key for key, _ in times.values()}) == len({*times.values()})


@LAW
@given(cases(), st.integers(1, 40))
def test_a_builder_for_another_global_batch_writes_the_programs_of_a_new_one(case: Case, batch: int) -> None:
    """What builders share does not depend on how many micro-batches a step has."""
    job = Job(train={"global_batch": batch}, numerics={"precision": case.job.numerics.precision})
    step = case.program.step
    assume(refusal_of(StepSpec.of(case.model, job, case.layout, step.ranks_per_node)) is None)
    first = ProgramBuilder(case.model, case.job, step.ranks_per_node)
    assert first.programs(case.layout) == case.programs
    other = first.of_batch(job).programs(case.layout)
    fresh = programs_of(case.model, job, case.layout, step.ranks_per_node)
    assert other == fresh
    prices = [[seconds(op, program, SLOW) for _, op in program.ops()] for program in other]
    assert prices == [[seconds(op, program, SLOW) for _, op in program.ops()] for program in fresh]
