"""Running an experiment from a program, as in a notebook."""

import ast
import json
import os
import shlex
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedemu
from fedemu.coordinator.record.row import read_rows
from fedemu.ops.cli import commands
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.runtime import Track
from fedemu.ops.experiment.sources import load_experiment, read_frozen
from fedemu.ops.notebook import calls, play, settings
from fedemu.ops.notebook.shown import Shown, Silence
from fedemu.ops.running.folder import claim, keep_grown
from fedemu.protocol.code import own_code
from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _forked(forked: Callable[[ModuleType], None]) -> None:
    """The processes of runs are forked. Those that ``test_kernel.py`` starts are the ordinary ones."""

    forked(play)


TINY = {"name": "mine", "rounds": 5, "fleet": {"devices": 6, "per_round": 2}}


@pytest.mark.usefixtures("_forked")
async def test_a_run_works_beside_a_running_loop_and_gives_its_results(capfd: pytest.CaptureFixture[str]) -> None:
    """A notebook has a running event loop, and so has this test."""
    results = fedemu.run(TINY, out="here", transport="memory", rounds=1, local__epochs=1)
    assert results.summary["outcome"] == "completed"
    assert [row.accepted for row in results.rows] == [2]
    assert results.accuracy == results.rows[0].accuracy
    assert results.model.exists()
    assert results.report.exists()
    assert "round 1/1" in capfd.readouterr().err
    assert fedemu.open_run("here") == results


@pytest.mark.usefixtures("_forked")
def test_several_seeds_are_one_group_that_goes_on_and_is_compared_as_by_the_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plots in ("COMPARISON_PLOTS", "_WIDE_PLOTS"):
        monkeypatch.setattr(f"fedemu.ops.compare.page.page.{plots}", {})
    quiet: dict[str, Any] = {"transport": "memory", "progress": False, "runtime__report": False}
    group = fedemu.run(TINY, out="seeds", seeds=[2], rounds=1, **quiet)
    assert group.page.exists()
    begun = load_experiment(Path("seeds/seed-2/config.toml"), ["seed=7"], {})[0]
    other = claim(begun, Path("seeds/seed-7"))
    group = fedemu.run(resume="seeds", seeds=2, **quiet)
    assert not read_rows(other), "a seed that was not asked for is not run"
    shutil.rmtree(other)
    assert [result.summary["seed"] for result in group] == [1, 2]
    assert len(group) == 2
    assert list(group.rows()["seed"]) == [1, 2]
    assert list(group.rows()["round"]) == [1, 1]
    assert "seed 2" in group._repr_html_()
    assert "±" in repr(group)
    grown = fedemu.run(resume=group[0].directory, rounds=2, **quiet)
    assert [row.round for row in grown.rows] == [1, 2]
    assert fedemu.run(resume=group[0].directory, **quiet) == grown, "a finished run has nothing to go on with"

    compared = fedemu.compare(grown, [Path("seeds/seed-2")], target=0.5)
    with pytest.raises(SystemExit) as ended:
        commands.command(["compare", "seeds/seed-1", "seeds/seed-2", "--target", "0.5"], prog_name="fedemu")
    assert ended.value.code == 0
    assert compared.to_text(width=400) == capfd.readouterr().out.rstrip("\n")
    assert max(map(len, repr(compared).splitlines())) <= 120
    assert [row["runs"][0]["seed"] for row in json.loads(compared.to_json())["rows"]] == [1, 2]
    frame = compared.frame()
    assert list(frame["runs"]) == [1, 1]
    assert frame["final_accuracy"][0] == grown.accuracy
    assert compared._repr_html_().count("<tr>") == 3
    assert compared.page("page") == Path("page/compare.html")
    assert Path("page/compare.html").exists()
    assert capfd.readouterr().err == "", "without progress a run writes nothing"


def test_a_warning_is_not_why_a_run_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('fedemu: warning: slow', file=sys.stderr); raise SystemExit(5)"
    monkeypatch.setattr(play, "child_command", lambda *_: [sys.executable, "-c", code])
    assert play.play(tmp_path, Runtime(), Silence()) == play.Ended(5)


