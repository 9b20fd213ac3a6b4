"""What the repetitions of steps under watch cost: watched and unwatched steps of one run, in turn.

    python benchmarks/canary.py [--steps 60] [--share N]

Every second step of a run is watched, so that both kinds see the same machine. The cost at the default of one watched
step in a hundred is

    (median watched step - median unwatched step) / (100 * median unwatched step)

A share of one sample a rank is the worst case: then a sample's forward is a whole forward. Exits 1 above one per cent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import samestep
from samestep.building.loss import cross_entropy
from samestep.job_tables import TrainTable
from samestep.output.text import align_columns

LIMIT = 0.01
"""The largest part of a run that its watch may take."""
LENGTH, VOCABULARY = 64, 256
LAYOUTS = ("dp=1", "dp=2", "dp=2 zero=3", "dp=1 pp=2 microbatch=1", "dp=1 tp=2")


class Tokens:
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def build() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, use_cache=False,
        )
    )  # fmt: skip


def times(_: Any, layout: str, share: int, steps: int) -> list[tuple[float, float]]:
    """Take steps, every second one under watch; return the seconds of each unwatched and watched one."""
    where = samestep.Layout(layout)
    train = {"global_batch": share * where.dp, "steps": steps, "watch_every": 2}
    job = samestep.Job(train=train, run={"device": "cpu"})
    run = samestep.parallelize(build, cross_entropy, torch.optim.AdamW, layout=layout, job=job)
    taken = []
    for batch in samestep.batches(Tokens(), job):
        began = time.perf_counter()
        run.step(batch)
        taken.append(time.perf_counter() - began)
    return list(zip(taken[4::2], taken[5::2], strict=True))  # without the first ones, which measure the allowance


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each run, half of them under watch")
    parser.add_argument("--share", type=int, nargs="*", default=[1, 4], help="samples of each data rank")
    chosen = parser.parse_args(words)
    every = TrainTable().watch_every
    rows, worst = [["layout", "samples a rank", "step, ms", "watched step, ms", f"cost at {every}"]], 0.0
    for layout in LAYOUTS:
        for share in chosen.share:
            ranks = samestep.Layout(layout).world_size
            found = samestep.launch(times, (layout, share, chosen.steps), ranks=ranks, device="cpu")
            plain, watched = (statistics.median(kind) for kind in zip(*found, strict=True))
            cost = (watched - plain) / (every * plain)
            worst = max(worst, cost)
            rows.append([layout, str(share), f"{plain * 1e3:.1f}", f"{watched * 1e3:.1f}", f"{cost:.2%}"])
    print(align_columns(rows))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
