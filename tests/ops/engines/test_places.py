"""What an engine hands to the processes that it places elsewhere."""

from __future__ import annotations

import pytest

from fedemu.ops.engines.places import metrics_ports, share, share_in_words, variables
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDEMU_DATA", "FEDEMU_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("devices", "places", "each", "said"),
    [
        (20, 3, [7, 7, 6], "6 or 7"),
        (20, 2, [10, 10], "10"),
        (101, 100, [2, *[1] * 99], "1 or 2"),
        (5999, 3, [2000, 2000, 1999], "1,999 or 2,000"),
    ],
)
def test_places_divide_the_devices_evenly(devices: int, places: int, each: list[int], said: str) -> None:
    assert share(devices, places) == each
    assert share_in_words(devices, places) == said


@pytest.mark.parametrize(
    "text", ["2024", "true", "1e3", "inf", "2024-01-01", "3 # three", '"quoted"', "[one", "{", "'", "two words", "é\\n"]
)
def test_a_text_is_read_back_as_the_same_text(text: str) -> None:
    _, runtime = load_experiment({"track": {"project": text}, "runtime": {"metrics_address": text}}, (), {})
    handed = dict(variables(runtime))
    assert handed.keys() == {"FEDEMU_TRACK__PROJECT", "FEDEMU_RUNTIME__METRICS_ADDRESS"}
    _, read = load_experiment(None, (), handed)
    assert (read.track.project, read.metrics_address) == (text, text)


def test_texts_that_are_read_as_texts_stay_plain_and_other_values_are_toml() -> None:
    overrides = ["track.project=mine", "track.to=tensorboard", "runtime.trainers=2", "runtime.report=false"]
    _, runtime = load_experiment(None, [*overrides, 'runtime.allow_code=["own.py", "2"]'], {})
    assert dict(variables(runtime)) == {
        "FEDEMU_RUNTIME__ALLOW_CODE": '["own.py", "2"]',
        "FEDEMU_RUNTIME__REPORT": "false",
        "FEDEMU_RUNTIME__TRAINERS": "2",
        "FEDEMU_TRACK__PROJECT": "mine",
        "FEDEMU_TRACK__TO": '["tensorboard"]',
    }


def test_each_place_has_a_metrics_port_of_its_own_because_places_may_share_a_node() -> None:
    assert metrics_ports(9465, 3) == [9465, 9466, 9467]
    assert metrics_ports(65534, 2) == [65534, 65535]
    assert metrics_ports(0, 3) == [0, 0, 0]
    with pytest.raises(ConfigurationError, match="the metrics of 3 places need as many ports from 65534 on"):
        metrics_ports(65534, 3)
