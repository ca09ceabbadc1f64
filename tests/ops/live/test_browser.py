"""The page in a real browser, during a run that is broken by its buttons. One run serves all tests of this file."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.coordinator.record.holder import holder_of
from fedemu.ops.figures import percent, readable_bytes, span
from fedemu.ops.live.found import supervisors_of
from fedemu.ops.live.machine import Crew, Machine
from fedemu.ops.report.report import write_report
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import Start, start_interpreter
from fedemu.ops.stress.warm import WarmStart

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(600)
PATIENCE = 120.0
"""Seconds for a condition that an idle machine meets in one or two."""
DEVICES = 20
SLOW = (
    "clock.kind=wall",
    "profile.seconds_per_sample=0.012",
    "data.partition={kind='iid'}",
    "local.epochs=1",
    "local.batch_size=2000",
    "availability={kind='always'}",
    "faults.crash_rate=0",
    "fleet.deadline=20",
)
"""A round takes about a second, so that pages stay small while the tests go on, and no computing.

No device crashes by itself, because a button reaches only devices that have a process just then.
"""


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """What ``condition`` returns as soon as it is true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE:.0f} s"
        time.sleep(0.05)
    return found


def until(page: Any, script: str, argument: Any = None) -> None:
    """Wait until a script is true. The page forbids to make programs of texts, as Playwright's own wait does it."""

    def is_true() -> Any:
        try:
            return page.evaluate(script, argument)
        except sync_api.Error as error:
            if "Execution context was destroyed" not in str(error):
                raise
            return False  # the page was just loaded again

    wait_until(is_true, script)


def free_port() -> str:
    """A port that nobody else takes when it is free for a moment: none of a page's first ones, nor of the system's."""
    return free_address().rpartition(":")[2]


class Shown:
    """A process that serves a page: its address, the token."""

    def __init__(self, start: Start, *words: str, log: Path) -> None:
        with chdir(log.parent):
            self.process = start(words, log, os.environ)
        self.process.nice(10)  # the browser comes first

        def address() -> re.Match[str] | None:
            assert self.process.poll() is None, log.read_text()
            return re.search(r"(http://\S+)#token=(\w+)", log.read_text())

        found = wait_until(address, f"the page of {words}")
        self.address, self.token = found[1], found[2]

    def end(self) -> None:
        """End the process and all that it has started."""
        with_children = [self.process, *self.process.children(recursive=True)] if self.process.is_running() else []
        for process in with_children:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE)


class Live:
    """A run that goes on, with its page."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "run"
        settings = ["--devices", str(DEVICES), "--rounds", "100000", "--trainers", "1"]
        for setting in ("fleet.per_round=4", "runtime.report=false", *SLOW):
            settings += ["--set", setting]
        words = ["run", "digits-small", "--out", str(self.directory), *settings, "--page"]
        self.shown = Shown(start_interpreter, *words, log=folder / "terminal")

    @property
    def coordinator(self) -> int | None:
        """The process that plays the run now."""
        return holder_of(self.directory / ".lock")

    def crew(self) -> Crew:
        """The processes of the run's supervisor, complete."""

        def look() -> Crew | None:
            machine = Machine(self.directory)
            machine.look(self.coordinator)
            complete = machine.crews and len(machine.crews[0].devices) == DEVICES and machine.crews[0].trainers
            return machine.crews[0] if complete else None

        return wait_until(look, "a complete crew")

    def end(self) -> None:
        """End every process of the run and its page."""
        pids = [self.coordinator] if self.coordinator else []
        pids += [found.process.pid for pid in list(pids) for found in supervisors_of(pid, self.directory)]
        self.shown.end()
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        for process in psutil.process_iter(["cmdline"]):
            if str(self.directory) in (process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture(scope="module")
def live(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A run that goes on. Nobody starts it where there is no browser to look at it."""
    run = Live(tmp_path_factory.mktemp("live"))
    yield run
    run.end()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page. A page that writes an error into the console fails its test."""
    mistakes: list[str] = []
    contexts = []

    def open_page(address: str, **look: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | look))
        contexts.append(context)
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: mistakes.append(str(error)))
        page.on("console", lambda line: line.type in ("error", "warning") and mistakes.append(line.text))
        page.goto(address)
        page.wait_for_selector(".card b, .side .pill")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A browser tells of every lost connection and of every request that is refused, such as one with a wrong token.
    expected = ("net::ERR_", "status of 403")
    assert [line for line in mistakes if not any(words in line for words in expected)] == []


