"""QLoRA: adapters beside weights in 4 bits have the losses of a plain torch and peft loop in every layout."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import samestep
from samestep.building.initial_values import blueprint
from samestep.building.model import model_source
from samestep.building.model_changes import packed_weights
from samestep.datasets import batches
from samestep.errors import JobError, LayoutError
from samestep.job import Job
from samestep.job_tables import LoraTable
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.models.param_spec import packed_bytes
from samestep.models.spec import ModelSpec
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.run import Run
from samestep.strategies import program_of
from samestep.training.first_weights import FirstWeights
from samestep.wings.adapters import lora, nf4
from tests.folders import SIZES, saved
from tests.laboratory import TOLERANCE, assert_ledger, assert_same, job_of
from tests.models import Tokens
from tests.parity.test_frozen import observe, on_ranks, run_of
from tests.parity.test_lora import hold_losses, loaded, logits_of, plain_model, steps, trained_plainly
from tests.pool import pool
from tests.small import assert_equal, stored, whole

TARGETS = ["q_proj", "k_proj", "o_proj", "down_proj"]
LORA: dict[str, Any] = {"targets": TARGETS, "r": 4, "alpha": 8.0, "modules_to_save": ["lm_head"], "base": "nf4"}
WIDTH = 128
gathers_integers = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="FSDP2 of this torch gathers no integers: rejected by name"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama", shard="1GB", hidden_size=WIDTH, intermediate_size=2 * WIDTH)


def job_with(folder: Path, precision: str = "float32", **lora: Any) -> Job:
    return job_of(precision, 3, model={"source": f"hf:{folder}", "lora": {**LORA, **lora}})


def quantized(folder: Path, job: Job) -> nn.Module:
    """Peft's model over transformers' own, with the weights of all linear layers but the head rounded."""
    model = plain_model(folder, job)
    for path, module in model.named_modules():
        if type(module) is nn.Linear and "lm_head" not in path and "lora_" not in path:
            module.weight = nn.Parameter(nf4.round_weight(module.weight.detach()), requires_grad=False)
    return model


@functools.cache
def plain_losses(folder: Path, job_json: str) -> list[float]:
    job = Job.model_validate_json(job_json)
    full = job.model_copy(
        update={"model": job.model.model_copy(update={"lora": job.model.lora.model_copy(update={"base": "full"})})}
    )
    return trained_plainly(quantized(folder, full), job)


def numbered(shape: tuple[int, int]) -> Tensor:
    """Return a weight whose values are the same in every version of torch."""
    index = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    return ((index * 0.7390851332).sin() ** 3 * (1 + index.div(shape[1]).floor() % 5)).float()


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("shape", [(64, 64), (7, 128), (96, 320)])
def test_codes_and_scales_are_those_of_torchao(shape: tuple[int, int]) -> None:
    """`nf4.json` holds digests of what torchao 0.18 makes of `numbered`: to_nf4(weight, 64, gcd(256, numel / 64))."""
    packed = nf4.pack_values(nf4.round_weight(numbered(shape)))
    assert packed.numel() == packed_bytes(math.prod(shape))
    assert torch.equal(nf4.unpack_values(packed), nf4.round_weight(numbered(shape)))
    found = {"values": digest(nf4.unpack_values(packed)), "codes": digest(packed[:, : shape[1] // 2])}
    assert found == json.loads(Path(__file__).with_name("nf4.json").read_text())["x".join(map(str, shape))]


def test_zeros_and_tiny_blocks_are_held_as_they_are_rounded() -> None:
    torch.manual_seed(3)
    weight = torch.randn(64, 128)
    weight[3], weight[5] = 0.0, 1e-6 * weight[5]
    values = nf4.round_weight(weight)
    assert not values[3].any()
    assert torch.equal(nf4.unpack_values(nf4.pack_values(values)), values)
    assert (values[5] * weight[5] >= 0).all()


LAYOUTS: list[Any] = [pytest.param("dp=2 zero=3", marks=gathers_integers), "pp=2 microbatch=4"]
NIGHTLY = ["dp=2 zero=1", "dp=2 zero=2", "dp=2 tp=2 zero=3", "dp=2 pp=2 microbatch=2 schedule=zero-bubble"]
NIGHTLY += [
    "tp=2 pp=2 microbatch=4 recompute=full",
    "dp=2 zero=3 recompute=full",
    "dp=2 pp=2 microbatch=2 zero=3",
    "cp=2",
]
LAYOUTS += [
    pytest.param(layout, marks=[pytest.mark.nightly, *[gathers_integers] * ("zero=3" in layout)]) for layout in NIGHTLY
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_torch_and_peft(layout: str, folder: Path) -> None:
    job = job_with(folder)
    hold_losses(layout, job, plain_losses(folder, job.model_dump_json()))


def test_every_layout_gives_the_weights_of_one_device(folder: Path) -> None:
    job = job_with(folder, "float64")
    assert_same(on_ranks("tp=2", job), observe(0, 1, "dp=1", job), TOLERANCE)


def prepared(job: Job) -> Run:
    run = run_of(0, 1, "dp=1", job, for_any=True)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    return run


def spec_of(job: Job) -> ModelSpec:
    return prepared(job).assembly.model.spec


@gathers_integers
def test_gathers_in_half_precision_and_memory_are_those_of_4_bits(folder: Path) -> None:
    elements = WIDTH * (WIDTH + 2 * WIDTH // 2 + WIDTH + 3 * 2 * WIDTH)  # of q, k, v, o, gate, up and down in a block
    held, gathered = dict[str, list[int]](), dict[str, int]()
    for base in ("nf4", "full"):
        job = job_with(folder, base=base)
        spec = spec_of(job)
        held[base] = [at_rest(program_of(spec, job, Layout(layout))).weights for layout in ("dp=2", "dp=2 zero=3")]
        half = job_with(folder, "bf16", base=base)
        ranks = on_ranks("dp=2 zero=3", half)
        assert_ledger(ranks, "dp=2 zero=3")
        rows = [row for rows in ranks[0].ledger.values() for row in rows if row.kind == "all_gather"]
        gathered[base] = max(row.size_bytes for row in rows)
        if base == "nf4":
            assert ranks[0].losses == pytest.approx(observe(0, 1, "dp=1", half).losses, rel=1e-3)
    assert gathered["full"] - gathered["nf4"] == 2 * elements - packed_bytes(elements)
    saved_bytes = 2 * (4 * elements - packed_bytes(elements))  # of two blocks
    given_up = [whole - ours for whole, ours in zip(held["full"], held["nf4"], strict=True)]
    assert given_up == [saved_bytes, saved_bytes // 2]


@gathers_integers
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_resumed_exported_and_merged_into_rounded_weights(folder: Path, tmp_path: Path) -> None:
    job = job_with(folder)
    for layout in ("tp=2", "dp=2 zero=3"):
        run_of(0, 1, layout, job)
    pool(2).run(steps, "tp=2", job, tmp_path / "run", 2)
    first = tmp_path / "run" / "checkpoints" / "step-000002"
    assert all("lora_" in name or "modules_to_save" in name for name in checkpoint.read_manifest(first)["shapes"])
    pool(2).run(steps, "dp=2 zero=3", job, tmp_path / "run", 3, first)
    plain = quantized(folder, job_with(folder, base="full"))
    trained_plainly(plain, job)
    expected = logits_of(plain)

    samestep.export(tmp_path / "run", tmp_path / "adapters")
    base = loaded(folder)
    with torch.no_grad():
        for path, module in base.named_modules():
            if type(module) is nn.Linear and path != "lm_head":
                module.weight.copy_(nf4.round_weight(module.weight))
    ours = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    samestep.export(tmp_path / "run", tmp_path / "whole", merge=True)
    for found in (ours, loaded(tmp_path / "whole")):
        assert (logits_of(found) - expected).abs().max() <= 1e-5 * expected.abs().max()


@gathers_integers
def test_a_resumed_run_is_equal_to_the_bit(folder: Path, tmp_path: Path) -> None:
    layout = "dp=2 zero=3"
    job = job_of(
        "bf16", 3, optimizer={"name": "adamw", "lr": 0.01, "options": {"betas": (0.9, 0.95)}},
        model={"source": f"hf:{folder}", "lora": {**LORA, "dropout": 0.1}},
    )  # fmt: skip
    first, last = (f"checkpoints/step-00000{step}" for step in (2, 3))

    def run(name: str, until: int, start: Path | None = None) -> Path:
        run_of(0, 1, layout, job)
        pool(2).run(steps, layout, job, tmp_path / name, until, start)
        return tmp_path / name

    begun = run("run", 2) / first
    resumed, whole_run = run("run", 3, begun) / last, run("whole", 3) / last
    assert_equal(stored(resumed), stored(whole_run))
    trained = whole(whole_run)
    assert any(not torch.equal(trained[name], value) for name, value in whole(begun).items())


def test_weights_of_another_run_are_rounded(folder: Path, tmp_path: Path) -> None:
    run, plain = prepared(job_with(folder)), job_of("float32", 1, model={"source": f"hf:{folder}"})
    piece = next(piece for piece in run.assembly.weights.store.frozen if piece.held_as)
    before = piece.master().clone()
    steps(0, 1, "dp=1", plain, tmp_path, 1)
    samestep.export(tmp_path, tmp_path / "trained")
    FirstWeights.of(tmp_path, run.job).load(run)
    path = piece.name.removesuffix(".weight").removesuffix(".base_layer")
    assert torch.equal(
        piece.master(), nf4.round_weight(loaded(tmp_path / "trained").get_submodule(path).weight.detach())
    )
    assert not torch.equal(piece.master(), before)


def test_weights_that_are_no_whole_blocks_and_cuts_within_blocks_are_refused(folder: Path) -> None:
    text = (
        r'model.lora.base = "nf4" has a scale for each 64 elements of a row, and rows of '
        r"model.layers.0.self_attn.q_proj.base_layer.weight have 96. Use a width that 64 divides"
    )
    with pytest.raises(JobError, match=text):
        blueprint(
            model_source(Job(model={"source": "hf:llama", "config": {**SIZES, "hidden_size": 96}, "lora": LORA})), 0
        )
    job = job_with(folder, targets=["o_proj", "down_proj"])
    text = r"tp=4 cuts rows of .*o_proj.base_layer.weight within blocks of 64 elements, .*. Use tp=2, or"
    with pytest.raises(LayoutError, match=text):
        program_of(spec_of(job), job, Layout("tp=4"))


class Branches(nn.Module):
    """Two linear layers of whole blocks, one of none, one that is not called, and a head of its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.narrow = nn.Linear(64, 128), nn.Linear(128, 48), nn.Linear(48, 64)
        self.score = nn.Linear(64, 8)


def test_all_linear_layers_but_the_head_are_rounded_and_a_tied_head_stays_as_it_is() -> None:
    for targets in (["first"], ["first", "second"], ["first", "score"]):
        model = lora.insert(Branches(), LoraTable(targets=tuple(targets), base="nf4"))
        rounded = {name.replace(".base_layer", "") for name in packed_weights(model)}
        assert rounded == {"first.weight", "second.weight"}
    config = {**SIZES, "hidden_size": 64, "tie_word_embeddings": True}
    table = {**LORA, "targets": ["q_proj", "lm_head"], "modules_to_save": []}
    job = Job(model={"source": "hf:llama", "config": config, "lora": table})
    assert not any("lm_head" in name for name in blueprint(model_source(job), 0).rounded)
