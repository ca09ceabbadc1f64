"""Presets put together of a setting and methods, and those of the papers, built without their data."""

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.models.image_generator import generator_for, samples_of_equal_memory
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.layers import merge
from fedemu.ops.experiment.presets import example_of, is_preset, methods, preset, preset_path, presets
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest


def loaded(name: str, *overrides: str) -> Experiment:
    experiment, _ = load_experiment(name, overrides, {})
    return experiment


# A setting with methods


def test_a_method_lies_over_a_setting_and_the_run_is_called_by_both() -> None:
    plain, joined = loaded("fedntd-cifar10-dirichlet0.1"), loaded("fedntd-cifar10-dirichlet0.1+scaffold")
    assert (plain.algorithm.name, joined.algorithm.name) == ("fedavg", "scaffold")
    assert joined.name == "fedntd-cifar10-dirichlet0.1-scaffold"
    same = {"name": plain.name, "algorithm": plain.algorithm}
    assert joined.model_copy(update=same) == plain


def test_several_parts_lie_over_each_other_in_their_order() -> None:
    experiment = loaded("wsm-cifar10-30devices+scaffold+wsm")
    assert (experiment.algorithm.name, experiment.algorithm.loss) == ("scaffold", "wsm")
    assert experiment.name == "wsm-cifar10-30devices-scaffold-wsm"
    assert loaded("digits+feddf+fedprox").local.epochs == 40


def test_the_command_line_goes_before_a_method() -> None:
    assert loaded("digits+feddf", "local.epochs=2", "name=mine").local.epochs == 2
    assert loaded("digits+fedprox", "algorithm.options.mu=0.5").algorithm.options == {"mu": 0.5}


def test_a_setting_may_say_what_its_paper_changes_for_a_method_and_for_what_extends_it() -> None:
    assert loaded("flashback-cifar10+flashback").algorithm.options["gamma"] == 0.025
    assert loaded("flashback-cinic10+flashback").algorithm.options["gamma"] == 0.1
    assert loaded("flashback-cinic10+flashback-ntd").algorithm.options["gamma"] == 0.1
    assert loaded("fedntd-mnist-shards2+moon").model.options == {}
    assert loaded("fedntd-mnist-shards2+moon").algorithm.options["mu"] == 0.1
    assert loaded("flashback-femnist+moon").model.options == {"projection": 256}
    assert loaded("flashback-femnist+fedprox").model.options == {}


def test_what_a_setting_says_of_a_method_is_laid_like_settings() -> None:
    below = {"methods": {"x": {"model": {"name": "cnn", "width": 8}, "stream": {"kind": "drift", "periods": 3}}}}
    above = {"methods": {"x": {"model": {"name": "lenet"}, "stream": {"kind": "window"}, "rounds": 2}}}
    assert merge(below, above) == above


def test_the_baselines_of_a_table_are_those_of_the_code_that_made_it() -> None:
    for setting in FEDNTD:
        assert loaded(f"{setting}+fedcurv").algorithm.options == {"penalty": 1.0, "samples": 500, "fisher": "batches"}
    for setting in FLASHBACK:
        momenta = {row: loaded(f"{setting}+{row}").local.momentum for row in FLASHBACK_ROWS}
        assert momenta == {row: 0.0 if row == "fedreg" else 0.9 for row in FLASHBACK_ROWS}
    for name in ("mfcl-cifar100", "mfcl-tinyimagenet", "mfcl-superimagenet-l", "mfcl-cifar100-subset"):
        assert loaded(f"{name}+fedprox").algorithm.options == {"mu": 0.01, "distance": "tensors"}
    assert loaded("digits+fedprox").algorithm.options == {"mu": 1.0}
    assert "fisher" not in loaded("digits+fedcurv").algorithm.options


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("digits+scafold", 'there is no method "scafold" to follow a preset after "+"; did you mean scaffold'),
        ("digits+zzz", 'there is no method "zzz" to follow a preset after "+"; `fedemu presets` lists'),
        ("digits+", 'the name of a preset part is missing after "+"; `fedemu presets` lists them'),
        ("+scaffold", 'the name of a preset is missing before "+"; `fedemu presets` lists them'),
        ("digits+churn", 'churn is a preset, and can\'t follow another after "+"; name one preset, and then its parts'),
        ("digit+scaffold", 'there is no file and no preset "digit"; did you mean digits'),
        ("scaffold", "scaffold is a method, which follows a preset: write digits+scaffold"),
        ("fedntd+wsm", "fedntd is a method, which follows a preset: write digits+fedntd+wsm"),
        ("scaffold+digits", "scaffold is a method, which follows a preset: write digits+scaffold"),
        ("wsm+churn+moon", "wsm is a loss, which follows a preset: write churn+wsm+moon"),
        ("mfcl-no-prior", "mfcl-no-prior is a method, which follows a preset: write digits-tasks+mfcl-no-prior"),
        ("ewc", "ewc is a local term, which follows a preset: write digits-drift+ewc"),
        ("public", "public is a preset part, which follows a preset: write digits+public"),
        ("banana", 'there is no file and no preset "banana"; `fedemu presets` lists them'),
    ],
)
def test_a_part_that_does_not_exist_is_told_with_the_nearest_names(name: str, complaint: str) -> None:
    assert not is_preset(name)
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(name, [], {})
    assert str(caught.value).startswith(complaint)


