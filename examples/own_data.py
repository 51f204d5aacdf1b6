"""Your own data: NumPy arrays of inputs and labels. Here, three noisy clouds of points in the plane."""

from __future__ import annotations

import numpy as np

import fedsieve as fs


def clouds(points: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(3, size=points)
    centres = np.array([[0.0, 2.0], [-2.0, -1.0], [2.0, -1.0]])
    return (centres[labels] + random.normal(size=(points, 2))).astype(np.float32), labels


if __name__ == "__main__":
    dataset = fs.Dataset.from_arrays(*clouds(1500, seed=1), *clouds(500, seed=2))
    config = fs.Config(algorithm="fedcm-ts", clients=10, rounds=5, model="mlp", augment=False)
    history = fs.run(config, dataset=dataset)
    print(f"accuracy after {config.rounds} rounds: {history.accuracy[-1]:.3f}")
