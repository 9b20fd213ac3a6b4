"""Images and token files of many forms, drawn at random, and damages to them: what a bad disk, a careless copy, or another tool's file does.

A reader's function writes a folder of a few files, all sound or one of them damaged, and returns a `Case`. `outcome` reads everything
that the case's source gives: it is "read", or "refused" in one line that names the file; anything else is raised. What is sound is
read, and equal to what Pillow or numpy reads directly.
"""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps

from samestep.datasets import open_dataset
from samestep.datasets.tokens import TokenStream
from samestep.errors import DataError
from samestep.job import Job


@dataclass(frozen=True)
class Case:
    """A source of data, sound or with one damaged file."""

    data: Mapping[str, Any]
    """The job's table `data`."""
    damage: str
    """What was done to the file; empty where all are sound."""
    file: Path
    """The file that was damaged, or the first one."""
    expected: Callable[[], list[Any]]
    """Returns what is read of sound files, by the library itself."""
    also: tuple[Path, ...] = field(default=())
    """What a refusal may name in place of the damaged file: its partner, such as an index, or what the source names."""


def outcome(case: Case) -> Literal["read", "refused"]:
    """Read all samples of a case, and return what came of it.

    Raises:
        AssertionError: something sound is refused or differs, or a refusal is no line that names the file.
        Exception: what a reader raises besides.
    """
    try:
        found = _read(case)
    except DataError as error:
        text = str(error)
        assert case.damage, f"sound data is refused: {text}"
        assert "\n" not in text, text
        assert any(str(path) in text for path in (case.file, *case.also)), f"{case.damage}: {text}"
        return "refused"
    if not case.damage:
        expected = case.expected()
        assert len(found) == len(expected)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    return "read"


def _read(case: Case) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about what it skips in a damaged file
        dataset: Any = open_dataset(Job(data={"held_out": 0.0, **case.data}))
        if isinstance(dataset, TokenStream):
            return [dataset.tokens[np.arange(len(dataset.tokens))].astype(np.int64)]
        in_order = sorted(range(len(dataset)), key=lambda index: dataset.files[index][0])
        return [dataset[index][0].numpy() for index in in_order]


# -- images ----------------------------------------------------------------------------------------

_SIDE = 12
_FORMS = {
    "jpg": ("L", "RGB", "CMYK"), "png": ("1", "L", "P", "LA", "RGB", "RGBA", "I;16"), "tif": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"),
    "webp": ("RGB", "RGBA"), "gif": ("L", "P"), "bmp": ("1", "L", "P", "RGB"),
}  # fmt: skip
IMAGE_DAMAGES = ("flip", "cut", "overwrite", "empty", "append", "head", "text", "frames", "size", "orientation")


def images(folder: Path, drawn: random.Random, damage: str = "") -> Case:
    """Write images of two classes in several forms, and damage one of them in one of `IMAGE_DAMAGES`."""
    files = []
    for number in range(4):
        suffix = drawn.choice(sorted(_FORMS))
        path = folder / ("cat", "dog")[number % 2] / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_image(path, drawn.choice(_FORMS[suffix]), drawn)
        files.append(path)
    harmed = drawn.choice(files)
    if damage:
        _damage_image(harmed, damage, drawn)
    data = {"source": f"images:{folder}", "image_size": _SIDE, "image_mean": (0.0,), "image_std": (1.0,)}
    return Case(data, damage, harmed, lambda: [_plainly(path) for path in sorted(files)])


def _write_image(path: Path, mode: str, drawn: random.Random) -> None:
    pixels = np.random.default_rng(drawn.randrange(2**32)).integers(0, 256, (_SIDE, _SIDE + 5, 3), np.uint8)
    if mode == "I;16":
        picture = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    else:
        picture = Image.fromarray(pixels).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = drawn.randrange(1, 9)
    takes_exif = path.suffix in (".jpg", ".png", ".webp", ".tif") and drawn.random() < 0.7
    settings: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    picture.save(path, **settings, **({"exif": exif} if takes_exif else {}))


