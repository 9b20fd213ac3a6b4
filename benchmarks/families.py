"""Every causal family of transformers, and some by another task, tiny, proven in each layout as `samestep verify` proves a job in float64.

    python benchmarks/families.py [NAME ...] [--layout TEXT] [--rows FILE] [--again]     or    make families [FAMILY=NAME]
    python benchmarks/families.py [NAME ...] --specs FILE     write what is found out of each, to compare two states of the code

A family is built from a configuration whose sizes are small, with random weights; it is traced once, and run once on one
device. A process for each family is forked from this one, which has imported everything, and its workers take the steps
of each layout; the two sides are compared to 1e-9. Each (family, layout) is one line of the file of rows, which a second
call continues:

    proven      the layout computes what one device computes
    refused     an InputError, before the first step or by name
    different   the proof found a difference; a false alarm, or worse
    failed      another error than a refusal
    absent      the family has nothing that the layout distributes
    unbuilt     transformers does not build the family from small sizes, or not without a configuration of its own

A column beside the layouts, `folder`, is whether a folder that transformers has saved of the family, and that a run reads and
writes, is the same to the bit (`family_folders.py`).

The rows are then kept in `benchmarks/rows/families.json`, from which `docs/tables.py` writes the tables of `docs/families.md` and `docs/reference/families.md`. Exits 1 if a
row is `different` or `failed`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import pprint
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a fork with a used pool of threads hangs

import family_folders
import family_table
import family_tasks
import torch
from family_table import COLUMNS, FOLDER, OUTCOMES
from torch import Tensor, nn

import samestep
from samestep.building.families import family_source
from samestep.building.loss import cross_entropy
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import InputError
from samestep.examination.examine import Source, examine, with_new_blueprint
from samestep.job import Job
from samestep.job_tables import Task
from samestep.layout import Layout
from samestep.output.text import align_columns
from samestep.proof import sides
from samestep.proof.sides import Subject
from samestep.runtime.assembly import store_of
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.workers import run_workers

ROWS = Path(__file__).parent / "results" / "families.jsonl"
LARGEST = 3_000_000
"""The most weights of a tiny model: more are those of a part whose sizes were not found."""
LIMIT_S = 120.0
"""Seconds that a collective of a layout may take."""
FAMILY_S = 900.0
"""Seconds that a family may take."""
SMALL: Mapping[str, Any] = {
    "vocab_size": 64, "max_position_embeddings": 32, "n_positions": 32, "n_ctx": 32, "max_seq_len": 32,
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "word_embed_proj_dim": 16, "embedding_size": 16,
    "intermediate_size": 40, "ffn_dim": 40, "n_inner": 40, "ffn_hidden_size": 40, "feed_forward_proj_dim": 40,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "global_head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "moe_k": 2,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_layer_start_index": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "rotary_dim": 4, "sliding_window": 8, "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "time_step_rank": 4,
    "mamba_dt_rank": 4, "conv_kernel": 3, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
    "emb_dim": 16, "expert_ffn_hidden_size": 8, "zero_expert_num": 1, "laurel_rank": 4, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "pronunciation_vocab_size": 64,
    "pronunciation_embed_dim": 8, "shape_vocab_size": 64, "shape_embed_dim": 8, "hidden_size_global": 16,
    "moe_topk": 2, "encoder_hash_byte_group_vocab": 64,
    "linear_num_heads": 4, "linear_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
"""Small values of the fields of configurations; a family has some of them."""
OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "n_mamba_heads": 4,
        "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8},
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4}, "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8}, "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2}, "zaya": {"num_experts_per_tok": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [40, 40],
    },
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2,
        "attention_hidden_size": 32, "attention_head_dim": 8,
    },
    "reformer": {
        "axial_pos_embds_dim": [8, 8], "axial_pos_shape": [4, 4], "is_decoder": True, "attn_layers": ["local", "lsh"],
        "attention_head_size": 8, "feed_forward_size": 40, "num_buckets": 2, "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "bamba": {"attn_layer_indices": [1]}, "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {"n_groups": 1}, "olmo_hybrid": {"linear_num_key_heads": 4},
    "big_bird": {"attention_type": "original_full"},  # it turns to this one for sequences as short as ours
    "helium": {"head_dim": 4},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
}  # fmt: skip
"""What a family needs beside small sizes."""


@dataclass(frozen=True)
class Row:
    """What a layout makes of a family."""

    family: str
    layout: str
    outcome: str
    text: str = ""
    seconds: float = 0.0
    code: str = ""
    """The state of samestep's code that found it: `code_state`."""


class Tokens:
    """Random tokens whose samples count different numbers of labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(3, 64, (16, 17), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index, 1:].clone()
        labels[4 + index % 12 :] = -100
        return {"input_ids": self.ids[index, :-1], "labels": labels}


def fields_of(family: str) -> dict[str, Any]:
    """Return small values of the fields that a family's configuration has."""
    transformers = importlib.import_module("transformers")
    return {**_small(transformers.AutoConfig.for_model(family)), **OF_FAMILY.get(family, {})}


