"""Every axis, alone and with others, computes what one device computes, and sends what its program lists: the rows of `axes.py`.

float64 with the model's float32 islands raised: what is left is the order of sums, 1e-9 by the design's rule. SGD, so
that weights can be compared after separate backward passes; perturbed norms and biases, uneven counts of tokens, clipping. Among
the models are those of known silent errors: embeddings that are cut apart or tied across stages, norms of heads without a summed
gradient, biases of row cuts added tp times, embeddings that the model scales before its blocks, routes that leave experts of some
ranks without rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samestep.building.loss import loss_of
from samestep.building.model import call_model
from samestep.building.optimizer import optimizer_of
from samestep.building.torch_seams import current_backward_id
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.examination.examine import Source, examine
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory import live_bytes
from samestep.program.ops import BYTES_OF, OpKind
from samestep.runtime.axes import rank_crossings
from samestep.runtime.ledger import _owners
from samestep.schedules import TaskKind
from samestep.strategies import program_of
from tests.code import pipeline_models as models
from tests.covering import beyond_products
from tests.laboratory import (
    TOLERANCE,
    assert_same,
    clipped,
    combinations,
    job_of,
    make_run,
    observe,
    on_ranks,
    prepared_run,
    program_in,
    program_traced_in,
    prove,
    prove_ledger,
    reference,
    run_from,
)
from tests.models import MODELS, VOCABULARY, Parted, PartedBlock, Plain, Tokens
from tests.parity.axes import FAMILIES, LEDGERS, ROWS, UNEVEN, nightly
from tests.parity.axes import MODELS as MODELS_OF_ALL
from tests.pool import pool


def _rows() -> Iterator[Any]:
    """Yield the rows of the axes by name; those whose pairs other rows hold, or the products, are for `make parity`."""
    given = [
        (axis, *((row.values, row.marks) if hasattr(row, "values") else (row, ())))
        for axis, rows in ROWS.items()
        for row in rows
    ]
    kept = beyond_products(values for _, values, marks in given if not marks)
    for axis, values, marks in given:
        name = f"{axis}-{'-'.join(map(str, values))}"
        yield pytest.param(*values, id=name, marks=marks or (() if values in kept else pytest.mark.nightly))


@pytest.mark.every_row
@pytest.mark.parametrize(("layout", "model"), [*_rows()])
def test_an_axis_computes_what_one_device_computes(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.every_row
@pytest.mark.parametrize(("layout", "model"), LEDGERS)
def test_the_ledger_holds_in_mixed_precision(layout: str, model: str) -> None:
    prove_ledger(layout, model)


@pytest.mark.every_row
@pytest.mark.parametrize(("layout", "model", "batch"), UNEVEN)
def test_uneven_batches_are_legal(layout: str, model: str, batch: int) -> None:
    prove(layout, model, job_of("float64", 2, train={"global_batch": batch}))


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2 zero=2 microbatch=2", "deep_gpt2"),
        pytest.param("dp=2 zero=3 microbatch=2", "deep_llama", marks=pytest.mark.nightly),
        pytest.param("tp=2 sequence_parallel", "deep_qwen3", marks=pytest.mark.nightly),
        pytest.param("cp=2", "recurrent layers", marks=pytest.mark.nightly),
    ],
)
def test_in_bf16_inputs_on_the_host_give_the_bits_of_a_repeated_forward(layout: str, model: str) -> None:
    there, here = (
        on_ranks(f"{layout} recompute={word}", observe, model, clipped("bf16")) for word in ("offload", "full")
    )
    for one, other in zip(there, here, strict=True):
        assert one.losses == other.losses
        for mine, others in zip(one.gradients, other.gradients, strict=True):
            assert mine
            assert all(torch.equal(a[-1], b[-1]) and a[:-1] == b[:-1] for a, b in zip(mine, others, strict=True))


def test_nodes_are_reduced_first() -> None:
    """Two nodes of two ranks: three collectives a bucket, over two axes, give the sum of four."""
    job = job_of("float64", 2, optimizer={"clip_norm": 0.5}, run={"ranks_per_node": 2})
    ranks = pool(4).run(observe, "plain", "dp=4 reduce=hierarchical", job, True)
    assert_same(ranks, reference("plain"), TOLERANCE)
    for seen in ranks:
        assert seen.ledger == seen.predicted
        assert sorted(len(group.split(",")) for group in seen.ledger) == [2, 2, 4]


def test_a_model_that_was_built_for_inference_trains() -> None:
    """As `from_pretrained` gives it: evaluation mode of the whole is none of the user's wishes."""

    def losses(is_built_in_training: bool) -> list[float]:
        def build() -> nn.Module:
            return Plain(dropout=0.5).train(is_built_in_training)

        job = job_of("float64", 2)
        run = run_from(Source(build, loss_of(job), optimizer_of(job)), "dp=1", job)
        return [run.step(batch).loss for batch in batches(Tokens(), job)]

    assert losses(False) == losses(True)


