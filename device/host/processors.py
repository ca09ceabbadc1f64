"""The processors on which a machine's trainers compute. Nothing here imports torch into this process."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.hardware import cores

_ASK: Final = """
import json, torch
places = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
print(json.dumps([[torch.cuda.get_device_name(place) for place in places], torch.version.cuda]))
"""
_NAME: Final = re.compile(r"\d+|(GPU|MIG)-.+")
"""What may stand in CUDA_VISIBLE_DEVICES."""


class Cuda(NamedTuple):
    """The models of a machine's GPUs, each once, the version of CUDA of torch, and the number of GPUs."""

    models: tuple[str, ...]
    version: str
    number: int


def require_processor(device_type: str) -> None:
    """Raise ConfigurationError if trainers are to compute on CUDA and torch finds none on this machine.

    It may take seconds, as ``cuda_here`` does.
    """
    if device_type == "cuda" and cuda_here() is None:
        raise ConfigurationError(
            "device_type is cuda, but torch finds no CUDA device on this machine; choose cpu, or auto, which takes "
            "CUDA where there is one"
        )


@cache
def cuda_here() -> Cuda | None:
    """What torch finds of CUDA on this machine, None if it finds no GPU.

    A process of its own asks torch, whose import takes seconds, and only if there may be a GPU.
    """
    asked = ask_for_cuda()
    if asked is None:
        return None
    try:
        models, version = json.loads(asked.communicate()[0])
    except ValueError:
        return None
    return Cuda(tuple(sorted(set(models))), str(version), len(models)) if models else None


@cache
def ask_for_cuda() -> subprocess.Popen[bytes] | None:
    """Begin to ask torch. Then ``cuda_here`` need not wait as long. None if there can be no GPU."""
    if not (gpus() or any(map(os.path.exists, ("/dev/dxg", "/dev/nvhost-gpu", "/dev/nvmap")))):
        return None
    command = [sys.executable, "-P", "-c", _ASK]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def default_trainers(device_type: str) -> int:
    """The default number of trainers: one per GPU on which they can compute, or one per core.

    It may take seconds, as ``cuda_here`` does.
    """
    return len(usable_gpus(device_type)) or cores()


def likely_trainers(device_type: str) -> int:
    """The same if torch finds the GPUs that there seem to be. It takes no time."""
    return (len(gpus()) if device_type != "cpu" else 0) or cores()


def usable_gpus(device_type: str) -> list[str]:
    """CUDA's names of the GPUs that ``device_type`` computes on. There are none where torch finds none.

    It may take seconds, as ``cuda_here`` does.
    """
    here = cuda_here() if device_type != "cpu" else None
    if here is None:
        return []
    unlisted = here.number if "CUDA_VISIBLE_DEVICES" not in os.environ else 0  # in WSL 2 no file stands for one GPU
    return gpus() or [str(place) for place in range(unlisted)]


def gpu_share(trainers: int, gpus: int) -> float:
    """The share of a GPU's memory that each of so many trainers may take that use so many GPUs in turn."""
    return 1.0 / max(1, math.ceil(trainers / gpus))


def parts_of_gpus(gpus: Sequence[str], machines: int) -> list[tuple[list[str], int]]:
    """How several emulated machines on one host share its GPUs, at least one.

    For each of the machines: its GPUs, and how many of the machines have the same. They have some each or share one.
    """
    count = len(gpus)
    if machines <= count:
        return [(list(gpus[k * count // machines : (k + 1) * count // machines]), 1) for k in range(machines)]
    taken = [k * count // machines for k in range(machines)]
    return [([gpus[place]], taken.count(place)) for place in taken]


def gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use, found without loading CUDA, which may find none of them.

    CUDA reads its variable to the first name that is none, and finds nothing if one stands there twice.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(place) for place in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    names = list(takewhile(_NAME.fullmatch, map(str.strip, chosen.split(","))))
    return names if len(set(names)) == len(names) else []
