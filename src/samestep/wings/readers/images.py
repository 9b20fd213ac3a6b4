"""A folder of images as a dataset, one folder a class.

    flowers/daisy/1.jpg, flowers/rose/7.png        classes are numbered in the order of their names

The classes are those of the data that is trained on, also in sets that are held out: such a set may lack some of them.

An image is a float32 tensor [channels, size, size]: its shorter side resized, the middle cut out, and (pixel - mean) / std. In
training it may be changed at random (`data.augment`), by numbers that are a function of (seed, step, sample): the same in every
layout and after any resume. What is held out is never changed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from samestep.datasets.batch import FileSamples
from samestep.datasets.files import HELD_OUT_WORDS, TRAINED_WORDS, Split, existing, name_of_part, part_of, words_of
from samestep.datasets.order import permute_positions
from samestep.errors import DataError, did_you_mean, short_repr
from samestep.job_tables import DataTable

_SUFFIXES = {
    ".avif", ".bmp", ".dib", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".jpx", ".mpo", ".pbm", ".pgm", ".png",
    ".pnm", ".ppm", ".tif", ".tiff", ".webp",
}  # fmt: skip
_UNREAD = {
    ".arw", ".cr2", ".cr3", ".dcm", ".dng", ".exr", ".hdr", ".heic", ".heif", ".hif", ".jxl", ".nef", ".psd", ".svg", ".tga", ".xcf",
}  # fmt: skip
"""Suffixes of images that are not read, so that a class would lack them."""
_OF_SYSTEMS = {"$RECYCLE.BIN", "@eaDir", "__MACOSX", "__pycache__", "lost+found"}
"""Folders that systems make, besides those whose names begin with a dot."""
_PART = re.compile(r"[a-z]+[\W\d_]*(set|data|split|images|imgs)?[\W\d_]*")
_MOST_PIXELS = 2**26
"""The largest number of pixels of an image whose shorter side has been resized."""
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
    _pillow()
    source, folders = f"images:{path}", _class_folders(path)
    numbers = {name: number for number, name in enumerate(classes if classes is not None else folders)}
    root = existing(path, source)
    images = {name: _images_in(folder, frozenset({root.resolve()})) for name, folder in folders.items()}
    files = [(file, numbers.get(name, -1)) for name, image in images.items() for file in image]
    if not files and root.is_file():
        raise DataError("data-missing", f"{source} is a file. Use a folder with one folder per class")
    if not files:
        raise DataError(
            "data-missing", f"{source} has no images in folders. Use one folder a class, as {root}/cat/1.png"
        )
    if strange := next((file for file, number in files if number < 0), None):
        name = strange.relative_to(root).parts[0]
        raise DataError(
            "image-classes",
            f"{source} has the class {name!r}, which the data that is trained on lacks{did_you_mean(name, numbers)}; its classes are "
            f"{', '.join([*numbers][:8])}{' and others' * (len(numbers) > 8)}",
        )
    if classes is None and (empty := next((name for name, image in images.items() if not image), None)) is not None:
        raise DataError(
            "image-classes",
            f"{source} has the class {empty!r} without images. Add images to it, or remove the folder {folders[empty]}",
        )
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
        DataError: the folder is missing, or its folders are parts of a data set.
    """
    return tuple(_class_folders(path))


def _class_folders(path: str) -> dict[str, Path]:
    """Return the folders of the classes, by name and in order.

    Raises:
        DataError: the folder is missing or cannot be read, or its folders are parts of a data set.
    """
    root = existing(path, f"images:{path}")
    try:
        entries = sorted(path for path in root.iterdir() if not _is_hidden(path)) if root.is_dir() else []
        class_folders = {entry.name: entry for entry in entries if entry.is_dir()}
        if lost := next((entry for entry in entries if entry.is_symlink() and not entry.exists()), None):
            raise DataError("data-missing", f"{lost} is a broken link. Create its folder, or remove the link")
        _refuse_parts(path, root, class_folders)
    except OSError as error:
        raise DataError("data-unreadable", f"images:{path} cannot be read: {error.strerror}") from None
    return class_folders


def _is_hidden(entry: Path) -> bool:
    return entry.name.startswith(".") or entry.name in _OF_SYSTEMS


