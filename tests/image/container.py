"""An image that buildah has built, and containers of it: its files, its user, its environment and its command."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ENTER = Path(__file__).with_name("enter.sh")
IMAGE = "baton-image"
BUILDAH_TIMEOUT_S = 300.0
STOP_S = 10.0
"""The grace of `docker stop`."""


@dataclass(frozen=True)
class Image:
    """An image: its configuration, and its files, mounted at `root`."""

    config: dict[str, Any]
    root: Path

    @property
    def user(self) -> int:
        return int(self.config["User"])


@dataclass(frozen=True)
class Container:
    """A container that runs; its first process is tini. HTTP at `port`."""

    image: Image
    process: subprocess.Popen[str]
    port: int

    @property
    def first(self) -> psutil.Process:
        """The process that has the number 1 inside."""
        [first] = psutil.Process(self.process.pid).children()
        return first

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command inside, as `docker exec` does."""
        inside = ["nsenter", "--mount", "--pid", "--root", "--target", str(self.first.pid)]
        user = ["setpriv", f"--reuid={self.image.user}", f"--regid={self.image.user}", "--clear-groups"]
        whole = [*inside, *user, *command]
        env = _environment(self.image)
        return subprocess.run(whole, env=env, capture_output=True, text=True, timeout=60, check=False)

    def cpu_s(self) -> float:
        """Sums the processor time of all processes so far, ended ones too."""
        total_s = 0.0
        for process in (self.first, *self.first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total_s += sum(process.cpu_times()[:4])
        return total_s

    def runs(self, command: str) -> bool:
        """Tells whether a `baton` command of that name is under way inside."""
        for process in self.first.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a zombie too
                if command in process.cmdline():
                    return True
        return False

    def stop(self) -> tuple[int, str]:
        """Sends SIGTERM to the first process; returns exit status and output. Fails where that takes over 10 s."""
        self.first.terminate()
        output, _ = self.process.communicate(timeout=STOP_S)
        return self.process.returncode, output


def buildah(folder: Path, *arguments: str) -> str:
    """Returns what a command of buildah prints, with the images of a folder."""
    storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
    done = subprocess.run(
        ["buildah", *storage, *arguments], capture_output=True, text=True, timeout=BUILDAH_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def mounted_image(folder: Path) -> Iterator[Image]:
    config = json.loads(buildah(folder, "inspect", "--type", "image", IMAGE))["Docker"]["config"]
    container = buildah(folder, "from", "--pull-never", IMAGE)
    try:
        yield Image(config, Path(buildah(folder, "mount", container)))
    finally:
        buildah(folder, "rm", container)


@contextmanager
def running(image: Image, volume: Path, *arguments: str, shm_size: str = "1g") -> Iterator[Container]:
    """Runs the image's entrypoint with arguments; what still runs at the end is killed."""
    port = free_port()
    command = [*image.config["Entrypoint"], *arguments, "--http-port", str(port), "--grpc-port", "0"]
    with entered(image, volume, *command, shm_size=shm_size) as process:
        yield Container(image, process, port)


@contextmanager
def entered(image: Image, volume: Path, *command: str, shm_size: str = "1g") -> Iterator[subprocess.Popen[str]]:
    """Runs a command in place of the entrypoint; what still runs at the end is killed."""
    os.chown(volume, image.user, image.user)
    unshare = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "bash", str(ENTER)]
    place = [str(image.root), shm_size, str(volume), str(image.user), image.config["WorkingDir"]]
    with subprocess.Popen(
        [*unshare, *place, *command],
        env=_environment(image),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _environment(image: Image) -> dict[str, str]:
    return dict(one.split("=", 1) for one in image.config["Env"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
