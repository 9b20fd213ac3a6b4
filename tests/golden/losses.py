"""Losses and gradient norms to the bit: `python -m tests.golden.losses FILE` writes them.

They depend on this machine's BLAS, so no test holds them. Run it on one machine before and after a change that must not
change any number, each into a file of its own, and compare the two with `diff`: they are equal, byte for byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tests.conftest  # noqa: F401 - one thread, before torch is imported
from samestep import Layout
from tests import pool
from tests.laboratory import clipped, job_of, observe

CASES = [
    ("deep_llama", "dp=1"),
    ("deep_llama", "dp=2"),
    ("deep_llama", "dp=1 tp=2"),
    ("deep_llama", "dp=1 pp=2 schedule=zero-bubble microbatch=2"),
    ("deep_llama", "dp=2 zero=3 recompute=full"),
    ("deep_llama", "dp=1 cp=2"),
    ("mixtral", "dp=2 ep=2 zero=1"),
    ("gpt2_with_dropout", "dp=2"),
    ("gpt2_with_dropout", "dp=1 tp=2 sequence_parallel"),
    ("qwen3", "dp=2 zero=2"),
    ("qwen3", "dp=1 tp=2 pp=2 microbatch=2"),
    ("llama_tied", "dp=2 zero=1"),
    ("plain_with_statistics", "dp=2 zero=1"),
]


def lines_of(model: str, layout: str, precision: str) -> list[str]:
    """Take three steps, and write what each rank saw."""
    optimizer = clipped().optimizer.model_dump()
    ranks = pool.pool(Layout(layout).world_size).run(observe, model, layout, job_of(precision, 3, optimizer=optimizer))
    return [
        f'{model} "{layout}" {precision} rank {rank} step {step + 1}: loss {loss.hex()} norm {norm.hex()}'
        for rank, seen in enumerate(ranks)
        for step, (loss, norm) in enumerate(zip(seen.losses, seen.norms, strict=True))
    ]


def main(file: str) -> None:
    """Write all cases in float64 and float32."""
    try:
        lines = [line for case in CASES for precision in ("float64", "float32") for line in lines_of(*case, precision)]
    finally:
        pool.close_all()
    Path(file).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
