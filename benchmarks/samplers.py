"""A round of every sampler among 100,000 clients, of FAVOR among fewer, and what FAVOR's pre-training costs and brings.

    python benchmarks/samplers.py [--clients N] [--count N] [--json FILE]

A round is `sample` and `observe`; losses, durations and who is kept are there already. Those samplers that remember
clients have seen 100 rounds before the 30 that are measured, so that most of the clients are known to them. FAVOR is
measured with models of 50,000 numbers (the size of a small one) and of 431,080 (the CNN for MNIST in its paper), a
tenth of the clients asked; its pre-training on the bundled digits, where it is then compared with others over seeds,
also with agents that learnt with other data.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fedsieve as fs
from fedsieve.algorithms import Options
from fedsieve.parts import SAMPLERS
from fedsieve.randomness import keys
from fedsieve.runs import pretrain_favor
from fedsieve.runs.environment import environment
from fedsieve.sampling import ClientSampler, FavorSampler, Feedback
from fedsieve.sampling.compression import Compression
from fedsieve.sampling.double_dqn import network
from fedsieve.sampling.favor import COMPONENTS, Agent
from fedsieve.system import SystemModel
from fedsieve.threads import single_thread

BEFORE, MEASURED = 100, 30
FAVOR = ((100, 50_000), (100, 431_080), (1_000, 50_000))
EPISODES, TARGET, SEEDS = 50, 0.9, 5
FEDERATIONS: tuple[dict[str, Any], ...] = ({"alpha": 0.1}, {"alpha": 1.0, "attack": "label-flip", "hostile": 0.5})
MODEL_BYTES = 200_000


def milliseconds(play: Callable[[int], None], before: int, measured: int) -> float:
    """The median of a round, after some that are not measured."""
    times = []
    for number in range(1, before + measured + 1):
        began = time.perf_counter()
        play(number)
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times[before:]))


def rounds_of(sampler: ClientSampler, ids: NDArray[np.int64], count: int) -> Callable[[int], None]:
    system = SystemModel.drawn(0, ids)
    examples = np.full(ids.size, 50)
    sampler.device_times = lambda clients: system.parts(clients, examples[: clients.size], MODEL_BYTES)
    sampler.local_losses = lambda round, clients, examples: keys(0, "losses", round, clients)
    sampler.begin(0, ids, np.full(ids.size, 1 / ids.size))
    losses = dict(zip(ids.tolist(), keys(0, "training losses", 0, ids).tolist(), strict=True))
    seconds = dict(zip(ids.tolist(), system.seconds(ids, examples, MODEL_BYTES).tolist(), strict=True))

    def play(number: int) -> None:
        asked = sampler.sample(number, ids, count)
        names = asked.tolist()
        answers, times = ({client: known[client] for client in names} for known in (losses, seconds))
        sampler.observe(Feedback(number, asked, asked[::2], answers, times))

    return play


def favor(clients: int, size: int) -> dict[str, Any]:
    """Milliseconds of a round, of everybody's first models on top, and of the fit of the components."""
    ids = np.arange(clients)
    random = torch.Generator().manual_seed(0)
    start, first = torch.zeros(size), torch.randn(clients, size, generator=random)
    began = time.perf_counter()
    compression = Compression.of(first, min(COMPONENTS, clients - 1))
    fit = time.perf_counter() - began
    agent = Agent(
        ids,
        compression,
        compression([start])[0],
        network((1 + clients) * compression.components, clients).state_dict(),
    )
    sampler = FavorSampler(agent)
    sampler.global_model, sampler.local_models = lambda: start, lambda chosen: iter([list(first)])
    sampler.begin(0, ids, np.full(clients, 1 / clients))
    began = time.perf_counter()
    sampler.state()
    first_round = time.perf_counter() - began

    def play(number: int) -> None:
        asked = sampler.sample(number, ids, clients // 10)
        models = [first[client] for client in asked.tolist()]
        sampler.observe(Feedback(number, asked, asked, dict.fromkeys(asked.tolist(), 1.0), {}, models))

    return {
        "clients": clients,
        "model_size": size,
        "round_ms": round(milliseconds(play, 3, 10), 1),
        "first_models_ms": round(1e3 * first_round, 1),
        "fit_ms": round(1e3 * fit, 1),
        "agent_mb": round(len(agent.to_bytes()) / 1e6, 1),
    }


def pretraining(changes: dict[str, Any]) -> dict[str, Any]:
    """On the digits: the cost of an agent for each seed, and accuracies of runs with it and with others."""
    settings = {"algorithm": "fedpdp", "rounds": 20, "schedule": "constant", "device": "cpu", **changes}
    taught = [pretrain_favor(fs.Config(**settings, seed=seed), EPISODES, TARGET) for seed in range(SEEDS)]
    reached: dict[str, list[float]] = {}
    run_seconds = []
    for seed in range(SEEDS):
        config = fs.Config(**settings, seed=seed)
        runs = {
            "favor": fs.run(config, sampler=FavorSampler(taught[seed].agent)),
            "favor, agent of another seed": fs.run(config, sampler=FavorSampler(taught[seed - 1].agent)),
            "uniform": fs.run(config),
            "FedCM-TS": fs.run(fs.Config(**settings | {"algorithm": "fedcm-ts"}, seed=seed)),
        }
        run_seconds.append(runs["uniform"].summary["duration"])
        for name, run in runs.items():
            reached.setdefault(name, []).append(round(float(np.mean(run.accuracy[-10:])), 4))
    return {
        "settings": settings,
        "episodes": EPISODES,
        "target": TARGET,
        "rounds": [sum(done.rounds) for done in taught],
        "trainings": [done.trainings for done in taught],
        "seconds": [round(done.seconds, 1) for done in taught],
        "trainings_of_a_run": 20 * 8,
        "seconds_of_a_run": round(float(np.mean(run_seconds)), 2),
        "mean_last_10": reached,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--json", type=Path, help="write the results there too")
    arguments = parser.parse_args()
    ids = np.arange(arguments.clients)
    options = Options(ratio=arguments.count / arguments.clients, per_round=arguments.count, deadline=1e6)
    print(f"{ids.size:,} clients, {arguments.count:,} a round: milliseconds a round, median of {MEASURED}")
    samplers = []
    with single_thread():
        for name, part in SAMPLERS.items():
            if part.agent:
                continue
            spent = milliseconds(rounds_of(part.make(options), ids, arguments.count), BEFORE, MEASURED)
            print(f"{name:24}{spent:8.1f}", flush=True)
            samplers.append({"sampler": name, "ms": round(spent, 1)})
        favored = []
        for clients, size in FAVOR:
            favored.append(favor(clients, size))
            print("favor", favored[-1], flush=True)
    taught = [pretraining(changes) for changes in FEDERATIONS]
    print("pre-training", json.dumps(taught, indent=1))
    if arguments.json:
        record = {
            "clients": ids.size,
            "count": arguments.count,
            "samplers": samplers,
            "favor": favored,
            "pretraining": taught,
            **environment(torch.device("cpu")),
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