class Heard(Silence):
    """Keeps what a run tells. ``interrupted`` says that a person presses Ctrl-C at its first line."""

    def __init__(self, interrupted: bool = False) -> None:
        self.lines: list[str] = []
        self._interrupted = interrupted

    def line(self, text: str) -> None:
        self.lines.append(text)
        if self._interrupted and len(self.lines) == 1:
            raise KeyboardInterrupt


def test_the_address_of_a_tracker_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; print(os.environ['FEDEMU_TRACK'], *sys.argv[1:], sep='\\n', file=sys.stderr); sys.exit(5)"
    monkeypatch.setattr(play, "child_command", lambda *_: [sys.executable, "-c", code])
    track = Track(to=("mlflow",), out="https://alice:s3cret@tracks.example")
    heard = Heard()
    play.play(tmp_path, Runtime(trainers=2, track=track), heard)
    table, *words = heard.lines
    assert tomllib.loads(f"track = {table}")["track"] == {"to": ["mlflow"], "out": track.out}
    assert words == ["--set", "runtime.trainers=2"]


def test_a_process_that_a_run_leaves_behind_goes_on_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the stderr of the run, and writes there again and again, as a server that somebody's own code starts."""
    written = tmp_path / "written"
    left = f"while sleep 0.02; do echo mine >&2 || exit; echo >> {shlex.quote(str(written))}; done"
    code = (
        "import subprocess, sys\n"
        f"left = subprocess.Popen(['sh', '-c', {left!r}])\n"
        "print(left.pid, 'round 1/1', 'fedemu: the disk is full', '  of the run', sep='\\n', file=sys.stderr)\n"
        "raise SystemExit(5)"
    )
    monkeypatch.setattr(play, "child_command", lambda *_: [sys.executable, "-c", code])
    heard = Heard()
    assert play.play(tmp_path, Runtime(), heard) == play.Ended(5, "the disk is full\n  of the run")
    pid, *told = [line for line in heard.lines if line != "mine"]
    try:
        assert told == ["round 1/1", "fedemu: the disk is full", "  of the run"]
        before = written.stat().st_size
        end = time.monotonic() + 30
        while written.stat().st_size < before + 2:
            assert time.monotonic() < end, "its pipe is broken"
            time.sleep(0.01)
    finally:
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("reaction", "ended"),
    [
        ("signal.SIG_DFL", play.Ended(4)),  # as before fedemu listens to signals
        ("lambda *_: sys.exit(1)", play.Ended(4)),
        ("lambda *_: sys.exit(0)", play.Ended(0)),  # it was about to end
        ("lambda *_: sys.exit('fedemu: the disk is full')", play.Ended(1, "the disk is full")),
    ],
)
def test_a_run_that_an_interrupt_ends_without_a_word_is_interrupted(
    reaction: str, ended: play.Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGINT, {reaction})\n"
        "print('it begins', file=sys.stderr, flush=True)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(play, "child_command", lambda *_: [sys.executable, "-c", code])
    heard = Heard(interrupted=True)
    assert play.play(tmp_path, Runtime(), heard) == ended
    assert heard.lines == ["it begins", "stopping after this round's checkpoint"]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds neither a run nor a group of runs"):
        fedemu.compare(tmp_path)
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        fedemu.open_run(tmp_path)


@pytest.mark.parametrize(
    ("experiment", "overrides", "said"),
    [
        ("digitz", {}, "did you mean digits"),
        ("digits", {"rounds": 0}, "rounds = 0 must be at least 1"),
        ({"fleet": {"devices": 10}}, {}, "per_round = 30 is more than fleet.devices = 10"),
        (Experiment(name="mine"), {"local__rate": 1}, "local.rate is no setting"),
    ],
)
def test_wrong_settings_raise_an_error_and_make_no_folder(
    experiment: Any, overrides: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said.replace(".", r"\.")):
        fedemu.run(experiment, **overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["taken", "taken before"])
