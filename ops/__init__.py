"""What people use: experiments, data sets, commands, results, monitoring, stress tests and benchmarks.

Notebooks use ``fedemu.run``, which is also here: ``fedemu.ops.run(experiment) -> Results``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedemu.ops.notebook.calls import run as run
    from fedemu.ops.results.results import Results as Results


def __getattr__(name: str) -> Any:
    # A device process imports this package, but not what only notebooks need.
    if name == "run":
        from fedemu.ops.notebook.calls import run

        return run
    if name == "Results":
        from fedemu.ops.results.results import Results

        return Results
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
