"""What the kernel tells of a machine's processors and of its GPUs. Nothing is loaded for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

CPUINFO: Final = Path("/proc/cpuinfo")
NVIDIA: Final = Path("/proc/driver/nvidia")


def processor(path: Path = CPUINFO) -> dict[str, str]:
    """The facts of the first processor, such as ``vendor_id`` and ``flags``. Empty where the kernel tells none."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): fact.strip() for name, _, fact in pairs}


def graphics(folder: Path = NVIDIA) -> dict[str, Any]:
    """The models of this machine's ``gpus`` and the version of their ``driver``. Empty without NVIDIA's driver."""
    try:
        version = (folder / "version").read_text(encoding="utf-8", errors="replace")
        told = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("gpus/*/information")]
    except OSError:
        return {}
    models = re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(told), re.MULTILINE)
    driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", version)
    return {"gpus": sorted(models), "driver": driver[1] if driver else "unknown"}
