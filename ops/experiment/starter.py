"""A commented experiment to start from, which ``fedemu init`` writes.

``docs/configuration.md`` explains every key. The comments here are the short form for the keys that are used most.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemu.ops.experiment.experiment import Experiment
from fedemu.ops.experiment.presets import preset
from fedemu.ops.experiment.runtime import Runtime
from fedemu.ops.experiment.toml_text import SCHEMA_LINE, toml_text, toml_value

STARTER = "digits-small"
"""The preset that a new experiment begins with: it runs in seconds."""
TABLES = {
    "data": 'What is learnt. Built in are "digits" and "synthetic"; others are named by a folder, a file, an id of\n'
    "the Hugging Face hub, or module:Name. Partitions: dirichlet, dirichlet_equal, shards, natural, iid, resampled\n"
    "and flwr.",
    "stream": "How data arrive over time. static: all from the beginning. Streams of periods: periods, drift, window.\n"
    'Tasks with classes of their own: kind = "classes", tasks = 5, rounds_per_task = 5.',
    "model": "mlp, cnn, lenet, resnet18, random_features, gru, tinybert, or your own as module:Name. Other keys are\n"
    "options of the model.",
    "algorithm": "The method. `fedemu presets` lists them. options = { ... } are those of the method.",
    "local": "Training at a device, by SGD.",
    "replay": "What a device keeps of periods that are over. It needs a stream of several periods. Strategies:\n"
    "naive_uniform, reservoir, class_balanced, herding, diversity, coordinated and others.",
    "fleet": "How many devices there are, and how long they are waited for.",
    "tree": "Edges, which stand between the coordinator and the devices of many machines: docs/edges.md.",
    "availability": "When devices are on-line: always, exponential, weibull, diurnal, trace. Times are in seconds.",
    "profile": "How fast devices are: a number for all, or a distribution (uniform, normal, lognormal, trace).",
    "faults": "Planned failures: the probability for each selected device and round.",
    "clock": "virtual: time jumps from event to event, and runs are reproducible. wall: everything takes real time.",
    "evaluate": "How often the global model is tested.",
    "diagnose": "Whether the model of each selected device is tested before the models are averaged.",
    "liveness": "When a process that says nothing counts as dead, in real seconds.",
    "server": "The coordinator's own work.",
    "compute": "How numbers are computed.",
    "limits": "Larger replies are rejected.",
    "runtime": "This machine. These settings never change what a run computes.",
}
KEYS = {
    "name": "the run directory is called by it",
    "seed": "every random draw follows from it",
    "rounds": "how often the method's script is run",
    "data.dataset": "what is learnt",
    "data.partition": "which samples each device has",
    "data.validation": "share of a device's samples that it does not train on",
    "stream.kind": "static, periods, drift, window or classes",
    "model.name": "the network",
    "algorithm.name": "the method",
    "algorithm.loss": "cross_entropy, wsm, new_classes, er_ace and others",
    "local.epochs": "passes over the device's samples in a round",
    "local.steps": "steps in a round, in place of epochs; 0: epochs count",
    "local.batch_size": "samples in a step",
    "local.lr": "learning rate of the first round",
    "local.momentum": "from 0 to below 1",
    "local.weight_decay": "this times the weight is added to the gradient",
    "local.lr_decay": "the learning rate is multiplied by it after each round",
    "replay.strategy": "how samples are chosen; none: no replay",
    "replay.capacity": "samples that a device can keep",
    "fleet.devices": "devices in all",
    "fleet.per_round": "replies that a round takes; or participation = 0.25",
    "fleet.over_selection": "this times per_round devices are asked",
    "fleet.deadline": "seconds of the experiment's clock until late replies are refused",
    "fleet.quorum": "share of per_round that must reply",
    "tree.edges": "number of edges, level by level from the top; []: none",
    "availability.kind": "always, exponential, weibull, diurnal or trace",
    "availability.mean_online": "mean seconds on-line",
    "availability.mean_offline": "mean seconds off-line",
    "profile.seconds_per_sample": "to compute one sample once",
    "profile.down_kbps": "1,000 bit/s to the device",
    "profile.up_kbps": "1,000 bit/s from the device",
    "profile.latency": "seconds for a message in one direction",
    "faults.crash_rate": "the device's process is killed",
    "faults.leave_rate": "the device says goodbye and goes",
    "faults.silence_rate": "the device says nothing more",
    "faults.corrupt_rate": "the reply is damaged",
    "faults.duplicate_rate": "the reply is sent twice",
    "faults.decline_rate": "the device refuses the work",
    "clock.kind": "virtual or wall",
    "evaluate.every": "every so many rounds",
    "diagnose.every": "every so many rounds; 0: never",
    "liveness.heartbeat_seconds": "real seconds between signs of life",
    "liveness.patience": "so many silent intervals count as dead",
    "server.threads": "threads for its numerical work",
    "compute.portable": "the same bits on all processors with AVX2, slower",
    "limits.max_payload_bytes": "bytes of a reply",
    "limits.max_norm": "Euclidean norm of a reply",
    "runtime.device_type": "auto, cpu or cuda",
    "runtime.trainers": "processes that compute; 0: one per core, or per GPU",
    "runtime.metrics_port": "port for Prometheus; 0: none",
    "runtime.metrics_address": "0.0.0.0: other machines may read them, too",
    "runtime.report": "whether a run ends with plots and a page",
}
_HEAD = """\
# An experiment of fedemu, which begins like the preset {preset}.
{schema}
#
#   fedemu validate {file}     check it without running it
#   fedemu run {file}          run it
#
# A setting that is left out has its default. The command line wins over this file, as in --set local.lr=0.05.
# These are the settings that are used most; docs/configuration.md explains all of them.
"""


def starter_text(source: str, file: str) -> str:
    """A commented experiment like the preset ``source``, with the most used keys of every table.

    ``file`` is the name of the file that it is for. Raises ConfigurationError if there is no such preset.
    """
    known = Experiment().table() | {"runtime": Runtime().model_dump(mode="json")}
    written = preset(source)
    table = Experiment.parse(written).table() | {"runtime": known["runtime"]}
    kept: dict[str, Any] = {}
    comments = dict(TABLES)
    for key, value in table.items():
        if not isinstance(value, Mapping):
            kept[key] = value
            comments[key] = _commented(key, known[key])
            continue
        # Another kind has other defaults, and the options of a model are all its own.
        alike = known[key].get("kind") == value.get("kind") and key != "model"
        usual = known[key] if alike else {}
        kept[key] = {}
        for inner, setting in value.items():
            path = f"{key}.{inner}"
            if path in KEYS or setting != usual.get(inner):
                # A table inside a table is written as the preset has it, without its own defaults.
                kept[key][inner] = written.get(key, {}).get(inner, setting) if isinstance(setting, dict) else setting
                if path in KEYS:
                    comments[path] = _commented(path, known[key].get(inner))
    name = Path(file).stem
    if all(letter.isalnum() or letter in "._-" for letter in name) and name.isascii() and name[:1].isalnum():
        kept["name"] = name[:100]
    # A line feed in the name would end the comment.
    said = shlex.quote(file) if file.isprintable() else repr(file)
    return f"{_HEAD.format(preset=source, file=said, schema=SCHEMA_LINE)}\n{toml_text(kept, comments)}"


def _commented(path: str, default: Any) -> str:
    """The comment of a key. A default that is a table is not stated, because it would be longer than the line."""
    said = KEYS[path]
    if default is None or isinstance(default, Mapping):
        return said
    return f"{said} (default {toml_value(default)})"
