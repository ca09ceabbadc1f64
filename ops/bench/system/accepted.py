"""Finds the devices whose updates a run accepts, round by round, so that the floor can make the same updates.

The run is played in one process, and its ``asks.jsonl`` is read. Runs are deterministic. So a run of real processes
accepts the same updates, and ends with the same model digest.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from fedemu.coordinator.record.json_lines import read_lines
from fedemu.ops.assembly.coordinator import assemble
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.embedded import serve_embedded
from fedemu.ops.running.folder import claim
from fedemu.protocol.transport.memory import MemoryNetwork


async def accepted_updates(preset: str, overrides: Sequence[str]) -> tuple[dict[int, list[int]], str]:
    """The devices that are accepted in each round of the preset, by round, and the model digest."""
    experiment, runtime = load_experiment(preset, list(overrides), {})
    network = MemoryNetwork()
    accepted: dict[int, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
        directory = claim(experiment, Path(folder) / "run")
        try:
            summary = await serve_embedded(assemble(directory, experiment, network, runtime.bind), Runtime())
        finally:
            network.close()
        for ask in read_lines(directory / "asks.jsonl"):
            outcomes = zip(ask["devices"], ask["outcomes"], strict=True)
            accepted[ask["round"]] += [device for device, outcome in outcomes if outcome == "a"]
    return dict(accepted), str(summary.model_digest)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    accepted, digest = asyncio.run(accepted_updates(sys.argv[1], sys.argv[2:]))
    print(json.dumps({"accepted": accepted, "digest": digest}), file=answers, flush=True)
