"""What a person touches: configuration, data sets, command line, results, monitoring, stress and benchmarks.

For notebooks: ``fedemu.ops.run(experiment) -> Results``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedemu.ops.notebook import run as run
    from fedemu.ops.results.results import Results as Results


def __getattr__(name: str) -> Any:
    # Found when asked for, so that a device process does not import what only notebooks need.
    if name == "run":
        from fedemu.ops.notebook import run

        return run
    if name == "Results":
        from fedemu.ops.results.results import Results

        return Results
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
