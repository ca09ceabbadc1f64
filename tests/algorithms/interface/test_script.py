"""Asks and server jobs that a method's own code makes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Ask, Reducer, ServerJob, total, weighted_mean
from fedemu.protocol.errors import ConfigurationError

MODEL = {"w": torch.zeros(2)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shared": MODEL}, "'shared' of this Ask must be trees by name, as in {\"model\": state.model}"),
        ({"shared": [MODEL]}, "'shared' of this Ask must be trees by name"),
        ({"reduce": {"delta": "weighted_mean"}}, "'reduce' of this Ask must be reducers by key of the payload, as in"),
        (
            {"reduce": {"delta": lambda replies: replies[0]}},
            "'reduce' of this Ask must be reducers by key of the payload",
        ),
        ({"reduce": [weighted_mean]}, "'reduce' of this Ask must be reducers by key of the payload"),
        ({"cohort": "all"}, "'cohort' of this Ask is 'all'; it must be 'selected', 'online' or a list of devices"),
        ({"cohort": 5}, "'cohort' of this Ask is 5; it must be"),
        ({"each": [MODEL]}, "'each' of this Ask must be trees by device, as in {0: {"),
        ({"each": {"0": MODEL}}, "'each' of this Ask must be trees by device"),
        ({"each": {0: MODEL["w"]}}, "'each' of this Ask must be trees by device"),
        ({"shared": {"each": MODEL}, "each": {0: MODEL}}, "'shared' of this Ask has a tree \"each\""),
    ],
)
def test_an_ask_that_cannot_be_asked_is_refused_in_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"asks for the program 'train', and {said}")):
        Ask(**{"program": "train", "shared": {"model": MODEL}, "reduce": {"delta": total}, **fields})


def test_a_reducer_of_no_kind_is_refused_in_one_sentence() -> None:
    said = "a Reducer of the kind 'median'; the kinds are weighted_mean, mean, total, collect, and what is no sum, such"
    with pytest.raises(ConfigurationError, match=said):
        Reducer("median")  # type: ignore[arg-type]


@pytest.mark.parametrize("cohort", ["selected", "online", (), [3, 1], range(4), np.arange(3)])
def test_a_cohort_is_a_word_or_any_sequence_of_devices(cohort: Any) -> None:
    assert Ask("train", {"model": MODEL}, {"delta": total}, cohort).cohort is cohort


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"init": {"w": 1}}, "'init' of this ServerJob is {'w': 1}; it must be a function"),
        ({"step": None}, "'step' of this ServerJob is None; it must be a function"),
        ({"steps": 2.5}, "'steps' of this ServerJob is 2.5; it must be a whole number, at least 0"),
        ({"steps": -1}, "'steps' of this ServerJob is -1; it must be a whole number, at least 0"),
        ({"checkpoint_every": 0}, "'checkpoint_every' of this ServerJob is 0; it must be a whole number, at least 1"),
    ],
)
def test_a_server_job_that_was_put_together_wrongly_is_refused_in_words(given: Any, said: str) -> None:
    fields: dict[str, Any] = {"init": dict, "step": lambda tree, index: (tree, True), "steps": 0} | given
    with pytest.raises(ConfigurationError, match=re.escape(f"has a server job 'refine', and {said}")):
        ServerJob("refine", **{"checkpoint_every": 1, **fields})


@pytest.mark.parametrize("name", ["", "a\nb", "a\tb", 3, None])
def test_a_server_job_whose_name_is_no_line_of_text_is_refused(name: Any) -> None:
    said = f"the algorithm has a server job named {name!r}; its name must be a line of text"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        ServerJob(name, dict, lambda tree, index: (tree, True), 0, 1)
