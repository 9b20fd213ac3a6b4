"""Damages to a checkpoint on disk and to nested tables, drawn at random: what a bad disk, a careless copy or somebody with bad intentions does."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.output import durable_files
from samestep.runtime.checkpoints import manifests

FILES = ("flip", "truncate", "empty", "remove", "append", "swap", "exchange")
MANIFESTS = ("version", "step", "escape", "absolute", "link", "nested", "unsigned")
SIGNED = ("world", "part", "huge", "head")
"""What only a load finds: the digests are right, as somebody with bad intentions has made them."""
DAMAGES = (*FILES, *MANIFESTS, *SIGNED)


def damaged(folder: Path, damage: str, drawn: random.Random) -> None:
    """Damage a checkpoint in one way, at a place that is drawn."""
    if damage in FILES:
        _damage_file(folder, damage, drawn)
        return
    path = folder / manifests.NAME
    manifest = manifests.read_manifest(folder)
    _change_manifest(manifest, folder, damage, drawn)
    text = "[" * 100_000 + "]" * 100_000 if damage == "nested" else json.dumps(manifest)
    path.unlink()
    if damage in ("nested", "unsigned"):
        path.write_text(text)
    else:
        manifests.write_manifest(folder, manifest)  # by somebody who signs it too


def _change_manifest(manifest: Any, folder: Path, damage: str, drawn: random.Random) -> None:
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
        case "part":
            manifest["parts"].remove(part)
        case "huge":
            name = drawn.choice(sorted(manifest["shapes"]))
            manifest["shapes"][name] = [2**40, 2**20]
        case "head":
            part["digest"] = _with_another_length(folder / part["file"], drawn)


def _with_another_length(path: Path, drawn: random.Random) -> str:
    """Let a file of tensors say that its head has another length; return its digest."""
    content = bytearray(path.read_bytes())
    content[:8] = drawn.choice([2**63 - 1, 2**40, len(content), 0]).to_bytes(8, "little")
    path.write_bytes(content)
    return durable_files.digest_of(path)


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
        case "exchange":  # with another rank's file, or where there is none with the manifest
            other = drawn.choice([one for one in files if one != path])
            content = bytearray(other.read_bytes())
            other.write_bytes(path.read_bytes())
    path.unlink()
    if damage != "remove":
        path.write_bytes(content)


# -- tables ----------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**40, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "x", "../x", "/dev/zero", "\0", "a/b",
    "subprocess:getoutput", "\x1b[31m", [], {}, [[]], [0], [2**40], {"a": 1}, "x" * 5000,
)  # fmt: skip


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested tables and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inner:
        yield (*above, key)
        yield from _places(held, (*above, key))


def mutated(value: Any, draw: random.Random) -> tuple[Any, str]:
    """Return nested tables of which one or two values are odd, missing, doubled or exchanged, and what was done."""
    changed, done = copy.deepcopy(value), []
    for _ in range(draw.choice([1, 1, 1, 2])):
        *above, last = draw.choice([*_places(changed)])
        table = changed
        for key in above:
            table = table[key]
        how = draw.random()
        if how < 0.15:
            del table[last]
        elif how < 0.25 and isinstance(table, dict):
            table[draw.choice(["x", "code", "auto_map", f"{last}2"])] = table.pop(last)
        elif how < 0.35 and isinstance(table, list):
            table.append(copy.deepcopy(table[last]))
        else:
            table[last] = copy.deepcopy(draw.choice(ODD))
        done.append(f"{above}/{last}")
    return changed, ", ".join(done)
