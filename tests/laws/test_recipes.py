"""Laws of layouts in the words of other frameworks: every word of a layout is said or refused, and batches come out whole."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import job_files as jobs
from samestep.hardware import resolve_hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import catalog
from samestep.schedules import SCHEDULES
from samestep.strategies import pipeline
from samestep.wings.plan import recipes
from samestep.wings.plan.recipes.recipe import Recipe, recipe_of

_NAMES = sorted(recipes.FRAMEWORKS)
_MEGATRON = {
    "--tensor-model-parallel-size": int,
    "--pipeline-model-parallel-size": int,
    "--context-parallel-size": int,
    "--cp-comm-type": str,
    "--hierarchical-context-parallel-sizes": int,
    "--pipeline-model-parallel-layout": str,
    "--expert-model-parallel-size": int,
    "--moe-token-dispatcher-type": str,
    "--num-virtual-stages-per-pipeline-rank": int,
    "--num-distributed-optimizer-instances": int,
    "--data-parallel-sharding-strategy": str,
    "--ckpt-format": str,
    "--micro-batch-size": int,
    "--global-batch-size": int,
    "--recompute-granularity": str,
    "--recompute-method": str,
    "--recompute-num-layers": int,
    "--seq-length": int,
    "--max-position-embeddings": int,
    "--clip-grad": float,
} | dict.fromkeys(
    (
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--use-megatron-fsdp",
        "--no-gradient-accumulation-fusion",
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
        "--accumulate-allreduce-grads-in-fp32",
        "--bf16",
        "--fp16",
    ),
    bool,
)
"""Flags of Megatron-LM's `megatron/training/arguments.py` that are written, and the type that it reads; a switch takes no value."""


def _layouts() -> st.SearchStrategy[Layout]:
    degree = st.sampled_from([1, 1, 2, 4])
    words = st.fixed_dictionaries(
        {
            "dp_replicate": degree,
            "dp_shard": degree,
            "tp": degree,
            "cp": degree,
            "pp": degree,
            "ep": degree,
            "virtual_stages": st.sampled_from([1, 2]),
            "schedule": st.sampled_from([*SCHEDULES]),
            "zero": st.sampled_from([0, 1, 2, 3]),
            "microbatch": st.sampled_from([None, 1, 3]),
            "recompute": st.sampled_from(["none", "selective", "alternate", "full", "offload"]),
            "offload": st.booleans(),
            "sequence_parallel": st.booleans(),
            "accumulate": st.sampled_from(["sharded", "full"]),
            "loss_chunk": st.sampled_from([None, 64]),
        }
    )
    return words.filter(lambda one: one["zero"] > 0 or one["dp_shard"] == 1).map(lambda one: Layout(**one))


def _recipe(name: str, layout: Layout, batch: int = 512, *more: str) -> Recipe:
    given_settings = ["model.source=preset:llama3-8b", f"train.global_batch={batch}", "numerics.precision=bf16", *more]
    job = jobs.default(given_settings)
    return recipes.emit(name, job, layout, catalog.model_spec(job), resolve_hardware("h100x8"))


@settings(max_examples=40)
@given(st.sampled_from(_NAMES), _layouts())
def test_every_layout_is_written_in_every_framework(name: str, layout: Layout) -> None:
    """A file comes out, and it says the layout's ranks or refuses one of its words."""
    found = _recipe(name, layout)
    assert found.text
    assert str(layout) in found.text or not found.has_comments
    assert all("has no word here" not in line or "reduce=" in line for line in found.lacks)