def _small(config: Any) -> dict[str, Any]:
    """Return small values of a configuration's own fields, and of those of the configurations in it."""
    kind = type(config)
    declared = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    own = {field.name for field in declared} or set(inspect.signature(kind.__init__).parameters)
    fields = {name: value for name, value in SMALL.items() if name in own and _value(config, name) is not None}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]  # a latent attention has no groups
    parts = {name: _value(config, name) for name in own}
    return fields | {name: _small(part) for name, part in parts.items() if hasattr(part, "model_type")}


def _value(config: Any, name: str) -> Any:
    """Return a field of a configuration, None where it has none or one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # of a class of transformers' own
        return None


def shifted(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Norm weights of ones and biases of zeros hide errors: shift them all."""

    def built() -> nn.Module:
        model = build()
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() <= 1:
                    param.add_(0.1 * torch.randn(param.shape, dtype=param.dtype))
        return model

    return built


def _job() -> Job:
    return Job(
        train={"global_batch": 8, "steps": 2, "seed": 3, "watch_every": 0},
        numerics={"precision": "float64"},
        optimizer={"name": "adamw", "clip_norm": 0.5},
        run={"device": "cpu", "timeout_s": LIMIT_S},
    )


def _write_analysis(family: str, specs: Path) -> None:
    """Write one line: the family and the digest and text of all that its examination finds, or why there is nothing."""
    job, of_task = _job(), family_tasks.FAMILIES.get(family)
    data = Tokens() if of_task is None else family_tasks.Samples(of_task.sample)
    task: Task = "causal" if of_task is None else of_task.task
    try:
        name = family if of_task is None else of_task.family
        build = family_source(name, {**fields_of(name), **(of_task.fields if of_task else {})}, task)
        source = Source(shifted(build), cross_entropy, optimizer_of(job), family)
        found = pprint.pformat(examine(source, job, next(batches(data, job)).samples([0])).analysis, width=120)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with specs.open("a", encoding="utf-8") as file:
        file.write(f"{family} {hashlib.sha256(found.encode()).hexdigest()[:16]} {json.dumps(found)}\n")


def rows_of(family: str, layouts: Sequence[str], folder: Path) -> Iterator[Row]:
    """Trace a family, run it on one device, and prove each layout."""
    began = time.perf_counter()
    job = _job()
    of_task = family_tasks.FAMILIES.get(family)
    data = Tokens() if of_task is None else family_tasks.Samples(of_task.sample)
    example = next(batches(data, job)).samples([0])
    task: Task = "causal" if of_task is None else of_task.task
    try:
        name = family if of_task is None else of_task.family
        build = family_source(name, {**fields_of(name), **(of_task.fields if of_task else {})}, task)
    except Exception as error:
        yield from (Row(family, layout, "unbuilt", _line(error)) for layout in layouts)
        return
    if FOLDER in layouts:
        yield _tried(family, FOLDER, lambda: family_folders.difference(shifted(build), data, folder, task))
        layouts = [layout for layout in layouts if layout != FOLDER]
    if not layouts:
        return
    source = Source(shifted(build), cross_entropy, optimizer_of(job), family)
    try:
        traced = examine(source, job, example)
    except InputError as error:
        reason = _reason_without_us(build, example)
        kind = "unbuilt" if reason else "refused"
        yield from (Row(family, layout, kind, reason or str(error), time.perf_counter() - began) for layout in layouts)
        return
    except Exception as error:
        kind = "unbuilt" if _in_transformers(error) else "failed"
        yield from (Row(family, layout, kind, _line(error)) for layout in layouts)
        return
    if sum(param.numel for param in traced.spec.params) > LARGEST:
        yield from (Row(family, layout, "unbuilt", "its sizes are not all small") for layout in layouts)
        return
    subject = Subject(replace(source, prepared=traced), data, example, job, Layout(), folder)
    has_experts = any(layer.dispatches for layer in traced.spec.layers)
    one: Row | None = None
    for layout in layouts:
        if "ep=" in layout and not has_experts:
            yield Row(family, layout, "absent", "it has no experts")
            continue
        if one is None:
            one = _tried(family, "one device", lambda: sides.one_device(_alone(), _anew(subject)))
            if one.outcome == "failed" and (reason := _reason_without_us(build, example)):
                one = replace(one, outcome="unbuilt", text=reason)
        if one.outcome != "proven":
            yield replace(one, layout=layout)
        else:
            yield _tried(family, layout, functools.partial(_prove, subject, Layout(layout)))


def _reason_without_us(build: Callable[[], nn.Module], example: Any) -> str:
    """Return why the model does not train in plain torch either; nothing if it does."""
    try:
        build()(**{name: value for name, value in example.items() if name != "labels"}).logits.sum().backward()
    except Exception as error:
        return _line(error)
    return ""


