"""``fedemu run --on ray``: places the supervisors of a run on the nodes of a Ray cluster, and replaces them.

``fedemu run`` starts this process in place of a supervisor. It ends when all places have ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fedemu.ops.data.apart import entry_here
from fedemu.ops.data.cache import read
from fedemu.ops.engines.actor import MOST_RESTARTS, Handed, Place, Report
from fedemu.ops.engines.nodes import settle
from fedemu.ops.engines.places import metrics_ports, share
from fedemu.ops.engines.sending import SentFile, offer
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.figures import readable_bytes
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.devices import called
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.running.folder import PLACES, read_places
from fedemu.ops.running.together import OWN_CLUSTER
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError, DataError, FedemuError, UnreachableError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.host.paths import exists
from fedemu.protocol.wording import counted

LOOK_SECONDS: Final = 0.5
"""The pause between two looks at the nodes and the places."""
LOST_SECONDS: Final = 20.0
"""A place whose node is gone, and that has not answered for so long, is lost."""
CONNECT_SECONDS: Final = 10.0
"""The longest that a cluster may take to answer."""
PACK_SECONDS: Final = 120.0
"""The longest that a place may take to stop and to pack its folder before it goes to another node."""
_QUIET: Final = {"log_to_driver": False, "logging_level": "warning"}
_LOCAL: Final = "127.0.0.1"


def main(words: Sequence[str]) -> int:
    """The places of ``fedemu run --on ray``.

    ``words`` are the run directory, the number of devices, the runtime as JSON, and the line on which devices are
    ``called``.
    """
    directory, devices, runtime, line = words

    def action() -> int:
        settings = Runtime.model_validate_json(runtime)
        asyncio.run(called(int(line)))
        here = connect(settings.on)
        host, _, port = (Path(directory) / "address").read_text().strip().rpartition(":")
        if urlsplit(settings.bind).hostname in ("0.0.0.0", "::", "*"):
            host = f"tcp://{here}"
        settings = settings.model_copy(update={"connect": f"{host}:{port}"})
        return RayFleet(Path(directory), int(devices), settings).run()

    return exit_code_of(action)


def connect(on: str) -> str:
    """Connect to the cluster that ``on`` names. Returns the address of this machine that its nodes reach.

    Signals are heard as before. Raises UnreachableError if no cluster answers.
    """
    import ray

    given = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    former = signal.getsignal(signal.SIGTERM)
    try:
        if given not in OWN_CLUSTER:
            place = urlsplit(given if "//" in given else f"//{given}")
            if place.port is not None:  # Ray itself would look for minutes
                socket.create_connection((place.hostname, place.port), CONNECT_SECONDS).close()
            ray.init(address=given, **_QUIET)
        else:
            ray.init(address="local", include_dashboard=False, **_QUIET)
    except (OSError, ImportError, RuntimeError, ValueError, AssertionError) as error:
        said = " ".join(str(error).split())[:200]
        raise UnreachableError(f"no Ray cluster answers at {given or 'this machine'} ({said})") from error
    finally:
        # Ray's own handler raises SystemExit, which would look like an error in the middle of anything.
        if former is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, former)
    own = str(ray.util.get_node_ip_address())
    if {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} <= {_LOCAL, own}:
        return _LOCAL
    if given.startswith("ray://"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((urlsplit(given).hostname, 10001))
            return str(probe.getsockname()[0])
    return own


class RayFleet:
    """The places of one run on the nodes of the cluster that this process is connected to.

    Ray keeps one bundle of resources on each node for each place. A place whose bundle has no node shares another
    node until Ray has found one: because it has returned, or because the cluster has grown.
    """

    def __init__(self, directory: Path, devices: int, runtime: Runtime) -> None:
        import ray

        living = [node for node in ray.nodes() if node["Alive"]]
        self._file = directory / PLACES
        known = read_places(directory)
        # A resumed run has the places that it had: another division would leave the own states of devices behind.
        places = len(known) or min(runtime.nodes or len(living), devices)
        self._bundle = bundle(living, runtime.device_type, runtime.trainers)
        self._group = ray.util.placement_group([self._bundle] * places, strategy="STRICT_SPREAD")
        experiment = read_frozen(directory)
        self._entry = entry_here(experiment)  # the coordinator has decoded the data before it listened
        corpus = read(self._entry)
        if corpus is None:
            raise DataError(f"the data of this run are not in {self._entry} any more; go on with --resume")
        self._files: Sequence[SentFile] | None = None
        plain = {**json.loads(runtime.model_dump_json()), "server_key": runtime.server_key}
        ports = metrics_ports(runtime.metrics_port, places)
        self._handed = {
            place: Handed(
                place=place,
                count=count,
                run=str(directory.absolute()),
                runtime={**plain, "metrics_port": ports[place]},
                keys=_pair(Path(runtime.keys), place),
                experiment=experiment.to_bytes(),
                data=corpus.digest,
                state=runtime.shared_state,
                leases=known.get(str(place), {}),
                environment={name: os.environ[name] for name in ("FEDEMU_DATA",) if name in os.environ},
            )
            for place, count in enumerate(share(devices, places))
        }
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        self._at: dict[int, str | None] = dict.fromkeys(self._handed)
        self._heard: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._silent: dict[int, int] = dict.fromkeys(self._handed, 0)
        """How often the actor of each place has died since the place was heard of."""
        self._sending: set[int] = set()
        """The places to which data are on the way."""

    def run(self) -> int:
        """Place, look and replace until all places have ended, or one with an error. Returns its exit code, or 0."""
        import ray

        ray.wait([self._group.ready()], timeout=10)
        say(f"{counted(len(self._handed), 'place')} on {counted(len(self._living()), 'node')} of Ray")
        while len(self._codes) < len(self._handed) and not any(self._codes.values()):
            living = self._living()
            for place, node in settle(self._at, self._homes(), living).items():
                self._put(place, node)
            self._look(living)
        return max(self._codes.values())

    def _living(self) -> list[str]:
        import ray

        return [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]

    def _homes(self) -> dict[int, str]:
        """The nodes on which Ray keeps bundles for places."""
        import ray

        kept = ray.util.placement_group_table(self._group).get("bundles_to_node_id", {})
        return {int(place): str(node) for place, node in kept.items() if node}

    def _put(self, place: int, node: str) -> None:
        """Start a place on a node. If it is somewhere else it leaves that node with what its devices keep."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        home = self._homes().get(place) == node
        if self._at[place] is not None and place in self._actors and self._at[place] in self._living():
            try:
                packed = ray.get(self._actors[place].leave.remote(), timeout=PACK_SECONDS)
                self._handed[place] = replace(self._handed[place], packed=packed)
            except (ray.exceptions.RayError, TimeoutError):
                pass  # it is lost after all
        if place in self._actors:
            ray.kill(self._actors[place])
            say(f"place {place} goes to {'the node that is kept for it' if home else 'a node that it shares'}")
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4}
        if home:
            options |= {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, place)
        else:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        self._actors[place] = ray.remote(Place).options(**options).remote(self._handed[place])
        self._at[place] = node
        self._sending.discard(place)
        self._asked[place] = self._actors[place].report.remote()
        self._heard[place] = time.monotonic()

    def _look(self, living: Sequence[str]) -> None:
        """Hear of the places, and note which of them have ended or are lost."""
        import ray

        waiting = {reference: place for place, reference in self._asked.items()}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=LOOK_SECONDS)
        if len(ready) == len(waiting):
            time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        for reference in ready:
            place = waiting[reference]
            try:
                self._note(place, ray.get(reference))
                self._heard[place] = now
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                # A place that cannot say how it stands is made anew, too.
                self._lose(place, _cause(str(error)))
        for place in [*self._asked]:
            if self._at[place] not in living and now > self._heard[place] + LOST_SECONDS:
                self._lose(place)

    def _send_data(self, place: int) -> None:
        """Send the data to a place that lacks them. Ray keeps their blobs until the run is over."""
        import ray

        if self._files is None:
            self._files = offer(self._entry, ray.put)
        size = readable_bytes(sum(path.stat().st_size for path in self._entry.iterdir()))
        say(f"place {place} has no copy of the data; {size} are sent to it")
        self._actors[place].take_data.remote(self._files)

    def _lose(self, place: int, cause: str = "") -> None:
        """Note that a place is nowhere. Raises FedemuError if its actor died again and again before it was heard of."""
        say(f"place {place} is lost with its node, or its process{f' ({cause})' if cause else ''}")
        self._at[place] = None
        del self._asked[place]
        self._silent[place] += bool(cause)
        if self._silent[place] > MOST_RESTARTS:
            raise FedemuError(
                f"place {place} was lost {self._silent[place]} times before it was heard of ({cause}); mend its node, "
                "and go on with --resume"
            )

    def _note(self, place: int, report: Report) -> None:
        """Remember what a place says, and ask it again unless it has ended."""
        self._silent[place] = 0
        if report.leases and report.leases != self._handed[place].leases:
            self._handed[place] = replace(self._handed[place], leases=report.leases, packed=b"")
            leases = {place: handed.leases for place, handed in self._handed.items()}
            write_whole(self._file, json.dumps(leases))
        if report.lacks_data and place not in self._sending:
            self._sending.add(place)
            self._send_data(place)
        if report.code is None:
            self._asked[place] = self._actors[place].report.remote()
            return
        del self._asked[place], self._at[place]
        self._codes[place] = report.code
        if report.code > 128:
            raise FedemuError(f"place {place} was killed again and again on its node; {report.words}")
        if report.code:
            say(f"place {place}: {report.words}")