def test_advice_names_arguments_of_the_call_and_not_options_of_the_command(tmp_path: Path, folder: str) -> None:
    claim(Experiment(), Path(folder))
    with pytest.raises(ConfigurationError) as refused:
        fedemu.run(TINY, out=folder)
    assert str(refused.value) == (
        f'{folder} exists and is not empty; choose another folder (out), or continue its run (resume="{folder}").'
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file exists and is not a folder; choose another out\.$"):
        fedemu.run(TINY, out="file")


def test_advice_names_arguments_also_if_the_system_refuses_and_quotes_own_code_as_it_is() -> None:
    Path("runs").touch()
    with pytest.raises(ConfigurationError, match=r"choose another folder with out$") as refused:
        fedemu.run(TINY)
    assert isinstance(refused.value.__cause__, OSError)
    for cause in (own_code.Elsewhere("the traceback"), _raised_by_own_code()):
        error = ConfigurationError("it fails: ValueError: write it --out there")
        error.__cause__ = cause
        assert str(settings.in_call(error)) == "it fails: ValueError: write it --out there"


def _raised_by_own_code() -> Exception:
    own = Path("own.py").absolute()
    try:
        exec(compile("raise ValueError('write it --out there')", str(own), "exec"))
    except ValueError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("go on with --transport memory", 'go on with transport="memory"'),
        ("go on with --nodes 3", "go on with runtime__nodes=3"),
        ("go on without --on", "go on without runtime__on"),
        ("leave out --seeds, or start a group with --out 'a b'", 'leave out seeds, or start a group with out="a b"'),
        ("--bind tcp://[::]:5 and --metrics-port 5", 'runtime__bind="tcp://[::]:5" and runtime__metrics_port=5'),
        ("go on by --resume 12, or in run--out", 'go on by resume="12", or in run--out'),
    ],
)
def test_an_option_of_the_command_becomes_the_argument_of_the_call(sentence: str, said: str) -> None:
    assert settings.in_arguments(sentence) == said


def test_nothing_to_compare_is_an_error() -> None:
    for runs in ([], [[]], [[], ()]):
        with pytest.raises(ConfigurationError, match="compare has nothing to compare; name results or folders"):
            fedemu.compare(*runs)


def test_a_table_of_arrays_is_no_table_of_settings() -> None:
    import numpy as np

    with pytest.raises(ConfigurationError) as refused:
        settings.overrides({"data": {"data": np.zeros((150, 4)), "target": np.zeros(150)}})
    assert str(refused.value) == (
        "data__data = array([[0., 0., 0., 0.], [0., 0., 0., 0.], [0., 0., 0., ... is no value of a setting; "
        "hand arrays over as a data set: data=(x, y)"
    )


def test_an_experiment_in_hand_is_not_changed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_LOCAL__LR", "0.7")
    assert settings.load(Experiment(), [])[0].local.lr == 0.1
    assert settings.load("digits", [])[0].local.lr == 0.7


def test_trace_files_of_an_experiment_from_a_program_are_looked_for_in_the_working_folder() -> None:
    Path("trace.csv").write_text("device,start,end\na,0,100\n")
    table = {**TINY, "availability": {"kind": "trace", "file": "trace.csv"}}
    of_table, _ = settings.load(table, [])
    assert of_table.traces.availability == ((0.0, 100.0),)
    assert settings.load(Experiment.parse(table), [])[0] == of_table
    Path("trace.csv").unlink()
    assert settings.load(of_table, ["rounds=7"])[0] == of_table.model_copy(update={"rounds": 7})


def test_the_call_that_goes_on_with_a_run_can_be_copied_whatever_its_folder_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path('my "run" \\ 1')
    claim(load_experiment(TINY, [], {})[0], folder)
    monkeypatch.setattr(calls, "play", lambda *_: play.Ended(4))
    with pytest.raises(Interrupted) as caught:
        fedemu.run(resume=folder, progress=False)
    call = str(caught.value).partition("fedemu.run(resume=")[2].removesuffix(")")
    assert ast.literal_eval(call) == str(folder)


