"""Jobs become models, losses, optimizers and learning rates; what a library would take in silence is refused."""

from __future__ import annotations

import copy
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep.building import families
from samestep.building.loss import loss_of
from samestep.building.model import call_model, model_source, why_unfit
from samestep.building.optimizer import check_groups, learning_rate_factor, optimizer_of, unmatched
from samestep.errors import JobError, ModelError
from samestep.job import Job

TINY_LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50,
}  # fmt: skip

PLUGIN = """
import torch
from torch import nn

NOT_A_FUNCTION = 3

def model(width=4):
    return nn.Linear(width, width)

def nothing():
    return 3

def absolute(outputs, batch):
    return (outputs - batch[1]).abs().sum(), outputs.numel()

def mean(outputs, batch):
    return outputs.mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `plugin_of_the_user` in the working directory."""
    (tmp_path / "plugin_of_the_user.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "plugin_of_the_user", raising=False)


def hf_job(family: str, **config: Any) -> Job:
    return Job(model={"source": f"hf:{family}", "config": config})


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "said"),
    [("transformers", "needs transformers: pip"), ("httpx", "cannot be imported here (No module named 'httpx'): pip")],
)
def test_why_transformers_cannot_be_used_is_said(missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(families.importlib, "import_module", refuse)
    with pytest.raises(ModelError, match=re.escape(said)):
        families.check_installed("hf:llama")


def test_a_family_is_built_for_training_without_a_cache() -> None:
    model = model_source(hf_job("llama", **TINY_LLAMA))()
    assert model.training
    assert model.config.use_cache is False  # type: ignore[union-attr]
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, 6, dtype=torch.long)}
    outputs = call_model(model, batch)
    assert outputs.logits.shape == (2, 6, 50)
    assert outputs.loss is None, "labels are not given to the model"


_ENCODER = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "family", "config", "name"),
    [
        ("masked", "bert", _ENCODER, "BertForMaskedLM"),
        ("seq2seq", "t5", {"vocab_size": 50, "d_model": 16, "d_ff": 20, "num_layers": 1, "num_heads": 2}, "T5ForConditionalGeneration"),
        ("image", "vit", {**{k: v for k, v in _ENCODER.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4}, "ViTForImageClassification"),
        ("speech", "whisper", {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0}, "WhisperForConditionalGeneration"),
        ("vision-language", "llava", {"text_config": {"model_type": "llama", **_ENCODER}, "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 1}}, "LlavaForConditionalGeneration"),
    ],
)  # fmt: skip
def test_the_task_chooses_the_class(task: str, family: str, config: dict[str, Any], name: str) -> None:
    build = model_source(Job(model={"source": f"hf:{family}", "config": config, "task": task}))
    with torch.device("meta"):
        model = build()
    assert type(model).__name__ == name
    assert model.training


def test_a_masked_language_model_sees_later_tokens_as_the_causal_one_does_not() -> None:
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4]])
    for task, sees in (("causal", False), ("masked", True)):
        model = model_source(Job(model={"source": "hf:bert", "config": _ENCODER, "task": task}))().eval()
        one, other = call_model(model, {"input_ids": tokens}).logits[:, 0]
        assert torch.equal(one, other) is not sees


def test_a_padding_token_outside_the_vocabulary_is_dropped() -> None:
    assert model_source(hf_job("phi3", **TINY_LLAMA))().config.pad_token_id is None  # type: ignore[union-attr]


def test_a_family_that_needs_a_padding_token_says_which_works() -> None:
    sizes = {name: value for name, value in TINY_LLAMA.items() if name != "num_key_value_heads"}
    with pytest.raises(
        ModelError, match=r"hf:modernbert-decoder: pad_token_id \d+ is outside the vocabulary of 50 tokens"
    ):
        model_source(hf_job("modernbert-decoder", **sizes))
    assert model_source(hf_job("modernbert-decoder", **sizes, pad_token_id=1))


