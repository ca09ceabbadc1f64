"""Who may import whom, and what stays out of the processes that have to be light."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
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
ORDER = {
    "protocol": "errors ids seeds messages liveness | codec host | tensors transport | blobs",
    "algorithms": (
        "interface measures replay/selection | trees data | streams | models | training "
        "| methods replay incremental/generator | incremental | registry"
    ),
    "device": "bus behaviour | pipe memory | compute/executors | compute runtime | process | machine",
    "coordinator": ("settings timeline observer | fleet | record | asks | evaluation service | plan | rounds | serve"),
    "ops": (
        "figures pages experiment/tables | experiment watching | data results | assembly compare report/plots "
        "| report stress | compare/page | doctor running | bench notebook | cli"
    ),
}
"""The rooms of each floor. A room imports from itself and from rooms further left, never from one behind the same bar.

A room is a folder, or a file that lies beside the folders of its floor. What is left of a bar comes before.
"""
MOST_FILES = 16
"""In one room. A room that needs more wants a wall; ``ops/bench`` is the exception."""
FACES = ("algorithms", "algorithms/interface", "ops/experiment", "ops")
"""The packages whose ``__init__.py`` hands on names. All others hold a docstring and import nothing."""
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


def room_of(module: str) -> str | None:
    """The room of a module named without ``fedemu.``: ``floor/folder`` or ``floor/file``. None for other names."""
    for parts in (module.split("."), module.split(".")[:-1]):
        place = ROOT.joinpath(*parts)
        if len(parts) > 1 and place.is_dir():
            return "/".join(parts)
        if place.with_suffix(".py").is_file():
            return "/".join(parts[:-1]) if len(parts) > 2 else "/".join(parts)
    return None


def rooms(floor: str) -> dict[str, int]:
    """The rooms of a floor, each with the number of its column in ``ORDER``."""
    return {f"{floor}/{name}": place for place, column in enumerate(ORDER[floor].split("|")) for name in column.split()}


def arrows() -> Iterator[tuple[str, str, str]]:
    """(from room, to room, where) for every import between two rooms of one floor."""
    for path in sources():
        if path.name == "__init__.py" and len(path.relative_to(ROOT).parts) == 2:
            continue  # the face of a floor
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for line, name in own_imports(path):
            there = room_of(name)
            if here is not None and there is not None and here != there and here.split("/")[0] == there.split("/")[0]:
                yield here, there, f"{path.relative_to(ROOT)}:{line}"


def circles(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """The sets of nodes that reach each other along the pairs."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for source, target in pairs:
        sorter.add(source, target)
    try:
        sorter.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for line, name in own_imports(path)
        if name.split(".")[0] not in ALLOWED[layer]
    ]
    assert wrong == []


@pytest.mark.parametrize("floor", LAYERS)
def test_every_room_has_its_place_in_the_order(floor: str) -> None:
    files = [
        path
        for path in (ROOT / floor).rglob("*.py")
        if len(path.relative_to(ROOT).parts) > 2 or path.stem != "__init__"
    ]
    found = {room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in files}
    assert found == rooms(floor).keys()


@pytest.mark.parametrize("floor", LAYERS)
def test_a_room_imports_only_rooms_that_stand_before_it(floor: str) -> None:
    place = rooms(floor)
    wrong = [
        f"{where} imports {there}"
        for here, there, where in arrows()
        if here.startswith(f"{floor}/") and place[there] >= place[here]
    ]
    assert wrong == []


def test_no_room_leads_back_to_itself() -> None:
    assert circles({(here, there) for here, there, _ in arrows()}) == []


def test_no_file_leads_back_to_itself() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources()}
    pairs = set()
    for path in sources():
        here = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for _, name in own_imports(path):
            there = name if name in names else name.rpartition(".")[0]
            if there in names and there != here:
                pairs.add((here, there))
    assert circles(pairs) == []


def test_no_room_holds_more_files_than_people_can_take_in() -> None:
    folders = {path.parent for path in sources()} - {ROOT / "ops" / "bench"}
    sizes = {str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) - 1 for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


def test_no_file_repeats_the_name_of_its_room() -> None:
    wrong = [str(path.relative_to(ROOT)) for path in sources() if path.stem.startswith(f"{path.parent.name}_")]
    assert wrong == []


def test_packages_are_empty_but_for_the_faces() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name == "__init__.py" and str(path.parent.relative_to(ROOT)) not in FACES and [*imports(path)]
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