def _prove(subject: Subject, layout: Layout) -> str:
    """Prove a layout against the observation of one device; return what differs, nothing if nothing does."""
    traced = examine(subject.source, subject.job, subject.example, layout)
    laid = replace(subject, layout=layout, source=replace(subject.source, prepared=traced))
    laid.programs()  # refuses a layout that the model rules out
    store_of(layout)
    for left in laid.folder.glob("*rank-*"):
        left.unlink()
    run_workers(sides.in_layout, (_anew(laid),), ranks=layout.world_size, device="cpu", timeout_s=LIMIT_S, quiet=True)
    _, cause, explanation = sides.judge(_alone(), _anew(laid))
    return f"{cause}: {explanation}" if cause else ""


def _anew(subject: Subject) -> Subject:
    """Return the subject with a model of its own, which one run cuts and fills."""
    return replace(subject, source=replace(subject.source, prepared=with_new_blueprint(subject.source, subject.job)))


def _alone() -> RankInfo:
    return RankInfo(0, 0, 1, 1, torch.device("cpu"))


def _tried(family: str, layout: str, prove: Callable[[], str | None]) -> Row:
    began = time.perf_counter()
    try:
        found = prove()
        kind, text = ("different", found) if found else ("proven", "")
    except InputError as error:
        kind, text = "refused", f"{error} [{error.code}]"
    except family_folders.NotStoredError as error:
        kind, text = "unbuilt", str(error)
    except Exception as error:
        kind, text = "failed", _line(error)
    return Row(family, layout, kind, text, time.perf_counter() - began)


def _line(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(place.filename).name}:{place.lineno})"


def _in_transformers(error: Exception) -> bool:
    """Return whether a model could not be made, by code of transformers that ours called only to build it."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "built" for frame in frames)


def families() -> list[str]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return [*sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *family_tasks.FAMILIES]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="only these")
    parser.add_argument("--layout", action="append", choices=COLUMNS, help="only this column; may be given again")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows, which is continued")
    parser.add_argument("--again", action="store_true", help="prove the chosen families anew")
    parser.add_argument(
        "--specs", type=Path, help="write what is found out of each family to this file, and prove nothing"
    )
    chosen = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if chosen.specs:
        for family in chosen.family or families():
            process = multiprocessing.get_context("fork").Process(target=_write_analysis, args=(family, chosen.specs))
            process.start()
            process.join(FAMILY_S)
            process.kill()
        return 0
    chosen.rows.parent.mkdir(parents=True, exist_ok=True)
    known = {} if chosen.again else read(chosen.rows)
    for family in chosen.family or families():
        layouts = [one for one in chosen.layout or COLUMNS if (family, one) not in known]
        if layouts:
            _in_a_process(family, layouts, chosen.rows)
    rows = read(chosen.rows)
    shown = [row for row in rows.values() if not chosen.family or row.family in chosen.family]
    print(summary(shown))
    if chosen.rows == ROWS:
        family_table.keep(
            {**family_table.kept(), **{key: (row.outcome, row.text, row.code) for key, row in rows.items()}}
        )
    return int(any(row.outcome in ("different", "failed") for row in shown))


def _in_a_process(family: str, layouts: Sequence[str], rows: Path) -> None:
    """Prove a family in a process of its own, whose end, whatever the cause, ends no other family's proofs."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_write_rows, args=(family, layouts, rows), name=family)
    process.start()
    process.join(FAMILY_S)
    if process.exitcode != 0:
        why = f"it took more than {FAMILY_S:.0f} s" if process.is_alive() else f"it ended with {process.exitcode}"
        process.kill()
        process.join()
        known = read(rows)
        for layout in layouts:
            if (family, layout) not in known:
                _write(Row(family, layout, "failed", why), rows)


def _write_rows(family: str, layouts: Sequence[str], rows: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="samestep-families-"))
    try:
        for row in rows_of(family, layouts, folder):
            _write(row, rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def code_state() -> str:
    """Return a short digest of samestep's source files, which says of two rows whether the same code found them."""
    folder = Path(samestep.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _write(row: Row, rows: Path) -> None:
    row = replace(row, code=code_state())
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    print(f"{row.family:24} {row.layout:28} {row.outcome:9} {row.seconds:5.1f} s  {row.text[:110]}", flush=True)


def read(path: Path) -> dict[tuple[str, str], Row]:
    """Return the rows of a file, the last one of each family and layout."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(row.family, row.layout): row for row in rows}


def summary(rows: Sequence[Row]) -> str:
    """Return how many families came to which outcome in each layout."""
    counts = Counter((row.layout, row.outcome) for row in rows)
    lines = [[layout, *(str(counts[layout, kind]) for kind in OUTCOMES)] for layout in COLUMNS]
    return align_columns([["layout", *OUTCOMES], *lines])


if __name__ == "__main__":
    sys.exit(main())