def test_settings_are_no_methods_and_the_other_way_round() -> None:
    assert not {name for name, _ in presets()} & {name for name, _ in methods()}
    assert all(len(text) > 20 for _, text in methods())
    assert all("+" not in name for name, _ in (*presets(), *methods()))


def test_the_methods_that_a_preset_names_exist() -> None:
    known = {name for name, _ in methods()}
    for name, _ in presets():
        assert "methods" not in preset(name)
        assert "extends" not in preset(name)
        for line in preset_path(name).read_text().splitlines():
            if line.startswith("[methods."):
                assert line.split(".")[1] in known


# The papers

FEDNTD = [
    "fedntd-mnist-shards2",
    "fedntd-mnist-dirichlet0.1",
    *(f"fedntd-cifar10-shards{n}" for n in (2, 3, 5, 10)),
    *(f"fedntd-cifar10-dirichlet{alpha}" for alpha in ("0.05", "0.1", "0.3", "0.5")),
    "fedntd-cifar100-shards10",
    "fedntd-cifar100-dirichlet0.1",
    "fedntd-cinic10-shards2",
    "fedntd-cinic10-dirichlet0.1",
]
FEDNTD_ROWS = ["fedavg", "fedcurv", "fedprox", "fednova", "scaffold", "moon", "fedntd", "fedkd"]
FLASHBACK = ["flashback-cifar10", "flashback-cinic10", "flashback-femnist"]
FLASHBACK_ROWS = ["fedavg", "feddf", "fedntd", "fedprox", "fedreg", "moon", "flashback"]
FLASHBACK_VARIANTS = [
    "flashback-devices",
    "flashback-server",
    "flashback-ntd",
    "flashback-probabilities",
    "fedavg-finetuned",
    "central",
]
WSM = [f"wsm-{data}{norm}" for data in ("cifar10", "cifar100", "femnist") for norm in ("", "-batchnorm")]
WSM += ["wsm-cifar10-lenet", "wsm-cifar100-lenet"]
WSM_30 = ["wsm-cifar10-30devices", "wsm-cifar100-30devices"]
WSM_30_ROWS = ["fedavg", "scaffold", "fednova", "fedprox"]

TABLES = [
    *(f"{setting}+{row}" for setting in FEDNTD for row in FEDNTD_ROWS),
    *(f"{setting}+{row}" for setting in FLASHBACK for row in (*FLASHBACK_ROWS, *FLASHBACK_VARIANTS)),
    *(f"{setting}+{row}" for setting in WSM for row in ("fedavg", "fedavg+wsm")),
    *(f"{setting}+{row}{loss}" for setting in WSM_30 for row in WSM_30_ROWS for loss in ("", "+wsm")),
]
SHAPES = {
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "cinic10": ((3, 32, 32), 10),
    "femnist": ((1, 28, 28), 62),
}


def shaped_like(dataset: str) -> Corpus:
    """One black image, in the shape and with the classes of a data set."""
    shape, classes = SHAPES[dataset]
    split = Split(np.zeros((1, *shape), np.uint8), np.zeros(1, np.int64), {})
    names = tuple(map(str, range(classes)))
    moments = np.zeros(shape[0]), np.ones(shape[0])
    return Corpus(dataset, split, split, names, shape, *moments, Digest("0" * 64))


@pytest.mark.parametrize("setting", [*FEDNTD, *FLASHBACK, *WSM, *WSM_30])
def test_every_row_of_the_papers_tables_can_be_built(setting: str) -> None:
    rows = [name for name in TABLES if name.split("+")[0] == setting]
    assert len(rows) >= 2
    for name in rows:
        experiment = loaded(name)
        model, algorithm = open_algorithm(experiment, shaped_like(experiment.data.dataset))
        assert algorithm.programs or name.endswith("+central")
        assert model.kind == "convolutional"


