"""The devices that an ask names."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Ask, total
from fedemu.coordinator.asks.naming import named_devices
from fedemu.protocol.errors import ConfigurationError


def ask(**fields: Any) -> Ask:
    return Ask("train", {"model": {"w": torch.zeros(1)}}, {"model": total}, **fields)


@pytest.mark.parametrize(
    ("cohort", "named"),
    [
        ("selected", None),
        ("online", None),
        ([4, 2, 1, 4], (4, 2, 1)),
        (np.array([1, 2]), (1, 2)),
        (torch.tensor([3]), (3,)),
        (range(5), (0, 1, 2, 3, 4)),
    ],
)
def test_each_device_is_named_once_by_a_number_of_python(cohort: Any, named: tuple[int, ...] | None) -> None:
    found = named_devices(ask(cohort=cohort), 5)
    assert found == named
    assert {type(device) for device in found or ()} <= {int}


@pytest.mark.parametrize("device", [True, np.bool_(True), torch.tensor(True), 0.5, "1"])
def test_a_cohort_of_anything_but_numbers_of_devices_is_told(device: Any) -> None:
    sentence = f"'cohort' of this Ask has {device!r}; it must be a list of devices, which are whole numbers from 0"
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        named_devices(ask(cohort=[0, device]), 2)


@pytest.mark.parametrize("cohort", [(), np.array([], np.int64)])
def test_an_ask_that_needs_replies_and_names_no_device_is_a_mistake_of_the_algorithm(cohort: Any) -> None:
    assert named_devices(ask(cohort=cohort, optional=True), 5) == ()
    with pytest.raises(ConfigurationError, match="'cohort' of this Ask names no device; name one, or make the Ask"):
        named_devices(ask(cohort=cohort), 5)


@pytest.mark.parametrize(
    ("field", "named", "strange"),
    [("cohort", [0, 2, 3], 3), ("cohort", [-1], -1), ("each", {0: {}, 3: {}}, 3), ("each", {np.int64(7): {}}, 7)],
)
def test_a_device_that_is_not_of_the_fleet_is_a_mistake_of_the_algorithm(field: str, named: Any, strange: int) -> None:
    told = f"'{field}' of this Ask names device {strange}; the devices of this fleet are 0 to 2$"
    with pytest.raises(ConfigurationError, match=told):
        named_devices(ask(**{field: named}), 3)
