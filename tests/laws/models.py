"""Small models, jobs, layouts and machines for the laws: by hand, and as hypothesis strategies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from samestep.enumeration import candidates
from samestep.errors import LayoutError
from samestep.hardware import Hardware, Link, load
from samestep.job import Job
from samestep.layout import Accumulate, Layout, Recompute, Reduce, TokenExchange
from samestep.memory.memory_use import memory_of
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.layer_parts import ExpertDispatch
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.presets import resnet
from samestep.models.spec import ModelSpec
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import SCHEDULES
from samestep.strategies import ProgramBuilder, programs_of, refusal_of
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.least_memory import Needs
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.simulation.simulate import Prediction, predict, predict_programs

LAW = settings(max_examples=25, derandomize=True, database=None, suppress_health_check=[HealthCheck.filter_too_much])

LENGTHS = st.sampled_from([1, 2, 3, 5, 8, 64, 1000, 4097])
"""Of dimensions: odd ones for padding, large ones so that a model has several buckets."""


SAVED = st.tuples(*[st.integers(0, 1000)] * 3)
SHAPES = st.tuples(LENGTHS) | st.tuples(LENGTHS, LENGTHS)


class Case(NamedTuple):
    """A program and what it was made of."""

    model: ModelSpec
    job: Job
    layout: Layout
    program: Program
    """The first pipeline stage's."""
    programs: tuple[Program, ...]
    """All stages'."""

    def __repr__(self) -> str:
        """Say in one line what a failing law was given: programs run to thousands of words."""
        blocks = sum(layer.is_block for layer in self.model.layers)
        return (
            f"Case({blocks} blocks, {len(self.model.params)} weights, {str(self.layout)!r}, "
            f"global_batch={self.job.train.global_batch}, {self.job.numerics.precision}, "
            f"ranks_per_node={self.program.step.ranks_per_node})"
        )


def block(index: int, **costs: int) -> LayerSpec:
    """Return the layer of block number `index`."""
    return LayerSpec(name=f"layers.{index}", modules=(f"layers.{index}",), is_block=True, **costs)


def blocks(num_blocks: int, rows: int = 64, cols: int = 64, **costs: int) -> ModelSpec:
    """Return equal blocks of one weight each, with nothing before or after them."""
    return ModelSpec(
        name="blocks",
        layers=tuple(block(index, **costs) for index in range(num_blocks)),
        params=tuple(
            ParamSpec(name=f"layers.{index}.weight", shape=(rows, cols), layer=index) for index in range(num_blocks)
        ),
    )


def case(model: ModelSpec, layout: str, ranks_per_node: int | None = None, **job: Any) -> Case:
    """Build the program of `layout`; `job` may give global_batch and precision."""
    made = Job(
        train={"global_batch": job.get("global_batch", 8)}, numerics={"precision": job.get("precision", "float32")}
    )
    parsed = Layout(layout)
    return _case(model, made, parsed, ranks_per_node)


def _case(model: ModelSpec, job: Job, layout: Layout, ranks_per_node: int | None) -> Case:
    programs = programs_of(model, job, layout, ranks_per_node)
    return Case(model, job, layout, programs[0], programs)


def machine(
    *,
    bytes_per_s: float = math.inf,
    latency_s: float = 0.0,
    memory_bytes_per_s: float = math.inf,
    overlap: bool = True,
    inter: Link | None = None,
    devices_per_node: int = 8,
) -> Hardware:
    """Return a machine of 1 TFLOP/s devices; communication and memory are free unless told otherwise."""
    link = Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Hardware(
        name="toy",
        flops_per_s=dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 1e12),
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=memory_bytes_per_s,
        devices_per_node=devices_per_node,
        intra=link,
        inter=inter or link,
        overlap=overlap,
    )