def bundle(nodes: Sequence[dict[str, Any]], device_type: str, trainers: int = 0) -> dict[str, float]:
    """What Ray keeps for each place: the cores that every node has, and its GPUs unless trainers compute on cores.

    A number of ``trainers`` needs no more cores than one for each. Raises ConfigurationError if a node has fewer, or if
    the device type is cuda and a node has no GPU.
    """

    def least(kind: str) -> int:
        return int(min((node["Resources"].get(kind, 0) for node in nodes), default=0))

    gpus = least("GPU") if device_type != "cpu" else 0
    if device_type == "cuda" and not gpus:
        raise ConfigurationError("device_type is cuda, but not every node of the Ray cluster has a GPU; choose auto")
    cores = max(1, least("CPU"))
    if trainers > cores and not gpus:
        raise ConfigurationError(f"--trainers {trainers} is more than the cores of a node of the Ray cluster ({cores})")
    kept = {"CPU": float(min(trainers or cores, cores))}
    return kept | ({"GPU": float(gpus)} if gpus else {})


def _cause(error: str) -> str:
    """Why an actor is dead, in what Ray says of it: the line of the reason, or the last line of a traceback."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["Ray tells no reason"]
    return next((line for line in lines if line.startswith("The actor is dead because")), lines[-1])[:200]


def _pair(keys: Path, place: int) -> dict[str, str]:
    """The two files of a place's pair of keys, which is made here if it is new, and approved."""
    own = KeyFolder(keys / f"place-{place}")
    # An earlier life of the run may have been killed before it had approved the pair that it had made.
    public, _ = own.pair() if exists(own.secret_file) else (own.new(), "")
    KeyFolder(keys).approve(own.path.name, public)
    return {path.name: path.read_text(encoding="utf-8") for path in (own.public_file, own.secret_file)}
