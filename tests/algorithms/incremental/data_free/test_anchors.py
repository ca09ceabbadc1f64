"""Anchors of classes, and the model that maps features to their space."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedemu.algorithms.incremental.data_free.anchors import BIAS, WEIGHT, Mapped, anchors_of, unmapped
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError

OWN = """
import numpy as np

def lines(classes, width):
    return np.arange(classes * width).reshape(classes, width)

def short(classes, width):
    return np.zeros((classes, width - 1))

def broken(classes, width):
    return np.where(np.eye(classes, width) > 0, np.nan, 1.0)
"""


@pytest.mark.parametrize("width", [10, 4])
def test_built_in_anchors_are_at_right_angles_and_have_the_scale(width: int) -> None:
    anchors = anchors_of("orthonormal", 4, width, 0.5)
    assert anchors.dtype == torch.float32
    torch.testing.assert_close(anchors @ anchors.t(), torch.eye(4) * 0.25 * width, rtol=1e-5, atol=1e-5)
    assert torch.equal(anchors, anchors_of("orthonormal", 4, width, 0.5))


def test_more_classes_than_values_get_random_directions_of_the_scale() -> None:
    anchors = anchors_of("orthonormal", 7, 3, 2.0)
    torch.testing.assert_close(anchors.square().mean(1), torch.full((7,), 4.0))
    assert torch.linalg.matrix_rank(anchors) == 3
    drawn = torch.from_numpy(seeds.generator(0, purpose="anchors").standard_normal((3, 7)))
    torch.testing.assert_close(anchors, (2 * 3**0.5 * drawn / drawn.norm(dim=0)).t().float())


def test_own_anchors_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "anchors_example.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert anchors_of("anchors_example:lines", 2, 3, 9.0).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigurationError, match=r"an array \[2, 2\]; it must be \[2, 3\]"):
        anchors_of("anchors_example:short", 2, 3, 9.0)
    with pytest.raises(ConfigurationError, match=r"it must be \[2, 3\] .* and finite"):
        anchors_of("anchors_example:broken", 2, 3, 9.0)
    with pytest.raises(ConfigurationError, match="your own are named module:Name"):
        anchors_of("words", 2, 3, 9.0)


def test_a_mapped_model_has_other_features_and_the_same_logits() -> None:
    inner = mlp((1, 8, 8), 4, (6,))
    model = Mapped(inner, 6, 3)
    variables = model.init(1)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    outputs, own = model.apply(variables, x, True)[0], inner.apply(unmapped(variables), x, True)[0]
    assert torch.equal(outputs.logits, own.logits)
    torch.testing.assert_close(outputs.features, own.features @ variables[WEIGHT].t() + variables[BIAS])
    assert unmapped(variables).keys() == inner.init(1).keys()
    assert variables[WEIGHT].abs().max() <= 6**-0.5
