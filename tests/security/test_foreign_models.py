"""A folder of a model or a tokenizer runs no code, whatever stands on standard input, and nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from samestep.building import families
from samestep.building.families import family_config, family_source
from samestep.building.pretrained import pretrained_source
from samestep.datasets import tokenizers
from samestep.datasets.tokenizers import _auto_tokenizer
from samestep.errors import DataError, InputError, ModelError

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
EVIL = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No address outside this process is connected to or looked up."""
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: asked.append(given) or [])
    yield
    assert asked == []


def _folder(path: Path, ran: Path, **fields: Any) -> Path:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    for name in ("evil", "modeling_evil", "configuration_evil"):
        (path / f"{name}.py").write_text(EVIL.format(str(ran)))
    return path


AUTO_MAP = {
    "AutoConfig": "configuration_evil.C",
    "AutoModel": "modeling_evil.M",
    "AutoModelForCausalLM": "modeling_evil.M",
    "AutoTokenizer": ["evil.T", None],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": AUTO_MAP},
        {"auto_map": AUTO_MAP, "model_type": "evil"},
        {"auto_map": {"AutoConfig": "evil/repo--evil.C"}},
    ],
)
def test_a_models_folder_runs_no_code(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", tmp_path / "ran", **fields)
    with contextlib.suppress(InputError):
        source = pretrained_source(folder, {}, "causal")
        source.build()
        source()
    assert not (tmp_path / "ran").exists()


TOKENIZERS = (
    {"tokenizer_class": "EvilTok", "auto_map": {"AutoTokenizer": ["evil.T", None]}},
    {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}},
    {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": "evil.T"}},
)
LOADS = """
import pathlib, sys
from samestep.datasets.tokenizers import _auto_tokenizer
from samestep.errors import DataError
for folder in sys.argv[1:]:
    try:
        _auto_tokenizer(pathlib.Path(folder))
    except DataError as error:
        print("refused:", error)
"""


def test_a_tokenizers_folder_runs_no_code_after_a_yes(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(len(TOKENIZERS))]
    for folder, settings in zip(folders, TOKENIZERS, strict=True):
        folder.mkdir()
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "evil.py").write_text(EVIL.format(str(folder / "ran")))
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *folders],
        input="y\n" * 20 * len(folders),
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not [folder for folder in folders if (folder / "ran").exists()]
    assert "Do you wish to run" not in done.stdout + done.stderr


def test_a_tokenizer_that_fails_without_a_text_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        assert more["trust_remote_code"] is False
        raise KeyError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(DataError, match=r"can read \(KeyError\). Use a folder with a tokenizer\.json"):
        _auto_tokenizer(tmp_path)


ON_HUB = ["evil-org/evil-kernel", "evil-org/kernel:forward", "kernels-community/flash-attn@main", "a|evil/x", "./evil"]


@pytest.mark.parametrize("word", ON_HUB)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_an_implementation_on_a_hub_is_refused(key: str, word: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", tmp_path / "ran", **{key: word})
    with pytest.raises(ModelError, match=f"{key} = .* names a file of a hub, and samestep downloads nothing"):
        pretrained_source(folder, {}, "causal")
    if not key.startswith("_"):
        with pytest.raises(ModelError, match="names a file of a hub"):
            family_config("llama", {key: word})


def test_an_implementation_of_a_part_is_refused_too() -> None:
    with pytest.raises(ModelError, match="attn_implementation = 'evil/x' names a file of a hub"):
        family_config(
            "llava", {"text_config": {"model_type": "llama", "attn_implementation": "evil/x"}}, "vision-language"
        )


@pytest.mark.parametrize("word", ["eager", "sdpa"])
def test_an_implementation_of_transformers_is_built(word: str) -> None:
    family_source("llama", {**{k: v for k, v in TINY.items() if k != "model_type"}, "attn_implementation": word})()


def test_a_request_to_a_hub_fails_at_once() -> None:
    import huggingface_hub

    with families.quiet(), pytest.raises(Exception, match=r"[Oo]ffline|local"):
        huggingface_hub.hf_hub_download("evil-org/evil", "config.json", force_download=True)


class _Writes:
    """A tokenizer whose template is given."""

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, messages: Any, **settings: Any) -> str:
        """Compile the template, which computes its constants, and write."""
        return str(ImmutableSandboxedEnvironment().from_string(self.template).render(messages=messages))


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "text": "{{ 'a' * 4000000000 }}",
    "texts": "{% for a in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
    "list": "{% set a = [0] * 900000000 %}{{ a | length }}",
    "power": "{{ 10 ** 100000000 ** 10 }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_never_ends_or_fills_the_memory_is_refused(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "MOST_SECONDS", 2.0)
    monkeypatch.setattr(tokenizers, "MOST_BYTES", 1 << 28)
    with pytest.raises(DataError, match=r"chat template (does not end within|takes over) .* for two short messages"):
        tokenizers.try_template(_Writes(BOMBS[bomb]))


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ messages[5].x.y }}"]
)
def test_a_template_that_writes_or_refuses_passes_its_trial(template: str) -> None:
    tokenizers.try_template(_Writes(template))