@pytest.fixture
def watched(made: Any, visit: Callable[..., Any], tmp_path: Path, warm: WarmStart) -> Iterator[Callable[..., Any]]:
    """Opens the page of ``fedemu watch`` for the run ``made``."""
    shown: list[Shown] = []

    def open_page(**look: Any) -> Any:
        shown.append(Shown(warm.start, "watch", str(made.directory), log=tmp_path / "terminal"))
        return visit(shown[-1].address, **look)

    yield open_page
    for each in shown:
        each.end()


def grown(page: Any, beyond: int = 0) -> int:
    """The number of rows on the page, once there are more than ``beyond``."""
    until(page, "beyond => window.fedemu && window.fedemu.runs[0].rows.length > beyond", beyond)
    return int(page.evaluate("window.fedemu.runs[0].rows.length"))


def test_the_page_fills_while_the_run_goes_on_and_survives_a_reload(live: Live, visit: Callable[..., Any]) -> None:
    page = visit(live.shown.address)
    before = grown(page, 1)
    grown(page, before)
    assert page.inner_text("h1") == "digits-small"
    assert page.inner_text("[data-part=state]") == "running"
    until(page, "document.querySelector('[data-part=line]').textContent.includes('round ')")
    page.wait_for_selector("[data-part=legend] button")
    until(page, "window.fedemu.runs[0].states.some((state) => state > 0)")
    page.locator(".chart >> nth=0").scroll_into_view_if_needed()  # charts are drawn when they can be seen
    page.wait_for_selector(".u-wrap canvas")
    page.locator("[data-part=log]").scroll_into_view_if_needed()
    page.wait_for_selector(".log b")
    assert re.fullmatch(r"\d+\.\d %", page.inner_text(".card b >> nth=0"))
    page.reload()
    grown(page, before)
    assert page.inner_text("#connection") == "live"


MAP = """
([rounds, shares]) => import('/static/charts.js').then(({ Heat, viridis }) => {
    const heat = new Heat(document.body, 'T', 'a', 'class', (label) => label);
    heat.seen.now = true;
    heat.draw(rounds.map((round, place) => ({ round, a: [place / 4] })));
    const box = heat.canvas.getBoundingClientRect();
    const tones = heat.canvas.getContext('2d').getImageData(0, 50, box.width, 1).data;
    return shares.map((share) => {
        const x = Math.floor(heat.at.left + share * (box.width - heat.at.left - 4));
        heat.point({ clientX: box.left + x, clientY: box.top + 50 });
        const tone = `rgb(${[...tones.slice(4 * x, 4 * x + 3)].join()})`;
        return [heat.caption.textContent.split(',')[0], rounds.findIndex((_, place) => viridis(place / 4) === tone)];
    });
})
"""
"""Draws a map of rows of these rounds. Tells, at shares of its width, which round is said and which row is drawn."""


def test_a_map_has_an_even_axis_of_rounds_however_many_rows_are_kept_of_a_part(watched: Callable[..., Any]) -> None:
    page = watched()
    every, shares = [10, 20, 30], [0.02, 0.32, 0.35, 0.65, 0.68, 0.98]
    assert [place for _, place in page.evaluate(MAP, [every, shares])] == [0, 0, 1, 1, 2, 2]
    thinned, shares = [1, 801, 901, 1001], [0.5, 0.7, 0.75, 0.8, 0.85, 0.95]
    first, second, third, last = [[f"round {round}", place] for place, round in enumerate(thinned)]
    assert page.evaluate(MAP, [thinned, shares]) == [first, first, second, second, third, last]
    ((told, _),) = page.evaluate(MAP, [[*range(1, 100_001)], [0.25]])
    assert int(told.removeprefix("round ")) == pytest.approx(25_000, abs=200), "many columns share a pixel"


