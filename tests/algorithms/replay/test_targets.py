"""The coordinator's part of coordinated selection: the targets of both wire forms."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedemu.algorithms.interface import DeviceReply, Reply
from fedemu.algorithms.replay.coordination import EachTargets, MeanTargets, fleet_objective
from fedemu.algorithms.replay.selection.diversity import targets
from fedemu.protocol.ids import DeviceId


@given(st.lists(st.sets(st.integers(0, 5), min_size=1).map(sorted), min_size=1, max_size=5), st.integers(0, 99))
def test_both_forms_give_the_same_targets_to_rounding(asked: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    by_mean, by_each, last = MeanTargets(), EachTargets(), {}
    for devices in asked:
        now = {m: torch.from_numpy(random.normal(3.0, 1.0, 50).astype(np.float32)) for m in devices}
        change = sum((now[m] - last.get(m, 0.0)).double() for m in devices).float()
        joined = torch.tensor([len(now.keys() - last.keys())])
        said = tuple(DeviceReply(DeviceId(m), 1, 1, {}, None) for m in devices)
        by_mean.add(Reply({"change": {"w": change}, "joined": {"devices": joined}}, said))
        by_each.add(Reply({"sum": [SimpleNamespace(device=m, load=partial(dict, w=now[m])) for m in devices]}, said))
        last |= now
    expected = targets([last[m].double().numpy() for m in sorted(last)])
    for row, m in enumerate(sorted(last)):
        np.testing.assert_allclose(by_each.each()[m]["w"], expected[row], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(last[m] - by_mean.shared()["mean"]["w"], expected[row], rtol=1e-5, atol=1e-5)
    assert by_mean.devices == by_each.devices == len(last)
    assert fleet_objective(by_mean.total()) == pytest.approx(fleet_objective(by_each.total()), rel=1e-5)


@pytest.mark.parametrize(("claimed", "devices"), [(2**63 - 1, 3), (-5, 0)])
def test_a_device_joins_once_at_most_whatever_it_says(claimed: int, devices: int) -> None:
    by_mean = MeanTargets()
    for device in range(3):
        values = {"change": {"w": torch.ones(3)}, "joined": {"devices": torch.tensor([claimed])}}
        by_mean.add(Reply(values, (DeviceReply(DeviceId(device), 1, 1, {}, None),)))
    assert by_mean.devices == devices
    assert all(mean["w"].tolist() == [1, 1, 1] for mean in by_mean.shared().values())