def test_nothing_of_transformers_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model_source(hf_job("phi3", **TINY_LLAMA))()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("lama", {}, r"no family 'lama' \(did you mean 'llama'\?\)"),
        ("vit", {}, "no causal language model. Set model.task = 'image'"),
        ("clap", {}, "no causal language model. Use a module:function that builds the model"),
        ("llama", {"hiden_size": 3}, r"model\.config\.hiden_size.*did you mean 'hidden_size'"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
        ("llama", {"hidden_size": 65, "num_attention_heads": 4}, "65"),
    ],
)
def test_a_wrong_family_or_field_is_named(family: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_source(hf_job(family, **config))


def test_other_names_of_a_field_are_known() -> None:
    assert model_source(hf_job("gpt2", hidden_size=16, n_head=2, n_layer=1)).args[1].n_embd == 16  # type: ignore[attr-defined]
    rope = model_source(hf_job("llama", **TINY_LLAMA, rope_theta=77.0)).args[1].rope_parameters  # type: ignore[attr-defined]
    assert rope["rope_theta"] == 77.0
    # qwen3_moe reads head_dim, and does not declare it.
    model_source(hf_job("qwen3_moe", head_dim=8))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        ("plugin", {}, "not of the form module:function"),
        ("plugin_of_nobody:model", {}, "module not found: 'plugin_of_nobody'"),
        ("plugin_of_the_user:modell", {}, r"no function 'modell' \(did you mean 'model'\?\)"),
        ("plugin_of_the_user:NOT_A_FUNCTION", {}, "not a function"),
        ("plugin_of_the_user:model", {"depth": 3}, "depth"),
        ("plugin_of_the_user:nothing", {}, "must return an nn.Module"),
    ],
)
def test_a_wrong_function_is_named(source: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_source(Job(model={"source": source, "config": config}))()


def test_a_failing_import_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_plugin.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "broken_plugin.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(ModelError, match="needs the module a_module_that_nobody_has"):
        model_source(Job(model={"source": "needy_plugin:model"}))
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        model_source(Job(model={"source": "broken_plugin:model"}))


class TakesAny(nn.Module):
    def forward(self, x: Any = None, **others: Any) -> dict[str, Any]:
        return {"x": x, **others}


class TakesTwo(nn.Module):
    def forward(self, x: Any, mask: Any = None, *, scale: Any = None) -> Any:
        return x, mask, scale


class TakesAll(nn.Module):
    def forward(self, *parts: Any) -> Any:
        return parts


class TakesPixels(nn.Module):
    def forward(self, pixels: Any) -> Any:
        return pixels


def test_a_batch_is_given_as_the_forward_takes_it() -> None:
    batch = {"input_ids": 1, "position_ids": 2, "labels": 3, "source": 4}
    assert call_model(TakesAny(), batch) == {"x": None, "input_ids": 1, "position_ids": 2, "source": 4}
    assert call_model(nn.DataParallel(TakesPixels()), {"pixels": 5, "labels": 6, "other": 7}) == 5
    assert call_model(TakesTwo(), (5, 6)) == (5, None, None)
    assert call_model(TakesTwo(), (5, 6, 7)) == (5, 7, None)
    assert call_model(TakesTwo(), [5, 6, 7, 8]) == (5, 7, None)
    assert call_model(TakesTwo(), {"x": 5, "scale": 6, "labels": 7, "other": 8}) == (5, None, 6)
    assert call_model(TakesAll(), (5, 6, 7, 8)) == (5, 7, 8)
    assert call_model(TakesPixels(), (5, 6, 7)) == 5
    assert call_model(TakesPixels(), {"pixels": 5, "labels": 6}) == 5
    assert call_model(TakesPixels(), (5, 6)) == 5
    assert call_model(TakesPixels(), [5, 6]) == 5
    assert call_model(TakesPixels(), 5) == 5


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="the batch has image, labels, and the forward of TakesPixels takes pixels"):
        call_model(TakesPixels(), {"image": 1, "labels": 2})
    with pytest.raises(ModelError, match="packed documents see each other"):
        call_model(TakesPixels(), {"pixels": 1, "position_ids": 2})
    assert why_unfit(TakesAny(), {"image": 1, "labels": 2}) == (
        "the batch has image, labels, and the forward of TakesAny takes x. Rename 'x' to 'image' in the forward"
    )
    assert not why_unfit(TakesAny(), {"x": 1, "labels": 2})
    assert not why_unfit(TakesAny(), (1, 2))
    assert "the loss alone is given labels" in why_unfit(NeedsLabels(), {"x": 1, "labels": 2})
    assert not why_unfit(NeedsLabels(), {"x": 1})


