"""A run on Kubernetes: the manifests of its coordinator and its machines, and the secrets with their keys."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Final

from fedemu.ops.assembly.named_code import allowing
from fedemu.ops.engines.places import require_places, share_in_words, variables
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import write_frozen
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.words import title
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import named_failure, usable, write_for_people
from fedemu.protocol.wording import counted

MANIFESTS: Final = "manifests.yaml"
SECRETS: Final = "secrets.yaml"
_TEMPLATE: Final = Path(__file__).parent / "shipped" / "kubernetes.yaml"
_NAME: Final = re.compile(r"(?!(?:on|off|yes|no|y|n|true|false|null)$)[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE: Final = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_SIZE: Final = re.compile(r"[1-9]\d*(Mi|Gi|Ti)")
_MOST_BYTES: Final = 900_000
"""The largest experiment that goes into a ConfigMap, which holds 1 MiB."""
_FOLDERS: Final = ("FEDEMU_DATA", "FEDEMU_CACHE")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What is asked of Kubernetes. ``cpus`` are the cores of each machine, ``data`` a claim of a volume with data.

    ``storage`` is the size of the coordinator's volume, ``state`` that of each machine's.
    """

    name: str
    machines: int
    image: str
    cpus: int = 2
    gpus: int = 0
    storage: str = "10Gi"
    state: str = "2Gi"
    data: str = ""

    def trainers(self, runtime: Runtime) -> int:
        """How many trainers each machine has: what the runtime says, else one for each GPU or core."""
        return runtime.trainers or self.gpus or self.cpus

    def check(self, experiment: Experiment) -> None:
        """Raise ConfigurationError if Kubernetes could not take this, or if there are more machines than devices."""
        require_places(experiment, self.machines, "--machines")
        for option, value in (("--name", self.name), ("--data", self.data)):
            if value and not _NAME.fullmatch(value):
                raise ConfigurationError(
                    f"{option} {value!r} is no name for Kubernetes; take a letter, then letters, digits and dashes, "
                    "all small, at most 40"
                )
        if not _IMAGE.fullmatch(self.image):
            raise ConfigurationError(f"--image {self.image!r} is no image; write it as in registry.example/fedemu:0.1")
        for option, value in (("--storage", self.storage), ("--machine-storage", self.state)):
            if not _SIZE.fullmatch(value):
                raise ConfigurationError(f"{option} {value!r} is no size; write it as in 500Mi or 10Gi")


@dataclass(frozen=True)
class Memory:
    """The memory that is asked for the coordinator and for each machine, in MiB, and what it is made of, for people.

    ``memory.py`` finds it.
    """

    coordinator: int
    machine: int
    coordinator_has: str
    machine_has: str


def name_of(experiment: Experiment) -> str:
    """A name for Kubernetes that resembles that of the experiment."""
    plain = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")


def image_of_this_version() -> str:
    """The image that the Dockerfile makes."""
    return f"fedemu:{metadata.version('fedemu')}"


