"""What holds for all tests: none finds what another has left, or what the user has, and GPUs may be missing.

They have a cache of data sets of their own. One process for all tests starts commands of fedemu.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from hypothesis import HealthCheck, settings

from fedemu.ops.data.apart import decode_apart
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.host.private import private_folder, working_folder

# Hypothesis tries the same examples each time, whatever it has found before, and does not mind a busy machine.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

FORGOTTEN = (
    *("COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS"),
    *("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    "PYTHONUNBUFFERED",
)
"""Variables that tests do not follow, beside ``FEDEMU_...``. They set the size and the colours of a terminal; a proxy,
which would get the requests to this machine, too; and output without a buffer, which hides that a flush is missing."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """The tests heed Ctrl-C, follow no setting of the user's, and share a cache of data sets that begins empty.

    So do the commands that they start. A shell that runs the tests in the background has them ignore Ctrl-C. The user's
    cache holds whatever was decoded there, maybe by another version. Processes of pytest-xdist inherit all this from
    the one that starts them. pytest itself has read before which colours it is to show.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        for name in [*os.environ]:
            if name in FORGOTTEN or (name.startswith("FEDEMU_") and name != "FEDEMU_DATA"):
                del os.environ[name]
        cache = ExitStack()
        os.environ["FEDEMU_CACHE"] = str(cache.enter_context(working_folder("fedemu-tests-")))
        config.add_cleanup(cache.close)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """torch computes with one thread. The processes of the tests share the cores, for which threads would wait busily.

    The collector does not look again and again at modules and tests, of which none is ever garbage.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, where `make gpu` runs it"))


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """A command that runs within the tests opens a log for the whole process. No later test may find it."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    if root.level != level:
        root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No later test finds the modules that this one has written.

    As fedemu looks for a user's code, it adds the working folder to the path.
    """
    path, before = [*sys.path], sys.modules.copy()
    yield
    sys.path[:] = path
    if sys.modules == before:  # going through thousands of modules takes milliseconds
        return
    written = str(tmp_path_factory.getbasetemp())
    for name, module in [*sys.modules.items()]:
        if module is not before.get(name) and any(place.startswith(written) for place in _places(module)):
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


def _places(module: ModuleType) -> list[str]:
    """The file of a module, and the folders of a package, which may have no file. Modules that load late stay alone."""
    named = getattr(module, "__dict__", {})
    return [str(place) for place in (named.get("__file__"), *(named.get("__path__") or ()))]


@pytest.fixture(autouse=True)
def _own_hooks() -> Iterator[None]:
    """No later test finds the handlers of signals, the hooks and the limit of open files that this one has set.

    Nor those of a library that it uses.
    """
    handlers = {sign: signal.getsignal(sign) for sign in signal.valid_signals()}
    leave, account, files = sys.exit, sys.excepthook, resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    sys.exit, sys.excepthook = leave, account
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    for sign, handler in handlers.items():
        if handler is not None and signal.getsignal(sign) is not handler:  # one of C, which is None, cannot be put back
            signal.signal(sign, handler)


@pytest.fixture(autouse=True)
def _own_draws() -> None:
    """What a test draws from the generators of Python, numpy and torch is the same whatever was drawn before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@pytest.fixture(scope="session")
def digits_decoded() -> None:
    """The cache holds the data set digits, so that no command tells that it decodes them."""
    decode_apart(load_experiment("digits-small", [], {})[0], lambda line: None)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Garbage of other tests stays. A parser may fill the stack: their finalizers would fail there, and be told."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def warm(digits_decoded: None) -> Iterator[WarmStart]:
    """Starts commands of fedemu without an interpreter and its imports for each. The data of most are decoded."""
    with WarmStart() as started:
        yield started


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A new folder whose path is short enough for sockets, which that of ``tmp_path`` need not be."""
    with private_folder() as folder:
        yield folder


@pytest.fixture
def files_end_at() -> Callable[[int], AbstractContextManager[None]]:
    """While ``with files_end_at(SIZE):`` no byte of a file behind so many can be written, as on a full disk."""

    @contextmanager
    def end_at(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.MonkeyPatch.context() as patch:
            # What Python compiles of a module would be cut short, too, and be there for whoever imports it later.
            patch.setattr(sys, "dont_write_bytecode", True)
            patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return end_at


@pytest.fixture
def descriptors() -> Callable[[], set[str]]:
    """``descriptors()``: those that are open, each with what it leads to.

    A test looks at what is there and was not before. That others are gone does not matter: the collector may take what
    an earlier test has left.
    """
    return _descriptors


def _descriptors() -> set[str]:
    found = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing itself is closed
            found.add(f"{descriptor}: {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return found


@pytest.fixture
def entries() -> Callable[[object], int]:
    """``entries(thing)`` counts what all containers hold that the thing refers to, directly or through its parts.

    Functions and loops are passed over: they lead to everything else in the process.
    """

    def count(thing: object) -> int:
        seen, todo, found = dict[int, object](), [thing], 0
        while todo:
            each = todo.pop()
            if id(each) in seen or isinstance(each, _PASSED_OVER):
                continue
            seen[id(each)] = each  # which keeps it alive, so that nothing else gets its id
            if isinstance(each, dict | list | set | deque):
                found += len(each)
            todo += gc.get_referents(each)
        return found

    return count


_PASSED_OVER = (type, ModuleType, FunctionType, asyncio.AbstractEventLoop)
