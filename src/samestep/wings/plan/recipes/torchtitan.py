"""Layouts as flags of torchtitan (names as in its 0.2).

All data ranks but the replicated ones shard (`fully_shard`), so ZeRO-1 has no word. Micro-batches are gradient accumulation
(`training.global_batch_size`), and under a pipeline those of its schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from samestep.program.repeated_products import KEEPS_PRODUCTS
from samestep.wings.plan.recipes.recipe import Framework, RecipeFacts, Said, flags

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_PRECISION = {"bf16": "bfloat16", "float32": "float32"}


def _words(facts: RecipeFacts) -> Mapping[str, Said]:
    layout, clip_norm = facts.layout, facts.job.optimizer.clip_norm
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
            else "tp without sequence_parallel: torchtitan always shards the sequence between sharded matmuls",
        ),
        "sequence_parallel": Said(),
        "cp": Said(
            {"--parallelism.context_parallel_degree": layout.cp},
            lacks=_not_sliced(facts),
            differs="context parallelism gathers keys and values, where samestep exchanges heads or passes keys and values around a "
            "ring: other bytes, other memory",
        ),
        "exchange": Said(),
        "pp": _pipeline(facts),
        "ep": _experts(facts),
        "schedule": _schedule(facts),
        "virtual_stages": Said(),
        "microbatch": _batch(facts),
        "precision": _precision(facts),
        # where nothing is said, it clips to 1
        "clip_norm": Said({"--training.max_norm": "inf" if clip_norm is None else clip_norm}),
        "recompute": Said(
            recompute,
            lacks="recompute=offload: inputs of blocks stay on the device. Use full" if offloads else "",
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


def _not_sliced(facts: RecipeFacts) -> str:
    """Return what torchtitan cannot do of `cp`: other lengths, and weights that all ranks of `cp` hold whole."""
    layout, parts = facts.layout, 2 * facts.layout.cp * facts.layout.tp
    if facts.model.length % parts:
        return f"cp={layout.cp} on {facts.model.length} tokens: its sequences are a multiple of {parts}"
    return (
        f"zero=0 with cp={layout.cp}: weights are sharded over the ranks of cp. Use zero=3" if not layout.zero else ""
    )


def _experts(facts: RecipeFacts) -> Said:
    layout = facts.layout
    settings = {"--parallelism.expert_parallel_degree": layout.ep}
    if layout.tp > 1:
        settings["--parallelism.expert_tensor_parallel_degree"] = layout.tp
    return Said(
        settings,
        lacks=f"ep={layout.ep} with cp={layout.cp}: ep is a multiple of cp here" if layout.ep % layout.cp else "",
        differs="newer versions than 0.2 cut experts by ep alone, with tp among its ranks" if layout.tp > 1 else "",
    )


def _replicas(facts: RecipeFacts) -> Said:
    layout = facts.layout
    others = layout.world_size > layout.dp
    lacks = (
        "replicas that shard nothing, with another axis. Use zero=3"
        if layout.dp_replicate > 1 and others and layout.dp_shard == 1
        else ""
    )
    return Said({"--parallelism.data_parallel_replicate_degree": layout.dp_replicate}, lacks=lacks)


def _zero(facts: RecipeFacts) -> Said:
    layout = facts.layout
    if layout.dp_shard * layout.cp == 1:
        is_mixed = facts.job.numerics.precision != "float32" and layout.world_size > layout.dp
        return Said(
            lacks=f"{facts.job.numerics.precision} with tp or pp, and nothing sharded: torchtitan then computes in float32. Use zero=3"
            if is_mixed
            else ""
        )
    settings = {"--parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never"}
    if layout.zero == 3:
        return Said(settings)
    if layout.zero == 2:
        return Said(
            settings, differs="zero=2 holds weights whole; here they are sharded between steps, one gather per step"
        )
    return Said(
        settings, lacks="zero=1: gradients and weights are sharded as well; this file has the nearest one, zero=2"
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
        },
        differs=f"newer versions than 0.2 take --parallelism.num_pp_microbatches {facts.num_microbatches} in place of the size of one",
    )


def _precision(facts: RecipeFacts) -> Said:
    precision = facts.job.numerics.precision
    if precision in _PRECISION:
        return Said({"--training.mixed_precision_param": _PRECISION[precision]})
    return Said(lacks=f"{precision}: torchtitan computes in bf16 or float32, and scales no losses; this file runs bf16")


def _pipeline(facts: RecipeFacts) -> Said:
    layout = facts.layout
    stages = layout.pp * layout.virtual_stages
    num_layers = facts.num_blocks + 2  # the embedding and the head count as one layer each
    per_stage = -(-num_layers // stages)
    settings = {"--parallelism.pipeline_parallel_degree": layout.pp}
    if layout.virtual_stages > 1:
        settings["--parallelism.pipeline_parallel_layers_per_stage"] = per_stage
    theirs = _chunk_blocks(num_layers, stages)
    is_refused = stages > num_layers or (layout.virtual_stages > 1 and -(-num_layers // per_stage) != stages)
    return Said(
        settings,
        lacks=f"{facts.num_blocks} blocks in {stages} equal stages: name the modules of each stage"
        if is_refused
        else "",
        differs=f"stages have {_listed(theirs)} blocks, and {_listed(facts.chunk_blocks)} in the prediction"
        if theirs != facts.chunk_blocks
        else "",
    )


def _chunk_blocks(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage as torchtitan cuts them: the first ones take the rest of the layers."""
    each, rest = divmod(num_layers, stages)
    blocks = [each + (index < rest) for index in range(stages)]
    blocks[0], blocks[-1] = blocks[0] - 1, blocks[-1] - 1
    return tuple(blocks)


def _listed(blocks: tuple[int, ...]) -> str:
    """Return numbers of blocks as text, with a count for each run of equal ones."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(blocks)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)


def _schedule(facts: RecipeFacts) -> Said:
    schedule, count = facts.layout.schedule, facts.num_microbatches
    if schedule in _SCHEDULES:
        rounds = max(1, count // facts.layout.pp)
        rest = f"schedule=interleaved with {count} micro-batches: torch runs rounds of equally many, of {facts.layout.pp} at least"
        return Said(
            {"--parallelism.pipeline_parallel_schedule": _SCHEDULES[schedule]},
            lacks=rest if schedule == "interleaved" and count % rounds else "",
        )
    needs = " with one stage a rank: InterleavedZeroBubble needs two" if schedule == "zero-bubble" else ""
    return Said(lacks=f"schedule={schedule}{needs}; this file runs 1F1B")


def _write(facts: RecipeFacts, settings: dict[str, Any]) -> str:
    always: dict[str, Any] = {"--training.seq_len": facts.model.length}
    settings.setdefault("--activation_checkpoint.mode", "none")  # where nothing is said, torchtitan recomputes
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
