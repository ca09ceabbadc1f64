"""Who may import whom, and what stays out of the processes that have to be light."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("protocol", "algorithms", "device", "coordinator", "ops")
ALLOWED = {
    "protocol": {"protocol"},
    "algorithms": {"algorithms", "protocol"},
    "device": {"device", "protocol", "algorithms"},
    "coordinator": {"coordinator", "protocol", "algorithms"},
    "ops": set(FLOORS),
}
ORDER = {
    "protocol": (
        "errors generators ids seeds wording messages liveness lookup | codec host | addresses code tensors "
        "| transport | blobs sharing"
    ),
    "algorithms": (
        "built_again names interface layouts measures replay/selection models/randomness | trees data scripts "
        "| graphs streams | models | training | analytic methods replay incremental/generator terms | incremental "
        "| incremental/data_free | registry former"
    ),
    "device": (
        "bus behaviour host | pipe memory | forking | compute/tapes | compute/executors | compute runtime | process "
        "| machine"
    ),
    "coordinator": (
        "settings timeline sums | fleet record | observer | asks | edge evaluation service | plan | rounds | serve"
    ),
    "ops": (
        "extras figures homes terminal | pages experiment/tables | experiment watching | data/own | data results "
        "| assembly compare keys report/plots track | report compare/latex compare/page | at_hand doctor live "
        "| running | edges engines | sweeps stress bench/measuring | stress/campaign stress/recovery stress/soak "
        "stress/strangers bench/aggregation bench/fleet bench/growth bench/peers/apps bench/selection bench/system "
        "bench/training bench/wire | bench/peers | bench/gpu | bench notebook cli/shell | cli"
    ),
}
"""The rooms of each floor. A room imports from itself and from rooms further left, never from one behind the same bar.

A room is a folder, or a file that lies beside the folders of its floor. Bars (``|``) part the columns of rooms.
"""
MOST_FILES = 16
"""The largest number of files in one room. Divide a room that needs more."""
FACES = ("algorithms", "algorithms/interface", "ops/experiment", "ops")
"""The packages whose ``__init__.py`` hands on names. All others hold a docstring and import nothing."""
SCIENCE_MAY_USE = {
    "protocol.generators",
    "protocol.ids",
    "protocol.seeds",
    "protocol.errors",
    "protocol.wording",
    "protocol.code.named",
    "protocol.code.own_code",
}
"""What ``algorithms`` may import of the protocol: pure functions and errors, and nothing that sends.

``protocol.generators`` keeps threads from seeding generators at the same time. ``protocol.code.named`` is the one place
that loads code by name, such as a user's own method, and ``protocol.code.own_code`` tells the errors of such code.
"""
METHODS = re.compile(
    r"fedavg|fedprox|fedntd|moon|fednova|scaffold|fedcurv|fedreg|mfcl|fedcil|fedlwf|flashback|lander", re.IGNORECASE
)
MODULES_OF_DEVICES = ("fedemu.device.process.zygote", "fedemu.ops.assembly.behaviours")
LIGHT_MODULES = (
    "fedemu.ops.cli.commands",
    "fedemu.ops.running.devices",
    "fedemu.ops.running.together",
    "fedemu.ops.edges.edge",
    "fedemu.ops.edges.tree",
    "fedemu.device.process.process",
    "fedemu.device.machine.supervisor",
    "fedemu.device.machine.prepare",
)
MODULE_OF_PAGES = "fedemu.ops.live.serving"
HEAVY = {"torch", "matplotlib", "sklearn", "datasets", "pandas", "scipy", "jinja2", "cvxpy", "aiohttp"}


@cache
def sources() -> tuple[Path, ...]:
    return tuple(path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py")))


NAMED_CODE = re.compile(r"fedemu((?:\.\w+)+)(?::(\w*))?")
"""A module in a string: ``fedemu.floor.module``, or ``fedemu.floor.module:attribute``."""


@dataclass(frozen=True)
class Source:
    """What the tests want to know of a file, each with its line. Modules of fedemu are named without ``fedemu.``."""

    imports: tuple[tuple[int, str], ...]
    """The full name of everything that the file imports, wherever in the file."""
    named: tuple[tuple[int, str, str], ...]
    """Module and attribute ("" if none is named) of every module that a string names."""
    started: tuple[tuple[int, str], ...]
    """The module of every ``"-m", "fedemu..."`` in a list, a tuple or a call."""
    asked: tuple[tuple[int, str], ...]
    """The method of every ``path.exists()``, ``path.is_file()`` and ``path.is_dir()``.

    A variable ``entry`` is one of ``os.scandir``, and is no path.
    """
    top_level: frozenset[str]
    """What the module defines or imports at its top level."""


@cache
def read(path: Path) -> Source:
    """Each file is parsed once for all tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    nodes = [*ast.walk(tree)]
    return Source(
        imports=tuple(imports_among(nodes, path)),
        named=tuple(modules_named_by(nodes)),
        started=tuple(modules_started_by(nodes)),
        asked=tuple(questions_among(nodes)),
        top_level=frozenset(names_defined_by(tree.body)),
    )