def _refuse_parts(path: str, root: Path, paths: dict[str, Path]) -> None:
    """Refuse folders that are parts of a data set, or in which there are such parts, in place of classes.

    Raises:
        DataError: they are, or one of them has them.
    """
    parts = _parts_among(paths)
    if parts and (len(parts) == len(paths) or (TRAINED_WORDS & _words_in(parts) and HELD_OUT_WORDS & _words_in(parts))):
        trained = next((name for name in parts if TRAINED_WORDS & words_of(Path(name))), parts[0])
        held_out = next((name for name in parts if name != trained), "")
        sets = f" with data.held_out_sets = {{ {held_out} = 'images:{root / held_out}' }}" if held_out else ""
        raise DataError(
            "data-missing",
            f"images:{path} has the folders {', '.join(parts)}, which are parts of a data set or classes of these names. For parts, "
            f"set data.source = 'images:{root / trained}'{sets}, and classes need other names",
        )
    for folder in paths.values():
        below = sorted(path.name for path in folder.iterdir() if path.is_dir() and not _is_hidden(path))
        inner = _parts_among(below)
        is_root = len(paths) == 1 and 0 < len(inner) == len(below)
        if is_root or (TRAINED_WORDS & _words_in(inner) and HELD_OUT_WORDS & _words_in(inner)):
            train = next((name for name in inner if TRAINED_WORDS & words_of(Path(name))), inner[0])
            works = (
                f"data.source = 'images:{folder / train}'" if len(paths) == 1 else "a folder of classes for each part"
            )
            raise DataError(
                "data-missing",
                f"images:{path} has the folders {', '.join(inner)} in {folder.name}, which are parts of a data set. Use {works}",
            )


def _parts_among(names: Collection[str]) -> list[str]:
    """Return the names that are those of parts of a data set: `train`, or where all are, `train2017` and `train_set`."""
    words = TRAINED_WORDS | HELD_OUT_WORDS
    exact = [name for name in names if name.lower() in words]
    are_all = all(_PART.fullmatch(name.lower()) and words_of(Path(name)) & words for name in names)
    return exact or (sorted(names) if len(names) > 1 and are_all else [])


def _words_in(names: Collection[str]) -> set[str]:
    """Return the words in several names."""
    return {word for name in names for word in words_of(Path(name))}


def _images_in(folder: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """Return the images below a folder, without hidden ones; links are followed, but not into a folder that they are in.

    Raises:
        DataError: a folder cannot be read, or an image is a link to nothing.
    """
    here, images = folder.resolve(), []
    if here in above:
        return []
    try:
        for entry in sorted(folder.iterdir()):
            if _is_hidden(entry):
                continue
            if entry.is_dir():
                images += _images_in(entry, above | {here})
            elif entry.suffix.lower() in _SUFFIXES:
                if entry.is_symlink() and not entry.exists():
                    raise DataError(
                        "data-missing", f"{entry} is a link to a missing file. Create the file, or remove the link"
                    )
                if entry.is_file():
                    images.append(entry)
            elif entry.suffix.lower() in _UNREAD:
                raise DataError(
                    "image-form",
                    f"{entry} is an image of a form that is not read. Save it as PNG or JPEG, or remove it",
                )
    except OSError as error:
        raise DataError("data-unreadable", f"{folder} cannot be read: {error.strerror}") from None
    return images


def read_image(path: Path, mode: Literal["RGB", "L"]) -> Any:
    """Return Pillow's image of a file, upright, in this mode.

    Raises:
        DataError: it is no image, is damaged, or has a form that is refused.
    """
    image = _pillow()
    try:
        with image.open(path, formats=_formats()) as file:
            if file.format in _OF_FRAMES and getattr(file, "is_animated", False):
                raise DataError(
                    "image-form",
                    f"{path} has several frames, and a sample is one image. Use each frame as a file of its own",
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
            raise DataError("data-unreadable", f"{path} cannot be read: {error.strerror}") from None
        if (form := _other_form(path)) != "":
            raise DataError("image-form", f"{path} is {form}") from None
        reason = " ".join(str(error).replace(f"{str(path)!r}", "it").split()) or type(error).__name__
        if type(error) is image.DecompressionBombError:
            reason = f"{reason[: reason.find(',')]}. Use a smaller image"
        raise DataError("data-damaged", f"{path} is not an image that Pillow reads: {short_repr(reason)}") from None


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
        return "a pointer of Git LFS: `git lfs pull` fetches the image itself"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"):
        return "a HEIC image, whatever its name is. Save it as JPEG or PNG"
    is_page = head.lstrip()[:1] == b"<"
    return "a page of HTML, an SVG, or other text, and no image of pixels. Copy it again, or save it as PNG" * is_page


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
                "image-form",
                f"{path} has floating-point numbers from {low:g} to {high:g}, and their range is not known. Use 0 to 1",
            )
        most = 1.0
    elif file.mode == "I" and file.format == "TIFF":
        raise DataError(
            "image-form",
            f"{path} has whole numbers of 32 bits or with a sign, and their range is not known. Use 8 or 16 bits",
        )
    else:
        most = float(2 ** (tags.get(_BITS) or (16,))[0] - 1)
    scaled = np.round(values.astype(np.float64) * (255 / most)).clip(0, 255).astype(np.uint8)
    if file.mode != "F" and tags.get(_MEANING) == 0:
        scaled = 255 - scaled
    return _pillow().fromarray(scaled)


def _pillow() -> Any:
    """Return Pillow's module of images.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise DataError(
            "package-missing", "images: needs the package Pillow. Use pip install 'samestep[images]'"
        ) from None


def _formats() -> tuple[str, ...]:
    """Return the formats that are read, of those that this Pillow was built with."""
    image = _pillow()
    image.init()
    return tuple(name for name in _FORMATS if name in image.OPEN)
