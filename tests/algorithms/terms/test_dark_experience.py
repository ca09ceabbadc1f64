"""Dark experience replay: the loss of a batch, the logits that devices note, and that both executors agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import LOGITS, REPLAYED, Batch, Facts, Model
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.registry import build_algorithm, build_terms
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.terms.dark_experience import der
from fedemu.algorithms.terms.local_term import with_local_terms
from fedemu.algorithms.terms.remembering import with_terms
from fedemu.algorithms.training.class_losses import cross_entropy_among
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE, CLASSES, BUDGET = (1, 12, 12), 4, 5
MODEL = growing(mlp(SHAPE, CLASSES, (6,)), ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
SQUARE_SHAPE = (1, 8, 8)
SQUARE = growing(mlp(SQUARE_SHAPE, CLASSES, (6,)), ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SQUARE_SHAPE)
"""A model for images of a size for which there is a generator."""
STREAM = [[np.arange(start + task, start + 24 - 8 * task, 2) for start in (0, 40, 80)] for task in (0, 1)]
ZERO = torch.tensor(0)
FACTS = Facts(ZERO, ZERO, torch.tensor(0.1), ZERO, ZERO, torch.tensor(True), torch.ones(CLASSES))


def ingredients(criterion: Any = cross_entropy, **fields: Any) -> Ingredients:
    return Ingredients(MODEL, criterion, CLASSES, 1, 5, 0.05, 0.5, devices=3, input_shape=SHAPE, **fields)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 1.0), (0.3, 0.25), (2.0, 0.0)])
def test_a_batch_costs_the_mean_over_its_rows_of_what_each_kind_of_sample_costs(alpha: float, beta: float) -> None:
    model = mlp(SHAPE, 3, (6,))
    given = Ingredients(model, cross_entropy, 3, 1, 5, 0.05, input_shape=SHAPE)
    given = with_local_terms(given, {"der": der(given, alpha=alpha, beta=beta)})
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    y, weight, replayed = torch.tensor([0, 2, 1, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 0, 1, 1])
    nan = torch.nan
    noted = torch.tensor([[1.0, -2.0, nan], [nan] * 3, [nan] * 3, [9.0, 9.0, 9.0]])
    variables = model.init(0)
    batch = Batch(x, y, weight, {LOGITS: noted, REPLAYED: replayed})
    loss = given.local_sgd().loss(variables, batch, {"model": variables}, {}, FACTS)
    z = model.apply(variables, x, True)[0].logits.double()
    surprise = -z.log_softmax(-1)[torch.arange(4), y]
    # The first row was noted with two classes, the third is of a buffer without notes, the last is padding.
    old = beta * surprise[0] + alpha * ((z[0, 0] - 1) ** 2 + (z[0, 1] + 2) ** 2) / 2
    assert float(loss.value) == pytest.approx(float(old + surprise[1] + beta * surprise[2]) / 3, rel=1e-5)


def fleet_of(name: str, make: Callable[..., Any], options: dict[str, Any], model: Any = MODEL, **fields: Any) -> Any:
    given = replace(ingredients(kept=BUDGET), model=model)
    terms = build_terms({"der": {}, "lwf": {}}, given)
    given = with_local_terms(given, terms)
    algorithm = with_terms(build_algorithm(name, options, given), terms, model, name)
    settings = ReplaySettings("naive_uniform", budget=BUDGET, periods=2, logits=LOGITS in given.notes)
    replayed = with_replay(algorithm, settings, given)
    return make(replayed, model.init(0), [], stream=STREAM, budget=BUDGET, rounds_per_period=2, **fields)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedreg", "fedlwf_2t"])
def test_both_executors_agree_with_notes_and_without(name: str, little_fleet: Callable[..., Any]) -> None:
    fleet = fleet_of(name, little_fleet, {}, executor=Checked(Serial(), Vmapped(2)))
    for cohort in ([0, 1, 2], [0, 2], [0, 1], [1, 2]):
        fleet.play(cohort)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())
    assert fleet.results[1].examples == BUDGET + len(STREAM[1][1])


def test_a_kept_sample_has_the_logits_of_the_model_at_the_end_of_its_period(
    corpus: Corpus, little_fleet: Callable[..., Any]
) -> None:
    fleet = fleet_of("fedavg", little_fleet, {})
    fleet.play([0, 1])
    fleet.play([0, 1], online=[[0, 1]])
    kept = fleet.buffers[0]
    x, _ = corpus.batch(corpus.train, kept.indices)
    expected = MODEL.apply(fleet.model, x, False)[0].logits
    torch.testing.assert_close(kept.notes[LOGITS][:, [0, 2]], expected[:, [0, 2]])
    assert kept.notes[LOGITS][:, [1, 3]].isnan().all(), "the second task brings these classes"
    sent = fleet.model
    fleet.play([0, 2])
    assert fleet.buffers[0] is kept
    late = fleet.buffers[2]
    x, _ = corpus.batch(corpus.train, late.indices)
    grown = MODEL.entered(sent, 1, fleet.seed)
    torch.testing.assert_close(late.notes[LOGITS], MODEL.apply(grown, x, False)[0].logits)


def test_a_sample_that_stays_in_the_buffer_keeps_its_note(little_fleet: Callable[..., Any]) -> None:
    fleet = fleet_of("fedavg", little_fleet, {})
    fleet.stream = [*STREAM, STREAM[0]]
    noted = []
    for _ in range(4):
        fleet.play([0, 1, 2])
        noted.append(
            {device: dict(zip(b.indices, b.notes.get(LOGITS, []), strict=False)) for device, b in fleet.buffers.items()}
        )
    stayed = [
        (before, noted[3][device][index])
        for device in (0, 1, 2)
        for index, before in noted[1][device].items()
        if index in noted[3][device]
    ]
    assert len(stayed) > 1
    assert all(torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0)) for before, after in stayed)
    new = [note for device in (0, 1, 2) for index, note in noted[3][device].items() if index not in noted[1][device]]
    assert all(bool(note.isfinite().all()) for note in new)
    assert len(new) > 1


def test_a_device_without_samples_selects_at_once_and_late_whatever_the_model(
    little_fleet: Callable[..., Any], viewing: Model
) -> None:
    nothing = np.arange(0)
    fleet = fleet_of("fedavg", little_fleet, {}, model=viewing)
    fleet.stream = [[*STREAM[0][:1], nothing, nothing], [*STREAM[1][:1], STREAM[1][1], STREAM[1][2]], STREAM[0]]
    fleet.play([0, 1, 2])
    fleet.play([0, 1, 2], online=[[0, 1]])
    assert (fleet.buffers[1].period, len(fleet.buffers[1]), fleet.buffers[1].notes) == (1, 0, {})
    fleet.play([0, 1, 2])
    assert (fleet.buffers[2].period, len(fleet.buffers[2])) == (1, 0)
    fleet.play([0, 1, 2])
    assert all(fleet.buffers[device].notes[LOGITS].isfinite().all() for device in (0, 1, 2))


def test_what_the_term_cannot_work_with_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"learns from replay buffers, but replay\.strategy = 'none'"):
        der(ingredients(kept=0))
    with pytest.raises(ConfigurationError, match=r"algorithm\.terms\.der compares classes"):
        der(ingredients(language=True))

    def other(logits: Any, batch: Any, facts: Any) -> Any:
        return cross_entropy_among(logits, batch.y, logits[0] > 0)

    assert der(ingredients(other)).notes == {LOGITS: (CLASSES,), REPLAYED: ()}
    with pytest.raises(ConfigurationError, match=r"der\.beta = 0\.5 weighs the cross-entropy"):
        der(ingredients(other), beta=0.5)


@pytest.mark.parametrize("name", ["fedlwf_2t", "glfc", "mfcl", "flashback", "target", "lander"])
def test_a_method_with_a_loss_of_its_own_refuses_another_weight_of_replayed_samples(name: str) -> None:
    def build(beta: float, name: str = name) -> Any:
        given = ingredients(kept=BUDGET, public=True)
        given = replace(given, model=SQUARE, input_shape=SQUARE_SHAPE)
        terms = build_terms({"der": {"beta": beta}}, given)
        return with_terms(build_algorithm(name, {}, with_local_terms(given, terms)), terms, SQUARE, name)

    for fine in (build(1.0), build(0.0, "fedavg"), build(0.5, "fedntd")):
        assert "train" in fine.programs
    with pytest.raises(ConfigurationError, match=rf"'{name}' has a loss of its own, .*terms\.der .*beta = 1, or"):
        build(0.0)
