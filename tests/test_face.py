"""What ``import fedemu`` gives, and what it costs."""

import subprocess
import sys
from importlib import metadata

import pytest

import fedemu
import fedemu.ops
from fedemu.ops.notebook import calls


def test_the_package_hands_on_what_notebooks_need() -> None:
    assert {*fedemu.__all__} == {"__version__", "compare", "open_run", "run"}
    assert {*fedemu.__all__} <= {*dir(fedemu)}
    assert fedemu.run is calls.run is fedemu.ops.run
    assert fedemu.compare is calls.compare
    assert fedemu.open_run is calls.open_run


def test_the_version_is_that_of_the_installed_package() -> None:
    assert fedemu.__version__ == metadata.version("fedemu")


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'fedemu' has no attribute 'runs'"):
        _ = fedemu.runs  # type: ignore[attr-defined]


def test_a_process_that_uses_no_name_imports_nothing_heavy() -> None:
    code = "import sys; before = {*sys.modules}; import fedemu; print(*sorted({*sys.modules} - before))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {name for name in ended.stdout.split() if name.startswith(("fedemu.", "numpy", "rich"))} == set()
