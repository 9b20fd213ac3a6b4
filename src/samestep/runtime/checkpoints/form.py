"""The form of a checkpoint's manifest: which keys it has, and of which kinds their values are.

A digest protects a manifest from accidents; who writes one on purpose signs it too. What does not have this form, or says two
things of one weight, is refused before anything else looks at it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, StrictBool, StrictFloat, StrictInt, StrictStr

_Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]
_Tensor = Annotated[
    StrictStr,
    Field(pattern=r"(?s)^((value|average)/.+/\d+|(state|lost)/.+/\d+/[^/]+|(buffer|directions)/.+|kept/\d+/\d+)$"),
]
_Value = Annotated[StrictStr, Field(pattern=r"(?s)^state/.+/\d+/[^/]+$")]
_Shapes = dict[StrictStr, list[_Size]]


class _Form(BaseModel):
    model_config = ConfigDict(extra="allow")


class Part(_Form):
    """The record of one rank's file in a manifest."""

    file: Annotated[StrictStr, Field(pattern=r"^rank-\d{4,}\.safetensors$")]
    digest: StrictStr
    tensors: list[_Tensor]
    plain: dict[_Value, StrictBool | StrictInt | StrictFloat | StrictStr | None]
    cuts: dict[StrictStr, tuple[_Size, list[tuple[_Size, _Size]]]]


class Group(_Form):
    """The options of a group of the optimizer's weights."""

    names: list[StrictStr]
    options: dict[StrictStr, Any]


class Record(_Form):
    """The state that one rank keeps besides tensors of weights."""

    rank: NonNegativeInt
    groups: list[Group]
    optimizer: dict[StrictStr, Any]
    unsaved: list[StrictStr]
    attributes: list[tuple[StrictStr, StrictStr, Any]] = []
    extra: list[tuple[StrictStr, Any]] = []


class StampedSource(_Form):
    """The stamp of one source of the data (`datasets/stamps.py`)."""

    kind: StrictStr
    name: StrictStr
    length: _Size = 0
    digests: dict[StrictStr, StrictStr] = {}
    files: _Size = 0
    bytes: _Size = 0
    names: StrictStr = ""
    content: StrictStr = ""


class Manifest(_Form):
    """The manifest of a checkpoint."""

    step: _Size
    layout: StrictStr
    changes: list[StrictStr] = []
    loss_scale: tuple[float, StrictInt] | None
    nominal_count: float | None = None
    losses: list[float] = []
    data: list[StampedSource] = []
    spikes: _Size = 0
    job: dict[StrictStr, dict[StrictStr, Any]]
    folder: StrictStr = ""
    shapes: _Shapes
    frozen: _Shapes = {}
    parts: list[Part]
    ranks: list[Record] = []


def contradiction(manifest: Mapping[str, Any]) -> str:
    """Return what a manifest says of a weight in two places that do not agree, as the end of a sentence; empty where all agree."""
    trained, frozen = manifest["shapes"], manifest.get("frozen", {})
    for name in trained.keys() & frozen.keys():
        if trained[name] != frozen[name]:
            return f"{name} has the shape {trained[name]} as a trained weight and {frozen[name]} as a frozen one"
    shapes = {**frozen, **trained}
    for part in manifest["parts"]:
        for tensor in part["tensors"]:
            kind, _, rest = tensor.partition("/")
            if kind in ("value", "average", "state", "lost"):
                name = weight_of(rest.rsplit("/", 1 if kind in ("value", "average") else 2)[0])
                if name not in shapes:
                    return f"{part['file']} holds {name}, which has no shape"
        for name, (dim, intervals) in part["cuts"].items():
            shape = shapes.get(weight_of(name), [])
            if dim >= len(shape) or not all(start <= stop <= shape[dim] for start, stop in intervals):
                return f"{name} is cut outside of its shape {shape}"
    return ""


def weight_of(part: str) -> str:
    """Return the weight's name, given a name in the files of it or of a part of it."""
    match = re.fullmatch(r"(.*)@\d+of\d+", part)
    return match[1] if match else part