def imports_among(nodes: list[ast.AST], path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write fedemu.{path.parent.name}..."
            assert node.module is not None
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}"


def modules_named_by(nodes: list[ast.AST]) -> Iterator[tuple[int, str, str]]:
    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (named := NAMED_CODE.fullmatch(node.value))
        ):
            yield node.lineno, named[1].removeprefix("."), named[2] or ""


def modules_started_by(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if not isinstance(node, ast.Call | ast.List | ast.Tuple | ast.Set):
            continue
        words = node.args if isinstance(node, ast.Call) else node.elts
        values = [word.value if isinstance(word, ast.Constant) else None for word in words]
        for option, module in pairwise(values):
            if option == "-m" and isinstance(module, str) and module.startswith("fedemu."):
                yield node.lineno, module.removeprefix("fedemu.")


def questions_among(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("exists", "is_file", "is_dir")
            and not node.args
            and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "entry")
        ):
            yield node.lineno, node.func.attr


def names_defined_by(statements: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in statements:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.Import() | ast.ImportFrom():
                names |= {name.asname or name.name for name in node.names}
    return names


def source_of(module: str) -> Path | None:
    """The file of a module or package that is named without ``fedemu.``."""
    place = ROOT.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name, without ``fedemu.``, of every import of fedemu's own modules in a file."""
    return ((line, name.removeprefix("fedemu.")) for line, name in read(path).imports if name.startswith("fedemu."))


@cache
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


@cache
def arrows() -> tuple[tuple[str, str, str], ...]:
    """(from room, to room, where) for every import between two rooms of one floor."""
    found = []
    for path in sources():
        if path.name == "__init__.py" and len(path.relative_to(ROOT).parts) == 2:
            continue  # the face of a floor
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for line, name in own_imports(path):
            there = room_of(name)
            if here is not None and there is not None and here != there and here.split("/")[0] == there.split("/")[0]:
                found.append((here, there, f"{path.relative_to(ROOT)}:{line}"))
    return tuple(found)


def circles(pairs: set[str]) -> list[list[str]]:
    """The sets of nodes that reach each other along the pairs."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for source, target in pairs:
        sorter.add(source, target)
    try:
        sorter.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_what_it_may(floor: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / floor).rglob("*.py"))
        for line, name in own_imports(path)
        if name.split(".")[0] not in ALLOWED[floor]
    ]
    assert wrong == []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_names_no_code_in_a_string_that_it_may_not_import(floor: str) -> None:
    """A name in a string is an arrow too, which no import shows: ``"fedemu.ops.data.corpora:prepare"``."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} names fedemu.{module}; let the caller pass it"
        for path in sorted((ROOT / floor).rglob("*.py"))
        for line, module, _ in read(path).named
        if module.split(".")[0] not in ALLOWED[floor]
    ]
    assert wrong == []


def test_every_module_that_a_string_names_is_there() -> None:
    wrong = []
    for path in sources():
        for line, module, attribute in read(path).named:
            source = source_of(module)
            if source is None:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: there is no module fedemu.{module}")
            elif attribute and attribute not in read(source).top_level:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: fedemu.{module} has no {attribute}")
    assert wrong == []


def test_every_module_that_is_started_by_name_can_be_started() -> None:
    started = [(path, line, module) for path in sources() for line, module in read(path).started]
    assert len(started) > 5, "the search finds what it is to find"
    wrong = []
    for path, line, module in started:
        source = source_of(f"{module}.__main__") or source_of(module)
        if source is None or '__name__ == "__main__"' not in source.read_text(encoding="utf-8"):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: python -m fedemu.{module} does nothing")
    assert wrong == []


@pytest.mark.parametrize("floor", FLOORS)
def test_every_room_has_its_place_in_the_order(floor: str) -> None:
    files = [
        path
        for path in (ROOT / floor).rglob("*.py")
        if len(path.relative_to(ROOT).parts) > 2 or path.stem != "__init__"
    ]
    found = {room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in files}
    assert found == rooms(floor).keys()


