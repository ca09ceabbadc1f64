"""Asks that a method's own code makes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Ask, total, weighted_mean
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
    ],
)
def test_an_ask_that_cannot_be_asked_is_refused_in_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"asks for the program 'train', and {said}")):
        Ask(**{"program": "train", "shared": {"model": MODEL}, "reduce": {"delta": total}, **fields})


@pytest.mark.parametrize("cohort", ["selected", "online", (), [3, 1], range(4), np.arange(3)])
def test_a_cohort_is_a_word_or_any_sequence_of_devices(cohort: Any) -> None:
    assert Ask("train", {"model": MODEL}, {"delta": total}, cohort).cohort is cohort