def test_a_resume_that_is_refused_takes_back_its_own_rounds_and_not_those_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other run has got more rounds, and its process has not begun yet."""
    for folder in ("other", "own", "group/seed-1"):
        claim(load_experiment(TINY, [], {})[0], Path(folder))
    monkeypatch.setattr(calls, "play", lambda *_: play.Ended(2, "refused"))
    keep_grown(Path("other"), load_experiment(TINY, ["rounds=9"], {})[0])
    for folder in ("own", "group"):
        with pytest.raises(ConfigurationError, match="refused"):
            fedemu.run(resume=folder, rounds=9, progress=False)
    rounds = [read_frozen(Path(folder)).rounds for folder in ("other", "own", "group/seed-1")]
    assert rounds == [9, 5, 5]


@pytest.mark.parametrize("folder", ["own", "group"])
def test_a_refusal_takes_back_no_rounds_that_an_earlier_call_has_added(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("own" if folder == "own" else "group/seed-1")
    claim(load_experiment(TINY, [], {})[0], run)
    monkeypatch.setattr(calls, "play", lambda *_: play.Ended(4))
    with pytest.raises(Interrupted):  # before its first round
        fedemu.run(resume=folder, rounds=9, progress=False)
    with pytest.raises(ConfigurationError, match="lr can't change"):
        fedemu.run(resume=folder, local__lr=0.7, progress=False)
    assert read_frozen(run).rounds == 9


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (3, "3"), ("a b", '"a b"'), ({"kind": "iid"}, '{ kind = "iid" }'), ([1, 2], "[1, 2]")],
)
def test_an_override_is_any_value_of_toml(value: Any, text: str) -> None:
    assert settings.overrides({"stream": value}) == [f"stream={text}"]


@pytest.mark.parametrize(
    ("arguments", "transport"),
    [({}, "zmq"), ({"transport": "memory"}, "memory"), ({"runtime__transport": "memory"}, "memory")],
)
def test_the_transport_is_the_one_that_was_asked_for(
    arguments: dict[str, Any], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Runtime] = []

    def ended(directory: Path, runtime: Runtime, shown: Shown) -> play.Ended:
        seen.append(runtime)
        return play.Ended(5, "that is all")

    monkeypatch.setattr(calls, "play", ended)
    with pytest.raises(FedemuError, match="that is all"):
        fedemu.run("digits-small", out="run", **arguments)
    assert [runtime.transport for runtime in seen] == [transport]


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("seeds", [None, 2])
def test_what_has_no_effect_is_told_once_if_progress_is_shown(
    seeds: int | None, progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "play", lambda *_: play.Ended(5, "that is all"))
    with pytest.raises(FedemuError, match="that is all"):
        fedemu.run(TINY, out="run", seeds=seeds, progress=progress, diagnose__samples=9)
    told = "warning: diagnose.samples = 9 has no effect, because diagnose.every = 0 diagnoses no round\n"
    assert capsys.readouterr().err == told * progress


@pytest.mark.usefixtures("_forked")
def test_an_error_in_somebodys_own_code_is_the_cause(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def build(input_shape, classes):\n    return {}['layers']\n")
    with pytest.raises(ConfigurationError, match=r"can't be built: KeyError: 'layers', .*own\.py:2") as caught:
        fedemu.run(TINY, out="here", model__name=f"{own}:build", transport="memory", progress=False)
    assert str(caught.value).splitlines()[1].endswith("own.py:2 in build: return {}['layers']")
    assert isinstance(caught.value.__cause__, KeyError)
    assert not Path("here").exists()


@pytest.mark.usefixtures("_forked")
def test_seeds_are_kept_if_a_later_one_of_them_cannot_be_played(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from pathlib import Path\n"
        "from fedemu.algorithms.models.feed_forward import mlp\n"
        "def build(input_shape, classes):\n"
        f"    if Path({str(tmp_path)!r}, 'seeds/seed-1/summary.json').exists():\n"
        "        raise ValueError('no more')\n"
        "    return mlp(input_shape, classes)\n"
    )
    quiet: dict[str, Any] = {"transport": "memory", "progress": False, "runtime__report": False}
    with pytest.raises(ConfigurationError, match=r'no more(.|\n)*go on with fedemu.run\(resume="seeds"\)'):
        fedemu.run(TINY, rounds=1, out="seeds", seeds=3, model__name=f"{own}:build", **quiet)
    assert fedemu.open_run("seeds/seed-1").summary["outcome"] == "completed"
    assert [Path("seeds", f"seed-{seed}", "config.toml").is_file() for seed in (2, 3)] == [True, True]


def test_an_object_that_holds_data_becomes_their_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path))
    pair = ([[0.0], [1.0]], [0, 1])
    [written] = settings.overrides({"data": pair})
    assert written.startswith('data.dataset="object#')
    assert settings.overrides({"data__dataset": pair}) == [written]
    assert settings.overrides({"data": "digits"}) == ['data.dataset="digits"']
    assert settings.overrides({"data": {"dataset": "digits"}}) == ['data={ dataset = "digits" }']
