"""Dropout masks are functions of their place: equal in every cut of the batch and in recompute, random to the eye."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.attention import formula
from samestep.errors import LayoutError, ModelError
from samestep.models.param_spec import Cut, ParamSpec
from samestep.models.spec import MaskSpec, ModelSpec
from samestep.randomness import masks, row_hashes
from samestep.randomness.masks import (
    DRAWING_NOTHING,
    MaskSlice,
    drop_mask,
    has_dropout,
    hash_bits,
    hash_positions,
    mix,
    named_modules,
    positions,
    row_halves,
)
from samestep.randomness.mode import Draw, DropoutMode, track_modules
from samestep.randomness.replacements import HANDLERS
from tests.models import Call


def bits_at(keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return hash_bits(row_halves(keys, rows), columns)


def draw(samples: list[int], seed: int = 1, step: int = 3) -> Draw:
    return Draw(seed=seed, step=step, samples=torch.tensor(samples))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def run(model: nn.Module, x: Tensor, samples: list[int], **at: int) -> Tensor:
    with DropoutMode(model, draw(samples, **at)):
        return model(x)


DROPOUTS = {
    "dropout": (lambda x: F.dropout(x, 0.4), (6, 5, 4)),
    "dropout flat": (lambda x: F.dropout(x.flatten(0, 1), 0.4).unflatten(0, (-1, 5)), (6, 5, 4)),
    "dropout vector": (lambda x: F.dropout(x, 0.4), (6,)),
    "dropout inplace": (lambda x: F.dropout(x.clone(), 0.4, inplace=True), (6, 5, 4)),
    "dropout1d": (lambda x: F.dropout1d(x, 0.4), (6, 5, 4)),
    "dropout2d": (lambda x: F.dropout2d(x, 0.4), (6, 5, 4, 3)),
    "dropout3d": (lambda x: F.dropout3d(x, 0.4), (6, 5, 4, 3, 2)),
    "alpha": (lambda x: F.alpha_dropout(x, 0.4, True), (6, 5, 4)),
    "alpha inplace": (lambda x: F.alpha_dropout(x.clone(), 0.4, True, True), (6, 5, 4)),
    "feature alpha": (lambda x: F.feature_alpha_dropout(x, 0.4, True), (6, 5, 4)),
    "torch.dropout": (lambda x: torch.dropout(x, 0.4, True), (6, 5, 4)),
    "torch.dropout_": (lambda x: torch.dropout_(x.clone(), p=0.4, train=True), (6, 5, 4)),
    "torch.feature_dropout": (lambda x: torch.feature_dropout(x, 0.4, True), (6, 5, 4)),
}
CUTS = [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[5], [0, 3], [1, 4, 2]]]


@pytest.mark.parametrize("name", DROPOUTS)
def test_masks_do_not_know_how_the_batch_is_cut(name: str) -> None:
    function, shape = DROPOUTS[name]
    model = Call(function)
    x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    whole = run(model, x, [10, 11, 12, 13, 14, 15])
    assert not torch.equal(whole, x)
    for cut in CUTS:
        for part in cut:
            assert torch.equal(run(model, x[part], [10 + i for i in part]), whole[part]), (name, part)


def test_shapes_of_the_same_sample_share_a_mask() -> None:
    flat = run(Call(lambda x: F.dropout(x.flatten(0, 1), 0.4)), ones(4, 5, 8), [0, 1, 2, 3])
    assert torch.equal(flat.view(4, 5, 8), run(Call(lambda x: F.dropout(x, 0.4)), ones(4, 5, 8), [0, 1, 2, 3]))


def test_values_match_torchs_formulas() -> None:
    x = torch.randn(4, 64, 16, dtype=torch.float64)
    kept = run(Call(lambda x: F.dropout(x, 0.25)), x, [0, 1, 2, 3])
    assert torch.allclose(kept, torch.where(kept == 0, 0.0, x / 0.75))
    channels = run(Call(lambda x: F.dropout1d(x, 0.25)), x, [0, 1, 2, 3])
    assert set((channels == 0).double().mean(-1).unique().tolist()) == {0.0, 1.0}
    assert torch.equal(run(Call(lambda x: F.dropout(x, 1.0)), x, [0, 1, 2, 3]), torch.zeros_like(x))
    assert torch.equal(run(Call(lambda x: F.alpha_dropout(x, 1.0, True)), x, [0, 1, 2, 3]), torch.zeros_like(x))
    for p in (0.1, 0.7):
        alpha = run(Call(lambda x, p=p: F.alpha_dropout(x, p, True)), x, [0, 1, 2, 3])
        ours = alpha.unique()
        a = 1 / math.sqrt((1.7580993408473766**2 * p + 1) * (1 - p))
        low = -1.7580993408473766 * a * (1 - p)
        expected = a * x + 1.7580993408473766 * a * p
        assert torch.isclose(alpha, expected).logical_or(torch.isclose(alpha, torch.tensor(low).double())).all()
        theirs = F.alpha_dropout(x, p, True).unique()
        assert (ours - low).abs().min() < 1e-12
        assert (theirs - low).abs().min() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_type_is_kept_and_mask_is_the_same_in_each(dtype: torch.dtype) -> None:
    y = run(Call(lambda x: F.dropout(x, 0.5)), ones(2, 300).to(dtype), [0, 1])
    assert y.dtype == dtype
    assert torch.equal(y.double(), run(Call(lambda x: F.dropout(x, 0.5)), ones(2, 300), [0, 1]))


def test_gradient_is_the_mask() -> None:
    x = ones(3, 50).requires_grad_()
    y = run(Call(lambda x: F.dropout(x, 0.5)), x, [0, 1, 2])
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_no_training_or_no_probability_draws_nothing() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Dropout2d(0.5).eval())
    x = ones(2, 3, 4, 5)
    with DropoutMode(model, draw([0, 1])) as mode:
        assert torch.equal(model(x), x)
        assert torch.dropout(x, 0.5, False) is x
    assert mode.num_draws == 0


def test_every_part_of_the_place_changes_the_mask() -> None:
    model = nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)})
    x = ones(2, 400)

    def masks(seed: int = 1, step: int = 3, samples: tuple[int, int] = (0, 1)) -> list[Tensor]:
        with DropoutMode(model, draw(list(samples), seed, step)):
            first = [model["a"](x), model["b"](x), model["a"](x)]
            return [*(row for y in first for row in y), *F.dropout(x), *F.dropout(x)]

    rows = masks() + masks(seed=2) + masks(step=4) + masks(samples=(2, -1))
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert (one == other).double().mean() < 0.65
    assert all(torch.equal(one, two) for one, two in zip(masks(), masks(), strict=True))


def test_bits_are_mixed_alike_on_cpus_and_devices() -> None:
    ends = [-(2**63), -1, 0, 1, 2**63 - 1]
    x = torch.cat(
        [torch.tensor(ends), torch.randint(-(2**62), 2**62, (999,), generator=torch.Generator().manual_seed(1))]
    )
    before = x.clone()
    assert torch.equal(masks._mix_on_cpu(x), masks._mix_on_device(x))
    assert torch.equal(masks._mix_on_cpu(x[:1000].view(50, 20).t()), masks._mix_on_device(x[:1000].view(50, 20).t()))
    assert torch.equal(x, before)


def test_masks_look_random() -> None:
    p, samples, rows, columns = 0.1, 8, 200, 300
    keys = mix(torch.arange(samples)) ^ 77
    z = (
        drop_mask(bits_at(keys, *hash_positions(torch.arange(rows), torch.arange(columns))), p).double() - p
    ) / math.sqrt(p * (1 - p))
    assert z.mean().abs() * math.sqrt(z.numel()) < 5
    for dim in range(3):
        for lag in (1, 2):
            n = z.size(dim) - lag
            both = z.narrow(dim, 0, n) * z.narrow(dim, lag, n)
            assert both.mean().abs() * math.sqrt(both.numel()) < 5, (dim, lag)
    square = z[:, 1:, 1:] * z[:, 1:, :-1] * z[:, :-1, 1:] * z[:, :-1, :-1]
    assert square.mean().abs() * math.sqrt(square.numel()) < 5
    row_sums = z.sum(-1).flatten() / math.sqrt(columns)
    assert abs(row_sums.var().item() - 1) < 5 * math.sqrt(2 / row_sums.numel())


def test_a_draw_outside_the_model_is_not_the_models_first() -> None:
    model = Call(lambda x: F.dropout(x))
    with DropoutMode(model, draw([0])):
        assert not torch.equal(F.dropout(ones(1, 100)), model(ones(1, 100)))


def test_the_hash_is_pinned():
    # A changed hash changes every run that goes on from a checkpoint.
    mask = drop_mask(bits_at(mix(torch.arange(2)), *hash_positions(torch.arange(2), torch.arange(16))), 0.5)
    assert ["".join(str(int(x)) for x in row) for row in mask.view(4, 16)] == PINNED


PINNED = ["0110110010001010", "0111010110001011", "0011100000000110", "0001110111010111"]


def test_wrappers_do_not_change_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    wrapped, x = nn.Sequential(*map(checkpoint_wrapper, plain)), ones(2, 8).float()
    assert list(named_modules(wrapped)) == list(named_modules(plain))
    assert torch.equal(run(wrapped, x, [0, 1]), run(plain, x, [0, 1]))


def test_a_failed_forward_and_a_replaced_module_leave_the_names_right() -> None:
    model = nn.Sequential(nn.Dropout(0.5), Call(lambda x: 1 / 0))
    x = ones(2, 100)
    with DropoutMode(model, draw([0, 1])) as mode:
        with pytest.raises(ZeroDivisionError):
            model(x)
        assert [frame.name for frame in mode._frames] == [""]
    model[1] = nn.Dropout(0.5)
    track_modules(model)
    track_modules(model)
    with DropoutMode(model, draw([0, 1])) as mode:
        model(x)
    assert mode._entries == {"": 1, "0": 1, "1": 1}


REFUSED = {
    "binomial": lambda x: torch.binomial(torch.full_like(x, 3.0), x.sigmoid()),
    "poisson": torch.poisson,
    "a gamma distribution": lambda x: torch.distributions.Chi2(x).sample(),
    "a beta or Dirichlet distribution": lambda x: torch.distributions.Beta(x, x).rsample(),
    "uniform_": lambda x: nn.init.uniform_(x.clone()),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True)[0],
    "fractional_max_pool": lambda x: F.fractional_max_pool2d(x[None, None], 2, output_size=2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_random_numbers_are_refused_by_name(name: str) -> None:
    model = nn.Sequential(nn.Identity(), Call(REFUSED[name]))
    with pytest.raises(ModelError, match=rf"^1: {name}.*would differ between layouts"):
        run(model, ones(2, 4), [0, 1])


def test_numbers_of_no_known_sample_are_refused() -> None:
    model = nn.Sequential(nn.Identity(), Call(lambda x: x + torch.randn(x.shape)))
    with pytest.raises(ModelError, match=r"^1: randn: .* their samples are unknown. Draw them .*torch.randn_like"):
        run(model, ones(2, 4), [0, 1])


def test_every_random_operation_of_torch_is_known() -> None:
    """Held against torch's own tag of the operations that draw."""
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if name.startswith("aten::") and op is not None and torch.Tag.nondeterministic_seeded in op.tags:
            tagged.add(base)
    # Kernels below scaled_dot_product_attention and the recurrent layers; nobody calls them by hand.
    below = ("attention", "cudnn", "miopen", "mps", "mem_eff", "sdp_choice", "nested_tensor")
    found = [
        function
        for name in tagged - {"random"}  # torch.random is a module
        if name == "scaled_dot_product_attention" or not any(word in name for word in below)
        for home in (torch, torch.Tensor, F)
        if (function := getattr(home, name, None)) is not None
    ]
    assert len(found) > 40
    assert [function for function in found if function not in HANDLERS] == []


