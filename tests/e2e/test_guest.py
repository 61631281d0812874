"""A whole image under emulation: it answers as the runner outside, and proves what it is.

Its operators go to a gpu-service of the host over vsock. Emulation measures nothing: the guest's
simulated evidence repeats what `tsqp image run` computed.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from signal import SIGTERM
from typing import Any

import openai
import pytest

from tests.kit.guest import build, missing, unpack
from tests.kit.service import ENVIRONMENT, Forked, Service, run, running_server, running_service
from tsqp.client import NotAttestedError, connect
from tsqp.deploy.image import COMMAND_LINE, INITRAMFS, KERNEL, LOCK, first_difference
from tsqp.run.settings import model_directory

BUILD_S, BOOT_S = 3600, 600
MAX_IMAGE_BYTES = 450_000_000
PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "8")
CHAT: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
OPTIONS: Any = {"model": "demo", "seed": 7, "max_tokens": 16}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BUILD_S + 3 * BOOT_S)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where everything is, for as long as the tests run."""
    if (reason := missing("mkfs.erofs")) is not None:
        pytest.skip(reason)
    made = tmp_path_factory.mktemp("g")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def tools(folder: Path) -> Path:
    """The host's end of vsock, and firmware that checks hashes of the kernel."""
    return unpack(("vhost-device-vsock", "ovmf-amdsev"), folder / "unstable")


@pytest.fixture(scope="module")
def image(folder: Path) -> Path:
    """A whole image of today's packages."""
    made = build(folder / "image", "--save", folder / "packages", timeout_s=BUILD_S)
    assert (made / INITRAMFS).stat().st_size + (made / KERNEL).stat().st_size <= MAX_IMAGE_BYTES
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    """A gpu-service at which the guest's vsock://2:5000 ends."""
    with running_service("demo", f"unix://{folder}/vm.sock_5000", "--threads", "1") as running:
        yield running


def test_another_build_of_its_lock_is_the_same(image: Path, folder: Path) -> None:
    same = ("--lock", image / LOCK, "--packages", folder / "packages", "--jobs", "1")
    again = build(folder / "b/image", *same, timeout_s=BUILD_S, TZ="Asia/Tokyo", LANG="de_DE.UTF-8")
    assert first_difference(image, again) is None
    shutil.rmtree(again)


class Guest:
    """A guest that runs. `start`: words that start it, and are measured, but for its devices."""

    def __init__(self, image: Path, tools: Path, folder: Path, *devices: str | Path) -> None:
        self.firmware = tools / "usr/share/ovmf/OVMF.amdsev.fd"
        digest = hashlib.sha256(self.firmware.read_bytes()).hexdigest()
        self.start = ("--vcpus", "2", "--ovmf", str(self.firmware), "--ovmf-sha256", digest)
        path = f"{tools / 'usr/bin'}:{os.environ['PATH']}"
        self._console = (folder / "console").open("w+b")
        words = ("image", "run", image, "--no-tee", *self.start, "--vsock", folder / "vm.sock")
        self.process = Forked(
            "tsqp",
            tuple(map(str, (*words, *devices))),
            {**ENVIRONMENT, "PATH": path},
            stdout=self._console.fileno(),
        )

    def console(self) -> str:
        """Return what it has said by now."""
        return os.pread(self._console.fileno(), 2**26, 0).decode(errors="replace")

    def until(self, text: str) -> str:
        """Wait for a text on its console, and return all that stands there."""
        deadline = time.monotonic() + BOOT_S
        while text not in self.console():
            if self.process.returncode is not None or time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r}:\n{self.console()}")
            time.sleep(0.5)
        return self.console()

    def close(self) -> None:
        """End it."""
        self.process.send_signal(SIGTERM)
        self.process.kill()
        self._console.close()


