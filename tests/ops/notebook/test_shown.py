"""The output of a notebook's cell while a run goes on."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.ops.notebook.play import environment_of_a_run
from fedemu.ops.notebook.shown import CellOutput, Lines, Silence, open_shown


class Screen:
    """IPython's display, as far as it is used."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = []

    def display(self, state: dict[str, str], **options: Any) -> Screen:
        assert options == {"raw": True, "display_id": True}
        self.states.append(state)
        return self

    def update(self, state: dict[str, str], raw: bool) -> None:
        self.states.append(state)


def test_the_output_shows_the_latest_line_with_a_bar_a_few_times_a_second() -> None:
    screen, now = Screen(), [0.0]
    output = CellOutput("tiny", screen.display, lambda: now[0])
    first = "round 1/9  accuracy 50.0 % <b>"
    for at, line in (
        (0.1, "devices 3/6"),
        (0.5, first),
        (0.6, "round 2/9"),
        (0.9, "  more"),
    ):
        now[0] = at
        output.line(line)
    output.ended("tiny: completed")
    assert [state["text/plain"] for state in screen.states] == [
        "tiny: starting",
        f"tiny: {first}",
        "tiny: completed",
    ]
    assert (
        '<progress value="1" max="9"></progress> round 1/9  accuracy 50.0 % &lt;b&gt;' in screen.states[1]["text/html"]
    )
    assert "<progress" not in screen.states[2]["text/html"]


def test_the_output_of_several_seeds_names_the_one_that_runs() -> None:
    screen, now = Screen(), iter(range(100))
    output = CellOutput("tiny", screen.display, lambda: float(next(now)))
    for line in ("seed 4 (1 of 2)", "round 1/9", "seed 5 (2 of 2): finished already, in there"):
        output.line(line)
    assert [state["text/plain"] for state in screen.states] == [
        "tiny: starting",
        "tiny: seed 4 (1 of 2)",
        "tiny seed 4 (1 of 2): round 1/9",
        "tiny: seed 5 (2 of 2): finished already, in there",
    ]


def test_outside_of_a_notebook_lines_go_to_stderr_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    shown = open_shown("tiny", progress=True)
    assert isinstance(shown, Lines)
    shown.line("round 1/9")
    shown.ended("tiny: completed")
    assert capsys.readouterr().err == "round 1/9\n"
    assert isinstance(open_shown("tiny", progress=False), Silence)


def test_a_run_gets_no_settings_and_no_colours_from_the_environment() -> None:
    environment = {"FORCE_COLOR": "1", "FEDEMU_ROUNDS": "7", "FEDEMU_DATA": "/data", "PATH": "/bin"}
    assert environment_of_a_run(environment) == {"FEDEMU_DATA": "/data", "PATH": "/bin"}
