"""Runs a whole experiment in one process: the coordinator, and all devices beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.device.compute.process import open_runner
from fedemu.device.host.computing import how_it_computes
from fedemu.device.machine.embedded import EmbeddedPlan, embed
from fedemu.ops.experiment import Runtime
from fedemu.ops.running.codes import abandon_threads
from fedemu.ops.running.device_code import DEVICE_CODE
from fedemu.protocol.errors import Interrupted
from fedemu.protocol.host.kernel import keep_blocks

DEPARTURE_SECONDS = 10.0
"""Seconds that the devices may take to leave after the end of the run."""


async def serve_embedded(plan: CoordinatorPlan, runtime: Runtime) -> Summary:
    """Serve the coordinator, and run all devices in this process as soon as the coordinator waits for them.

    Raises the errors of both sides. If both fail, that of the devices is raised. Nothing computes any more when this
    is over, unless the run is interrupted and the process is about to end.
    """
    keep_blocks()  # as trainers do, see COMPUTE_ENVIRONMENT
    computing: set[asyncio.Task[None]] = set()
    over = False
    try:
        return await _serve(plan, runtime, computing)
    except (Interrupted, asyncio.CancelledError):
        over = bool(computing) and abandon_threads()
        raise
    finally:
        if not over:
            await _rest(computing)


async def _rest(computing: set[asyncio.Task[None]]) -> None:
    """Wait until nothing computes."""
    while computing:
        await asyncio.wait(computing)


async def _serve(plan: CoordinatorPlan, runtime: Runtime, computing: set[asyncio.Task[None]]) -> Summary:
    """As ``serve_embedded``. ``computing`` is as in ``EmbeddedPlan``."""
    opened = asyncio.get_running_loop().create_future()

    def begin(address: str) -> None:
        plan.opened(address)
        opened.set_result(address)

    serving = asyncio.create_task(serve(replace(plan, opened=begin, at_rest=partial(_rest, computing))))
    await asyncio.wait({serving, opened}, return_when=asyncio.FIRST_COMPLETED)
    if not opened.done():
        return await serving
    embedding = asyncio.create_task(
        embed(
            EmbeddedPlan(
                network=plan.network,
                address=opened.result(),  # any port may have been asked for
                count=plan.settings.devices,
                state=plan.directory / "devices",
                code=DEVICE_CODE,
                open_runner=open_runner,
                computing=computing,
                device_type=runtime.device_type,
                compute=partial(how_it_computes, runtime.device_type),
            )
        )
    )
    await asyncio.wait({serving, embedding}, return_when=asyncio.FIRST_COMPLETED)
    devices_failed = embedding.done() and embedding.exception() is not None
    if devices_failed and not serving.done():
        serving.cancel()
    await asyncio.wait({serving})
    await asyncio.wait({embedding}, timeout=DEPARTURE_SECONDS)
    embedding.cancel()
    await asyncio.wait({embedding})
    if devices_failed and (serving.cancelled() or serving.exception() is not None):
        await embedding
    return await serving
