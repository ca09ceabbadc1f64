"""The work for FedJAX: the steps of its federated averaging, by ``for_each_client``, in one process.

Its own ``shuffle_repeat_batch`` fills a batch across epochs. So the batches here are those of ``padded_batch``, epoch
by epoch: the same number of steps over the same numbers of samples as everywhere else. Batches of three sizes spare
small devices the padding.

Usage: ``python fedjax_app.py WORK PROGRESS``. ``ops/bench/peers/work.py`` tells what the files are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np


def main(path: str, progress_path: str) -> None:
    """Do the work of the file ``path``."""
    import fedjax
    import jax
    import jax.numpy as jnp
    from fedjax.algorithms.fed_avg import create_train_for_each_client
    from jax.example_libraries import stax

    work = dict(np.load(path))
    settings = json.loads(str(work["settings"]))
    images = work["x"].ndim == 4

    def laid_out(x: Any) -> Any:
        """Images with their channels last, as JAX's layers take them."""
        return x.transpose(0, 2, 3, 1) if images else x

    def convolution(channels: int) -> tuple[Any, ...]:
        return stax.Conv(channels, (5, 5), padding="SAME"), stax.Relu, stax.MaxPool((2, 2), (2, 2))

    layers = (stax.Flatten, stax.Dense(64), stax.Relu, stax.Dense(10))
    if images:
        layers = (*convolution(32), *convolution(64), stax.Flatten, stax.Dense(512), stax.Relu, stax.Dense(10))
    initial, apply = stax.serial(*layers)

    def losses(batch: dict[str, Any], logits: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)[:, 0]

    shape = (-1, *laid_out(work["x"][:1]).shape[1:])
    model = fedjax.create_model_from_stax(initial, apply, shape, losses)
    train = create_train_for_each_client(fedjax.model_grad(model), fedjax.optimizers.sgd(settings["lr"]))
    clients = fedjax.InMemoryFederatedData(
        {
            device: {"x": laid_out(work["x"][samples]), "y": work["y"][samples].astype(np.int32)}
            for device, samples in enumerate(np.split(work["samples"], work["starts"][1:-1]))
        }
    )
    params = model.init(jax.random.PRNGKey(0))
    random = np.random.RandomState(0)
    add, weigh = fedjax.tree_util.tree_add, fedjax.tree_util.tree_weight

    def batches(data: fedjax.ClientDataset) -> Iterator[Any]:
        """The batches of all epochs. Each epoch has an order of its own."""
        epochs = []
        for _ in range(settings["epochs"]):
            order = random.permutation(len(data))
            shuffled = fedjax.ClientDataset({name: leaf[order] for name, leaf in data.all_examples().items()})
            epochs.append(shuffled.padded_batch(batch_size=settings["batch_size"], num_batch_size_buckets=3))
        return chain.from_iterable(epochs)

    for round, cohort in enumerate(work["cohorts"]):
        keys = jax.random.split(jax.random.PRNGKey(round), len(cohort))
        chosen = list(clients.get_clients(cohort.tolist()))
        sizes = {device: len(data) for device, data in chosen}
        total = sum(sizes.values())
        change = fedjax.tree_util.tree_zeros_like(params)
        work_of_clients = [(device, batches(data), key) for (device, data), key in zip(chosen, keys, strict=True)]
        for device, delta in train(params, work_of_clients):
            change = add(change, weigh(delta, sizes[device] / total))
        params = add(params, weigh(change, -1.0))
        jax.block_until_ready(params)
        with open(progress_path, "a") as progress:
            progress.write("\n")
        if round == 0:
            sys.stdin.readline()  # the benchmark begins to measure
    sys.stdin.read()  # the benchmark reads the figures of this process first
    right = apply(params, laid_out(work["test_x"])).argmax(1) == work["test_y"]
    print(json.dumps({"accuracy": float(right.mean())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
