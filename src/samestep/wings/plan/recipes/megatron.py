"""Layouts as flags of Megatron-LM's `pretrain_gpt.py` (names as in Megatron Core 0.14 and newer).

Its data ranks are those that tensor, context and pipeline parallelism leave over, so their number is no flag. ZeRO-1 is the
distributed optimizer; ZeRO-2 and ZeRO-3 are Megatron-FSDP. Under context parallelism `a2a` exchanges
heads, and `p2p` is a ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.program.repeated_products import KEEPS_PRODUCTS
from samestep.strategies.context import attention_ranks, exchange_of
from samestep.wings.plan.recipes.recipe import Framework, RecipeFacts, Said, flags

_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_PRECISION: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"--bf16": True},
    "fp16": {"--fp16": True, "--accumulate-allreduce-grads-in-fp32": True},  # which is the default with bf16 alone
}


def _words(facts: RecipeFacts) -> Mapping[str, Said]:
    layout, precision = facts.layout, facts.job.numerics.precision
    by_ring, is_hybrid = (exchange_of(facts.model, layout) == exchange for exchange in ("ring", "hybrid"))
    offloads = layout.recompute == "offload"
    in_parts = layout.recompute in KEEPS_PRODUCTS
    granularity = "selective" if in_parts else "full" if offloads else layout.recompute
    recompute: dict[str, Any] = {"--recompute-granularity": granularity}
    if layout.recompute in ("full", "offload"):
        recompute |= {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    return {
        "dp_replicate": _replicas(facts),
        "dp_shard": Said(),
        "zero": _zero(facts),
        "tp": Said({"--tensor-model-parallel-size": layout.tp}),
        "sequence_parallel": Said({"--sequence-parallel": True}),
        "cp": Said(
            {
                "--context-parallel-size": layout.cp,
                "--cp-comm-type": "a2a+p2p" if is_hybrid else "p2p" if by_ring else "a2a",
                **(_hierarchy(facts) if is_hybrid else {}),
            },
            lacks=f"cp={layout.cp} on {facts.model.length} tokens: Megatron's sequences are a multiple of {2 * layout.cp}"
            if facts.model.length % (2 * layout.cp)
            else "",
        ),
        "exchange": Said(),
        "pp": _stages(facts),
        "ep": _experts(facts),
        "schedule": _schedule(facts),
        "virtual_stages": Said(),  # its flags are those of the stages
        "precision": Said(
            _PRECISION.get(precision),
            lacks="" if precision in _PRECISION else f"{precision}: Megatron computes in float32, bf16 or fp16",
        ),
        "clip_norm": Said(
            {"--clip-grad": facts.job.optimizer.clip_norm or 0.0}
        ),  # where nothing is said, it clips to 1
        "microbatch": Said({"--micro-batch-size": facts.microbatch, "--global-batch-size": facts.global_batch}),
        "recompute": Said(
            recompute,
            lacks="recompute=offload: inputs of blocks stay on the device. Use full" if offloads else "",
            differs="selective recompute repeats the core of the attention alone, and keeps all else; here the results of "
            f"{'every second' if layout.recompute == 'alternate' else 'all'} matrix products are kept and all else is repeated"
            if in_parts
            else "",
        ),
        "loss_chunk": Said(
            lacks="loss_chunk: logits of a micro-batch exist whole; --cross-entropy-loss-fusion saves a copy of them"
        ),
        "accumulate": Said(lacks="accumulate=full: Megatron-FSDP reduces gradients in each micro-batch"),
        "offload": _offload(facts),
    }


def _hierarchy(facts: RecipeFacts) -> dict[str, Any]:
    """Return the sizes of the groups that exchange heads, and of the rings between them."""
    ranks = attention_ranks(facts.model, facts.layout, facts.devices_per_node)
    return {"--hierarchical-context-parallel-sizes": [ranks.heads, ranks.ring]}


def _stages(facts: RecipeFacts) -> Said:
    """Return the stages: equal ones by their number, and others by their blocks, since Megatron refuses a rest."""
    layout, blocks = facts.layout, facts.chunk_blocks
    settings: dict[str, Any] = {"--pipeline-model-parallel-size": layout.pp}
    if len(set(blocks)) > 1:
        stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in blocks]
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]},L".removeprefix(",")
        settings["--pipeline-model-parallel-layout"] = "|".join(stages)
    elif layout.virtual_stages > 1:
        settings["--num-virtual-stages-per-pipeline-rank"] = layout.virtual_stages
    return Said(settings)


def _replicas(facts: RecipeFacts) -> Said:
    layout = facts.layout
    if layout.zero == 0 or layout.dp_replicate == 1:
        return Said()
    return Said({"--num-distributed-optimizer-instances": layout.dp_replicate})


def _zero(facts: RecipeFacts) -> Said:
    zero = facts.layout.zero
    if zero == 0:
        return Said({"--overlap-grad-reduce": True} if facts.layout.dp > 1 else {})
    settings: dict[str, Any] = {
        "--use-distributed-optimizer": True,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
    }
    if zero == 1:
        return Said(settings)
    settings |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": _SHARDED[zero]}
    more = {"--no-gradient-accumulation-fusion": True, "--ckpt-format": "fsdp_dtensor"}
    differs = (
        f"zero={zero} with pp={facts.layout.pp}: Megatron-FSDP decides when a stage gathers and reduces its weights"
    )
    return Said(settings | more, differs=differs if facts.layout.pp > 1 else "")


def _experts(facts: RecipeFacts) -> Said:
    layout = facts.layout
    lacks = ""
    if layout.tp > 1 and not layout.sequence_parallel:
        lacks = f"ep={layout.ep} with tp={layout.tp} needs sequence_parallel in Megatron"
    elif facts.job.numerics.precision == "fp16":
        lacks = f"ep={layout.ep} in fp16: Megatron's experts are trained in bf16 or float32"
    return Said({"--expert-model-parallel-size": layout.ep, "--moe-token-dispatcher-type": "alltoall"}, lacks=lacks)


def _schedule(facts: RecipeFacts) -> Said:
    schedule, count, pp = facts.layout.schedule, facts.num_microbatches, facts.layout.pp
    if schedule == "interleaved":
        rest = f"schedule=interleaved with {count} micro-batches: Megatron's are a multiple of the {pp} stages"
        return Said(lacks=rest if count % pp else "")
    return Said(lacks=f"schedule={schedule}: Megatron's schedules are 1f1b and interleaved; this file runs 1f1b")


def _offload(facts: RecipeFacts) -> Said:
    settings = {"--optimizer-cpu-offload": True, "--use-precision-aware-optimizer": True}
    if facts.layout.zero == 0:
        return Said(lacks="offload with zero=0: --optimizer-cpu-offload needs the distributed optimizer, zero=1")
    return Said(settings)


def _write(facts: RecipeFacts, settings: dict[str, Any]) -> str:
    always: dict[str, Any] = {"--seq-length": facts.model.length, "--max-position-embeddings": facts.model.length}
    words = [*flags({**settings, **always}), '"${MODEL_AND_DATA_FLAGS[@]}"']
    layout = facts.layout
    needs_one = layout.zero < 2 and (layout.tp > 1 or layout.cp > 1)  # which Megatron asserts before Blackwell
    environment = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if needs_one else "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    return environment + facts.torchrun("pretrain_gpt.py", words)


MEGATRON = Framework(
    name="megatron",
    suffix=".sh",
    comment="#",
    words=_words,
    write=_write,
    differs=(
        "kernels of Transformer Engine are faster than those that the prediction assumes; gradients are divided by the ranks "
        "and micro-batches, not by the tokens, unless --calculate-per-token-loss is given",
    ),
)
