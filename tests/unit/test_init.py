"""Taped initialisation: equal bits whatever is made first, the statistics of the normal build, and clear refusals."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint, blueprint, fill_rest
from samestep.errors import ModelError

CPU = torch.device("cpu")


class Holder(nn.Module):
    """A module whose contents a function fills in."""

    def __init__(self, fill: Callable[[nn.Module], object]) -> None:
        super().__init__()
        fill(self)


def made_by(fill: Callable[[nn.Module], object], seed: int = 0) -> Blueprint:
    return blueprint(lambda: Holder(fill), seed)


def value_of(make: Callable[[], Tensor], seed: int = 0) -> Tensor:
    return made_by(lambda m: m.register_buffer("x", make()), seed).materialize("x", CPU)


def names_of(print_: Blueprint) -> list[str]:
    return list(print_.canonical)


class Plain(nn.Module):
    """Torch's own modules, tied and copied ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 30)
        self.embedding = nn.Embedding(30, 40, padding_idx=1)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(40)
        self.batch_norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(40, 2)
        self.lstm = nn.LSTM(40, 10, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(40, 30)
        self.head.weight = self.embedding.weight
        self.scaled = nn.Parameter(torch.randn(30, 40) * 0.02)
        self.copied = nn.Parameter(torch.empty(30, 40))
        self.copied.data.copy_(self.linear.weight)
        with torch.no_grad():
            self.scaled[0].fill_(3)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("scale", torch.tensor([1.0, 2.0]), persistent=False)
        self.same_mask = self.mask


@pytest.fixture(scope="module")
def plain() -> Blueprint:
    return blueprint(Plain, 0)


class TestPlainModules:
    def test_everything_is_on_meta_and_the_names_are_those_of_a_normal_build(self, plain):
        normal = Plain()
        assert list(dict(plain.module.named_parameters())) == list(dict(normal.named_parameters()))
        assert list(dict(plain.module.named_buffers())) == list(dict(normal.named_buffers()))
        assert all(t.is_meta for t in (*plain.module.parameters(), *plain.module.buffers()))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in plain.module.parameters())

    def test_statistics_are_those_of_a_normal_build(self, plain):
        torch.manual_seed(0)
        for name, normal in Plain().state_dict().items():
            made = plain.materialize(name, CPU)
            assert (made.shape, made.dtype) == (normal.shape, normal.dtype)
            assert not made.requires_grad
            if normal.float().std(correction=0) == 0:
                assert torch.equal(made, normal), name
            elif made.numel() > 100:
                assert abs(made.std() / normal.std() - 1) < 6 / made.numel() ** 0.5, name
        assert plain.materialize("batch_norm.num_batches_tracked", CPU).dtype == torch.int64
        assert (plain.materialize("embedding.weight", CPU)[1] == 0).all()

    def test_ties_copies_and_deep_copies_are_equal(self, plain):
        assert plain.canonical["head.weight"] == "embedding.weight"
        assert plain.canonical["same_mask"] == "mask"
        for one, other in [
            ("head.weight", "embedding.weight"),
            ("copied", "linear.weight"),
            ("encoder.layers.0.linear1.weight", "encoder.layers.1.linear1.weight"),
        ]:
            assert torch.equal(plain.materialize(one, CPU), plain.materialize(other, CPU))
        assert (plain.materialize("scaled", CPU)[0] == 3).all()

    def test_bits_depend_on_seed_and_name_alone(self, plain):
        first = {name: plain.materialize(name, CPU) for name in names_of(plain)}
        again = blueprint(Plain, 0)
        for name in reversed(names_of(again)):
            torch.manual_seed(len(name))
            assert torch.equal(again.materialize(name, CPU), first[name]), name
        other = blueprint(Plain, 1)
        for name in ("linear.weight", "scaled", "lstm.weight_hh_l1"):
            assert not torch.equal(other.materialize(name, CPU), first[name])
        assert not torch.equal(first["lstm.weight_hh_l0"], first["lstm.weight_hh_l1"])

    def test_every_tensor_is_the_callers_own(self, plain):
        for name in names_of(plain):
            made = plain.materialize(name, CPU)
            assert made.is_contiguous()
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
            before = made.clone()
            made.fill_(7)
            assert torch.equal(plain.materialize(name, CPU), before)

    def test_a_dtype_casts_what_was_drawn(self, plain):
        drawn = plain.materialize("linear.weight", CPU)
        assert torch.equal(plain.materialize("linear.weight", CPU, torch.bfloat16), drawn.to(torch.bfloat16))

    def test_an_unknown_name_is_refused(self, plain):
        with pytest.raises(ModelError, match=r"no tensor 'linear.wight' \(did you mean 'linear.weight'\?\)"):
            plain.materialize("linear.wight", CPU)