TINY = Decoder(layers=4, hidden=64, heads=4, vocab=512, sequence=64)
MODELS = {
    "tiny": spec(TINY, "tiny"),
    "odd": spec(Decoder(layers=3, hidden=60, heads=3, vocab=500, sequence=48), "odd"),
    "tied": spec(replace(TINY, tied=True), "tied"),
    # Norms, rotations and activations are several kernels each, which a compiler fuses.
    "unfused": spec(replace(TINY, fused=False, query_norm="head", post_norm=True), "unfused"),
    "experts": spec(replace(TINY, experts=4, top_k=2), "experts"),
    # A vocabulary that no degree divides stays whole, and weighs more beside blocks that are cut.
    "lopsided": spec(replace(TINY, layers=6, vocab=4999), "lopsided"),
    # Of a vocabulary this large a plan tries to make the logits in chunks.
    "wide": spec(replace(TINY, vocab=2**15, sequence=2048), "wide"),
    "vision": resnet("resnet50"),
}
MACHINES = {
    "free": machine(),
    "slow": machine(bytes_per_s=1e9, latency_s=1e-5, memory_bytes_per_s=1e11, devices_per_node=4),
    "alone": machine(bytes_per_s=1e9, latency_s=1e-4, memory_bytes_per_s=1e11, overlap=False, devices_per_node=2),
    "crowded": replace(
        machine(bytes_per_s=1e10, latency_s=1e-6, memory_bytes_per_s=1e11, devices_per_node=4), contention=1.3
    ),
    "uneven": replace(
        machine(bytes_per_s=1e9, latency_s=1e-5, memory_bytes_per_s=1e11, devices_per_node=4), device_spread=0.2
    ),
    "a100": load("a100-80x8"),
}


def job_of(global_batch: int = 16, precision: str = "bf16", **run: str) -> Job:
    """Return a job of so many sequences of 64 tokens a step; `run` may give compile and its backend."""
    return Job(
        train={"global_batch": global_batch}, numerics={"precision": precision}, data={"sequence_length": 64}, run=run
    )


def predictions(model: ModelSpec, job: Job, hardware: Hardware, layouts: Iterable[Layout]) -> Iterator[Prediction]:
    """Yield the prediction of each layout that no strategy refuses and that fits: no bound has a say in it."""
    builder = ProgramBuilder(model, job, job.run.ranks_per_node or hardware.devices_per_node)
    for layout in layouts:
        try:
            programs = builder.programs(layout)
        except LayoutError:
            continue
        found = predict_programs(programs, model, job, hardware, memory_of(programs, hardware, 2), 2)
        if found.fits:
            yield found


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """A decoder: embedding, blocks, norm and head; perhaps tied, with a weight at its root, and frozen weights."""
    num_blocks = draw(st.integers(1, 3))
    vocab, width = draw(LENGTHS), draw(LENGTHS)
    tied = draw(st.booleans())
    layers = [LayerSpec(name="embed", modules=("embed",), saved_elements=5, backward_reads_weights=False)]
    params = [ParamSpec(name="embed.weight", shape=(vocab, width), layer=0, shared=tied)]
    if tied:
        params = [ParamSpec(name="embed.weight", shape=(vocab, width), layer=0, shared=True, aliases=("head.weight",))]
    if draw(st.booleans()):
        params.insert(0, ParamSpec(name="positions", shape=(draw(LENGTHS), width), layer=0))
    for index in range(num_blocks):
        inputs, selective, saved = sorted(draw(SAVED))
        layers.append(
            block(
                index,
                forward_flops=draw(st.integers(1, 10**9)),
                input_elements=inputs,
                saved_selective_elements=selective,
                saved_elements=saved,
            )
        )
        frozen = draw(st.integers(0, 9)) == 0
        for number in range(draw(st.integers(1, 3))):
            name = f"layers.{index}.w{number}.weight"
            params.append(ParamSpec(name=name, shape=draw(SHAPES), layer=index + 1, trainable=not frozen))
    after = LayerSpec(name="after", modules=("norm", "head"), forward_flops=7, saved_elements=11)
    if draw(st.booleans()):
        params.append(ParamSpec(name="norm.weight", shape=(width,), layer=len(layers)))
    if not tied:
        params.append(ParamSpec(name="head.weight", shape=(vocab, width), layer=len(layers)))
    return ModelSpec(name="drawn", layers=(*layers, after), params=tuple(params), buffer_bytes=draw(LENGTHS))


AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
"""The degrees of a layout."""
SPREADS = st.sampled_from([axes for count in (0, 1, 2, *(3, 4, 5) * 3) for axes in itertools.combinations(AXES, count)])
"""The axes over which a layout spreads a step: each in more than half of the draws, since hypothesis repeats itself."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout that can be written down, of up to five axes."""
    axes = draw(SPREADS)

    def degree(axis: str, *degrees: int) -> int:
        return draw(st.sampled_from(degrees)) if axis in axes else 1

    zero = draw(st.integers("dp_shard" in axes, 3))
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    return Layout(
        dp_replicate=degree("dp_replicate", 2, 3, 4),
        dp_shard=degree("dp_shard", 2, 3, 4),
        tp=degree("tp", 2, 4),
        sequence_parallel=draw(st.booleans()),
        cp=degree("cp", 2, 4),
        exchange=draw(st.sampled_from(get_args(TokenExchange))),
        pp=degree("pp", 2, 4),
        ep=degree("ep", 2, 4),
        schedule=schedule,
        virtual_stages=draw(st.integers(1, 3)) if SCHEDULES[schedule].takes_chunks else 1,
        zero=zero,
        microbatch=draw(st.none() | st.integers(1, 8)),
        recompute=draw(st.sampled_from(get_args(Recompute))),
        accumulate=draw(st.sampled_from(get_args(Accumulate))),
        reduce=draw(st.sampled_from(get_args(Reduce))),
        offload=draw(st.booleans()),
    )


@st.composite
def decoders(draw: st.DrawFn, least_layers: int = 1, has_experts: bool = False) -> ModelSpec:
    """A decoder whose weights, sequence and experts can be cut: dense or with experts, tied or not."""
    experts = {"experts": 4, "top_k": draw(st.integers(1, 2))} if has_experts or draw(st.booleans()) else {}
    shape = Decoder(
        layers=draw(st.integers(least_layers, least_layers + 7)), hidden=draw(st.sampled_from([8, 16, 40])), heads=4,
        kv_heads=draw(st.sampled_from([0, 2])), vocab=draw(st.sampled_from([16, 63, 64])),
        sequence=draw(st.sampled_from([8, 12])), gated=draw(st.booleans()), tied=draw(st.booleans()),
        query_norm=draw(st.sampled_from(["", "head", "all"])), bias=draw(st.booleans()), **experts,
    )  # fmt: skip
    return spec(shape, "drawn")


@st.composite
def cases(draw: st.DrawFn, **words: st.SearchStrategy[Any]) -> Case:
    """The programs of a layout over any axes, with any schedule, that no strategy refuses; `words` narrow the layout."""
    layout = draw(layouts())
    layout = possible(replace(layout, offload=False, **{name: draw(values) for name, values in words.items()}))
    model = draw(decoders(layout.pp * layout.virtual_stages, layout.ep > 1))
    job = Job(
        train={"global_batch": draw(st.integers(1, 40))},
        numerics={"precision": draw(st.sampled_from(["float32", "bf16", "float64"]))},
    )
    world = layout.world_size
    ranks_per_node = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    assume(refusal_of(StepSpec.of(model, job, layout, ranks_per_node)) is None)
    return _case(model, job, layout, ranks_per_node)


