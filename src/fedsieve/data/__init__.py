"""On what to learn: data sets, fetched or one's own, and how their examples are spread over clients."""

from fedsieve.data.catalogue import DATASETS, data_folder, is_fetched, load
from fedsieve.data.dataset import Dataset
from fedsieve.data.fetch import fetch
from fedsieve.data.partition import Partition, even_out, mislabel, partition, validation_split

__all__ = [
    "DATASETS",
    "Dataset",
    "Partition",
    "data_folder",
    "even_out",
    "fetch",
    "is_fetched",
    "load",
    "mislabel",
    "partition",
    "validation_split",
]