def test_what_is_drawn_is_also_said(live: Live, visit: Callable[..., Any]) -> None:
    page = visit(live.shown.address)
    grown(page, 1)
    for title in ("Accuracy", "Loss", "Accuracy by class"):
        label = page.get_attribute(f'[role=img][aria-label^="{title}. "]', "aria-label")
        assert re.search(r"\d", label), label
    heat = "new Heat(document.body, 'T', 'a', 'class', (row) => ['rose', 'tulip'][row])"
    draw = "heat.draw([{ round: 3, a: [0.5, 1] }]); heat.say(); return heat.caption.textContent;"
    told = page.evaluate(f"import('/static/charts.js').then(({{ Heat }}) => {{ const heat = {heat}; {draw} }})")
    assert told == "round 3: class tulip is best with 100.0 %, class rose is worst with 50.0 %"
    page.wait_for_selector(f'canvas[aria-label^="Field of {DEVICES} devices: "]')
    page.wait_for_selector('canvas[aria-label^="Timeline of round "]')
    assert page.get_attribute("[role=progressbar]", "aria-valuemax") == "100000"
    names = page.evaluate(
        "[...document.querySelectorAll('button, input, select')].filter((one) => one.checkVisibility())"
        ".map((one) => one.textContent.trim() || one.ariaLabel || one.closest('label')?.textContent.trim() || '')"
    )
    assert all(names)
    times = [None, 0, 0.0004, 0.0623, 0.5, 1, 90]
    told = ["–", "0 s", "0.4 ms", "62.3 ms", "500 ms", "1.0 s", "1 min 30 s"]
    script = "times => import('/static/charts.js').then(({ FORMS }) => times.map(FORMS.time[1]))"
    assert page.evaluate(script, times) == told
    for words, same, values in (
        ("bytes", readable_bytes, (0, 999.4, 999.6, 12_345, 999_700, 1_000_000, 3e15)),
        ("percent", percent, (0, -0.0004, -0.0006, 0.0004, -0.12, 0.5, 1)),
        ("span", span, (0, 9.9, 59.4, 60, 3599, 3600, 172_799, 172_800)),
    ):
        script = "([words, values]) => import('/static/words.js').then((all) => values.map((one) => all[words](one)))"
        assert page.evaluate(script, [words, values]) == [*map(same, values)], "as in the report"
    ends = [[None, None], [0.1, 0.5], [-0.5, 0.5], [-0.5, -0.1], [0, 0]]
    script = "ends => import('/static/view.js').then(({ fromZero }) => ends.map((pair) => fromZero(null, ...pair)))"
    ranges = [[0, 1], [0, 0.55], [-0.55, 0.55], [-0.55, 0], [0, 1]]
    assert page.evaluate(script, ends) == [pytest.approx(ends) for ends in ranges], "forgetting may be below 0"
    page.click("[data-part=askpanel] summary")
    page.wait_for_selector("[data-part=asktable] td")


def test_the_use_of_all_supervisors_and_trainers_is_drawn_once_it_is_measured(
    made: Any, watched: Callable[..., Any]
) -> None:
    page = watched()
    waiting = '[data-part=traffic] .chart:has-text("for a trainer")'
    assert page.is_hidden(waiting), "nothing of it was measured"
    accuracy = page.locator("#content .chart >> nth=0")
    accuracy.scroll_into_view_if_needed()
    accuracy.locator("figcaption", has_text="nothing was measured yet").wait_for()
    assert accuracy.locator(".uplot").count() == 0, "there are no axes without rounds"
    used = {"coordinator": [0.1, 1]}
    for place in (1, 2):
        used |= {f"supervisor {place}": [0.2 * place, 1], f"trainer 1 of supervisor {place}": [0.3 * place, 1]}
    page.evaluate(
        "used => window.fedemu.runs[0].tick({ message: 1e9, machine: { at: 1, used, waiting: 0, busy: 1 } })", used
    )
    for title, told in (
        ("coordinator and supervisor", "coordinator 10.0 %, supervisor 1 20.0 %, supervisor 2 40.0 %"),
        ("the trainers", "trainer 1 of supervisor 1 30.0 %, trainer 1 of supervisor 2 60.0 %"),
    ):
        page.wait_for_selector(f'[aria-label="Use of {title} (shares of a core). Last: {told}."]')
    assert page.is_visible(waiting)
    page.evaluate("window.fedemu.runs[0].message = 0")  # what comes from the server counts again
    made.row(1)
    accuracy.locator(".uplot").wait_for()


