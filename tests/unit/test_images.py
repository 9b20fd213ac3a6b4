"""A folder of images: what is read is what Pillow reads, upright and in 8 bits; classes have their training set's numbers."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from torch import nn

from samestep.datasets import open_dataset, open_held_out
from samestep.errors import DataError, ModelError
from samestep.job import Job
from samestep.training.workload import _check_fit
from samestep.wings.readers.images import read_image

PIXELS = np.random.default_rng(5).integers(0, 256, (9, 14, 3), np.uint8)
GREY = PIXELS[..., 0]


def dataset(folder: Path, **data: Any) -> Any:
    return open_dataset(Job(data={"source": f"images:{folder}", "image_size": 8, "held_out": 0.0, **data}))


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_camera_notes(orientation: int, suffix: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(PIXELS).save(path, exif=exif)
    found = np.asarray(read_image(path, "RGB"))
    with Image.open(path) as file:
        assert np.array_equal(found, np.asarray(ImageOps.exif_transpose(file)))
    assert found.shape == ((14, 9, 3) if orientation > 4 else (9, 14, 3))
    if suffix in ("png", "tif"):  # without a loss, and by hand
        turned = {
            1: PIXELS, 2: PIXELS[:, ::-1], 3: PIXELS[::-1, ::-1], 4: PIXELS[::-1], 5: PIXELS.swapaxes(0, 1),
            6: np.rot90(PIXELS, -1), 7: PIXELS[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(PIXELS),
        }  # fmt: skip
        assert np.array_equal(found, turned[orientation])


def test_an_orientation_that_stands_behind_the_pixels_is_seen(tmp_path: Path) -> None:
    """A PNG may have its EXIF behind the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "a.png", exif=exif)
    content = (tmp_path / "a.png").read_bytes()
    start = content.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(content[start : start + 4], "big")
    end = content.index(b"IEND") - 4
    (tmp_path / "a.png").write_bytes(content[:start] + content[stop:end] + content[start:stop] + content[end:])
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.png", "RGB")), np.rot90(PIXELS, -1))


def _tiff(path: Path, values: Any, bits: int, order: str = "<", meaning: int = 1, kind: int = 1) -> None:
    """Write a TIFF of one strip by hand."""
    height, width = values.shape
    data = values.tobytes()
    tags = [
        (256, width), (257, height), (258, bits), (259, 1), (262, meaning), (273, 8), (277, 1), (278, height),
        (279, len(data)), (339, kind),
    ]  # fmt: skip
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    head = (b"II*\x00" if order == "<" else b"MM\x00*") + struct.pack(f"{order}I", 8 + len(data))
    path.write_bytes(head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_deep_images_are_scaled_by_their_range(mode: Any, tmp_path: Path) -> None:
    """Each is what the same image with 8 bits is."""
    deep = GREY.astype(np.uint16) * 257
    Image.fromarray(GREY).save(tmp_path / "plain.png")
    Image.fromarray(deep).save(tmp_path / "16.png")
    Image.fromarray(deep).save(tmp_path / "16.tif")
    _tiff(tmp_path / "16_big.tif", deep.astype(">u2"), 16, ">")
    expected = np.asarray(read_image(tmp_path / "plain.png", mode))
    for path in tmp_path.iterdir():
        assert np.array_equal(np.asarray(read_image(path, mode)), expected), path.name
    colours = np.zeros((9, 14, 3), ">u2") + PIXELS.astype(np.uint16) * 257
    rows = b"".join(b"\0" + row.tobytes() for row in colours)
    (tmp_path / "48.png").write_bytes(_png(14, 9, 16, 2, zlib.compress(rows)))
    assert np.array_equal(np.asarray(read_image(tmp_path / "48.png", "RGB")), PIXELS)


def _png(width: int, height: int, depth: int, colours: int, data: bytes, before: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "P with transparency"])
def test_other_modes_are_what_pillow_converts(mode: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    if mode == "P with transparency":
        mode, settings = "P", {"transparency": bytes(range(0, 250, 5))}
    suffix = {"CMYK": "tif", "YCbCr": "tif"}.get(mode, "png")
    picture = Image.fromarray(PIXELS).convert(mode)
    picture.save(tmp_path / f"a.{suffix}", **settings)
    with Image.open(tmp_path / f"a.{suffix}") as file:
        file.load()
        file.info.pop("transparency", None)
        assert np.array_equal(np.asarray(read_image(tmp_path / f"a.{suffix}", "RGB")), np.asarray(file.convert("RGB")))
        assert np.array_equal(np.asarray(read_image(tmp_path / f"a.{suffix}", "L")), np.asarray(file.convert("L")))


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "MPO"])
def test_of_several_frames_the_first_one_is_read(kind: str, tmp_path: Path) -> None:
    frames = [Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1].copy())]
    frames[0].save(tmp_path / "film", kind, save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "still", kind)
    assert np.array_equal(read_image(tmp_path / "film", "RGB"), read_image(tmp_path / "still", "RGB"))


