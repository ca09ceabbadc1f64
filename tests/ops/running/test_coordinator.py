"""What a coordinator asks of its machine before it begins."""

import pytest

from fedemu.ops.running.coordinator import allow_files, files_for
from fedemu.protocol.errors import ConfigurationError


def test_too_few_open_files_are_refused_with_all_that_needs_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedemu.ops.running.coordinator.most_open_files", lambda: 20_000)
    wanted = files_for(20_000, "ipc:///tmp/coordinator")
    remedies = r"fewer fleet\.devices, fleet\.link=shared, or an ipc:// address, need fewer"
    with pytest.raises(ConfigurationError, match=rf"needs {wanted} open files, but at most 20000 .*; {remedies}$"):
        allow_files(wanted)
