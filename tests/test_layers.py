"""Who may import whom, and what stays out of the processes that have to be light."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("protocol", "algorithms", "device", "coordinator", "ops")
ALLOWED = {
    "protocol": {"protocol"},
    "algorithms": {"algorithms", "protocol"},
    "device": {"device", "protocol", "algorithms"},
    "coordinator": {"coordinator", "protocol", "algorithms"},
    "ops": set(LAYERS),
}
SCIENCE_MAY_USE = {"protocol.ids", "protocol.seeds", "protocol.errors"}
"""Of the protocol, by ``algorithms``: pure functions and errors, nothing that sends."""
METHODS = re.compile(
    r"fedavg|fedprox|fedntd|moon|fednova|scaffold|fedcurv|fedreg|mfcl|fedcil|fedlwf|flashback", re.IGNORECASE
)
LIGHT_MODULES = (
    "fedemu.ops.cli.commands",
    "fedemu.ops.assembly.behaviours",
    "fedemu.ops.running.devices",
    "fedemu.ops.running.together",
    "fedemu.device.process.zygote",
    "fedemu.device.process.process",
    "fedemu.device.machine.supervisor",
    "fedemu.device.machine.prepare",
)
HEAVY = ("torch", "matplotlib", "sklearn", "datasets", "pandas", "scipy")


def sources() -> list[Path]:
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write fedemu.{path.parent.name}..."
            assert node.module is not None
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}"


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Of fedemu's own modules, named without ``fedemu.``."""
    return ((line, name.removeprefix("fedemu.")) for line, name in imports(path) if name.startswith("fedemu."))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for line, name in own_imports(path)
        if name.split(".")[0] not in ALLOWED[layer]
    ]
    assert wrong == []


def test_the_science_knows_nothing_of_messages_and_sockets() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "algorithms").rglob("*.py"))
        for line, name in own_imports(path)
        if name.startswith("protocol.") and not any(f"{name}.".startswith(f"{module}.") for module in SCIENCE_MAY_USE)
    ]
    assert wrong == []


def test_the_science_does_no_input_and_output() -> None:
    forbidden = {"asyncio", "socket", "zmq", "subprocess", "pathlib", "os", "shutil", "multiprocessing", "threading"}
    finds_code_by_name = ROOT / "algorithms" / "registry.py"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "algorithms").rglob("*.py"))
        for line, name in imports(path)
        if path != finds_code_by_name and name.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_no_module_goes_by_its_folder_alone() -> None:
    """From the repository's root ``import protocol`` works too, and makes a second copy of every class."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; write fedemu.{name}"
        for path in [*sources(), *tests]
        for line, name in imports(path)
        if name.split(".")[0] in LAYERS
    ]
    assert wrong == []


def test_no_algorithm_is_named_outside_the_algorithms_and_the_tables_that_offer_them() -> None:
    tables = ("experiment/tables/learning.py", "assembly/learning.py", "stress/scenarios.py")
    offers = {ROOT / "ops" / name for name in tables}
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        if "algorithms" not in path.relative_to(ROOT).parts and path not in offers
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if METHODS.search(line)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_process_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == ""
