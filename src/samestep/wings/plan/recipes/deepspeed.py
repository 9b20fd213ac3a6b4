"""Layouts as DeepSpeed's configuration, a JSON file (names as in DeepSpeed 0.18).

Its own words are the ZeRO stage, the micro-batch and the offload; pipelines, experts and Ulysses are built in code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from samestep.program.repeated_products import KEEPS_PRODUCTS
from samestep.strategies.context import exchange_of
from samestep.wings.plan.recipes.recipe import Framework, RecipeFacts, Said


def _words(facts: RecipeFacts) -> Mapping[str, Said]:
    layout, clip_norm = facts.layout, facts.job.optimizer.clip_norm
    return {
        "dp_replicate": _replicas(facts),
        "dp_shard": Said(),
        "zero": Said(
            {"zero_optimization.stage": layout.zero, "zero_optimization.overlap_comm": True} if layout.zero else {}
        ),
        "tp": Said(
            {"tensor_parallel.autotp_size": layout.tp},
            lacks="tp with zero=3. Use AutoTP with ZeRO stages 0 to 2" if layout.zero == 3 else "",
        ),
        "sequence_parallel": Said(lacks="sequence_parallel: AutoTP keeps full activations between its sharded matmuls"),
        "cp": Said(lacks=f"exchange={exchange}: UlyssesSPAttentionHF exchanges heads")
        if (exchange := exchange_of(facts.model, layout)) != "heads"
        else Said(
            in_code=f"UlyssesSPAttentionHF.register_with_transformers(..., sequence_parallel_size={layout.cp}) before the model is built"
        ),
        "exchange": Said(),
        "pp": _pipeline(facts),
        "ep": Said(
            in_code=f"deepspeed.moe.layer.MoE(..., ep_size={layout.ep}) in place of each mixture of experts",
            lacks=f"ep={layout.ep} with zero=3. Use its experts with ZeRO stages 0 to 2" if layout.zero == 3 else "",
        ),
        "schedule": Said(lacks=f"schedule={layout.schedule}: PipelineModule runs 1f1b alone"),
        "virtual_stages": Said(lacks=f"virtual_stages={layout.virtual_stages}: PipelineModule has one stage a rank"),
        "precision": _precision(facts),
        "clip_norm": Said(None if clip_norm is None else {"gradient_clipping": clip_norm}),
        "microbatch": Said(
            {
                "train_batch_size": facts.global_batch,
                "train_micro_batch_size_per_gpu": facts.microbatch,
                "gradient_accumulation_steps": facts.num_microbatches,
            }
        ),
        "recompute": _recompute(facts),
        "loss_chunk": Said(
            in_code="TiledFusedLogitsLoss of deepspeed.runtime.sequence_parallel.ulysses_sp around head and loss"
        ),
        "accumulate": Said(lacks="accumulate=full: ZeRO-2 and ZeRO-3 reduce gradients in each micro-batch"),
        "offload": _offload(facts),
    }


def _precision(facts: RecipeFacts) -> Said:
    """Return the precision, with gradients that are accumulated and sent in float32, as they are here."""
    precision, stage = facts.job.numerics.precision, facts.layout.zero
    if precision == "float32":
        return Said()
    if precision not in ("bf16", "fp16"):
        return Said(lacks=f"{precision}: DeepSpeed computes in float32, bf16 or fp16")
    settings = {f"{precision}.enabled": True, "communication_data_type": "fp32"}
    if stage or precision == "bf16":
        return Said({**settings, "data_types.grad_accum_dtype": "fp32"})
    return Said(settings, differs="fp16 without ZeRO accumulates gradients in fp16")


def _replicas(facts: RecipeFacts) -> Said:
    layout = facts.layout
    if layout.zero == 0 or layout.dp_replicate == 1:
        return Said()
    if layout.zero == 3:
        return Said(
            {"zero_optimization.mics_shard_size": layout.dp_shard},
            in_code="with deepspeed.zero.MiCS_Init(): around the code that builds the model",
        )
    return Said(
        lacks=f"dp_replicate={layout.dp_replicate} with zero={layout.zero}: groups of shards need stage 3 (MiCS); all data ranks shard"
    )


def _pipeline(facts: RecipeFacts) -> Said:
    layout = facts.layout
    lacks = (
        f"zero={layout.zero} with pp={layout.pp}. Use PipelineModule with ZeRO stages 0 and 1"
        if layout.zero > 1
        else ""
    )
    return Said(
        in_code=f"deepspeed.pipe.PipelineModule(layers, num_stages={layout.pp}) and engine.train_batch()", lacks=lacks
    )


def _recompute(facts: RecipeFacts) -> Said:
    if facts.layout.recompute in KEEPS_PRODUCTS:
        return Said(lacks=f"recompute={facts.layout.recompute}: deepspeed.checkpointing repeats whole blocks. Use full")
    if facts.layout.recompute == "offload":
        return Said(
            {"activation_checkpointing.cpu_checkpointing": True},
            in_code="deepspeed.checkpointing.checkpoint around each block",
            differs="cpu_checkpointing waits for each copy to CPU memory; here it is made while the block computes",
        )
    return Said(
        in_code="model.gradient_checkpointing_enable(), or deepspeed.checkpointing.checkpoint around each block"
    )


def _offload(facts: RecipeFacts) -> Said:
    if facts.layout.zero == 0:
        return Said(lacks="offload with zero=0: offload_optimizer needs a ZeRO stage of at least 1")
    return Said(
        {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_optimizer.pin_memory": True}
    )


def _write(facts: RecipeFacts, settings: dict[str, Any]) -> str:
    return json.dumps(nested(settings), indent=2) + "\n"


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose names have points as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


DEEPSPEED = Framework(
    name="deepspeed",
    suffix=".json",
    comment="",
    words=_words,
    write=_write,
    differs=(
        "ZeRO-3 gathers parameters by its own prefetch, not block by block; gradients are divided by the ranks, not by the tokens",
    ),
)
