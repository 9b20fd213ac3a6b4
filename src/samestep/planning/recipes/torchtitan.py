"""Layouts as flags of torchtitan (names as in its 0.2; `parallelism.*` is the same in newer versions).

All data ranks but the replicated ones shard (`fully_shard`), so ZeRO-1 has no word. Micro-batches are gradient accumulation
(`training.global_batch_size`), and under a pipeline those of its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.planning.recipes.recipe import Framework, RecipeFacts, Said, flags
from samestep.program.repeated_products import KEEPS_PRODUCTS

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_PRECISION = {"bf16": "bfloat16", "float32": "float32"}


def _words(facts: RecipeFacts) -> Mapping[str, Said]:
    layout = facts.layout
    offloads = layout.recompute == "offload"
    in_parts = layout.recompute in KEEPS_PRODUCTS
    mode = "selective" if in_parts else "full" if offloads else layout.recompute
    recompute: dict[str, Any] = {"--activation_checkpoint.mode": mode}
    if in_parts:
        recompute["--activation_checkpoint.selective_ac_option"] = "op"
    return {
        "dp_replicate": _replicas(facts),
        "dp_shard": Said({"--parallelism.data_parallel_shard_degree": layout.dp_shard}),
        "zero": _zero(facts),
        "tp": Said(
            {"--parallelism.tensor_parallel_degree": layout.tp},
            lacks=""
            if layout.sequence_parallel
            else "tp without sequence_parallel: the sequence is always cut between the cut products",
        ),
        "sequence_parallel": Said(),
        "cp": Said(
            {"--parallelism.context_parallel_degree": layout.cp},
            differs="context parallelism gathers keys and values, where samestep exchanges heads or passes keys and values around a "
            "ring: other bytes, other memory",
        ),
        "exchange": Said(),
        "pp": _pipeline(facts),
        "ep": Said({"--parallelism.expert_parallel_degree": layout.ep}),
        "schedule": _schedule(facts),
        "virtual_stages": Said(),
        "microbatch": _batch(facts),
        "recompute": Said(
            recompute,
            lacks="recompute=offload: inputs of blocks stay on the device; full works" if offloads else "",
            differs="every second product is kept, as with recompute=alternate"
            if layout.recompute == "selective"
            else "",
        ),
        "loss_chunk": Said(lacks="loss_chunk: logits of a micro-batch exist whole"),
        "accumulate": Said(lacks="accumulate=full: gradients are reduced in each micro-batch"),
        "offload": Said(
            lacks="offload: training.enable_cpu_offload moves weights and gradients too, which takes longer; it is left out"
        ),
    }


def _replicas(facts: RecipeFacts) -> Said:
    layout = facts.layout
    others = layout.world_size > layout.dp
    lacks = (
        "replicas that shard nothing, with another axis: zero=3 works"
        if layout.dp_replicate > 1 and others and layout.dp_shard == 1
        else ""
    )
    return Said({"--parallelism.data_parallel_replicate_degree": layout.dp_replicate}, lacks=lacks)


def _zero(facts: RecipeFacts) -> Said:
    layout = facts.layout
    if layout.dp_shard == 1:
        return Said()
    settings = {"--parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never"}
    if layout.zero == 3:
        return Said(settings)
    if layout.zero == 2:
        return Said(
            settings, differs="zero=2 holds weights whole; here they are sharded between steps and gathered once a step"
        )
    return Said(
        settings, lacks="zero=1: gradients and weights are sharded as well; this file has what is nearest, zero=2"
    )


def _batch(facts: RecipeFacts) -> Said:
    settings = {"--training.global_batch_size": facts.global_batch}
    if facts.layout.pp == 1:
        return Said({"--training.local_batch_size": facts.microbatch, **settings})
    return Said(
        {
            "--training.local_batch_size": facts.rank_batch,
            **settings,
            "--parallelism.pipeline_parallel_microbatch_size": facts.microbatch,
        }
    )


def _pipeline(facts: RecipeFacts) -> Said:
    layout = facts.layout
    stages = layout.pp * layout.virtual_stages
    num_layers = facts.num_blocks + 2  # the embedding and the head count as one layer each
    per_stage = -(-num_layers // stages)
    settings = {"--parallelism.pipeline_parallel_degree": layout.pp}
    if layout.virtual_stages > 1:
        settings["--parallelism.pipeline_parallel_layers_per_stage"] = per_stage
    lacks = (
        ""
        if -(-num_layers // per_stage) == stages
        else f"{facts.num_blocks} blocks in {stages} equal stages: name the modules of each stage"
    )
    return Said(settings, lacks=lacks if layout.virtual_stages > 1 else "")


def _schedule(facts: RecipeFacts) -> Said:
    schedule = facts.layout.schedule
    if schedule in _SCHEDULES:
        return Said({"--parallelism.pipeline_parallel_schedule": _SCHEDULES[schedule]})
    return Said(
        lacks=f"schedule={schedule} with one stage a rank: InterleavedZeroBubble needs two; this file runs 1F1B"
    )


def _write(facts: RecipeFacts, settings: dict[str, Any]) -> str:
    job = facts.job
    always: dict[str, Any] = {"--training.seq_len": facts.model.length}
    settings.setdefault("--activation_checkpoint.mode", "none")  # where nothing is said, torchtitan recomputes
    if job.numerics.precision in _PRECISION:
        always["--training.mixed_precision_param"] = _PRECISION[job.numerics.precision]
    if job.optimizer.clip_norm is not None:
        always["--training.max_norm"] = job.optimizer.clip_norm
    words = [*flags({**settings, **always}), '"${MODEL_AND_DATA_FLAGS[@]}"']
    return facts.torchrun("-m torchtitan.train", words)


TORCHTITAN = Framework(
    name="torchtitan",
    suffix=".sh",
    comment="#",
    words=_words,
    write=_write,
    differs=(
        "blocks are compiled only with --compile.enable, and the loss of a step is divided by its tokens in newer versions alone",
    ),
)
