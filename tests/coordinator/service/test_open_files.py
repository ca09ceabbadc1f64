"""The open files of a coordinator, and the sentence where a machine allows fewer."""

from __future__ import annotations

import pytest

from fedemu.coordinator.service import open_files
from fedemu.coordinator.service.open_files import LEAST_FILES, MOST_MACHINES, SPARE_FILES, allow_files, files_for
from fedemu.protocol.errors import ConfigurationError

PRIVATE, PUBLIC = "ipc:///tmp/coordinator", "tcp://127.0.0.1:5555"


def test_each_connection_counts_and_twice_where_strangers_can_come() -> None:
    assert files_for(20_000, False, PRIVATE) == 20_000 + SPARE_FILES
    assert files_for(20_000, True, PRIVATE) == MOST_MACHINES + SPARE_FILES
    assert files_for(20_000, False, PUBLIC) == 2 * (20_000 + SPARE_FILES)
    assert files_for(20, False, PUBLIC) == LEAST_FILES


@pytest.mark.parametrize(
    ("address", "remedies"),
    [
        (PRIVATE, r"fewer fleet\.devices, or fleet\.link=shared, need fewer"),
        (PUBLIC, r"fewer fleet\.devices, fleet\.link=shared, or an ipc:// address, need fewer"),
    ],
)
def test_too_few_open_files_are_refused_with_all_that_needs_fewer(
    address: str, remedies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "most_open_files", lambda: 20_000)
    with pytest.raises(ConfigurationError, match=rf"needs 20256 open files, but at most 20000 .*; {remedies}$"):
        allow_files(20_256, address)
