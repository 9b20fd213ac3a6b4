"""Facts about transformers' families, and about code written like theirs: everything that a trace cannot show.

Such facts are the names of classes, attributes, arguments and fields of the configuration. The rest of the package spells none of
these names.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from samestep.errors import ModelError, did_you_mean, short_repr
from samestep.job_tables import Task

if TYPE_CHECKING:
    from torch import nn


FAMILY_FIELD = "model_type"
"""The configuration's field for the name of its family."""
CACHE_FIELD = "use_cache"
"""The configuration's field, and the argument of a forward, that says whether keys and values of earlier tokens are kept."""
INSTALLED_FLAG = "_output_capturing_hooks_installed"
"""A model's attribute that says whether it has installed its hooks, which are no state of its training."""
BASE_PREFIX = "base_model_prefix"
"""A model's attribute for the path of its base model."""
EXPERT_FORM = "is_transposed"
"""An attribute that modules of experts have, whatever its value."""
EXPERT_WAY = "_experts_implementation"
"""The configuration's field for the implementation of experts."""
GROUPED_WAY = "grouped_mm"
"""The implementation by grouped matrix products."""
ONE_BY_ONE_WAY = "eager"
"""The implementation that computes each expert in turn, in any dtype."""
GROUPED_FALLBACK = "transformers::grouped_mm_fallback"
"""The operator that replaces grouped products where torch has none."""
EXPERT_COUNT = "num_experts"
"""An attribute of modules of experts for their number."""
BALANCE_SWITCH = "output_router_logits"
"""The configuration's field that asks for a loss which balances experts."""
BALANCE_COEFFICIENT = "router_aux_loss_coef"
"""The configuration's field for the coefficient of that loss."""
EXPERTS_PER_TOKEN = "num_experts_per_tok"
"""The configuration's field for the number of experts chosen for a token."""
ROUTER_OUTPUTS = "router_logits"
"""The attribute of a model's outputs for the scores of its routers, a tensor [tokens, experts] for each layer."""
CONFIGURATIONS = ("config", "cfg", "args")
"""Attributes in which modules keep their configuration."""
HEAD_DROPOUTS = ("classifier_", "summary_")
"""Prefixes of dropout fields of heads that a decoder does not have."""
TIE_FIELD = "tie_word_embeddings"
"""The configuration's field that says whether the head has the weight of the embedding."""
VOCABULARY_FIELD = "vocab_size"
"""The configuration's field for the number of tokens that have an embedding."""
CLASSES_FIELD = "num_labels"
"""The configuration's field for the number of classes that a classifier distinguishes."""
POSITIONS_FIELD = "max_position_embeddings"
"""The configuration's field for the number of positions that have an embedding."""
DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
"""The configuration's fields for the number of blocks, the usual one first."""


HEAD_WIDTH = "head_dim"
"""An attention's attribute for the number of features of one head."""
HEAD_COUNT = "num_heads"
"""An attention's attribute for the number of its heads."""
HEAD_REPEATS = "num_key_value_groups"
"""An attention's attribute for the number of queries that share a head of keys and values."""
HIDDEN_ARGUMENT = "hidden_states"
"""The keyword by which a block, or a part of one, is given hidden states; else the first one with a tensor is."""
TRANSPOSED = "Conv1D"
"""The class of linear layers whose weight is [in, out], as in GPT-2."""


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalises: the names of torch's and transformers' classes show it."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that keeps its weight as [in, out]."""
    return type(module).__name__ == TRANSPOSED and "weight" in module._parameters


def name_of_hidden(named: Mapping[str, Any]) -> str:
    """Return the keyword by which a module is given its hidden states."""
    tensors = (name for name, value in named.items() if hasattr(value, "untyped_storage"))
    return HIDDEN_ARGUMENT if HIDDEN_ARGUMENT in named else next(tensors, next(iter(named)))


