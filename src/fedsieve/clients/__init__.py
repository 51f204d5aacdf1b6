"""How a client learns: objective, optimiser, schedule, augmentation."""

from fedsieve.clients.augmentation import crop_and_flip, draw_crops_and_flips
from fedsieve.clients.channels_last import channels_last, gains_from_channels_last, takes_channels_last
from fedsieve.clients.objective import Objective, Plain, Proximal
from fedsieve.clients.schedule import SCHEDULES, Schedule, constant, cosine, step
from fedsieve.clients.training import LocalTraining, Trainer

__all__ = [
    "SCHEDULES",
    "LocalTraining",
    "Objective",
    "Plain",
    "Proximal",
    "Schedule",
    "Trainer",
    "channels_last",
    "constant",
    "cosine",
    "crop_and_flip",
    "draw_crops_and_flips",
    "gains_from_channels_last",
    "step",
    "takes_channels_last",
]
