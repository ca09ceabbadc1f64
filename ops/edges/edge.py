"""Runs an edge: ``fedemu edge`` does this, and so do the children that ``fedemu run`` starts for ``[tree]``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from fedemu.coordinator.edge.edge import Edge
from fedemu.coordinator.edge.plan import EdgePlan
from fedemu.ops.edges.metrics import served
from fedemu.ops.experiment import Runtime
from fedemu.ops.figures import readable_bytes
from fedemu.ops.keys.choice import client_keys, in_words, server_keys
from fedemu.ops.running.devices import ENDS, require_host
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.running.together import places, reachable, refuse_metrics_at_address
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError, Interrupted
from fedemu.protocol.host.futures import done_before
from fedemu.protocol.host.hardware import host_name
from fedemu.protocol.host.open_files import allow_open_files
from fedemu.protocol.host.private import working_folder
from fedemu.protocol.host.stopping import hearing_stop
from fedemu.protocol.transport.curve import ServerKeys
from fedemu.protocol.transport.zeromq import ZmqNetwork

MOST_FILES = 65_536
"""The soft limit of open files that an edge asks for, if it may."""
SPARE_FILES = 192
"""Descriptors that connections leave for the edge's own files, at least."""
LEAST_FILES = 256
"""With a lower limit of open files an edge could hardly hold a connection beside its own files."""


def edge_alone(runtime: Runtime) -> int:
    """Run an edge until the run is over, as ``fedemu edge`` does. Returns the exit code."""
    require_host(runtime.connect)
    if places(reachable(runtime.bind)) & places(runtime.connect):
        raise ConfigurationError(
            f"this edge would connect to itself: --bind {runtime.bind} and --connect {runtime.connect} are one place; "
            "give --bind another port"
        )
    refuse_metrics_at_address(runtime)
    logging.basicConfig(level=runtime.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    keys = server_keys(runtime, os.environ)
    named = f"; its machines name it by --server-key {quote(keys.public)}" if keys else ""

    def opened(address: str) -> None:
        say(
            f"an edge between {runtime.connect} and {address}; it waits {runtime.connect_seconds:g} s for its "
            f"coordinator\n  process  {os.getpid()}\n  keys     {in_words(runtime, os.environ, keys)}{named}"
        )

    outcome = run_edge(runtime, opened, keys)
    code, words = ENDS.get(outcome, (0, outcome))
    say(f"the run is over: {words}")
    return code


def run_edge(runtime: Runtime, opened: Callable[[str], None], below_keys: ServerKeys | None) -> str:
    """An edge from ``runtime.connect`` to ``runtime.bind``, with these keys there. Returns how the run ended.

    Raises the errors of ``Edge``, and Interrupted after a signal.
    """
    above_keys = client_keys(runtime, os.environ, below=True)

    async def serve(folder: Path) -> str:
        plan = EdgePlan(
            up=runtime.connect,
            down=runtime.bind,
            folder=folder,
            host=host_name(),
            connections=_most_connections(),
            connect_seconds=runtime.connect_seconds,
            lost_seconds=runtime.lost_seconds,
            opened=opened,
            told=say,
        )
        above, below = ZmqNetwork(keys=above_keys, watched=True), ZmqNetwork(keys=below_keys)
        stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with hearing_stop(stopped.set_result):  # also while what was sent last goes out, which may take a second
            try:
                edge = Edge(plan, above, below)
                with served(runtime, lambda: edge.traffic):
                    running = asyncio.ensure_future(edge.run())
                    if not await done_before(running, stopped):
                        raise Interrupted(f"The edge was stopped by {stopped.result()}.")
                    outcome = running.result()
                bytes_of = {name: readable_bytes(size) for name, size in edge.traffic.items()}
                say(f"{bytes_of['down_received']} came from below, {bytes_of['up_sent']} went up")
                return outcome
            finally:
                above.close()
                below.close()

    with working_folder("fedemu-edge-") as folder:
        return asyncio.run(serve(folder))


def _most_connections() -> int:
    """As many connections as this process may have, after its limit of open files was raised.

    Raises ConfigurationError if the limit is too low for an edge.
    """
    if (limit := allow_open_files(MOST_FILES)) < LEAST_FILES:
        raise ConfigurationError(
            f"an edge needs {LEAST_FILES} open files, and one more for each connection, but at most {limit} are "
            "allowed; raise the limit (ulimit -Hn 4096)"
        )
    return limit - SPARE_FILES


def main(words: Sequence[str]) -> int:
    """An edge of ``fedemu run``. The word is the runtime as JSON."""
    (runtime,) = words

    def action() -> int:
        run_edge(Runtime.model_validate_json(runtime), lambda address: None, None)
        return 0

    return exit_code_of(action)
