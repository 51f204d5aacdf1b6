"""A federation with TLS and SuperNode authentication on this machine: a SuperLink and four SuperNodes.

    python deploy.py            # in this folder: make keys and data, start everything, run the app, stop everything

Each SuperNode has its own key, its own data file and a name, `client-id`, that it keeps when it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

APP = Path(__file__).parent
PATIENCE = 120.0  # seconds for anything to start or happen


class Federation:
    """A SuperLink and its SuperNodes, with everything they need in one folder. Use it as a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }
        make_certificates(self.folder)
        self._write_connection()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self.processes)):
            self.stop(name)

    def start_superlink(self) -> None:
        """TLS, authentication, loopback only; what apps need is installed already."""
        place = ("--host", "127.0.0.1", "--port", str(self.port))
        tls = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
        more = ("--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database", "superlink.db")
        self._start("superlink", ["flower-superlink", *place, *tls, *more])
        wait_until(lambda: port_is_open(self.port), "the SuperLink to listen")

    def register(self, key: str) -> None:
        """Let the SuperNode with this key connect."""
        make_key(self.folder, key)
        self.flwr("supernode", "register", str(self.folder / f"{key}.pub"), "deployment")

    def start_supernode(self, name: str, data: Path, key: str | None = None, *, tls: bool = True) -> None:
        """A SuperNode called `name` with the examples in `data`, known by its key."""
        make_key(self.folder, key or name)
        superlink = ("--superlink", f"127.0.0.1:{self.port}", "--auth-supernode-private-key", key or name)
        secure = ("--root-certificates", "ca.crt") if tls else ("--insecure",)
        place = ("--host", "127.0.0.1", "--port", str(free_port()))
        own = ("--node-config", f'client-id="{name}" data="{data.resolve()}"')
        self._start(name, ["flower-supernode", *superlink, *secure, *place, *own])

    def flwr(self, *words: str) -> str:
        """A command of the person who runs the federation."""
        done = subprocess.run(
            ["flwr", *words], env=self.environment, capture_output=True, text=True, timeout=PATIENCE, cwd=self.folder
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, **config: Any) -> int:
        """Start a run of the app; its id."""
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        words = ["run", str(APP), "deployment", "--format", "json", *(["--run-config", settings] if config else [])]
        printed = self.flwr(*words)
        return int(json.loads(printed[printed.index("{") :])["run-id"])

    def status(self, run: int) -> str:
        """finished:completed, running, ..."""
        printed = self.flwr("list", "deployment", "--run-id", str(run), "--format", "json")
        found: str = json.loads(printed[printed.index("{") :])["runs"][0]["status"]
        return found

    def wait_for_run(self, run: int) -> str:
        """Wait until a run has ended; how it ended."""

        def ended() -> str:
            status = self.status(run)
            return status if status.startswith("finished") else ""

        return str(wait_until(ended, f"run {run} to end", 3 * PATIENCE, every=1))

    def log(self, name: str) -> str:
        """What a process printed."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def stop(self, name: str) -> None:
        """End a process gently, then whatever it started and left behind."""
        self.processes[name].terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[name].wait(10)
        self.kill(name)

    def kill(self, name: str) -> None:
        """End a process and all it started at once, as a crash of its machine would."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write_connection(self) -> None:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        lines = ("[superlink]", 'default = "deployment"', "", "[superlink.deployment]")
        values = {"address": f"127.0.0.1:{self.port}", "root-certificates": str(self.folder / "ca.crt")}
        settings = (f"{name} = {json.dumps(value)}" for name, value in values.items())
        (home / "config.toml").write_text("\n".join([*lines, *settings, ""]), encoding="utf-8")


def make_certificates(folder: Path) -> None:
    """An authority of our own, and the server's certificate for this machine; both for a month."""
    if (folder / "server.pem").exists():
        return
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, key: Any, issuer: str, issuer_key: Any, authority: bool) -> x509.Certificate:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        return builder.sign(issuer_key, hashes.SHA256())

    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = certificate("FedSieve example", authority_key, "FedSieve example", authority_key, True)
    server = certificate("localhost", server_key, "FedSieve example", authority_key, False)
    write_secret(
        folder / "server.key",
        server_key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()),
    )
    (folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(Encoding.PEM))


def make_key(folder: Path, name: str) -> None:
    """A SuperNode's pair of keys."""
    if (folder / name).exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def write_secret(path: Path, content: bytes) -> None:
    """For the owner's eyes only."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def make_data(folder: Path, sites: int) -> list[Path]:
    """Each site's own examples in a file."""
    sys.path.insert(0, str(APP))
    from sieve_app.task import shares

    paths = []
    for number, (x, y) in enumerate(shares(sites)):
        paths.append(folder / f"site-{number}.npz")
        np.savez(paths[-1], x=x.numpy(), y=y.numpy())
    return paths


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def port_is_open(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true: Any, what: str, patience: float = PATIENCE, every: float = 0.5) -> Any:
    """Look again and again, for as long as patience lasts; what was seen in the end."""
    end = time.monotonic() + patience
    while not (found := true()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {patience:.0f} s for {what}")
        time.sleep(every)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("federation"), help="keys, data, logs and state")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if (given.folder / "ca.crt").exists():  # an earlier federation's
        shutil.rmtree(given.folder)
    elif given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"--folder: {given.folder} holds something else than a federation; use a new folder")
    with Federation(given.folder) as federation:
        federation.start_superlink()
        print("SuperLink with TLS on port", federation.port)
        for number, data in enumerate(make_data(federation.folder, given.nodes)):
            federation.register(f"site-{number}")
            federation.start_supernode(f"site-{number}", data)
            print(f"SuperNode site-{number}")
        state = str(federation.folder / "state")
        run = federation.submit(**{"num-server-rounds": given.rounds, "state-dir": state, "min-nodes": given.nodes})
        print("run", run)
        print(federation.wait_for_run(run))
    results = json.loads((federation.folder / "state" / "results.json").read_text(encoding="utf-8"))
    for number, metrics in results["evaluate_metrics_serverapp"].items():
        print(f"round {number}: test accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
