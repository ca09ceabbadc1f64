"""Perceptron, CNN, LeNet-5 and ResNet-18: shapes, values, gradients and statistics."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedemu.algorithms.interface import Model, Outputs, Tree
from fedemu.algorithms.models.feed_forward import cnn, lenet, mlp
from fedemu.algorithms.models.layers import BatchNorm
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.protocol.errors import ConfigurationError


def parameters(model: Model) -> int:
    return sum(leaf.numel() for name, leaf in model.init(0).items() if name not in model.buffers)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (mlp((1, 8, 8), 10), 4_810),
        (mlp((64,), 10, (32, 16)), 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10),
        (cnn((3, 32, 32), 10), 2_156_490),
        (cnn((3, 32, 32), 100), 2_202_660),
        (cnn((1, 28, 28), 10), 1_663_370),
        (cnn((1, 28, 28), 62), 1_690_046),
        (lenet((1, 28, 28), 10), 61_706),
        (lenet((3, 32, 32), 10), 62_006),
        (resnet18((3, 32, 32), 10), 11_173_962),
        (resnet18((3, 32, 32), 10, norm="batch"), 11_173_962),
        (resnet18((3, 32, 32), 10, conv_bias=True), 11_178_762),
        (resnet18((3, 32, 32), 10, norm="group", conv_bias=True), 11_178_762),
        (resnet18((3, 64, 64), 200, norm="batch"), 11_271_432),
        (resnet18((3, 224, 224), 1000, norm="batch", stem="7x7"), 11_689_512),
    ],
)
def test_models_have_the_published_number_of_parameters(model: Model, count: int) -> None:
    assert parameters(model) == count


@pytest.mark.parametrize(
    ("build", "shape", "width", "classifier"),
    [
        (mlp, (1, 8, 8), 64, "fc2"),
        (cnn, (3, 32, 32), 512, "fc2"),
        (lenet, (3, 32, 32), 84, "fc3"),
        (resnet18, (3, 32, 32), 512, "head"),
    ],
)
def test_a_projection_head_lies_before_the_classifier(
    build: Any, shape: tuple[int, ...], width: int, classifier: str
) -> None:
    plain, projected = build(shape, 10), build(shape, 10, projection=256)
    added = (width * width + width) + (width * 256 + 256) + 256 * 10 - width * 10
    assert parameters(projected) == parameters(plain) + added
    variables, x = projected.init(0), torch.randn(2, *shape)
    outputs = projected.apply(variables, x, False)[0]
    assert outputs.features.shape == (2, 256)
    head = nn.functional.linear(outputs.features, variables[f"{classifier}.weight"], variables[f"{classifier}.bias"])
    torch.testing.assert_close(outputs.logits, head)


def test_a_projection_is_two_layers_with_one_relu() -> None:
    model = mlp((3,), 2, (2,), projection=2)
    variables = {
        "fc1.weight": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        "fc1.bias": torch.zeros(2),
        "projection.hidden.weight": torch.tensor([[1.0, 0.0], [0.0, -1.0]]),
        "projection.hidden.bias": torch.tensor([0.0, 1.0]),
        "projection.output.weight": torch.tensor([[-1.0, 0.0], [1.0, 1.0]]),
        "projection.output.bias": torch.zeros(2),
        "fc2.weight": torch.eye(2),
        "fc2.bias": torch.zeros(2),
    }
    # ReLU keeps (2, 3). The hidden layer gives (2, 1 - 3), and ReLU leaves (2, 0). The output is (-2, 2), without ReLU.
    outputs = model.apply(variables, torch.tensor([[2.0, 3.0, 9.0]]), True)[0]
    assert outputs.features.tolist() == [[-2.0, 2.0]]
    assert outputs.logits.tolist() == [[-2.0, 2.0]]


def small_models() -> list[Any]:
    return [
        pytest.param(mlp((2, 8, 8), 5, (16,)), (2, 8, 8), id="mlp"),
        pytest.param(cnn((2, 8, 8), 5), (2, 8, 8), id="cnn"),
        pytest.param(lenet((2, 14, 14), 5), (2, 14, 14), id="lenet"),
        pytest.param(lenet((2, 32, 32), 5), (2, 32, 32), id="lenet-32"),
        pytest.param(mlp((2, 8, 8), 5, (16,), projection=6), (2, 8, 8), id="mlp-projection"),
        pytest.param(resnet18((2, 8, 8), 5, width=4), (2, 8, 8), id="resnet-group"),
        pytest.param(resnet18((2, 8, 8), 5, norm="batch", width=4), (2, 8, 8), id="resnet-batch"),
        pytest.param(resnet18((2, 32, 32), 5, norm="batch", width=4, stem="7x7"), (2, 32, 32), id="resnet-large"),
        pytest.param(from_module(_Module), (2, 8, 8), id="module"),
    ]


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(features), features


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def _wide(leaf: Tensor) -> Tensor:
    """Everything is in float64, so that only a wrong gradient differs."""
    return leaf.double() if leaf.is_floating_point() else leaf


def _loss(model: Model, variables: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Outputs, Tree]]:
    outputs, buffers = model.apply(variables, x, True)
    return functional.cross_entropy(outputs.logits, y), (outputs, buffers)


@pytest.mark.parametrize(("model", "shape"), small_models())
def test_outputs_have_logits_and_the_input_of_the_last_layer(model: Model, shape: tuple[int, ...]) -> None:
    outputs, buffers = model.apply(model.init(3), torch.randn(7, *shape), False)
    assert outputs.logits.shape == (7, 5)
    assert outputs.features.shape[0] == 7
    assert buffers.keys() == model.buffers


@pytest.mark.parametrize(("model", "shape"), small_models())
def test_the_same_seed_draws_the_same_variables(model: Model, shape: tuple[int, ...]) -> None:
    one, same, other = model.init(11), model.init(11), model.init(12)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("model", "shape"), small_models())
def test_gradients_mapped_over_devices_agree_with_a_loop_of_autograd(model: Model, shape: tuple[int, ...]) -> None:
    trees = [{name: _wide(leaf) for name, leaf in model.init(seed).items()} for seed in range(3)]
    x, y = torch.randn(3, 6, *shape, dtype=torch.float64), torch.randint(0, 5, (3, 6))
    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    trained = {name: leaf for name, leaf in stacked.items() if name not in model.buffers}
    fixed = {name: leaf for name, leaf in stacked.items() if name in model.buffers}

    def gradient(trained: Tree, fixed: Tree, x: Tensor, y: Tensor) -> Any:
        return torch.func.grad(lambda leaves: _loss(model, {**leaves, **fixed}, x, y), has_aux=True)(trained)

    mapped, (_, buffers) = torch.func.vmap(gradient)(trained, fixed, x, y)
    for i, tree in enumerate(trees):
        leaves = {
            name: leaf.clone().requires_grad_() if name in trained else leaf.clone() for name, leaf in tree.items()
        }
        value, (_, expected) = _loss(model, leaves, x[i], y[i])
        wanted = torch.autograd.grad(value, [leaves[name] for name in trained])
        for name, leaf in zip(trained, wanted, strict=True):
            torch.testing.assert_close(mapped[name][i], leaf)
        for name, leaf in expected.items():
            torch.testing.assert_close(buffers[name][i], leaf)


def test_the_cnn_computes_what_the_same_layers_of_torch_compute() -> None:
    model = cnn((3, 32, 32), 10)
    variables = model.init(0)
    module = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    with torch.no_grad():
        for parameter, leaf in zip(module.parameters(), variables.values(), strict=True):
            parameter.copy_(leaf)
        x = torch.randn(4, 3, 32, 32)
        torch.testing.assert_close(model.apply(variables, x, True)[0].logits, module(x), rtol=1e-4, atol=1e-5)


def test_variables_are_drawn_as_torch_draws_them() -> None:
    torch.manual_seed(5)
    expected = nn.Linear(64, 32)
    drawn = mlp((64,), 10, (32,)).init(5)
    torch.testing.assert_close(drawn["fc1.weight"], expected.weight.detach())
    torch.testing.assert_close(drawn["fc1.bias"], expected.bias.detach())


def test_batch_norm_updates_running_statistics_as_torch_does() -> None:
    model = resnet18((1, 8, 8), 3, norm="batch", width=2)
    variables = model.init(1)
    x = torch.randn(5, 1, 8, 8)
    _, buffers = model.apply(variables, x, True)
    norm = nn.BatchNorm2d(2)
    norm(functional.conv2d(x, variables["stem.conv.weight"], padding=1))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(buffers["stem.norm.running_mean"], norm.running_mean)
    torch.testing.assert_close(buffers["stem.norm.running_var"], norm.running_var)
    assert float(variables["stem.norm.running_mean"].abs().sum()) == 0.0


def test_batch_norm_evaluates_by_running_statistics() -> None:
    model = resnet18((1, 8, 8), 3, norm="batch", width=2)
    variables = dict(model.init(1))
    x = torch.randn(5, 1, 8, 8)
    whole, unchanged = model.apply(variables, x, False)
    alone, _ = model.apply(variables, x[:1], False)
    torch.testing.assert_close(whole.logits[:1], alone.logits, rtol=1e-4, atol=1e-5)
    assert all(unchanged[name] is variables[name] for name in model.buffers)


def test_the_large_stem_is_that_for_imagenet() -> None:
    model = resnet18((3, 32, 32), 5, norm="batch", width=2, stem="7x7", statistics=True)
    variables, x = model.init(0), torch.randn(4, 3, 32, 32)
    statistics = model.apply(variables, x, False)[0].statistics
    convolved = functional.conv2d(x, variables["stem.conv.weight"], stride=2, padding=3)
    torch.testing.assert_close(statistics["stem.norm.mean"], convolved.mean((0, 2, 3)))
    normalised = BatchNorm("stem.norm", 2)(variables, convolved, False)[0].relu()
    pooled = functional.max_pool2d(normalised, 3, stride=2, padding=1)
    assert pooled.shape == (4, 2, 8, 8)
    inputs = functional.conv2d(pooled, variables["layer1.0.first.conv.weight"], padding=1)
    torch.testing.assert_close(statistics["layer1.0.first.norm.mean"], inputs.mean((0, 2, 3)))
    with pytest.raises(ConfigurationError, match="at least 32×32 pixels, not 16×16"):
        resnet18((3, 16, 16), 5, stem="7x7")


def test_statistics_of_the_norms_inputs_are_given_on_request() -> None:
    model = resnet18((1, 8, 8), 3, norm="batch", width=2, statistics=True)
    variables, x = model.init(1), torch.randn(5, 1, 8, 8)
    statistics = model.apply(variables, x, False)[0].statistics
    inputs = functional.conv2d(x, variables["stem.conv.weight"], padding=1)
    torch.testing.assert_close(statistics["stem.norm.mean"], inputs.mean((0, 2, 3)))
    torch.testing.assert_close(statistics["stem.norm.var"], inputs.var((0, 2, 3), correction=0))
    assert len(statistics) == 2 * 20


def test_a_modules_own_buffers_never_change() -> None:
    model = from_module(_Module)
    variables = model.init(0)
    before = {name: leaf.clone() for name, leaf in variables.items()}
    _, buffers = model.apply(variables, torch.randn(4, 2, 8, 8), True)
    assert all(torch.equal(variables[name], before[name]) for name in before)
    assert int(buffers["norm.num_batches_tracked"]) == 1
    assert model.kind == "convolutional"


@pytest.mark.parametrize("build", [cnn, lenet, resnet18])
def test_models_for_images_say_so_when_they_get_none(build: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"needs images, but a sample has the shape \(64,\)"):
        build((64,), 10)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 12×12 pixels, not 8×8"):
        lenet((1, 8, 8), 10)


IN_TWO_THREADS = """
import torch
from fedemu.algorithms.models.layers import Convolution
torch.set_num_threads(2)
shortcut = Convolution("c", inputs=12, outputs=24, kernel=1, stride=2)
variables = {name: leaf.requires_grad_() for name, leaf in shortcut.init(torch.Generator().manual_seed(0)).items()}
x = torch.ones(15, 12, 16, 16).contiguous(memory_format=torch.channels_last).requires_grad_()
for _ in range(20):
    torch.autograd.grad(shortcut(variables, x).square().sum(), [x, *variables.values()])
"""


def test_a_narrow_shortcut_with_channels_last_survives_its_gradient_in_two_threads() -> None:
    """In oneDNN this corrupts the memory of the process, which then dies by a signal."""
    process = subprocess.run([sys.executable, "-c", IN_TWO_THREADS], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
