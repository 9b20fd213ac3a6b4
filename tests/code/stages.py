"""Stages of code that passes more than one tensor between its layers, or has no list of blocks, in every schedule.

What crosses each boundary is read off the trace (`tracing/stage_events.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from tests.code import pipeline_models as models
from tests.code import stage_models
from tests.code.odd_models import Pairs
from tests.code.rows import Equal, Refused, learned, of_cases
from tests.covering import daily
from tests.laboratory import Code
from tests.models import MODELS, Tokens
from tests.unit.test_known_values import Mixture


def _stages(build: Callable[[], nn.Module], data: Callable[[], Any] = Tokens, loss: str = "cross_entropy") -> Code:
    return learned(build, data, loss, steps=2, optimizer={"clip_norm": 0.5})


def _images() -> Pairs:
    return Pairs((3, 12, 12), 4, classes=True)


PASSING = {
    "gains": _stages(models.Gains),
    "soft_tokens": _stages(models.SoftTokens),
    "first_values": _stages(models.FirstValues),
    "called_twice": _stages(models.CalledTwice),
    "vision": _stages(models.Vision, _images),
    "fixed_point": _stages(models.FixedPoint),
    "mixture_of_softmaxes": _stages(models.MixtureOfSoftmaxes),
    "skips": _stages(models.Skips),
    "all_states": _stages(models.AllStates),
    "conditioned": _stages(models.Conditioned),
    "two_embeddings": _stages(models.TwoEmbeddings),
    "positions_by_shape": _stages(models.PositionsByShape),
    "bags": _stages(models.Bags),
    "written": _stages(models.Written),
    "shared_bias": _stages(models.SharedBias),
    "low_stream": _stages(models.LowStream),
    "high_stream": _stages(models.HighStream),
    "in_place": _stages(models.InPlace),
    "asking": _stages(models.Asking),
    "dropped": _stages(models.Dropped),
    "routed": _stages(models.Routed),
    "parts": _stages(models.Parts),
    "flattened": _stages(models.Flattened),
    "two_uses": _stages(models.TwoUses),
    "behind_back": _stages(models.BehindBack),
    "twice": _stages(models.Twice),
    "repeated": _stages(models.Repeated),
    "three_stages": _stages(models.ThreeStages),
    "caching": _stages(models.Caching),
}


def _vectors() -> Pairs:
    return Pairs((6,), 4, classes=True)


HOOKS, PENALTIES = ("looked", "both"), ("parameters", "modules")
CALLS = {
    "normed": _stages(stage_models.Normed, _images),
    "unet": _stages(stage_models.UNet, _images),
    "coder": _stages(stage_models.Coder, _vectors),
    "steps": _stages(stage_models.Steps),
    "wrapped": _stages(stage_models.Wrapped, _images),
    "structured": _stages(stage_models.Structured, _vectors),
    "attending": _stages(stage_models.Attending),
    "one_block": _stages(stage_models.OneBlock),
    "spare_head": _stages(stage_models.Frozen, _vectors),
    "sequential": _stages(stage_models.sequential, _images),
    "masked_on_host": _stages(stage_models.MaskedOnHost),
    "hooked_late": _stages(functools.partial(stage_models.HookedState, 2), _vectors),
    "kept_gradient": _stages(functools.partial(stage_models.HookedState, 1, "kept"), _vectors),
    **{f"hooks_{how}": _stages(functools.partial(stage_models.HookedModules, how), _vectors) for how in HOOKS},
    **{f"penalty_of_{how}": _stages(functools.partial(stage_models.Penalized, how), _vectors) for how in PENALTIES},
    "table": _stages(stage_models.KeptTable, _vectors),
    **{how: _stages(functools.partial(stage_models.Distributed, how), _vectors) for how in ("drawn", "entropy")},
}
"""Models without a list of blocks, whose stages begin with any call."""
VARYING = {how: _stages(functools.partial(Mixture, how)) for how in ("nonzero", "counts", "mask")}
PASSING |= VARYING
IN_FLOAT32 = {"automatic": _stages(models.Automatic), "high_stream": PASSING["high_stream"]}
_REFUSED = {
    "hidden": (_stages(models.Hidden), "blocks.1 reads a tensor of blocks.0 that is not passed on"),
    "written_through_view": (_stages(models.WrittenThroughView), "add reads a tensor of add_ that is not passed on"),
    "single": (
        _stages(stage_models.Single, _vectors),
        "pp=2 cuts the 1 call of a module of stages single into 2 stages. Use pp=1",
    ),
    "kept": (_stages(stage_models.Kept, _vectors), "last: last reads a tensor of first that is not passed on"),
}

MODELS |= {f"stages {name}": code for name, code in (PASSING | IN_FLOAT32 | CALLS).items()}
MODELS |= {f"stages {name}": code for name, (code, _) in _REFUSED.items()}

LAYOUTS = ("pp=2 microbatch=4", "pp=2 microbatch=2 schedule=zero-bubble recompute=full")
OF_CALLS = [
    ("normed", "dp=2 pp=2 zero=3"),
    ("wrapped", "pp=2 microbatch=4 schedule=gpipe"),
    ("unet", "pp=2 schedule=interleaved virtual_stages=3 microbatch=2"),
    ("coder", "pp=2 microbatch=4"),
    ("steps", "pp=2 microbatch=4"),
    ("structured", "pp=2 microbatch=4"),
    ("attending", "pp=2 microbatch=4 schedule=zero-bubble"),
    ("one_block", "pp=2 microbatch=4"),
    ("spare_head", "pp=2 microbatch=4"),
    ("sequential", "pp=2"),
    ("masked_on_host", "pp=2 microbatch=4"),
    ("hooked_late", "pp=2 microbatch=4 recompute=full"),
    ("kept_gradient", "dp=2 zero=3"),
    ("kept_gradient", "pp=2 microbatch=4"),
    ("hooks_looked", "dp=2 zero=3"),
    ("hooks_both", "pp=2 microbatch=4 schedule=zero-bubble"),
    *((f"penalty_of_{how}", "pp=2 microbatch=4") for how in PENALTIES),
    ("table", "pp=2 microbatch=4"),
    ("drawn", "pp=2 microbatch=4"),
    ("drawn", "tp=2"),
    ("entropy", "dp=2 zero=3"),
]
COMPOSED = [
    ("spare_head", "dp=2 pp=2 zero=3 microbatch=2"),
    ("coder", "dp=2 pp=2 zero=2 microbatch=2"),
    ("two_uses", "dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble"),
    ("skips", "pp=4 microbatch=2"),
    ("bags", "pp=4 microbatch=1 schedule=gpipe"),
    ("all_states", "dp=2 pp=2 microbatch=1 schedule=interleaved virtual_stages=2"),
    ("gains", "dp=2 pp=2 zero=1 microbatch=1 schedule=interleaved virtual_stages=2"),
    ("first_values", "cp=2 pp=2 microbatch=2"),
    ("conditioned", "cp=2 pp=2 microbatch=2 schedule=zero-bubble recompute=full"),
    ("repeated", "dp=2 pp=2 zero=3 microbatch=2 recompute=full"),
    ("three_stages", "pp=4 microbatch=2"),
    ("three_stages", "dp=2 pp=2 zero=1 microbatch=1 schedule=interleaved virtual_stages=3"),
]
EQUAL = [
    *of_cases("stages ", daily((layout, name) for name in PASSING if name not in VARYING for layout in LAYOUTS)),
    *(Equal(layout, f"stages {name}") for name, layout in OF_CALLS),
    *(Equal(layout, "stages caching") for layout in ("dp=2 recompute=full", "dp=2 zero=3 recompute=selective")),
    # FSDP2 sees no tensor within an object, and what is repeated is given the object as it was.
    Equal("dp=2 zero=3 microbatch=2 recompute=full", "stages bags"),
    Equal("dp=1 recompute=full", "stages written"),
    # Rows that scores pick within blocks close no stage.
    *(
        Equal(layout, f"stages {name}")
        for name, layout in (("nonzero", LAYOUTS[1]), ("counts", LAYOUTS[0]), ("mask", LAYOUTS[0]))
    ),
    # Each setting of the other axes once, the others nightly: that stages pass on what a model needs is held above.
    *(
        Equal(layout, f"stages {name}", is_nightly=bool(chosen.marks))
        for (name, layout), chosen in zip(COMPOSED, daily(layout for _, layout in COMPOSED), strict=True)
    ),
]
REFUSED = [Refused("pp=2 microbatch=4", f"stages {name}", words) for name, (_, words) in _REFUSED.items()]
