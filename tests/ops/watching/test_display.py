"""The display shows how far a run is, as lines or as a live picture."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fedemu.coordinator.observer import Absence
from fedemu.coordinator.record.row import Row
from fedemu.ops.figures import span
from fedemu.ops.watching.display import (
    JOB_LINE_SECONDS,
    LINE_SECONDS,
    LiveDisplay,
    PlainDisplay,
    console_of_stderr,
    draw,
    open_display,
)
from fedemu.ops.watching.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def row(round: int, accepted: int = 30, **more: Any) -> Row:
    known = {"virtual_time": 60.0 * round, "accuracy": 0.5 + round / 100, "loss": 1.5, "accepted": accepted}
    known |= {"round_seconds": 0.5}
    return Row(round=round, **known | more)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress("digits", rounds=40, devices=300, clock=clock)


def test_throughput_is_that_of_the_whole_run_and_the_time_left_follows_the_last_rounds(
    progress: Progress, clock: Clock
) -> None:
    progress.round_started(1, 0, 0.0, 39)
    clock.now += 9.0
    assert progress.updates_per_second is None
    progress.round_finished(row(1, round_seconds=8.0))
    assert progress.seconds_left is None
    for round in (2, 3):
        clock.now += 0.5
        progress.round_finished(row(round))
    assert progress.updates_per_second == pytest.approx(90 / 9.0), "all accepted over the real time of all rounds"
    assert progress.seconds_left == pytest.approx(0.5 * 37)


def test_the_best_accuracy_is_kept_and_unevaluated_rounds_change_nothing(progress: Progress) -> None:
    for round, accuracy in ((1, 0.7), (2, 0.6), (3, None)):
        progress.round_finished(row(round, accuracy=accuracy, loss=None if accuracy is None else 1.0))
    assert (progress.accuracy, progress.best, progress.loss) == (0.6, 0.7, 1.0)


def plain(progress: Progress, clock: Clock) -> tuple[PlainDisplay, io.StringIO]:
    written = io.StringIO()
    return PlainDisplay(progress, Console(file=written, width=200), clock), written


def picture(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(draw(progress))
    return console.export_text()


def test_plain_lines_come_now_and_then_but_always_for_the_first_and_the_last_round(
    progress: Progress, clock: Clock
) -> None:
    display, written = plain(progress, clock)
    for round in range(1, 41):
        display.round_started(round, 0, 0.0, 39)
        clock.now += 0.25 * LINE_SECONDS
        display.round_finished(row(round))
    shown = [int(line.split()[1].partition("/")[0]) for line in written.getvalue().splitlines()]
    assert shown == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40]


def test_a_plain_line_tells_the_results_of_the_round(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.round_finished(row(1))
    clock.now += LINE_SECONDS
    display.round_finished(row(2, accepted=30, cancelled=8, dropped=1, late=0))
    assert written.getvalue().splitlines() == [
        "round  1/40  accuracy 51.0 %  loss 1.5000  30 accepted  60 updates/s  virtual 1 min 0 s",
        "round  2/40  accuracy 52.0 %  loss 1.5000  30 accepted, 8 cancelled, 1 dropped  60 updates/s  "
        "virtual 2 min 0 s  1 min 16 s left",
    ]


def test_a_plain_line_tells_the_period_once_an_evaluation_told_of_several(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    for round, periods in ((1, None), (2, [0.5, 0.25, None]), (3, None)):
        clock.now += LINE_SECONDS
        display.round_finished(row(round, task=round // 2, period_accuracy=periods))
    assert [line.partition("  accuracy")[0] for line in written.getvalue().splitlines()] == [
        "round  1/40",
        "round  2/40  period 2/3",
        "round  3/40  period 2/3",
    ]


def test_language_runs_tell_the_perplexity_in_place_of_the_loss(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.round_finished(row(1, perplexity=53.517))
    assert written.getvalue() == (
        "round  1/40  accuracy 51.0 %  perplexity 53.52  30 accepted  60 updates/s  virtual 1 min 0 s\n"
    )
    progress.round_finished(row(2, loss=7.5e35))
    assert progress.cost == "loss 7.5e+35", "and not 36 digits"


def test_a_plain_line_tells_that_a_round_is_tried_again(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.round_started(7, 1, 0.0, 39)
    assert written.getvalue() == "round 7: too few replies, try 2 with devices drawn anew\n"


def test_a_long_server_job_is_told_now_and_then_and_a_short_one_not_at_all(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.round_finished(row(6))
    for step in range(51):
        display.server_job("distilling", 7, step, 50)
        clock.now += 0.25 * JOB_LINE_SECONDS if step < 10 else 0.0
    assert written.getvalue().splitlines()[1:] == [
        "round 7 · distilling 8%  1 min 55 s left",
        "round 7 · distilling 16%  1 min 45 s left",
    ]


def test_a_short_server_job_in_a_long_round_is_not_told(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.round_finished(row(6))
    clock.now += 5 * JOB_LINE_SECONDS
    for step in range(4):
        display.server_job("distilling", 7, step, 3)
        clock.now += 0.25 * JOB_LINE_SECONDS
    assert len(written.getvalue().splitlines()) == 1


def test_the_live_picture_shows_a_server_job_until_it_is_done(progress: Progress) -> None:
    display = LiveDisplay(progress, Console(file=io.StringIO(), force_terminal=True))
    display.server_job("distilling", 7, 12, 50)

    assert re.search(r"server  ━━━━╸ +round 7 · distilling 24%\n", picture(progress))  # 4.8 of 20
    display.event("server_job", job="distilling", round=7, steps=12, seconds=0.5)
    assert "distilling" not in picture(progress)


def test_the_time_that_a_job_takes_goes_by_the_steps_that_this_process_saw(progress: Progress, clock: Clock) -> None:
    told = []
    for step, seconds in ((0, 2.0), (40, 3.0), (44, 1.0), (44, 100.0)):
        progress.server_job("distilling", 7, step, 50)
        clock.now += seconds
        told.append(progress.job_line)
    assert told == [
        "round 7 · distilling 0%",
        "round 7 · distilling 80%",
        "round 7 · distilling 88%  3.5 s left",  # 4 steps in 3 s, 6 to go, and one second has gone by
        "round 7 · distilling 88%",
    ]
    progress.server_job("distilling", 8, 1, 50)
    assert progress.job_line == "round 8 · distilling 2%"


def test_the_time_left_of_the_run_is_unknown_while_a_round_outlasts_it(progress: Progress, clock: Clock) -> None:
    for round in (38, 39):
        clock.now += 2.0
        progress.round_finished(row(round))
    clock.now += 1.5
    assert progress.seconds_left == 0.5
    clock.now += 1.0
    assert progress.seconds_left is None


def test_few_updates_a_second_are_told_with_a_decimal(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    for round in (1, 2):
        clock.now += 20.0
        display.round_finished(row(round, accepted=5, round_seconds=20.0))
    assert "  0.2 updates/s  " in written.getvalue()


def test_a_failure_to_keep_pictures_is_told(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.event("pictures_failed", task=2, detail="the disk is full")
    assert written.getvalue() == "task 3: no pictures of what is generated (the disk is full)\n"


def test_what_a_method_keeps_outside_of_its_state_is_told(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.event("kept_outside", round=2, what="memory.3")
    assert written.getvalue() == (
        "round 2: the method has changed 'memory.3', which is no part of its state; a run that is resumed would go on "
        "without the change, and perhaps to another model\n"
    )


def test_a_state_that_a_method_changes_in_place_is_told(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.event("state_changed", round=2, what="velocity.w")
    assert written.getvalue() == (
        "round 2: the method has changed its state in place (velocity.w); a round that is tried again would begin with "
        "the change, so make a new tensor or collection instead\n"
    )


def test_under_the_wall_clock_no_virtual_time_is_told(progress: Progress, clock: Clock) -> None:
    for virtual in (True, False):
        progress.virtual = virtual
        display, written = plain(progress, clock)
        display.round_finished(row(1))
        assert ("virtual" in written.getvalue()) is virtual


def test_the_arrival_of_the_fleet_is_counted_until_it_is_complete(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    for enrolled in (0, 100, 150, 300, 300):
        display.fleet({"enrolled": enrolled, "connected": enrolled})
        clock.now += 0.25
    assert written.getvalue().splitlines() == ["devices enrolled 0/300", "devices enrolled 300/300"]


AWAY = Absence(devices=30, connected=0, seconds=31.0, then="they count as failed (try 1 of 3)")


def test_where_nobody_is_connected_a_plain_line_says_so_now_and_then(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.round_started(2, 0, 60.0, 39)
    for second in range(12):
        display.waiting(replace(AWAY, seconds=31.0 - second))
        clock.now += 1.0
    display.fleet({"connected": 300})
    display.waiting(None)
    display.waiting(None)
    assert written.getvalue().splitlines() == [
        "no device is connected; 31 s until they count as failed (try 1 of 3)",
        "no device is connected; 21 s until they count as failed (try 1 of 3)",
        "300 devices connected now",
    ]


def test_some_devices_without_a_connection_are_counted(progress: Progress) -> None:
    progress.waiting(Absence(1, 299, 61.0, "they count as failed (try 2 of 3)"))
    assert progress.absence == "1 device without a connection; 1 min 1 s until they count as failed (try 2 of 3)"
    progress.waiting(Absence(300, 0))
    assert progress.absence == "no device is connected"


def test_the_machines_that_are_away_are_named(progress: Progress) -> None:
    progress.waiting(Absence(9, 291, 20.0, "they count as failed (try 1 of 3)", ("attic", "cellar\a")))
    assert progress.absence == (
        r"9 devices without a connection (away: attic, cellar\x07); 20 s until they count as failed (try 1 of 3)"
    )
    progress.waiting(Absence(300, 0, machines=("a", "b", "c", "d", "e")))
    assert progress.absence == "no device is connected (away: a, b, c and 2 more)"


def test_the_live_picture_counts_down_to_the_end_of_the_wait_in_place_of_the_time_left(
    progress: Progress, clock: Clock
) -> None:
    for round in (1, 2, 3):
        progress.round_started(round, 0, 0.0, 39)
        clock.now += 0.5
        progress.round_finished(row(round))
    assert progress.seconds_left == pytest.approx(18.5)
    progress.waiting(AWAY)
    clock.now += 4.0
    shown = picture(progress)
    assert "no device is connected; 27 s until they count as failed" in shown
    assert " left" not in shown
    progress.waiting(None)
    assert "no device" not in picture(progress)


def test_a_resumed_run_says_so_and_counts_on(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    display.resumed([row(round) for round in range(1, 8)], 12.0)
    clock.now += 3.0  # the experiment is put together
    with display:
        assert written.getvalue() == "resumed at round 8 of 40, after 7 rounds in 12 s\n"
        shown = picture(progress)
        for part in ("round 7/40", "waiting for devices", "accuracy 57.0 %   best 57.0 %", "210 accepted", "real 12 s"):
            assert part in shown
        clock.now += 2.0
        display.round_started(8, 0, 420.0, 39)
        display.round_finished(row(8, round_seconds=1.5))
    assert written.getvalue().splitlines()[1] == (
        "round  8/40  accuracy 58.0 %  loss 1.5000  30 accepted  48 updates/s  virtual 8 min 0 s"
    )
    assert progress.elapsed == 14.0
    assert progress.outcomes["accepted"] == 240


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [(True, "xterm", LiveDisplay), (False, "xterm", PlainDisplay), (True, "dumb", PlainDisplay)],
)
def test_a_terminal_that_can_redraw_gets_the_live_display_and_all_else_plain_lines(
    progress: Progress, terminal: bool, term: str, kind: type
) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ={"TERM": term})
    assert type(open_display(progress, console)) is kind


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_stderr_that_leads_to_a_file_gets_plain_lines_whatever_is_said_of_colours(
    progress: Progress, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setenv(variable, "1")
    assert type(open_display(progress, console_of_stderr())) is PlainDisplay


def test_the_live_picture_shows_round_model_fleet_and_pace(progress: Progress, clock: Clock) -> None:
    progress.fleet({"enrolled": 300, "connected": 299, "online": 210, "busy": 30})
    progress.round_started(1, 0, 0.0, 39)
    progress.round_finished(row(1))
    clock.now += 0.5
    progress.round_finished(row(2, cancelled=9))
    shown = picture(progress)
    for part in (
        "digits",
        "round 2/40",
        "accuracy 52.0 %",
        "210 online",
        "30 busy",
        "9 cancelled",
        "60 device updates/s",
        "19 s left",
    ):
        assert part in shown


def test_the_live_picture_shows_period_and_perplexity(progress: Progress) -> None:
    progress.round_started(12, 0, 0.0, 39)
    progress.round_finished(row(12, task=2, period_accuracy=[0.5] * 10, perplexity=53.517))
    shown = picture(progress)
    assert "round 12/40   period 3/10" in shown
    assert "accuracy 62.0 %   best 62.0 %   perplexity 53.52" in shown


def test_the_live_picture_counts_devices_while_it_waits(progress: Progress) -> None:
    progress.fleet({"enrolled": 120})
    assert "waiting for devices" in picture(progress)


def test_the_live_display_restores_the_cursor(progress: Progress) -> None:
    written = io.StringIO()
    with LiveDisplay(progress, Console(file=written, force_terminal=True, width=120)) as display:
        display.round_started(1, 0, 0.0, 39)
        display.round_finished(row(1))
    assert written.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (61.0, "1 min 1 s"), (7200.0, "2.0 h"), (3 * 86400.0, "3.0 d")],
)
def test_a_span_is_told_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_the_reason_of_failed_devices_is_told_once(progress: Progress, clock: Clock) -> None:
    display, written = plain(progress, clock)
    for device in (3, 4):
        display.event(
            "failure", device=device, ask="1.0.0", reason="training", detail="ValueError: no, own.py:2\n    x"
        )
    assert written.getvalue() == "device 3 failed: ValueError: no, own.py:2\n"


def test_devices_that_are_given_up_are_told_once_for_each_ask_and_the_wait_of_one_alone(
    progress: Progress, clock: Clock
) -> None:
    display, written = plain(progress, clock)
    first = {"lacked": "sent no result", "waited": 19.0, "limit": "fleet.give_up", "among": 2}
    display.event("given_up", device=17, ask="3.0.0", **first)
    display.event("given_up", device=18, ask="3.0.0", **{**first, "lacked": "did not answer its work"})
    display.event("given_up", device=4, **{**first, "lacked": "did not announce its on-line times", "among": 1})
    assert written.getvalue().splitlines() == [
        "round 3: device 17 sent no result for 19 s (fleet.give_up) and counts as failed, as 1 other device that had "
        "to be given up",
        "device 4 did not announce its on-line times for 19 s (fleet.give_up) and counts as lost",
    ]


def test_machines_whose_messages_cannot_be_read_are_told_ever_more_rarely(progress: Progress, clock: Clock) -> None:
    display, out = plain(progress, clock)
    for count in (1, 2, 9, 10, 20, 100):
        display.event("refusal", reason="field", count=count)
    display.event("refusal", reason="version", count=1)
    display.event("refusal", reason="fleet_full", count=1)
    advice = "; if a machine does not join, install the same version of fedemu there, which fedemu --version tells"
    assert out.getvalue().splitlines() == [
        f"a message that came cannot be read here (field){advice}",
        f"10 messages that came cannot be read here (field){advice}",
        f"100 messages that came cannot be read here (field){advice}",
        f"a message that came cannot be read here (version){advice}",
    ]
