"""What an import of the protocol brings with it."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import importlib, pkgutil, sys, threading
import fedemu.protocol
for module in pkgutil.walk_packages(fedemu.protocol.__path__, "fedemu.protocol."):
    importlib.import_module(module.name)
heavy = sorted({"torch", "matplotlib"} & set(sys.modules))
print(heavy, threading.active_count())
"""


def test_the_protocol_imports_neither_torch_nor_threads() -> None:
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["[]", "1"]
