"""Former import places hand on the very objects of the rooms."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import fedemu.algorithms

ROOT = Path(__file__).parents[3]
FORMER = {
    "losses": """
        SMALLEST_NORM curvature_penalty dynamic_distillation knowledge_weights model_contrastive not_true_distillation
        proximal reweighted_cross_entropy unchecked_reweighted_cross_entropy""",
    "metrics": """
        Floats accuracy_lost diversity_of_norms forgetting gradient_diversity in_local local_forgetting mean_known
        mean_local_forgetting out_local over_distribution round_forgetting weight_alignment weight_divergence""",
    "fednova": "AVERAGES FedNova NormalisedSGD Weights effective_steps fednova minus_own",
    "flashback": "DynamicLoss Flashback FlashbackState Knowledge accumulate_knowledge flashback taught",
    "selection": """
        STRATEGIES Candidates Positions Strategy approximation_of_uniform by_gss_cluster by_gss_greedy by_herding
        class_balanced class_quotas directions fixed_proportion gradient_diversity gss_cluster gss_greedy herding
        naive_uniform none objective reservoir select_top solve_capped_simplex targets""",
    "generator": """
        CHECKPOINT_EVERY Entropy GeneratorSettings GeneratorTraining STRIDE Targets batch_statistics_loss
        feature_distillation image_prior_loss information_entropy_loss intended_classes new_class_cross_entropy""",
}
"""Every name that these places offered, so that nobody takes one away by accident."""
ROOMS = {
    "losses": "training.losses",
    "metrics": "measures.forgetting",
    "fednova": "methods.fednova",
    "flashback": "methods.flashback",
    "selection": " ".join(
        f"replay.selection.{module}"
        for module in ("at_random", "by_class", "candidates", "capped_simplex", "diversity", "gss", "selection")
    ),
    "generator": "incremental.generator.training incremental.generator.losses training.class_losses",
}


@pytest.mark.parametrize("place", FORMER)
def test_a_former_place_still_offers_its_names(place: str) -> None:
    module = importlib.import_module(f"fedemu.algorithms.{place}")
    rooms = [importlib.import_module(f"fedemu.algorithms.{room}") for room in ROOMS[place].split()]
    for name in FORMER[place].split():
        assert any(getattr(module, name) is getattr(room, name, None) for room in rooms), name


@pytest.mark.parametrize("place", FORMER)
def test_a_former_place_is_found_as_an_attribute_of_the_package(place: str) -> None:
    scope: dict[str, object] = {}
    exec(f"from fedemu.algorithms import {place}", scope)
    assert scope[place] is importlib.import_module(f"fedemu.algorithms.{place}")


def test_the_folder_holds_these_places_only() -> None:
    assert {path.stem for path in (ROOT / "algorithms" / "former").glob("*.py")} == {"__init__", *FORMER}


def test_a_former_place_hides_no_room() -> None:
    rooms = {path.stem for path in Path(fedemu.algorithms.__path__[0]).iterdir()}
    assert rooms & {*FORMER} == set()


def test_fedemu_itself_imports_from_the_rooms() -> None:
    places = "|".join(FORMER)
    old = re.compile(rf"fedemu\.algorithms(\.former|\.({places})\b| import ({places})\b)")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for floor in ("protocol", "algorithms", "device", "coordinator", "ops")
        for path in sorted((ROOT / floor).rglob("*.py"))
        if path.parent.name != "former"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if old.search(line.partition("#")[0])
    ]
    assert wrong == []