def heads_of(attention: nn.Module, size: int) -> int:
    """Return the number of heads in `size` rows of an attention's projection; `size` itself where nothing says."""
    width, count = getattr(attention, HEAD_WIDTH, None), getattr(attention, HEAD_COUNT, None)
    if isinstance(width, int) and width and size % width == 0:
        return size // width
    return count if isinstance(count, int) and count and size % count == 0 else size


def repeats_of(attention: nn.Module) -> int:
    """Return the number of queries of an attention that share a head of keys and values."""
    times = getattr(attention, HEAD_REPEATS, 1)
    return times if isinstance(times, int) else 1


def family_of(configuration: Any) -> str:
    """Return the family that a configuration, or the content of its file, names; empty if it names none."""
    is_file = isinstance(configuration, Mapping)
    family = configuration.get(FAMILY_FIELD) if is_file else getattr(configuration, FAMILY_FIELD, None)
    return family if isinstance(family, str) else ""


def setting(model: nn.Module, name: str) -> Any:
    """Return a field of the model's configuration; None where there is none."""
    return getattr(_configuration(model), name, None)


def _configuration(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the head of a model of transformers; None of other models, and where there is none."""
    head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return head() if head is not None else None


def expert_configuration(module: nn.Module) -> Any:
    """Return the configuration of a module of experts that has several implementations; None for other modules."""
    config = _configuration(module)
    return config if hasattr(module, EXPERT_FORM) and hasattr(config, EXPERT_WAY) else None


def experts_in(module: nn.Module) -> int:
    """Return the number of experts of a module whose weights all have them along their first dimension; else 0."""
    count = getattr(module, EXPERT_COUNT, 0)
    shapes = [param.shape for param in module.parameters()]
    return count if isinstance(count, int) and shapes and all(s and s[0] == count for s in shapes) else 0


def balance_of(model: nn.Module) -> float:
    """Return the coefficient of the loss that balances experts; 0 where the configuration does not ask for one."""
    return (setting(model, BALANCE_SWITCH) and setting(model, BALANCE_COEFFICIENT)) or 0.0


# -- a family's model from its configuration ---------------------------------------------------------

_AUTO = "transformers.models.auto"
MOST_LAYERS = 2000
"""The largest depth of a model: each layer is built and traced."""
MOST_ELEMENTS = 2**31 - 1
"""The largest number in a configuration, such as the size of a vocabulary."""
_COMMON_FIELDS = frozenset({"rope_theta", "rope_scaling", "attn_implementation", "experts_implementation"})
"""Fields that every configuration takes in addition to those of its class."""

_TASKS: dict[Task, tuple[str, str, str]] = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal language model"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "masked language model"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "model of encoder and decoder"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "classifier of images"),
    "speech": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "model from speech to text"),
    "vision-language": (
        "AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "model from images and text to text"
    ),
}  # fmt: skip
"""The auto class of each task, the name of its table of families, and what it makes."""


def family_source(family: str, fields: Mapping[str, Any], task: Task = "causal") -> Callable[[], nn.Module]:
    """Return the function that builds a family's model for a task, in training mode.

    Raises:
        ModelError: transformers, the family or a field does not exist.
    """
    check_family(family, task)
    return functools.partial(build_model, f"hf:{family}", family_config(family, fields, task), task)


def build_model(source: str, config: Any, task: Task, **settings: Any) -> nn.Module:
    """Return the model of a configuration with new values, in training mode; `source` is named in errors.

    `settings` are arguments of the class, such as a dtype.

    Raises:
        ModelError: the family's code refuses the configuration.
    """
    with _fitting(source):
        model: nn.Module = auto_class(task).from_config(config, trust_remote_code=False, **settings)
    return model.train()


def auto_class(task: Task) -> Any:
    """Return the class of transformers that builds a model for a task from its configuration."""
    return getattr(importlib.import_module("transformers"), _TASKS[task][0])


def is_family(word: str) -> bool:
    """Return whether transformers has a family of this name."""
    return word in importlib.import_module(f"{_AUTO}.configuration_auto").CONFIG_MAPPING_NAMES


def _families_of(task: Task) -> Mapping[str, str]:
    """Return the classes of transformers for a task, by family."""
    classes: Mapping[str, str] = getattr(importlib.import_module(f"{_AUTO}.modeling_auto"), _TASKS[task][1])
    return classes


def near_family(word: str) -> str:
    """Return a hint at the family that was probably meant; empty without transformers."""
    with suppress(ImportError):
        return did_you_mean(word.lower(), _families_of("causal")).replace("mean '", "mean 'hf:")
    return ""


def check_installed(source: str) -> None:
    """Refuse a model of transformers where transformers is not installed, or lacks what it needs itself.

    Raises:
        ModelError: it is not installed, or its import fails.
    """
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        cause = "" if error.name == "transformers" else f", which cannot be imported here ({error})"
        raise ModelError(
            "package-missing", f"{source} needs transformers{cause}: pip install 'samestep[hf]'"
        ) from error


def check_family(family: str, task: Task) -> None:
    """Refuse a word that is no family of transformers, or a family without a model for the task.

    Raises:
        ModelError: it is such a word, or transformers is not installed.
    """
    check_installed(f"hf:{family}")
    able = _families_of(task)
    if not is_family(family):
        without = f"; the folder {family} has no config.json" if os.path.isdir(family) else ""  # of any length
        word = short_repr(family)
        raise ModelError(
            "family-unknown",
            f"hf:{family[:80]}: transformers has no family {word}{did_you_mean(family, able)}{without}",
        )
    if family not in able:
        others = [repr(name) for name in get_args(Task) if family in _families_of(name)]
        works = f"Set model.task = {' or '.join(others)}" if others else "Use a module:function that builds the model"
        raise ModelError(
            "family-unknown", f"hf:{family}: this family of transformers has no {_TASKS[task][2]}. {works}"
        )


def family_config(family: str, fields: Mapping[str, Any], task: Task = "causal") -> Any:
    """Return the family's configuration; unknown fields, which transformers itself takes, are refused.

    Raises:
        ModelError: the family has no such field, or refuses its value.
    """
    check_fields(family, fields)
    return make_config(f"hf:{family}", family, fields, fields, task)


def check_fields(family: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields that a family's configuration does not have.

    Raises:
        ModelError: there is such a field.
    """
    kind = importlib.import_module("transformers").CONFIG_MAPPING[family]
    if dataclasses.is_dataclass(kind):
        fields_of_class = {own_field.name for own_field in dataclasses.fields(kind)}
    else:
        fields_of_class = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
    known = fields_of_class | set(getattr(kind, "attribute_map", {})) | _COMMON_FIELDS
    for name in fields:
        if name not in known and not _is_read(kind, name):
            raise ModelError(
                "model-config", f"model.config.{name}: hf:{family} has no such field{did_you_mean(name, sorted(known))}"
            )


def make_config(source: str, family: str, values: Mapping[str, Any], given: Mapping[str, Any], task: Task) -> Any:
    """Return a family's configuration of these values, ready for training; `given` are those that the job sets.

    Raises:
        ModelError: the family refuses a value, or a number is too large.
    """
    transformers = importlib.import_module("transformers")
    for name, value in values.items():
        most, what = MOST_LAYERS if name in DEPTH_FIELDS else MOST_ELEMENTS, f"{source}: {name} = {short_repr(value)}"
        is_size = type(value) is int or (isinstance(value, float) and (name in given or name in DEPTH_FIELDS))
        if is_size and not -most <= value <= most:
            raise ModelError("value-out-of-range", f"{what} must be a number up to {most}")
    if named := _find_hub_implementation(values):
        raise ModelError(
            "model-folder-unsupported",
            f"{source}: {named} names a file of a hub, and samestep downloads nothing. Use 'sdpa' or 'eager'",
        )
    with _fitting(source):
        config = transformers.CONFIG_MAPPING[family](**values)
    _prepare(config, given, task)
    return config


def _find_hub_implementation(values: Any, key: str = "") -> str:
    """Return the first implementation in a configuration that transformers would look for on a hub; empty without one."""
    if isinstance(values, Mapping):
        return next(filter(None, (_find_hub_implementation(value, str(name)) for name, value in values.items())), "")
    is_on_hub = isinstance(values, str) and key.endswith("_implementation") and not values.isidentifier()
    return f"{key} = {values!r}" if is_on_hub else ""


def num_tokens(config: Any) -> int | None:
    """Return the number of tokens that have an embedding by a configuration; None where it says none."""
    size = getattr(config.get_text_config(decoder=True), VOCABULARY_FIELD, None)
    return size if isinstance(size, int) else None


def fields_with_tokens(config: Any, fields: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Return the fields of a job with another number of tokens, in the part of the configuration that says it."""
    word, text = VOCABULARY_FIELD, config.get_text_config(decoder=True)
    part = next((name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is text), None)
    if part is None:
        return {**fields, word: tokens}
    return {**fields, part: {**fields.get(part, {}), word: tokens}}


def untied_fields(model: nn.Module) -> dict[str, Any]:
    """Return the configuration fields that give a model a head with a separate weight; empty where it has no such field."""
    config, word = _configuration(model), TIE_FIELD
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    fields: dict[str, Any] = {name: {word: False} for name, part in parts.items() if getattr(part, word, False)}
    return {word: False, **fields} if hasattr(config, word) else {}


def allow_cache(config: Any) -> None:
    """Let a configuration keep keys and values where its class does: `_prepare` has switched that off for training."""
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        if hasattr(type(part), CACHE_FIELD):
            setattr(part, CACHE_FIELD, getattr(type(part), CACHE_FIELD))
        else:
            vars(part).pop(CACHE_FIELD, None)


def _is_read(kind: type, name: str) -> bool:
    """Return whether the family's code reads a field that its configuration does not declare, as that of some does."""
    folder = Path(inspect.getfile(kind)).parent
    words = re.compile(rf"""config(\.|, ["']){re.escape(name)}\b""")
    return any(words.search(path.read_text(encoding="utf-8")) for path in folder.glob("modeling_*.py"))


def _prepare(config: Any, fields: Mapping[str, Any], task: Task) -> None:
    """Set the fields that training needs."""
    for part in (config, config.get_text_config(decoder=True)):
        # Without a cache, position_ids that restart at 0 keep packed documents separate.
        part.use_cache = False
        if task == "causal" and hasattr(part, "is_decoder") and "is_decoder" not in fields:
            part.is_decoder = True
        pad, size = getattr(part, "pad_token_id", None), getattr(part, VOCABULARY_FIELD, None)
        if pad is not None and size is not None and not 0 <= pad < size and "pad_token_id" not in fields:
            try:
                part.pad_token_id = None  # a token of the family's full vocabulary, outside this smaller one
            except Exception:  # raised by the configuration's validation; its class differs between versions
                raise ModelError(
                    "model-config",
                    f"hf:{config.model_type}: pad_token_id {pad} is outside the vocabulary of {size} tokens, and this family "
                    "needs one. Set model.config.pad_token_id = a token that the data does not have",
                ) from None


@contextmanager
def _fitting(source: str) -> Iterator[None]:
    """Call a family's code, which may check its configuration in its modules, need a library or a hub, and raise any error.

    Raises:
        ModelError: it refuses the configuration.
    """
    with quiet():
        try:
            yield
        except Exception as error:
            raise ModelError(
                "model-config", f"model.config does not fit {source}: {' '.join(str(error).split())}"
            ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Call transformers without its messages and progress bars, and without a request to a hub.

    A configuration may name a backbone or a kernel that its code would fetch; within this context such a request fails.
    """
    hub: Any = importlib.import_module("huggingface_hub.constants")
    logging = importlib.import_module("transformers.utils.logging")
    was_offline, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = was_offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
