"""What the kernels of gradient codecs cost: seconds for 25 MiB of gradients on one core, against a copy of the same gradients.

    python benchmarks/codec_kernels.py [--rounds 25] [--rows benchmarks/rows/codec_kernels.json]

Copies and kernels take turns, and of each the fastest turn counts. *Fused* are those that `torch.compile` makes (inductor), which a job
with run.compile = "blocks" uses; they give the same codes (`tests/laws/test_codecs.py`). On GPUs inductor writes them in Triton, which
has not been tried.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.codecs import CODECS, CodedPart, Matrix
from samestep.runtime.codecs.codec import Codec, codec_of
from samestep.wings.slow_links.powersgd import FactoredExchange

ROWS = Path(__file__).parent / "rows" / "codec_kernels.json"
NUMEL, BLOCK = 25 * 2**18, 256
ENCODE, FEED_BACK, DECODE = "encode", "encode with error feedback", "decode"
AIMS = {("int8", "eager"): {ENCODE: 8, FEED_BACK: 8}, ("int8", "fused"): {ENCODE: 2, FEED_BACK: 3}}
"""The most copies that a kernel may take."""


def acts_of(codec: Codec, name: str, gradient: Tensor, other: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what a codec does with a gradient."""
    spec = CODECS[name]
    wire = torch.zeros((1, spec.size_bytes(NUMEL, BLOCK)), dtype=torch.uint8)
    yield ENCODE, functools.partial(codec.encode, gradient, BLOCK, wire)
    if spec.feeds_back:
        yield FEED_BACK, functools.partial(codec.encode, gradient, BLOCK, wire, torch.zeros_like(gradient))
    yield DECODE, functools.partial(codec.decode, wire, BLOCK, other)


def factoring() -> Callable[[], object]:
    """Return what one rank does for a matrix of as many elements."""
    rows = int(NUMEL**0.5)
    matrix = Matrix("weight", 0, rows, NUMEL // rows, 4)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    part = CodedPart(matrix.numel, 1, (matrix,))
    exchange = FactoredExchange(part, dist.group.WORLD, torch.empty(0), gathers=True)
    gradient = torch.randn(matrix.numel)

    def act() -> None:
        for _ in range(2):
            exchange.send([gradient]).wait()
        exchange.finish([gradient])

    return act


def fastest_s(acts: Mapping[tuple[str, ...], Callable[[], object]], rounds: int) -> dict[tuple[str, ...], float]:
    """Return the seconds of the fastest call of each of some acts, which take turns."""
    found = dict.fromkeys(acts, float("inf"))
    for act in acts.values():
        act()
    for _ in range(rounds):
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def measured(rounds: int) -> list[dict[str, object]]:
    """Return a row for each kernel: how many copies it takes."""
    torch.set_num_threads(1)
    gradient, other = torch.randn(1, NUMEL), torch.zeros(1, NUMEL)
    acts: dict[tuple[str, ...], Callable[[], object]] = {("copy",): functools.partial(other.copy_, gradient)}
    for name, spec in CODECS.items():
        if spec.factors:
            acts[name, "eager", "encode with error feedback, and decode"] = factoring()
            continue
        for how in ("eager", "fused") if spec.can_be_fused else ("eager",):
            for what, act in acts_of(codec_of(name, "inductor" if how == "fused" else ""), name, gradient, other):
                acts[name, how, what] = act
    found = fastest_s(acts, rounds)
    copy_s = found.pop(("copy",))
    return [
        {"codec": key[0], "how": key[1], "what": key[2], "copies": took_s / copy_s} for key, took_s in found.items()
    ]


def markdown(path: Path = ROWS) -> str:
    """Return the table of the kept rows."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    whats = list(dict.fromkeys(row["what"] for row in rows))
    lines = [
        f"| codec | kernels | {' | '.join(f'copies to {what}' for what in whats)} |",
        "| --- | --- |" + " ---: |" * len(whats),
    ]
    for name, how in dict.fromkeys((row["codec"], row["how"]) for row in rows):
        mine = {row["what"]: row["copies"] for row in rows if (row["codec"], row["how"]) == (name, how)}
        aimed = {what: f" (aim {most})" for what, most in AIMS.get((name, how), {}).items()}
        cells = [f"{mine[what]:.1f}{aimed.get(what, '')}" if what in mine else "" for what in whats]
        lines.append(f"| {name} | {how} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep the figures")
    given = parser.parse_args(words)
    rows = measured(given.rounds)
    for row in rows:
        print("{codec:9} {how:6} {what:40} {copies:6.1f} copies".format(**row))
    if given.rows:
        given.rows.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
