"""A folder of images as a dataset, one folder a class.

    flowers/daisy/1.jpg, flowers/rose/7.png        classes are numbered in the order of their names

The classes are those of the data that is trained on, also in sets that are held out: such a set may lack some of them.

An image is a float32 tensor [channels, size, size]: its shorter side resized, the middle cut out, and (pixel - mean) / std. In
training it may be changed at random (`data.augment`), by numbers that are a function of (seed, step, sample): the same in every
layout and after any resume. What is held out is never changed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from samestep.datasets.batch import FileSamples
from samestep.datasets.files import HELD_OUT_WORDS, TRAINED_WORDS, Split, existing, name_of_part, part_of
from samestep.datasets.order import permute_positions
from samestep.errors import DataError, did_you_mean, first_line
from samestep.job_tables import DataTable

_UNREAD = (".heic", ".heif", ".jxl", ".svg", ".psd", ".dng", ".nef", ".cr2", ".arw", ".exr", ".tga")
"""Suffixes of images that are not read, so that a class would lack them."""
_OF_SYSTEMS = {"$RECYCLE.BIN", "@eaDir", "__MACOSX", "__pycache__", "lost+found"}
"""Folders that systems make, besides those whose names begin with a dot."""
_MOST_PIXELS = 2**26
"""The largest number of pixels of an image whose shorter side has been resized."""
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read, whatever a file's name is: none that starts another program, as EPS does."""


