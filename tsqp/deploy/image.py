"""An image: its files by name, what it is made of, and what an AMD processor measures of it.

The lock names packages and wheels, by SHA-256. They come from folders or from their addresses, and
with no other content than the lock says.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from protocol.errors import SettingsError
from protocol.validation import validate_file

Suite: TypeAlias = Literal["trixie", "bookworm"]

# The Python of each suite. Debian 12's user space runs on Debian 13's kernel, too.
PYTHONS: dict[Suite, str] = {"trixie": "3.13", "bookworm": "3.11"}

KERNEL = "vmlinuz"

INITRAMFS = "initrd"

COMMAND_LINE = "cmdline"

FACTS = "image.json"

LOCK = "lock.json"

MEASURED = (KERNEL, INITRAMFS, COMMAND_LINE)


def require_image(directory: Path) -> None:
    """Raise SettingsError for a directory without an image in it."""
    for name in MEASURED:
        SettingsError.unless(
            (directory / name).is_file(), str(directory / name), "no such file", "of an image"
        )


def first_difference(left: Path, right: Path) -> str | None:
    """Return the first file in which two images differ, None for none. Raises SettingsError."""
    for directory in (left, right):
        require_image(directory)
    for name in (*MEASURED, FACTS):
        if (left / name).read_bytes() != (right / name).read_bytes():
            return name
    return None


_Digest: TypeAlias = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class Artifact(BaseModel):
    """A package or wheel of another project, whose content is known before it is fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    version: str
    url: str
    sha256: _Digest

    @property
    def file(self) -> str:
        """Its name in a folder of saved packages."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @model_validator(mode="after")
    def _file_is_a_name(self) -> Artifact:
        if "/" in self.file or not self.file.endswith((".deb", ".whl")):
            raise ValueError("a url that ends in the name of a package")
        return self


class Lock(BaseModel):
    """Everything that a build reads beside this project's source.

    `root`: installed in the image. `tools`: what builds it, by packages as well, so that its bits
    are no matter of the machine that builds. `build`: wheels that build ours.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: Suite
    kernel: Artifact
    root: tuple[Artifact, ...]
    tools: tuple[Artifact, ...]
    wheels: tuple[Artifact, ...] = ()
    build: tuple[Artifact, ...] = ()

    @property
    def small(self) -> bool:
        """Whether there is no runner in it."""
        return not self.wheels

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All of them, each once."""
        return tuple(
            dict.fromkeys((self.kernel, *self.root, *self.tools, *self.wheels, *self.build))
        )

    def to_bytes(self) -> bytes:
        """Return the content of a lock file."""
        return (json.dumps(self.model_dump(), indent=1) + "\n").encode()

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read a lock file. Raises SettingsError."""
        with (
            SettingsError.for_os(str(path), "a lock file"),
            SettingsError.instead_of(ValueError, str(path), "another content", "JSON"),
        ):
            content = json.loads(path.read_bytes())
        return validate_file(cls, content, str(path), SettingsError)


_TIMEOUT_S = 60


def fetch(artifacts: Iterable[Artifact], into: Path, folders: Sequence[Path] = ()) -> None:
    """Put every one into a directory, from the first folder that has it, else from its address.

    Raises SettingsError for one that is nowhere, or has another content.
    """
    into.mkdir(parents=True, exist_ok=True)
    for artifact in artifacts:
        target = into / artifact.file
        if not target.exists():
            saved = (folder.absolute() / artifact.file for folder in folders)
            url = next((path.as_uri() for path in saved if path.exists()), artifact.url)
            SettingsError.unless(
                url.startswith(("file://", "http://", "https://")),
                artifact.file,
                "no folder that has it",
                "--packages",
            )
            part = target.with_suffix(".part")
            try:
                with urlopen(url, timeout=_TIMEOUT_S) as reply, part.open("wb") as file:  # noqa: S310
                    shutil.copyfileobj(reply, file)
            except (OSError, HTTPException) as error:
                # Debian keeps no old versions.
                raise SettingsError(
                    artifact.url, got=str(error), expected="it there, or in a folder of --packages"
                ) from None
            part.rename(target)
        with target.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != artifact.sha256:
            target.unlink()
            raise SettingsError(artifact.url, got=f"SHA-256 {got}", expected=artifact.sha256)


@dataclass(frozen=True)
class Launch:
    """What the processor is told. `host_data`: 32 bytes, in the report and not measured."""

    vcpus: int
    vcpu_type: str
    firmware: Path
    host_data: bytes = bytes(32)


# Of QEMU and KVM: SNP active, nothing else; Linux 6.12 on a host sets no more by itself.
_GUEST_FEATURES = 0x1


def measure(image: Path, launch: Launch) -> bytes:
    """Return the 48 bytes that a report of SEV-SNP has as its measurement.

    Firmware, hashes of kernel, initramfs and command line, and the start of each vCPU, as QEMU lays
    them out with kernel-hashes=on. Raises SettingsError for files that are not such ones,
    and ImportError without the package `sev-snp-measure`.
    """
    from sevsnpmeasure import guest, ovmf, sev_mode, vcpu_types

    require_image(image)
    SettingsError.unless(
        launch.vcpu_type in vcpu_types.CPU_SIGS,
        "vcpu type",
        launch.vcpu_type,
        f"one of {', '.join(sorted(vcpu_types.CPU_SIGS))}",
    )
    # Other firmware would start a kernel that nothing measured.
    firmware = str(launch.firmware)
    expected = "firmware that checks hashes of the kernel, such as Debian's OVMF.amdsev.fd"
    with (
        SettingsError.instead_of(
            (RuntimeError, ValueError, KeyError, IndexError, AssertionError),
            firmware,
            "another content",
            expected,
        ),
        SettingsError.for_os(firmware, expected),
    ):
        found = ovmf.OVMF(firmware).has_metadata_section(ovmf.SectionType.SNP_KERNEL_HASHES)
    SettingsError.unless(found, firmware, "no place for them", expected)
    with SettingsError.instead_of(
        UnicodeDecodeError, str(image / COMMAND_LINE), "another content", "ASCII"
    ):
        line = (image / COMMAND_LINE).read_text(encoding="ascii")
    return bytes(
        guest.calc_launch_digest(
            sev_mode.SevMode.SEV_SNP,
            launch.vcpus,
            vcpu_types.CPU_SIGS[launch.vcpu_type],
            firmware,
            str(image / KERNEL),
            str(image / INITRAMFS),
            line,
            _GUEST_FEATURES,
        )
    )
