"""What gradient codecs cost and change: seconds of their kernels against a copy, and held-out loss against float32.

    python benchmarks/codecs.py            25 MiB of gradients on one core, eager and compiled
    python benchmarks/codecs.py --loss     the default job for 300 steps on three seeds, two contributions a step

Seconds are the best of some repetitions. What a codec is compared with is a copy of the same gradients.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samestep import job as jobs
from samestep.datasets import batches
from samestep.layout import Layout
from samestep.program.codecs import CODECS, CodedPart, Matrix
from samestep.program.contributions import Contributions
from samestep.runtime.codecs.codec import Codec, codec_of
from samestep.runtime.codecs.factored_exchange import FactoredExchange
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.workload import Workload, held_out_losses

NUMEL, BLOCK, REPETITIONS = 25 * 2**18, 256, 15


def best_s(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls."""
    act()
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return min(found)


def kernels() -> None:
    """Print, for each codec, how many copies its encoding and its decoding take."""
    torch.set_num_threads(1)
    gradient, other = torch.randn(1, NUMEL), torch.zeros(1, NUMEL)
    copy_s = best_s(functools.partial(other.copy_, gradient))
    print(f"a copy of 25 MiB: {copy_s * 1e3:.1f} ms")
    for name, spec in CODECS.items():
        if spec.factors:
            print(
                f"{name} eager    copies: {best_s(_factoring()) / copy_s:.1f} to encode what was lost too and to decode"
            )
            continue
        codec = codec_of(name)
        wire = torch.zeros((1, spec.size_bytes(NUMEL, BLOCK)), dtype=torch.uint8)
        acts: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
            "encode": (codec.encode, (gradient.clone(), BLOCK, wire)),
            "encode what was lost too": (functools.partial(_feed_back, codec), (gradient, other.clone(), wire)),
            "decode": (codec.decode, (wire, BLOCK, other)),
        }
        for how, made in (("eager", _as_it_is), ("compiled", torch.compile)):
            said = [
                f"{what} {best_s(functools.partial(made(act), *given)) / copy_s:.1f}"
                for what, (act, given) in acts.items()
            ]
            print(f"{name:5} {how:8} copies: {', '.join(said)}")


def _as_it_is(act: Callable[..., None]) -> Callable[..., None]:
    return act


def _feed_back(codec: Codec, gradient: Tensor, lost: Tensor, wire: Tensor) -> None:
    codec.encode(lost.add_(gradient), BLOCK, wire)


def _factoring() -> Callable[[], object]:
    """Return what one rank does for a matrix of as many elements."""
    rows = int(NUMEL**0.5)
    matrix = Matrix("weight", 0, rows, NUMEL // rows, 4)
    made = Contributions(axis="dp_replicate", ranks=1, each=1)
    exchange = FactoredExchange(CodedPart(matrix.numel, 1, (matrix,)), made, None, torch.empty(0), gathers=True)
    return functools.partial(exchange.finish, [torch.randn(matrix.numel)])


def loss(steps: int) -> None:
    """Print held-out losses of the default job, as it is and with each codec."""
    for seed in range(3):
        found = {name: _held_out(name, seed, steps) for name in ("none", *CODECS)}
        plain = found["none"]
        print(f"seed {seed}: " + ", ".join(f"{name} {one:.4f} ({one / plain - 1:+.2%})" for name, one in found.items()))


def _held_out(name: str, seed: int, steps: int) -> float:
    settings = [f"train.steps={steps}", f"train.seed={seed}", f'numerics.compression="{name}"', "train.watch_every=0"]
    job = jobs.default([*settings, f"numerics.replicas={1 if name == 'none' else 2}"])
    work = Workload(job)
    run = Run(work.source, Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))
    for batch in batches(work.dataset, job):
        run.step(batch)
    return held_out_losses(run, work)["held_out"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", action="store_true", help="compare held-out losses")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    if given.loss:
        loss(given.steps)
    else:
        kernels()
