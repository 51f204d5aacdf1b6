"""Your own model: any `nn.Module` from inputs to logits. Give the class or a function, and the run's seed draws it."""

from __future__ import annotations

from torch import Tensor, nn

import fedsieve as fs


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


if __name__ == "__main__":
    config = fs.Config(algorithm="fedcm-ucb", rounds=5)
    history = fs.run(config, model=SmallNet)
    print(f"accuracy after {config.rounds} rounds: {history.accuracy[-1]:.3f}")
