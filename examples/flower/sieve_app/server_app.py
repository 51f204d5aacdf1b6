"""A ServerApp with FedCM where Flower's quickstart has FedAvg."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedsieve.flower import FedCM
from sieve_app.task import Net, evaluate, test_data, validation_data

app = ServerApp()


def evaluate_globally(round: int, arrays: ArrayRecord) -> MetricRecord:
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    accuracy, loss = evaluate(net, test_data())
    return MetricRecord({"accuracy": accuracy, "loss": loss})


@app.main()
def main(grid: Grid, context: Context) -> None:
    run: dict[str, Any] = dict(context.run_config)
    strategy = FedCM(
        model=Net,
        validation=validation_data(),
        bandit=run["bandit"],
        score=run["score"],
        fraction_train=float(run["fraction-train"]),
        fraction_evaluate=float(run["fraction-evaluate"]),
        min_available_nodes=int(run["min-nodes"]),
        client_ids="ask",
        state_dir=run["state-dir"] or None,
    )
    result = strategy.start(
        grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(run["num-server-rounds"]),
        timeout=float(run["round-timeout"]),
        evaluate_fn=evaluate_globally,
    )
    last = max(result.evaluate_metrics_serverapp)
    print(f"accuracy after round {last}: {result.evaluate_metrics_serverapp[last]['accuracy']:.3f}", flush=True)
