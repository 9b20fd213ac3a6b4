"""Each source of data on small files, what it refuses, and that packed documents do not see each other."""

import json
import pickle
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from samestep.datasets import batches, open_dataset, open_tokenizer, read_samples
from samestep.datasets.source import function_part
from samestep.datasets.tokenizers import ByteTokenizer
from samestep.errors import DataError
from samestep.job import Job
from samestep.job_tables import DataTable
from samestep.wings.readers.chat import opening
from samestep.wings.readers.documents import NOT_COUNTED


def job_of(source, train=None, **data):
    data = {"sequence_length": 4, "held_out": 0.0, **data}
    return Job(data={"source": str(source), **data}, train=train or {})


def ids(text):
    return list(text.encode())


def row(dataset, index):
    return {name: tensor.tolist() for name, tensor in dataset[index].items()}


def write_lines(path, objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return f"jsonl:{path}"


# --- token streams ---------------------------------------------------------------------------------------------------


def test_a_stream_is_cut_into_samples_of_shifted_labels(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    dataset = open_dataset(job_of(f"text:{tmp_path / 'a.txt'}"))
    assert len(dataset) == 2
    assert row(dataset, 0) == {"input_ids": ids("abcd"), "labels": ids("bcde")}
    assert row(dataset, 1) == {"input_ids": ids("efgh"), "labels": ids("fghi")}
    read = dataset.read(np.array([1, 0, 1]))
    assert read["labels"].dtype == torch.int64
    assert read["labels"].tolist() == [ids("fghi"), ids("bcde"), ids("fghi")]
    assert {name: tuple(tensor.shape) for name, tensor in dataset.read(np.array([], dtype=np.int64)).items()} == {
        "input_ids": (0, 4),
        "labels": (0, 4),
    }
    with pytest.raises(IndexError):
        dataset[2]
    assert len(list(dataset)) == 2


def test_a_folder_of_text_is_read_in_the_order_of_names(tmp_path):
    for name, text in {"b.txt": "B1", "a/z.txt": "Z2", "a/c.md": "C3", ".hidden": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    dataset = open_dataset(job_of(f"text:{tmp_path}"))
    assert bytes(dataset.tokens) == b"C3\nZ2\nB1"


def test_train_and_held_out_never_overlap_and_leave_nothing_between(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    job = job_of(f"tokens:{path}", held_out=0.1)
    train, held_out = open_dataset(job), open_dataset(job, "held_out")
    assert np.concatenate([train.tokens, held_out.tokens]).tolist() == list(range(1000))
    assert len(held_out.tokens) == 100
    assert isinstance(train.tokens, np.memmap)


def test_topics_are_english_and_code_and_fall_back_to_stdlib(monkeypatch, tmp_path):
    topics = open_dataset(job_of("topics", sequence_length=64))
    assert len(topics) > 4000
    assert b"Python" in bytes(topics.tokens)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    paths = {**sysconfig.get_paths(), "stdlib": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    for name in ("b.py", "a/__init__.py", "test/no.py", "site-packages/no.py", "a/__pycache__/no.py", "idlelib/no.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    with pytest.warns(UserWarning, match="stdlib"):
        fallen = open_dataset(job_of("topics"))
    assert bytes(fallen.tokens) == b"# a/__init__.py\n# b.py"
    assert bytes(open_dataset(job_of("stdlib")).tokens) == b"# a/__init__.py\n# b.py"


# --- documents -------------------------------------------------------------------------------------------------------


def test_documents_are_packed_and_no_label_crosses_a_boundary(tmp_path):
    source = write_lines(tmp_path / "d.jsonl", [{"text": "abcdef"}, {"text": ""}, {"text": "xy"}])
    dataset = open_dataset(job_of(source))
    assert len(dataset) == 2
    assert row(dataset, 0) == {"input_ids": ids("abcd"), "labels": ids("bcde"), "position_ids": [0, 1, 2, 3]}
    assert row(dataset, 1) == {
        "input_ids": ids("efxy"),
        "labels": [*ids("f"), 0, *ids("y"), 0],
        "position_ids": [0, 1, 0, 1],
    }
    assert dataset.read(np.array([], dtype=np.int64))["position_ids"].shape == (0, 4)


def test_documents_are_held_out_whole(tmp_path):
    source = write_lines(tmp_path / "d.jsonl", [{"body": f"{number:04}"} for number in range(10)])
    job = job_of(source, held_out=0.2, text_field="body")
    train, held_out = open_dataset(job), open_dataset(job, "held_out")
    assert len(train) == 8
    assert [row(held_out, index)["input_ids"] for index in (0, 1)] == [ids("0008"), ids("0009")]


def test_a_text_field_that_no_row_has_is_told(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A long reply"}]}
    told = "data.text_field = {!r} is in no row: only conversations are read"
    for rows, field, is_told in (
        ([chat, chat], "texxt", True),
        ([chat, chat], "doc.body", True),
        ([chat, chat], "text", False),
        ([chat, {"body": "A text of its own"}], "body", False),
    ):
        source = write_lines(tmp_path / "d.jsonl", rows)
        dataset = open_dataset(job_of(source, sequence_length=4, text_field=field))
        assert list(dataset.remarks) == [told.format(field)] * is_told


def test_a_saved_hugging_face_dataset(tmp_path):
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"text": ["abcd", "efgh", "ijkl"]})
    dataset.save_to_disk(tmp_path / "plain")
    DatasetDict({"train": dataset}).save_to_disk(tmp_path / "dict")
    DatasetDict({"test": dataset}).save_to_disk(tmp_path / "other")
    for name in ("plain", "dict"):
        job = job_of(f"hf:{tmp_path / name}", held_out=0.3)
        assert row(open_dataset(job), 1) == {
            "input_ids": ids("efgh"),
            "labels": [*ids("fgh"), 0],
            "position_ids": [0, 1, 2, 3],
        }
        assert row(open_dataset(job, "held_out"), 0)["input_ids"] == ids("ijkl")
    with pytest.raises(DataError, match=r"no split 'train' but test. Use hf:.*test"):
        open_dataset(job_of(f"hf:{tmp_path / 'other'}"))
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    Dataset.from_dict({"messages": chats}).save_to_disk(tmp_path / "chat")
    chat = open_dataset(job_of(f"hf:{tmp_path / 'chat'}"))
    assert [label for label in chat.labels.tolist() if label != NOT_COUNTED] == [*ids("b"), 0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="save_to_disk"):
        open_dataset(job_of(f"hf:{tmp_path / 'empty'}"))


def test_hugging_face_data_without_its_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"samestep\[hf-data\]"):
        open_dataset(job_of(f"hf:{tmp_path}"))


# --- tokenizers ------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tokenizer(folder, config=None):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat sat"] * 10, trainer)
    tokenizer.enable_truncation(3)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        )
    return str(folder)


def test_bytes_go_there_and_back():
    tokenizer = open_tokenizer(job_of("topics"))
    assert tokenizer == ByteTokenizer()
    assert tokenizer.vocab_size == 256
    assert tokenizer.decode(tokenizer.encode("naïve →")) == "naïve →"
    assert tokenizer.decode(tokenizer.encode("→")[:2]) == "\ufffd"


def test_a_tokenizer_folder(tmp_path):
    tokenizer = open_tokenizer(job_of("topics", tokenizer=write_tokenizer(tmp_path / "t")))
    text = "the cat sat on the mat, naïve →"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat sat on")) < 14
    assert tokenizer.vocab_size > 258
    assert (tokenizer.begin_ids, tokenizer.end_id) == ((), 1)  # </s> is one of the usual ends
    pieces = ["the c", "at sat", "", " on"]
    shared_out = tokenizer.encode_pieces(pieces)
    assert [token for piece in shared_out for token in piece] == tokenizer.encode("the cat sat on")
    assert [tokenizer.decode(piece) for piece in shared_out] == ["the", " cat sat", "", " on"]


def add_begin(folder, *names):
    """Let the tokenizer's post-processor put tokens before a text, and one of its own behind it."""
    from tokenizers import Tokenizer, processors

    core = Tokenizer.from_file(f"{folder}/tokenizer.json")
    single = " ".join((*names, "$A", "</s>"))
    tokens = [(name, core.token_to_id(name)) for name in {*names, "</s>"}]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    core.save(f"{folder}/tokenizer.json")


@pytest.mark.parametrize(
    ("settings", "processed", "begin"),
    [
        ({"add_bos_token": True}, (), ()),  # a begin token that is named and not added, as GPT-2's
        ({}, ("<s>", "<s>"), (0, 0)),
        ({"add_bos_token": False}, ("<s>",), (0,)),
    ],
)
def test_documents_begin_as_the_tokenizer_itself_begins_a_text(tmp_path, settings, processed, begin):
    from transformers import AutoTokenizer

    source = write_lines(tmp_path / "d.jsonl", [{"text": "the cat"}, {"text": "sat"}])
    words = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    end = {"__type": "AddedToken", "content": "</s>", **words}
    config = {"bos_token": "<s>", "eos_token": end, **settings}
    folder = write_tokenizer(tmp_path / "t", config)
    if processed:
        add_begin(folder, *processed)
    dataset = open_dataset(job_of(source, tokenizer=folder, sequence_length=1))
    tokenizer = open_tokenizer(job_of(source, tokenizer=folder))
    assert tokenizer.begin_ids == begin
    first, second = tokenizer.encode("the cat"), tokenizer.encode("sat")
    assert dataset.tokens.tolist() == [*begin, *first, *begin, *second]
    masks = [NOT_COUNTED] * max(0, len(begin) - 1)
    assert dataset.labels.tolist() == [*masks, *first[1 - bool(begin) :], 1, *masks, *second[1 - bool(begin) :], 1]
    ids = AutoTokenizer.from_pretrained(folder)("the cat", truncation=False).input_ids
    assert ids[: len(begin) + len(first)] == [*begin, *first]


def test_without_an_end_the_last_token_predicts_nothing(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 9}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    source = write_lines(tmp_path / "d.jsonl", [{"text": "a b"}, {"text": "b"}])
    dataset = open_dataset(job_of(source, tokenizer=str(tmp_path), sequence_length=1))
    assert dataset.tokens.tolist() == [0, 1, 1]
    assert dataset.labels.tolist() == [1, NOT_COUNTED, NOT_COUNTED]
    assert open_tokenizer(job_of(source, tokenizer=str(tmp_path))).vocab_size == 10


def test_a_chat_template_is_followed(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    folder = write_tokenizer(tmp_path / "t", config)
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "the mat"},
    ]
    source = write_lines(tmp_path / "d.jsonl", [{"messages": messages}])
    dataset = open_dataset(job_of(source, tokenizer=folder, sequence_length=1))
    tokenizer = open_tokenizer(job_of(source, tokenizer=folder))
    text = "<s>[user] the cat</s>[assistant] sat</s>[user] on</s>[assistant] the mat"
    assert tokenizer.decode(dataset.tokens.tolist()) == text
    assert tokenizer.decode(opening("the cat", tokenizer)) == "<s>[user] the cat</s>[assistant] "
    counted = [label for label in dataset.labels.tolist() if label != NOT_COUNTED]
    assert tokenizer.decode(counted) == " sat</s> the mat</s>"  # the token " sat" begins before the reply


def test_a_folder_that_only_transformers_reads(tmp_path):
    folder = write_tokenizer(tmp_path / "t", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"})
    saved = json.loads((tmp_path / "t" / "tokenizer.json").read_text())["model"]
    (tmp_path / "t" / "vocab.json").write_text(json.dumps(saved["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in saved["merges"])
    (tmp_path / "t" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    expected = open_tokenizer(job_of("topics", tokenizer=folder)).encode("the cat sat")
    (tmp_path / "t" / "tokenizer.json").unlink()
    tokenizer = open_tokenizer(job_of("topics", tokenizer=folder))
    assert tokenizer.encode("the cat sat") == expected
    assert tokenizer.decode(expected) == "the cat sat"
    assert tokenizer.end_id == 1
    assert tokenizer.vocab_size > 258


@pytest.mark.parametrize("name", ["nowhere", "empty", "broken", "file"])
def test_what_is_no_tokenizer_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    (tmp_path / "file").write_text("")
    text = {
        "nowhere": "neither 'bytes' nor a folder: there is no nowhere",
        "empty": "holds no tokenizer",
        "broken": "is not a tokenizer",
        "file": "is a file; give the folder",
    }
    with pytest.raises(DataError, match=text[name]) as caught:
        open_tokenizer(job_of("topics", tokenizer=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


# --- the user's own datasets -----------------------------------------------------------------------------------------

MODULE = """
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, i):
        return torch.tensor([float(i)]), i * i

class Fast(Squares):
    def read(self, indices):
        return {"x": torch.from_numpy(indices)}

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())

def empty():
    return []
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.remove(str(tmp_path))  # open_dataset must find the working directory by itself
    name = f"own_{tmp_path.name}"
    Path(f"{name}.py").write_text(MODULE)
    return name


def test_a_function_of_the_users(own):
    job = job_of(f"{own}:Squares", held_out=0.2)
    train, held_out = open_dataset(job), open_dataset(job, "held_out")
    assert (len(train), len(held_out)) == (8, 2)
    inputs, targets = read_samples(held_out, np.array([1, 0]))
    assert inputs.tolist() == [[9.0], [8.0]]
    assert targets.tolist() == [81, 64]
    inputs, targets = read_samples(train, [])
    assert (tuple(inputs.shape), tuple(targets.shape), targets.dtype) == ((0, 1), (0,), torch.int64)
    assert train[3][1] == 9
    with pytest.raises(IndexError):
        held_out[2]
    fast = open_dataset(job_of(f"{own}:Fast", held_out=0.2), "held_out")
    assert read_samples(fast, np.array([0, 1]))["x"].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("function", "text"),
    [("Endless", "Use a map-style dataset"), ("Squarez", "did you mean 'Squares'"), ("empty", "has none of 0 samples")],
)
def test_what_is_no_dataset_is_refused(own, function, text):
    with pytest.raises(DataError, match=text):
        open_dataset(job_of(f"{own}:{function}"))


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_indexed_by_its_fields_and_holds_the_samples_of_its_indices():
    job = Job(train={"global_batch": 4, "steps": 3})
    x, y = torch.randn(12, 2), torch.arange(12)
    for batch in batches(TensorDataset(x, y), job):
        points, labels = batch
        assert labels.tolist() == batch.indices.tolist()
        assert torch.equal(points, x[labels])
    fields = [{"x": x[i], "labels": y[i]} for i in range(12)]
    loader = DataLoader(fields, batch_size=4)
    assert [batch["labels"].tolist() for batch in batches(loader, job)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    stream = (one for one in fields)
    assert torch.cat([batch["x"] for batch in batches(stream, job)]).equal(x)
    with pytest.raises(KeyError, match="inputs"):
        next(batches(fields, job))["inputs"]


def test_an_empty_dataset_has_no_batches():
    with pytest.raises(DataError, match="no samples"):
        batches([], Job())


def test_datasets_travel_to_other_processes(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    dataset = pickle.loads(pickle.dumps(open_dataset(job_of(f"text:{tmp_path / 'a.txt'}"))))
    assert row(dataset, 0)["labels"] == ids("bcde")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_missing_path_names_what_is_near(tmp_path):
    (tmp_path / "corpus.txt").write_text("abcdefgh")
    with pytest.raises(DataError, match=r"no corpsu\.txt .*did you mean 'corpus\.txt'"):
        open_dataset(job_of(f"text:{tmp_path / 'corpsu.txt'}"))
    with pytest.raises(DataError, match=r"there are corpus\.txt"):
        open_dataset(job_of(f"jsonl:{tmp_path / '123'}"))
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        open_dataset(job_of(f"hf:{tmp_path / 'nowhere' / 'x'}"))
    for source in "images", "tokens", "text":
        with pytest.raises(DataError, match=rf"^{source}:\S*/nothing: there is no nothing"):
            open_dataset(job_of(f"{source}:{tmp_path / 'nothing'}"))
        with pytest.raises(DataError, match=f"^{source}: has no path; write {source}:PATH"):
            open_dataset(job_of(f"{source}:"))
    with pytest.raises(DataError, match=r"holds no \.jsonl or \.ndjson or \.json file; it has 'corpus\.txt'"):
        open_dataset(job_of(f"jsonl:{tmp_path}"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("topic", "did you mean 'topics'"),
        ("txt:corpus/a.txt", "did you mean 'text'"),
        ("topics:", "unknown data source"),
        ("", "the sources are topics"),
    ],
)
def test_an_unknown_source_names_those_there_are(source, text):
    with pytest.raises(DataError, match=text):
        open_dataset(job_of(source))


def test_data_that_is_too_short_says_what_would_work(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    source = f"text:{tmp_path / 'a.txt'}"
    with pytest.raises(DataError, match=r"has 10 of 10 tokens; .* 64 needs 65. Set data\.sequence_length = 9"):
        open_dataset(job_of(source, sequence_length=64))
    assert len(open_dataset(job_of(source, sequence_length=9))) == 1
    with pytest.raises(DataError, match=r"the held-out part of .* has 1 of 10 tokens; .*Use .*more data"):
        open_dataset(job_of(source, held_out=0.1), "held_out")
    with pytest.raises(DataError, match=r"data\.held_out = 0 leaves no samples to evaluate"):
        open_dataset(job_of(source), "held_out")
    with pytest.raises(DataError, match=r"no split 'heldout' .did you mean 'held_out'"):
        open_dataset(job_of(source), "heldout")
    lines = write_lines(tmp_path / "d.jsonl", [{"text": "abc"}, {"text": "de"}])
    with pytest.raises(DataError, match=r"has 5 tokens in 2 of 2 documents; .*Set .*sequence_length = 5"):
        open_dataset(job_of(lines, sequence_length=6))
    assert len(open_dataset(job_of(lines, sequence_length=5))) == 1
    with pytest.raises(DataError, match=r"has 0 tokens in 0 of 2 documents"):
        open_dataset(job_of(lines, held_out=0.1), "held_out")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a"', r"d\.jsonl:3: not JSON: .* column"),
        (b'{"text": "\xff"}', r"d\.jsonl:3: not UTF-8"),
        (b"[1]", r'd\.jsonl:3: a line must be an object such as \{"text": "\.\.\."\}, not list'),
        (b'{"texts": "a"}', r"d\.jsonl:3: neither 'text' nor 'messages' \(did you mean 'texts'\?\); it has 'texts'"),
        (b'{"text": 3}', r"d\.jsonl:3: 'text' is int, not text"),
        (b'{"messages": []}', r"d\.jsonl:3: messages must be a list of messages"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', r'd\.jsonl:3: no message has the role "assistant"'),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, text):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=text):
        open_dataset(job_of(f"jsonl:{path}"))


def test_bad_token_and_text_files_are_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    np.save(tmp_path / "floats.npy", np.zeros(5))
    (tmp_path / "bad.npy").write_bytes(b"no array")
    for source, text in {
        "tokens:odd.bin": "3 bytes, which is not a whole number of uint16",
        "tokens:empty.bin": "is empty",
        "tokens:floats.npy": "Use whole numbers in one dimension, or in rows",
        "tokens:bad.npy": r"is not a \.npy array",
        "tokens:": "no path",
        "text:latin.txt": r"is not UTF-8 text \(byte 2\)",
    }.items():
        word, _, name = source.partition(":")
        with pytest.raises(DataError, match=text):
            open_dataset(job_of(f"{word}:{tmp_path / name if name else ''}"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="the folder holds no file"):
        open_dataset(job_of(f"tokens:{tmp_path / 'folder'}"))


def test_a_data_set_itself_may_be_named(tmp_path: Path) -> None:
    """`data.source = "module:name"` names a function or a class that makes the data set, or the data set."""
    (tmp_path / "named_data.py").write_text(
        "class Squares:\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, index): return {'x': index * index}\n"
        "dataset = Squares()\n"
        "def made(): return dataset\n"
        "number = 3\n"
    )
    for name in ("dataset", "Squares", "made"):
        table = DataTable(source=f"named_data:{name}", held_out=0.0)
        assert function_part(table, "train", str(tmp_path))[3] == {"x": 9}
    for name, text in (("number", "is a int, not a function"), ("datase", "named_data has no function 'datase'")):
        with pytest.raises(DataError, match=text):
            function_part(DataTable(source=f"named_data:{name}"), "train", str(tmp_path))
