"""Code of a notebook's cells becomes a file that other processes load."""

from __future__ import annotations

import errno
import importlib
import itertools
import linecache
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedemu.ops.notebook import again, settings
from fedemu.ops.notebook.cells import name_of
from fedemu.protocol.code.named import load
from fedemu.protocol.errors import ConfigurationError

Cell = Callable[[str], dict[str, Any]]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cell:
    """Runs cells as a kernel does, in a ``__main__`` of their own. Returns its names."""
    monkeypatch.chdir(tmp_path)
    main: Any = ModuleType("__main__")
    main._ih = [""]
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(text: str) -> dict[str, Any]:
        name = f"/tmp/ipykernel_1/{zlib.crc32(text.encode())}.py"
        main._ih.append(text)
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), vars(main))
        return vars(main)

    return run


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with an iterator and a decorator that refuses a second function of the same name."""
    module: Any = ModuleType("ticking")
    module.ticks, module.known = itertools.count(), []

    def once(function: Any) -> Any:
        print("registered")
        assert function.__name__ not in module.known
        module.known.append(function.__name__)
        return function

    module.once = once
    monkeypatch.setitem(sys.modules, "ticking", module)
    return module


def test_a_class_takes_along_what_it_uses_and_nothing_else(cell: Cell) -> None:
    cell("import math\nfrom os.path import join as put\nWIDTH = 4\nHUGE = open\nroot = math.sqrt\nx = object()\n")
    cell("def twice(n):\n    return 2 * n\n")
    cell("class Base:\n    width = WIDTH\n")
    names = cell(
        "print('not this')\nclass Mine(Base):\n    def total(self, x):\n        return twice(root(x)) + self.width\n"
        "    def place(self): return put('a', 'b')\n"
    )
    name = name_of(names["Mine"], "model__name")
    place, _, attribute = name.rpartition(":")
    assert attribute == "Mine"
    text = Path(place).read_text()
    assert "print" not in text
    assert "HUGE" not in text
    loaded = load(name)()
    assert loaded.total(9) == 10
    assert loaded.place() == "a/b"
    assert name_of(names["Mine"], "model__name") == name, "the same code has the same name"


def test_a_module_that_is_used_by_its_whole_name_comes_along(cell: Cell) -> None:
    names = cell(
        "import xml, xml.dom.minidom\ndef root(text):\n    return xml.dom.minidom.parseString(text).documentElement\n"
    )
    place = name_of(names["root"], "algorithm__loss").rpartition(":")[0]
    code = f"import runpy; print(runpy.run_path({place!r})['root']('<a/>').tagName)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "a\n"


def test_the_open_that_a_notebook_puts_around_that_of_python_is_that_of_python(cell: Cell) -> None:
    names = cell(
        "import functools\n@functools.wraps(open)\ndef _careful(file, *args, **kwargs):\n    return file\n"
        "open = _careful\ndef text(file):\n    with open(file) as at:\n        return at.read()\n"
    )
    Path("said").write_text("this")
    assert load(name_of(names["text"], "algorithm__loss"))("said") == "this"


def test_several_scripts_may_write_the_same_code_at_the_same_time(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    names, replace = cell("class Mine:\n    width = 3\n"), os.replace

    def late(*places: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        name_of(names["Mine"], "model__name")  # another script is faster
        replace(*places)

    monkeypatch.setattr(os, "replace", late)
    assert load(name_of(names["Mine"], "model__name"))().width == 3


def test_what_ran_last_counts(cell: Cell) -> None:
    first = "from dataclasses import dataclass\n@dataclass\nclass State:\n    a: int = 1\n"
    before = name_of(cell(first)["State"], "model__name")
    names = cell("@dataclass\nclass State:\n    a: int = 2\n    b: int = 3\n")
    assert name_of(names["State"], "model__name") != before
    assert load(name_of(names["State"], "model__name"))().b == 3
    cell("@dataclass\nclass State:\n    a: int = 4\n")
    assert name_of(cell(first)["State"], "model__name") == before, "the first cell ran once more"
    cell("LIMIT = 1\ndef most():\n    return LIMIT\n")
    names = cell("LIMIT = 7\n")
    assert load(name_of(names["most"], "algorithm__loss"))() == 7


def test_a_name_that_a_loop_or_another_cell_has_given_another_function_means_this_one(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Functions:
        def relu(x: int) -> str:
            return "relu"

        def tanh(x: int) -> str:
            return "tanh"

    kit: Any = ModuleType("kit")
    kit.relu, kit.tanh = Functions.relu, Functions.tanh  # torch's functions have such qualified names, too
    kit.relu.__module__ = kit.tanh.__module__ = "kit"
    monkeypatch.setitem(sys.modules, "kit", kit)
    cell("import kit\nact = kit.relu\nPLACE = 0\ncut = (str.strip, str.lower)[PLACE]\n")
    names = cell("def f(x):\n    return act(x)\ndef g(x):\n    return cut(x)\nfor act in (kit.tanh,): pass\n")
    assert load(name_of(names["f"], "algorithm__loss"))(1) == "tanh"
    assert load(name_of(names["g"], "algorithm__loss"))(" A") == "A"
    with pytest.raises(ConfigurationError, match="it uses cut, which is a"):
        name_of(cell("PLACE = 1\n")["g"], "algorithm__loss")


def test_annotations_of_a_script_that_are_never_read_stay_unread(cell: Cell) -> None:
    names = cell("from __future__ import annotations\ndef f(x: Unknown) -> Tree:\n    return x\n")
    assert load(name_of(names["f"], "model__name"))(3) == 3


def test_a_script_that_is_edited_while_it_runs_does_not_lend_its_new_code_to_what_ran(cell: Cell) -> None:
    script, text = Path("script.py"), "def loss():\n    return 1\nclass Mine:\n    def f(self): return 3\n"
    names = cell("")
    script.write_text(text)
    exec(compile(text, str(script), "exec"), names)
    assert load(name_of(names["loss"], "algorithm__loss"))() == 1
    script.write_text(text.replace("1", "2"))
    linecache.checkcache(str(script))  # as every traceback that is printed does
    with pytest.raises(ConfigurationError, match="the source of loss is not at hand, or no longer what ran"):
        name_of(names["loss"], "algorithm__loss")
    assert load(name_of(names["Mine"], "model__name"))().f() == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import numpy\nt = numpy.ones(3)\nclass A:\n    def f(self): return t\n",
            "it uses t, which is a ndarray and no",
        ),
        ("class A: ...\nA = A()\n", "is an object; name a class"),
        ("def outer():\n    class A: ...\n    return A\nA = outer()\n", "defined inside of something else"),
        ("A = lambda: 3\n", "model__name is a lambda, which has no name .*; write it with def"),
        ("act = abs\nact = lambda x: 2 * x\ndef A(): return act(3)\n", "it uses act, which is a lambda .write it with"),
        ("class A: ...\nclass A(A): ...\n", "it uses A, which is an earlier A;"),
        (
            "def made():\n    return lambda: 3\nf = made()\ndef A(): return f()\n",
            "it uses f, which is defined inside of",
        ),
        ("def f(k):\n    def f(): return k\n    return f\ng = f(3)\ndef A(): return g()\n", "it uses g, which is def"),
        (
            "A = type('A', (), {'__module__': '__main__'})\n",
            "the source of A is not at hand, .*%%writefile mine.py",
        ),
    ],
)
def test_what_cannot_be_brought_over_is_refused_in_one_sentence(cell: Cell, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        name_of(cell(text)["A"], "model__name")
    assert not Path("fedemu-cells").exists()


def test_a_folder_that_cannot_be_written_is_told(cell: Cell) -> None:
    names = cell("class A: ...\n")
    Path("fedemu-cells").touch()
    with pytest.raises(ConfigurationError, match=r"fedemu-cells .*; start Python in a folder that can be written"):
        name_of(names["A"], "model__name")


BASE = "class Base:\n    def total(self): return 1\n"
MINE = (
    "from dataclasses import dataclass\nWIDTH = 4\n@dataclass\nclass State:\n    size: int = 3\n"
    "class Mine(Base):\n    depth = WIDTH\n    seen = []\n    state = State\n    cut = str.strip\n"
    "    def call(self, x: int = WIDTH, *, y: int = 2 * depth): return State.size + self.depth + x + y\n"
    "    @classmethod\n    def make(cls, x: int = 1): return cls()\n"
)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("Mine.depth = 5\n", "Mine.depth"),
        ("State.size = 5\n", "State.size"),
        ("Mine.wide = 5\n", "Mine.wide"),
        ("def call(self): return 0\nMine.call = call\n", "Mine.call"),
        ("def total(self): return 0\nMine.total = total\n", "Mine.total"),
        ("WIDTH = 5\n", "Mine.depth"),
        ("WIDTH = 5\nMine.depth = 5\n", "the default of x in Mine.call"),
        (BASE.replace("1", "2"), "the base Base"),
        (BASE + "Mine.seen.append(1)\n", None),
        (MINE, None),
    ],
)
def test_what_was_changed_after_its_definition_is_not_brought_over_as_it_was(
    cell: Cell, text: str, changed: str | None
) -> None:
    cell(BASE)
    cell(MINE)
    mine = cell(text)["Mine"]
    if changed is None:
        assert load(name_of(mine, "model__name"))().call() == mine().call() == 19
        return
    with pytest.raises(ConfigurationError, match=rf"the source of \w+ no longer says what {changed} is \(run it again"):
        name_of(mine, "model__name")


@pytest.mark.parametrize(
    ("text", "later", "changed"),
    [
        ("class A:\n    width = int(12)\n", "A.width = 4\n", "A.width"),
        ("class A:\n    width = int(12)\n", "A.width = 12\n", None),
        ("class A:\n    hidden = [64]\n", "A.hidden = [8]\n", "A.hidden"),
        ("class A:\n    sizes = {'a': (1, 2)}\n", "A.sizes['a'] = (1, 3)\n", "A.sizes"),
        ("class A:\n    width = 3\n", "del A.width\n", "A.width"),
        ("class A:\n    places = {1, 2}\n", "A.places.add(3)\n", "A.places"),
        ("class A:\n    scale = numpy.ones(2)\n", "A.scale = numpy.zeros(2)\n", "A.scale"),
        ("class A:\n    scale = numpy.full(2, numpy.nan)\n", "A.scale = A.scale.copy()\n", None),
        ("class A:\n    kind = numpy.dtype('i4')\n", "A.kind = numpy.dtype('i8')\n", "A.kind"),
        ("class A:\n    cut = str.strip\n", "A.cut = str.lower\n", "A.cut"),
        ("WIDE = [64]\ndef A(wide=WIDE): pass\n", "WIDE = [8]\n", "the default of wide in A"),
        ("def A(wide=dict(a=1)): pass\n", "A.__defaults__ = ({'a': 2},)\n", "the default of wide in A"),
        ("@times(FACTOR)\ndef A(): return 10\n", "FACTOR = 7\n", "A"),
        ("class A:\n    @times(FACTOR)\n    def f(): return 10\n", "FACTOR = 7\n", "A.f"),
        ("@times(FACTOR)\ndef A(): return 10\n", "FACTOR = 2.0\n", "A"),
        ("class A(metaclass=Meta):\n    def f(self): return 1\n", "A.f = lambda self: 9\n", "A.f"),
        ("class A(metaclass=Meta):\n    @property\n    def f(self): return 1\n", "A.f = 9\n", "A.f"),
        ("class A:\n    call = functools.partial(max, key=abs)\n", "A.call.keywords['key'] = int\n", "A.call"),
        ("class A:\n    mode = Mode.A\n", "A.mode = Mode.B\n", "A.mode"),
        ("class A:\n    plan = Plan(3)\n", "A.plan = Plan(4)\n", "A.plan"),
        ("class A:\n    plan = Plan(3)\n    mode = Mode.A\n", "A.plan = Plan(3)\n", None),
        ("def A(x):\n    for i in (1, 2):\n        if x: numpy.ones(i)\n    return numpy.ones(3)\n", "", None),
        ("class O:\n    class I: ...\nI = O.I\nclass list(list): ...\ndef A(): return I, list\n", "", None),
        ("class A:\n    make = lambda self: A()\n    @property\n    def f(self): return [A for _ in (1,)]\n", "", None),
        # What a class fills, and what its source gives only once.
        ("class A:\n    seen, _made = [], None\n    by = {}\n", "A.seen += [1]\nA.by[1] = 2\nA._made = {}\n", None),
        ("class A:\n    since = next(ticks)\n", "next(ticks)\n", None),
        ("class A:\n    net = Opaque()\n", "A.net = Opaque()\n", None),
        ("@once\ndef A(): return 1\n", "", None),
        ("class A:\n    def f(self): return super().__init__()\n    g = f\n    h = classmethod(f)\n", "", None),
    ],
)
def test_a_change_is_found_however_the_value_was_made(cell: Cell, text: str, later: str, changed: str | None) -> None:
    cell(
        "import functools, itertools, numpy\nfrom enum import Enum\nfrom dataclasses import dataclass\n"
        "from ticking import once, ticks\nFACTOR = 2\nclass Meta(type): ...\nclass Mode(Enum):\n    A = 1\n    B = 2\n"
        "@dataclass(frozen=True)\nclass Plan:\n    size: int = 1\nclass Opaque: ...\n"
        "def times(k):\n    def around(f):\n        return functools.wraps(f)(lambda *given: k * f(*given))\n"
        "    return around\n"
    )
    cell(text)
    names = cell(later)
    if changed is None:
        assert name_of(names["A"], "model__name").endswith(".py:A")
        return
    with pytest.raises(ConfigurationError, match=rf"the source of A no longer says what {changed} is \(run it again\)"):
        name_of(names["A"], "model__name")


def test_the_source_runs_apart_and_changes_nothing_here(
    cell: Cell, capfd: pytest.CaptureFixture[str], ticking: ModuleType
) -> None:
    names = cell("from ticking import once, ticks\n@once\ndef make():\n    return next(ticks)\n")
    capfd.readouterr()
    name_of(names["make"], "model__name")
    assert capfd.readouterr() == ("", "")
    assert (names["make"](), ticking.known) == (0, ["make"])


def test_a_source_that_does_not_come_to_an_end_says_nothing(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, ticking: ModuleType
) -> None:
    monkeypatch.setattr(again, "SECONDS", 0.05)
    names = cell("import ticking\n@ticking.once\ndef make(): return 1\n")
    ticking.__dict__["once"] = lambda function: threading.Event().wait()
    assert name_of(names["make"], "model__name").endswith(":make")


@pytest.mark.parametrize(
    ("ran", "never", "read"),
    [
        ("class A(Base):\n    gain = [1.0]\n", "class A(Base):\n    gain = [7.0]\n", "A.gain == [1.0]"),
        ("class A(Enum):\n    W = 16\n", "class A(Enum):\n    W = 8\n", "A.W.value == 16"),
        ("@dataclass\nclass A:\n    w: int = 16\n", "@dataclass\nclass A:\n    w: int = 8\n", "A().w == 16"),
    ],
)
@pytest.mark.parametrize("place", ["raised", "below"])
def test_a_definition_that_never_ran_is_not_taken_for_one_that_did(
    cell: Cell, place: str, ran: str, never: str, read: str
) -> None:
    start = "from dataclasses import dataclass\nfrom enum import Enum\nclass Base: ...\n"
    cell(start)
    cell(ran)
    main: Any = sys.modules["__main__"]
    if place == "raised":
        with pytest.raises(ZeroDivisionError):
            cell(f"1 / 0\n{never}")
    else:  # the cell that calls goes on below
        main._ih.append(never)
    made = load(name_of(main.A, "model__name"))
    assert eval(read, {"A": made})


def test_if_nothing_tells_which_definition_ran_the_last_one_is_looked_at_again(cell: Cell) -> None:
    names = cell("class A:\n    w = int(1)\n")
    sys.modules["__main__"]._ih.append("class A:\n    w = int(2)\n")  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"the source of A no longer says what A\.w is \(run it again\)"):
        name_of(names["A"], "model__name")
    names["A"].__firstlineno__ = 1  # as Python 3.13 gives it
    sys.modules["__main__"]._ih[-1] = "\nclass A:\n    w = int(2)\n"  # type: ignore[attr-defined]
    assert load(name_of(names["A"], "model__name")).w == 1


def test_a_named_tuple_is_brought_over(cell: Cell) -> None:
    names = cell("from typing import NamedTuple\nclass Sizes(NamedTuple):\n    width: int = 8\n")
    assert load(name_of(names["Sizes"], "model__name"))() == (8,)


def test_a_name_of_an_import_of_everything_is_imported(cell: Cell) -> None:
    names = cell("from fedemu.algorithms import *\ndef same(tree: Tree) -> Tree:\n    return tree\n")
    assert load(name_of(names["same"], "algorithm__loss"))({}) == {}


@pytest.mark.parametrize(
    "text",
    [
        "class Base:\n    @staticmethod\n    def make(n): return Child(n)\n"
        "class Child(Base):\n    def __init__(self, n): self.n = n\n",
        "from __future__ import annotations\n"
        "class Base:\n    @staticmethod\n    def make(n) -> Child: return Child(n)\n"
        "class Child(Base):\n    def __init__(self, n): self.n = n\n",
        "def twice(n): return 2 * TABLE[n]\nTABLE = [0, 1, 2, 3]\n"
        "class Base:\n    two, three = twice(1), [twice(n) // 2 for n in (3,)]\n    def make(n): return Child(n)\n"
        "class Child(Base):\n    def __init__(self, n, least=Base.two): self.n = max(n, least, *Base.three)\n",
    ],
)
def test_classes_may_name_each_other_in_their_methods(cell: Cell, text: str) -> None:
    names = cell(f"{text}def build(n): return Base.make(n)\ndef child(n): return Child(n)\n")
    for name in ("build", "child"):
        assert load(name_of(names[name], "model__name"))(3).n == 3


def test_a_name_may_stand_for_what_another_name_was_before(cell: Cell) -> None:
    cell("class Net:\n    def f(self): return 1\nOld = Net\n")
    names = cell("class Net(Old):\n    def f(self): return 10 + super().f()\ndef both(): return Net().f(), Old().f()\n")
    assert load(name_of(names["both"], "model__name"))() == (11, 1)
    names = cell("class Net:\n    def f(self): return 2\n")
    with pytest.raises(ConfigurationError, match="it uses Old, which is an earlier Net"):
        name_of(names["both"], "model__name")


def test_a_module_that_other_processes_find_elsewhere_or_not_at_all_is_refused(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "nets_beside.py").write_text("class Net: ...\n")
    monkeypatch.syspath_prepend(scripts)
    names = cell("import nets_beside\nfrom nets_beside import Net\ndef make(): return Net()\n")
    Path("nets_beside.py").write_text("class Net: width = 3\n")
    there = f"is {scripts}/nets_beside.py here, and {tmp_path}/nets_beside.py for other processes; .* PYTHONPATH"
    with pytest.raises(ConfigurationError, match=there):
        name_of(names["make"], "algorithm__loss")
    Path("nets_beside.py").unlink()
    with pytest.raises(ConfigurationError, match="and not there for other processes"):
        name_of(names["Net"], "model__name")
    monkeypatch.setenv("PYTHONPATH", str(scripts))
    assert name_of(names["Net"], "model__name") == "nets_beside:Net"


def test_a_machine_that_starts_no_process_to_look_for_a_module_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nets_looked_for.py").write_text("class Net: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("nets_looked_for").Net
    monkeypatch.setattr(subprocess, "run", MagicMock(side_effect=BlockingIOError(errno.EAGAIN, "")))
    with pytest.raises(ConfigurationError, match="no process can be started on this machine: the limit of processes"):
        name_of(net, "model__name")


def test_code_of_a_module_is_named_by_it() -> None:
    assert name_of(ConfigurationError, "model__name") == "fedemu.protocol.errors:ConfigurationError"


def test_keywords_may_be_names_code_and_numbers_of_numpy() -> None:
    import numpy as np

    written = settings.overrides(
        {
            "model": "cnn",
            "algorithm": load,
            "local__lr": np.float32(0.5),
            "local__momentum": np.linspace(0.1, 0.3, 3)[0],
            "rounds": np.int64(3),
            "fleet": {"devices": 4},
        }
    )
    assert written == [
        'model.name="cnn"',
        'algorithm.name="fedemu.protocol.code.named:load"',
        "local.lr=0.5",
        "local.momentum=0.1",
        "rounds=3",
        "fleet={ devices = 4 }",
    ]
    term = f"{load.__module__}:load"
    assert settings.overrides({"algorithm__terms": {load: {"width": 2}}}) == [
        f'algorithm.terms={{ "{term}" = {{ width = 2 }} }}'
    ]
    with pytest.raises(ConfigurationError, match="algorithm__options = 3 is an object; name a class, or a function"):
        settings.overrides({"algorithm__options": {3: 4}})
    with pytest.raises(ConfigurationError, match=r"> is no value of a setting; name a class or a function, or"):
        settings.overrides({"algorithm": object()})
    with pytest.raises(ConfigurationError, match="seed = None is no value of a setting; leave it out for the default"):
        settings.overrides({"seed": None})