def _configure(image: Path, *words: str, digest: str | None = None) -> None:
    pinned = () if digest is None else ("--manifest-digest", digest)
    done = run("tsqp", "image", "configure", str(image), *pinned, "--", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", ["vsock", "ivshmem", "tcp"])
def test_a_shielded_run_in_the_guest_says_what_one_outside_says(
    link: str, image: Path, tools: Path, folder: Path
) -> None:
    memory = folder / "memory"
    memory.write_bytes(bytes(16 * 1024 * 1024))
    bind, words = {
        "vsock": (f"unix://{folder}/vm.sock_5001", ()),
        "ivshmem": (f"ivshmem://{memory},{folder}/vm.sock_5001", ("--shared-memory", memory)),
        "tcp": ("tcp://127.0.0.1:*", ("--reach-network",)),
    }[link]
    shielded = ("generate", "demo", "--policy", "shielded", "--json", *PROMPT, "--gpu")
    with running_service("demo", bind, "--threads", "1") as service:
        port = service.endpoint.rpartition(":")[2]
        there = {
            "vsock": "vsock://2:5001",
            "ivshmem": "ivshmem:///sys/bus/pci/devices/0000:00:10.0/resource2,2:5001",
            "tcp": f"tcp://10.0.2.2:{port}",
        }[link]
        _configure(image, *shielded, there)
        with closing(Guest(image, tools, folder, *words)) as running:
            said = running.until("Power down")
        found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert found, said
        outside = run("tee-runner", *shielded, service.endpoint)
    assert outside.returncode == 0, outside.stderr
    assert len(found[0]["token_ids"]) == 8
    assert found[0]["token_ids"] == json.loads(outside.stdout)["token_ids"]


def test_clients_verify_a_guest_and_no_other_one(
    image: Path, tools: Path, folder: Path, service: Service
) -> None:
    model, disk = folder / "model", folder / "model.erofs"
    shutil.copytree(model_directory("demo"), model)
    pinned = run("tsqp", "manifest", str(model))
    digest = re.findall("[0-9a-f]{64}", pinned.stdout)[-1]
    subprocess.run(["mkfs.erofs", "--quiet", disk, model], check=True)
    serve = ("serve", "/model", "--policy", "shielded", "--served-model-name", "demo")
    _configure(
        image,
        *(*serve, "--host", "0.0.0.0", "--gpu", "vsock://2:5000", "--attest", "simulated"),
        digest=digest,
    )
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    address = f"https://127.0.0.1:{port}"
    devices = ("--disk", disk, "--publish", f"127.0.0.1:{port}")
    with closing(Guest(image, tools, folder, *devices)) as running:
        said = running.until("ready: ")
        claims = dict(re.findall(r"(\w+) ([0-9a-f]{64})", said))
        assert claims["model"] == digest
        measured = _measure(image, running)
        appraisal = _appraisal(folder, measured, claims)
        connection = connect(address, appraisal)
        with openai.OpenAI(
            base_url=connection.base_url, http_client=connection.http_client, api_key="none"
        ) as client:
            inside = client.chat.completions.create(messages=CHAT, **OPTIONS)
        for name in (KERNEL, INITRAMFS, COMMAND_LINE):
            other = _appraisal(folder, _changed(image, name, running), claims)
            with pytest.raises(NotAttestedError, match="measurement"):
                connect(address, other)
    with (
        running_server(*serve[2:], "--gpu", service.endpoint) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
    ):
        outside = client.chat.completions.create(messages=CHAT, **OPTIONS)
    assert inside.choices[0].message.content == outside.choices[0].message.content


def _measure(image: Path, running: Guest) -> str:
    done = run("tsqp", "measure", str(image), *running.start, "--json")
    measurement: str = json.loads(done.stdout)["measurement"]
    return measurement


def _changed(image: Path, name: str, running: Guest) -> str:
    """Return the measurement with another last byte of one file."""
    with (image / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        try:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
            file.flush()
            return _measure(image, running)
        finally:
            file.seek(-1, os.SEEK_END)
            file.write(last)


def _appraisal(folder: Path, measurement: str, claims: dict[str, str]) -> Path:
    path = folder / "appraisal.toml"
    said = "\n".join(f'{name} = ["{claims[name]}"]' for name in ("model", "policy", "settings"))
    path.write_text(
        'mode = "development"\nmax_age_s = 3600\n'
        f'[simulated]\nmeasurements = ["{measurement}"]\n'
        f'[claims]\n{said}\nversion = "any"\nplugins = []\nservices = ["{"00" * 32}"]\n'
    )
    return path