class TakesTargets(nn.Module):
    """As nanoGPT's: its forward returns its loss if it is given targets."""

    def forward(self, idx: Any, targets: Any = None) -> Any:
        return idx, targets


def test_both_names_of_a_forward_that_returns_its_loss_are_named() -> None:
    text = why_unfit(TakesTargets(), {"input_ids": 1, "labels": 2})
    assert text.endswith(
        "Rename 'idx' to 'input_ids' and 'targets' to 'labels' in the forward, and set train.loss = 'model' if the forward returns its loss"
    )


class NeedsLabels(nn.Module):
    def forward(self, x: Any, labels: Any) -> Any:
        return x, labels


# -- losses ----------------------------------------------------------------------------------------


class Output(dict[str, Any]):
    """What transformers returns."""

    @property
    def logits(self) -> Any:
        return self["logits"]


def test_cross_entropy_of_classes_and_of_pictures() -> None:
    loss = loss_of(Job())
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
    total, count = loss(logits, (None, labels))
    assert torch.allclose(total, F.cross_entropy(logits, labels, reduction="sum"))
    assert count == 3
    maps, classes = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    total, count = loss((maps, "more"), (None, classes))
    assert torch.allclose(total, F.cross_entropy(maps, classes, reduction="sum"))
    assert count == 40


def test_losses_of_half_precision_are_float32_and_of_no_samples_zero() -> None:
    for name in ("cross_entropy", "mse"):
        loss = loss_of(Job(train={"loss": name}))
        target = torch.zeros(2, dtype=torch.long) if name == "cross_entropy" else torch.zeros(2, 3)
        total, count = loss(torch.zeros(2, 3, dtype=torch.bfloat16), (None, target))
        assert total.dtype is torch.float32
        total, count = loss(torch.zeros(0, 3), (None, target[:0]))
        assert (total.item(), count.item()) == (0.0, 0)


@pytest.mark.parametrize(
    ("name", "outputs", "batch", "message"),
    [
        ("cross_entropy", torch.zeros(2, 3, 5), {"labels": torch.zeros(2, 4, dtype=torch.long)}, "do not fit"),
        ("mse", torch.zeros(2, 1), (None, torch.zeros(2)), "equal shapes"),
        ("mse", torch.zeros(2, 1), {"x": 1}, "no labels"),
        ("mse", 3, (None, torch.zeros(2)), "without logits"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(name: str, outputs: Any, batch: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        loss_of(Job(train={"loss": name}))(outputs, batch)


@pytest.mark.usefixtures("plugin")
def test_a_loss_of_the_user() -> None:
    batch = (None, torch.zeros(2, 3))
    total, count = loss_of(Job(train={"loss": "plugin_of_the_user:absolute"}))(torch.ones(2, 3), batch)
    assert (total.item(), count.item()) == (6.0, 6)
    with pytest.raises(JobError, match=r"use samestep\.mean_over"):
        loss_of(Job(train={"loss": "plugin_of_the_user:mean"}))(torch.ones(2, 3), batch)
    with pytest.raises(JobError, match=r"did you mean 'cross_entropy'"):
        loss_of(Job(train={"loss": "crossentropy"}))


# -- optimizers ------------------------------------------------------------------------------------


def parameters(**kind: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, nn.Parameter(torch.zeros(3, **kind))) for name in ("a.weight", "norm.weight", "a.bias")]


def make(named: list[tuple[str, torch.Tensor]], **table: Any) -> torch.optim.Optimizer:
    return optimizer_of(Job(optimizer=table))(named)


def test_no_decay_is_one_group_without_torchs_own_default() -> None:
    (group,) = make(parameters(), name="adamw", no_weight_decay=("*norm*",)).param_groups
    assert group["weight_decay"] == 0.0


def test_a_rank_may_have_nothing_to_update() -> None:
    make([], name="adamw", weight_decay=0.1, no_weight_decay=("*norm*",)).step()


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates_are_fused_where_torch_can(name: str, dtype: torch.dtype) -> None:
    named = parameters(dtype=dtype)
    optimizer = make(named, name=name)
    assert optimizer.defaults["fused"] is (dtype is not torch.bfloat16)
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param != 0).all() for _, param in named)


def test_options_decide_over_fusing() -> None:
    assert make(parameters(), name="adamw", options={"fused": False}).defaults["fused"] is False
    assert make(parameters(), name="adamw", options={"foreach": True}).defaults["fused"] is None
    assert "fused" not in make(parameters(), name="rmsprop").defaults


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "adamv"}, r"adamv.*did you mean 'adam"),
        ({"name": "lbfgs"}, "several times per step"),
        ({"name": "adamw", "options": {"beta": 1}}, r"options\.beta: AdamW takes betas.*did you mean 'betas'"),
        ({"name": "rprop", "weight_decay": 0.1}, "Rprop has none"),
        ({"name": "adamw", "options": {"betas": [2.0, 0.9]}}, "AdamW rejects"),
    ],
)
def test_a_wrong_optimizer_is_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make(parameters(), **table)


