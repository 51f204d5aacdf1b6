"""The clients' side: a ClientApp that says who it is, and one that trains as the simulator does."""

from __future__ import annotations

from functools import lru_cache

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsieve.engines import SequentialEngine
from fedsieve.errors import InvalidSetting
from fedsieve.filtering import accuracy, log_likelihood
from fedsieve.flower.arrays import ArrayLayout, piece_names
from fedsieve.flower.replies import CLIENT_ID
from fedsieve.runs import Config, assemble


def say_who(app: ClientApp) -> ClientApp:
    """Let a ClientApp answer which client it is: `client-id` of its node's configuration, else `partition-id`.

    A SuperNode gets it with `--node-config 'client-id="hospital-a"'`. Nodes without either stay anonymous.
    """

    @app.query("client_id")
    def who(message: Message, context: Context) -> Message:
        found = context.node_config.get(CLIENT_ID, context.node_config.get("partition-id"))
        said = ConfigRecord({} if found is None else {CLIENT_ID: str(found)})
        return Message(RecordDict({"who": said}), reply_to=message)

    return app


def client_app(config: Config) -> ClientApp:
    """A ClientApp whose nodes are the clients of a simulated run: `partition-id` k trains as client k does there."""
    if config.attack != "none":
        raise InvalidSetting("attack", config.attack, "none: attacks are for the simulator")
    if config.engine == "ray":
        raise InvalidSetting("engine", config.engine, "auto, lanes, workers or sequential for a node")
    app = say_who(ClientApp())

    @app.train()
    def train(message: Message, context: Context) -> Message:
        engine, layout = _engine(config, message)
        client = int(context.node_config["partition-id"])
        round = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        model = layout.read(message.content.array_records["arrays"])
        (update,) = engine.train(model.to(engine.device), [client], round)
        if update.model is None:
            raise RuntimeError(update.error)
        metrics = MetricRecord({"num-examples": len(engine.partition[client]), "train_loss": update.loss})
        content = RecordDict({"arrays": layout.write(update.model), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        engine, layout = _engine(config, message)
        model = layout.read(message.content.array_records["arrays"])
        logits, labels = engine.logits([model.to(engine.device)], "test")[0], engine.labels("test")
        scores = {"accuracy": float(accuracy(logits, labels)), "loss": -float(log_likelihood(logits, labels))}
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": len(labels), **scores})}), reply_to=message)

    return app


@lru_cache(maxsize=1)
def _assembled(config: Config) -> SequentialEngine:
    _, engine = assemble(config)
    assert isinstance(engine, SequentialEngine)  # all are but those that client_app refuses
    return engine


def _engine(config: Config, message: Message) -> tuple[SequentialEngine, ArrayLayout]:
    engine = _assembled(config)
    arrays: ArrayRecord = message.content.array_records["arrays"]
    return engine, ArrayLayout.of(arrays, engine.layout, piece_names(engine.module))
