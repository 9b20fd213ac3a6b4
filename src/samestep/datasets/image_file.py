"""One image, read by Pillow: turned upright, with 8 bits a channel, in colours or in shades of grey.

        orientation                 a file's orientation (EXIF, 1 to 8) is applied, as `ImageOps.exif_transpose` does
    more than 8 bits            shades of grey of 10 to 16 bits become round(value * 255 / largest); Pillow does so with colours
    floating-point numbers      0 to 1 become 0 to 255; other ranges are refused
    several frames              refused (AVIF, GIF, PNG, TIFF, WebP): a sample is one image

The rest is Pillow's `convert`. A file that cannot be read is refused by its name, whatever Pillow raises.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal

import numpy as np

from samestep.errors import DataError, short_repr

_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read, whatever a file's name is: none that starts another program, as EPS does."""
_OF_FRAMES = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")
"""Formats whose several frames are a film or pages. Those of a photo (MPO) are other views of its first one."""
_ORIENTATION, _BITS, _MEANING = 0x0112, 258, 262
"""Numbers of tags: in EXIF the orientation, in TIFF the bits of a number, and whether 0 is white (0) or black (1)."""
_WAYS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""Pillow's operation that turns an image upright, by its orientation."""


def read_image(path: Path, mode: Literal["RGB", "L"]) -> Any:
    """Return Pillow's image of a file, upright, in this mode.

    Raises:
        DataError: it is no image, is damaged, or has a form that is refused.
    """
    image = pillow()
    try:
        with image.open(path, formats=_formats()) as file:
            if file.format in _OF_FRAMES and getattr(file, "is_animated", False):
                raise DataError(
                    f"{path} has several frames, and a sample is one image: each frame as a file of its own works"
                )
            file.load()  # some formats store their orientation after the pixels
            picture = _in_8_bits(file, path)
            if (way := _WAYS.get(file.getexif().get(_ORIENTATION, 1))) is not None:
                picture = picture.transpose(image.Transpose[way])
            picture.info.pop("transparency", None)  # of which a conversion to colours keeps nothing, with a warning
            return picture.convert(mode)
    except DataError:
        raise
    except Exception as error:  # each of Pillow's readers raises something else
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if (form := _other_form(path)) != "":
            raise DataError(f"{path} is {form}") from None
        reason = " ".join(str(error).replace(f"{str(path)!r}", "it").split()) or type(error).__name__
        if type(error) is image.DecompressionBombError:
            reason = f"{reason[: reason.find(',')]}: a smaller image works"
        raise DataError(f"{path} is no image that Pillow reads: {short_repr(reason)}") from None


def _other_form(path: Path) -> str:
    """Return the form of a file that Pillow does not know, and what would work; empty where the form is not known."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return ""
    if not head:
        return "empty: copy it again, or leave it out"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, for which `git lfs pull` fetches the image itself"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"):
        return "a HEIC image, whatever its name says: as JPEG or PNG it works"
    is_page = head.lstrip()[:1] == b"<"
    return "a page of HTML, an SVG, or other text, and no image of pixels: copy it again, or as PNG it works" * is_page


def _in_8_bits(file: Any, path: Path) -> Any:
    """Return an image with 8 bits a channel; itself where it has no more.

    Raises:
        DataError: the range of its numbers is not known.
    """
    if not file.mode.startswith(("I", "F")):
        return file
    tags = getattr(file, "tag_v2", {})
    values = np.asarray(file)
    if file.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:
            raise DataError(
                f"{path} has floating-point numbers from {low:g} to {high:g}, whose range is not known: 0 to 1 works"
            )
        most = 1.0
    elif file.mode == "I" and file.format == "TIFF":
        raise DataError(
            f"{path} has whole numbers of 32 bits or with a sign, whose range is not known: 8 or 16 bits work"
        )
    else:
        most = float(2 ** (tags.get(_BITS) or (16,))[0] - 1)
    scaled = np.round(values.astype(np.float64) * (255 / most)).clip(0, 255).astype(np.uint8)
    if file.mode != "F" and tags.get(_MEANING) == 0:
        scaled = 255 - scaled
    return pillow().fromarray(scaled)


def pillow() -> Any:
    """Return Pillow's module of images.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise DataError("images: needs the package Pillow: pip install 'samestep[images]' works") from None


def _formats() -> tuple[str, ...]:
    """Return the formats that are read, of those that this Pillow was built with."""
    image = pillow()
    image.init()
    return tuple(name for name in _FORMATS if name in image.OPEN)
