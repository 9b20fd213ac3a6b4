"""What a trace says of a model: layers, weights and costs, held against formulas and against a real forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.initial_values import blueprint
from samestep.building.model import call_model, model_source
from samestep.errors import ModelError
from samestep.job import Job
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, from_json, to_json
from samestep.tracing import meta_tensors
from samestep.tracing.batch_norms import channels_first
from samestep.tracing.checkpointed import TracedPlaces
from samestep.tracing.costs import costs_of
from samestep.tracing.module_inputs import ForwardCalls, Groups, groups_of
from samestep.tracing.operations import SavedTensor, Work
from samestep.tracing.trace import model_spec, trace

T, H, V, FF, HEADS, KV = 16, 64, 100, 160, 4, 2
LLAMA = {
    "hidden_size": H, "intermediate_size": FF, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "vocab_size": V,
}  # fmt: skip
TOKENS = {"input_ids": torch.arange(T)[None] % V, "labels": torch.zeros(1, T, dtype=torch.long)}
PACKED = {**TOKENS, "position_ids": torch.arange(T)[None] % (T // 2)}


def hf_spec(family: str, sample: Any = TOKENS, **config: Any) -> ModelSpec:
    return model_spec(Job(model={"source": f"hf:{family}", "config": config}), sample)


def spec_of(build: Callable[[], nn.Module], sample: Any, name: str = "model") -> ModelSpec:
    plan = blueprint(build, 0)
    return trace(plan.module, sample, name, lambda path: plan.materialize(path, torch.device("cpu")))


def names(spec: ModelSpec) -> list[str]:
    return [layer.name for layer in spec.layers]


def layer_of(spec: ModelSpec, param: str) -> LayerSpec:
    return next(spec.layers[p.layer] for p in spec.params if p.name == param)


# -- language models -------------------------------------------------------------------------------


def test_llama_is_embedding_blocks_and_head() -> None:
    spec = hf_spec("llama", **LLAMA)
    assert spec.name == "llama"
    assert names(spec) == ["embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "norm+lm_head"]
    assert [layer.is_block for layer in spec.layers] == [False, True, True, True, False]
    assert spec.layers[0].modules == ("model.embed_tokens", "model.rotary_emb")
    assert spec.layers[1].modules == ("model.layers.0",)
    assert spec.layers[-1].modules == ("model.norm", "lm_head")
    assert [layer.backward_reads_weights for layer in spec.layers] == [False, True, True, True, True]
    assert layer_of(spec, "model.layers.1.mlp.up_proj.weight").name == "model.layers.1"
    assert layer_of(spec, "model.norm.weight").name == "norm+lm_head"
    assert not any(param.shared or param.aliases for param in spec.params)
    assert from_json(to_json(spec)) == spec


def test_costs_of_a_llama_are_those_of_the_formulas() -> None:
    spec = hf_spec("llama", **LLAMA)
    attention = 2 * H * H + 2 * H * H * KV // HEADS
    matrices = attention + 3 * H * FF
    block = spec.layers[2]
    assert sum(param.numel for param in spec.params_of(2)) == matrices + 2 * H
    assert block.forward_flops == 2 * matrices * T + 2 * 2 * T * T * H
    assert spec.layers[-1].forward_flops == 2 * H * V * T
    assert spec.layers[0].forward_flops == 0
    assert block.input_elements == block.output_elements == T * H
    cos_and_sin = 2 * T * (H // HEADS)
    assert spec.layers[0].input_elements == T
    assert spec.layers[0].output_elements == spec.layers[1].input_elements == T * H + cos_and_sin
    assert spec.layers[-1].output_elements == T * V
    products = T * (2 * H + 2 * H * KV // HEADS + 2 * FF + H) + T * H + T * HEADS
    assert block.saved_selective_elements == T * H + products
    assert block.saved_elements > block.saved_selective_elements


def test_a_tied_weight_is_one_weight_of_two_names() -> None:
    spec = hf_spec("gpt2", n_layer=2, n_embd=32, n_head=2, vocab_size=V, resid_pdrop=0.0)
    tied = spec.params[0]
    assert (tied.name, tied.aliases, tied.shared) == ("transformer.wte.weight", ("lm_head.weight",), True)
    assert [param.name for param in spec.params if param.shared] == [tied.name]
    assert names(spec) == ["wte+wpe", "transformer.h.0", "transformer.h.1", "ln_f+lm_head"]
    assert spec.layers[0].modules == ("transformer.wte", "transformer.wpe", "transformer.drop")
    assert spec.layers[0].input_elements == T
    assert spec.layers[1].forward_flops == 2 * 12 * 32 * 32 * T + 4 * T * T * 32


@pytest.mark.parametrize(
    ("family", "config", "sample"),
    [
        ("llama", LLAMA, PACKED),
        ("gemma2", {**LLAMA, "head_dim": 16}, TOKENS),
        ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": V, "attn_pdrop": 0.0}, TOKENS),
    ],
)
def test_what_is_saved_is_what_a_real_forward_saves(family: str, config: dict[str, Any], sample: Any) -> None:
    job = Job(model={"source": f"hf:{family}", "config": config})
    model = model_source(job)()
    constant = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in constant:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = call_model(model, sample)
    real = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values())
    del outputs
    spec = model_spec(job, sample)
    assert sum(layer.saved_elements for layer in spec.layers) == real


@pytest.mark.parametrize("sample", [TOKENS, PACKED], ids=["tokens", "packed"])
def test_tables_of_tokens_and_positions_are_told_apart(sample: Any) -> None:
    """BERT's table of segments, whose rows are picked by zeros, is neither."""
    gpt = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": V}
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    bert = {**sizes, "intermediate_size": 8, "vocab_size": V}
    for family, config, task in (("gpt2", gpt, "causal"), ("bert", bert, "masked")):
        spec = model_spec(Job(model={"source": f"hf:{family}", "config": config, "task": task}), sample)
        found = {
            param.embeds: param.name.rpartition(".")[0].rpartition(".")[2] for param in spec.params if param.embeds
        }
        assert found in (
            {"tokens": "wte", "positions": "wpe"},
            {"tokens": "word_embeddings", "positions": "position_embeddings"},
        )


