"""Conversations: a template is given all that a message has, what counts is what the assistant says, and rows of several layouts are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.datasets import open_dataset, open_tokenizer
from samestep.errors import DataError
from samestep.job import Job
from samestep.wings.readers.documents import NOT_COUNTED

Rows = list[dict[str, Any]]

OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% if mood %}({{ mood }}){% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "{% if m.name %}[{{ m.name }} {{ m.tool_call_id }} {{ m.weight }}]{% endif %}<|im_end|>\n{% endfor %}" + OPEN
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
)
"""A template that marks the last reply, as Qwen3's does."""
PROMPTS = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>{{ m.content.split('</think>')[-1] }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
"""A template that prompts for thoughts and writes none, as DeepSeek's does."""
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    + OPEN
)
NEWLINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
IGNORES = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + OPEN
)
JOINS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name + c.function.arguments }}</call>{% endfor %}<|im_end|>\n{% endfor %}" + OPEN
)
"""A template that takes a call's arguments as text, as DeepSeek's does."""
NEEDS = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}" + CHATML
WORDS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of a tokenizer of letters for each template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    core = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(list(WORDS))
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    found = {}
    for name, template in (("chatml", CHATML), ("tools", TOOLS), ("thinks", THINKS), ("prompts", PROMPTS), ("parts", PARTS), ("newlines", NEWLINES), ("ignores", IGNORES), ("joins", JOINS), ("needs tools", NEEDS),
                           ("first", "<|im_start|>{{ messages[0].content }}<|im_end|>\n" + OPEN), ("nothing", "hello")):  # fmt: skip
        place = tmp_path_factory.mktemp(name)
        core.save(str(place / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "bos_token": "<s>",
            "chat_template": template,
        }
        (place / "tokenizer_config.json").write_text(json.dumps(config))
        found[name] = str(place)
    return found


def read(folder: str, rows: Rows, path: Path, **data: Any) -> tuple[str, str, int]:
    """The text of the documents, what of it counts, and how many documents there are."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(data={"source": f"jsonl:{path}", "tokenizer": folder, "sequence_length": 1, "held_out": 0.0, **data})
    dataset, tokenizer = open_dataset(job), open_tokenizer(job)
    counted = [label for label in dataset.labels.tolist() if label != NOT_COUNTED]  # type: ignore[attr-defined]
    return tokenizer.decode(dataset.tokens.tolist()), tokenizer.decode(counted), len(dataset.starts)  # type: ignore[attr-defined]


def written(folder: str, messages: Rows, **words: Any) -> str:
    """The text that transformers writes of a conversation."""
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **words))


def said(*contents: Any) -> Rows:
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


CALL = {"id": "7", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
CALLED: Rows = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
    {"role": "tool", "content": "4", "tool_call_id": "7", "name": "f", "weight": 0.5},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "so"},
]


@pytest.mark.parametrize("packed", [False, True])
def test_a_template_is_given_tools_calls_and_every_key(folders: dict[str, str], tmp_path: Path, packed: bool) -> None:
    tools: Any = [TOOL]
    row = {"tools": json.dumps(tools) if packed else tools, "messages": CALLED, "text": None}
    text, counted, _ = read(folders["tools"], [row], tmp_path / "d.jsonl")
    assert text == written(folders["tools"], CALLED, tools=tools)
    call = '<call>{"name": "f", "arguments": {"a": 1, "b": null}}</call><|im_end|>'
    assert counted == f"{call}<think>so</think>It is 4.<|im_end|>"
    assert "[f 7 0.5]" in text
    words = read(
        folders["tools"], [{"messages": said("q", "a"), "chat_template_kwargs": {"mood": "good"}}], tmp_path / "e.jsonl"
    )
    assert words[0].startswith("(good)")


def test_a_table_gives_a_template_no_keys_that_a_row_lacks(folders: dict[str, str], tmp_path: Path) -> None:
    from datasets import Dataset

    other = {"id": "8", "type": "function", "function": {"name": "g", "arguments": {"c": "x"}}}
    rows = [
        {"messages": CALLED},
        {"messages": [*said("q"), {"role": "assistant", "content": None, "tool_calls": [other]}]},
    ]
    Dataset.from_list([{"messages": json.loads(json.dumps(row["messages"]))} for row in rows]).to_parquet(
        str(tmp_path / "d.parquet")
    )
    job = Job(
        data={
            "source": f"parquet:{tmp_path / 'd.parquet'}",
            "tokenizer": folders["tools"],
            "sequence_length": 1,
            "held_out": 0.0,
        }
    )
    text = open_tokenizer(job).decode(open_dataset(job).tokens.tolist())  # type: ignore[attr-defined]
    assert '<call>{"name": "f", "arguments": {"a": 1}}</call>' in text
    assert '<call>{"name": "g", "arguments": {"c": "x"}}</call>' in text


@pytest.mark.parametrize("name", ["chatml", "parts"])
def test_contents_in_parts_are_what_the_template_reads(folders: dict[str, str], tmp_path: Path, name: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = read(folders[name], [{"messages": said(parts, "c")}], tmp_path / "d.jsonl")
    assert found == read(folders[name], [{"messages": said("ab", "c")}], tmp_path / "e.jsonl")
    assert "ab" in found[0]
    with pytest.raises(DataError, match=r"d\.jsonl:1: the content of message 0 has a part of type 'image_url'"):
        read(folders[name], [{"messages": said([{"type": "image_url", "image_url": "x"}], "c")}], tmp_path / "d.jsonl")


def test_what_counts_ends_with_the_token_that_ends_the_turn(folders: dict[str, str], tmp_path: Path) -> None:
    rows: Rows = [{"messages": said("q", "a ", "r", "b")}]
    text, counted, _ = read(folders["chatml"], rows, tmp_path / "d.jsonl")
    assert text == written(folders["chatml"], rows[0]["messages"])  # without the begin token: the template writes none
    assert counted == "a <|im_end|>b<|im_end|>"
    assert read(folders["newlines"], rows, tmp_path / "d.jsonl")[1] == "a \nb\n"  # there the newline itself ends a turn
    assert read(folders["prompts"], rows, tmp_path / "d.jsonl")[1] == "a </s>b</s>"
    assert read("bytes", rows, tmp_path / "d.jsonl")[1] == "a \0b\0"


def test_a_template_that_marks_the_last_reply_is_learned_by_turns(folders: dict[str, str], tmp_path: Path) -> None:
    rows: Rows = [{"messages": said("q", "a", "r", "b", "s")}]
    with pytest.raises(
        DataError, match=r'd\.jsonl:1: .* writes earlier messages differently .*data\.turns = "each".*"last"'
    ):
        read(folders["thinks"], rows, tmp_path / "d.jsonl")
    each = read(folders["thinks"], rows, tmp_path / "d.jsonl", turns="each")
    assert each[0] == "".join(written(folders["thinks"], rows[0]["messages"][:end]) for end in (2, 4))
    assert each[1:] == ("<think>\n\n</think>\n\na<|im_end|><think>\n\n</think>\n\nb<|im_end|>", 2)
    last = read(folders["thinks"], rows, tmp_path / "d.jsonl", turns="last")
    assert last == (written(folders["thinks"], rows[0]["messages"][:4]), "<think>\n\n</think>\n\nb<|im_end|>", 1)
    alone = read(folders["thinks"], [{"messages": said("q", "a")}], tmp_path / "d.jsonl")
    assert alone[1:] == ("<think>\n\n</think>\n\na<|im_end|>", 1)
    plain = read("bytes", rows, tmp_path / "d.jsonl", turns="each")
    assert plain[1:] == ("a\0b\0", 2)


def test_a_null_that_the_template_would_write_as_a_word_is_no_text(folders: dict[str, str], tmp_path: Path) -> None:
    messages: Rows = [*said("q"), {"role": "assistant", "content": None, "reasoning_content": "None"}]
    assert read(folders["newlines"], [{"messages": messages}], tmp_path / "d.jsonl")[1] == "\n"
    messages = [*said("q"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    with pytest.raises(DataError, match="does not write 'tool_calls' of message 1"):
        read(folders["chatml"], [{"messages": messages}], tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="'tool_calls' of message 1 is written by a chat template alone"):
        read("bytes", [{"messages": messages}], tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="'tools' is written by a chat template alone"):
        read("bytes", [{"messages": said("q", "a"), "tools": [TOOL]}], tmp_path / "d.jsonl")


LAYOUTS: list[tuple[dict[str, Any], Rows]] = [
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}, [{"role": "system", "content": "s"}, *said("q", "a")]),
    ({"conversations": said("q", "a")}, said("q", "a")),
    ({"messages": [{"from": "Human", "value": "q"}, {"from": "function", "value": "4"}, {"role": "GPT", "value": "a"}]}, [*said("q"), {"role": "tool", "content": "4"}, {"role": "assistant", "content": "a"}]),
    ({"messages": [{"role": "human", "content": "q"}, {"role": "model", "content": "a"}]}, said("q", "a")),
    ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}, "text": ""}, said("q", "a")),
    ({"conversations": json.dumps(said("q", "a"))}, said("q", "a")),
    ({"instruction": "do", "input": "x", "output": "y", "text": None}, said("do\nx", "y")),
    ({"instruction": "do", "input": "", "output": "y", "history": [["q", "a"]]}, said("q", "a", "do", "y")),
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(CALL["function"])}, {"from": "observation", "value": "4"}, {"from": "gpt", "value": "a"}]},
        [*said("q"), {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL["function"]}]}, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "a"}],
    ),
]  # fmt: skip


def test_other_layouts_are_conversations(folders: dict[str, str], tmp_path: Path) -> None:
    found = read(folders["tools"], [row for row, _ in LAYOUTS], tmp_path / "d.jsonl")
    assert found == read(folders["tools"], [{"messages": messages} for _, messages in LAYOUTS], tmp_path / "e.jsonl")
    assert found[0] == "".join(written(folders["tools"], messages) for _, messages in LAYOUTS)


def test_of_a_prompt_nothing_counts(folders: dict[str, str], tmp_path: Path) -> None:
    found = read(folders["chatml"], [{"prompt": "the cat", "completion": " sat"}], tmp_path / "d.jsonl")
    assert found == ("<s>the cat sat", " sat</s>", 1)
    row = {"prompt": said("q", "a", "r"), "completion": [{"role": "assistant", "content": "b"}]}
    text, counted, _ = read(folders["tools"], [row], tmp_path / "d.jsonl")
    assert text == written(folders["tools"], said("q", "a", "r", "b"))
    assert counted == "b<|im_end|>"


@pytest.mark.parametrize(
    ("name", "row", "names"),
    [
        ("chatml", {"messages": said("q", "a"), "tools": [TOOL]}, ["'tools'"]),
        ("chatml", {"messages": said("q", "a"), "documents": [{"title": "t"}]}, ["'documents'"]),
        ("chatml", {"messages": [*said("q"), {**said("q", "a")[1], "reasoning_content": "so"}]}, ["'reasoning_content'"]),
        ("parts", {"messages": [*said("q"), {**said("q", "a")[1], "thinking": "so"}], "tools": [TOOL]}, ["'thinking'", "'tools'"]),
        ("prompts", {"messages": [{"role": "system", "content": "s"}, *said("q", "<think>so</think>a")]}, []),
        ("ignores", {"messages": [{"role": "system", "content": "be brief"}, *said("q", "a")]}, ["messages of the role 'system'"]),
        ("tools", {"messages": CALLED, "tools": [TOOL]}, []),
        ("thinks", {"messages": said("q", "a")}, []),
        ("bytes", {"messages": [{"role": "system", "content": "s"}, *said("q", "a")]}, []),
    ],
)  # fmt: skip
def test_what_a_template_does_not_use_is_said_once_by_name(folders: dict[str, str], tmp_path: Path, name: str, row: dict[str, Any], names: list[str]) -> None:  # fmt: skip
    path = tmp_path / "d.jsonl"
    read(folders.get(name, "bytes"), [{"text": "x"}, row, row], path)
    job = Job(
        data={"source": f"jsonl:{path}", "tokenizer": folders.get(name, "bytes"), "sequence_length": 1, "held_out": 0.4}
    )
    for split in ("train", "held_out"):
        remarks = open_dataset(job, split).remarks  # type: ignore[attr-defined, arg-type]
        assert list(remarks) == [
            f"{path}:2: the tokenizer's chat template does not use {one}: what is learned lacks them" for one in names
        ]


def test_a_template_that_writes_no_reply_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    for name in ("first", "nothing"):
        with pytest.raises(
            DataError, match=r"d\.jsonl:1: the tokenizer's chat template does not write the replies of the assistant"
        ):
            read(folders[name], [{"messages": said("q", "a")}], tmp_path / "d.jsonl")


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}])
def test_a_reply_that_is_not_to_count_does_not(folders: dict[str, str], tmp_path: Path, flag: dict[str, Any]) -> None:
    messages = said("q", "a", "r", "b")
    messages[1].update(flag)
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a", **flag},
        {"from": "human", "value": "r"},
        {"from": "gpt", "value": "b"},
    ]
    for row in ({"messages": messages}, {"conversations": turns}):
        assert read(folders["chatml"], [row], tmp_path / "d.jsonl")[:2] == (
            written(folders["chatml"], said("q", "a", "r", "b")),
            "b<|im_end|>",
        )
        assert read(folders["chatml"], [row], tmp_path / "d.jsonl", turns="each")[2] == 1
        assert read("bytes", [row], tmp_path / "d.jsonl")[1] == "b\0"
    messages[3].update(flag)
    with pytest.raises(DataError, match='no message has the role "assistant" and counts, so nothing'):
        read(folders["chatml"], [{"messages": messages}], tmp_path / "d.jsonl")
    with pytest.raises(DataError, match=r"message 1 has the weight 0\.5. Use 0, which does not count, or 1"):
        read(
            folders["chatml"], [{"messages": [*said("q"), {**said("q", "a")[1], "weight": 0.5}]}], tmp_path / "d.jsonl"
        )


def test_arguments_that_are_a_text_of_json_are_given_as_an_object(folders: dict[str, str], tmp_path: Path) -> None:
    """OpenAI's form has a text, and templates write objects; one that asks for a text is given it."""

    def called(arguments: Any) -> Rows:
        return [
            *said("q"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
            },
        ]

    for text, right in (('{"a": 1}', {"a": 1}), ("{}", {}), ("not json", "not json"), ("[1]", "[1]")):
        found = read(folders["tools"], [{"messages": called(text)}], tmp_path / "d.jsonl")
        assert found[0] == written(folders["tools"], called(right))
    found = read(folders["joins"], [{"messages": called('{"a": 1}')}], tmp_path / "d.jsonl")
    assert '<call>f{"a": 1}</call>' in found[0]


def test_white_space_behind_a_turn_is_found_where_a_template_needs_tools(
    folders: dict[str, str], tmp_path: Path
) -> None:
    row = {"messages": said("q", "a", "r", "b"), "tools": [TOOL]}
    assert read(folders["needs tools"], [row], tmp_path / "d.jsonl")[1] == "a<|im_end|>b<|im_end|>"
    assert read(folders["needs tools"], [row], tmp_path / "d.jsonl", turns="last")[1] == "b<|im_end|>"


def test_a_field_may_hold_the_messages_and_a_row_their_system(folders: dict[str, str], tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    whole = read(
        folders["chatml"], [{"messages": [{"role": "system", "content": "s"}, *said("q", "a")]}], tmp_path / "d.jsonl"
    )
    for row, field in (
        ({"dialog": said("q", "a"), "system": "s"}, "dialog"),
        ({"chat": {"turns": [{"from": "system", "value": "s"}, {"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]}}, "chat.turns"),
        ({"messages": said("q", "a"), "system": "s", "text": None}, "text"),
        ({"messages": [{"role": "system", "content": "s"}, *said("q", "a")], "system": "s"}, "text"),
    ):  # fmt: skip
        assert read(folders["chatml"], [row], tmp_path / "d.jsonl", text_field=field) == whole
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
        job = Job(
            data={
                "source": f"parquet:{tmp_path / 'd.parquet'}",
                "tokenizer": folders["chatml"],
                "text_field": field,
                "sequence_length": 1,
                "held_out": 0.0,
            }
        )
        assert open_tokenizer(job).decode(open_dataset(job).tokens.tolist()) == whole[0]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="the row has a 'system', and its messages begin with another one"):
        read(
            folders["chatml"],
            [{"messages": [{"role": "system", "content": "t"}, *said("q", "a")], "system": "s"}],
            tmp_path / "d.jsonl",
        )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"conversations": [{"from": "alien", "value": "q"}]}, "turn 0 is from 'alien'. Use system, human"),
        (
            {"prompt": "q", "completion": said("a")},
            "'prompt' is str and 'completion' list. Use two texts, or two lists",
        ),
        ({"prompt": said("q"), "completion": said("q")}, 'no message of the completion has the role "assistant"'),
        ({"messages": "not json"}, "'messages' is a text that is not JSON"),
        ({"messages": said("q", None)}, "message 1 has no role and content that are text"),
        ({"messages": said("q", 3)}, "the content of message 1 is int, not text"),
        ({"messages": said("q", "a"), "tools": "f"}, "'tools' is a text that is not JSON"),
        ({"instruction": 3, "output": "y"}, "'instruction' is int, not text"),
        ({"instruction": "q", "output": "y", "history": ["q"]}, "pair 0 of 'history'"),
        ({"text": None}, "'text' is null, and the row has no conversation"),
        (
            {"dialogue": []},
            "neither 'text' nor 'messages'; it has 'dialogue'.*'conversations', 'prompt' with 'completion'",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=rf"d\.jsonl:1: {text}") as caught:
        read("bytes", [row], tmp_path / "d.jsonl")
    assert "\n" not in str(caught.value)
