"""What attention document by document saves of memory and time, beside transformers' mask of all pairs of tokens, in one run.

    python benchmarks/packed_documents.py [--tokens 2048 4096 8192] [--docs]

A small Llama takes its steps on one CPU, on samples of documents of 1,024 tokens on average: with the mask that the model itself
makes, and with documents attended one by one. Figures of time are the least processor time of a step. The peak is that of all
tensors alive in one step (`live.py`), and beside it what the program says. The losses must agree to 1e-4. `--docs` writes the
table into docs/memory-options.md. Exits 1 where documents need more memory than the mask.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from live import Live

import samestep
from samestep.building import model as calls
from samestep.building.loss import cross_entropy
from samestep.datasets.batch import example_of
from samestep.memory.memory_use import during_step
from samestep.output.text import align_columns

CLASSES, WIDTH, LAYERS, MEAN, BATCH, STEPS = 256, 64, 2, 1024, 2, 3
DOCUMENT = Path(__file__).parent.parent / "docs" / "memory-options.md"
BLOCK = re.compile(r"(<!-- measured: packed_documents -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ("tokens", "mask: peak MB", "documents: peak MB", "predicted MB", "mask: ms", "documents: ms")


class Documents:
    """Random tokens in documents whose lengths are drawn from an exponential distribution."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(0, CLASSES, (self.length,), generator=draw)
        lengths = torch.empty(self.length).exponential_(1 / MEAN, generator=draw).ceil().long()
        positions = torch.cat([torch.arange(one) for one in lengths[: 8 + 8 * self.length // MEAN].tolist()])
        return {"input_ids": ids, "labels": ids.roll(-1), "position_ids": positions[: self.length]}


def build() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CLASSES, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2**17, use_cache=False,
        )
    )  # fmt: skip


def of_the_model() -> AbstractContextManager[object]:
    """Return a context in which models attend with masks of their own."""
    return mock.patch.object(calls, "packed_documents", return_value=nullcontext())


def measured(length: int, *, with_mask: bool) -> tuple[list[float], int, int, float]:
    """Take steps; return their losses, the bytes alive at most, those that the program says, and the seconds of the fastest."""
    job = samestep.Job(train={"global_batch": BATCH, "steps": STEPS + 2, "watch_every": 0}, run={"device": "cpu"})
    data = Documents(length)
    run = samestep.parallelize(build, cross_entropy, lambda ps: torch.optim.SGD(ps, 1e-3), layout="dp=1", job=job)
    live, losses, seconds = Live(), list[float](), list[float]()
    idle = live.count_all()
    run.prepare(example_of(data))
    with of_the_model() if with_mask else nullcontext():
        for batch in samestep.batches(data, job):
            if batch.step == job.train.steps - 1:
                live = Live()
                live.count_all()
                with live.watching():
                    run.step(batch)
                continue
            began = time.process_time()
            losses.append(run.step(batch).loss)
            seconds.append(time.process_time() - began)
    return losses, live.most - idle, during_step(run.program, 0).total, min(seconds[1:])


def row(length: int) -> tuple[str, ...]:
    """Measure samples of so many tokens; return the row of the table."""
    of_mask, mask_bytes, _, mask_s = measured(length, with_mask=True)
    losses, size_bytes, said_bytes, documents_s = measured(length, with_mask=False)
    if any(abs(one - other) > 1e-4 * other for one, other in zip(losses, of_mask, strict=True)):
        sys.exit(f"the losses of {length:,} tokens differ: {losses}, and {of_mask} with a mask")
    if size_bytes > mask_bytes:
        sys.exit(f"documents need {size_bytes:,} bytes, and the mask of {length:,} tokens {mask_bytes:,}")
    sizes = (f"{size / 1e6:,.0f}" for size in (mask_bytes, size_bytes, said_bytes))
    return f"{length:,}", *sizes, f"{mask_s * 1e3:,.0f}", f"{documents_s * 1e3:,.0f}"


def main() -> None:
    """Measure, print, and write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(length) for length in given.tokens]
    print(align_columns([HEAD, *rows]))
    if given.docs:
        lines = [HEAD, ("---:",) * len(HEAD), *rows]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        where = f"\nCPU time, one thread of {platform.machine()}, torch {torch.__version__}.\n"
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(BLOCK.sub(lambda found: found[1] + table + where + found[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