# -- experts ---------------------------------------------------------------------------------------


def test_experts_are_divided_with_the_sequence() -> None:
    """Under tp alone every rank repeats the rows of all tokens."""
    source = Source(MODELS["mixtral"], loss_of(clipped()), optimizer_of(clipped()), "mixtral")
    example = next(batches(Tokens(), clipped())).samples([0])
    spec = examine(source, clipped(), example, Layout("tp=2 sequence_parallel")).spec
    whole, alone, cut = (
        program_of(spec, clipped(), Layout(words)).step.model.layers[1]
        for words in ("dp=1", "tp=2", "tp=2 sequence_parallel")
    )
    (rows,), (halves,) = whole.dispatches, cut.dispatches
    assert alone.dispatches == (rows,)
    assert (halves.rows, halves.width) == (rows.rows // 2, rows.width)
    flops = {
        name: sum(p.flops for p in layer.products if p.groups > 1)
        for name, layer in (("whole", whole), ("alone", alone), ("cut", cut))
    }
    assert flops == {"whole": flops["whole"], "alone": flops["whole"], "cut": flops["whole"] // 2}
    assert cut.forward_flops == sum(product.flops for product in cut.products)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *combinations(["dp=2 ep=2 recompute=full"], FAMILIES),
        *nightly(["dp=2 ep=2 zero=3 microbatch=2"], FAMILIES[:1]),
        *nightly(["dp=2 zero=3", "dp=4 ep=2"], FAMILIES),
    ],
)
def test_the_ledger_of_experts_holds_in_mixed_precision(layout: str, model: str) -> None:
    ranks = prove_ledger(layout, model)
    assert ranks[0].losses == pytest.approx(reference(model, clipped("bf16")).losses, rel=2e-3)


