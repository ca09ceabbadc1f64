"""An emulator of federated learning on real processes. These names are for notebooks and scripts:

- ``fedemu.run(experiment, **settings)`` runs an experiment and returns its ``Results``;
- ``fedemu.open_run(directory)`` reads the ``Results`` of a run directory;
- ``fedemu.compare(*directories)`` puts runs in one table;
- ``fedemu.__version__`` is the version of the installed package.

``fedemu.algorithms`` has the names for people who write methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedemu.ops.notebook.calls import compare as compare
    from fedemu.ops.notebook.calls import open_run as open_run
    from fedemu.ops.notebook.calls import run as run

    __version__: str

__all__ = ["__version__", "compare", "open_run", "run"]


def __getattr__(name: str) -> Any:
    # Every process of a fleet imports this package. None of them needs these names, so they are looked up on demand.
    if name == "__version__":
        from importlib.metadata import version

        return version("fedemu")
    if name in ("compare", "open_run", "run"):
        from fedemu.ops.notebook import calls

        return getattr(calls, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
