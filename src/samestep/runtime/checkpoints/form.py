"""The form of a checkpoint's manifest: which keys it has, and of which kinds their values are.

A digest protects a manifest from accidents; who writes one on purpose signs it too. What does not have this form is refused
before anything else looks at it.
"""

from __future__ import annotations

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


class Manifest(_Form):
    """The manifest of a checkpoint."""

    step: _Size
    layout: StrictStr
    changes: list[StrictStr] = []
    loss_scale: tuple[float, StrictInt] | None
    nominal_count: float | None = None
    losses: list[float] = []
    spikes: _Size = 0
    job: dict[StrictStr, dict[StrictStr, Any]]
    folder: StrictStr = ""
    shapes: _Shapes
    frozen: _Shapes = {}
    parts: list[Part]
    ranks: list[Record] = []