def possible(layout: Layout) -> Layout:
    """Return the layout without what its other words make impossible, so that few draws are refused."""
    spec = SCHEDULES[layout.schedule]
    if layout.pp == 1:
        layout = replace(layout, schedule="1f1b", virtual_stages=1)
    elif spec.splits_backward:
        layout = replace(layout, zero=min(layout.zero, 1))
    if not spec.takes_chunks:
        layout = replace(layout, virtual_stages=1)
    if layout.tp > 1 and layout.cp > 1 and layout.exchange == "heads":  # of four heads
        layout = replace(layout, tp=2, cp=2)
    if layout.exchange == "hybrid" and (layout.cp < 4 or layout.tp > 1):  # no group of a part of the ranks
        layout = replace(layout, exchange="ring")
    if layout.cp == 1:
        layout = replace(layout, exchange="auto")
    if layout.tp == 1:
        layout = replace(layout, sequence_parallel=False)
    if layout.innermost_data_ranks % layout.ep:
        lent = "dp_shard" if layout.zero else "dp_replicate"
        layout = replace(layout, **{lent: layout.ep})
    if layout.dp_cp_size == 1 or layout.zero:
        layout = replace(layout, reduce="ring")
    if layout.zero < 2:
        layout = replace(layout, accumulate="sharded")
    return layout


@st.composite
def data_cases(draw: st.DrawFn, *zero: int) -> Case:
    """A program of a layout over the data axes alone, at one of these ZeRO stages or at any."""
    model = draw(models())
    stage = draw(st.sampled_from(zero or (0, 1, 2, 3)))
    dp_replicate = draw(st.integers(1, 4))
    dp_shard = draw(st.integers(2, 4)) if stage else 1
    dp = dp_replicate * dp_shard
    layout = Layout(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        zero=stage,
        microbatch=draw(st.none() | st.integers(1, 8)),
        recompute=draw(st.sampled_from(get_args(Recompute))),
        accumulate=draw(st.sampled_from(["sharded", "full"])) if stage > 1 else "sharded",
        reduce="ring" if stage else draw(st.sampled_from(["ring", "hierarchical", "root"])),
    )
    job = Job(
        train={"global_batch": draw(st.integers(1, 40))},
        numerics={"precision": draw(st.sampled_from(["float32", "bf16", "float64"]))},
    )
    ranks_per_node = draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))
    return _case(model, job, layout, ranks_per_node)


PIPELINES = st.sampled_from(sorted(SCHEDULES)).flatmap(lambda name: cases(pp=st.just(2), schedule=st.just(name)))
"""Pipelines with each schedule, over any other axes."""


def dealing(num_blocks: int = 2, experts: int = 8, rows: int = 6, width: int = 4) -> ModelSpec:
    """Return blocks of a plain weight and one with experts, which are given `rows` rows a sample."""
    model = blocks(num_blocks, forward_flops=100)
    layers = [
        replace(
            layer, dispatches=(ExpertDispatch(owner=f"{layer.name}.experts", rows=rows, width=width, experts=experts),)
        )
        for layer in model.layers
    ]
    weights = [
        ParamSpec(name=f"{layer.name}.experts.up", shape=(experts, width, 3), layer=index, experts=experts)
        for index, layer in enumerate(layers)
    ]
    return replace(model, layers=tuple(layers), params=(*model.params, *weights))


def in_chunks(model: ModelSpec, given: Job, layout: Layout, hardware: Hardware) -> list[StepSpec]:
    """Return the step of a layout with each choice of chunks."""
    plain = replace(layout, loss_chunk=None, mlp_chunk=None)
    words = candidates.chunk_words(plain, model)
    return [StepSpec.of(model, given, replace(plain, **one), hardware.devices_per_node) for one in words]


def assert_bounded(
    model: ModelSpec, job: Job, words: str, hardware: Hardware, *, plays: bool = False
) -> tuple[float, Prediction, int]:
    """Hold the bounds of a search against what is played; return the one of the time as a part of it, what is played, and the bytes."""
    layout = Layout(words)
    step = StepSpec.of(model, job, layout, hardware.devices_per_node)
    prices, played = Prices(model, job, hardware), predict(model, job, layout, hardware)
    part, need = Bounds(prices).step_s(step, plays=plays) / played.step_s, Needs(prices, 2).need(step).total
    assert part <= 1 + 1e-9, layout
    assert need <= played.peak.total * (1 + 1e-9), layout
    return part, played, need