def test_a_line_that_grows_has_no_dots_and_a_chart_numbers_its_rounds(made: Any, watched: Callable[..., Any]) -> None:
    made.append("metrics", {"round": 1, "accuracy": 0.5})
    page = watched(locale="de-DE")
    page.evaluate(
        """() => {
            const { fillText } = CanvasRenderingContext2D.prototype, { arc } = Path2D.prototype;
            window.written = [];
            window.dots = 0;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                window.written.push(text);
                fillText.call(this, text, ...rest);
            };
            Path2D.prototype.arc = function (...rest) {
                window.dots += 1;
                arc.apply(this, rest);
            };
        }"""
    )
    chart = page.locator("#content .chart >> nth=0")
    chart.scroll_into_view_if_needed()
    page.set_viewport_size({"width": 1200, "height": 900})
    until(page, "window.dots > 0")
    made.append("metrics", *({"round": round, "accuracy": 0.25} for round in (20_000, 40_000, 60_000)))
    chart.locator("figcaption", has_text="25.0 %").wait_for()
    until(page, "window.written.includes('50,000')")
    page.evaluate("window.dots = 0")
    made.append("metrics", {"round": 60_001, "accuracy": 0.75})
    chart.locator("figcaption", has_text="75.0 %").wait_for()
    assert page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done(window.dots)))") == 0
    made.append("metrics", {"round": 60_002, "accuracy": 0.5, "seen_accuracy": 0.5})
    until(page, "window.dots > 0")  # a line of a single value is seen beside a longer one


def test_a_print_has_the_charts_that_were_never_in_the_window(made: Any, watched: Callable[..., Any]) -> None:
    made.append("metrics", *({"round": round, "accuracy": 0.5, "round_seconds": 1.0} for round in (1, 2)))
    page = watched(viewport={"width": 1200, "height": 300})
    page.locator(".chart figcaption", has_text="round 1.0 s").wait_for()
    below = page.locator(".chart", has=page.locator("h3", has_text="Real time of a round"))
    assert below.locator(".uplot").count() == 0, "it is far below the window"
    page.pdf()
    assert below.locator(".uplot").count() == 1
    page.emulate_media(media="print")
    kept = "getComputedStyle(document.querySelector('.keys i')).getPropertyValue('print-color-adjust')"
    assert page.evaluate(kept) == "exact", "the colours of the lines are on paper, too"


def test_measures_of_the_method_are_drawn_by_their_names_as_they_come(made: Any, watched: Callable[..., Any]) -> None:
    made.append("metrics", {"round": 1, "device_metrics": {"loss": 0.5, "norm": 2.5}})
    page = watched(viewport={"width": 1280, "height": 4000})
    charts = page.locator("[data-part=own] .chart")
    charts.locator("figcaption", has_text="mean of the accepted devices 2.5").wait_for()
    assert (charts.count(), charts.locator("h3").all_text_contents()) == (1, ["norm"])
    made.append("metrics", {"round": 2, "device_metrics": {"norm": 1.5}, "remarks": {"kept": 7, "norm": 0.5e-12}})
    charts.locator("figcaption", has_text="told by the method 7").wait_for()
    assert charts.locator("h3").all_text_contents() == ["kept", "norm", "norm"]
    until(page, "document.querySelectorAll('[data-part=own] .uplot').length === 3")
    sentences = ["told by the method 7", "mean of the accepted devices 1.5", "told by the method 5e-13"]
    assert charts.locator("figcaption").all_text_contents() == sentences
    # What comes before the others by name takes the place of the last of eight.
    made.append("metrics", {"round": 3, "remarks": {f"a{digit}": digit for digit in range(6)}})
    charts.locator("h3", has_text="a5").wait_for()
    assert charts.locator("h3").all_text_contents() == [*(f"a{digit}" for digit in range(6)), "kept", "norm"]
    assert page.locator("h2", has_text="Measures of the method").is_visible()


def test_a_run_whose_folder_was_removed_is_not_offered_to_be_resumed(made: Any, watched: Callable[..., Any]) -> None:
    made.row(1)
    page = watched()
    page.wait_for_selector("[data-part=banner]:not([hidden])")
    shutil.rmtree(made.directory)
    until(page, "document.querySelector('[data-part=state]').textContent === 'the folder is gone'")
    assert page.is_hidden("[data-part=banner]")


