"""A folder of images as a dataset, one folder a class, read by Pillow.

    flowers/daisy/1.jpg, flowers/rose/7.png        classes are numbered in the order of their names

An image is a float32 tensor [channels, size, size]: its shorter side resized, the middle cut out, and (pixel - mean) / std. In
training it may be changed at random (`data.augment`), by numbers that are a function of (seed, step, sample): the same in every
layout and after any resume. What is held out is never changed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.datasets.files import existing, files_at
from samestep.datasets.order import permuted
from samestep.datasets.split import Split, named, part_of
from samestep.errors import DataError
from samestep.job_tables import DataTable

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """One part of a folder of images: pairs of an image and the number of its class."""

    files: tuple[tuple[Path, int], ...]
    settings: DataTable

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
        made = _cut_out(picture, size, where[:2]) if "crop" in changes else _cut_out(picture, size)
        pixels = self._normalised(made)
        return (pixels.flip(-1) if "flip" in changes and where[2] < 0.5 else pixels), self.files[index][1]

    def _opened(self, index: int, side: int) -> Any:
        """Return an image whose shorter side has `side` pixels.

        Raises:
            DataError: it cannot be read.
        """
        image, path = _pillow(), self.files[index][0]
        try:
            with image.open(path) as file:
                picture = file.convert("RGB" if self.settings.image_channels == 3 else "L")
        except OSError as error:
            raise DataError(f"{path} is no image that Pillow reads: {error}") from None
        scale = side / min(picture.size)
        width, height = (max(side, round(length * scale)) for length in picture.size)
        return picture.resize((width, height), image.Resampling.BILINEAR)

    def _normalised(self, picture: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
        pixels = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        mean, std = (
            torch.tensor(given)[:, None, None] for given in (self.settings.image_mean, self.settings.image_std)
        )
        return ((pixels - mean) / std).contiguous()


def _cut_out(picture: Any, size: int, where: tuple[float, float] | list[float] = (0.5, 0.5)) -> Any:
    """Return a square of an image, at a place given as fractions from left to right and from top to bottom."""
    left, top = (round(at * (length - size)) for at, length in zip(where, picture.size, strict=True))
    return picture.crop((left, top, left + size, top + size))


def images_part(path: str, data: DataTable, split: Split) -> ImageFolder:
    """Return one part of a folder of images; they are shuffled once, so that both parts have all classes.

    Raises:
        DataError: Pillow is not installed, the folder is missing, or it has no images in folders of classes.
    """
    _pillow()
    root = existing(path, f"images:{path}")
    folders = (
        sorted(one for one in root.iterdir() if one.is_dir() and not one.name.startswith(".")) if root.is_dir() else []
    )
    files = [
        (file, number)
        for number, folder in enumerate(folders)
        for file in files_at(folder, f"images:{path}")
        if file.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise DataError(f"images:{path} has no images in folders: one folder a class works, as {root}/cat/1.png")
    order = permuted(np.arange(len(files)), len(files), 0)
    part = part_of(len(files), data.held_out, split)
    if not len(part):
        raise DataError(f"{named(split, data.source)} has none of {len(files)} images; more images are needed")
    return ImageFolder(tuple(files[order[place]] for place in part), data)


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise DataError("images: needs the package Pillow: pip install 'samestep[images]' works") from None