@pytest.mark.parametrize("name", _NAMES)
def test_a_word_of_which_a_framework_says_nothing_is_one_that_it_lacks(name: str) -> None:
    """A word that is added to layouts cannot be passed over: without an answer it is listed as missing."""
    job = jobs.default(["model.source=preset:llama3-8b", "numerics.precision=bf16", "train.global_batch=64"])
    silent = replace(recipes.FRAMEWORKS[name], words=lambda facts: {}, write=lambda facts, settings: "")
    layout = Layout("dp_replicate=2 dp_shard=2 zero=3 tp=2 microbatch=1 recompute=full")
    found = recipe_of(silent, job, layout, catalog.model_spec(job), resolve_hardware("h100x8"))
    given_words = [one.name for one in fields(Layout) if getattr(layout, one.name) != getattr(Layout(), one.name)]
    for word in given_words:
        assert any(line.startswith(f"{word}=") for line in found.lacks), word


@settings(max_examples=25)
@given(_layouts(), st.integers(1, 200))
def test_deepspeed_batch_sizes_multiply(layout: Layout, batch: int) -> None:
    """DeepSpeed refuses a configuration whose batch sizes do not multiply; ours do, or the recipe says that they cannot."""
    found = _recipe("deepspeed", layout, batch)
    table = json.loads(found.text)
    steps, size = table["gradient_accumulation_steps"], table["train_micro_batch_size_per_gpu"]
    is_whole = steps * size * layout.dp == table["train_batch_size"] == batch
    assert is_whole or any("micro-batches" in line for line in found.lacks)


@settings(max_examples=25)
@given(_layouts())
def test_megatron_reads_every_flag(layout: Layout) -> None:
    """Each flag is one of Megatron's own, with a value of the type that it reads, and no flag is given twice."""
    body = _recipe("megatron", layout).text.split("pretrain_gpt.py", 1)[1].replace("\\\n", " ").split()
    words = [word for word in body if word.startswith("--")]
    assert len(words) == len(set(words))
    for word, value in zip(body, [*body[1:], ""], strict=True):
        if word.startswith("--"):
            kind = _MEGATRON[word]
            assert (value.startswith(("--", '"$'))) if kind is bool else kind(value) is not None


def _option(recipe: Recipe, name: str) -> str:
    """Return the value of a flag; empty if it is not given."""
    found = re.search(rf"{re.escape(name)} (\S+)", recipe.text)
    return found[1].strip("'") if found else ""


@settings(max_examples=15)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 3]), st.integers(24, 41))
def test_stages_in_the_words_of_megatron_hold_the_blocks_of_the_prediction(pp: int, virtual: int, blocks: int) -> None:
    """Megatron divides layers evenly or stops: where our stages are uneven, they are written out, and none is lost."""
    schedule = "interleaved" if virtual > 1 else "1f1b"
    layout = Layout(pp=pp, virtual_stages=virtual, schedule=schedule, microbatch=1)
    config = f"model.config.layers={blocks}"
    model = catalog.model_spec(jobs.default(["model.source=preset:llama3-8b", config]))
    chunks = pipeline.chunks_of(model, pp * virtual)
    found = _recipe("megatron", layout, 512, config)
    if not (written := _option(found, "--pipeline-model-parallel-layout")):
        assert blocks % (pp * virtual) == 0
        assert _option(found, "--num-virtual-stages-per-pipeline-rank") == (str(virtual) if virtual > 1 else "")
        return
    assert "--num-virtual-stages-per-pipeline-rank" not in found.text  # Megatron takes one of the two
    long = re.sub(r"t\*(\d+)", lambda times: "t" * int(times[1]), written.replace(",", ""))
    stages = long.split("|")
    assert [one.count("t") for one in stages] == [sum(model.layers[i].is_block for i in one) for one in chunks]
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    assert sum(one.count("t") for one in stages) == blocks


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("layout", ["dp=8", "dp=8 zero=3", "dp=8 zero=1"])
def test_a_precision_is_written_or_refused(name: str, layout: str) -> None:
    """No framework trains in its own default precision without a word: the file, a part in code, or a refusal names it."""
    plain = _recipe(name, Layout(layout), 512, "numerics.precision=float32")
    for precision in ("float64", "bf16", "fp16"):
        found = _recipe(name, Layout(layout), 512, f"numerics.precision={precision}")
        said = {*found.in_code, *found.lacks, *found.differs}
        assert found.text != plain.text or said != {*plain.in_code, *plain.lacks, *plain.differs}, precision
        assert precision != "float64" or not found.is_whole


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("layout", ["dp=8", "dp=8 zero=3", "dp=8 zero=1"])
def test_a_clipping_is_written_and_so_is_none(name: str, layout: str) -> None:
    """Megatron and torchtitan clip to 1 where nothing is said, so that a job without clipping says so."""
    clipped = _recipe(name, Layout(layout), 512, "optimizer.clip_norm=0.375")
    assert "0.375" in clipped.text + " ".join(clipped.in_code)
    job = Job(model={"source": "preset:llama3-8b"}, train={"global_batch": 512}, numerics={"precision": "bf16"})
    free = recipes.emit(name, job, Layout(layout), catalog.model_spec(job), resolve_hardware("h100x8"))
    assert job.optimizer.clip_norm is None
    assert _option(free, "--clip-grad") == ("0.0" if name == "megatron" else "")
    assert _option(free, "--training.max_norm") == ("inf" if name == "torchtitan" else "")
    assert "clip" not in " ".join([free.text, *free.in_code]).replace("--clip-grad 0.0", "")