def test_a_run_that_could_not_be_resumed_says_why(
    made: Any, visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    made.row(1)
    shown = Shown(warm.start, "watch", str(made.directory), log=tmp_path / "terminal")
    try:
        page = visit(f"{shown.address}#token={shown.token}")
        (made.directory / "config.toml").write_text("[")
        page.click("[data-part=resume]")
        told = f"The run could not go on: {made.directory / 'config.toml'} is not valid TOML"
        until(page, "told => document.querySelector('[data-part=banner-text]').textContent.startsWith(told)", told)
    finally:
        shown.end()


def test_a_run_that_begins_later_comes_to_the_page(
    make: Callable[[str], Any], visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    make("runs/first")
    shown = Shown(warm.start, "watch", str(tmp_path / "runs"), log=tmp_path / "terminal")
    try:
        page = visit(shown.address)
        assert page.is_hidden("#tabs")
        until(page, "() => window.fedemu.runs[0].ready")
        second = make("runs/second")
        until(page, "() => document.querySelectorAll('#tabs button').length === 3")
        assert page.locator("#tabs [aria-current=true]").inner_text() == "runs/first"
        page.locator("#tabs button").first.click()
        page.locator(".side input").first.uncheck()
        second.row(3)
        make("runs/third")
        until(page, "() => document.querySelectorAll('.side .panel').length === 3")
        assert [box.is_checked() for box in page.locator(".side input").all()] == [False, True, True]
        until(page, "() => window.fedemu.runs[1].rows.length === 1 && window.fedemu.runs[2].ready")
    finally:
        shown.end()


def test_a_page_whose_server_shows_other_runs_now_is_loaded_again(
    make: Callable[[str], Any], visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    first, second, third = (str(make(f"run-{place}").directory) for place in (1, 2, 3))
    port = free_port()
    loaded = (
        "count => !window.kept && window.fedemu?.runs.length === count && window.fedemu.runs.every((run) => run.ready)"
    )
    page = None
    for place, directories in enumerate([[first, second], [second], [third, second]]):
        shown = Shown(warm.start, "watch", *directories, "--port", port, log=tmp_path / f"terminal-{place}")
        try:
            page = page or visit(f"{shown.address}#run=1")
            until(page, loaded, len(directories))
            assert page.evaluate("window.fedemu.runs.map((run) => run.about.directory)") == directories
            page.evaluate("window.kept = true")
        finally:
            shown.end()


def test_the_page_stands_still_while_its_picture_is_taken(made: Any, watched: Callable[..., Any]) -> None:
    moment = runpy.run_path(str(ROOT / "docs" / "images" / "make_screenshots.py"))["MOMENT"]
    page = watched()
    until(page, "() => window.fedemu.runs[0].ready")
    assert not page.evaluate(moment)
    page.evaluate("window.fedemu.runs[0].states.set([3, 4])")
    assert page.evaluate(moment)
    page.evaluate("window.fedemu.runs[0].tick({ message: 1e9, rows: [{ round: 1 }] })")
    assert page.evaluate("window.fedemu.runs[0].rows.length") == 0


def test_an_open_story_counts_on(made: Any, watched: Callable[..., Any]) -> None:
    made.ask(1, [0, 3], "aa")
    page = watched()
    until(page, "() => window.fedemu.runs[0].ready")
    page.focus("[data-part=field]")
    page.keyboard.press("Enter")
    facts = "[...document.querySelectorAll('[data-part=story] .facts dd')].slice(1, 3).map(one => one.textContent)"
    until(page, f"() => String({facts}) === '1 time,accepted'")
    made.ask(2, [0, 3], "aa")
    until(page, f"() => String({facts}) === '2 times,accepted'")
    made.ask(3, [0, 3], "la")
    until(page, f"() => String({facts}) === '3 times,late'")


def test_the_legend_explains_the_colours_by_visits(made: Any, watched: Callable[..., Any]) -> None:
    made.ask(1, [3, 4], "ad")
    made.ask(2, [4, 7], "aa")
    page = watched()
    page.select_option("[data-part=colouring]", "visits")
    legend = page.locator("[data-part=legend] button")
    assert legend.all_inner_texts() == ["never asked 9", "asked (at most 2 times) 3"]
    legend.nth(1).click()
    assert page.input_value("[data-part=chosen]") == "3-4, 7"


def test_the_field_stays_whole_when_the_page_is_zoomed(made: Any, watched: Callable[..., Any]) -> None:
    page = watched()
    page.focus("[data-part=field]")
    drawn = """() => {
        const { width, height } = document.querySelector("[data-part=field]");
        const copy = new OffscreenCanvas(width, height).getContext("2d");
        copy.drawImage(document.querySelector("[data-part=field]"), 0, 0);
        const values = copy.getImageData(0, 0, width, height).data;
        return values.filter((value, place) => place % 4 === 3 && value > 0).length / width / height;
    }"""
    before = page.evaluate(drawn)
    # A zoom, or another screen, gives the page finer pixels. A page that is at its widest keeps its width.
    finer = {"width": 1280, "height": 900, "deviceScaleFactor": 2, "mobile": False}
    page.context.new_cdp_session(page).send("Emulation.setDeviceMetricsOverride", finer)
    page.keyboard.press("ArrowRight")
    assert page.evaluate(drawn) == pytest.approx(before, rel=0.1)


def test_a_press_that_the_browser_takes_and_another_button_select_nothing(
    made: Any, watched: Callable[..., Any]
) -> None:
    page = watched()
    box = page.locator("[data-part=field]").bounding_box()
    here, there = ((box["x"] + x, box["y"] + 5) for x in (5, 80))
    page.mouse.click(*here, button="right")
    page.mouse.move(*there)
    page.mouse.move(*here)
    page.mouse.down()
    page.evaluate("document.querySelector('[data-part=field]').dispatchEvent(new Event('pointercancel'))")
    page.mouse.move(*there)
    assert page.input_value("[data-part=chosen]") == ""
    assert page.is_hidden("[data-part=story]")


def test_a_long_run_keeps_its_beginning_while_it_is_watched(made: Any, watched: Callable[..., Any]) -> None:
    made.row(1)
    page = watched()
    last = 1
    for _ in range(5):
        lines = [
            {"round": round, "accuracy": 0.5 if round % 10 == 0 else None} for round in range(last + 1, last + 901)
        ]
        made.append("metrics", *lines)
        last += 900
        until(page, "last => window.fedemu.runs[0].last.round === last", last)
    rounds = page.evaluate("window.fedemu.runs[0].rows.map(row => row.round)")
    evaluated = page.evaluate("window.fedemu.runs[0].rows.filter(row => row.accuracy !== null).length")
    assert (rounds[0], rounds[-1], evaluated, rounds == sorted(set(rounds))) == (1, 4501, 451, True)
    assert 2000 < len(rounds) <= 4000


@pytest.mark.parametrize("width", [360, 520])
def test_the_times_below_an_ask_stand_apart(made: Any, watched: Callable[..., Any], width: int) -> None:
    made.ask(1, [0, 1], "ad", end=3570.0)
    page = watched(viewport={"width": width, "height": 800})
    page.evaluate(
        """() => {
            const fillText = CanvasRenderingContext2D.prototype.fillText;
            window.written = [];
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                const long = this.measureText(text).width, before = { left: 0, center: long / 2, right: long };
                if (this.canvas.dataset.part === "asks") window.written.push([y, x - before[this.textAlign], long]);
                fillText.call(this, text, x, y);
            };
        }"""
    )
    page.set_viewport_size({"width": width - 1, "height": 800})
    until(page, "window.written.length > 0")
    written = page.evaluate("window.written")
    lowest = max(y for y, _, _ in written)
    times = [(x, x + long) for y, x, long in written if y == lowest]
    assert all(end < begin for (_, end), (begin, _) in pairwise(times)), times


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_in_either_scheme(live: Live, visit: Callable[..., Any], scheme: str) -> None:
    page = visit(live.shown.address, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    grown(page)
    page.locator(".chart >> nth=0").scroll_into_view_if_needed()  # charts are drawn when they can be seen
    page.wait_for_selector(".u-wrap canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    tone = sum(
        int(part) for part in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (tone < 200) == (scheme == "dark")


def test_the_figures_of_a_report_stay_in_their_cards_on_a_phone(made: Any, visit: Callable[..., Any]) -> None:
    made.row(1, virtual_time=179.4)
    page = visit(write_report(made.directory).as_uri(), viewport={"width": 360, "height": 800})
    assert page.is_visible(".card b:has-text('179.4 seconds')")
    wide = "[...document.querySelectorAll('.card b')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.evaluate(wide) == 0


def test_the_field_is_used_by_the_keyboard(live: Live, visit: Callable[..., Any]) -> None:
    page = visit(live.shown.address)
    grown(page)
    page.focus("[data-part=field]")
    for key in ("ArrowRight", "ArrowRight", "Space"):
        page.keyboard.press(key)
    assert page.input_value("[data-part=chosen]") == "2"
    assert page.inner_text("[data-part=pointed]").startswith("Device 2: ")
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-part=story] svg[role=img][aria-label^="Training samples: "]')
    assert page.inner_text("[data-part=story] h3").startswith("Device 2")
    assert page.evaluate("document.activeElement.dataset.part") == "story"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert not page.is_visible("[data-part=story]")


def test_the_log_is_filtered_whether_it_follows_or_not(made: Any, watched: Callable[..., Any]) -> None:
    made.append("events", *({"event": ("join", "death")[place % 2], "device": place} for place in range(8)))
    page = watched()
    page.locator("[data-part=log]").scroll_into_view_if_needed()
    listed = "String([...document.querySelectorAll('.log b')].map((one) => one.textContent))"
    until(page, f"{listed} === 'death,join,death,join,death,join,death,join'")
    page.uncheck("[data-part=follow]")
    page.fill("[data-part=search]", "death")
    assert page.evaluate(listed) == "death,death,death,death"
    page.fill("[data-part=bydevice]", "7")
    assert page.evaluate(listed) == "death"
    assert page.inner_text("[data-part=logcount]").startswith("1 event,")
    made.append("events", {"event": "death", "device": 7})
    kinds = page.locator("[data-part=kinds] button")
    kinds.filter(has_text="death 5").wait_for()
    assert page.evaluate(listed) == "death", "it does not follow"
    page.check("[data-part=follow]")
    assert page.evaluate(listed) == "death,death"
    page.fill("[data-part=search]", "")
    page.fill("[data-part=bydevice]", "")
    kinds.filter(has_text="death").click()
    assert page.evaluate(listed) == "join,join,join,join"


def test_a_page_whose_server_is_gone_for_a_while_goes_on(
    live: Live, visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    port = free_port()
    first = Shown(warm.start, "watch", str(live.directory), "--port", port, log=tmp_path / "first")
    page = visit(first.address)
    before = grown(page)
    page.evaluate("window.kept = true")
    first.end()
    until(page, "document.getElementById('connection').textContent.startsWith('connection lost')")
    second = Shown(warm.start, "watch", str(live.directory), "--port", port, log=tmp_path / "second")
    try:
        until(page, "document.getElementById('connection').textContent === 'live'")
        grown(page, before)
        assert page.evaluate("window.kept"), "the page was not loaded again"
        with page.expect_event("load"):
            page.goto(f"{second.address}#token={second.token}")
        until(page, "token => sessionStorage.getItem('fedemu-token') === token", second.token)
    finally:
        second.end()


def test_buttons_kill_and_freeze_what_they_say_and_the_run_goes_on(live: Live, visit: Callable[..., Any]) -> None:
    page = visit(live.shown.address)
    grown(page)
    page.evaluate("window.kept = true")

    def press(action: str, said: str) -> None:
        page.click(f"[data-action={action}]")
        until(page, "said => document.querySelector('[data-part=told]').textContent.includes(said)", said)

    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    assert page.is_disabled("[data-action=kill_trainer]")
    page.fill("[data-part=token]", "wrong")
    press("kill_trainer", "the token is wrong")
    page.fill("[data-part=token]", live.shown.token)
    page.fill("[data-part=chosen]", "3, 5-6")
    assert page.inner_text("[data-part=chosencount]") == "3 devices selected"

    chosen = [psutil.Process(live.crew().devices[device]) for device in (3, 5, 6)]
    press("freeze", "3 device processes frozen")
    wait_until(lambda: {one.status() for one in chosen} == {psutil.STATUS_STOPPED}, "they stand still")
    until(page, "window.fedemu.runs[0].states.filter((state) => state === 7).length === 3")
    press("release", "3 device processes let go on")
    wait_until(lambda: all(process.status() != psutil.STATUS_STOPPED for process in chosen), "they go on")
    press("kill", "3 device processes killed")
    wait_until(lambda: all(gone(process.pid) for process in chosen), "they are dead")

    trainer = live.crew().trainers[0]
    press("kill_trainer", f"trainer 1 killed (process {trainer})")
    wait_until(lambda: gone(trainer), "the trainer is dead")
    supervisor = live.crew().supervisor.pid
    press("kill_supervisor", f"supervisor killed (process {supervisor})")
    wait_until(lambda: gone(supervisor), "the supervisor is dead")
    wait_until(lambda: live.crew().supervisor.pid != supervisor, "another supervisor")
    grown(page, grown(page))

    coordinator = live.coordinator
    press("kill_coordinator", f"coordinator killed (process {coordinator})")
    page.wait_for_selector("[data-part=banner]:not([hidden])")
    assert str(live.directory) in page.inner_text("[data-part=command]")
    page.click("[data-part=resume]")
    wait_until(lambda: live.coordinator not in (None, coordinator), "another coordinator")
    page.wait_for_selector("[data-part=banner]", state="hidden")
    grown(page, grown(page))
    until(page, "document.querySelector('[data-part=state]').textContent === 'running'")
    assert page.evaluate("window.kept"), "the page was not loaded again"


def test_runs_stand_side_by_side(
    made: Any, live: Live, visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    made.row(1, accuracy=0.25)
    made.row(2, accuracy=0.75)
    shown = Shown(warm.start, "watch", str(made.directory), str(live.directory), log=tmp_path / "terminal")
    try:
        page = visit(shown.address)
        until(page, "document.querySelectorAll('.side .pill').length === 2")
        until(page, "document.body.innerText.includes('accuracy 75.0 %')")
        page.click(".side button >> nth=1")
        page.wait_for_selector("[data-part=field]")
        page.click("#tabs button >> nth=0")
        page.wait_for_selector(".side")
    finally:
        shown.end()


def test_measures_of_the_methods_of_several_runs_are_drawn_side_by_side_as_they_come(
    make: Callable[[str], Any], visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    first, second = (make(f"run-{place}") for place in (1, 2))
    first.append("metrics", {"round": 1, "device_metrics": {"norm": 2.5}})
    shown = Shown(warm.start, "watch", str(first.directory), str(second.directory), log=tmp_path / "terminal")
    try:
        page = visit(shown.address, viewport={"width": 1280, "height": 4000})
        titles = page.locator("#content .chart h3")
        page.locator("h3", has_text="norm (mean of the accepted devices)").wait_for()
        assert titles.count() == 4
        second.append("metrics", {"round": 1, "device_metrics": {"norm": 1.5}, "remarks": {"kept": 7}})
        page.locator("h3", has_text="kept (told by the method)").wait_for()
        assert titles.all_text_contents()[3:] == ["kept (told by the method)", "norm (mean of the accepted devices)"]
        page.locator("#content .chart >> nth=4 >> figcaption").filter(has_text="1.5").wait_for()
        said = page.locator("#content .chart >> nth=4 >> figcaption").text_content()
        assert re.fullmatch(r".*1 2\.5, .*2 1\.5", said), said
        page.locator(".side input").nth(1).uncheck()
        assert titles.all_text_contents()[3:] == ["norm (mean of the accepted devices)"]
    finally:
        shown.end()


def test_charts_that_are_left_or_chosen_anew_are_not_kept(
    make: Callable[[str], Any], visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    runs = [make(f"run-{place}") for place in range(2)]
    for run in runs:
        run.append("metrics", *({"round": round, "accuracy": 0.5} for round in (1, 2)))
    shown = Shown(warm.start, "watch", *(str(run.directory) for run in runs), log=tmp_path / "terminal")
    drawn = "count => document.querySelectorAll('.uplot').length === count"
    try:
        page = visit(shown.address, viewport={"width": 1280, "height": 4000})
        until(page, drawn, 1)
        # uPlot waits for this event until a chart is destroyed.
        page.evaluate(
            """() => {
                window.kept = 1;
                for (const [name, by] of [["addEventListener", 1], ["removeEventListener", -1]]) {
                    const before = window[name];
                    window[name] = function (kind, ...rest) {
                        window.kept += kind === "dppxchange" ? by : 0;
                        return before.call(window, kind, ...rest);
                    };
                }
            }"""
        )
        page.locator("#tabs button").nth(1).click()
        page.wait_for_selector("[data-part=field]")
        until(page, drawn, 1)
        page.locator("#tabs button").first.click()
        page.locator(".side input").first.uncheck()
        until(page, drawn, 1)
        until(page, "window.kept === 1")
    finally:
        shown.end()


def test_no_two_runs_in_the_charts_have_the_same_look(
    make: Callable[[str], Any], visit: Callable[..., Any], tmp_path: Path, warm: WarmStart
) -> None:
    folders = [str(make(f"run-{place}").directory) for place in range(9)]
    shown = Shown(warm.start, "watch", *folders, log=tmp_path / "terminal")
    try:
        page = visit(shown.address)
        fields = "new Set([...document.querySelectorAll('.side h2 i')].map((one) => one.style.background)).size"
        until(page, f"{fields} === 9")
        page.locator(".side input").nth(8).uncheck()
        page.locator(".side input").nth(7).uncheck()
        assert page.evaluate(fields) == 8, "those that are not in the charts are grey"
    finally:
        shown.end()
