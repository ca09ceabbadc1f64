"""Local terms beside every method: both executors agree, what is remembered travels once, and who refuses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Algorithm, Labelled, PublicData
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.registry import ALGORITHMS, TERMS, build_algorithm, build_terms
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.terms.local_term import PREVIOUS, with_local_terms
from fedemu.algorithms.terms.remembering import with_terms
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE, CLASSES = (1, 8, 8), 4
MODEL = growing(mlp(SHAPE, CLASSES, (6,)), ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
GENERATOR: dict[str, Any] = {"iterations": 2, "generator_batch": 4, "noise": 6, "synthetic_batch": 3}
SYNTHESIS: dict[str, Any] = {
    "synthesis_rounds": 2,
    "warm_up": 0,
    "synthesis_steps": 1,
    "generator_batch": 4,
    "noise": 6,
    "synthetic_batch": 3,
    "student_steps": 1,
    "student_batch": 4,
}
SHORT: dict[str, dict[str, Any]] = {
    "fedcurv": {"samples": 6, "penalty": 0.01},
    "feddf": {"server_batches": 4, "evaluate_every": 2},
    "fedreg": {"iterations": 2, "rehearsals": 2},
    "flashback": {"server_epochs": 2},
    "fedavg_finetuned": {"server_epochs": 2},
    "mfcl": GENERATOR,
    "fedavg_gen": GENERATOR,
    "target": SYNTHESIS,
    "lander": {**SYNTHESIS, "anchor_width": 5},
}
REFUSE = {"fedcil", "central", "ncm", "afl", "icarl"}
STREAM = [[np.arange(start + task, start + 8, 2) for start in (0, 40, 80)] for task in (0, 1)]
"""Four samples for a batch of five, so that each step has one that weighs nothing."""


def build(name: str, terms: dict[str, Any]) -> Algorithm[Any]:
    given = Ingredients(MODEL, cross_entropy, CLASSES, 2, 5, 0.05, 0.5, devices=3, public=True, input_shape=SHAPE)
    built = build_terms(terms, given)
    given = with_local_terms(given, built)
    return with_terms(build_algorithm(name, SHORT.get(name, {}), given), built, MODEL, name)


@pytest.fixture
def fleet(corpus: Corpus, little_fleet: Callable[..., Any]) -> Callable[..., Any]:
    def make(name: str, terms: dict[str, Any], **fields: Any) -> Any:
        public = PublicData(*(Labelled(*corpus.batch(split, np.arange(start, start + 20))) for start in (300, 340)))
        algorithm = build(name, terms)
        made = little_fleet(algorithm, MODEL.init(0), [], stream=STREAM, rounds_per_period=2, public=public, **fields)
        made.corpus = small
        return made

    split = replace(corpus.train, x=np.ascontiguousarray(corpus.train.x[:, :, 2:10, 2:10]))
    small = corpus = replace(corpus, train=split, test=split, input_shape=SHAPE)
    return make


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in REFUSE])
def test_a_method_with_all_terms_plays_alike_on_both_executors_and_is_another_method(
    name: str, fleet: Callable[..., Any]
) -> None:
    terms: dict[str, Any] = {term: {"coefficient": 0.5} for term in TERMS if term != "der"} | {"der": {}}
    played = fleet(name, terms, executor=Checked(Serial(), Vmapped(2)))
    plain = fleet(name, {}, executor=Serial(plain=True))
    for cohort in ([0, 1, 2], [0, 2], [0, 1], [1, 2]):
        played.play(cohort)
        plain.play(cohort)
        same = all(torch.allclose(leaf, plain.model[key], atol=1e-5) for key, leaf in played.model.items())
        assert same == (played.round < 3), "nothing is remembered in the first task"
    assert all(bool(torch.isfinite(leaf).all()) for leaf in played.model.values())


def test_what_is_remembered_goes_with_every_ask_and_stays_the_same_during_a_task(fleet: Callable[..., Any]) -> None:
    played = fleet("fedavg", {"lwf": {}, "ewc": {}})
    for _ in range(4):
        played.play([0, 1])
    first, last, importance, *later = played.asks
    assert {*first.shared} == {*last.shared} == {*importance.shared} == {"model"}
    assert importance.program == "importance"
    assert all({*ask.shared} == {"model", PREVIOUS, "terms.ewc"} for ask in later)
    assert all(later[0].shared[key] is later[1].shared[key] for key in (PREVIOUS, "terms.ewc"))
    assert played.own == {}


@pytest.mark.parametrize("name", sorted(REFUSE))
def test_a_method_whose_devices_do_not_minimise_a_loss_of_its_ingredients_refuses_terms(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"method '{name}' does not train devices by a loss.*terms\.lwf"):
        build(name, {"lwf": {}})


def test_a_wrong_name_or_option_of_a_term_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm\.terms 'lfw' is none of .*; did you mean 'lwf'"):
        build("fedavg", {"lfw": {}})
    with pytest.raises(ConfigurationError, match=r"'lwf' has no option algorithm\.terms\.lwf\.temperatur; did you"):
        build("fedavg", {"lwf": {"temperatur": 2.0}})
