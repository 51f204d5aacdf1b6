"""Search hyperparameters with Optuna (`pip install optuna`): trials whose validation score falls behind end early.

python examples/tune.py --trials 20 --rounds 12
python examples/tune.py --engine ray --address auto   # the same search with every run over a cluster
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import optuna

import fedsieve as fs


class Prune(fs.Callback):
    """Reports each round's validation score to the trial, and ends the run when the trial is not worth going on."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_round(self, row: Mapping[str, Any]) -> None:
        self.trial.report(row["score"], row["round"])
        if self.trial.should_prune():
            raise optuna.TrialPruned


def search(trials: int, rounds: int, place: Mapping[str, str]) -> optuna.Study:
    def objective(trial: optuna.Trial) -> float:
        config = fs.Config(
            algorithm="fedcm-ts",  # its filter scores every round's models on validation data at the server
            dataset="digits",
            rounds=rounds,
            lr=trial.suggest_float("lr", 0.001, 0.3, log=True),
            momentum=trial.suggest_float("momentum", 0.0, 0.95),
            batch_size=trial.suggest_categorical("batch_size", [8, 16, 32, 64]),
            **place,
        )
        history = fs.run(config, callbacks=[Prune(trial)])
        trial.set_user_attr("test accuracy", history.accuracy[-1])  # to report, never to choose by: see below
        return float(history.rows[-1]["score"])

    # Choosing by test accuracy would fit the settings to the test data, and the number reported would be too good.
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=5),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=3),
    )
    study.optimize(objective, n_trials=trials, callbacks=[tell])
    return study


def tell(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    ended = f"pruned after round {trial.last_step}" if trial.state == optuna.trial.TrialState.PRUNED else "finished"
    print(f"trial {trial.number}: validation score {trial.value:.3f}, {ended}, {settings(trial)}", flush=True)


def settings(trial: optuna.trial.FrozenTrial) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in trial.params.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engine", help="where a run's clients are trained, as in fedsieve run")
    parser.add_argument("--address", help="with --engine ray: the cluster, auto for the one this machine is in")
    given = vars(parser.parse_args())
    place = {name: given[name] for name in ("engine", "address") if given[name] is not None}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = search(given["trials"], given["rounds"], place)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    best = study.best_trial
    print(f"{pruned} of {len(study.trials)} trials pruned")
    print(f"best: {settings(best)}: test accuracy {best.user_attrs['test accuracy']:.3f}")
