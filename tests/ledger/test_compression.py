"""What compressed gradients send and hold: bytes on the wire against float32's, and the memory that is predicted."""

from __future__ import annotations

import itertools

import pytest
from torch import Tensor

from samestep.datasets import batches
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.models import presets
from samestep.program.ops import BYTES_OF
from samestep.program.program import LedgerRow
from samestep.runtime.codecs.exchange import CodedExchange
from samestep.runtime.weights.replicated import Replicated
from samestep.strategies import program_of
from samestep.wings.slow_links.powersgd import FactoredExchange
from tests.laboratory import Observed, job_of, make_run, observe, on_ranks
from tests.models import Tokens

WAYS = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1, "reduce_scatter": 1}
"""How often a collective sends the part (N - 1) / N of a buffer."""


def compressed(codec: str, replicas: int = 2, precision: str = "float32") -> Job:
    return job_of(precision, 1, numerics={"compression": codec, "replicas": replicas})


def sent(seen: Observed) -> int:
    """Buffers of gradients that a rank sent, by what of them goes on the wire."""
    rows: list[LedgerRow] = [row for rows in seen.ledger.values() for row in rows if row.owner != "scalars"]
    return sum(WAYS[row.kind] * row.size_bytes for row in rows)


@pytest.mark.parametrize(("codec", "part"), [("int8", 0.27), ("bf16", 0.501)])
def test_a_codec_sends_so_much_of_what_float32_sends(codec: str, part: float) -> None:
    plain, coded = (
        on_ranks("dp=2", observe, "wide_llama", job, True)[0] for job in (job_of("float32", 1), compressed(codec))
    )
    assert coded.ledger == coded.predicted
    assert sent(coded) <= part * sent(plain)


def test_factors_send_what_their_shapes_say() -> None:
    job = compressed("powersgd")
    seen = on_ranks("dp=2", observe, "wide_llama", job, True)[0]
    assert seen.ledger == seen.predicted
    rank, factors, plain = job.numerics.compression_rank, 0, 0
    for _, _, _, gradient in seen.gradients[0]:
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        if gradient.dim() > 1 and rank * (rows + columns) < gradient.numel():
            factors += rank * (rows + columns)
        else:
            plain += gradient.numel()
    rows_of = [row for rows in seen.ledger.values() for row in rows if row.owner != "scalars"]
    assert {(row.kind, row.dtype) for row in rows_of} == {("all_reduce", "float32")}
    padding = sum(row.size_bytes for row in rows_of) // 4 - factors - plain
    assert 0 <= padding <= len({row.owner for row in rows_of})
    assert factors > plain > 0


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_units_are_scattered_in_so_much_of_what_float32_takes(codec: str) -> None:
    part = {"int8": 0.27, "bf16": 0.5}[codec]
    plain, coded = (
        on_ranks("dp=2 zero=3", observe, "wide_llama", job, True)[0]
        for job in (job_of("float32", 1), compressed(codec))
    )
    assert coded.ledger == coded.predicted
    rows = [[row for rows in seen.ledger.values() for row in rows] for seen in (plain, coded)]
    whole = sum(row.size_bytes for row in rows[0] if row.kind == "reduce_scatter")
    codes = [row for row in rows[1] if row.kind == "all_to_all"]
    assert {row.dtype for row in codes} == {"uint8"}
    assert 0 < sum(row.size_bytes for row in codes) <= part * whole
    gathers = [[row for row in listed if row.kind == "all_gather"] for listed in rows]
    assert gathers[0] == gathers[1]
    assert not [row for row in rows[1] if row.kind == "reduce_scatter"]


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_a_published_model_takes_about_a_byte_an_element(name: str) -> None:
    model = presets.preset(name, 1024)
    numerics = {"precision": "bf16", "compression": "int8", "replicas": 4}
    job = Job(model={"source": f"preset:{name}"}, train={"global_batch": 8}, numerics=numerics)
    program = program_of(model, job, Layout("dp=4"))
    size = sum(op.size_bytes for _, op in program.ops() if op.kind == "all_gather" and op.codec == "int8")
    assert size / model.num_params == pytest.approx(1.01, abs=0.01)


def hold(rank: int, world: int, model: str, layout: str, job: Job) -> tuple[int, int]:
    """Take a step; return the bytes that exchanges hold, and those that are predicted besides gradients."""
    run = make_run(rank, world, model, layout, job)
    for batch in batches(Tokens(), job):
        run.step(batch)
    program, store = run.program, run.assembly.weights.store
    plain = sum(bucket.padded_numel for bucket in program.buckets)
    plain += sum(unit.padded_grad_numel // unit.num_shards for unit in program.units)
    predicted = at_rest(program, 0, rank).gradients - plain * BYTES_OF[program.step.master_dtype]
    if isinstance(store, Replicated):
        return bytes_of([*store.codes.exchanges.values()]), predicted
    shards = store.codes._shards.values()
    scattered = [scatter.exchange for scatter in store.codes.scatters.values()]
    copies = sum(one.numel() * one.element_size() for shard in shards for one in shard.buffers)
    return copies + bytes_of([*scattered, *(shard.exchange for shard in shards)]), predicted


def bytes_of(exchanges: list[CodedExchange | FactoredExchange]) -> int:
    """Bytes of the codes or factors of exchanges, and of what they have lost; memory that several have in common once."""
    held = [tensor.untyped_storage() for exchange in exchanges for tensor in tensors_of(exchange)]
    return sum({one.data_ptr(): one.nbytes() for one in held if one.nbytes()}.values())


def tensors_of(exchange: CodedExchange | FactoredExchange) -> list[Tensor]:
    """What an exchange holds."""
    if isinstance(exchange, FactoredExchange):
        return [exchange._first, exchange._own, exchange._second, exchange._directions, exchange._kept]
    return [exchange._sent, exchange._received, exchange._sums, *exchange._lost, *exchange._lost_by_sum]


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        *itertools.product(
            ("dp=2", "dp=2 zero=1", "dp=2 zero=3", "dp_replicate=2 dp_shard=2 zero=3"), ("int8", "bf16")
        ),
        *itertools.product(("dp=2", "dp=2 zero=1"), ("powersgd",)),
    ],
)
def test_memory_of_codes_is_what_is_predicted(codec: str, layout: str) -> None:
    for held, predicted in on_ranks(layout, hold, "wide_llama", compressed(codec)):
        assert held == predicted
