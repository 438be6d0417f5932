"""The container image: what is in it, and that it serves as another user than root on a read-only root."""

import http.client
import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kernels.cpu.library import ISA_TO_FEATURES
from tests.cluster.served_cluster import wait_until
from tests.harness.kuberay import head_and_worker
from tests.image.container import IMAGE, Container, Image, buildah, entered, free_port, running

pytestmark = [pytest.mark.image, pytest.mark.timeout(300)]
MAX_COMPRESSED_BYTES = 900_000_000
START_S = 90.0
PROMPT = "Pets: Tom dog, Lucy parrot. Question: which pet has Lucy?"


def packages(image: Image) -> Path:
    [found] = image.root.glob("opt/baton/lib/python3.*/site-packages")
    return found


def ask(port: int) -> str:
    """The text of an answer to the prompt. Raises OSError while nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"prompt": PROMPT, "temperature": 0, "max_tokens": 8})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        text: str = json.loads(connection.getresponse().read())["choices"][0]["text"]
    finally:
        connection.close()
    return text


def first_answer(container: Container) -> str:
    """Asks again and again until the port answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and container.process.poll() is None:
        with suppress(OSError, KeyError):
            return ask(container.port)
        time.sleep(0.05)
    container.process.kill()
    raise AssertionError(container.process.communicate()[0])


def test_there_is_no_compiler_and_no_triton(image: Image) -> None:
    programs = {path.name for folder in ("usr/bin", "opt/baton/bin") for path in (image.root / folder).iterdir()}
    assert [name for name in programs if name in ("cc", "c++", "clang") or name.startswith(("gcc", "g++"))] == []
    assert [path.name for path in packages(image).iterdir() if "triton" in path.name or "nvidia" in path.name] == []


def test_kernels_of_all_instruction_sets_are_there(image: Image) -> None:
    libraries = {path.name.partition("-")[0] for path in (packages(image) / "kernels/cpu/prebuilt").glob("*.so")}
    assert libraries == set(ISA_TO_FEATURES)


def test_it_is_small(folder: Path, image: Image, figures: dict[str, float], tmp_path: Path) -> None:
    """As a registry keeps it: layers compressed by gzip. The demo model, in it, is 3 MB."""
    buildah(folder, "push", "--quiet", IMAGE, f"oci:{tmp_path / 'packed'}:{IMAGE}")
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "packed" / "blobs").rglob("*") if path.is_file())
    figures["compressed_mb"] = round(num_bytes / 1e6)
    assert num_bytes < MAX_COMPRESSED_BYTES


def test_it_serves_and_ends_on_sigterm(image: Image, volume: Path, figures: dict[str, float]) -> None:
    began_s = time.monotonic()
    with running(image, volume, "--insecure") as container:
        answer = first_answer(container)
        figures["first_token_s"] = round(time.monotonic() - began_s, 1)
        figures |= {"processor_s_by_then": round(container.cpu_s(), 1), "load_average": round(os.getloadavg()[0], 1)}
        assert answer == " parrot."
        assert set(container.first.uids()) == {image.user} != {0}
        refused = container.execute("touch", "/opt/baton/new", "/baton/new", "/etc/new").stderr
        assert refused.count("Read-only file system") == 3
        check = image.config["Healthcheck"]["Test"][
            1:
        ]  # the port answers before `baton up` has seen all of its cluster
        wait_until(lambda: container.execute(*check).returncode == 0, "the container is healthy")
        wait_until(lambda: container.runs("logs"), "logs are shown")
        began_s = time.monotonic()
        status, output = container.stop()
        figures["stop_s"] = round(time.monotonic() - began_s, 1)
    assert status == 0, output
    assert "stopped default: nothing is left of it" in output
    assert "router | " in output, "logs are shown"
    assert not list((volume / "cache/baton").glob("kernels*")), "nothing was compiled"


def test_a_cluster_that_crashes_ends_the_container(image: Image, volume: Path) -> None:
    with running(image, volume, "--insecure") as container:
        first_answer(container)
        [raylet] = [one for one in container.first.children(recursive=True) if one.name() == "raylet"]
        raylet.kill()
        output, _ = container.process.communicate(timeout=START_S)
        assert container.process.returncode == 1
    assert "Ray's raylet ended" in output


def test_a_head_of_the_template_for_kuberay_becomes_ready(image: Image, volume: Path) -> None:
    """By the shell that KubeRay starts Ray with; then its workers' init container finds it by `ray health-check`."""
    port = free_port()
    head, _ = head_and_worker(port, free_port())
    with entered(image, volume, "/bin/bash", "-lc", head.start("--head")) as process:
        wait_until(lambda: head.is_healthy() or process.poll() is not None, "its probes answer", START_S)
        assert process.poll() is None, process.communicate()[0]
        check = ("/bin/bash", "-c", f"ray health-check --address 127.0.0.1:{port}")
        assert Container(image, process, port).execute(*check).returncode == 0


def test_without_keys_it_opens_no_port_to_others(image: Image, volume: Path) -> None:
    with running(image, volume) as container:
        output, _ = container.process.communicate(timeout=START_S)
    assert container.process.returncode == 78
    assert "without TLS, keys, prompts and answers can be read on the wire" in output


def test_shared_memory_that_is_too_small_is_named_with_its_option(image: Image, volume: Path) -> None:
    with running(image, volume, "--insecure", "--arena-bytes", "128MiB", shm_size="64m") as container:
        output, _ = container.process.communicate(timeout=START_S)
    assert container.process.returncode == 78
    assert "--shm-size" in output


def test_an_orderly_end_amid_the_start(image: Image, volume: Path) -> None:
    with running(image, volume, "--insecure") as container, suppress(subprocess.TimeoutExpired):
        container.process.wait(timeout=2.0)
        status, output = container.stop()
        assert status == 0, output
        assert "ending what was started" in output
