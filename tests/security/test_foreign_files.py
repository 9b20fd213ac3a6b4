"""Folders, links and files that somebody else has prepared: nothing is overwritten, nothing hangs, and each is refused in one line."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import shutil
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from samestep.cli import _visible
from samestep.errors import CheckpointError, InputError, JobError, ModelError
from samestep.models import weight_files
from samestep.output import durable_files
from samestep.output.durable_files import write_whole
from samestep.runtime.checkpoints import manifests, torch_checkpoint
from samestep.training import run_folder
from tests import small

STORED = Path(__file__).parent.parent / "crashes" / "stored_checkpoint" / "step-000002"
ANOTHER = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another user")


# -- run folders -----------------------------------------------------------------------------------


@is_root
@pytest.mark.parametrize(
    "name", [".lock", ".job.toml.draft", ".layout.txt.draft", "job.toml", "metrics.jsonl", "anything"]
)
def test_a_link_of_another_user_is_not_followed(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    os.lchown(folder / name, ANOTHER, ANOTHER)
    assert small.train("--out", folder, "--steps", "1") == 2
    said = capfd.readouterr().err
    assert "is a link of user 65534. Use a folder of your own" in said or "holds a run already" in said
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", [".lock", ".job.toml.draft", ".layout.txt.draft", ".summary.json.draft"])
def test_locks_and_drafts_do_not_follow_links(name: str, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    if name == ".lock":
        with pytest.raises(JobError, match="symbolic link"), run_folder.claim_folder(folder, is_new=True):
            pass
    else:
        write_whole(folder / name.removeprefix(".").removesuffix(".draft"), "new")
        assert (folder / name.removeprefix(".").removesuffix(".draft")).read_text() == "new"
        assert not (folder / name).is_symlink()
    assert victim.read_text() == "mine"


@is_root
def test_a_folder_of_another_user_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.chown(folder, ANOTHER, ANOTHER)
    said = pytest.warns(UserWarning, match="belongs to user 65534, who can change the files of this run")
    with said, run_folder.claim_folder(folder, is_new=True):
        pass


def test_a_lock_is_open_to_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with run_folder.claim_folder(tmp_path / "run", is_new=True):
            assert stat.S_IMODE((tmp_path / "run" / ".lock").stat().st_mode) == 0o600
    finally:
        os.umask(old)


# -- files that never end --------------------------------------------------------------------------


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ENDLESS: dict[str, Callable[[Path], None]] = {
    "device": lambda path: path.symlink_to("/dev/zero"),
    "random device": lambda path: path.symlink_to("/dev/urandom"),
    "pipe": lambda path: os.mkfifo(path),
    "linked pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to(path.with_name("pipe")))[1],
    "sparse": _sparse,
    "folder": lambda path: path.mkdir(),
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep tables": lambda path: path.write_text('{"a":' * 100_000),
}


@pytest.mark.parametrize("how", ENDLESS)
def test_a_manifest_that_never_ends_is_damaged(how: str, tmp_path: Path) -> None:
    folder = tmp_path / STORED.name
    shutil.copytree(STORED, folder)
    (folder / "manifest.json").unlink()
    ENDLESS[how](folder / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing or damaged"):
        manifests.read_manifest(folder)


@pytest.mark.parametrize("how", ["device", "pipe", "linked pipe", "folder"])
def test_a_checkpoints_file_that_never_ends_is_damaged(how: str, tmp_path: Path) -> None:
    folder = tmp_path / STORED.name
    shutil.copytree(STORED, folder)
    manifest = manifests.read_manifest(folder)
    part = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    part.unlink()
    ENDLESS[how](part)
    with pytest.raises(CheckpointError, match=f"{part.name} is missing or damaged"):
        manifests.check_digests(manifest, folder)


@pytest.mark.parametrize("how", ENDLESS)
@pytest.mark.parametrize("name", [weight_files.CONFIG, weight_files.INDEX, weight_files.ONE_FILE])
def test_a_models_file_that_never_ends_is_refused(name: str, how: str, tmp_path: Path) -> None:
    ENDLESS[how](tmp_path / name)
    with pytest.raises(ModelError, match=r"^model\.source: [^\n]*$"):
        weight_files.configuration(tmp_path) if name == weight_files.CONFIG else weight_files.tensors(tmp_path)


@pytest.mark.parametrize(
    "files", [{"a": 5}, {"a": None}, {"a": ["x"]}, {"a": ""}, {"a": "\0"}, {"a": ".."}, [], 7, {"a": {}}]
)
def test_an_odd_index_is_refused(files: Any, tmp_path: Path) -> None:
    (tmp_path / weight_files.INDEX).write_text(json.dumps({"weight_map": files}))
    if files == []:
        files = {"a": "missing"}
        (tmp_path / weight_files.INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"^model\.source: [^\n]*$"):
        weight_files.tensors(tmp_path)


def test_what_is_regular_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert durable_files.read(link, 5) == b"12345"
    with pytest.raises(ValueError, match="it holds more than 4 bytes"):
        durable_files.read(path, 4)


# -- metadata of torch's checkpoints ---------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that torch has written."""
    folder = tmp_path_factory.mktemp("dcp") / "one"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch saves in one process
        dcp.save(
            {"model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3)}}, checkpoint_id=folder, no_dist=True
        )
    return folder


def _doubled(times: int = 60) -> Any:
    found: Any = ("x",)
    for _ in range(times):
        found = (found, found)
    return found


def _doubled_list(times: int = 60) -> Any:
    found: Any = ["x"]
    for _ in range(times):
        found = [found, found]
    return found


def _metadata(stored: Path) -> Any:
    return pickle.loads((stored / ".metadata").read_bytes())


HARMS: dict[str, Callable[[Any], None]] = {
    "path": lambda m: m.planner_data.update({"model.w": _doubled_list()}),
    "path of tuples": lambda m: m.planner_data.update({"model.w": ("model", _doubled())}),
    "path of floats": lambda m: m.planner_data.update({"model.w": ("model", 1.5)}),
    "size": lambda m: setattr(m.state_dict_metadata["model.w"], "size", _doubled_list()),
    "negative size": lambda m: setattr(m.state_dict_metadata["model.w"], "size", (-1, 4)),
    "huge size": lambda m: setattr(m.state_dict_metadata["model.w"], "size", (1 << 80, 4)),
    "no size": lambda m: setattr(m.state_dict_metadata["model.w"], "size", None),
    "dtype": lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", _doubled_list()),
    "offsets": lambda m: setattr(m.state_dict_metadata["model.w"].chunks[0], "offsets", _doubled_list()),
    "chunks": lambda m: setattr(m.state_dict_metadata["model.w"], "chunks", _doubled_list()),
    "place": lambda m: [setattr(one, "relative_path", _doubled_list()) for one in m.storage_data.values()],
    "outside": lambda m: [setattr(one, "relative_path", "../x") for one in m.storage_data.values()],
    "length": lambda m: [setattr(one, "length", _doubled_list()) for one in m.storage_data.values()],
    "no tables": lambda m: setattr(m, "state_dict_metadata", _doubled_list()),
    "no places": lambda m: setattr(m, "storage_data", {}),
}


@pytest.mark.parametrize("harm", HARMS)
def test_metadata_that_is_huge_to_print_is_refused(harm: str, stored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shutil.copytree(stored, folder)
    found = _metadata(stored)
    HARMS[harm](found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError) as refused:
        torch_checkpoint.entries(folder, ["w", "b"])
    assert len(str(refused.value)) < 600


def _keyed(opcodes: bytes) -> bytes:
    """Return a pickle in which KEY is a tuple that holds itself twice, sixty times over."""
    put, get, pair = b"q", b"h", b"\x86"
    doubled = b"X\x01\x00\x00\x00x" + b"".join(put + bytes([n]) + get + bytes([n]) + pair for n in range(60))
    return b"\x80\x04" + opcodes.replace(b"KEY", doubled) + b"."


@pytest.mark.parametrize("opcodes", [b"}KEYNs", b"}(KEYNu", b"(KEYNd", b"\x8f(KEY\x90", b"(KEY\x91"])
def test_a_key_that_takes_for_ever_to_hash_is_refused(opcodes: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(_keyed(opcodes))
    with pytest.raises(CheckpointError, match=r"is not metadata of torch\.distributed\.checkpoint"):
        torch_checkpoint.entries(tmp_path, ["w"])


def test_what_torch_writes_is_read(stored: Path) -> None:
    found = torch_checkpoint.entries(stored, ["w", "b"])
    assert torch.equal(found["w"].read(), torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("shape", [(6000,), (80, 75), (1, 6000), (18, 18, 18), ()])
def test_chunks_of_a_grid_cover_a_tensor_once(shape: tuple[int, ...]) -> None:
    places = [*itertools.product(*map(range, shape))]
    chunks = [torch_checkpoint.TorchChunk(Path(), 0, 0, place, (1,) * len(shape)) for place in places]
    random.Random(0).shuffle(chunks)
    assert torch_checkpoint._cover(chunks, shape)
    if len(shape) and len(chunks) > 1:
        assert not torch_checkpoint._cover([*chunks[1:], chunks[1]], shape), "one is there twice, another is missing"
        assert not torch_checkpoint._cover(chunks[1:], shape)


def test_a_compressed_chunk_is_not_unpacked(stored: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shutil.copytree(stored, folder)
    found = _metadata(stored)
    file = folder / "__0_0.distcp"
    with zipfile.ZipFile(folder / "bomb", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\0" * (1 << 24))
    bytes_of = (folder / "bomb").read_bytes()
    file.write_bytes(bytes_of)
    for one in found.storage_data.values():
        one.offset, one.length = 0, len(bytes_of)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"is damaged where .* begins: ValueError it is compressed"):
        torch_checkpoint.entries(folder, ["w", "b"])["w"].read()


def _mutations(data: bytes, count: int) -> Iterator[bytes]:
    draw = random.Random(0)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            place = draw.randrange(len(changed))
            if draw.random() < 0.2:
                del changed[place : place + draw.randrange(1, 40)]
            else:
                changed[place] = draw.randrange(256)
        yield bytes(changed)


def test_mutated_metadata_runs_nothing_and_is_read_or_refused_in_a_line(stored: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "one", list[str]()
    shutil.copytree(stored, folder)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for data in _mutations((stored / ".metadata").read_bytes(), 600):
        (folder / ".metadata").write_bytes(data)
        try:
            for entry in torch_checkpoint.entries(folder, ["w", "b"]).values():
                entry.read()
        except InputError as error:
            said.append(str(error))
    assert len(said) > 300
    assert not any("\n" in one for one in said)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


# -- the terminal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\rb", "\x07", "\x9b2J", "\u202egnp.exe", "\x00"])
def test_control_characters_of_an_error_are_escaped(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert small.main("train", "--set", f"model.source=hf:llama{text}X") == 2
    said = capfd.readouterr().err
    assert all(one.isprintable() or one == "\n" for one in said)
    assert _visible("plain text, \u00fc and \u4e2d\n\tall") == "plain text, \u00fc and \u4e2d\n\tall"
