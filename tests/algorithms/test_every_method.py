"""What holds for all methods alike: with which loss, in what company, over whose devices, and what leaves a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.corpus import Corpus
from fedemu.algorithms.ingredients import Ingredients
from fedemu.algorithms.interface import Algorithm, Revealing
from fedemu.algorithms.models import mlp
from fedemu.algorithms.public import Labelled, PublicData
from fedemu.algorithms.registry import ALGORITHMS, build_algorithm, find_criterion
from fedemu.coordinator.payload import PayloadTemplate
from fedemu.device.executors import Checked
from fedemu.device.executors_serial import Serial
from fedemu.device.executors_vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHORT: dict[str, dict[str, Any]] = {
    "fedcurv": {"samples": 6, "penalty": 0.01},
    "feddf": {"server_batches": 4, "evaluate_every": 2},
    "fedreg": {"iterations": 2, "rehearsals": 2},
    "flashback": {"server_epochs": 2},
    "fedavg_finetuned": {"server_epochs": 2},
}
MODELS_UP = {"scaffold": 2.0, "fedcurv": 3.0}
"""What a reply weighs in models, where that is not one."""
OWN_LOSS = {"flashback"}
TELL_LABEL_COUNTS = {"flashback"}

MODEL = mlp((1, 12, 12), 4, (6,))
SHARES = [np.arange(40 * i, 40 * i + 10 + 7 * i) for i in range(4)]


def build(name: str, loss: str = "cross_entropy") -> Algorithm[Any]:
    ingredients = Ingredients(
        MODEL, find_criterion(loss), 4, 2, 5, 0.05, 0.5, devices=len(SHARES), public=True, input_shape=(1, 12, 12)
    )
    return build_algorithm(name, SHORT.get(name, {}), ingredients)


@pytest.fixture(scope="module")
def public(corpus: Corpus) -> PublicData:
    parts = [Labelled(*corpus.batch(corpus.train, np.arange(start, start + 40))) for start in (300, 340)]
    return PublicData(*parts)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_plays_where_devices_come_and_go_and_no_executor_changes_what_comes_of_it(
    name: str, little_fleet: Callable[..., Any], public: PublicData
) -> None:
    """``Checked`` compares both executors on every ask, own states included."""
    executor = Checked(Serial(), Vmapped(2))
    fleet = little_fleet(build(name), MODEL.init(0), SHARES, public=public, executor=executor)
    for cohort, lost in (([0, 1, 3], []), ([2, 3], [3]), ([0, 1, 2, 3], [1])):
        fleet.play(cohort, lost)
        assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())
    assert any(not torch.equal(leaf, MODEL.init(0)[key]) for key, leaf in fleet.model.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_reweighted_softmax_goes_with_it_unless_cross_entropy_is_built_into_its_loss(
    name: str, little_fleet: Callable[..., Any], public: PublicData
) -> None:
    if name in OWN_LOSS:
        with pytest.raises(ConfigurationError, match="has a loss of its own"):
            build(name, "wsm")
        return
    with_it, without_it = (
        little_fleet(build(name, loss), MODEL.init(0), SHARES, public=public) for loss in ("wsm", "cross_entropy")
    )
    for fleet in (with_it, without_it):
        fleet.play([0, 1, 2])
    assert any(not torch.equal(leaf, without_it.model[key]) for key, leaf in with_it.model.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_leaves_a_device(name: str, little_fleet: Callable[..., Any], public: PublicData) -> None:
    algorithm = build(name)
    fleet = little_fleet(algorithm, MODEL.init(0), SHARES, public=public)
    fleet.play([0, 2])
    ask = fleet.asks[0]
    program: Any = algorithm.programs[ask.program]
    model = PayloadTemplate.of({"model": MODEL.init(0)}).bytes
    reply = PayloadTemplate.of(program.payload(ask.shared)).bytes / model
    assert reply == pytest.approx(MODELS_UP.get(name, 1.0), rel=0.01)
    assert program.declares_label_counts == (name in TELL_LABEL_COUNTS)
    told = {device: result.label_counts is not None for device, result in fleet.results.items()}
    assert set(told.values()) == {name in TELL_LABEL_COUNTS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_reply_tells_the_devices_model(name: str, little_fleet: Callable[..., Any], public: PublicData) -> None:
    """Diagnosis looks at it: where one device takes part and nothing is trained after it, it is the global model."""
    algorithm = build(name)
    fleet = little_fleet(algorithm, MODEL.init(0), SHARES, public=public)
    before = fleet.model
    fleet.play([3])
    program = algorithm.programs[fleet.asks[0].program]
    assert isinstance(program, Revealing)
    found = program.local_model(fleet.asks[0].shared, fleet.payloads[3])
    assert found.keys() == before.keys()
    if not fleet.jobs:
        for key, leaf in found.items():
            torch.testing.assert_close(leaf, fleet.model[key])
