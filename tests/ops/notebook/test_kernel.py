"""fedemu in the kernel of a notebook: what its cells show, and what an interrupt does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="ipykernel (an extra of the tests) is not installed")

from jupyter_client.manager import start_new_kernel

RUN = "fedemu.run('digits-small', transport='memory', **{'runtime__report': False})"

CHEAP = {"FEDEMU_RUNTIME__TRANSPORT": "memory", "FEDEMU_RUNTIME__REPORT": "false"}
"""What makes the runs of the example cheap: its cells show figures of their own."""


class Kernel:
    """A kernel, and the messages that its cells send."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDEMU_")}
        own = {"FEDEMU_CACHE": os.environ["FEDEMU_CACHE"], "FORCE_COLOR": "1"}
        self.manager, self.client = start_new_kernel(
            env=environment | own, cwd=str(folder), extra_arguments=["--log-level=ERROR"]
        )

    def run(self, code: str, told: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
        """Run a cell. Returns its outputs; ``told`` gets every text that a display shows on the way."""
        messages: list[dict[str, Any]] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"] | {"kind": message["msg_type"]}
            messages.append(content)
            if "data" in content:
                told(content["data"]["text/plain"])

        self.client.execute_interactive(code, output_hook=hook, timeout=300)
        return [message for message in messages if message["kind"] not in ("status", "execute_input")]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel of this interpreter, whatever kernels, settings and history the user has."""
    users = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(users / name))
        kernel = Kernel(tmp_path_factory.mktemp("notebook"))
        kernel.run("import fedemu")
        yield kernel
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def outputs(kernel: Kernel) -> list[dict[str, Any]]:
    """What a cell shows that makes a model and plays a run with it."""
    kernel.run("import math\nfrom torch import nn")
    return kernel.run(
        "class Mine(nn.Sequential):\n"
        "    def __init__(self, input_shape, classes, width: int = 8):\n"
        "        shape = math.prod(input_shape)\n"
        "        super().__init__(nn.Flatten(), nn.Linear(shape, width), nn.ReLU(), nn.Linear(width, classes))\n"
        "        open(__file__).close()\n"
        f"result = {RUN.replace('**', 'rounds=4, model=Mine, model__width=4, **')}\n"
        "result"
    )


def test_a_run_is_one_output_that_changes_and_its_result_a_card(kernel: Kernel, outputs: list[dict[str, Any]]) -> None:
    *shown, card = outputs
    assert [output["kind"] for output in shown] == ["display_data"] + ["update_display_data"] * (len(shown) - 1)
    assert len({output["transient"]["display_id"] for output in shown}) == 1
    assert len(shown) < 30
    assert "\x1b" not in repr(outputs)
    assert shown[-1]["data"]["text/plain"].startswith("digits-small: completed, 4 rounds in ")
    assert card["kind"] == "execute_result"
    assert "4 rounds" in card["data"]["text/html"]
    assert len(card["data"]["text/html"]) < 3000
    assert len(card["data"]["text/plain"].splitlines()) < 12
    (picture,) = kernel.run("result.figure('accuracy')")
    assert "image/png" in picture["data"]
    *_, plot = kernel.run("from matplotlib import pyplot\npyplot.plot([1, 2]);")
    assert "image/png" in plot["data"], "the notebook goes on showing plots of its own"


@pytest.mark.timeout(600)
def test_the_example_notebook_runs_from_its_first_cell_to_its_last(kernel: Kernel) -> None:
    cells = json.loads((Path(__file__).parents[3] / "docs" / "example.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "rounds=12" in code[0], "two tasks, of which the second takes a round here"
    code = [cell.replace("rounds=12", "rounds=7") for cell in code]
    assert not any(cell.get("outputs") for cell in cells), "it is kept without outputs"
    kernel.run(f"import os\nos.environ |= {CHEAP}")
    outputs = [kernel.run(cell) for cell in code]
    kernel.run(f"for name in {CHEAP}: del os.environ[name]")
    errors = [output for told in outputs for output in told if output["kind"] == "error"]
    assert errors == []
    results = [told[-1]["data"] for told in outputs]
    assert "digits-tasks" in results[0]["text/plain"]
    assert "image/png" in results[-2]
    assert "uniform" in results[-1]["text/plain"]


def test_a_model_of_a_cell_is_trained_by_other_processes(kernel: Kernel, outputs: list[dict[str, Any]]) -> None:
    (answer,) = kernel.run("result.settings['model']")
    chosen = answer["data"]["text/plain"]
    assert re.fullmatch(r"\{'name': 'fedemu-cells/mine_[0-9a-f]+\.py:Mine', 'width': 4\}", chosen)


def test_an_interrupt_stops_the_run_and_says_how_to_go_on(kernel: Kernel) -> None:
    interrupts: list[str] = []

    def told(text: str) -> None:
        if re.search(r"round +\d", text) and not interrupts:
            interrupts.append(text)
            kernel.manager.interrupt_kernel()

    outputs = kernel.run(RUN.replace("**", "rounds=100000, out='long', **"), told)
    (error,) = (output for output in outputs if output["kind"] == "error")
    assert error["ename"] == "Interrupted"
    assert error["evalue"].startswith("stopped after round ")
    assert error["evalue"].endswith('; go on with fedemu.run(resume="long")')
    assert _frames_of_fedemu(error) <= 1, "IPython always shows the innermost frame"
    (rows,) = kernel.run("len(fedemu.open_run('long').rows) > 0")
    assert rows["data"]["text/plain"] == "True"


def test_a_wrong_setting_is_one_sentence_below_the_line_of_the_cell(kernel: Kernel) -> None:
    (error,) = kernel.run("fedemu.run('digits', rounds=0)")
    assert error["evalue"].startswith("rounds = 0 must be at least 1")
    assert _frames_of_fedemu(error) <= 1


def _frames_of_fedemu(error: dict[str, Any]) -> int:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    return len(re.findall(r"^File .*ops/", plain, re.MULTILINE))
