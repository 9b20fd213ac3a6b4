"""A model's spec as JSON text, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from samestep.models.layer_spec import (
    BatchNormCall,
    BatchValueCall,
    Boundary,
    Crossing,
    Exchange,
    ExpertDispatch,
    HeadSpec,
    LayerSpec,
    PartialSum,
    Product,
)
from samestep.models.loss_names import LossNames
from samestep.models.param_spec import Cut, ParamSpec, Use
from samestep.models.spec import LossTensor, MaskSpec, ModelSpec

FORMAT_VERSION = 16


def to_json(model: ModelSpec) -> str:
    """Return a spec as JSON, with its format version."""
    return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(model)})


def from_json(text: str) -> ModelSpec:
    """Return the spec that `to_json` wrote.

    Raises:
        ValueError: the text is of another format version.
    """
    fields: dict[str, Any] = json.loads(text)
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"a model spec of format {version}; this version reads {FORMAT_VERSION}")
    layers = tuple(_layer_from(layer) for layer in fields.pop("layers"))
    params = tuple(_param_from(param) for param in fields.pop("params"))
    paths: dict[str, Any] = {
        name: tuple(fields.pop(name, ())) for name in ("coupled_modules", "tried", "looks_in", "kept_after")
    }
    masks = tuple(_mask_from(mask) for mask in fields.pop("masks", ()))
    slices = tuple((name, dim) for name, dim in fields.pop("slices"))
    names = LossNames(**{key: tuple(found) for key, found in fields.pop("loss_names").items()})
    reads = fields.pop("loss_reads", None)
    paths["called_again"] = tuple(map(tuple, fields.pop("called_again", ())))
    paths["loss_values"] = tuple(BatchValueCall(**call) for call in fields.pop("loss_values", ()))
    paths["loss_reads"] = None if reads is None else tuple(map(_loss_tensor_from, reads))
    return ModelSpec(loss_names=names, layers=layers, params=params, masks=masks, slices=slices, **paths, **fields)


def _loss_tensor_from(fields: dict[str, Any]) -> LossTensor:
    rows = fields["rows"]
    return LossTensor(**{**fields, "rows": None if rows is None else tuple(rows)})


def _mask_from(fields: dict[str, Any]) -> MaskSpec:
    rows = fields["rows"]
    return MaskSpec(**{**fields, "shape": tuple(fields["shape"]), "rows": None if rows is None else tuple(rows)})


def _sum_from(fields: dict[str, Any]) -> PartialSum:
    return PartialSum(**{**fields, "beside": tuple(fields.get("beside", ()))})


def _layer_from(fields: dict[str, Any]) -> LayerSpec:
    sums = {name: tuple(map(_sum_from, fields[name])) for name in ("forward_sums", "backward_sums")}
    products = tuple(Product(**product) for product in fields["products"])
    exchanges = tuple(Exchange(**exchange) for exchange in fields["exchanges"])
    boundaries = tuple(Boundary(**boundary) for boundary in fields["sequence_boundaries"])
    dispatches = tuple(ExpertDispatch(**dispatch) for dispatch in fields["dispatches"])
    crossings = tuple(Crossing(**crossing) for crossing in fields.get("crossings", ()))
    batch_norms = tuple(BatchNormCall(**call) for call in fields["batch_norms"])
    given: dict[str, Any] = {
        "modules": tuple(fields["modules"]),
        "again": tuple(fields.get("again", ())),
        "entered": tuple((path, count) for path, count in fields.get("entered", ())),
        "products": products,
        "sequence_boundaries": boundaries,
    }
    head = fields.get("head")
    given["batch_values"] = tuple(BatchValueCall(**call) for call in fields.get("batch_values", ()))
    given |= {"exchanges": exchanges, "dispatches": dispatches, "crossings": crossings, "batch_norms": batch_norms}
    given["head"] = HeadSpec(**head) if head else None
    return LayerSpec(**{**fields, **given, **sums})


def _param_from(fields: dict[str, Any]) -> ParamSpec:
    cut = Cut(**fields["cut"]) if fields["cut"] else None
    tuples = {name: tuple(fields[name]) for name in ("shape", "aliases", "called", "stages")}
    uses = tuple(Use(**{**use, "called": tuple(use["called"])}) for use in fields["uses"])
    return ParamSpec(**{**fields, **tuples, "cut": cut, "uses": uses})