def test_random_states_of_the_process_stay_as_they_were():
    def build() -> nn.Module:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        return nn.Linear(3, 3)

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    print_ = blueprint(build, 0)
    print_.materialize("weight", CPU)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()
    assert random.random() == expected[2]


def test_what_python_draws_in_a_build_function_follows_the_seed():
    def build() -> nn.Module:
        return nn.Linear(random.randrange(1, 10**6), np.random.randint(1, 10**6), device="meta")

    shapes = [blueprint(build, seed).module.weight.shape for seed in (0, 0, 1)]
    assert shapes[0] == shapes[1] != shapes[2]


@pytest.mark.parametrize(
    "initialise",
    [
        lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04),
        lambda w: nn.init.trunc_normal_(w, std=1.0, a=1.5, b=3.0),
        nn.init.orthogonal_,
        nn.init.eye_,
        lambda w: nn.init.sparse_(w, 0.5),
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        lambda w: w.data.normal_().clamp_(-1, 1),
        lambda w: w.data.exponential_(),
        lambda w: w.data.t().copy_(torch.randn(40, 60)),
    ],
    ids=lambda f: getattr(f, "__name__", "f"),
)
def test_initialisers_give_their_own_distribution(initialise):
    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.empty(60, 40))
        initialise(module.w)

    made = made_by(fill).materialize("w", CPU)
    normal = torch.empty(60, 40)
    torch.manual_seed(0)
    initialise(normal)
    assert abs(made.std() / normal.std() - 1) < 0.2
    assert abs(made.mean() - normal.mean()) < 0.1 * normal.std()
    torch.testing.assert_close(made.quantile(0.05), normal.quantile(0.05), rtol=0.2, atol=0.05)
    torch.testing.assert_close(made.quantile(0.95), normal.quantile(0.95), rtol=0.2, atol=0.05)
    if initialise is nn.init.orthogonal_:
        torch.testing.assert_close(made.t() @ made, torch.eye(40), atol=1e-5, rtol=0)
    if initialise is nn.init.eye_:
        assert torch.equal(made, normal)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.tensor([1.0, 2.0]) + torch.arange(2.0, device="cpu"),
        lambda: torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]),
        lambda: torch.from_numpy(np.arange(3.0)),
        lambda: torch.as_tensor(np.arange(3.0)).to("cpu"),
        lambda: torch.frombuffer(bytearray(range(8)), dtype=torch.uint8),
        lambda: torch.FloatTensor([1, 2]),
        lambda: torch.full((2,), torch.tensor(3.0).item()),
        lambda: torch.tensor([x.item() for x in torch.linspace(0, 0.3, 4)]),
        lambda: torch.tensor(torch.arange(4).tolist()),
        lambda: torch.tensor(float(torch.arange(4).numpy().sum() + np.asarray(torch.ones(2)).sum())),
        lambda: torch.ones(3)[torch.tensor([True, False, True])],
        lambda: torch.nonzero(torch.tensor([0, 1, 1])),
        lambda: torch.unique(torch.tensor([1, 1, 2])),
        lambda: torch.repeat_interleave(torch.tensor([1, 2]), torch.tensor([2, 1])),
        lambda: torch.zeros(2) if torch.ones(2).sum() > 1 else torch.ones(2),
        lambda: torch.arange(6).view(2, 3).t(),
        lambda: torch.arange(4).expand(3, -1)[:, 1:],
        lambda: torch.polar(torch.ones(3), torch.arange(3.0)).conj(),
        lambda: torch.triu(torch.full((3, 3), float("-inf")), 1),
        lambda: torch.ones(2, device=torch.empty(1).device, pin_memory=False),
        lambda: torch.tensor([f"{torch.tensor(1.5):.1f}" == "1.5", torch.empty(1).is_meta, torch.empty(1).is_cpu]),
        lambda: torch.zeros(4).index_put_((torch.tensor([True, False, True, False]),), torch.tensor(5.0)),
    ],
)
@pytest.mark.parametrize("outer", ["cpu", "meta"])
def test_constants_are_exactly_those_of_a_normal_build(make, outer):
    with torch.device(outer):
        made = value_of(make)
    torch.testing.assert_close(made, make().resolve_conj(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0], device="meta"),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: torch.tensor([1.0, 2.0]).to("cuda").cuda(),
        lambda: torch.arange(1.0, 3.0, device="cuda", pin_memory=True),
    ],
)
def test_devices_that_are_not_here_do_not_matter(make):
    assert value_of(make).tolist() == [1, 2]