@pytest.mark.usefixtures("plugin")
def test_an_optimizer_of_the_user() -> None:
    assert make(parameters(), name="plugin_of_the_user:optimizer").defaults["lr"] == 0.5
    with pytest.raises(JobError, match="not a torch optimizer"):
        make(parameters(), name="builtins:len")


def test_groups_of_parameters_have_settings_of_their_own() -> None:
    groups = [
        {"match": ["*bias"], "lr": 0.5, "weight_decay": 0.2},
        {"match": ["a.*"], "options": {"betas": [0.5, 0.6]}},
    ]
    named = parameters()
    made = make(named, lr=0.1, weight_decay=0.3, no_weight_decay=["*bias", "*norm*"], groups=groups)
    names = {id(tensor): name for name, tensor in named}
    found = {names[id(p)]: (g["lr"], g["weight_decay"], g["betas"]) for g in made.param_groups for p in g["params"]}
    assert found == {
        "norm.weight": (0.1, 0.0, (0.9, 0.999)),
        "a.bias": (0.5, 0.2, (0.9, 0.999)),
        "a.weight": (0.1, 0.3, (0.5, 0.6)),
    }


def with_a_matrix() -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", nn.Parameter(torch.eye(3))), *parameters()[1:]]


MUON: dict[str, Any] = {"match": ["a.weight"], "name": "Muon", "lr": 0.02, "options": {"momentum": 0.9}}