def write_manifests(folder: Path, experiment: Experiment, runtime: Runtime, pods: Pods, memory: Memory) -> None:
    """Write the manifests and the secrets into a new folder, or nothing at all.

    Raises ConfigurationError if the folder or the manifests cannot be made, and FedemuError if the disk is full.
    """
    with usable(folder, "choose another --out"):
        folder.mkdir(parents=True)
    try:
        text, secrets = _manifests(folder, experiment, runtime, pods, memory), _secrets(pods.name)
        write_for_people(folder / MANIFESTS, text)
        with named_failure(folder / SECRETS):
            (folder / SECRETS).touch(mode=0o600)
            (folder / SECRETS).write_text(secrets, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _manifests(folder: Path, experiment: Experiment, runtime: Runtime, pods: Pods, memory: Memory) -> str:
    each = share_in_words(experiment.fleet.devices, pods.machines)
    data = "{name: data, mountPath: /data, readOnly: true}"
    words = {
        "TITLE": " ".join(title(experiment).split()),
        "MACHINES": f"{counted(pods.machines, 'machine')} with {each} devices each",
        "OUT": quote(str(folder)) if str(folder).isprintable() else "FOLDER",
        "NAME": pods.name,
        "IMAGE": pods.image,
        "FILES": "\n".join(_files(experiment)),
        # Only machines get GPUs.
        "SERVING": "\n".join(_environment(runtime.model_copy(update={"device_type": "cpu"}), pods)),
        "ENVIRONMENT": "\n".join(_environment(runtime, pods)),
        "SERVER_CPU": str(experiment.server.threads),
        "STORAGE": pods.storage,
        "STATE": pods.state,
        "COUNT": str(pods.machines),
        "DEVICES": str(experiment.fleet.devices),
        "TRAINERS": str(pods.trainers(runtime)),
        "ALLOWED": allowing(experiment),
        "CPU": str(pods.cpus),
        "MEMORY": str(memory.machine),
        "MOST_MEMORY": str(2 * memory.machine),
        "MEMORY_HAS": memory.machine_has,
        "SERVER_MEMORY": str(memory.coordinator),
        "MOST_SERVER_MEMORY": str(2 * memory.coordinator),
        "SERVER_MEMORY_HAS": memory.coordinator_has,
        "GPU": f", nvidia.com/gpu: {pods.gpus}" if pods.gpus else "",
        "MOUNTS": f"            - {data}" if pods.data else "",
        "VOLUMES": f"        - name: data\n          persistentVolumeClaim: {{claimName: {pods.data}}}"
        if pods.data
        else "",
    }

    def line_or_word(found: re.Match[str]) -> str:
        """The word, or the line that is nothing but a word: it goes if the word is empty."""
        return words[found[2]] if found[2] else f"{words[found[1]]}\n".lstrip("\n")

    return re.sub(
        r"^@([A-Z_]+)@\n|@([A-Z_]+)@", line_or_word, _TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )


def explained(folder: Path, experiment: Experiment, pods: Pods) -> str:
    """What the manifests are, for the person who applies them."""
    return (
        f"{title(experiment)}\n"
        f"  image    {pods.image}   (docker build -t {pods.image} . in a checkout of fedemu)\n"
        f"  start    kubectl apply -f {quote(str(folder))}\n"
        f"  watch    kubectl logs -f statefulset/{pods.name}\n"
        f"  results  kubectl cp {pods.name}-0:/work/run ./run\n"
        f"  keys     {folder / SECRETS}: keep it to yourself, and out of version control"
    )


def _files(experiment: Experiment) -> Iterator[str]:
    """The files of the frozen experiment, as entries of a ConfigMap. Raises ConfigurationError if they do not fit."""
    with tempfile.TemporaryDirectory(prefix="fedemu-") as place:
        write_frozen(experiment, Path(place))
        files = sorted(Path(place).iterdir())
        if sum(file.stat().st_size for file in files) > _MOST_BYTES:
            raise ConfigurationError(
                "the experiment with its traces is larger than a ConfigMap may be (1 MiB); name smaller trace files"
            )
        for file in files:
            text = file.read_text(encoding="utf-8")
            plain = all(line.isprintable() for line in text.splitlines()) and text[:1].isalpha()
            lines = [f"    {line}" if line else "" for line in text.split("\n")]
            yield f"  {file.name}: " + ("\n".join(["|", *lines[:-1]]) if plain else _quoted(text))


def _environment(runtime: Runtime, pods: Pods) -> Iterator[str]:
    told = [(name, value) for name, value in variables(runtime) if name not in _FOLDERS]
    if pods.data:
        told.append(("FEDEMU_DATA", "/data"))
    for name, value in (*told, ("FEDEMU_CACHE", "/tmp/cache")):
        yield f"            - {{name: {name}, value: {_quoted(value)}}}"


def _quoted(text: str) -> str:
    """A text in the quotes of YAML. JSON's own two escapes for one character beyond U+FFFF are none there."""
    signs = json.dumps(text, ensure_ascii=False)
    return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in signs)


def _secrets(name: str) -> str:
    """Two secrets with new keys: that of the coordinator, which knows the machines, and that of all machines."""
    with tempfile.TemporaryDirectory(prefix="fedemu-") as place:
        here, there = KeyFolder(Path(place) / "coordinator"), KeyFolder(Path(place) / "devices")
        for folder in (here, there):
            folder.new()
        files = {
            f"{name}-coordinator": {"machine.key": here.public_file, "machine.key_secret": here.secret_file}
            | {"devices.key": there.public_file},
            f"{name}-devices": {"machine.key": there.public_file, "machine.key_secret": there.secret_file}
            | {"coordinator.key": here.public_file},
        }
        return "# Keys of one run. Whoever has this file can join it, or pose as its coordinator.\n" + "".join(
            f"---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: {secret}\n  labels: {{app: {name}}}\n"
            "type: Opaque\nstringData:\n"
            + "".join(f"  {key}: {json.dumps(path.read_text(encoding='utf-8'))}\n" for key, path in content.items())
            for secret, content in files.items()
        )