def test_packed_documents_take_the_branch_they_really_take() -> None:
    plain, packed = hf_spec("llama", **LLAMA), hf_spec("llama", PACKED, **LLAMA)
    # The outputs of the documents are kept, and so is the tensor in which they are joined.
    assert packed.layers[2].saved_elements - plain.layers[2].saved_elements == T * H
    attentions = [next(one for one in spec.layers[2].products if one.factors == "causal") for spec in (plain, packed)]
    assert [one.attended_part for one in attentions] == [1 / 2, 1 / 4]
    assert packed.layers[0].output_elements - plain.layers[0].output_elements == T  # documents in the place of a mask
    assert packed.forward_flops == plain.forward_flops


def test_a_large_model_is_traced_without_its_weights() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = {**sizes, "num_hidden_layers": 2, "vocab_size": 128256}
    job = Job(model={"source": "hf:llama", "config": config})
    with torch.device("meta"):
        module = model_source(job)()
    spec = trace(module, {"input_ids": torch.zeros(1, 8192, dtype=torch.long)}, "llama-70b")
    assert spec.num_params == 2 * 8192 * (128256 + 2 * 8192 + 2 * 1024 + 3 * 28672 + 2) + 8192
    assert len(spec.layers) == 2 + 2
    assert len({layer.forward_flops for layer in spec.layers[1:-1]}) == 1
    assert not module._forward_hooks
    assert not any(part._forward_pre_hooks for part in module.modules())


# -- models of all kinds ---------------------------------------------------------------------------