def _harmful(folder: Path) -> dict[str, bytes]:
    buffer = folder / "buffer"
    Image.fromarray(PIXELS).save(buffer, "TIFF")
    bomb = bytearray(buffer.read_bytes())
    for tag in (256, 257):
        at = bomb.index(
            struct.pack("<HH", tag, 4) if struct.pack("<HH", tag, 4) in bomb else struct.pack("<HH", tag, 3)
        )
        bomb[at : at + 12] = struct.pack("<HHII", tag, 4, 1, 60_000)
    Image.fromarray(PIXELS).save(buffer, "JPEG")
    cut = buffer.read_bytes()[:-20]
    text = zlib.compress(bytes(2**28), 9)
    content = b"words\0\0" + text
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))
    _tiff(buffer, np.full((9, 14), 1.5, "<f4"), 32, kind=3)
    floats = buffer.read_bytes()
    _tiff(buffer, np.full((9, 14), 70_000, "<i4"), 32, kind=2)
    rows = zlib.compress(b"\0" * (9 * 43))
    return {
        "bomb.tif": bytes(bomb), "bomb.png": _png(200_000, 200_000, 8, 2, rows), "text.png": _png(14, 9, 8, 2, rows, chunk),
        "cut.jpg": cut, "floats.tif": floats, "whole.tif": buffer.read_bytes(),
        "script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "empty.png": b"",
    }  # fmt: skip


def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path: Path) -> None:
    reasons = {
        "bomb.tif": "exceeds limit", "bomb.png": "exceeds limit", "text.png": "too large", "cut.jpg": "truncated",
        "floats.tif": "numbers have an unknown range", "whole.tif": "numbers have an unknown range", "script.png": "cannot be read as an image",
        "empty.png": "cannot be read as an image",
    }  # fmt: skip
    for name, content in _harmful(tmp_path).items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"(?s){name} .*{reasons[name]}") as caught:
            read_image(tmp_path / name, "RGB")
        assert "\n" not in str(caught.value)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for part, names in {"train": ["ant", "bee", "cow"], "val": ["ant", "cow"], "other": ["ant", "bea"]}.items():
        for number, name in enumerate(names):
            (tmp_path / "data" / part / name / "2024").mkdir(parents=True)
            Image.fromarray(np.full((9, 9), 10 * number, np.uint8)).save(
                tmp_path / "data" / part / name / "2024" / "A.PNG"
            )
    return tmp_path / "data"


def test_classes_have_the_numbers_of_the_training_set(folders: Path) -> None:
    sets = {"val": f"images:{folders / 'val'}"}
    data: dict[str, Any] = {
        "source": f"images:{folders / 'train'}",
        "held_out": 0.0,
        "held_out_sets": sets,
        "image_size": 8,
    }
    assert sorted(label for _, label in open_dataset(Job(data=data))) == [0, 1, 2]
    (folders / "val" / "bee").mkdir()  # a set that is held out may lack images of a class
    assert sorted(label for _, label in open_held_out(Job(data=data))["val"]) == [0, 2]
    mixture = {**data, "source": "mixture", "mixture": {data["source"]: 1.0, sets["val"]: 1.0}, "held_out": 0.5}
    assert {label for _, label in open_dataset(Job(data={**mixture, "held_out": 0.0})).parts[1]} == {0, 2}  # type: ignore[attr-defined]
    data["held_out_sets"] = {"other": f"images:{folders / 'other'}"}
    with pytest.raises(
        DataError, match=r"held_out_sets.other: .*has the class 'bea', which the .* lacks \(did you mean 'bee'\?\); its"
    ):
        open_held_out(Job(data=data))


