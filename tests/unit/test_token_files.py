"""Files of tokens of many makers: what is read is what numpy reads; what looks like something else is refused by name."""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.datasets import open_dataset
from samestep.datasets.columns import Shards
from samestep.errors import DataError
from samestep.job import Job
from tests import small
from tests.damaged_data import write_megatron

IDS = np.random.default_rng(7).integers(1, 30_000, 500)


def read(source: Path | str, **data: Any) -> Any:
    stream: Any = open_dataset(Job(data={"source": f"tokens:{source}", "held_out": 0.0, "sequence_length": 8, **data}))
    return np.asarray(stream.tokens[np.arange(len(stream.tokens))]).astype(np.int64)


def refusal(source: Path | str, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(source, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_of_a_folder_tokens_alone_are_read(tmp_path: Path) -> None:
    """NanoGPT's folder: text, a pickle and a script stand beside the tokens, and those for validation are not trained on."""
    IDS.astype("u2").tofile(tmp_path / "train.bin")
    (IDS + 1).astype("u2").tofile(tmp_path / "val.bin")
    (tmp_path / "input.txt").write_text("to be or not to be")
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}.")
    (tmp_path / "prepare.py").write_text("import numpy")
    assert np.array_equal(read(tmp_path), IDS)
    assert np.array_equal(read(tmp_path / "val.bin"), IDS + 1)
    (tmp_path / "train.bin").rename(tmp_path / "a.bin")  # without training data by name all are read
    assert np.array_equal(read(tmp_path), [*IDS, *(IDS + 1)])
    for name in ("a.bin", "val.bin"):
        (tmp_path / name).unlink()
    assert "holds no .bin and no .npy file. Use a file of another name by its own path" in refusal(tmp_path)
    IDS.astype("u2").tofile(tmp_path / "tokens.dat")
    assert np.array_equal(read(tmp_path / "tokens.dat"), IDS)


@pytest.mark.parametrize(
    "names",
    [
        ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
        ("train/0.npy", "validation/0.npy"),
        ("trainData.bin", "valData.bin"),
    ],
)
def test_validation_data_is_told_by_its_name(names: tuple[str, str], tmp_path: Path) -> None:
    for shift, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        tokens = (IDS + shift).astype("u2")
        np.save(path, tokens) if path.suffix == ".npy" else tokens.tofile(path)
    assert np.array_equal(read(tmp_path), IDS)
    assert np.array_equal(read((tmp_path / names[1]).parent), IDS + 1) or (tmp_path / names[1]).parent == tmp_path


@pytest.mark.parametrize("dtype", ["u1", "<i8"])
def test_an_index_of_megatron_says_what_its_tokens_are(dtype: str, tmp_path: Path) -> None:
    ids = IDS % 200
    write_megatron(tmp_path / "corpus.v2_text_document.bin", ids, dtype, random.Random(3), modes=dtype == "u1")
    for source in (tmp_path, *(tmp_path / f"corpus.v2_text_document{suffix}" for suffix in ("", ".bin", ".idx"))):
        assert np.array_equal(read(source), ids), source
    write_megatron(tmp_path / "more.bin", ids + 1, "<i4", random.Random(4))
    assert np.array_equal(read(tmp_path), [*ids, *(ids + 1)])


def test_sequences_of_megatron_are_read_where_the_index_says(tmp_path: Path) -> None:
    IDS.astype("<i4").tofile(tmp_path / "part.bin")
    spans = [(100, 30), (130, 20), (10, 0), (400, 60), (0, 5)]  # some in another order, with gaps between
    starts, lengths = (np.array(each) for each in zip(*spans, strict=True))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(spans), 3)
    (tmp_path / "part.idx").write_bytes(
        head
        + lengths.astype("<i4").tobytes()
        + (4 * starts).astype("<i8").tobytes()
        + np.array([0, 2, 5], "<i8").tobytes()
    )
    expected = np.concatenate([IDS[start : start + length] for start, length in zip(starts, lengths, strict=True)])
    assert np.array_equal(read(tmp_path / "part"), expected)
    stream: Any = open_dataset(
        Job(data={"source": f"tokens:{tmp_path / 'part'}", "held_out": 0.0, "sequence_length": 8})
    )
    assert isinstance(stream.tokens, Shards)
    assert len(stream.tokens.arrays) == 3


