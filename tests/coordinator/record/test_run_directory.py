import json
import math
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.record.run_directory import RunDirectory, plain, read_run
from fedemu.coordinator.record.summary import summarize
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture
def run(tmp_path: Path):
    with RunDirectory(tmp_path / "run") as directory:
        directory.write_config('name = "digits"\n')
        yield directory


def lines(path: Path) -> list[dict]:
    def refuse(token: str):
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_and_events_are_json_lines_at_once(run: RunDirectory):
    run.metrics({"round": 1, "accuracy": 0.1 + 0.2, "class_accuracy": (0.5, 1.0)})
    run.event("join", 0.0, 0.25, device=7, host="räksmörgås")
    assert lines(run.path / "metrics.jsonl") == [{"round": 1, "accuracy": 0.1 + 0.2, "class_accuracy": [0.5, 1.0]}]
    assert lines(run.path / "events.jsonl") == [
        {"event": "join", "virtual_time": 0.0, "wall_time": 0.25, "device": 7, "host": "räksmörgås"}
    ]
    assert run.rows() == lines(run.path / "metrics.jsonl")


def test_an_event_may_have_a_field_called_name(run: RunDirectory):
    run.event("refused", 1.0, 2.0, name="x")
    assert read_run(run.path).events[0]["name"] == "x"


def test_what_json_has_no_word_for_becomes_null_or_plain(run: RunDirectory):
    run.metrics(
        {
            "nan": math.nan,
            "inf": [-math.inf, {"deep": np.float32("nan")}],
            "numpy": np.int64(3),
            "array": np.array([1.0, np.nan]),
            "path": Path("a/b"),
            "set": {2, 1},
        }
    )
    assert lines(run.path / "metrics.jsonl") == [
        {"nan": None, "inf": [None, {"deep": None}], "numpy": 3, "array": [1.0, None], "path": "a/b", "set": [1, 2]}
    ]


def test_a_value_that_has_a_line_break_stays_on_its_line(run: RunDirectory):
    run.event("failed", 0.0, 0.0, detail="one\ntwo\u2028three")
    assert read_run(run.path).events[0]["detail"] == "one\ntwo\u2028three"


def test_plain_keeps_booleans_and_turns_keys_into_text():
    assert plain({1: True, "x": None}) == {"1": True, "x": None}
    assert plain(np.bool_(True)) is True


def test_rewinding_forgets_what_was_written_after_the_cursor(run: RunDirectory):
    run.metrics({"round": 1})
    cursor = json.loads(json.dumps(run.cursor()))
    run.metrics({"round": 2})
    run.event("join", 0.0, 0.0)
    run.rewind(cursor)
    run.metrics({"round": 22})
    assert [row["round"] for row in run.rows()] == [1, 22]
    assert read_run(run.path).events == []


def test_rewinding_to_nothing_starts_anew_and_drops_an_earlier_end(run: RunDirectory):
    run.metrics({"round": 1})
    run.finish(summary(run), {"w": torch.ones(1)})
    run.rewind({})
    assert run.rows() == []
    assert not (run.path / "summary.json").exists()
    assert not (run.path / "model.safetensors").exists()


def test_a_log_that_lost_what_the_checkpoint_knows_of_is_not_rewound(run: RunDirectory):
    run.metrics({"round": 1})
    with pytest.raises(ConfigurationError, match=r"metrics.jsonl has 12 bytes where the checkpoint knows of 13"):
        run.rewind({"metrics": 13, "events": 0})
    assert run.rows() == [{"round": 1}]


def test_a_resumed_run_goes_on_where_its_cursor_is(tmp_path: Path):
    with RunDirectory(tmp_path) as first:
        first.write_config("seed = 1\n")
        first.metrics({"round": 1})
        cursor = first.cursor()
        first.metrics({"round": 2})
    with RunDirectory(tmp_path, resume=True) as second:
        second.rewind(cursor)
        second.metrics({"round": 2, "again": True})
    assert read_run(tmp_path).rows == [{"round": 1}, {"round": 2, "again": True}]


def test_only_a_diagnosed_run_has_a_log_of_diagnoses(run: RunDirectory, tmp_path: Path):
    assert not (run.path / "diagnosis.jsonl").exists()
    assert read_run(run.path).diagnosis == []
    with RunDirectory(tmp_path / "diagnosed", diagnosed=True) as other:
        other.write_config("")
        assert read_run(other.path).diagnosis == []
        other.diagnosis({"round": 1, "gradient_diversity": math.inf})
    assert read_run(other.path).diagnosis == [{"round": 1, "gradient_diversity": None}]


