"""Layouts as a configuration file of Accelerate, for `accelerate launch --config_file` (names as in Accelerate 1.10 and newer).

Weights that are sharded are those of FSDP2; ZeRO-1 and ZeRO-2, which it has not, are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.program.repeated_products import KEEPS_PRODUCTS
from samestep.wings.plan.recipes.deepspeed import nested
from samestep.wings.plan.recipes.recipe import Framework, RecipeFacts, Said

_PRECISION = {"float32": "no", "bf16": "bf16", "fp16": "fp16"}


def _uses_deepspeed(facts: RecipeFacts) -> bool:
    """Return whether the layout is one of DeepSpeed's: ZeRO-1 or ZeRO-2 over all data ranks and nothing else."""
    layout = facts.layout
    return layout.zero in (1, 2) and layout.dp_shard == layout.world_size


def _uses_fsdp(facts: RecipeFacts) -> bool:
    """Return whether the layout is carried out by FSDP2; else by DDP or DeepSpeed."""
    return not _uses_deepspeed(facts) and (facts.layout.zero > 0 or facts.layout.world_size > facts.layout.dp)


def _words(facts: RecipeFacts) -> Mapping[str, Said]:
    layout = facts.layout
    is_ddp_with_axes = _uses_fsdp(facts) and layout.zero == 0 and layout.dp > 1
    return {
        "dp_replicate": Said(
            {"parallelism_config.parallelism_config_dp_replicate_size": layout.dp_replicate}
            if _uses_fsdp(facts)
            else {},
            lacks="replicas that shard nothing, with another axis. Use zero=3" if is_ddp_with_axes else "",
        ),
        "dp_shard": Said(
            {"parallelism_config.parallelism_config_dp_shard_size": layout.dp_shard} if _uses_fsdp(facts) else {}
        ),
        "zero": _zero(facts),
        "tp": Said({"parallelism_config.parallelism_config_tp_size": layout.tp}),
        "sequence_parallel": Said(lacks="sequence_parallel: activations between sharded matmuls stay full"),
        "cp": Said(
            {"parallelism_config.parallelism_config_cp_size": layout.cp},
            lacks=""
            if layout.zero
            else f"zero=0 with cp={layout.cp}: weights are sharded over the ranks of cp. Use zero=3",
            differs="context parallelism gathers keys and values, where samestep exchanges heads or passes keys and values around a "
            "ring: other bytes, other memory",
        ),
        "exchange": Said(),
        "pp": Said(lacks=f"pp={layout.pp}: Accelerate has pipelines for inference alone"),
        "ep": Said(lacks=f"ep={layout.ep}: Accelerate has no expert parallelism"),
        "schedule": Said(),
        "virtual_stages": Said(),
        "precision": _precision(facts),
        "clip_norm": _clipping(facts),
        "microbatch": _batch(facts),
        "recompute": _recompute(facts),
        "loss_chunk": Said(lacks="loss_chunk: logits of a micro-batch exist whole"),
        "accumulate": Said(lacks="accumulate=full: gradients are reduced in each micro-batch"),
        "offload": Said({"deepspeed_config.offload_optimizer_device": "cpu"})
        if _uses_deepspeed(facts)
        else Said(lacks="offload: FSDP2 would move the weights to CPU memory too; it is left out"),
    }


def _precision(facts: RecipeFacts) -> Said:
    precision = facts.job.numerics.precision
    if precision not in _PRECISION:
        return Said(lacks=f"{precision}: Accelerate computes in float32, bf16 or fp16")
    is_reduced = precision != "float32" and (_uses_deepspeed(facts) or _uses_fsdp(facts))
    return Said(
        {"mixed_precision": _PRECISION[precision]},
        differs=f"gradients are sent in {precision}, and in float32 in the prediction" if is_reduced else "",
    )


def _clipping(facts: RecipeFacts) -> Said:
    norm = facts.job.optimizer.clip_norm
    if norm is None:
        return Said()
    if _uses_deepspeed(facts):
        return Said({"deepspeed_config.gradient_clipping": norm})
    return Said(in_code=f"accelerator.clip_grad_norm_(model.parameters(), {norm}) before each update")


def _zero(facts: RecipeFacts) -> Said:
    layout = facts.layout
    if _uses_deepspeed(facts):
        return Said({"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": layout.zero})
    if not _uses_fsdp(facts):
        return Said({"distributed_type": "MULTI_GPU" if layout.world_size > 1 else "NO"})
    settings = {
        "distributed_type": "FSDP",
        "fsdp_config.fsdp_version": 2,
        "fsdp_config.fsdp_reshard_after_forward": layout.zero == 3,
        "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.fsdp_offload_params": False,
    }
    if layout.zero in (1, 2):
        return Said(
            settings,
            lacks=f"zero={layout.zero} with other axes: weights and gradients are sharded as well, as in zero=3",
        )
    return Said(settings)


def _batch(facts: RecipeFacts) -> Said:
    steps, nodes = facts.num_microbatches, facts.nodes
    settings = {"deepspeed_config.gradient_accumulation_steps": steps} if _uses_deepspeed(facts) else {}
    return Said(
        settings,
        in_code=f"DataLoader(..., batch_size={facts.microbatch}) and Accelerator(gradient_accumulation_steps={steps})"
        + (f"; on node k of {nodes} start with --machine_rank k --main_process_ip HEAD" if nodes > 1 else ""),
    )


def _recompute(facts: RecipeFacts) -> Said:
    if facts.layout.recompute in KEEPS_PRODUCTS:
        return Said(lacks=f"recompute={facts.layout.recompute}: whole blocks are repeated. Use full")
    if facts.layout.recompute == "offload":
        return Said(lacks="recompute=offload: inputs of blocks stay on the device. Use full")
    if _uses_fsdp(facts):
        return Said({"fsdp_config.fsdp_activation_checkpointing": True})
    return Said(in_code="model.gradient_checkpointing_enable()")


def _write(facts: RecipeFacts, settings: dict[str, Any]) -> str:
    tables = nested(
        {
            "compute_environment": "LOCAL_MACHINE",
            "num_machines": facts.nodes,
            "num_processes": facts.layout.world_size,
            "machine_rank": 0,
            "main_training_function": "main",
            **settings,
        }
    )
    return "".join(_yaml(tables))


def _yaml(tables: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return nested tables of words and numbers as lines of YAML."""
    lines = []
    for name, value in tables.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:\n", *_yaml(value, indent + "  ")]
        else:
            text = f"'{value}'" if value == "no" else str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{indent}{name}: {text}\n")
    return lines


ACCELERATE = Framework(
    name="accelerate",
    suffix=".yaml",
    comment="#",
    words=_words,
    write=_write,
    differs=(
        "FSDP2 wraps the classes that the model names (_no_split_modules), not the blocks that samestep found",
        "the loss of each micro-batch is a mean, so micro-batches with fewer tokens weigh more unless your loop divides by num_items_in_batch",
    ),
)
