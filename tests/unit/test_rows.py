"""Files of documents as people have them: packed, one array, nested, and damaged in ways that are drawn."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.datasets import open_dataset
from samestep.errors import DataError
from tests.damaged_rows import job_of, zstd


def tokens_of(source: str, **data: Any) -> bytes:
    job = job_of(source)
    return bytes(open_dataset(job.model_copy(update={"data": job.data.model_copy(update=data)})).tokens)  # type: ignore[attr-defined]


LINES = b'{"text": "a"}\n{"text": "\xc3\xa9"}\n'


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst", "d.jsonl.bz2", "d.jsonl.xz", "d.jsonl"])
def test_packed_lines_are_unpacked_in_a_folder_and_alone(tmp_path: Path, name: str) -> None:
    import bz2
    import lzma

    packs = {"gz": gzip.compress, "zst": zstd, "bz2": bz2.compress, "xz": lzma.compress}
    end = name.rpartition(".")[2]
    (tmp_path / name).write_bytes(packs[end](LINES) if end in packs else LINES)
    (tmp_path / "e.jsonl").write_bytes(LINES)
    assert tokens_of(f"jsonl:{tmp_path / name}") == "aé".encode()
    assert tokens_of(f"jsonl:{tmp_path}") == "aéaé".encode()


def test_one_array_gives_its_elements_and_its_damage_is_named(tmp_path: Path) -> None:
    for content, text in (
        ('[{"text": "a"},\n {"text" "c"}]', r"d\.jsonl: not JSON: Expecting ':' delimiter: line 2"),
        ('[{"text": "a"}]\n[{"text": "b"}]', r"d\.jsonl: not JSON: Extra data"),
        ('[{"text": "a"},\n3]', r"d\.jsonl element 1: a line must be an object"),
    ):
        (tmp_path / "d.jsonl").write_text(content)
        with pytest.raises(DataError, match=text):
            tokens_of(f"jsonl:{tmp_path / 'd.jsonl'}")


def test_a_field_within_another_is_read_in_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow as pa
    from datasets import Dataset
    from pyarrow import parquet

    rows = [{"doc": {"text": "ab", "more": {"id": 1}}, "id": 1}, {"doc": {"text": "c", "more": {"id": 2}}, "id": 2}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    for source in (f"jsonl:{tmp_path / 'd.jsonl'}", f"parquet:{tmp_path / 'd.parquet'}", f"hf:{tmp_path / 'd'}"):
        assert tokens_of(source, text_field="doc.text") == b"abc"
        with pytest.raises(DataError, match=r"(jsonl:1|row 0): neither 'doc.txt' nor 'messages'.*it has 'doc'"):
            tokens_of(source, text_field="doc.txt")
    (tmp_path / "e.jsonl").write_text('{"doc.text": "x"}\n')
    assert tokens_of(f"jsonl:{tmp_path / 'e.jsonl'}", text_field="doc.text") == b"x"


def test_only_columns_that_are_read_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["a"], "picture": [b"\x89PNG"], "doc": [{"x": 1}]}), tmp_path / "d.parquet")
    seen: list[Any] = []
    whole = parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        parquet.ParquetFile, "iter_batches", lambda self, *a, **k: seen.append(k["columns"]) or whole(self, *a, **k)
    )
    assert tokens_of(f"parquet:{tmp_path / 'd.parquet'}") == b"a"
    assert seen == [["text"]]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.jsonl.zst").write_bytes(zstd(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"d\.jsonl\.zst needs the library pyarrow. Use pip install"):
        tokens_of(f"jsonl:{tmp_path / 'd.jsonl.zst'}")


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("a.jsonl", "b.JSONL", "c.ndjson", "dataset_info.json"), "abc"),
        (("a.json", "b.json.gz"), "ab"),
        (("c4-train.0.json.gz", "c4-validation.0.json.gz"), "c"),
        (("train.jsonl", "test.jsonl", "more/validData.jsonl"), "t"),
        (("a.jsonl", "test.jsonl"), "at"),
    ],
)
def test_a_folder_gives_the_lines_that_are_trained_on(names: tuple[str, ...], read: str, tmp_path: Path) -> None:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        line = json.dumps({"text": path.name[0].lower()}).encode()
        path.write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    assert tokens_of(f"jsonl:{tmp_path}").decode() == read
    if len(names) == 3:
        assert tokens_of(f"jsonl:{tmp_path / 'test.jsonl'}") == b"t"


def test_parts_are_left_out_of_tables_and_of_texts_that_are_all_parts(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet", "TRAIN-2.pq"):
        parquet.write_table(pa.table({"text": [name[:2]]}), tmp_path / "data" / name)
    assert tokens_of(f"parquet:{tmp_path}") == b"TRtr"
    (tmp_path / "texts").mkdir()
    for name in ("wiki.train.tokens", "wiki.test.tokens", "wiki.valid.tokens"):
        (tmp_path / "texts" / name).write_text(name[5:7])
    assert tokens_of(f"text:{tmp_path / 'texts'}") == b"tr"
    (tmp_path / "texts" / "notes.txt").write_text("no")  # as among the sources of a program, a test is a text
    assert tokens_of(f"text:{tmp_path / 'texts'}") == b"no\nte\ntr\nva"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_text_in_another_encoding_is_no_text(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("to be".encode("utf-8-sig"))
    assert tokens_of(f"text:{tmp_path}") == b"to be"
    (tmp_path / "a.txt").write_bytes("to be".encode(encoding))
    with pytest.raises(DataError, match=r"a\.txt:1 is not UTF-8 text \(byte [01]\)"):
        tokens_of(f"text:{tmp_path}")


def test_a_pattern_a_link_and_a_doubled_column_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "lost.jsonl").symlink_to(tmp_path / "nowhere")
    for source, text in (
        ("lost.jsonl", "lost.jsonl is a broken link"),
        ("*.jsonl", "patterns of files are not supported. Use the folder .*"),
    ):
        with pytest.raises(DataError, match=text):
            tokens_of(f"jsonl:{tmp_path / source}")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet row 0: the file has two columns 'text'"):
        tokens_of(f"parquet:{tmp_path / 'd.parquet'}")