@pytest.mark.parametrize(
    "names", [("train", "val"), ("Training", "valid", "test"), ("train", "test", "notes"), ("test",)]
)
def test_parts_of_a_data_set_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        Image.fromarray(GREY).save(tmp_path / name / "1.png")
    with pytest.raises(
        DataError,
        match=rf"which are parts of a data set or classes of these names. For parts, set data.source = 'images:\S+/{names[0]}'",
    ):
        dataset(tmp_path)
    for name in names:
        (tmp_path / name).rename(tmp_path / f"{name}-ing")
    assert len(dataset(tmp_path)) == len(names)
    (tmp_path / "train").mkdir()  # beside others it is a vehicle
    Image.fromarray(GREY).save(tmp_path / "train" / "1.png")
    assert len(dataset(tmp_path)) == len(names) + 1


@pytest.mark.parametrize("name", ["a.avif", "a.jfif", "A.JPE", "a.jp2", "a.ppm", "a.pgm"])
def test_every_form_that_is_read_is_read_by_its_usual_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    kind = {"jfif": "JPEG", "JPE": "JPEG"}.get(name.rpartition(".")[2])
    Image.fromarray(GREY if name.endswith("pgm") else PIXELS).save(tmp_path / "cat" / name, kind)
    assert len(dataset(tmp_path)) == 1
    assert dataset(tmp_path)[0][0].shape == (3, 8, 8)


def test_what_a_class_would_silently_lack_is_named(tmp_path: Path) -> None:
    for name in ("cat", "dog", "__MACOSX", ".git", "@eaDir"):
        (tmp_path / name).mkdir()
        Image.fromarray(GREY).save(tmp_path / name / "1.png")
    assert dataset(tmp_path).classes == ("cat", "dog")
    for name in ("b.heic", "b.SVG", "b.dng"):
        (tmp_path / "cat" / name).write_bytes(b"x")
        with pytest.raises(
            DataError, match=rf"cat/{name} is .* an image of a form that is not read. Save it as PNG or JPEG"
        ):
            dataset(tmp_path)
        (tmp_path / "cat" / name).unlink()
    (tmp_path / "emu").mkdir()
    with pytest.raises(DataError, match=r"has the class 'emu' without images. Add images to it, or remove the folder"):
        dataset(tmp_path)
    (tmp_path / "emu").rmdir()
    (tmp_path / "cat" / "whole").symlink_to(tmp_path)  # a dog is no cat
    assert len(dataset(tmp_path)) == 2
    with pytest.raises(DataError, match=r"1\.png has no folders. Use one folder a class"):
        dataset(tmp_path / "cat" / "1.png")


def test_links_are_followed_and_one_to_nothing_is_named(folders: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    (linked / "ant").mkdir(parents=True)
    (linked / "ant" / "a.png").symlink_to(folders / "train" / "ant" / "2024" / "A.PNG")
    (linked / "bee").symlink_to(folders / "train" / "bee")
    (linked / "bee" / "again").symlink_to(folders / "train" / "bee")  # a circle is gone through once
    (linked / "ant" / "more").symlink_to(folders / "train" / "cow")
    assert len(dataset(linked)) == 3
    (linked / "ant" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match=r"lost.png is a link to a missing file"):
        dataset(linked)


def test_a_narrow_image_is_no_flood(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.zeros((1, 60_000), np.uint8)).save(tmp_path / "a" / "narrow.png")
    assert dataset(tmp_path)[0][0].shape == (3, 8, 8)
    with pytest.raises(
        DataError, match=r"narrow.png has 60000 x 1 pixels, and 13440000 x 224 with a shorter side of 224"
    ):
        dataset(tmp_path, image_size=224)[0]


def test_more_classes_than_the_model_has_are_refused(folders: Path) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(num_labels=2)  # type: ignore[assignment]
    job, images = Job(data={"source": f"images:{folders / 'train'}"}), dataset(folders / "train")
    with pytest.raises(
        ModelError, match=r"has 3 classes, but model.config.num_labels = 2. Set model.config.num_labels = 3"
    ):
        _check_fit(job, model, images, images[0])