def test_diagnoses_after_the_cursor_are_forgotten_too(tmp_path: Path):
    with RunDirectory(tmp_path, diagnosed=True) as first:
        first.write_config("")
        first.diagnosis({"round": 1})
        cursor = first.cursor()
        first.diagnosis({"round": 2})
    with RunDirectory(tmp_path, resume=True, diagnosed=True) as second:
        second.rewind(cursor)
        second.diagnosis({"round": 2, "again": True})
    assert read_run(tmp_path).diagnosis == [{"round": 1}, {"round": 2, "again": True}]


def summary(run: RunDirectory, **facts):
    settings = {"name": "digits", "outcome": "completed", "seed": 1, "model_digest": "ab" * 32, **facts}
    return summarize(run.rows(), **settings)


def test_finish_writes_the_model_and_a_summary(run: RunDirectory):
    run.metrics({"round": 1, "accuracy": 0.5, "class_accuracy": [math.nan, 0.5], "accepted": 3, "virtual_time": 9.0})
    variables = {"w": torch.arange(6.0).reshape(2, 3).t(), "tied": torch.ones(2), "n": torch.tensor(3)}
    variables["also"] = variables["tied"]
    run.finish(summary(run), variables)
    (written,) = lines_of_one(run.path / "summary.json")
    assert (written["final_accuracy"], written["forgetting"], written["perturbed"]) == (0.5, None, False)
    assert written["totals"]["accepted"] == 3
    assert set(written["versions"]) == {"python", "torch", "numpy", "pyzmq", "fedemu"}
    model = load_file(run.path / "model.safetensors")
    assert model.keys() == variables.keys()
    assert all(torch.equal(model[name], variables[name]) for name in model)
    assert not [path for path in run.path.iterdir() if "partial" in path.name]


def lines_of_one(path: Path) -> list[dict]:
    return [json.loads(path.read_text(), parse_constant=lambda token: pytest.fail(token))]


def test_a_run_is_read_finished_or_not(run: RunDirectory):
    run.metrics({"round": 1})
    unfinished = read_run(run.path)
    assert (unfinished.config, unfinished.rows, unfinished.events) == ('name = "digits"\n', [{"round": 1}], [])
    assert unfinished.summary is None
    run.finish(summary(run), {})
    assert read_run(run.path).summary["rounds"] == 1


def test_a_last_line_that_is_being_written_does_not_count(run: RunDirectory):
    run.metrics({"round": 1})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 2, "accur')
    assert read_run(run.path).rows == [{"round": 1}]


def test_a_folder_without_a_run_is_not_read(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="holds no run"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "diagnosis.jsonl"])
@pytest.mark.parametrize("line", ["nonsense", "[1]", "5", "null", '{"round": 2, "accu'])
def test_a_damaged_log_is_one_sentence_that_names_the_line(run: RunDirectory, name: str, line: str):
    (run.path / name).write_text('{"round": 1}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=rf"^line 2 of .*/{name} cannot be read: "):
        read_run(run.path)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_summary_is_one_sentence_that_names_the_file(run: RunDirectory, text: str):
    (run.path / "summary.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"^.*/summary\.json cannot be read: "):
        read_run(run.path)


def test_an_existing_run_is_never_overwritten(run: RunDirectory):
    with pytest.raises(ConfigurationError, match=r"is not empty; choose another --out, or continue .* --resume"):
        RunDirectory(run.path)


def test_a_folder_with_something_else_is_never_overwritten(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigurationError, match=r"not empty; choose another --out\.$"):
        RunDirectory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_will_do(tmp_path: Path):
    RunDirectory(tmp_path).close()


def test_a_file_is_no_run_directory(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigurationError, match="is not a folder"):
        RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"Cannot write to .*choose another --out"):
        RunDirectory(tmp_path / "run" / "below")


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="no run to resume"):
        RunDirectory(tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


def try_to_resume(path: Path, answers) -> None:
    try:
        RunDirectory(path, resume=True)
    except ConfigurationError as error:
        answers.put(str(error))
    else:
        answers.put("resumed")


def test_two_coordinators_cannot_work_in_one_folder(tmp_path: Path):
    forks = multiprocessing.get_context("fork")
    answers = forks.Queue()

    def ask() -> str:
        child = forks.Process(target=try_to_resume, args=(tmp_path, answers))
        child.start()
        answer = answers.get(timeout=30)
        child.join(30)
        return answer

    with RunDirectory(tmp_path) as run:
        run.write_config("")
        assert "Another coordinator is at work" in ask()
    assert ask() == "resumed"


def test_the_digest_can_be_recomputed_as_the_documentation_says(run: RunDirectory, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs" / "run_directory.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    variables = {"w": torch.randn(3, 2).t(), "größe": torch.tensor(3)}
    run.finish(summary(run, model_digest=model_digest(variables)), variables)
    monkeypatch.chdir(run.path)
    exec(program, {})
    assert capsys.readouterr().out.strip() == read_run(run.path).summary["model_digest"]
