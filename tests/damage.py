"""Damages to a checkpoint on disk, drawn at random: what a bad disk, a careless copy or somebody with bad intentions does."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from samestep.runtime import checkpoint_manifest

FILES = ("flip", "truncate", "empty", "remove", "append", "swap")
MANIFESTS = ("version", "step", "escape", "absolute", "link", "world", "huge", "nested", "unsigned")
DAMAGES = (*FILES, *MANIFESTS)


def damaged(folder: Path, damage: str, drawn: random.Random) -> None:
    """Damage a checkpoint in one way, at a place that is drawn."""
    if damage in FILES:
        _damage_file(folder, damage, drawn)
        return
    path = folder / checkpoint_manifest.NAME
    manifest: Any = checkpoint_manifest.read_manifest(folder)
    part = drawn.choice(manifest["parts"])
    match damage:
        case "version":
            manifest["format_version"] = drawn.choice([0, 2, 4, 99, "3", None])
        case "step":
            manifest["step"] += drawn.choice([-1, 1, 1000])
        case "escape":
            part["file"] = f"../{folder.name}/{part['file']}"
        case "absolute":
            part["file"] = str((folder / part["file"]).resolve())
        case "link":
            part["file"] = "."
        case "world":
            part["tensors"] = part["tensors"][1:]
        case "huge":
            name = drawn.choice(sorted(manifest["shapes"]))
            manifest["shapes"][name] = [2**40, 2**20]
    text = json.dumps(manifest)
    if damage == "nested":
        text = "[" * 100_000 + "]" * 100_000
    path.unlink()
    if damage in ("nested", "unsigned"):
        path.write_text(text)
    else:
        checkpoint_manifest.write_manifest(folder, manifest)  # by somebody who signs it too


def _damage_file(folder: Path, damage: str, drawn: random.Random) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = drawn.choice(files)
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        case "truncate":
            del content[drawn.randrange(len(content)) :]
        case "empty":
            content.clear()
        case "append":
            content += os.urandom(drawn.randrange(1, 100))
        case "swap":
            older = folder.parent / f"step-{int(folder.name[5:]) - 1:06d}" / path.name
            content = bytearray(older.read_bytes())
    path.unlink()
    if damage != "remove":
        path.write_bytes(content)
