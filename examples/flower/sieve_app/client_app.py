"""A ClientApp as in Flower's quickstart; the one line for FedSieve is `say_who`."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsieve.flower import say_who
from sieve_app.task import Net, evaluate, site_data, train

app = say_who(ClientApp())


def received_model(message: Message) -> Net:
    net = Net()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return net


@app.train()
def train_here(message: Message, context: Context) -> Message:
    net, examples = received_model(message), site_data(context.node_config)
    run: dict[str, Any] = dict(context.run_config)
    loss = train(net, examples, int(run["local-epochs"]), float(run["learning-rate"]))
    metrics = MetricRecord({"num-examples": len(examples[1]), "train_loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate_here(message: Message, context: Context) -> Message:
    examples = site_data(context.node_config)
    accuracy, loss = evaluate(received_model(message), examples)
    metrics = MetricRecord({"num-examples": len(examples[1]), "accuracy": accuracy, "loss": loss})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
