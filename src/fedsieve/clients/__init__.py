"""How a client learns: objective, optimiser, schedule, augmentation."""

from fedsieve.clients.augmentation import crop_and_flip, draw_crops_and_flips
from fedsieve.clients.objective import Objective, Plain, Proximal
from fedsieve.clients.schedule import SCHEDULES, Schedule, constant, cosine, step
from fedsieve.clients.training import LocalTraining, train

__all__ = [
    "SCHEDULES",
    "LocalTraining",
    "Objective",
    "Plain",
    "Proximal",
    "Schedule",
    "constant",
    "cosine",
    "crop_and_flip",
    "draw_crops_and_flips",
    "step",
    "train",
]
