"""Words of other frameworks lead to the option of a layout, the key of a job or the flag that is the same thing here."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import Job, Layout, arguments, cli, errors
from samestep import job_files as jobs
from samestep.errors import InputError, JobError, LayoutError, word_of_others

KEYS = {setting.partition("=")[0] for setting in jobs.settings()}
FLAGS = arguments.verbs_of(cli._parser())["train"][1]._option_string_actions


@given(st.data())
@pytest.mark.parametrize("pattern", errors._WORDS_OF_OTHERS)
def test_each_word_leads_to_what_is_there(pattern: str, data: st.DataObject) -> None:
    word = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii")))
    assert _is_there(word_of_others(word)), word


def _is_there(name: str) -> bool:
    if not errors.is_layout(name):
        return name in (FLAGS if name.startswith("--") else KEYS)
    options = re.split(r", or |, | or ", name.replace("N", "2").replace(" for Ulysses and rings", ""))
    return all(Layout(option) for option in options if "samples" not in option)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("fsdp", "dp=N zero=3"), ("fsdp2", "dp=N zero=3"), ("FULL_SHARD", "dp=N zero=3"), ("deepspeed", "dp=N zero=3"),
        ("DDP", "dp=N"), ("world_size", "dp=N"), ("num_processes", "dp=N"), ("nproc-per-node", "dp=N"), ("gpus", "dp=N"),
        ("hsdp", "dp_replicate=N dp_shard=N zero=3"), ("dp_shard_size", "dp_shard=N"), ("data_parallel_replicate_degree", "dp_replicate=N"),
        ("tensor_parallel", "tp=N"), ("tensor_model_parallel_size", "tp=N"), ("tp_size", "tp=N"), ("pipeline_parallel_degree", "pp=N"),
        ("context_parallel", "cp=N"), ("expert_model_parallel_size", "ep=N"), ("data_parallel", "dp=N"),
        ("sp", "tp=N sequence_parallel"), ("ulysses", "cp=N cp_method=ulysses"), ("ring_attention", "cp=N cp_method=ring"),
        ("cp_comm_type", "cp_method=ulysses"), ("zero3", "zero=3"), ("zero_stage", "zero=1"), ("micro_batch", "microbatch=N"),
        ("per_device_train_batch_size", "microbatch=N"), ("gradient_accumulation_steps", "microbatch=N, the samples"),
        ("accumulation", "microbatch=N, the samples"), ("num_microbatches", "microbatch=N, the samples"), ("gas", "microbatch=N, the samples"),
        ("gradient-checkpointing", "recompute=full"), ("cpu_offload", "offload"), ("vpp", "schedule=interleaved virtual_stages=N"),
        ("bf16", "numerics.precision"), ("fp16", "numerics.precision"), ("mixed_precision", "numerics.precision"), ("amp", "numerics.precision"),
        ("batch_size", "train.global_batch"), ("learning_rate", "optimizer.lr"), ("max_steps", "train.steps"), ("num_train_epochs", "train.steps"),
        ("epochs", "train.steps"), ("max_grad_norm", "optimizer.clip_norm"), ("gradient_clip_val", "optimizer.clip_norm"),
        ("warmup_ratio", "schedule.warmup_steps"), ("lr_scheduler_type", "schedule.name"), ("optim", "optimizer.name"),
        ("model_name_or_path", "model.source"), ("dataset", "data.source"), ("max_seq_length", "data.sequence_length"),
        ("save_steps", "checkpoint.every"), ("report_to", "run.report"), ("dataloader_num_workers", "run.data_workers"),
        ("output_dir", "--out"), ("resume_from_checkpoint", "--resume"), ("master_addr", "--rendezvous"), ("num_nodes", "--nodes"),
    ],
)  # fmt: skip
def test_a_word_is_answered_in_a_layout_in_a_job_and_as_a_flag(word: str, name: str) -> None:
    is_layout = errors.is_layout(name)
    with pytest.raises(LayoutError, match=f"use {name}"):
        Layout(f"{word}=2")
    with pytest.raises(JobError, match=f"use {'the layout ' * is_layout}{name}"):
        Job(train={word: 2})  # type: ignore[typeddict-unknown-key]
    flag = f'--layout "{name}' if is_layout else f"--set {name}=VALUE" if "." in name else name
    with pytest.raises(InputError, match=f"unknown argument --{word}: use {flag}"):
        cli._parser().parse_args(["train", f"--{word}=2"])


@pytest.mark.parametrize(
    ("key", "its_table"), [("lr", "optimizer"), ("precision", "numerics"), ("global_batch", "train")]
)
def test_a_key_of_another_table_is_named(key: str, its_table: str) -> None:
    for tables in ({key: 1}, {"data": {key: 1}}, {"checkpoint": {key: 1}}):
        with pytest.raises(JobError, match=f"unknown key: use {its_table}.{key};"):
            Job(**tables)


@pytest.mark.parametrize("option", ["tp", "zero", "microbatch"])
def test_an_option_of_a_layout_is_no_flag(option: str) -> None:
    with pytest.raises(InputError, match=f'--{option}: use --layout "{option}=N"'):
        cli._parser().parse_args(["verify", f"--{option}", "2"])


@pytest.mark.parametrize("option", ["tp=2", "zero=3", "ddp=2"])
def test_a_layout_without_quotes_is_told_to_have_some(option: str) -> None:
    with pytest.raises(InputError, match='use quotes, as in --layout "dp=2 '):
        cli._parser().parse_args(["train", "job.toml", "--layout", "dp=2", option])


def test_a_number_of_micro_batches_is_no_kind_of_accumulation() -> None:
    with pytest.raises(LayoutError, match="sharded, full: use microbatch=N"):
        Layout("accumulate=4")