def test_every_method_goes_with_the_preset_that_its_file_names_and_lacks_something_on_others() -> None:
    corpus = Corpus(
        "digits",
        *[Split(np.zeros((1, 1, 8, 8), np.uint8), np.zeros(1, np.int64), {})] * 2,
        tuple("0123456789"),
        (1, 8, 8),
        np.zeros(1),
        np.ones(1),
        Digest("0" * 64),
    )
    for name, _ in methods():
        own = ["replay.capacity=5274"] if name == "generator-replay" else []
        assert open_algorithm(loaded(example_of(name), *own), corpus)
    for name in ("feddf", "flashback", "fedavg-finetuned", "central"):
        with pytest.raises(ConfigurationError, match="needs public data"):
            open_algorithm(loaded(f"digits+{name}"), corpus)
    for name in (name for name, _ in methods() if name.endswith("-replay")):
        with pytest.raises(ConfigurationError, match="has nothing to replay in a stream of one period"):
            loaded(f"digits+{name}", "replay.capacity=20")
    for name in (
        name for name, _ in methods() if name.startswith(("mfcl", "fedavg-gen", "fedprox-", "fedlwf", "fedci"))
    ):
        with pytest.raises(ConfigurationError, match=r"set stream\.kind = 'classes'"):
            open_algorithm(loaded(f"digits+{name}"), corpus)


# Table 5 of MFCL


def test_each_row_of_the_ablations_leaves_out_one_thing() -> None:
    whole = loaded("digits-tasks+mfcl").algorithm
    rows = {
        "statistics": {"batch_statistics": 0.0},
        "prior": {"image_prior": 0.0},
        "diversity": {"diversity": 0.0},
        "split": {"split": False},
        "tuning": {"fine_tuning": 0.0},
        "distillation": {"distillation": 0.0},
    }
    for row, left_out in rows.items():
        found = loaded(f"digits-tasks+mfcl-no-{row}")
        assert found.algorithm.options == {**whole.options, **left_out}
        assert found.algorithm.name == "mfcl"


def test_settings_give_samples_the_memory_of_the_generator() -> None:
    shapes = {"digits": ((1, 8, 8), 10), **SHAPES}
    for name in ("digits-tasks", "mnist-tasks", "cifar10-tasks"):
        experiment = loaded(f"{name}+generator-replay")
        shape, _ = shapes[experiment.data.dataset]
        assert experiment.replay.capacity == samples_of_equal_memory(generator_for(shape))


def test_the_oracle_keeps_everything_and_goes_before_any_method() -> None:
    plain, oracle = loaded("digits-tasks+fedprox"), loaded("digits-tasks+oracle+fedprox")
    assert not plain.stream.cumulative
    assert oracle.stream.cumulative
    assert oracle.algorithm == plain.algorithm


def test_the_loss_of_new_classes_follows_a_method() -> None:
    spec = loaded("digits-tasks+fedntd+new-classes").algorithm
    assert (spec.name, spec.loss) == ("fedntd", "new_classes")


def test_fedntd_divides_as_its_authors_do_but_for_the_most_uneven_of_its_partitions() -> None:
    for name in FEDNTD:
        partition = loaded(name).data.partition.model_dump()
        kind, value = ("shards", "per_device") if "shards" in name else ("dirichlet", "alpha")
        assert partition["kind"] == kind
        assert name.endswith(f"{kind}{partition[value]:g}")
        if kind == "dirichlet":
            assert (partition["min_samples"], partition["balanced"]) == (10, True)
            assert partition["retry"] == (partition["alpha"] > 0.05)


def test_the_settings_that_the_papers_state() -> None:
    fleets = {name: loaded(name).fleet for name in (*FEDNTD, *FLASHBACK, *WSM, *WSM_30)}
    assert {name: (fleet.devices, fleet.per_round) for name, fleet in fleets.items()} == {
        **{name: (200 if "cinic10" in name else 100, 10) for name in FEDNTD},
        **dict(zip(FLASHBACK, [(100, 10), (200, 10), (3432, 32)], strict=True)),
        **dict.fromkeys(WSM, (100, 10)),
        **dict.fromkeys(WSM_30, (30, 3)),
    }
    assert {loaded(name).rounds for name in FEDNTD} == {200}
    assert [loaded(name).rounds for name in ("wsm-cifar10", "wsm-femnist", "wsm-cifar100-30devices")] == [
        4000,
        3000,
        2000,
    ]
    assert {loaded(name).data.validation for name in (*WSM, *WSM_30)} == {0.1}
    femnist = loaded("flashback-femnist").data
    # The validation part is a share of the samples that are not for testing. It comes to 15 % of all samples.
    assert (1 - femnist.test_fraction) * femnist.validation == pytest.approx(0.15, abs=1e-4)
    assert round(femnist.public.fraction * 3582) == 150
    assert loaded("wsm-cifar10-batchnorm").model.options == {"norm": "batch", "conv_bias": True}
    assert loaded("wsm-cifar100-lenet").model.options == {}
    assert loaded("flashback-cifar10+feddf").local.epochs == 40
