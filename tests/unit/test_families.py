"""What is known of families of models stands in `building/families.py` alone: no other file spells it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building import families
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.strategies import program_of
from tests.laboratory import clipped, source_of
from tests.models import MODELS, Parted, PartedBlock

SOURCE = Path(families.__file__).parents[1]


class Convolving(PartedBlock):
    """A causal convolution over tokens stands beside the attention: torch's Conv1d is not transformers' Conv1D."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.mix = nn.Conv1d(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.mix(F.pad(x.mT, (2, 0))).mT


class Convolutional(Parted):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Convolving(16, 4) for _ in range(2))


def test_a_convolution_is_no_linear_layer_that_works_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "convolutional", Convolutional)
    layout = Layout("tp=2 sequence_parallel")
    found = source_of("convolutional", layout, clipped()).prepared
    assert found is not None
    with pytest.raises(LayoutError, match=r"blocks.0.mix mixes tokens by convolution"):
        program_of(found.spec, clipped(), layout)


# -- nobody else spells them -------------------------------------------------------------------------

OWN_WORDS = {
    "config", "args",  # of a job's [model] table, and of any function
    "norm", "dropout", "identity", "linear", "activation", "position", "depth",  # English
    "query", "key", "value", "output", "dense",  # of attentions in general, and English
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "intermediate",  # of the torch-free Decoder
    "head_dim",  # of the torch-free Decoder
}  # fmt: skip
"""Words of the facts that are the package's own too."""
OWN_ATTRIBUTES = {
    "is_transposed",  # a function of the facts
    "vocab_size",  # of tokenizers
    "num_experts",  # of the loss that balances experts
    "silu",  # torch's
    "RMSNorm",  # torch's module
}
"""Attributes of the package's own classes and of torch; as strings they are names of a family's."""
OTHERS = {
    "model_type", "use_cache", "is_decoder", "pad_token_id", "get_text_config", "get_input_embeddings",
    "get_output_embeddings", "attn_implementation", "experts_implementation", "rope_theta", "num_attention_heads",
    "num_key_value_heads", "hidden_size", "AutoModelForCausalLM", "AutoConfig", "CONFIG_MAPPING", "RMSNorm", "eager",
}  # fmt: skip
"""Names of transformers that the facts do not list one by one."""


def words_in(value: Any) -> Iterator[str]:
    """Yield the names within a fact: a string, a tuple of them, or the keys and values of a mapping."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, item)
    elif isinstance(value, tuple):
        for item in value:
            yield from words_in(item)


def known_names() -> set[str]:
    facts = [value for name, value in vars(families).items() if name.isupper() and name[0] != "_"]
    return {word for fact in facts for word in words_in(fact)} | OTHERS


def spelled_in(path: Path) -> set[str]:
    """Return every attribute, and every string that is one word, in a file; prose is none of them."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - OWN_ATTRIBUTES
    return attributes | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_other_file_spells_what_is_known_of_a_family() -> None:
    names = known_names() - OWN_WORDS
    assert {"base_model_prefix", "num_key_value_groups", "Conv1D"} <= names
    # the last three list published models and runs by their own names
    others = ("families.py", "presets.py", "published.py", "cases.py")
    files = [path for path in SOURCE.rglob("*.py") if path.name not in others]
    spelled = {str(path.relative_to(SOURCE)): sorted(spelled_in(path) & names) for path in files}
    assert not {path: found for path, found in spelled.items() if found}


def test_the_search_for_such_names_finds_them(tmp_path: Path) -> None:
    file = tmp_path / "quirk.py"
    file.write_text(
        'def f(m):\n    """The prose of num_heads."""\n    return m.num_key_value_groups, getattr(m, "head_dim")\n'
    )
    assert spelled_in(file) & known_names() == {"num_key_value_groups", "head_dim"}