@dataclass(frozen=True, eq=False)
class ImageFolder(FileSamples):
    """One part of a folder of images: pairs of an image and the number of its class."""

    files: tuple[tuple[Path, int], ...]
    settings: DataTable
    classes: tuple[str, ...] = ()
    """Names of the classes, by number."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self._normalised(
            _cut_out(self._opened(index, self.settings.image_size), self.settings.image_size)
        ), self.files[index][1]

    def sample(self, index: int, generator: torch.Generator) -> tuple[Tensor, int]:
        """Return a sample that is changed as `data.augment` says, by numbers of the generator."""
        size, changes = self.settings.image_size, self.settings.augment
        picture = self._opened(index, size + size // 8 * ("crop" in changes))
        where = torch.rand(3, generator=generator).tolist()
        cut_picture = _cut_out(picture, size, where[:2]) if "crop" in changes else _cut_out(picture, size)
        pixels = self._normalised(cut_picture)
        return (pixels.flip(-1) if "flip" in changes and where[2] < 0.5 else pixels), self.files[index][1]

    def _opened(self, index: int, side: int) -> Any:
        """Return an image whose shorter side has `side` pixels.

        Raises:
            DataError: it cannot be read.
        """
        path = self.files[index][0]
        picture = read_image(path, "RGB" if self.settings.image_channels == 3 else "L")
        scale = side / min(picture.size)
        width, height = (max(side, round(length * scale)) for length in picture.size)
        if width * height > _MOST_PIXELS:
            raise DataError(
                "image-form",
                f"{path} has {picture.size[0]} x {picture.size[1]} pixels, and {width} x {height} with a shorter side of {side}. Use an "
                "image that is less narrow",
            )
        return picture.resize((width, height), _pillow().Resampling.BILINEAR)

    def _normalised(self, picture: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
        pixels = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        mean, std = (
            torch.tensor(statistics)[:, None, None]
            for statistics in (self.settings.image_mean, self.settings.image_std)
        )
        return ((pixels - mean) / std).contiguous()


def _cut_out(picture: Any, size: int, where: tuple[float, float] | list[float] = (0.5, 0.5)) -> Any:
    """Return a square of an image, at a place given as fractions from left to right and from top to bottom."""
    left, top = (round(at * (length - size)) for at, length in zip(where, picture.size, strict=True))
    return picture.crop((left, top, left + size, top + size))


def images_part(path: str, data: DataTable, split: Split, classes: Sequence[str] | None = None) -> ImageFolder:
    """Return one part of a folder of images; they are shuffled once, so that both parts have all classes.

    Classes are numbered by their places among `classes`, or without them in the order of their names.

    Raises:
        DataError: Pillow is not installed, the folder is missing, it has no images in folders of classes, or a class that is not
            among those that are given.
    """
    source, names = f"images:{path}", class_names(path)
    numbers = {name: number for number, name in enumerate(classes if classes is not None else names)}
    root = existing(path, source)
    if strange := next((name for name in names if name not in numbers), None):
        raise DataError(
            "image-classes",
            f"{source} has the class {strange!r}, which the data that is trained on lacks{did_you_mean(strange, numbers)}; its classes are "
            f"{', '.join([*numbers][:8])}{' and others' * (len(numbers) > 8)}",
        )
    images = {name: _images_in(root / name) for name in names}
    if classes is None and (empty := next((name for name in names if not images[name]), None)):
        raise DataError(
            "image-classes",
            f"{source} has the class {empty!r} without images. Add images to it, or remove the folder {root / empty}",
        )
    files = [(file, numbers[name]) for name, of_class in images.items() for file in of_class]
    order = permute_positions(np.arange(len(files)), len(files), 0)
    part = part_of(len(files), data.held_out, split)
    if not len(part):
        raise DataError(
            "data-too-short",
            f"{name_of_part(split, data.source)} has none of {len(files)} images; more images are needed",
        )
    return ImageFolder(tuple(files[order[place]] for place in part), data, tuple(numbers))


def class_names(path: str) -> tuple[str, ...]:
    """Return the names of the classes in a folder of images, in order.

    Raises:
        DataError: the folder is missing, has no folders, or its folders are parts of a data set.
    """
    root = existing(path, f"images:{path}")
    names = sorted(entry.name for entry in root.glob("*/") if not _is_hidden(entry.name))
    if not names:
        raise DataError("data-missing", f"images:{path} has no folders. Use one folder a class, as {root}/cat/1.png")
    words = {name.lower() for name in names}
    trained = next((name for name in names if name.lower() in TRAINED_WORDS), names[0])
    if words <= TRAINED_WORDS | HELD_OUT_WORDS or (words & TRAINED_WORDS and words & HELD_OUT_WORDS):
        raise DataError(
            "data-missing",
            f"images:{path} has the folders {', '.join(names)}, which are parts of a data set or classes of these names. For parts, set "
            f"data.source = 'images:{root / trained}' and data.held_out_sets, and classes need other names",
        )
    return tuple(names)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _OF_SYSTEMS


def _images_in(folder: Path) -> list[Path]:
    """Return the images below a folder, in the order of their names, without hidden ones.

    Raises:
        DataError: a folder cannot be read, a file is an image of a form that is not read, or a link to nothing.
    """
    suffixes = {suffix for suffix, form in _pillow().registered_extensions().items() if form in _FORMATS}
    images, seen = [], {os.path.realpath(folder.parent)}
    for top, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        if os.path.realpath(top) in seen:  # a link to a folder above it, or to one that another link leads to
            folders.clear()
            continue
        seen.add(os.path.realpath(top))
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for file in (Path(top, name) for name in names if not _is_hidden(name)):
            suffix = file.suffix.lower()
            if suffix in _UNREAD or (suffix in suffixes and not file.exists()):
                raise DataError(
                    "image-form",
                    f"{file} is a link to a missing file, or an image of a form that is not read. Save it as PNG or JPEG, or remove it",
                )
            if suffix in suffixes:
                images.append(file)
    return sorted(images)


def _refuse_folder(error: OSError) -> None:
    raise DataError("data-unreadable", f"{error.filename} cannot be read: {error.strerror}")


def read_image(path: Path, mode: Literal["RGB", "L"]) -> Any:
    """Return Pillow's image of a file, upright, in this mode; of several frames the first one.

    Raises:
        DataError: it is no image, is damaged, or the range of its numbers is not known.
    """
    image = _pillow()
    try:
        with image.open(path, formats=[form for form in _FORMATS if form in image.OPEN]) as file:
            file.load()  # some formats store their orientation after the pixels
            picture = importlib.import_module("PIL.ImageOps").exif_transpose(file)
            if picture.mode.startswith("I;16"):
                picture = image.fromarray((np.asarray(picture) / 257).round().astype(np.uint8))
            elif picture.mode in ("I", "F"):
                raise ValueError(f"its numbers have an unknown range ({picture.mode}). Save it with 8 or 16 bits")
            picture.info.pop("transparency", None)  # of which a conversion to colours keeps nothing, with a warning
            return picture.convert(mode)
    except Exception as error:  # each of Pillow's readers raises something else
        raise DataError("data-damaged", f"{path} cannot be read as an image: {first_line(error)}") from None


def _pillow() -> Any:
    """Return Pillow's module of images, with all its formats.

    Raises:
        DataError: it is not installed.
    """
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ImportError:
        raise DataError(
            "package-missing", "images: needs the package Pillow. Use pip install 'samestep[images]'"
        ) from None
    image.init()
    return image