@pytest.mark.parametrize(
    ("layout", "model", "says"),
    [
        ("dp=2 ep=2", "llama", r"ep=2: llama has no experts .*Use .*ep=1"),
        ("dp=2 ep=4", "mixtral", r"ep=4 borrows data ranks, and does not divide dp_replicate=2. Use ep=2"),
        ("dp=2 ep=2 reduce=hierarchical", "mixtral", r"experts differ with ep=2. Use reduce=ring"),
        ("tp=2 sequence_parallel", "mixtral_balanced", r"counted from whole samples, .*Use .*tp=2 alone"),
        ("dp=2 ep=2", "three_experts", r"ep=2 does not divide the 3 experts of blocks.0.experts.up. Use ep=1"),
    ],
)
def test_experts_that_cannot_be_are_refused_with_those_that_can(layout: str, model: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        program_traced_in(layout, model)


def test_the_loss_that_balances_experts_is_that_of_transformers() -> None:
    balanced, without = (
        observe(0, 1, model, "dp=1", job_of("float32", 1)).losses[0] for model in ("mixtral_balanced", "mixtral")
    )
    run = make_run(0, 1, "mixtral_balanced", "dp=1", job_of("float32", 1))
    batch = next(iter(batches(Tokens(), run.job)))
    samples = batch.samples(batch.indices)
    run.prepare(samples)
    theirs = run.model(samples["input_ids"]).aux_loss.item()
    assert balanced - without == pytest.approx(0.1 * theirs, rel=1e-5)


def test_a_part_of_a_batch_cannot_be_balanced() -> None:
    with pytest.raises(LayoutError, match=r"microbatch=1: the loss that balances .*. Use microbatch=4"):
        program_traced_in("dp=2 microbatch=1", "mixtral_balanced")
    with pytest.raises(LayoutError, match=r"pp=2: the loss that balances .*. Use pp=1"):
        program_traced_in("pp=2", "mixtral_balanced")


# -- slices of sequences ---------------------------------------------------------------------------


def held_out(rank: int, world: int, model: str, layout: str) -> tuple[float, Tensor]:
    """The loss of a forward without gradients, and logits of an odd number of tokens."""
    run = make_run(rank, world, model, layout, clipped())
    batch = next(batches(Tokens(), clipped()))
    loss = run.evaluate(batch)["loss"]
    outputs = run.outputs({"input_ids": Tokens().input_ids[:2, :7], "labels": Tokens().labels[:2, :7]})
    return loss, getattr(outputs, "logits", outputs)


@pytest.mark.parametrize("model", ["llama", "fused recurrence"])
def test_forwards_without_gradients_agree(model: str) -> None:
    loss, logits = held_out(0, 1, model, "dp=1")
    for ours, whole in pool(2).run(held_out, model, "cp=2"):
        assert ours == pytest.approx(loss, rel=1e-9)
        assert torch.allclose(whole, logits, rtol=1e-9, atol=1e-9)


def saved_bytes(rank: int, world: int, layout: str) -> tuple[int, int]:
    """Bytes that the autograd of one forward keeps of blocks and head, and what the program says."""
    job = job_of("float64", 1, train={"global_batch": 4})
    run = make_run(rank, world, "attentive", layout, job)
    batch = next(batches(Tokens(), job))
    run.prepare(batch.samples([0]))
    weights = {param.untyped_storage()._cdata for param in run.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.is_floating_point():
            kept[storage._cdata] = storage.nbytes()
        return tensor

    samples = batch.samples(range(4))
    slicing = run.assembly.parallel.slicing
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), slicing.of(samples):
        outputs = call_model(run.model, samples)
    said = sum(live_bytes.saved_bytes(run.program.step, layer)[1] for layer in run.program.step.model.layers)
    del outputs
    return sum(kept.values()), said


def test_a_slice_keeps_its_part_of_the_activations() -> None:
    whole, _ = saved_bytes(0, 1, "dp=1")
    for ours, ours_said in pool(2).run(saved_bytes, "cp=2"):
        assert ours / whole == pytest.approx(0.5, abs=0.03)
        assert ours == pytest.approx(ours_said, rel=0.01)


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        (
            "plain",
            "cp=2",
            "cp=2 slices sequences: blocks.0 mixes tokens by cumsum, and only attention is exchanged. Use cp=1",
        ),
        (
            "gpt2",
            "cp=4 exchange=heads",
            "cp=4 does not divide the 12 tokens and 2 heads into slices of 2 tokens or more. Use cp=2, or exchange=ring",
        ),
        (
            "gpt2",
            "tp=2 cp=2 exchange=heads",
            "does not divide the 12 tokens and 1 heads that tp=2 leaves a rank .*. Use cp=1, or exchange=ring",
        ),
        ("gpt2", "cp=5", "cp=5 does not divide the 12 tokens into slices of 2 tokens or more. Use cp=4 or 6"),
        ("squared", "tp=2 cp=2 sequence_parallel", "attn computes all tokens on every rank of cp=2. Use tp=2 alone"),
    ],
)
def test_what_cannot_be_sliced_is_refused(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in(layout, model)


class Limited(torch.autograd.Function):
    """Its backward limits each element, or where asked the norm of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_all: bool) -> Tensor:
        ctx.of_all = of_all
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm()) if ctx.of_all else gradient.clamp(-1e-3, 1e-3), None


class Before(nn.Module):
    """Code before two blocks, and between them."""

    def __init__(self, before: Callable[[Tensor], Tensor], between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.before, self.between = before, between

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(self.embed(input_ids))
        for block in self.blocks:
            x = self.between(x, block(x))
        return self.head(x)


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x.add_(y)
    return x


def kept(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x += y
    return x


BEFORE = {
    "a limit of each element": lambda: Before(lambda x: Limited.apply(x, False), kept),
    "a limit of all": lambda: Before(lambda x: Limited.apply(x, True), kept),
    "written in place": lambda: Before(lambda x: x, written),
}
MODELS_OF_ALL |= BEFORE


def test_code_before_the_blocks_that_keeps_tokens_apart_is_equal() -> None:
    prove("cp=2", "a limit of each element")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("a limit of all", "the model itself by the gradient of Limited mixes tokens"),
        ("written in place", "a full tensor is read after a write in place into slices of it"),
    ],
)
def test_code_beside_the_blocks_that_needs_whole_sequences_is_refused(model: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in("cp=2", model)


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("deep_llama", "pp=8", "cuts the 4 blocks of deep_llama into 8 stages. Use pp=4"),
        (
            "deep_llama",
            "pp=4 schedule=interleaved virtual_stages=2",
            "blocks of deep_llama into 8 virtual stages. Use schedule=1f1b",
        ),
        ("deep_llama", "pp=2 virtual_stages=2", "needs schedule=interleaved"),
        ("deep_llama", "dp=2 pp=2 zero=3 schedule=zero-bubble", "Use zero=1, or schedule=1f1b"),
        ("deep_llama", "pp=2 schedule=zero-bubble virtual_stages=2", "needs schedule=interleaved"),
    ],
)
def test_what_cannot_be_is_refused(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in(layout, model)


class Shaken(models.Language):
    """Something is added in front of every block: numbers that are drawn, which stages refuse in the middle of a step."""

    draws = True

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x + (torch.nn.init.uniform_(torch.empty_like(x)) if self.draws else torch.ones_like(x)))
        return self.head(x)


class Steady(Shaken):
    draws = False


def losses_of(rank: int, world: int, build: type[Shaken], layout: str, job: Job) -> list[float]:
    run = run_from(Source(build, loss_of(job), optimizer_of(job), build.__name__), layout, job, rank, world)
    return [run.step(batch).loss for batch in batches(Tokens(), job)]


def losses_behind_a_refusal(rank: int, world: int, layout: str, job: Job) -> list[float]:
    with pytest.raises(ModelError, match="its random numbers would differ"):
        losses_of(rank, world, Shaken, layout, job)
    return losses_of(rank, world, Steady, layout, job)


def test_a_run_behind_one_that_was_refused_in_the_middle_of_a_step_gets_its_own_messages() -> None:
    job = job_of(run={"timeout_s": 20})
    found = pool(2).run(losses_behind_a_refusal, "pp=2 microbatch=4", job)
    assert found[0] == pytest.approx(losses_of(0, 1, Steady, "dp=1", job), rel=1e-12)


class FailingOnce(torch.optim.SGD):
    """Fails on the rank that says so, when all messages of a step have come."""

    fails = False

    def step(self, closure: None = None) -> None:
        if FailingOnce.fails:
            FailingOnce.fails = False
            raise ArithmeticError("no step today")
        super().step(closure)


def losses_behind_a_failure(rank: int, world: int, layout: str, job: Job) -> list[float]:
    source = Source(Steady, loss_of(job), lambda params: FailingOnce(params, lr=0.1), "steady")
    run, steps = run_from(source, layout, job, rank, world), batches(Tokens(), job)
    run.step(next(steps))
    FailingOnce.fails = rank == 1
    with pytest.raises(ArithmeticError) if rank == 1 else contextlib.nullcontext():
        run.step(next(steps))
    return losses_of(rank, world, Steady, layout, job)


def test_a_run_behind_one_that_failed_on_one_rank_alone_gets_its_own_messages() -> None:
    job = job_of(run={"timeout_s": 20}, train={"watch_every": 0})
    found = pool(2).run(losses_behind_a_failure, "pp=2 microbatch=4", job)
    assert found[0] == pytest.approx(losses_of(0, 1, Steady, "dp=1", job), rel=1e-12)


# -- tensors ---------------------------------------------------------------------------------------


def test_a_sequence_without_a_tensor_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=1 cuts none. Use tp=2"):
        program_in("dp=2 sequence_parallel", "parted")


def order_in_backward(rank: int, world: int, layout: str, kind: str) -> list[str]:
    """Return, in order, where a sum of a block's input gradients begins and ends, and which weights get gradients."""
    run = prepared_run(rank, world, "llama_even", layout, clipped(steps=1))
    seen: list[str] = []
    block = run.model.get_submodule("model.layers.0")
    for name, param in block.named_parameters():

        def note(_: Any, name: str = name) -> None:
            if current_backward_id() != -1:  # else it is tried on drawn gradients
                seen.append(name.split(".")[-2])

        param.register_hook(note)

    def noted(send: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            work = send(*args, **named)
            if named.get("async_op") and _owners.names[-1].startswith("model.layers.0."):
                seen.append("begin")
                return Mock(wait=lambda: (work.wait(), seen.append("end")))
            return work

        return call

    module = rank_crossings if kind == "reduce_scatter" else dist
    with patch.object(module, kind, noted(getattr(module, kind))):
        run.step(next(batches(Tokens(), run.job)))
    return seen


@pytest.mark.parametrize(
    ("layout", "kind"), [("tp=2", "all_reduce"), ("tp=2 sequence_parallel recompute=full", "reduce_scatter")]
)
def test_weights_get_their_gradients_while_that_of_their_input_is_summed(layout: str, kind: str) -> None:
    for seen in pool(2).run(order_in_backward, layout, kind):
        waits = [index for index, name in enumerate(seen) if name == "begin"]
        parts = [seen[index : seen.index("end", index) + 1] for index in waits]
        beside = [sorted(part[1:-1]) for part in parts if len(part) > 2]
        assert beside == [["gate_proj", "up_proj"], ["k_proj", "q_proj", "v_proj"]]
        assert sorted(name for name in seen if name.endswith("proj")) == sorted(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        )


def test_groups_that_four_ranks_cannot_cut_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=4 does not divide the 2 heads of .*c_attn.*. Use tp=2"):
        program_traced_in("tp=4", "gpt2_even")


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=8 does not divide the 4 heads of .*q_proj.weight. Use tp=2 or 4"):
        program_in("tp=8", "deep_llama")


@pytest.mark.parametrize(
    "layout", ["tp=2 sequence_parallel microbatch=2", "dp=2 tp=2 zero=3 sequence_parallel microbatch=2"]
)
def test_gradients_of_parts_are_summed_once_a_step(layout: str) -> None:
    program = program_in(layout, "llama_even")
    sums = [(task.kind, op) for task, op in program.ops() if op.kind is OpKind.ALL_REDUCE and op.axis == "tp"]
    in_blocks = [(kind, op) for kind, op in sums if op.owner.startswith(("bucket", "model.layers"))]
    assert program.step.num_microbatches > 1
    assert {kind for kind, _ in in_blocks} == {TaskKind.UPDATE}
    between = sum(param.numel for param in program.step.model.params if param.partial == "sequence")
    ranks = program.step.layout.num_shards
    assert sum(op.size_bytes for _, op in in_blocks) == between // ranks * BYTES_OF[program.step.master_dtype]


_products = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


class KeepingBlock(PartedBlock):
    """A block that checkpoints its own code and keeps the results of its products, whole or in a part."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__(16, 4)
        self.is_whole = is_whole

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=_products)
        x = x + self.attention(self.first(x)) * self.gain
        return x + checkpoint(self.fed_forward, x, use_reentrant=False, context_fn=_products)

    def fed_forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mlp(self.second(x)))


class Keeping(Parted):
    def __init__(self, is_whole: bool) -> None:
        super().__init__(blocks=2)
        self.blocks = nn.ModuleList(KeepingBlock(is_whole) for _ in range(2))


MODELS |= {f"keeping {is_whole}": functools.partial(Keeping, is_whole) for is_whole in (True, False)}


@pytest.mark.parametrize("model", ["keeping True", "keeping False"])
def test_products_that_the_models_code_keeps_are_summed_once(model: str) -> None:
    """A kept product that held the sum already would be summed again when its forward is repeated."""
    assert_same(on_ranks("tp=2", observe, model, clipped()), reference(model, clipped()), TOLERANCE)