@pytest.mark.parametrize("name", _NAMES)
def test_what_no_file_says_of_a_job_is_named(name: str) -> None:
    """States in 8 bits and adapters change bytes and seconds, and no file has them."""
    found = _recipe(name, Layout("dp=8 zero=1"), 512, "numerics.optimizer_states=8bit")
    assert any("optimizer_states" in line for line in found.differs)
    found = _recipe(name, Layout("dp=8 zero=1"), 512, 'model.lora={targets=["q_proj"]}')
    assert any("adapters" in line for line in found.differs)
    assert not any("numerics" in line for line in found.differs)


@pytest.mark.parametrize(
    ("name", "model", "layout", "given_settings", "text"),
    [
        ("megatron", "mixtral-8x7b", "dp=8 ep=8 microbatch=1", ["numerics.precision=fp16"], "in fp16"),
        ("megatron", "llama3-8b", "dp=2 pp=4 schedule=interleaved virtual_stages=2 microbatch=1", ["train.global_batch=18"], "9 micro-batches"),
        ("torchtitan", "llama3-8b", "dp=2 pp=4 schedule=interleaved virtual_stages=2 microbatch=1 zero=3", ["train.global_batch=18"], "9 micro-batches"),
        ("torchtitan", "mixtral-8x7b", "dp=8 cp=2 ep=1 microbatch=1", [], "weights are sharded over the ranks of cp"),
        ("torchtitan", "mixtral-8x7b", "dp=4 cp=4 ep=2 zero=3 microbatch=1", [], "ep is a multiple of cp"),
        ("torchtitan", "llama3-8b", "dp=1 tp=4 sequence_parallel microbatch=1", [], "computes in float32"),
        ("torchtitan", "llama3-8b", "dp=8 zero=3", ["numerics.precision=fp16"], "scales no losses"),
        ("torchtitan", "llama3-8b", "dp=1 cp=8 zero=3", ["data.sequence_length=8200"], "a multiple of 16"),
        ("deepspeed", "mixtral-8x7b", "dp=8 ep=8 zero=3", [], "stages 0 to 2"),
        ("accelerate", "llama3-8b", "dp=4 cp=2", [], "weights are sharded over the ranks of cp"),
    ],
)  # fmt: skip
def test_what_the_parser_of_a_framework_would_refuse_is_said(
    name: str, model: str, layout: str, given_settings: list[str], text: str
) -> None:
    found = _recipe(name, Layout(layout), 512, f"model.source=preset:{model}", *given_settings)
    assert any(text in line for line in found.lacks), found.lacks