def test_the_children_of_a_sequential_are_blocks() -> None:
    spec = spec_of(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)),
        (torch.zeros(1, 3, 4), torch.zeros(1)),
    )
    assert [layer.modules for layer in spec.layers] == [("1", "2"), ("3",)]
    assert all(layer.is_block for layer in spec.layers)
    assert [layer.forward_flops for layer in spec.layers] == [2 * 12 * 16, 2 * 16 * 4]
    assert [layer.input_elements for layer in spec.layers] == [12, 16]
    assert [layer.output_elements for layer in spec.layers] == [16, 4]
    # The first keeps its input and, for the relu, its result: which is also what the second would keep.
    assert [layer.saved_elements for layer in spec.layers] == [12 + 16, 0]


class Plain(nn.Module):
    """No container, a module entered twice, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.first = nn.Linear(4, 8)
        self.again = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.first(x)))


def test_a_model_without_containers_is_a_layer_for_each_call() -> None:
    spec = spec_of(Plain, torch.zeros(1, 4), "plain")
    assert names(spec) == ["first", "again", "again#2"]
    assert [(layer.modules, layer.again) for layer in spec.layers] == [
        (("first",), ()),
        (("again",), ()),
        ((), ("again",)),
    ]
    assert not any(layer.is_block for layer in spec.layers)
    assert all(layer.may_begin_stage for layer in spec.layers)
    assert spec.forward_flops == 2 * (4 * 8 + 2 * 8 * 8)
    assert {param.name for param in spec.params if param.shared} == {"again.weight", "again.bias"}
    assert len(spec.params) == 6


class Parts(nn.Module):
    """A list of two blocks, a head of two parts, and a wrapper of two more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.norm(self.inner(x)))


def _staged(*stages: str) -> ModelSpec:
    with torch.device("meta"):
        module = Parts()
    return trace(module, torch.zeros(1, 4), "parts", stages=stages)


def test_stages_begin_with_the_modules_that_are_named() -> None:
    layers = _staged("blocks.1", "norm").layers
    assert [layer.name for layer in layers if layer.may_begin_stage] == ["blocks.0", "blocks.1", "norm+head"]
    assert [layer.is_block for layer in layers].count(True) == 2


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (("nrom",), "no module 'nrom' .did you mean 'norm'"),
        (("blocks.0",), "first stage always begins with 'blocks.0'"),
        (("",), "no module ''"),
    ],
)
def test_names_with_which_no_later_stage_begins_are_refused(stages: tuple[str, ...], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        _staged(*stages)


def test_modules_are_opened_where_few_are_called() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    assert names(spec_of(Wrapper, torch.zeros(1, 4), "wrapped")) == ["first", "again", "again#2"]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) * self.scale


def test_weights_of_the_root_make_it_the_module() -> None:
    spec = spec_of(Bare, torch.zeros(1, 4))
    assert spec.layers[0].modules == ("",)
    assert [(param.name, param.trainable) for param in spec.params] == [
        ("scale", True),
        ("frozen.weight", False),
        ("frozen.bias", False),
    ]


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 16)
        self.place = nn.Parameter(torch.zeros(16))
        encoder_layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder_layer, 2, norm=nn.LayerNorm(16))
        decoder_layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(decoder_layer, 2)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 10))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.emb(input_ids) + self.place
        return self.head(self.decoder(x, self.encoder(x)))


def test_an_encoder_and_a_decoder_both_have_blocks() -> None:
    spec = spec_of(Translator, {"input_ids": torch.zeros(1, 6, dtype=torch.long)})
    blocks = ["encoder.layers.0", "encoder.layers.1", "norm", "decoder.layers.0", "decoder.layers.1"]
    assert names(spec) == ["emb", *blocks, "head"]
    assert [layer.is_block for layer in spec.layers] == [False, True, True, False, True, True, False]
    assert layer_of(spec, "place").name == "emb"
    assert spec.layers[-1].modules == ("head",)
    # Fused attention keeps no matrix of scores: 6 tokens, queries with keys and values in one, output, log-sum-exp.
    assert spec.layers[1].saved_selective_elements == 6 * (16 + 48 + 16 + 2 + 16 + 32 + 16)
    # What the decoder is given, the encoder was given first.
    assert spec.layers[4].input_elements == 6 * 16