def test_damage_to_an_index_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path / "good.bin", IDS, "<i4", random.Random(3))
    index = (tmp_path / "good.idx").read_bytes()
    pointers = 34 + 4 * int.from_bytes(index[18:26], "little")
    kinds: dict[str, tuple[bytes, str]] = {
        "version": (index[:9] + struct.pack("<Q", 2) + index[17:], "is not an index of Megatron in version 1"),
        "kind": (index[:17] + b"\x07" + index[18:], "is not an index of Megatron in version 1 with whole numbers"),
        "count": (index[:18] + struct.pack("<Q", 2**60) + index[26:], "sequences and 3 documents, which are"),
        "cut": (index[:-3], "copy it again"),
        "short": (index[:20], "copy it again"),
        "length": (index[:34] + struct.pack("<i", -5) + index[38:], "is damaged: it has a sequence of -5 tokens"),
        "pointer": (
            index[:pointers] + struct.pack("<q", 2**62) + index[pointers + 8 :],
            "states that a sequence ends at byte",
        ),
        "other": (b"something else", "is not an index of Megatron"),
    }
    for name, (content, text) in kinds.items():
        shutil.copy(tmp_path / "good.bin", tmp_path / f"{name}.bin")
        (tmp_path / f"{name}.idx").write_bytes(content)
        found = refusal(tmp_path / name)
        assert text in found, name
        assert f"{tmp_path / name}." in found
    (tmp_path / "alone.idx").write_bytes(index)
    for source in (tmp_path / "alone", tmp_path / "alone.idx"):
        assert "is an index, and there is no alone.bin beside it" in refusal(source)
    (tmp_path / "good.bin").write_bytes((tmp_path / "good.bin").read_bytes()[:-40])
    assert "copy both again" in refusal(tmp_path / "good")