def test_numpy_memory_that_changes_later_does_not_change_the_constant():
    def fill(module: nn.Module) -> None:
        table = np.zeros(3, dtype=np.float32)
        module.w = nn.Parameter(torch.empty(2, 3))
        for row in range(2):
            table[:] = row + 1
            module.w.data[row].copy_(torch.from_numpy(table))

    assert made_by(fill).materialize("w", CPU).tolist() == [[1, 1, 1], [2, 2, 2]]


def test_a_guard_against_meta_does_not_skip_the_initialisation():
    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.zeros(3))
        if not module.w.is_meta and module.w.device.type != "meta":
            module.w.data.fill_(2)

    assert made_by(fill).materialize("w", CPU).tolist() == [2, 2, 2]


def test_a_draw_that_feeds_two_tensors_gives_both_the_same_numbers():
    def fill(module: nn.Module) -> None:
        drawn = torch.randn(5)
        module.b = nn.Parameter(drawn * 2)
        module.a = nn.Parameter(drawn + 0)
        drawn.zero_()

    print_ = made_by(fill)
    assert torch.equal(print_.materialize("b", CPU), print_.materialize("a", CPU) * 2)
    assert print_.materialize("a", CPU).abs().sum() > 0


def test_parts_of_one_memory_are_made_each_for_itself():
    def fill(module: nn.Module) -> None:
        flat = torch.randn(10)
        module.a, module.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        module.whole = nn.Parameter(flat.clone())

    print_ = made_by(fill)
    parts = [print_.materialize(name, CPU) for name in ("a", "b")]
    assert torch.equal(torch.cat(parts), print_.materialize("whole", CPU))
    assert parts[0].untyped_storage().nbytes() == 16


def test_a_write_that_covers_everything_drops_what_was_before():
    print_ = blueprint(lambda: nn.init.zeros_(m.weight) is None or m if (m := nn.Linear(3, 3)) else m, 0)
    assert print_.materialize("weight", CPU).abs().sum() == 0
    assert len(print_._slices[print_._refs["weight"].memory].entries) == 1


def test_module_moves_and_casts_are_followed():
    print_ = blueprint(lambda: nn.Linear(30, 30).to(torch.bfloat16).cuda().to("cuda", torch.float16), 0)
    made = print_.materialize("weight", CPU)
    assert made.dtype == torch.float16
    assert made.std() > 0


def test_fill_rest_makes_buffers_and_attributes_and_leaves_parameters():
    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.ones(2))
        module.register_buffer("inv_freq", 1.0 / 10 ** torch.linspace(0, 1, 4), persistent=False)
        module.original_inv_freq = module.inv_freq
        module.register_buffer("count", torch.tensor(3))
        module.nested = [torch.arange(3), (torch.ones(2), "x"), {"k": torch.zeros(1)}]
        module.window = module.w.data[:1]
        module.register_buffer("nothing", None)

    print_ = made_by(fill)
    fill_rest(print_, CPU, torch.bfloat16)
    module = print_.module
    assert module.w.is_meta
    assert module.window.is_meta, "a window on a parameter must not go stale silently"
    assert module.original_inv_freq is module.inv_freq
    assert torch.equal(module.inv_freq, (1.0 / 10 ** torch.linspace(0, 1, 4)).to(torch.bfloat16))
    assert module.count.tolist() == 3
    assert module.count.dtype == torch.int64
    assert module.nested[0].tolist() == [0, 1, 2]
    assert module.nested[1][0].dtype == torch.bfloat16
    assert module.nested[2]["k"].tolist() == [0]


class TestInstance:
    def test_its_values_are_kept_bit_for_bit(self):
        model = Plain()
        model.linear.bias.requires_grad_(False)
        model.scaled.tag = "mine"
        print_ = blueprint(model, 0)
        assert print_.module is not model
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            made = print_.materialize(name, CPU)
            assert torch.equal(made, tensor)
            assert made.data_ptr() != tensor.data_ptr()
        twin = print_.module
        assert all(p.is_meta for p in twin.parameters())
        assert twin.head.weight is twin.embedding.weight
        assert twin.lstm._flat_weights[0] is twin.lstm.weight_ih_l0
        assert not twin.linear.bias.requires_grad
        assert twin.scaled.tag == "mine"
        assert not model.linear.weight.is_meta
        fill_rest(print_, CPU)
        assert twin.same_mask is twin.mask
        assert torch.equal(twin.mask, model.mask)
        assert twin.mask is not model.mask

    def test_one_on_meta_is_refused(self):
        with pytest.raises(ModelError, match="weight is on the meta device"):
            blueprint(nn.Linear(2, 2, device="meta"), 0)


