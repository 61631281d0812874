"""What this machine has and lacks for either side: facts, each with what it is good for."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from protocol.errors import EvidenceError
from tee_side.protect.resumption import has_generation_id, watch
from tsqp.run.settings import DEFAULT_PORT

if TYPE_CHECKING:
    from tee_side.attest.statement import Kind

State = Literal["ok", "missing", "note"]

_PACKAGES = (
    "torch",
    "pyzmq",
    "msgpack",
    "numpy",
    "safetensors",
    "cryptography",
    "tokenizers",
    "pydantic",
    "jinja2",
    "click",
    "prompt_toolkit",
    "rich",
)
_EXTRAS = {
    "transformers": "tsqp demo and a baseline of bench: pip install '.[demo]'",
    "matplotlib": "pages of tsqp bench and leak: pip install '.[bench]'",
    "prometheus-client": "gpu-service --metrics: pip install '.[metrics]'",
}
_CPU_FEATURES = {
    "avx2": "vector instructions that torch's CPU kernels expect",
    "avx512f": "wider ones",
    "avx512_bf16": "fast bfloat16 products, which avx512 has to have",
    "aes": "pads are drawn in the kernels, which avx2 has to have",
    "vaes": "the same, which vnni and avx512 have to have",
    "avx_vnni": "fast int8 products",
    "avx512_vnni": "fast int8 products, wider, which vnni has to have",
    "amx_int8": "fast int8 matrix tiles",
    "amx_bf16": "fast bfloat16 matrix tiles",
}
_TEE_DEVICES = {"/dev/sev-guest": "AMD SEV-SNP guest", "/dev/tdx_guest": "Intel TDX guest"}
_EVIDENCE: dict[Kind, str] = {
    "snp": "of AMD SEV-SNP",
    "tdx": "of Intel TDX",
    "simulated": "for development: it proves nothing",
}


@dataclass(frozen=True)
class Finding:
    """One fact. `state`: ok, missing (something needs it), or a note; `remedy`: what mends it."""

    topic: str
    name: str
    state: State
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at the machine; nothing is changed and nothing is sent anywhere."""
    looks = (_versions, _processor, _kernels, _memory, _gpu, _tee, _attesters, _resumption, _port)
    return [finding for look in looks for finding in look()]


def render(findings: list[Finding], *, as_json: bool) -> str:
    """Render findings as a table, or as one JSON object."""
    if as_json:
        return json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1)
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for topic, group in groupby(findings, lambda finding: finding.topic):
        lines.append(f"{topic}:")
        for finding in group:
            lines.append(f"  {finding.state:<8}{finding.name:<{width}}  {finding.detail}")
            if finding.remedy:
                lines.append(f"{'':10}{'':{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def _versions() -> Iterator[Finding]:
    state: State = "ok" if sys.version_info >= (3, 11) else "missing"
    detail = f"{platform.python_version()} (3.11 or later is needed)"
    yield Finding("versions", "Python", state, detail)
    for package in (*_PACKAGES, *_EXTRAS):
        try:
            state, detail = "ok", importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            state = "note" if package in _EXTRAS else "missing"
            need = f", only needed for {_EXTRAS[package]}" if package in _EXTRAS else ""
            detail = f"not installed{need}"
        yield Finding("versions", package, state, detail)


def _processor() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("processor", "cores", "ok", f"{cores} usable, {platform.machine()}")
    flags = re.search("^flags.*?:(.*)$", kernel_file("/proc/cpuinfo"), re.MULTILINE)
    here = set(flags[1].split()) if flags else set()
    for feature, use in _CPU_FEATURES.items():
        found: tuple[State, str] = ("ok", use) if feature in here else ("note", f"not here: {use}")
        yield Finding("processor", feature, *found)


def _kernels() -> Iterator[Finding]:
    try:
        from protocol import native
    except ImportError:  # of torch, which is said to be missing above
        return
    chosen = native.choice()
    if native.library is None:
        remedy = "install a C++17 compiler (apt install g++), then pip install again"
        why = f"does not load: {native.unusable}" if native.unusable else "not compiled"
        yield Finding(
            "processor", "kernels", "note", f"{why}; torch computes, which is slower", remedy
        )
        return
    yield Finding("processor", "kernels", "ok", f"compiled, {chosen.variant}")
    wrong = "compiled, but not used: gives wrong results on this processor"
    for name in chosen.refused:
        yield Finding("processor", f"kernels {name}", "note", wrong)


def _memory() -> Iterator[Finding]:
    fields = dict(re.findall(r"^(\w+): +(\d+) kB$", kernel_file("/proc/meminfo"), re.MULTILINE))
    free, total = (int(fields.get(name, 0)) / 2**20 for name in ("MemAvailable", "MemTotal"))
    if total:
        yield Finding("memory", "memory", "ok", f"{free:.1f} GiB available of {total:.1f} GiB")
    else:
        yield Finding("memory", "memory", "note", "cannot be read on this system")


def kernel_file(path: str) -> str:
    """Return the text of a file of the kernel; none where it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _gpu() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield Finding("gpu", "CUDA", "note", "unknown: torch is not installed")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        detail = ", ".join(f"cuda:{i} {n}" for i, n in enumerate(names))
        yield Finding("gpu", "CUDA", "ok", detail)
    else:
        built = torch.version.cuda
        why = "torch is built without CUDA" if built is None else f"torch has CUDA {built}"
        detail = f"no device ({why}); gpu-service --device cpu works"
        yield Finding("gpu", "CUDA", "note", detail)


def _tee() -> Iterator[Finding]:
    here = {path: name for path, name in _TEE_DEVICES.items() if Path(path).exists()}
    yield from (Finding("tee", path, "ok", name) for path, name in here.items())
    if not here:
        yield Finding(
            "tee",
            "TEE device",
            "note",
            f"none of {', '.join(_TEE_DEVICES)}: tee-runner works here but nothing is protected"
            " from this machine's owner",
        )


def _attesters() -> Iterator[Finding]:
    try:
        from tee_side.attest.attesters import find_attester
    except ImportError:  # of a package that is said to be missing above
        return
    for kind, what in _EVIDENCE.items():
        state: State = "ok"
        try:
            find_attester(kind)
            detail = f"evidence {what}"
        except EvidenceError as error:
            state, detail = "note", f"not here: got {error.got}, expected {error.expected}"
        yield Finding("tee", f"attester {kind}", state, detail)


def _resumption() -> Iterator[Finding]:
    name, what = "generation id", "a snapshot of this VM that is resumed"
    if not has_generation_id():
        yield Finding("tee", name, "note", f"{what} is not noticed: no vmgenid device")
    elif watch() is None:
        yield Finding(
            "tee",
            name,
            "note",
            f"{what} is not noticed: no kernel log",
            "sysctl kernel.dmesg_restrict=0, or CAP_SYSLOG for tee-runner",
        )
    else:
        yield Finding("tee", name, "ok", f"{what} ends the run")


def _port() -> Iterator[Finding]:
    state: State = "ok"
    detail = "free: gpu-service and tee-runner use it by default"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            state, detail = "missing", error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                state, detail = "note", "in use (a gpu-service, perhaps)"
    yield Finding("ports", f"tcp port {DEFAULT_PORT}", state, detail)