@pytest.mark.parametrize(("number", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_a_head_of_llm_c_is_no_token(number: int, version: int, dtype: str, tmp_path: Path) -> None:
    head = np.zeros(256, "<i4")
    head[:3] = number, version, len(IDS)
    path = tmp_path / "shard_train_0.bin"
    whole = head.tobytes() + IDS.astype(dtype).tobytes()
    path.write_bytes(whole)
    assert np.array_equal(read(path), IDS)
    assert np.array_equal(read(tmp_path), IDS)
    for content in (whole[:-6], whole + b"ab", whole[:500], whole[:4] + struct.pack("<i", 3) + whole[8:]):
        path.write_bytes(content)
        assert f"{path} has {len(content):,} bytes, and its head of llm.c's format {number}" in refusal(path)


WIDTHS = [("<u4", "uint16", "uint32"), ("<i8", "uint32", "int64")]


@pytest.mark.parametrize(("written", "given", "works"), WIDTHS)
def test_wider_numbers_are_told_by_their_zeros(written: str, given: str, works: str, tmp_path: Path) -> None:
    ids = IDS % 250 if given == "uint8" else IDS
    path = tmp_path / "train.bin"
    ids.astype(written).tofile(path)
    found = refusal(path, dtype=given)
    assert f"looks like {works} from token 0 on" in found
    assert f"Set data.dtype = '{works}'" in found
    assert np.array_equal(read(path, dtype=works), ids)
    raw = np.fromfile(path, given)
    np.save(tmp_path / "meant.npy", raw)  # who means it says so
    assert np.array_equal(read(tmp_path / "meant.npy"), raw)
    ids.astype(written).byteswap().tofile(path)
    assert "looks like " in refusal(path, dtype=given)


def test_ids_of_a_large_vocabulary_are_told_by_their_upper_halves(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 262_144, 300)
    ids.astype("<u4").tofile(tmp_path / "train.bin")
    assert "looks like uint32" in refusal(tmp_path / "train.bin")


def test_narrow_and_sparse_tokens_are_no_wider_ones(tmp_path: Path) -> None:
    few = np.array([5, 0] * 7)
    padded = np.concatenate([[9, 4, 7], np.zeros(500, int), [3, 5, 2, 1], np.zeros(500, int)])
    for number, (tokens, dtype) in enumerate(
        [
            (few, "uint16"),
            (IDS % 16, "uint16"),
            (np.arange(400) % 2 * 3 + IDS[:400] % 5, "uint32"),
            (padded, "uint16"),
            (IDS, "int64"),
            (IDS % 256, "uint16"),
        ]
    ):
        path = tmp_path / f"{number}.bin"
        tokens.astype(dtype).tofile(path)
        assert np.array_equal(read(path, dtype=dtype), tokens)
    (IDS % 256).astype(">u2").tofile(tmp_path / "big.bin")
    assert "looks like the other byte order" in refusal(tmp_path / "big.bin")


def test_heads_of_npy_say_what_they_hold(tmp_path: Path) -> None:
    for number, tokens in enumerate([IDS.astype(">u2"), IDS.astype("<u8"), np.asfortranarray(IDS.astype("i4"))]):
        np.save(tmp_path / f"{number}.npy", tokens)
        assert np.array_equal(read(tmp_path / f"{number}.npy"), IDS)
    (tmp_path / "plain").write_bytes((tmp_path / "0.npy").read_bytes())
    assert np.array_equal(read(tmp_path / "plain"), IDS)
    np.save(tmp_path / "cube.npy", IDS.reshape(5, 10, 10))
    assert "int64 [5, 10, 10]. Use whole numbers in one dimension, or in rows" in refusal(tmp_path / "cube.npy")
    np.save(tmp_path / "none.npy", np.zeros(0, "u2"))
    assert "is empty" in refusal(tmp_path / "none.npy")
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=IDS)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    whole = (tmp_path / "0.npy").read_bytes()
    (tmp_path / "huge.npy").write_bytes(whole.replace(b"(500,)", b"(2**63,)"[:6].replace(b"2**63,", b"10**9,")))
    (tmp_path / "vast.npy").write_bytes(whole.replace(b"(500,), }  ", b"(5000000,)}"))
    (tmp_path / "cut.npy").write_bytes(whole[:-9])
    (tmp_path / "head.npy").write_bytes(whole[:8] + b"\xff\xff" + whole[10:])
    (tmp_path / "nested.npy").write_bytes(whole.replace(b"(500,), }", b"((((((((("))
    for name in ("objects", "several", "huge", "vast", "cut", "head", "nested"):
        assert f"tokens:{tmp_path / name}.npy is " in refusal(tmp_path / f"{name}.npy"), name


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_follow_one_another_and_those_that_are_longer_by_one_are_samples(order: Any, tmp_path: Path) -> None:
    rows = IDS.reshape(50, 10)
    np.save(tmp_path / "rows.npy", np.asarray(rows, order=order))
    assert np.array_equal(read(tmp_path / "rows.npy"), IDS)
    samples = open_dataset(
        Job(data={"source": f"tokens:{tmp_path / 'rows.npy'}", "held_out": 0.1, "sequence_length": 9})
    )
    assert len(samples) == 45
    for index in (0, 44):
        assert samples[index]["input_ids"].tolist() == rows[index, :-1].tolist()
        assert samples[index]["labels"].tolist() == rows[index, 1:].tolist()
    (tmp_path / "more").mkdir()
    for number in range(2):
        np.save(tmp_path / "more" / f"{number}.npy", rows[25 * number : 25 * number + 25])
    several = open_dataset(Job(data={"source": f"tokens:{tmp_path / 'more'}", "held_out": 0.0, "sequence_length": 9}))
    assert [one["labels"][-1] for one in map(several.__getitem__, range(50))] == rows[:, -1].tolist()
    np.save(tmp_path / "more" / "2.npy", IDS)  # among other files rows are a part of the stream
    assert np.array_equal(read(tmp_path / "more", sequence_length=9), [*IDS, *IDS])


def test_wider_numbers_late_in_a_file_are_found(tmp_path: Path) -> None:
    first = np.random.default_rng(1).integers(1, 30_000, 300_001).astype("u2")
    for number, (before, count) in enumerate(((2_001, 2_000), (300_001, 200_000))):
        path = tmp_path / f"{number}.bin"
        later = np.random.default_rng(2).integers(1, 30_000, count).astype("<u4")
        path.write_bytes(first[:before].tobytes() + later.tobytes())
        assert re.search(r"looks like uint32 from token [\d,]{4,} on", refusal(path))


def test_a_bad_id_is_named_where_a_step_reads_it(tmp_path: Path) -> None:
    """Only blocks of a large file are compared with the vocabulary before a run."""
    from samestep.datasets import of_words

    for number in range(2):
        np.save(tmp_path / f"{number}.npy", (IDS % 250).astype("i4"))
    for bad in (-100, 256):
        np.save(tmp_path / "1.npy", np.where(np.arange(500) == 433, bad, IDS % 250).astype("i4"))
        for split, held_out in (("train", 0.0), ("held_out", 0.08)):
            job = Job(data={"source": f"tokens:{tmp_path}", "held_out": held_out, "sequence_length": 8})
            stream: Any = of_words(open_dataset(job, split), 256)  # type: ignore[arg-type]
            bad_at = next(place for place in range(len(stream)) if bad in stream.tokens[np.arange(9) + 8 * place])
            with pytest.raises(
                DataError, match=rf"1\.npy has the token id {bad} at token 433. Use ids from 0 to 255, the ids with"
            ):
                stream.read(np.array([0, bad_at]))
            assert stream.read(np.array([0]))["input_ids"].shape == (1, 8)


@pytest.mark.parametrize("mark", [b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"PAR1", b"MMIDIDX\x00\x00", b"GGUF"])
def test_other_formats_are_named(mark: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes((mark + bytes(range(200)))[:112])
    assert f"tokens:{tmp_path / 'a.bin'} is packed, or of another format" in refusal(tmp_path / "a.bin")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.bin")
    assert f"tokens:{tmp_path / 'train.bin'} cannot be read: it is not a regular file" in refusal(
        tmp_path / "train.bin"
    )
    assert "holds no file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["to be or not to be, that is the question\n" * 30, "naïve — 日本語 text " * 40, '{"text": "a line"}\n' * 50],
)
def test_text_is_no_numbers(text: str, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text(text + " " * (len(text.encode()) % 2), encoding="utf-8")
    assert f"is text: data.source = 'text:{tmp_path / 'input.txt'}' encodes it" in refusal(tmp_path / "input.txt")
    assert bytes(read(tmp_path / "input.txt", dtype="uint8").astype("u1")).decode().rstrip(" ") == text.rstrip(" ")


def test_ids_without_an_embedding_are_named_with_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", (IDS % 250).astype("i4"))
    keys = [f"--set={key}={value}" for key, value in small.SMALL.items() if not key.startswith("data.")]
    words = [*keys, f"--set=data.source=tokens:{tmp_path}", "--set=data.sequence_length=8"]
    np.save(tmp_path / "1.npy", np.where(np.arange(500) == 480, 999, IDS % 250).astype("i4"))
    assert small.main("train", *words) == 2
    assert (
        "1.npy has token ids up to 999, but model.config.vocab_size = 256. Use vocab_size = 1000, or another data.dtype"
        in capsys.readouterr().err
    )
    np.save(tmp_path / "1.npy", np.where(np.arange(500) == 480, -1, IDS % 250).astype("i4"))
    assert small.main("train", *words) == 2
    assert "1.npy has the token id -1. Use ids from 0" in capsys.readouterr().err
    (IDS % 250).astype("u2").tofile(tmp_path / "1.npy")
    (tmp_path / "1.npy").rename(tmp_path / "1.bin")
    assert small.main("train", *words, "--set=data.dtype=uint32") == 2
    assert "1.bin has token ids up to" in (said := capsys.readouterr().err)
    assert "or another data.dtype if it is wrong" in said