class Stage(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU())
        self.layer1 = nn.Sequential(Stage(8, 8), Stage(8, 8))
        self.layer2 = nn.Sequential(Stage(8, 32), Stage(32, 32))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.layer2(self.layer1(self.stem(x)))))


def test_stages_of_convolutions_are_blocks_and_batch_norm_couples() -> None:
    spec = spec_of(Convolutions, (torch.zeros(1, 3, 8, 8), torch.zeros(1)))
    assert names(spec) == ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"]
    assert spec.coupled_modules == (*(f"layer{i}.{j}.norm" for i in (1, 2) for j in (0, 1)), "head.1")
    per_pixel = [3 * 8, 8 * 8, 8 * 8, 8 * 32, 32 * 32]
    assert [layer.forward_flops for layer in spec.layers[:-1]] == [2 * 9 * 64 * count for count in per_pixel]
    assert spec.layers[0].output_elements == 64 * 8
    assert spec.buffer_bytes == 2 * 4 * (8 + 8 + 32 + 32 + 32) + 5 * 8
    module = blueprint(Convolutions, 0).module.eval()
    assert trace(module, (torch.zeros(1, 3, 8, 8),), "still").coupled_modules == ()


def test_a_batch_norm_reads_its_input_twice_and_has_a_block_for_each_channel() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))

    layers = spec_of(build, (torch.zeros(1, 3, 6, 6), torch.zeros(1))).layers
    moved = [sum(getattr(layer.moved, name) for layer in layers) for name in ("elements", "channel_elements")]
    assert [moved[0] // 8, moved[1]] == [3 * 36 + 3, 3 * 36 + 3]  # and the six of a channel, of two samples


def test_channels_that_stand_last_in_memory_have_no_blocks() -> None:
    images = torch.zeros(2, 4, 3, 3)
    assert channels_first(images) == 4
    assert channels_first(images.contiguous(memory_format=torch.channels_last)) == 0
    assert channels_first(torch.zeros(2, 4)) == 0


class Loop(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0):
            x = self.act(self.layers[index](x))
        return x


def test_a_block_called_again_is_shared_and_makes_a_layer_for_each_call() -> None:
    spec = spec_of(Loop, torch.zeros(1, 4))
    assert [layer.name for layer in spec.layers] == ["layers.0", "layers.1", "layers.0#2"]
    assert [layer.called for layer in spec.layers] == [("layers.0",), ("layers.1",), ("layers.0",)]
    assert [layer.repeats for layer in spec.layers] == ["", "", "layers.0"]
    assert [param.shared for param in spec.params] == [True, True, False, False]
    assert [[use.layer for use in param.uses] for param in spec.params] == [[0, 2], [0, 2], [], []]
    assert [layer.forward_flops for layer in spec.layers] == [2 * 16, 2 * 16, 2 * 16]


class Functional(nn.Module):
    """Weights used without entering their module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers[0](x), self.head.weight)


def test_a_module_that_is_not_entered_belongs_to_no_layers_modules() -> None:
    spec = spec_of(Functional, torch.zeros(1, 4))
    assert [layer.modules for layer in spec.layers] == [("layers.0",)]
    assert {param.name: param.layer for param in spec.params}["head.weight"] == 0


# -- values ----------------------------------------------------------------------------------------


class Looks(nn.Module):
    """Looks at whole numbers: an input, a buffer, a constant, and how many there are of something."""

    def __init__(self, at_floats: bool = False) -> None:
        super().__init__()
        self.at_floats = at_floats
        self.linear = nn.Linear(4, 4)
        self.register_buffer("num_rounds", torch.tensor(3))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts = counts.clone()
        counts[0] += 1
        picked = counts.nonzero().flatten()
        for _ in range(int(self.num_rounds) + int(counts.view(-1)[0]) + len(picked)):
            x = self.linear(x)
        if torch.arange(3).sum() == 3 and torch.equal(counts, counts + 0):
            x = self.linear(x)
        return x if not self.at_floats or x.sum() > 0 else -x


def test_whole_numbers_keep_their_values() -> None:
    sample = {"x": torch.zeros(1, 4), "counts": torch.tensor([1, 0, 5])}
    spec = spec_of(Looks, sample)
    assert spec.forward_flops == (3 + 2 + 2 + 1) * 2 * 16
    with pytest.raises(ModelError, match="looks at the values"):
        trace(blueprint(Looks, 0).module, sample, "no buffers")


class Indexing(nn.Module):
    """Reads its tokens through a list of numbers or of booleans, and looks at what it has found."""

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        found = tokens[:, self.index]
        tokens = tokens.clone()
        tokens[:, [0]] = 7
        return self.linear(x) if found.tolist() == [[5, 3]] and tokens[0, 0] == 7 else x.sum() + found.sum()


@pytest.mark.parametrize("index", [[-1, 0], [True, False, True], torch.tensor([2, 0]), slice(0, 2)])
def test_lists_of_numbers_in_an_index_keep_their_values(index: Any) -> None:
    sample = {"x": torch.zeros(1, 4), "tokens": torch.tensor([[3, 4, 5]])}
    found = Indexing(index)(**sample)
    spec = spec_of(lambda: Indexing(index), sample)
    assert bool(spec.forward_flops) == (found.dim() == 2)
    assert spec.varies_at == ""


class Placing(nn.Module):
    """Reverses its rows by an index that is expanded along their elements, and looks at one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4).flip(0)[None, :, None].expand(len(x), -1, 3)
        marks = torch.zeros(1, 4, 3, dtype=torch.int64).scatter(1, places, places)
        found = torch.zeros_like(x).scatter(1, places, self.linear(x))
        return found if marks[0, :, 2].tolist() == [0, 1, 2, 3] else x


