"""Runs kinds of single-device training scripts in five layouts, and says which are equal to the script: `python benchmarks/scripts.py`.

    python benchmarks/scripts.py                   every kind; keeps what it found in benchmarks/rows/scripts.json, and prints a summary
    python benchmarks/scripts.py simclr gan        some kinds, whose rows are replaced
    python benchmarks/scripts.py --table           prints what is kept

Each kind (`script_kinds/`) is code in the style of a public script: a plain torch loop, and the port. Both take four steps in float64
from the same weights and samples; islands of float32 in a model's own code are float64 on both sides. *Equal*: every loss agrees to 1e-8, and every weight and buffer to 1e-6 of its tensor's largest
element. Kinds that draw random numbers are held against samestep's own single device, since its numbers are a function of
seed, step and sample.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import samestep  # noqa: E402
from benchmarks import script_table  # noqa: E402
from benchmarks.script_kinds import (  # noqa: E402
    adversarial,
    agents,
    data,
    language,
    losses,
    models,
    optimizers,
    rollouts,
    states,
    training,
    vision,
)
from benchmarks.script_kinds.kind import ALL, DP1, Kind, Port, State  # noqa: E402
from benchmarks.script_table import EQUAL, FAILED, REFUSED, WRONG  # noqa: E402
from samestep.runtime.axes.precision import RaiseIslands  # noqa: E402

KINDS: dict[str, Kind] = {
    kind.name: kind
    for room in (losses, states, optimizers, data, models, language, vision, training, agents, adversarial, rollouts)
    for kind in room.KINDS
}
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-8, 1e-6


class Result(NamedTuple):
    """The losses and the weights at the end."""

    losses: list[float]
    weights: State


def plain(kind: Kind) -> Result:
    """Return the result of the script as it was written."""
    model = kind.model()
    with RaiseIslands():
        found = kind.plain(model, kind.whole_batches())
    module = model if isinstance(model, torch.nn.Module) else torch.nn.ModuleDict(model)
    return Result(found, {name: one.detach().clone() for name, one in module.state_dict().items()})


def ported(place: Any, name: str, layout: str) -> Result:
    """Return the result of the port on one rank."""
    kind = KINDS[name]
    given = Port(kind, layout, place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.port(given, kind.model())
        return Result(given.losses, given.run.state_dict(on_every_rank=True))


def outcome(name: str, layout: str, reference: Result) -> tuple[str, str]:
    """Return what a kind is in a layout, and why."""
    ranks = samestep.Layout(layout).world_size
    try:
        found = samestep.launch(ported, (name, layout), ranks=ranks, device="cpu", timeout_s=120.0)
    except samestep.WorkerError as error:
        return FAILED, str(error).strip().splitlines()[0]
    except samestep.SamestepError as error:
        return REFUSED, f"{' '.join(str(error).split())} [{error.code}]"
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error} {traceback.format_exc().splitlines()[-3]}"
    return compared(found, reference, KINDS[name].ignores)


def compared(found: Result, reference: Result, ignores: Any = ()) -> tuple[str, str]:
    """Return whether two results are equal, and where they first differ."""
    if len(found.losses) != len(reference.losses):
        return WRONG, f"{len(found.losses)} losses instead of {len(reference.losses)}"
    for index, (ours, theirs) in enumerate(zip(found.losses, reference.losses, strict=True)):
        if not abs(ours - theirs) <= LOSS_TOLERANCE * max(1.0, abs(theirs)):
            return WRONG, f"loss {index + 1} is {ours:.9g} instead of {theirs:.9g}"
    names = set(reference.weights) - set(ignores)
    if missing := names - set(found.weights):
        return WRONG, f"{min(missing)} is missing"
    for name in sorted(names):
        one, other = found.weights[name].double(), reference.weights[name].double()
        most = float((one - other).abs().max()) if one.numel() else 0.0
        if not most <= WEIGHT_TOLERANCE * max(1e-3, float(other.abs().max()) if other.numel() else 1.0):
            return WRONG, f"{name} differs by {most:.2g}"
    return EQUAL, ""


def rows(names: list[str], layouts: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the outcome of each kind in each of its layouts."""
    for name in names:
        kind, reference = KINDS[name], None
        if kind.draws:
            try:
                reference = samestep.launch(ported, (name, DP1), ranks=1, device="cpu", timeout_s=120.0)
            except Exception as error:
                for layout in kind.layouts:
                    word = REFUSED if isinstance(error, samestep.InputError) else FAILED
                    code = f" [{error.code}]" if isinstance(error, samestep.InputError) else ""
                    yield name, layout, word, " ".join(str(error).split()) + code
                continue
        reference = reference or plain(kind)
        for layout in kind.layouts:
            if layout in layouts:
                yield name, layout, *outcome(name, layout, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="names of kinds; by default all")
    parser.add_argument("--layouts", nargs="*", default=list(ALL))
    parser.add_argument("--table", action="store_true", help="print what is kept, and run nothing")
    words = parser.parse_args()
    if words.table:
        print(script_table.table())
        return
    if strange := [name for name in words.kinds if name not in KINDS]:
        sys.exit(f"{strange[0]} is none of {', '.join(KINDS)}")
    found = script_table.kept()
    for name, layout, word, why in rows(words.kinds or list(KINDS), words.layouts):
        print(f"{name:28} {layout:18} {word} {why[:400]}", flush=True)
        found.setdefault(name, {})[layout] = [word, why]
        script_table.keep({name: found[name] for name in KINDS if name in found})
    print(script_table.summary(found))


if __name__ == "__main__":
    main()
