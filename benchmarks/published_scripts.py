"""What scripts of published rows say that their tables leave out: a row's cells are filled from the command that it was measured with.

A script is taken where it prints the figure of the row, or the sizes, batches and degrees of the row's table. Cells that a row has stay.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cells import Row, joined, says_nothing


class Script(NamedTuple):
    """What a command says of the rows that it was measured for."""

    source: str
    """Pattern of the row's source and address; so are the three below."""
    model: str
    device: str
    precision: str
    cells: dict[str, str]
    notes: str = ""
    """What is added to the row's notes."""


def _llmq(model: str, precision: str, samples: int, microbatches: int, recompute: str) -> Script:
    cells = {
        "micro_batch": str(samples), "global_batch": str(samples * microbatches), "seq_len": "1024", "recompute": recompute,
    }  # fmt: skip
    return Script("llmq", model, "5060", precision, cells, "cuda_graph=true")


SCRIPTS = (
    # IST-DASLab/llmq, benchmarks/5060Ti.md: the commands and the first steps of each row; half a million tokens a step. `--recompute-block`,
    # and `--recompute-ffn` beside `--recompute-att` or `--recompute-qkv`, repeat all of a block but its last product (llama_model.cpp).
    _llmq(r"0\.5B", "BF16", 10, 51, "none"),
    _llmq(r"0\.5B", "FP8", 12, 42, "none"),
    _llmq(r"1\.5B", "", 8, 64, "full"),
    _llmq(r"(?<![.\d])3B", "", 16, 32, "full"),
    _llmq(r"(?<![.\d])7B", "", 32, 16, "full"),
    # NVIDIA-NeMo/Automodel, examples/llm_benchmark (before examples/benchmark/configs): activation_checkpointing, sequence_parallel,
    # enable_compile of the configurations that docs/performance-summary names
    Script("automodel", "deepseek|qwen3 moe", "", "", {"recompute": "full"}),
    Script("automodel", "gpt-oss 20b|qwen2.5 7b", "", "", {"recompute": "none"}),
    Script("automodel", "qwen2.5 32b", "", "", {"recompute": "full", "sequence_parallel": "False", "compile": "True"}),
    Script("automodel", "llama3 70b", "", "", {"recompute": "full", "sequence_parallel": "True", "compile": "True"}),
    # yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/run_gb300_235b.sh: "GB300 config, MXFP8, 1055 TFLOPS"
    Script(
        "moe.?modelzoo.*qwen3", "235B", "GB300", "MXFP8", {},
        "cuda_graph_impl=transformer_engine; cuda_graph_scope=attn moe_router moe_preprocess",
    ),
)  # fmt: skip


def with_script(row: Row) -> Row:
    """Return a row with what its script says where the row says nothing."""
    for script in SCRIPTS:
        if _is_of(row, script):
            given = {name: cell for name, cell in script.cells.items() if says_nothing(row.get(name) or "")}
            notes = "; ".join(filter(None, (row.get("notes"), script.notes)))
            return {**row, **given, "notes": notes}
    return row


def _is_of(row: Row, script: Script) -> bool:
    said = (
        (script.source, joined(row, "source", "url_or_repo_path")),
        (script.model, row.get("model") or ""),
        (script.device, row.get("gpu") or ""),
        (script.precision, row.get("precision") or ""),
    )
    return all(re.search(pattern, text, re.IGNORECASE) for pattern, text in said)
