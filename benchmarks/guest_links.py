"""Round trips between an emulated guest and its host, over each link, beside loopback in the guest.

    python -m benchmarks.guest_links --image DIR [--round-trips 400] [--spin-us 200]

--image: of tsqp image build, whole. A Linear of 3,840 bytes from tensor to tensor, to `gpu-service
--device
null`: of the host over vsock (vhost-device-vsock on PATH), over memory that both map, and over TCP
through QEMU's user network; and of the guest itself, over a Unix socket and over TCP. Each link's
blocks alternate. Emulated processors are many times slower than real ones: what counts is the
ratio to loopback over the same kind of socket in the guest.

It starts a copy of the image with another program in it, so that nothing that is measured changes.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Found, Options, Place, main, say
from protocol.errors import SettingsError
from tsqp.deploy.image import COMMAND_LINE, FACTS, INITRAMFS, KERNEL
from tsqp.deploy.launch import GuestMachine

MEMORY_BYTES = 16 * 1024 * 1024
# Where the guest has them: its host as QEMU's user network names it, and resource2 of the device.
_PORT = 5000
_DEVICE = "/sys/bus/pci/devices/0000:00:10.0/resource2"

_IN_GUEST = """
import gc, json, os, statistics, subprocess, sys, time
import torch
from protocol.transport import open_channel
from protocol.messages import LinearRequest
from protocol.prepared import PreparedRequest
from protocol.tensors import from_torch, short_name
endpoints, rounds, spin_us = json.loads(sys.argv[1])
service = "from tsqp.cli.gpu_service import main; main()"
for name in ("unix in the guest", "tcp in the guest"):
    command = [sys.executable, "-I", "-c", service, "demo", "--device", "null",
               "--arithmetic", "float", "--bind", endpoints[name], "--spin-us", str(spin_us)]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in started.stderr:
        if " ready " in line:
            break
torch.set_num_threads(1)
hidden = torch.zeros(5, 192)
pings = {}
for name, endpoint in endpoints.items():
    channel = open_channel(endpoint, spin_us=spin_us)
    request = LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=from_torch(hidden))
    prepared = PreparedRequest(request, tuple(hidden.shape), short_name(hidden.dtype))
    def ping(channel=channel, prepared=prepared):
        prepared.output(channel.wait(channel.start(prepared, hidden)))
    pings[name] = ping
times = {name: [] for name in pings}
gc.collect(); gc.freeze()
while len(times[name]) < rounds:
    for each, ping in pings.items():
        for number in range(25):
            began = time.perf_counter_ns()
            ping()
            if number >= 5:
                times[each].append((time.perf_counter_ns() - began) / 1e3)
found = {
    name: [statistics.median(one), statistics.quantiles(one, n=10)[-1]]
    for name, one in times.items()
}
print("links " + json.dumps(found), flush=True)
"""


def measuring_copy(image: Path, folder: Path, words: list[object]) -> Path:
    """Return an image that runs `_IN_GUEST` where the whole one starts its runner."""
    copy = folder / "image"
    copy.mkdir()
    start = f"import sys\nsys.argv[1:] = [{json.dumps(words)!r}]\n{_IN_GUEST}"
    program = folder / "tree/usr/lib/tsqp/start.py"
    program.parent.mkdir(parents=True)
    program.write_text(start)
    pack = "find . -mindepth 1 | cpio --quiet --create --format=newc | zstd --quiet"
    added = subprocess.run(
        ["/bin/sh", "-c", pack], cwd=folder / "tree", check=True, capture_output=True
    ).stdout
    for name in (KERNEL, COMMAND_LINE, FACTS):
        shutil.copyfile(image / name, copy / name)
    (copy / INITRAMFS).write_bytes((image / INITRAMFS).read_bytes() + added)
    return copy


def measure(options: Options, place: Place) -> Found:
    """Start the copy, and read what it printed. Raises TsqpError."""
    SettingsError.unless(options.image, "--image", "nothing", "a folder of tsqp image build")
    folder = place.folder
    memory, console = folder / "memory", folder / "console"
    memory.write_bytes(bytes(MEMORY_BYTES))
    spins = ("--device", "null", "--arithmetic", "float", "--spin-us", str(options.spin_us))
    place.service("demo", *spins, bind=f"unix://{folder}/vm_{_PORT}")
    place.service("demo", *spins, bind=f"ivshmem://{memory},{folder}/vm_{_PORT + 1}")
    tcp = place.service("demo", *spins, transport="tcp")
    endpoints = {
        "unix in the guest": "unix:///run/tsqp/own",
        "tcp in the guest": "tcp://127.0.0.1:5555",
        "vsock": f"vsock://2:{_PORT}",
        "ivshmem": f"ivshmem://{_DEVICE},2:{_PORT + 1}",
        "tcp": f"tcp://10.0.2.2:{tcp.rpartition(':')[2]}",
    }
    machine = GuestMachine(
        image=measuring_copy(
            Path(options.image), folder, [endpoints, options.round_trips, options.spin_us]
        ),
        launch=None,
        vcpus=2,
        memory_mib=4096,
        reach_network=True,
        vsock=folder / "vm",
        shared_memory=memory,
    )
    with console.open("wb") as output:
        machine.run(output=output.fileno())
    said = console.read_text(errors="replace")
    found = [line for line in said.splitlines() if line.startswith("links ")]
    if not found:
        sys.exit(said)
    times: dict[str, list[float]] = json.loads(found[0].removeprefix("links "))
    for name, (p50, p90) in times.items():
        own = times["tcp in the guest" if "tcp" in name else "unix in the guest"][0]
        say(f"{name:18} p50 {p50:7.0f} us  p90 {p90:7.0f} us  {p50 / own:5.2f} of loopback")
    return {"p50_p90_us": times}, True


if __name__ == "__main__":
    main(__doc__, measure, image="", round_trips=400, spin_us=200.0)
