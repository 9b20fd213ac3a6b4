"""What `loss_chunk` saves of memory and costs in time, with 131,072 classes: whole logits beside chunks, in one run.

    python benchmarks/loss_chunk.py [--turns 5] [--docs]

A small Llama, whose logits are most of what it needs, takes its steps on one CPU: one run for each contestant, in turns, so
that other load on the machine meets all of them. Each figure of time is the median of the ratios of processor time to that of
whole logits in the same turn, with its quartiles. The peak is that of all tensors alive in one step (`live.py`), and beside it what the program says.
The losses of the first step must agree to 1e-5. `--docs` writes the table into docs/memory-options.md. Exits 1 where a chunk of the
loss needs more memory than whole logits.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from live import Live

import samestep
from samestep.building.loss import cross_entropy
from samestep.memory.memory_use import during_step
from samestep.output.text import align_columns
from samestep.runtime.run import Run
from samestep.runtime.step_observer import StepBatch

CLASSES, WIDTH, LAYERS, LENGTH, BATCH = 2**17, 128, 2, 256, 2
CHUNKS = (None, 256, 64)
DOCUMENT = Path(__file__).parent.parent / "docs" / "memory-options.md"
BLOCK = re.compile(r"(<!-- measured: loss_chunk -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ("layout", "peak MB", "predicted MB", "peak, of whole logits", "CPU time, of whole logits", "quartiles")


class Tokens:
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, CLASSES, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def build() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CLASSES, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, use_cache=False,
        )
    )  # fmt: skip


@dataclass
class Contestant:
    """A run with one size of chunks, and what was measured of it."""

    layout: samestep.Layout
    run: Run
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def said(self) -> int:
        """The peak that the program says, in bytes, of SGD without a state."""
        return during_step(self.run.program, 0).total


def contestants(turns: int) -> list[Contestant]:
    """Measure all contestants: a first step, one whose tensors are counted, and then steps in turns."""
    job = samestep.Job(train={"global_batch": BATCH, "steps": turns + 2, "watch_every": 0}, run={"device": "cpu"})
    layouts = [samestep.Layout(loss_chunk=chunk) for chunk in CHUNKS]
    every = [
        Contestant(
            one, samestep.parallelize(build, cross_entropy, lambda ps: torch.optim.SGD(ps, 1e-3), layout=one, job=job)
        )
        for one in layouts
    ]
    for number, batch in enumerate(samestep.batches(Tokens(), job)):
        for one in every[number % len(every) :] + every[: number % len(every)]:
            if number == 1:
                one.peak = _peak(one, batch)
                continue
            began = time.process_time()
            one.losses.append(one.run.step(batch).loss)
            if number > 1:
                one.seconds.append(time.process_time() - began)
    return every


def _peak(one: Contestant, batch: StepBatch) -> int:
    """Take a step; return the bytes that are alive at most, without what other contestants hold."""
    live = Live()
    others = live.count_all() - sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*one.run.model.parameters(), *one.run.model.buffers(), *_gradients(one.run))
    )
    with live.watching():
        one.run.step(batch)
    return live.most - others


def _gradients(run: Run) -> list[torch.Tensor]:
    return [param.grad for param in run.model.parameters() if param.grad is not None]


def rows(every: list[Contestant]) -> list[tuple[str, ...]]:
    """Return the rows of the table."""
    whole = every[0]
    found = []
    for one in every:
        ratios = [mine / theirs for mine, theirs in zip(one.seconds, whole.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found.append(
            (
                str(one.layout),
                f"{one.peak / 1e6:,.0f}",
                f"{one.said / 1e6:,.0f}",
                f"{one.peak / whole.peak:.2f}",
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
            )
        )
    return found


def as_markdown(table: list[tuple[str, ...]]) -> str:
    """Write the table for the document, with what it was measured on."""
    lines = [HEAD, ("---", *("---:" for _ in HEAD[1:])), *((f"`{row[0]}`", *row[1:]) for row in table)]
    about = (
        f"Llama-like, hidden {WIDTH}, {LAYERS} layers, {CLASSES:,} classes, {BATCH} x {LENGTH} tokens, float32, SGD, one "
        f"thread of a CPU, torch {torch.__version__}, Python {platform.python_version()}."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{about}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    every = contestants(given.turns)
    first = [one.losses[0] for one in every]
    if max(first) - min(first) > 1e-5 * abs(first[0]):
        print(f"the losses of the first step differ: {first}")
        return 1
    table = rows(every)
    print(align_columns([HEAD, *table]))
    if given.docs:
        DOCUMENT.write_text(BLOCK.sub(lambda found: found[1] + as_markdown(table) + found[2], DOCUMENT.read_text()))
    return int(any(one.peak > every[0].peak for one in every))


if __name__ == "__main__":
    sys.exit(main())