def test_members_go_on_from_what_the_combined_optimizer_loads() -> None:
    """One optimizer takes three steps; another one loads its state behind the second, and takes the third."""
    named = [with_a_matrix() for _ in range(2)]
    first, second = (make(some, lr=0.1, groups=[MUON]) for some in named)

    def step(turn: int) -> None:
        for _, param in named[turn]:
            param.grad = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
        (first, second)[turn].step()

    step(0)
    step(0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        for (_, ours), (_, theirs) in zip(*named, strict=True):
            theirs.copy_(ours)
    step(0)
    step(1)
    for (_, ours), (_, theirs) in zip(*named, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([MUON | {"match": ["a.*"]}], r'Muon rejects a.bias: Muon only supports 2D .*match = \["a.bias"\], name = "adamw" \} as the first'),
        ([MUON | {"name": "muo"}], r"optimizer.groups.0.name = 'muo' must be one of .*did you mean 'muon'\?\), or module:function$"),
        ([MUON | {"name": "lbfgs"}], "optimizer.groups.0.name = 'lbfgs' cannot be used"),
        ([MUON | {"options": {"betas": [0.5, 0.6]}}], "optimizer.groups.0.options.betas: Muon takes momentum"),
        ([MUON | {"name": "rprop", "options": {}, "weight_decay": 0.1}], "optimizer.groups.0.weight_decay: Rprop has none"),
        ([{"match": ["*"], "name": "absent_module:b"}], "optimizer.groups.0.name: module not found: 'absent_module'"),
        ([MUON | {"name": "a:b"}], r"groups.0: lr is set by the function a:b itself: leave it out"),
    ],
)  # fmt: skip
def test_a_wrong_optimizer_of_a_group_is_named(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make(with_a_matrix(), groups=groups)


def test_wrong_groups_of_parameters_are_named() -> None:
    table = Job(optimizer={"groups": [{"match": ["*", "norm.wight"]}]}).optimizer
    with pytest.raises(
        JobError, match=r"optimizer.groups.0.match: 'norm.wight' matches no .* \(did you mean 'norm.weight'"
    ):
        check_groups(table, [name for name, _ in parameters()])
    with pytest.raises(JobError, match=r"optimizer.groups.0.options.beta: AdamW takes betas"):
        make(parameters(), groups=[{"match": ["*"], "options": {"beta": 1}}])
    with pytest.raises(JobError, match=r"groups belong to a class of torch.optim, and a:b makes its own"):
        Job(optimizer={"name": "a:b", "groups": [{"match": ["*"]}]})
    with pytest.raises(
        JobError, match=r"optimizer.groups.0.matches: unknown key \(did you mean 'match'\?\); the keys here are match"
    ):
        Job(optimizer={"groups": [{"match": ["*"], "matches": 1}]})


# -- learning rates --------------------------------------------------------------------------------


def factors(name: str, steps: int, **table: Any) -> list[float]:
    factor = learning_rate_factor(Job(schedule={"name": name, **table}, train={"steps": steps}))
    return [factor(step) for step in range(steps)]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    assert factors("constant", 4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors("linear", 6, warmup_steps=1, final_ratio=0.2) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert factors("cosine", 3, final_ratio=0.5) == pytest.approx([1.0, 0.75, 0.5])
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    assert factors("cosine", 5, final_ratio=0.1)[1] == pytest.approx(quarter)


def test_the_learning_rate_is_stable_and_then_decays() -> None:
    assert factors("wsd", 6, warmup_steps=1, decay_steps=2) == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5, 0.0])
    assert factors("wsd", 4, decay_steps=4, final_ratio=0.4)[-1] == pytest.approx(0.4)
    assert factors("polynomial", 5, power=2.0) == pytest.approx([1.0, 9 / 16, 0.25, 1 / 16, 0.0])
    assert factors("polynomial", 5, final_ratio=0.2) == factors("linear", 5, final_ratio=0.2)


def inverse_root(step: int, steps: int) -> float:
    return (step + 1) ** -0.5 if steps == 4 else math.nan


def test_a_learning_rate_of_your_own() -> None:
    name = f"{__name__}:inverse_root"
    assert factors(name, 4, warmup_steps=2) == pytest.approx([0.5, 1.0, 3**-0.5, 0.5])
    with pytest.raises(JobError, match=r"returned nan for step 0. Use a finite factor of 0 or more"):
        factors(name, 5)
    with pytest.raises(JobError, match=r"has no function 'inverse_rot' \(did you mean 'inverse_root'"):
        factors(f"{__name__}:inverse_rot", 4)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"name": "cosin"}, r"name = 'cosin' must be one of constant, .* \(did you mean 'cosine'\?\), or module:function"),
        ({"name": "linear", "power": 2.0}, r"power = 2.0 belongs to name = \"polynomial\", and name is 'linear'"),
        ({"name": "wsd"}, r'decay_steps = 0 with name = .wsd.: name = "wsd" takes a positive number of last steps'),
        ({"name": "wsd", "decay_steps": 200}, r"decay_steps = 200 is more than the 100 steps after warm-up"),
    ],
)  # fmt: skip
def test_keys_of_the_learning_rate_are_checked(table: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        Job(schedule=table)


def test_the_learning_rate_at_the_edges() -> None:
    assert factors("linear", 1) == [1.0]
    assert factors("linear", 2, warmup_steps=2) == [0.5, 1.0]
    assert factors("cosine", 3, warmup_steps=2, final_ratio=0.1) == pytest.approx([0.5, 1.0, 0.1])
    factor = learning_rate_factor(Job(schedule={"name": "linear", "final_ratio": 0.1}, train={"steps": 10}))
    assert factor(50) == pytest.approx(0.1)


def test_a_pattern_of_weights_without_decay_that_matches_none_is_remarked():
    table = Job(optimizer={"no_weight_decay": ["*nrom*", "*.bias"]}).optimizer
    (remark,) = unmatched(table, ["norm.weight", "head.bias"])
    assert remark.startswith("optimizer.no_weight_decay: '*nrom*' matches no trained parameter")
