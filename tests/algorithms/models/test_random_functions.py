"""Dropout and all other draws of a model by a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedemu.algorithms.models.randomness.draws import Draws, keys
from fedemu.algorithms.models.randomness.random_functions import Keyed

N = 40_000


def key(seed: int = 0, step: int = 0) -> Tensor:
    return torch.from_numpy(keys(np.array([seed], np.uint64), np.array([step])))[0]


@contextmanager
def keyed(seed: int = 0, step: int = 0) -> Iterator[None]:
    with Keyed(Draws(key(seed, step))):
        yield


def drawn(function: Callable[[], Tensor], seed: int = 0, step: int = 0) -> Tensor:
    with keyed(seed, step):
        return function()


def test_the_first_draws_are_these_on_every_machine() -> None:
    assert Draws(key()).bits([4], torch.device("cpu")).tolist() == [6174854, 4967018, 12782366, 3184587]


def test_draws_are_uniform_and_of_different_calls_keys_and_steps_unrelated() -> None:
    with keyed():
        values = [torch.rand(N) for _ in range(3)]
    values += [drawn(lambda: torch.rand(N), seed=1), drawn(lambda: torch.rand(N), step=1)]
    for value in values:
        counts = torch.histc(value, 20, 0.0, 1.0)
        assert float(((counts - N / 20) ** 2 / (N / 20)).sum()) < 50  # chi-squared, 19 degrees of freedom
        assert abs(float(torch.corrcoef(torch.stack([value[1:], value[:-1]]))[0, 1])) < 0.02
    assert float((torch.corrcoef(torch.stack(values)) - torch.eye(len(values))).abs().max()) < 0.02


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_a_share_and_the_mean(p: float) -> None:
    out = drawn(lambda: functional.dropout(torch.ones(200, N // 200), p))
    assert sorted(out.unique().tolist()) == pytest.approx([0.0, 1 / (1 - p)])
    assert float((out > 0).float().mean()) == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p) / N))
    assert float(out.mean()) == pytest.approx(1.0, abs=5 * math.sqrt(p / (1 - p) / N))
    assert float(out.var()) == pytest.approx(p / (1 - p), rel=0.05)
    # The rows are no copies of each other.
    assert len({tuple(row.tolist()) for row in out}) == 200
    assert torch.equal(out, drawn(lambda: functional.dropout(torch.ones(200, N // 200), p)))


def test_dropout_of_channels_drops_whole_ones() -> None:
    for layer, shape in ((nn.Dropout1d(0.5), (50, 40, 6)), (nn.Dropout2d(0.5), (50, 40, 3, 2))):
        out = drawn(lambda layer=layer, shape=shape: layer(torch.ones(shape)))  # type: ignore[misc]
        each = out.flatten(2)
        assert torch.equal(each.amin(-1), each.amax(-1))
        assert float(each[..., 0].mean()) == pytest.approx(1.0, abs=0.12)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    out = drawn(lambda: nn.AlphaDropout(0.3)(x))
    assert float(out.mean()) == pytest.approx(0.0, abs=0.03)
    assert float(out.var()) == pytest.approx(1.0, abs=0.04)


def test_in_evaluation_and_at_p_0_nothing_is_drawn() -> None:
    draws = Draws(key())
    x = torch.ones(5)
    with Keyed(draws):
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        assert torch.equal(functional.dropout(x, 0.0), x)
    assert draws.count == 0


def test_a_draw_writes_in_place_where_torch_does() -> None:
    x = torch.ones(1000)
    with keyed():
        assert nn.Dropout(0.5, inplace=True)(x) is x
        values = torch.empty(N)
        assert values.normal_(2.0, 3.0) is values
    assert set(x.tolist()) == {0.0, 2.0}
    assert float(values.mean()) == pytest.approx(2.0, abs=0.1)
    assert float(values.std()) == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "alpha_dropout", "feature_alpha_dropout", "rrelu"])
def test_what_a_function_writes_in_place_is_what_it_returns_otherwise(name: str) -> None:
    function: Callable[..., Tensor] = getattr(functional, name)
    x = torch.randn(2, 50, 3, 3, generator=torch.Generator().manual_seed(0))
    expected = drawn(lambda: function(x, training=True))
    assert not torch.equal(expected, x)
    assert drawn(lambda: function(x, training=True, inplace=True)) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda out: torch.rand(3, out=out),
        lambda out: torch.normal(torch.zeros(3), 1.0, out=out),
        lambda out: torch.bernoulli(torch.full((3,), 0.9), out=out),
    ],
)
def test_a_draw_fills_the_tensor_that_is_given_for_it(draw: Callable[[Tensor], Tensor]) -> None:
    out = torch.full((3,), 7.0)
    assert drawn(lambda: draw(out)) is out
    assert not (out == 7.0).any()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3, requires_grad=True),
        lambda: torch.randn_like(torch.ones(3), requires_grad=True),
        lambda: torch.empty(3, requires_grad=True),
        lambda: torch.normal(0.0, 1.0, (3,), requires_grad=True),
        lambda: torch.rand(3, out=torch.ones(3), requires_grad=True),
    ],
)
def test_a_draw_requires_a_gradient_if_it_is_told_to(draw: Callable[[], Tensor]) -> None:
    def slope() -> Tensor:
        x = draw()
        return torch.autograd.grad((3 * x).sum(), x)[0]

    assert drawn(slope).tolist() == [3.0] * 3
    with torch.no_grad():
        made = drawn(draw)
    assert (made.requires_grad, made.is_leaf) == (True, True)
    assert not drawn(lambda: torch.rand(3)).requires_grad


@pytest.mark.parametrize(
    ("function", "mean", "variance"),
    [
        (lambda: torch.randn(N), 0, 1),
        (lambda: torch.randn_like(torch.empty(N)), 0, 1),
        (lambda: torch.randn((200, N // 200), dtype=torch.float64), 0, 1),
        (lambda: torch.randn(N, dtype=torch.complex64).real, 0, 1 / 2),
        (lambda: torch.randn_like(torch.empty(N, dtype=torch.complex64)).imag, 0, 1 / 2),
        (lambda: torch.empty(N, dtype=torch.complex128).normal_(1.0, 2.0).imag, 0, 2),
        (lambda: torch.rand(N, dtype=torch.complex64).imag, 0.5, 1 / 12),
        (lambda: torch.rand(200, N // 200), 0.5, 1 / 12),
        (lambda: torch.rand_like(torch.ones(N)), 0.5, 1 / 12),
        (lambda: torch.randint(3, 7, (N,)).double(), 4.5, 15 / 12),
        (lambda: torch.randint(4, (N,)).double(), 1.5, 15 / 12),
        (lambda: torch.randint(high=4, size=(N,)).double(), 1.5, 15 / 12),
        (lambda: torch.randint(3, high=7, size=(N,)).double(), 4.5, 15 / 12),
        (lambda: torch.randint(low=3, high=7, size=(N,)).double(), 4.5, 15 / 12),
        (lambda: torch.randint_like(torch.ones(N), 4), 1.5, 15 / 12),
        (lambda: torch.randint_like(torch.ones(N), high=4), 1.5, 15 / 12),
        (lambda: torch.rand(np.int64(N)), 0.5, 1 / 12),
        (lambda: torch.rand(torch.tensor(N)), 0.5, 1 / 12),
        (lambda: torch.bernoulli(torch.full((N,), 0.25)), 0.25, 0.1875),
        (lambda: torch.empty(N).bernoulli_(0.25), 0.25, 0.1875),
        (lambda: torch.empty(N).uniform_(-1, 3), 1, 16 / 12),
        (lambda: torch.empty(N).uniform_(-1, to=3), 1, 16 / 12),
        (lambda: torch.empty(N).uniform_(**{"from": -1.0, "to": 3.0}), 1, 16 / 12),
        (lambda: torch.empty(N).exponential_(0.5), 2, 4),
        (lambda: torch.normal(1.0, 2.0, (N,)), 1, 4),
        (lambda: torch.normal(torch.ones(N), 2.0), 1, 4),
        (lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), N, replacement=True).double(), 1.5, 0.75),
        (lambda: torch.distributions.Normal(1.0, 2.0).rsample((N,)), 1, 4),
        (lambda: functional.rrelu(-torch.ones(N), 0.1, 0.3, training=True), -0.2, 0.04 / 12),
        (lambda: functional.gumbel_softmax(torch.zeros(N, 4), hard=True)[:, 0], 0.25, 0.1875),
    ],
)
def test_each_distribution_has_its_mean_and_variance(
    function: Callable[[], Tensor], mean: float, variance: float
) -> None:
    values = drawn(function)
    assert float(values.double().mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / N))
    assert float(values.double().var()) == pytest.approx(variance, rel=0.06)
    assert torch.equal(values, drawn(function))


def test_a_permutation_has_every_number_once() -> None:
    values = drawn(lambda: torch.randperm(1000))
    assert sorted(values.tolist()) == list(range(1000))
    assert values.tolist() != sorted(values.tolist())


def test_torchs_own_generator_is_untouched() -> None:
    before = torch.random.get_rng_state()
    with keyed():
        functional.dropout(torch.ones(10), 0.5)
        torch.empty(3).uniform_()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_without_dropout_is_torchs(causal: bool, mask: str | None) -> None:
    source = torch.Generator().manual_seed(0)
    query, key_, value = (torch.randn(2, 4, 5, 8, generator=source) for _ in range(3))
    seen = torch.rand(5, 5, generator=source) < 0.6
    seen[2] = False
    masks = {None: None, "bool": seen, "float": torch.where(seen, 0.5, -torch.inf)}
    arguments = {"attn_mask": None if causal else masks[mask], "is_causal": causal, "scale": 0.3}
    expected = functional.scaled_dot_product_attention(query, key_, value, **arguments)  # type: ignore[arg-type]
    with keyed():
        out = functional.scaled_dot_product_attention(query, key_, value, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_attention_drops_weights() -> None:
    query, value = torch.zeros(1, 1, 300, 4), torch.ones(1, 1, 200, 1)
    out = drawn(lambda: functional.scaled_dot_product_attention(query, torch.zeros(1, 1, 200, 4), value, dropout_p=0.5))
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(out.var()) == pytest.approx(1 / 200, rel=0.3)


def test_dropout_inside_of_functions_that_torch_computes_in_one_piece_is_drawn_by_the_key() -> None:
    x = torch.ones(3, 6, 8)
    for layer in (
        nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        nn.LSTM(8, 8, 2, dropout=0.5, bidirectional=True),
        nn.GRU(8, 8, 3, dropout=0.5, batch_first=True),
        nn.RNN(8, 8, 2, dropout=0.5),
    ):

        def out(layer: nn.Module = layer) -> Tensor:
            result = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
            return result[0] if isinstance(result, tuple) else result

        once, again, other = drawn(out), drawn(out), drawn(out, seed=1)
        assert torch.equal(once, again)
        assert not torch.equal(once, other)


def test_recurrent_layers_one_by_one_are_those_that_torch_stacks() -> None:
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(3, 6, 3, dropout=1e-9, bidirectional=True, batch_first=True)
        out, state = layer(x)
        with keyed():
            again, end = layer(x)
        torch.testing.assert_close(again, out)
        torch.testing.assert_close(end, state)


def test_draws_are_mapped_over_keys() -> None:
    stacked = torch.stack([key(3), key(4)])

    def function(key: Tensor, x: Tensor) -> Tensor:
        with Keyed(Draws(key)):
            noise = torch.empty(6).normal_()
            return functional.dropout(x, 0.5) + noise

    x = torch.ones(2, 6)
    expected = torch.stack([function(key(3), x[0]), function(key(4), x[1])])
    assert torch.equal(torch.func.vmap(function)(stacked, x), expected)
