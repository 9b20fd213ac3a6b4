"""An object that is read in parts of any length is what `json.loads` returns; text that ends too early is refused; little is held."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.wings.explain import trace_files
from samestep.wings.explain.trace_files import read_members

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=4), some, max_size=4),
    max_leaves=12,
)


def read(text: str, part: int) -> tuple[dict[str, Any], list[Any]]:
    items: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "_PART", part)
        return read_members(io.StringIO(text), "events", items.append), items


@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=4),
    st.lists(VALUES, max_size=6),
    st.integers(1, 9),
    st.sampled_from([None, 2]),
)
def test_parts_of_any_length_give_what_is_written(more, events, part, indent):
    text = json.dumps({**more, "events": events, "last": 12345}, indent=indent)
    found, items = read(text, part)
    assert found == {**more, "events": [], "last": 12345}
    assert items == events


@given(st.lists(VALUES, min_size=1, max_size=4), st.integers(1, 9), st.data())
def test_text_that_ends_too_early_is_refused(events, part, data):
    text = json.dumps({"events": events})
    with pytest.raises(json.JSONDecodeError):
        read(text[: data.draw(st.integers(0, len(text) - 1))], part)


@pytest.mark.parametrize("text", ["[1, 2]", "3", '"events"', '{"events": 3}'])
def test_what_has_no_such_array_gives_no_items(text):
    found, items = read(text, 2)
    assert items == []
    assert found in ({}, {"events": 3})


def test_of_a_long_array_two_parts_are_held(monkeypatch):
    part, held = 1000, []
    monkeypatch.setattr(trace_files, "_PART", part)
    read_part = trace_files._Text._read

    def watched(self: Any) -> bool:
        found = read_part(self)
        held.append(len(self._text))
        return found

    monkeypatch.setattr(trace_files._Text, "_read", watched)
    count = []
    read_members(io.StringIO(json.dumps({"events": [{"name": "x" * 50}] * 2000})), "events", count.append)
    assert len(count) == 2000
    assert max(held) <= 2 * part