def test_rrelu_outside_training_and_one_number_of_the_step() -> None:
    assert torch.equal(run(Call(lambda x: F.rrelu(x)), -ones(2, 4), [0, 1]), F.rrelu(-ones(2, 4)))
    numbers: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        numbers.extend([torch.rand([]), torch.rand(()), torch.rand([], dtype=torch.float64)])
        return x

    for samples in ([0, 1], [7, 3]):
        run(Call(forward), ones(2), samples)
    assert torch.equal(torch.stack(numbers[:3]), torch.stack(numbers[3:]))
    assert len({float(x) for x in numbers}) == 3
    assert all(0 <= x < 1 for x in numbers)
    assert numbers[0].dtype == torch.float32


def test_a_tensor_without_the_batch_is_refused() -> None:
    model = nn.Sequential(nn.Identity(), Call(lambda x: F.dropout(x.mean(0, keepdim=True), 0.1)))
    with pytest.raises(ModelError, match=r"^1: dropout of a tensor of shape \(1, 4\): .*the 2 samples"):
        run(model, ones(2, 4), [0, 1])
    with pytest.raises(ModelError, match="the model itself: dropout1d of a tensor with 2 dimensions has no batch"):
        run(Call(lambda x: F.dropout1d(x, 0.1)), ones(2, 4), [0, 1])
    with pytest.raises(ModelError, match=r"probability 1.5; it is between 0 and 1"):
        run(Call(lambda x: F.dropout(x, 1.5)), ones(2, 4), [0, 1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_what_one_hands_to_the_next(kind: type[nn.RNNBase]) -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = kind(4, 4, num_layers=3, dropout=0.4, batch_first=True, bidirectional=True).double()
    whole = run(model, x, [0, 1])[0]
    parts = torch.cat([run(model, x[:1], [0])[0], run(model, x[1:], [1])[0]])
    assert (parts - whole).abs().max() < 1e-14
    assert not torch.equal(whole, model.eval()(x)[0])
    model.train().dropout = 1.0  # torch's own then draws nothing that matters
    torch.testing.assert_close(run(model, x, [0, 1]), model(x), rtol=1e-12, atol=1e-12)


def test_packed_sequences_with_dropout_are_refused() -> None:
    x = ones(2, 3, 4).float()
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)})
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    with (
        DropoutMode(model, draw([0, 1])),
        pytest.raises(ModelError, match=r"^lstm: torch's lstm with dropout=0.2 on a packed sequence"),
    ):
        model["lstm"](packed)
    plain = nn.GRU(4, 4, num_layers=2)
    with DropoutMode(model, draw([0, 1])):
        model.eval()["lstm"](packed)
        plain(packed)


ATTENTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(-1)},
    "float mask": {"attn_mask": torch.zeros(5, 7).masked_fill(torch.ones(5, 7).triu(2).bool(), -math.inf)},
    "mask of heads": {"attn_mask": torch.linspace(-1, 1, 2 * 4 * 35).view(2, 4, 5, 7)},
    "gqa": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_blocks_of_queries_compute_what_the_formula_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, that of a float mask too, are those of the formula written out, which keeps all weights."""
    options = {
        k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in ATTENTIONS[name].items()
    }
    mask = options.pop("attn_mask", None)
    generator = torch.Generator().manual_seed(0)
    heads = 2 if name == "gqa" else 4
    shapes = [(2, 4, 5, 3), (2, heads, 7, 3), (2, heads, 7, 6)]
    given = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    if mask is not None and mask.is_floating_point():
        given.append(mask.requires_grad_())
    p = 0.3

    def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = mask) -> Tensor:
        k, v = (x.repeat_interleave(4 // heads, 1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * options.get("scale", 3**-0.5)
        if name == "causal":
            scores = scores.masked_fill(torch.ones(5, 7).triu(1).bool(), -math.inf)
        if bias is not None:
            scores = scores + bias if bias.is_floating_point() else scores.masked_fill(~bias, -math.inf)
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        return F.dropout(weights, p) @ v

    def in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = mask) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=p, **options)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        model = Call(function)
        with DropoutMode(model, draw([4, 9])):
            found = model(*given)
        return [found, *torch.autograd.grad(found.square().sum(), given)]

    expected = run(written_out)
    for least in (1, 2, 16):
        monkeypatch.setattr(formula, "LEAST_QUERIES", least)
        monkeypatch.setattr(formula, "BLOCK_ELEMENTS", 1)
        for mine, theirs in zip(run(in_blocks), expected, strict=True):
            assert (mine - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("rows", [(0, 0), (0, 4), (1, 0), (2, 0), (3, 0)])
def test_a_part_of_a_mask_is_that_part(rows: tuple[int, int]) -> None:
    """Wherever the samples are: in front, with heads beside them, or among heads, queries or keys."""
    model = Call(lambda x: x)
    shape = torch.Size((8, 6, 4, 10) if rows[0] == 0 else (3, 8, 4, 10))
    with DropoutMode(model, draw([3, 5])) as mode:
        mode._tracker.rows = {("", -1, index): rows for index in range(2)}
        whole = mode.drop(ones(1), shape, 0.4, "dropout")
        mode._frames[-1].num_draws = 0
        part = mode.drop_weights(ones(1), shape, 0.4, "dropout").part
    assert 0.3 < whole.double().mean() < 0.5
    for start, stop, num_keys in ((0, 4, 10), (1, 3, 10), (3, 4, 7)):
        assert torch.equal(part(start, stop, num_keys), whole[..., start:stop, :num_keys])


def test_attention_keeps_nothing_of_the_size_of_its_weights() -> None:
    q = torch.randn(2, 4, 96, 8, requires_grad=True)
    kept: list[int] = []
    model = Call(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True))
    with (
        DropoutMode(model, draw([0, 1])),
        torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x),
    ):
        model(q).sum()
    assert kept
    assert max(kept) == q.numel()


def test_attention_in_half_precision_and_without_dropout() -> None:
    q = torch.randn(2, 4, 5, 8).bfloat16()
    for p, num_draws in ((0.2, 1), (0.0, 0)):
        model = Call(lambda q, p=p: F.scaled_dot_product_attention(q, q, q, dropout_p=p))
        with DropoutMode(model, draw([0, 1])) as mode:
            assert model(q).dtype == torch.bfloat16
        assert mode.num_draws == num_draws


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention(need_weights: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)

    def forward(part: list[int]) -> Tensor:
        with DropoutMode(model, draw(part)) as mode:
            y = model(x[part], x[part], x[part], need_weights=need_weights)[0]
        assert mode.num_draws == 1
        return y

    whole = forward([0, 1, 2, 3])
    assert (whole - model.eval()(x, x, x)[0]).abs().max() > 1e-2
    model.train()
    assert (torch.cat([forward([0, 1]), forward([2]), forward([3])]) - whole).abs().max() < 1e-14


MODULES = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
"""The module classes of torch."""


def called_in(kind: type[nn.Module]) -> set[str]:
    """Return the names that the forward of a class, and its methods that a forward may call, use."""
    methods = (value for value in vars(kind).values() if hasattr(value, "__code__"))
    return {name for method in methods if method.__name__ != "reset_parameters" for name in method.__code__.co_names}


def test_modules_of_torch_without_hooks_draw_nothing_and_call_no_module() -> None:
    drawing = {function.__name__ for function in HANDLERS}
    assert {nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.GELU, nn.MaxPool2d} <= DRAWING_NOTHING
    for kind in DRAWING_NOTHING:
        assert not called_in(kind) & drawing, kind
    loud = [kind for kind in MODULES if called_in(kind) & drawing and kind is not nn.Module]
    assert {nn.RReLU, nn.Dropout, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.LSTM} <= {*loud}


def test_has_dropout() -> None:
    class Custom(nn.Module):
        def __init__(self, **fields: object) -> None:
            super().__init__()
            vars(self).update(fields)

    for yes in (
        nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.1)),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(4, 4, 2, dropout=0.1),
        Custom(attn_pdrop=0.1),
        Custom(config={"text": {"layerdrop": 0.2}}),
        nn.Sequential(Custom(cfg=SimpleNamespace(dropout=0.1))),
        Custom(drop_prob=1),
    ):
        assert has_dropout(yes), yes
    for no in (
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)),
        nn.MultiheadAttention(4, 2),
        Custom(drop_last=True, dropout=0.0, dropout_kind="x", config={"hidden_dropout": 0, "layers": 1}),
    ):
        assert not has_dropout(no), no


def test_the_mode_leaves_nothing_behind() -> None:
    class Count(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    with Count() as count:
        with DropoutMode(model, draw([0])):
            model(ones(1, 8).float())
        seen = count.seen
        torch.rand(2)
    assert count.seen == seen + 1
    state = torch.get_rng_state()
    run(model, ones(1, 8).float(), [0])
    assert torch.equal(state, torch.get_rng_state())


# -- parts of masks ----------------------------------------------------------------------------------------------------


def cut_model(shape: tuple[int, ...], *cuts: Cut) -> ModelSpec:
    masks = (MaskSpec(owner="a.drop", entry=0, draw=0, shape=shape),)
    params = [ParamSpec(name=f"a.w{i}", shape=(24, 8), layer=0, cut=cut) for i, cut in enumerate(cuts)]
    return ModelSpec(name="cut", layers=(), params=tuple(params), masks=masks)


COLUMNS = Cut(style="column", dim=0, groups=6)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((1, 6, 5, 5), 1), ((6, 5, 5), 0), ((1, 5, 24), 2), ((24,), 0), ((1, 5, 6, 4), 2), ((1, 5, 4), None)],
)
@pytest.mark.parametrize("degree", [2, 3])
def test_a_part_of_a_mask_is_the_part_of_the_whole(shape: tuple[int, ...], dim: int | None, degree: int) -> None:
    model, keys, device = cut_model(shape, COLUMNS), mix(torch.arange(3)) ^ 5, torch.device("cpu")
    whole = drop_mask(bits_at(keys, *hash_positions(*positions(shape, (), device))), 0.4).view(3, *shape)
    for index in range(degree):
        part = MaskSlice(model, degree, index)
        mine = tuple(size // degree if at == dim else size for at, size in enumerate(shape))
        cuts = () if dim is None else ((dim, degree, index),)
        assert part.cuts(("a.drop", 0, 0), mine) == cuts
        drawn = drop_mask(bits_at(keys, *hash_positions(*positions(shape, cuts, device))), 0.4).view(3, *mine)
        expected = whole if dim is None else whole.chunk(degree, dim + 1)[index]
        assert torch.equal(drawn, expected)


@pytest.mark.parametrize(
    ("shape", "mine", "says"),
    [
        ((1, 120), (1, 60), "is not known"),  # 5 tokens x 24 features in one dimension
        ((1, 24, 6), (1, 12, 3), "is not known"),
        ((1, 24), (1, 8), "is not known"),
        ((1, 24), (24,), "is not known"),
    ],
)
def test_a_part_that_shapes_do_not_tell_is_refused(shape: tuple[int, ...], mine: tuple[int, ...], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        MaskSlice(cut_model(shape, COLUMNS), 2, 0).cuts(("a.drop", 0, 0), mine)


def test_what_is_fused_is_no_run_and_what_was_not_traced_has_no_part() -> None:
    fused = Cut(style="column", dim=0, groups=4, parts=3)
    with pytest.raises(LayoutError, match="is not known"):
        MaskSlice(cut_model((1, 24), COLUMNS, fused), 2, 0).cuts(("a.drop", 0, 0), (1, 12))
    assert MaskSlice(cut_model((1, 8), COLUMNS, fused), 2, 0).cuts(("a.drop", 0, 0), (1, 4)) == ((1, 2, 0),)
    with pytest.raises(LayoutError, match=r"a.drop draws a dropout mask that the traced forward did not"):
        MaskSlice(cut_model((1, 24), COLUMNS), 2, 0).cuts(("a.drop", 0, 1), (1, 12))


# -- the rows of all draws at once -------------------------------------------------------------------


class Several(nn.Module):
    """Draws masks of several shapes: of features, of rows, and in an attention; `order` says which."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ["features", "attention", "features"]

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for kind in self.order:
            if kind == "attention":
                heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
                found.append(F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4))
            else:
                found.append(F.dropout(x if kind == "features" else x[:, :1], 0.3))
        return found


