"""`tsqp image` and `tsqp measure`: the guest image of a confidential VM, and its measurement."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from protocol.errors import SettingsError, describe
from tsqp.cli.config import CONTEXT, PATH, config_option, read_listen
from tsqp.deploy.image import INITRAMFS, LOCK, Launch, Lock, Suite, fetch, first_difference
from tsqp.extras import needing
from tsqp.run.process import bytes_for_people

# OVMF.amdsev.fd of Debian unstable.
TESTED_FIRMWARE = "3e4fd0b3fe3b2dbe481c3d9e99418a034174f26cbe1f55aa212b0f18c12d2d6f"
_OPTIONS = (
    click.option("--vcpus", type=click.IntRange(1, 512), required=True, help="As the host starts."),
    click.option("--vcpu-type", default="EPYC-v4", show_default=True, help="QEMU's -cpu."),
    click.option(
        "--ovmf",
        type=PATH,
        metavar="FILE",
        help="Firmware with hashes of the kernel: OVMF.amdsev.fd of Debian's package ovmf-amdsev.",
    ),
    click.option(
        "--ovmf-sha256",
        default=TESTED_FIRMWARE,
        metavar="HEX",
        help="What the firmware must be; default: of ovmf-amdsev 2026.08+ds-2, which is tested.",
    ),
    click.option(
        "--host-data",
        default="0" * 64,
        metavar="HEX",
        help="32 bytes that the report says and nothing measures.",
    ),
)


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `read_launch`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_launch(
    vcpus: int, vcpu_type: str, ovmf: Path | None, ovmf_sha256: str, host_data: str
) -> Launch:
    """Return how the host starts an image. Raises SettingsError, for other firmware, too."""
    if ovmf is None:
        raise SettingsError("--ovmf", got="none", expected="OVMF.amdsev.fd, or --no-tee to run")
    SettingsError.unless(
        re.fullmatch("[0-9a-f]{64}", host_data),
        "--host-data",
        describe(host_data),
        "64 hexadecimal digits in lower case",
    )
    with SettingsError.for_os(str(ovmf), "firmware"):
        firmware = hashlib.sha256(ovmf.read_bytes()).hexdigest()
    SettingsError.unless(ovmf_sha256 == firmware, str(ovmf), f"SHA-256 {firmware}", ovmf_sha256)
    return Launch(vcpus, vcpu_type, ovmf, bytes.fromhex(host_data))


def measured(image: Path, launch: Launch) -> bytes:
    """Return what SEV-SNP measures, 48 bytes. Raises SettingsError, also without the library."""
    from tsqp.deploy.image import measure

    with needing("tsqp measure", "the extra deploy: pip install '.[deploy]'"):
        return measure(image, launch)


_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(context_settings=CONTEXT)
@config_option
def image() -> None:
    """Make the image that a confidential VM starts: kernel, initramfs, command line."""


@image.command(context_settings=CONTEXT)
@click.option("--output", "-o", type=_DIRECTORY, required=True, help="New directory for the image.")
@click.option(
    "--lock",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What to build it of, by SHA-256; default: today's packages, written to lock.json in it.",
)
@click.option(
    "--packages",
    type=_EXISTING,
    multiple=True,
    metavar="FOLDER",
    help="Saved packages and wheels: taken from here before any archive. Repeatable.",
)
@click.option("--save", type=_DIRECTORY, metavar="FOLDER", help="Keep all packages in this folder.")
@click.option("--small", is_flag=True, help="Without torch and runner: it says how it stands.")
@click.option("--suite", type=click.Choice(get_args(Suite)), help="Default: bookworm.")
@click.option("--torch-index", metavar="URL", help="Of builds of torch without CUDA.")
@click.option("--source", type=_EXISTING, help="Checkout of this project; default: this one's.")
@click.option("--scratch", type=_EXISTING, help="Where 5 GB of temporary files go.")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads; the result is the same.")
@config_option
def build(
    *,
    output: Path,
    lock: Path | None,
    packages: tuple[Path, ...],
    save: Path | None,
    small: bool,
    suite: Suite | None,
    torch_index: str | None,
    source: Path | None,
    scratch: Path | None,
    jobs: int | None,
) -> None:
    """Build an image; tsqp image configure says what it runs.

    Two builds of one lock and one source give the same files, bit by bit. Needs root, mmdebstrap
    and apt.
    """
    from tsqp.deploy import build as making
    from tsqp.deploy.launch import least_memory_mib

    def progress(step: str) -> None:
        click.echo(f"{output}: {step}", err=True)

    checkout = source or Path(__file__).parents[2]
    SettingsError.unless(
        (checkout / "pyproject.toml").is_file(),
        str(checkout),
        "no pyproject.toml",
        "--source: a checkout",
    )
    if lock is not None:
        SettingsError.unless(
            suite is None and torch_index is None, "--lock", "--suite or --torch-index", "it alone"
        )
        parts = Lock.load(lock)
        SettingsError.unless(
            parts.small == small,
            str(lock),
            "a lock of the other kind",
            "--small" if parts.small else "no --small",
        )
    else:
        progress("look up today's packages")
        parts = making.resolve(
            suite or "bookworm",
            checkout,
            small=small,
            torch_index=torch_index,
            scratch=scratch,
        )
    if save is not None:
        fetch(parts.artifacts, save, packages)
        packages = (save, *packages)
    jobs = jobs or os.cpu_count() or 1
    making.build(parts, checkout, output, progress, packages=packages, jobs=jobs, scratch=scratch)
    (output / LOCK).write_bytes(parts.to_bytes())
    size = bytes_for_people((output / INITRAMFS).stat().st_size)
    least = least_memory_mib(output)
    click.echo(f"{output}: {size} of initramfs, for guests of {least} MiB of memory at least")


@image.command(context_settings=CONTEXT)
@click.argument("image", type=_EXISTING)
@click.argument("arguments", nargs=-1)
@click.option("--manifest-digest", metavar="HEX", help="The model at /model must be this one.")
@config_option
def configure(*, image: Path, arguments: tuple[str, ...], manifest_digest: str | None) -> None:
    """Write what IMAGE runs into its command line: tsqp image configure DIR -- serve /model ...

    ARGUMENTS are tee-runner's, or doctor alone. Without any: serve /model --host 0.0.0.0. The
    command line is measured: another one is another image to its clients. Its host reads it, a
    prompt in it as well.
    """
    from tsqp.deploy.launch import configure as write

    if arguments:
        # What the guest's program would refuse is refused here.
        from tsqp.cli.main import command as tsqp
        from tsqp.cli.tee_runner import command as tee_runner

        rest = list(arguments)
        found: click.Command = tsqp if rest[0] == "doctor" else tee_runner
        while isinstance(found, click.Group):
            name = rest.pop(0) if rest else ""
            inside = found.get_command(click.Context(found), name)
            if inside is None:
                raise SettingsError(
                    "arguments", got=describe(name), expected="a command of tee-runner"
                )
            found = inside
        found.make_parser(click.Context(found)).parse_args(rest)
    SettingsError.unless(
        arguments[:1] != ("doctor",) or manifest_digest is None,
        "--manifest-digest",
        "doctor",
        "a command with a model",
    )
    click.echo(write(image, arguments, manifest_digest))


@image.command(context_settings=CONTEXT)
@click.argument("image", type=_EXISTING)
@launch_options
@click.option("--no-tee", is_flag=True, help="Emulate any processor. Nothing is confidential.")
@click.option("--memory-mib", type=click.IntRange(min=1), default=4096, help="Of the guest.")
@click.option("--disk", type=PATH, metavar="FILE", help="What is at /model, as mkfs.erofs made it.")
@click.option(
    "--publish",
    callback=read_listen,
    metavar="HOST:PORT",
    help="Where clients reach the guest's port 8000. Without it, the guest has no network.",
)
@click.option(
    "--reach-network", is_flag=True, help="Let the guest reach its host (10.0.2.2), and beyond."
)
@click.option(
    "--vsock",
    type=PATH,
    metavar="PATH",
    help="Have vhost-device-vsock connect what the guest asks of vsock://2:PORT to PATH_PORT.",
)
@click.option("--kernel-vsock", is_flag=True, help="Have the host's kernel do so (vhost-vsock).")
@click.option("--cid", type=click.IntRange(3, 2**32 - 2), default=3, help="The guest's, of vsock.")
@click.option(
    "--shared-memory",
    type=PATH,
    metavar="FILE",
    help="Memory that both map: in the guest, resource2 of the PCI device 0000:00:10.0.",
)
@click.option(
    "--show",
    type=click.Choice(["qemu", "libvirt"]),
    help="Say what would be started, and start nothing.",
)
@config_option
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    image: Path,
    vcpus: int,
    vcpu_type: str,
    ovmf: Path | None,
    ovmf_sha256: str,
    host_data: str,
    no_tee: bool,
    memory_mib: int,
    disk: Path | None,
    publish: tuple[str, int] | None,
    reach_network: bool,
    vsock: Path | None,
    kernel_vsock: bool,
    cid: int,
    shared_memory: Path | None,
    show: str | None,
) -> None:
    """Start IMAGE in a virtual machine, its console on this terminal: with SEV-SNP, or --no-tee.

    Emulation measures nothing: with --ovmf, its simulated evidence repeats what tsqp measure says.
    Exit status: QEMU's.
    """
    from tsqp.deploy.launch import GuestMachine, domain, least_memory_mib

    SettingsError.unless(
        vsock is None or not kernel_vsock, "--vsock", "--kernel-vsock, too", "one of them"
    )
    if no_tee and ovmf is None:
        for name in ("vcpu_type", "ovmf_sha256", "host_data"):
            SettingsError.unless(
                context.get_parameter_source(name) is not ParameterSource.COMMANDLINE,
                f"--{name.replace('_', '-')}",
                "--no-tee without --ovmf",
                "what measures",
            )
    launch = (
        None
        if no_tee and ovmf is None
        else read_launch(vcpus, vcpu_type, ovmf, ovmf_sha256, host_data)
    )
    machine = GuestMachine(
        image=image,
        launch=None if no_tee else launch,
        measurement=None if launch is None else measured(image, launch),
        vcpus=vcpus,
        memory_mib=memory_mib,
        model=disk,
        publish=publish,
        reach_network=reach_network,
        vsock=vsock,
        kernel_vsock=kernel_vsock,
        cid=cid,
        shared_memory=shared_memory,
    )
    if show is not None:
        click.echo(domain(machine, "tsqp") if show == "libvirt" else f"{machine}\n", nl=False)
        return
    if no_tee:
        click.secho(
            "NO TEE: the host of this guest reads its memory. Nothing is confidential.",
            err=True,
            fg="red",
            bold=True,
        )
    if machine.measurement is not None:
        click.echo(f"measurement {machine.measurement.hex()}", err=True)
    left = memory_mib - least_memory_mib(image)
    click.echo(
        f"memory: {memory_mib} MiB, of which {left} MiB are left for model, cache and pads,"
        " which the guest keeps in memory alone",
        err=True,
    )
    where = "by no network" if publish is None else f"at {publish[0]}:{publish[1]}"
    click.echo(f"clients: {where}; the guest's console follows", err=True)
    context.exit(machine.run())


@image.command(context_settings=CONTEXT)
@click.argument("left", type=_EXISTING)
@click.argument("right", type=_EXISTING)
@config_option
def compare(left: Path, right: Path) -> None:
    """Compare two images, and name the first file that differs."""
    differs = first_difference(left, right)
    SettingsError.unless(
        differs is None, f"{right}: {differs}", "another content", f"that of {left}"
    )
    click.echo("identical")


@click.command(context_settings=CONTEXT)
@click.argument("image", type=click.Path(exists=True, file_okay=False, path_type=Path))
@launch_options
@click.option("--appraisal", type=PATH, metavar="FILE", help="Write the table [snp] for clients.")
@click.option(
    "--minimum-tcb",
    multiple=True,
    metavar="PRODUCT=N,N,N,N[,FMC]",
    help="For --appraisal: the oldest firmware (boot loader, TEE, SNP, microcode) of a product that"
    " may run it. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, allow_from_autoenv=False)
@config_option
def measure(
    *,
    image: Path,
    vcpus: int,
    vcpu_type: str,
    ovmf: Path | None,
    ovmf_sha256: str,
    host_data: str,
    appraisal: Path | None,
    minimum_tcb: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what SEV-SNP measures when QEMU starts IMAGE, a directory of tsqp image build.

    Another byte of kernel, initramfs or command line, another firmware, vCPU type or number of
    vCPUs gives another measurement. Registers of TDX are not computed.
    """
    from tsqp.deploy.launch import GUEST_POLICY, read_minimum, snp_table

    minimum = read_minimum(minimum_tcb)
    SettingsError.unless(
        (appraisal is not None) == bool(minimum),
        "tsqp measure",
        "--minimum-tcb alone" if minimum else "--appraisal alone",
        "--appraisal and --minimum-tcb",
    )
    launch = read_launch(vcpus, vcpu_type, ovmf, ovmf_sha256, host_data)
    measurement = measured(image, launch)
    if appraisal is not None:
        appraisal.write_text(snp_table(measurement, launch.host_data, minimum))
    facts = {
        "measurement": measurement.hex(),
        "policy": f"{GUEST_POLICY:#x}",
        "vcpus": vcpus,
        "vcpu_type": vcpu_type,
        "ovmf_sha256": ovmf_sha256,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        click.echo(f"{name:12} {value}")