@pytest.mark.parametrize("cp", [16, 64])
def test_hybrid_context_parallelism_says_the_sizes_of_its_groups(cp: int) -> None:
    """Megatron stops without them, and where they do not multiply to `cp`."""
    found = _recipe("megatron", Layout(cp=cp, exchange="hybrid", zero=2), 512, "data.sequence_length=524288")
    sizes = re.search(r"--hierarchical-context-parallel-sizes (\d+) (\d+)", found.text)
    assert sizes
    assert int(sizes[1]) * int(sizes[2]) == cp


@settings(max_examples=15)
@given(st.sampled_from([2, 4, 8]), st.integers(24, 41))
def test_stages_in_the_words_of_torchtitan_are_compared(pp: int, blocks: int) -> None:
    """torchtitan counts embedding and head as a block each; where its stages are others than ours, both are said."""
    found = _recipe("torchtitan", Layout(pp=pp, dp_shard=2, zero=3, microbatch=1), 512, f"model.config.layers={blocks}")
    line = next((one for one in found.differs if one.startswith("stages have")), "")
    for part in (
        line.removeprefix("stages have ").removesuffix(" in the prediction").split(" blocks, and ") if line else ()
    ):
        runs = [word.split(" x ") for word in part.split(", ")]
        assert sum(math.prod(map(int, run)) for run in runs) == blocks
        assert sum(int(run[0]) if len(run) > 1 else 1 for run in runs) == pp


@pytest.mark.parametrize("name", _NAMES)
def test_plain_data_parallelism_needs_no_excuse(name: str) -> None:
    """Every framework can do data parallelism, and all but DDP-only words of ZeRO-3 too."""
    for words in ("dp=8", "dp=8 zero=3", "dp=8 zero=3 microbatch=4 recompute=full"):
        assert _recipe(name, Layout(words)).is_whole, words


def test_the_schedules_of_torchtitan_are_torchs_own() -> None:
    """torchtitan finds the class of a schedule by torch's own function."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    for schedule in ("gpipe", "interleaved"):
        text = _recipe(
            "torchtitan", Layout(pp=2, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
        ).text
        assert get_schedule_class(text.split("pipeline_parallel_schedule ")[1].split()[0])


def test_accelerate_reads_its_file(tmp_path: Any) -> None:
    """Accelerate's own reader takes each file, and has the values that were written."""
    config_args = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate comes with the benchmarks alone"
    )
    for words in (
        "dp=8",
        "dp=8 zero=1",
        "dp=4 zero=2",
        "dp_replicate=2 dp_shard=4 zero=3 recompute=full",
        "dp=4 zero=3 tp=2",
        "cp=2 dp=4 zero=3",
    ):
        layout = Layout(words)
        path = tmp_path / "accelerate.yaml"
        path.write_text(_recipe("accelerate", layout).text)
        read = config_args.load_config_from_file(str(path))
        assert read.num_processes == layout.world_size
        assert read.mixed_precision == "bf16"
        if layout.zero == 3:
            assert read.parallelism_config["parallelism_config_dp_shard_size"] == layout.dp_shard


def test_the_command_line_writes_a_file_and_says_what_it_lacks(tmp_path: Any, capsys: Any) -> None:
    """`--to-file` writes a file that can be read, and the notes are printed; an unknown name is refused with what works."""
    from samestep.cli import main

    path = tmp_path / "ds.json"
    about = ["simulate", "--set", "model.source=preset:llama3-8b", "--hardware", "h100x8"]
    assert main([*about, "--layout", "dp=4 zero=3 tp=2", "--to", "deepspeed", "--to-file", str(path)]) == 0
    assert json.loads(path.read_text())["tensor_parallel"] == {"autotp_size": 2}
    assert "cannot: tp with zero=3" in capsys.readouterr().out
    assert main([*about, "--layout", "dp=8", "--to", "megatro"]) == 2
    assert "did you mean 'megatron'" in capsys.readouterr().err
    assert main([*about, "--layout", "dp=8", "--to-file", str(path)]) == 2
    assert "--to FRAMEWORK" in capsys.readouterr().err
