"""The virtual environments of the other simulators: made once in a folder, with the torch that fedemu has itself."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

from fedemu.protocol.host.paths import exists

INSTALL_SECONDS: Final = 1800.0


class Peer(NamedTuple):
    """A simulator: what pip installs for it (``distribution`` names the package), and the file of ``apps/``."""

    title: str
    distribution: str
    requirements: tuple[str, ...]
    app: str


# FedJAX 0.0.17 calls jax.tree_map, which JAX 0.6 no longer has.
PEERS: Final = {
    "flower": Peer("Flower, simulation", "flwr", ("flwr[simulation]", "torch"), "flower_app.py"),
    "pfl": Peer("pfl-research", "pfl", ("pfl[pytorch]",), "pfl_app.py"),
    "fedjax": Peer("FedJAX", "fedjax", ("fedjax", "jax<0.6"), "fedjax_app.py"),
}


class Absent(Exception):
    """A simulator that does not install or does not run, with the reason."""


def environment(name: str, folder: Path) -> tuple[Path, str]:
    """The Python of a simulator's environment, which is made if it is not there, and the simulator's version.

    Raises Absent if it cannot be installed.
    """
    peer = PEERS[name]
    place = (folder / name).absolute()
    python, stamp = place / "bin" / "python", place / "installed.json"
    # The same version with the same label, such as +cpu. So nobody gets libraries for a GPU who has none.
    torch = f"torch=={version('torch')}"
    wanted = {"requirements": [*peer.requirements], "constraint": torch}
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{name}.lock"):
        if not exists(stamp) or json.loads(stamp.read_text()) != wanted:
            _run([sys.executable, "-m", "venv", "--clear", str(place)])
            constraint = place / "constraint.txt"
            constraint.write_text(f"{torch}\n")
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            _run([*pip, "--constraint", str(constraint), *peer.requirements])
            stamp.write_text(json.dumps(wanted))
    asked = f"from importlib.metadata import version; print(version({peer.distribution!r}))"
    return python, _run([str(python), "-c", asked]).strip()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock: two benchmarks may want the same environment."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> str:
    """The output of a command. Raises Absent with the last line of its errors if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(str(error)) from None
    if done.returncode:
        raise Absent(last_words(done.stderr))
    return done.stdout


def last_words(text: str) -> str:
    """The last line that names an error, or else the last one that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b|ERROR", line)]
    return (errors or lines or ["it ended without a word"])[-1][:300]
