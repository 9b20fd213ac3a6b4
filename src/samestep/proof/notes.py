"""The values that the workers of a proof exchange by files: NOTE.json, and the tensors that it names in
NOTE.safetensors.

The folder is among temporary files, so a note is read as plain data (`runtime/processes/messages.py`), which runs no
code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import Observation, ObservedStep, Output, PlainSteps
from samestep.proof.verdict import Check
from samestep.runtime.checkpoints import writer
from samestep.runtime.processes.messages import Packer, unpack_plain

_CLASSES = (Observation, ObservedStep, PlainSteps, HeldTensor, Output, Check)


def write(note: Path, value: Any) -> None:
    """Write a value, replacing an earlier note: records of a proof, and plain values with tensors."""
    packer = Packer("", _CLASSES)
    record = packer.packed(value)
    for path in (text := note.with_suffix(".json"), tensors := note.with_suffix(".safetensors")):
        path.unlink(missing_ok=True)
    writer.write(tensors, {name: tensor.cpu() for name, tensor in packer.tensors.items()})
    text.write_text(json.dumps(record), encoding="utf-8")


def read(note: Path) -> Any:
    """Return the value of a note; its tensors are mapped from the file, of which only the used pages are read."""
    record = json.loads(note.with_suffix(".json").read_text(encoding="utf-8"))
    with safe_open(note.with_suffix(".safetensors"), "pt") as file:
        return unpack_plain(record, file.get_tensor, _CLASSES)
