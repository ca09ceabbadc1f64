"""Whether other processes find a module of somebody's own where this process found it.

This process may look into more folders: that of its script, and what a cell has put into ``sys.path``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedemu.protocol.code.own_code import is_own
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.starting import starting

_ASK = "import sys; from fedemu.protocol.code.source import source_of; print(source_of(sys.argv[1]))"


def require_elsewhere(module: str, setting: str, name: str) -> None:
    """Raise ConfigurationError if other processes do not find this module of somebody's own.

    ``setting`` is the setting that needs it, for the class or function ``name``.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not is_own(file):
        return
    command = [*interpreter(), "-c", _ASK, module]
    with starting():
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = asked.stdout.splitlines()[-1] if asked.returncode == 0 else None
    path = Path(file).resolve()
    if found is not None and Path(found).resolve() == path:
        return
    folder = path.parents[module.count(".") + (path.name == "__init__.py")]
    raise ConfigurationError(
        f"{setting} = {name} can't be brought to other processes: the module {module} is {path} here, and "
        f"{found or 'not there'} for other processes; start Python in {folder}, or name this folder in the environment "
        "variable PYTHONPATH"
    )
