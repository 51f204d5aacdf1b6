"""The workloads on FedJAX's federated averaging with its "jit" backend: one process, XLA's default threads.

python with_fedjax.py --workload cnn|mlp [--rounds 10]
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from harness import Measurement, parser, report
from workload import BATCH_SIZE, CLASSES, EVALUATED, LEARNING_RATE, WORKLOADS, Workload

# FedJAX 0.0.17 calls jax.tree_map, which JAX has removed in favour of jax.tree_util.tree_map.
jax.tree_map = jax.tree_util.tree_map

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402


def build(workload: Workload) -> fedjax.Model:
    """The workload's network in Haiku, its first weights drawn from the distribution that PyTorch uses."""
    uniform = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")

    def mlp(batch: dict[str, Any]) -> Any:
        layers = [hk.Linear(200, w_init=uniform), jax.nn.relu, hk.Linear(200, w_init=uniform), jax.nn.relu]
        return hk.Sequential([*layers, hk.Linear(CLASSES, w_init=uniform)])(batch["x"])

    def cnn(batch: dict[str, Any]) -> Any:
        layers: list[Any] = []
        for channels in (32, 64):
            pool = hk.MaxPool(window_shape=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID")
            layers += [hk.Conv2D(channels, (5, 5), padding="SAME", w_init=uniform), jax.nn.relu, pool]
        layers += [hk.Flatten(), hk.Linear(512, w_init=uniform), jax.nn.relu, hk.Linear(CLASSES, w_init=uniform)]
        return hk.Sequential(layers)(batch["x"])

    return fedjax.create_model_from_haiku(
        hk.transform(mlp if workload.name == "mlp" else cnn),
        sample_batch={"x": np.zeros((1, *_shape(workload)), np.float32), "y": np.zeros(1, np.int64)},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
        eval_metrics={"loss": fedjax.metrics.CrossEntropyLoss()},
    )


def _shape(workload: Workload) -> tuple[int, ...]:
    """Channels last, as JAX likes images."""
    return workload.input_shape if workload.flat else (*workload.image[1:], workload.image[0])


def main() -> None:
    arguments = parser(__doc__).parse_args()
    workload = WORKLOADS[arguments.workload]
    fedjax.set_for_each_client_backend("jit")
    inputs, labels = workload.data()
    if not workload.flat:
        inputs = np.ascontiguousarray(inputs.transpose(0, 2, 3, 1))
    own = [workload.of_client((inputs, labels), client) for client in range(workload.clients)]
    federation = fedjax.InMemoryFederatedData({client: {"x": x, "y": y} for client, (x, y) in enumerate(own)})
    evaluated = [
        {"x": inputs[start : start + BATCH_SIZE], "y": labels[start : start + BATCH_SIZE]}
        for start in range(0, EVALUATED, BATCH_SIZE)
    ]
    model = build(workload)
    batching = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH_SIZE, num_epochs=1)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(LEARNING_RATE),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=batching,
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(federation, workload.clients_per_round, seed=0)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    first = float(fedjax.evaluate_model(model, state.params, evaluated)["loss"])
    measurement = Measurement(arguments.rounds)
    for _ in range(measurement.total):
        clients = sampler.sample()
        state, _diagnostics = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        measurement.end()
    last = float(fedjax.evaluate_model(model, state.params, evaluated)["loss"])
    report(
        peer="fedjax",
        package="fedjax",
        framework="jax",
        workload=workload,
        results=measurement.results(),
        losses=(first, last),
        # The steps are compiled and cannot count themselves: these are the batches that the last clients gave.
        steps=sum(1 for _, dataset, _ in clients for _ in dataset.shuffle_repeat_batch(batching)),
    )


if __name__ == "__main__":
    main()