def test_an_expanded_index_keeps_its_values() -> None:
    spec = spec_of(Placing, {"x": torch.zeros(1, 4, 3)})
    assert spec.forward_flops == 2 * 4 * 3 * 3
    assert spec.varies_at == ""


class Splitting(nn.Module):
    """Sorts its rows by scores and splits them by counts that it reads, as lists of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.parts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        best = self.scores(x).argmax(-1)
        counts = torch.bincount(best, minlength=2).tolist()
        parts = x[best.argsort()].split(counts)
        return torch.cat([part(rows) for part, rows in zip(self.parts, parts, strict=True)])


def test_a_list_of_numbers_is_read_where_values_are_known() -> None:
    spec = spec_of(Splitting, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    assert spec.forward_flops == 2 * 6 * 4 * (2 + 4)
    assert spec.varies_at
    with pytest.raises(ModelError, match="looks at the values"):
        trace(blueprint(Splitting, 0).module, torch.zeros(6, 4), "no values")


def test_code_that_looks_at_other_values_is_run_for_real() -> None:
    sample = {"x": torch.zeros(1, 4), "counts": torch.tensor([1, 0, 5])}
    state = torch.get_rng_state()
    spec = spec_of(lambda: Looks(at_floats=True), sample)
    assert spec.forward_flops == (3 + 2 + 2 + 1) * 2 * 16
    assert spec.varies_at == "linear"
    assert torch.equal(torch.get_rng_state(), state)
    assert spec_of(Looks, sample).varies_at == ""


def test_what_no_value_is_drawn_for_is_refused_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {"x": torch.zeros(1, 4), "counts": torch.tensor([1, 0, 5])}
    monkeypatch.setattr(meta_tensors, "KNOWN_WEIGHTS", 19)
    assert spec_of(lambda: Looks(at_floats=True), sample).varies_at == "linear"
    monkeypatch.setattr(meta_tensors, "DRAWN_ELEMENTS", 0)
    with pytest.raises(
        ModelError, match=r"the forward looks at the values.*models of up to .* weights are run once to see"
    ):
        spec_of(lambda: Looks(at_floats=True), sample)


class Picking(nn.Module):
    """Works on a part of its tokens: chosen by tokens, or by scores."""

    def __init__(self, by_scores: bool) -> None:
        super().__init__()
        self.by_scores = by_scores
        self.embed = nn.Embedding(8, 4)
        self.drop = nn.Dropout(0.5)
        self.inner = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        x = x + F.scaled_dot_product_attention(x, x, x)
        mask = x.sum(-1) > 0 if self.by_scores else tokens > 3
        y = torch.zeros_like(x)
        y[mask] = self.inner(x[mask])
        return x + y + torch.masked_select(x, mask[..., None]).sum()


def test_a_mask_picks_as_many_as_the_sample_has() -> None:
    sample = torch.tensor([[0, 1, 2, 5, 7, 1]])
    spec = spec_of(lambda: Picking(by_scores=False), sample)
    attention = 2 * 6 * 6 * (4 + 4)
    assert spec.forward_flops == attention + 2 * 2 * 16
    assert (spec.varies_at, spec.picks_at) == ("", "drop")  # the module entered last
    spec = spec_of(lambda: Picking(by_scores=True), sample)
    num_picked, rest = divmod(spec.forward_flops - attention, 2 * 16)
    assert 0 <= num_picked <= 6
    assert rest == 0
    assert (spec.varies_at, spec.picks_at) == ("drop", "")


def test_a_failing_forward_is_named() -> None:
    plan = blueprint(Plain, 0)
    with pytest.raises(ModelError, match="plain cannot be traced: the forward at first fails: RuntimeError"):
        trace(plan.module, torch.zeros(1, 5), "plain")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in plan.module.modules())
    query = torch.zeros(1, 2, 3, 4, device="meta", requires_grad=True)
    assert "Attention" not in str(F.scaled_dot_product_attention(query, query, query).grad_fn)


def test_costs_are_a_function_of_events_alone() -> None:
    """Two regions: `a` makes storage 2 of storage 1 by a product, and `b` reads it, adds to it, and keeps storages 2 and 3."""
    product = Product(rows=2, inner=4, columns=3, factors="weight", owner="a")
    events: list[Work | SavedTensor] = [
        Work("a", ((1, 8), (9, 12)), ((2, 6),), "product", 48, product, is_cut=False, is_view=False),
        SavedTensor("a", "a", 1, is_inside=True),
        Work("b", ((2, 6),), ((2, 3),), "other", None, None, is_cut=False, is_view=True),
        Work("b", ((2, 6),), ((3, 6),), "fusible", None, None, is_cut=False, is_view=False),
        SavedTensor("b", "b.norm", 2, is_inside=True),
        SavedTensor("b", "b", 3, is_inside=False),
        SavedTensor("b", "b", 3, is_inside=False),
    ]
    costs = costs_of(events, {"": "", "a": "a", "b": "b"}, weights={9}, norms={"b.norm"})
    assert costs.makers == {2: "a", 3: "b"}
    assert costs.readers == {1: ["a"], 2: ["b"]}  # of a weight no region is the reader
    assert costs.regions["a"].products == [product]
    assert (costs.regions["a"].flops, costs.regions["a"].results, costs.regions["a"].repeated) == (48, {2}, 1)
    assert (costs.savers, costs.norm_savers, costs.saves) == ({1: "a", 3: "b"}, {2: "b"}, {1: 1, 2: 1, 3: 2})
    assert costs.moved.of({"b"}, {2: 6, 3: 6}, {3})[0].elements == 12  # a view moves nothing


@pytest.mark.parametrize(
    ("calls", "groups"),
    [("a b", ()), ("a b a b", (("a", "b"),)), ("a a b b", (("a",), ("b",))), ("a b b a c c", (("a", "b"), ("c",)))],
)
def test_groups_of_modules_follow_from_the_calls_of_a_forward(calls: str, groups: Groups) -> None:
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abc"})
    modules = ForwardCalls(id, TracedPlaces())
    for name in calls.split():
        modules.enter(name, model[name], (), {}, is_outside=False)
        modules.leave(())
    assert groups_of(model, modules) == groups