def drawn_by(model: Several, x: Tensor, samples: list[int]) -> list[Tensor]:
    with DropoutMode(model, draw(samples)):
        return model(x)


@pytest.mark.parametrize("limit", [2**22, 10])
def test_rows_that_are_hashed_at_once_are_those_of_each_draw(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_hashes, "LIMIT", limit)
    warm = Several()
    changes = [
        (["features", "attention", "features"], 5, [0, 1]),
        (["features", "attention", "features"], 5, [7, 3]),
        (["features", "attention", "features"], 5, [4]),
        (["features", "attention", "features"], 3, [4, 9]),
        (["features", "features", "attention", "rows"], 3, [4, 9]),
        (["features", "rows"], 5, [1, 2]),
        (["attention"], 5, [1, 2]),
        (["attention"], 5, [2, 1]),
    ]
    for order, length, samples in changes:
        x = torch.randn(len(samples), length, 8)
        warm.order = order
        fresh = Several()
        fresh.order = order
        assert all(map(torch.equal, drawn_by(warm, x, samples), drawn_by(fresh, x, samples))), order


def test_a_later_forward_hashes_the_rows_of_all_masks_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = Several(), torch.randn(2, 5, 8), []
    monkeypatch.setattr(row_hashes, "row_halves", lambda *given: calls.append(1) or row_halves(*given))
    for expected in (3, 3, 3):  # the first forward hashes each, and the others none by itself
        drawn_by(model, x, [0, 1])
        assert len(calls) == expected