@pytest.mark.parametrize("floor", FLOORS)
def test_a_room_imports_only_rooms_that_stand_before_it(floor: str) -> None:
    place = rooms(floor)
    wrong = [
        f"{where} imports {there}"
        for here, there, where in arrows()
        if here.startswith(f"{floor}/") and place[there] >= place[here]
    ]
    assert wrong == []


def test_imports_between_rooms_form_no_circle() -> None:
    assert circles({(here, there) for here, there, _ in arrows()}) == []


def test_imports_between_files_form_no_circle() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources()}
    pairs = set()
    for path in sources():
        here = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for _, name in own_imports(path):
            there = name if name in names else name.rpartition(".")[0]
            if there in names and there != here:
                pairs.add((here, there))
    assert circles(pairs) == []


def test_no_room_has_more_files_than_the_limit() -> None:
    folders = {path.parent for path in sources()}
    sizes = {str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) - 1 for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


@pytest.mark.parametrize("floor", FLOORS)
def test_the_folders_of_tests_are_those_of_the_rooms(floor: str) -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests" / floor).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []


def test_no_file_repeats_the_name_of_its_room() -> None:
    wrong = [str(path.relative_to(ROOT)) for path in sources() if path.stem.startswith(f"{path.parent.name}_")]
    assert wrong == []


def test_packages_are_empty_but_for_the_faces() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name == "__init__.py" and str(path.parent.relative_to(ROOT)) not in FACES and read(path).imports
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
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "algorithms").rglob("*.py"))
        for line, name in read(path).imports
        if name.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_no_module_goes_by_its_folder_alone() -> None:
    """From the repository's root ``import protocol`` works too, and makes a second copy of every class.

    A test without a line that may be such an import need not be parsed.
    """
    import_of_floor = re.compile(rf"^\s*(?:from|import)\s.*(?<![.\w])(?:{'|'.join(FLOORS)})\b", re.MULTILINE)
    tests = [
        path
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if import_of_floor.search(path.read_text(encoding="utf-8"))
    ]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; write fedemu.{name}"
        for path in [*sources(), *tests]
        for line, name in read(path).imports
        if name.split(".")[0] in FLOORS
    ]
    assert wrong == []


def test_no_path_is_asked_what_it_denies_on_a_damaged_disk() -> None:
    """From Python 3.14 on ``Path.exists`` is False after any error."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: take fedemu.protocol.host.paths in place of .{method}()"
        for path in sources()
        for line, method in read(path).asked
    ]
    assert wrong == []


def test_no_algorithm_is_named_outside_the_algorithms_and_the_tables_that_offer_them() -> None:
    tables = (
        "experiment/tables/learning.py",
        "assembly/learning.py",
        "stress/scenarios.py",
        "stress/campaign/cases.py",
        "stress/recovery/play.py",
        "stress/soak/play.py",
        "bench/training/workloads.py",
        "bench/peers/apps/flower_app.py",  # other simulators' own names
        "bench/peers/apps/pfl_app.py",
        "bench/peers/apps/fedjax_app.py",
    )
    offers = {ROOT / "ops" / name for name in tables}
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        if "algorithms" not in path.relative_to(ROOT).parts and path not in offers
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if METHODS.search(line)
    ]
    assert wrong == []


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """What a process loads beyond the modules of fedemu, by the module whose import loads it first.

    One process imports them one after another. So a package that is to stay out of all of them is in no list.
    """
    code = """
import importlib, json, sys
loaded = {}
for module in sys.argv[1:]:
    before = {*sys.modules}
    importlib.import_module(module)
    loaded[module] = sorted({*sys.modules} - before)
print(json.dumps(loaded))
"""
    command = [sys.executable, "-c", code, *MODULES_OF_DEVICES, *LIGHT_MODULES, MODULE_OF_PAGES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, list[str]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("module", MODULES_OF_DEVICES)
def test_the_modules_that_device_processes_are_forked_with_stay_small(
    module: str, loaded: dict[str, list[str]]
) -> None:
    """The zygote imports the first module, and the second one by its name. All device processes share both."""
    large = {*HEAVY, "psutil", "rich", "typer", "prometheus_client"}
    assert large.intersection(loaded[module]) == set()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_process_imports_nothing_heavy(module: str, loaded: dict[str, list[str]]) -> None:
    assert HEAVY.intersection(loaded[module]) == set()


def test_a_page_is_served_without_waiting_for_what_only_a_story_needs(loaded: dict[str, list[str]]) -> None:
    assert HEAVY.intersection(loaded[MODULE_OF_PAGES]) == {"aiohttp"}