def _plainly(path: Path) -> Any:
    """Return what Pillow reads, with its own turn upright, its middle cut out."""
    with Image.open(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        picture = ImageOps.exif_transpose(file)
        if picture.mode.startswith("I;16"):
            picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
        pixels = np.asarray(picture.convert("RGB"), np.float32) / 255
    top, left = ((length - _SIDE) / 2 for length in pixels.shape[:2])
    cut = pixels[round(top) : round(top) + _SIDE, round(left) : round(left) + _SIDE]
    return torch.from_numpy(cut).permute(2, 0, 1).contiguous().numpy()


def _damage_image(path: Path, damage: str, drawn: random.Random) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "frames":
            pages = [Image.fromarray(np.full((16, 16), 40 * number, np.uint8)) for number in range(3)]
            kind = {".gif": "GIF", ".png": "PNG", ".tif": "TIFF", ".webp": "WEBP"}.get(path.suffix, "GIF")
            pages[0].save(path, kind, save_all=True, append_images=pages[1:])
            return
        case "size":  # a number of pixels or of something else becomes a large one
            at = drawn.randrange(4, min(64, len(content) - 4))
            content[at : at + 4] = drawn.choice(
                [b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\xff\xff", b"\xff" * 4]
            )
        case "orientation":
            marker = content.find(b"\x01\x12") if b"\x01\x12" in content else content.find(b"\x12\x01")
            at = marker + drawn.randrange(12) if marker >= 0 else drawn.randrange(len(content))
            content[at % len(content)] ^= drawn.randrange(1, 256)
        case "head":  # of another format before these pixels
            other = drawn.choice(
                [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"II*\x00", b"RIFF", b"BM", b"%!PS-Adobe"]
            )
            content[: len(other)] = other
        case "text":
            content = bytearray(b"<html>404</html>")
        case _:
            content = _harmed(content, damage, drawn)
    path.write_bytes(content)


def _harmed(content: bytearray, damage: str, drawn: random.Random) -> bytearray:
    """Return bytes damaged in a way that any file can be."""
    match damage:
        case "flip":
            for _ in range(drawn.choice([1, 3, 20])):
                content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        case "cut":
            del content[drawn.randrange(len(content)) :]
        case "overwrite":
            start = drawn.randrange(len(content))
            stop = min(len(content), start + drawn.randrange(1, 40))
            content[start:stop] = drawn.randbytes(stop - start)
        case "empty":
            content.clear()
        case "append":
            content += drawn.randbytes(drawn.randrange(1, 100))
    return content


# -- files of tokens -------------------------------------------------------------------------------

TOKEN_FORMS = ("plain", "npy", "rows", "headed", "megatron", "folder")
TOKEN_DAMAGES = ("flip", "cut", "overwrite", "empty", "append", "head", "counts", "width", "swapped", "partner", "gzip")
_CODES = {"u1": 1, "<i4": 4, "<i8": 5, "<u2": 8}


def tokens(folder: Path, drawn: random.Random, damage: str = "") -> Case:
    """Write files of tokens in one of `TOKEN_FORMS`, and damage one of them in one of `TOKEN_DAMAGES`."""
    folder.mkdir(parents=True, exist_ok=True)
    form = drawn.choice(TOKEN_FORMS)
    ids = np.random.default_rng(drawn.randrange(2**32)).integers(1, 200, drawn.randrange(60, 400))
    data: dict[str, Any] = {"sequence_length": 8, "dtype": "uint16"}
    also: tuple[Path, ...] = ()
    match form:
        case "plain":
            data["dtype"] = drawn.choice(["uint8", "uint16", "uint32", "int32", "int64"])
            path = folder / "tokens.bin"
            ids.astype(data["dtype"]).tofile(path)
        case "npy":
            path = folder / "tokens.npy"
            np.save(path, ids.astype(drawn.choice(["u1", "<u2", ">u2", "<i4", ">i4", "<i8"])))
        case "rows":
            path, ids = folder / "rows.npy", ids[: len(ids) // 5 * 5]
            np.save(path, np.asarray(ids.reshape(-1, 5), "<i4", order=drawn.choice("CF")))
        case "headed":
            path = folder / "shard.bin"
            number, version, dtype = drawn.choice([(20240520, 1, "<u2"), (20240801, 7, "<u4")])
            head = np.zeros(256, "<i4")
            head[:3] = number, version, len(ids)
            path.write_bytes(head.tobytes() + ids.astype(dtype).tobytes())
        case "megatron":
            path = folder / "corpus_text_document.bin"
            also = (path.with_suffix(".idx"),)
            write_megatron(path, ids, drawn.choice(sorted(_CODES)), drawn)
        case _:
            path = folder / "train.bin"
            ids.astype("<u2").tofile(path)
            np.zeros(50, "<u2").tofile(folder / "val.bin")
            (folder / "input.txt").write_text("to be or not to be")
            (folder / "meta.pkl").write_bytes(b"\x80\x04}.")
    whole = path.with_suffix("") if form == "megatron" and drawn.random() < 0.5 else path
    data["source"] = f"tokens:{folder if form == 'folder' or drawn.random() < 0.3 else whole}"
    harmed = drawn.choice([path, *also])
    if damage:
        _damage_tokens(harmed, damage, drawn)
        also = (path, path.with_suffix(""), folder, *also)
    return Case(data, f"{form}: {damage}" * bool(damage), harmed, lambda: [ids], also)


def write_megatron(path: Path, ids: Any, dtype: str, drawn: random.Random, *, modes: bool = False) -> None:
    """Write tokens and their index in Megatron's form, as sequences of which some documents have several."""
    ends = sorted({*drawn.sample(range(1, len(ids)), 5), len(ids)})
    lengths = np.diff([0, *ends])
    documents = sorted({0, drawn.randrange(1, len(lengths)), len(lengths)})
    ids.astype(dtype).tofile(path)
    parts = [
        b"MMIDIDX\x00\x00", struct.pack("<QBQQ", 1, _CODES[dtype], len(lengths), len(documents)), lengths.astype("<i4").tobytes(),
        (np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize).astype("<i8").tobytes(), np.array(documents, "<i8").tobytes(),
    ]  # fmt: skip
    path.with_suffix(".idx").write_bytes(b"".join(parts) + bytes(len(lengths)) * modes)


def _damage_tokens(path: Path, damage: str, drawn: random.Random) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "head":
            other = drawn.choice(
                [b"\x93NUMPY\x01\x00", b"MMIDIDX\x00\x00", b"PK\x03\x04", b"PAR1", struct.pack("<iii", 20240520, 1, 9)]
            )
            content[: len(other)] = other
        case "counts":  # a number in a head becomes a large or a negative one
            at = drawn.randrange(min(64, len(content)))
            content[at : at + 8] = struct.pack("<q", drawn.choice([2**62, -1, 2**31, 0]))
        case "width":
            content = bytearray(
                np.frombuffer(bytes(content), "u1").astype(drawn.choice(["<u2", "<u4", "<i8"])).tobytes()
            )
        case "swapped":
            content = bytearray(np.frombuffer(bytes(content[: len(content) // 2 * 2]), "<u2").byteswap().tobytes())
        case "partner":
            path.unlink()
            return
        case "gzip":
            content[:3] = b"\x1f\x8b\x08"
        case _:
            content = _harmed(content, damage, drawn)
    path.write_bytes(content)