ON_META = torch.empty(3, device="meta")


def _two_in_one_memory(module: nn.Module) -> None:
    module.a = nn.Parameter(torch.randn(3))
    module.b = nn.Parameter(module.a.data)


class TestRefusals:
    @pytest.mark.parametrize(
        "read",
        [
            lambda w: w.sum().item(),
            lambda w: bool((w > 0).all()),
            lambda w: w.data.numpy(),
            lambda w: w.tolist(),
            lambda w: torch.nonzero(w),
            lambda w: w[w > 0],
            lambda w: torch.tensor([w[0], w[1]]),
        ],
    )
    def test_looking_at_random_numbers(self, read):
        def fill(module: nn.Module) -> None:
            module.w = nn.Parameter(torch.randn(3))
            read(module.w)

        with pytest.raises(ModelError, match=r"^Holder.*test_init\.py:\d+\) looks at random values.*instance"):
            made_by(fill)

    @pytest.mark.parametrize(
        ("build", "says"),
        [
            (lambda: Holder(lambda m: (setattr(m, "w", nn.Parameter(torch.randn(3))), m.w[0].item())), "Holder, at its tensor 'w'"),
            (lambda: Holder(lambda m: setattr(m, "w", nn.Parameter(torch.empty(3)))), "w is never given values"),
            (lambda: nn.LazyLinear(3), "weight has no shape yet"),
            (nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d()), "weight has no shape yet"),
            (nn.Sequential(nn.Linear(2, 3), nn.LazyConv1d(3, 1)), "weight has no shape yet"),
            (lambda: Holder(lambda m: setattr(m, "w", nn.Parameter(ON_META * 2))), "w was made on the meta device outside"),
            (lambda: Holder(_two_in_one_memory), "a and b are two parameters in one memory"),
            (lambda: 3, "returned a int"),
        ],
    )  # fmt: skip
    def test_what_no_values_are_known_for(self, build, says):
        with pytest.raises(ModelError, match=says):
            blueprint(build, 0)

    def test_a_buffer_that_is_a_window_on_a_parameter(self):
        def fill(module: nn.Module) -> None:
            module.w = nn.Parameter(torch.randn(3))
            module.register_buffer("b", module.w.data[1:])

        with pytest.raises(ModelError, match="buffer b is a view of parameter w"):
            fill_rest(made_by(fill), CPU)


def configs() -> Iterator[object]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    yield transformers.LlamaConfig(**sizes, pad_token_id=0)
    yield transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    yield transformers.Qwen3Config(**sizes, head_dim=16)
    yield transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=101, n_positions=32, **ids)
    yield transformers.MixtralConfig(**sizes, num_local_experts=4)
    yield transformers.Gemma2Config(**sizes, head_dim=16)
    yield transformers.MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=101)


@pytest.mark.parametrize("number", range(7))
def test_hugging_face_models_start_as_they_do_when_built_normally(number):
    transformers = pytest.importorskip("transformers")
    config = list(configs())[number]
    print_ = blueprint(lambda: transformers.AutoModelForCausalLM.from_config(config), 0)
    torch.manual_seed(0)
    normal = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in normal.named_parameters(remove_duplicate=False):
        made, tensor = print_.materialize(name, CPU), tensor.detach()
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
        if torch.equal(made, tensor):
            continue
        assert made.std() > 0, name
        assert abs(made.std() / tensor.std() - 1) < 8 / made.numel() ** 0.5, name
        assert abs(made.mean() - tensor.mean()) < 8 * tensor.std() / made.numel() ** 0.5, name
        assert torch.equal((made == 0).all(-1), (tensor == 0).all(-1)), f"{name}: the padding row"
    fill_rest(print_, CPU)
    made_buffers = dict(print_.module.named_buffers())
    for name, tensor in normal.named_buffers():
        assert torch.equal(made_buffers[name], tensor), name
    ties = {name: id(tensor) for name, tensor in normal.named_parameters(remove_duplicate=False)}
    twins = {name: id(tensor) for name, tensor in print_.module.named_parameters(remove_duplicate=False)}
    assert [list(ties.values()).index(i) for i in ties.values()] == [
        list(twins.values()).index(i) for i in twins.values()
    ]
    for module in print_.module.modules():
        assert not any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values())
