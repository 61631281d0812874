"""What this machine has and lacks for either side: facts, each with what it is good for."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import socket
import sys
from dataclasses import asdict, dataclass
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
    "avx512_bf16": "fast bfloat16 products",
    "avx_vnni": "fast int8 products",
    "avx512_vnni": "fast int8 products, wider",
    "amx_int8": "fast int8 matrix tiles",
    "amx_bf16": "fast bfloat16 matrix tiles",
}
_TEE_DEVICES = {
    "/dev/sev-guest": "AMD SEV-SNP guest",
    "/dev/tdx_guest": "Intel TDX guest",
}
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
    return [
        *_versions(),
        *_processor(),
        *_kernels(),
        _memory(),
        _gpu(),
        *_tee(),
        *_attesters(),
        _generation_id(),
        _port(DEFAULT_PORT),
    ]


def render(findings: list[Finding], *, as_json: bool) -> str:
    """Render findings as a table, or as one JSON object."""
    if as_json:
        return json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1)
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines.append(f"{topic}:")
        lines.append(f"  {finding.state:<8}{finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':10}{'':{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def _versions() -> list[Finding]:
    python = platform.python_version()
    findings = [
        Finding(
            "versions",
            "Python",
            "ok" if sys.version_info >= (3, 11) else "missing",
            f"{python} (3.11 or later is needed)",
        )
    ]
    for package in (*_PACKAGES, *_EXTRAS):
        try:
            found = Finding("versions", package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            state: State = "note" if package in _EXTRAS else "missing"
            need = f", only needed for {_EXTRAS[package]}" if package in _EXTRAS else ""
            found = Finding("versions", package, state, f"not installed{need}")
        findings.append(found)
    return findings


def _processor() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    findings = [Finding("processor", "cores", "ok", f"{cores} usable, {platform.machine()}")]
    for feature, use in _CPU_FEATURES.items():
        state: State = "ok" if feature in flags else "note"
        findings.append(
            Finding("processor", feature, state, use if state == "ok" else f"not here: {use}")
        )
    return findings


def _kernels() -> list[Finding]:
    try:
        from protocol import native
    except ImportError:  # of torch, which is said to be missing above
        return []
    chosen = native.choice()
    if not chosen.built:
        remedy = "install a C++17 compiler (apt install g++), then pip install again"
        why = f"does not load: {native.unusable}" if native.unusable else "not compiled"
        detail = f"{why}; torch computes, which is slower"
        return [Finding("processor", "kernels", "note", detail, remedy)]
    used = Finding("processor", "kernels", "ok", f"compiled, {chosen.variant}")
    wrong = "compiled, but not used: gives wrong results on this processor"
    return [
        used,
        *(Finding("processor", f"kernels {name}", "note", wrong) for name in chosen.refused),
    ]


def _cpu_flags() -> set[str]:
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        ):
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def _memory() -> Finding:
    fields: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return Finding("memory", "memory", "note", "cannot be read on this system")
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    return Finding(
        "memory", "memory", "ok", f"{free / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB"
    )


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("gpu", "CUDA", "note", "unknown: torch is not installed")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch is built without CUDA" if built is None else f"torch has CUDA {built}"
        return Finding("gpu", "CUDA", "note", f"no device ({why}); gpu-service --device cpu works")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("gpu", "CUDA", "ok", ", ".join(f"cuda:{i} {n}" for i, n in enumerate(names)))


def _tee() -> list[Finding]:
    findings = [
        Finding("tee", path, "ok", what)
        for path, what in _TEE_DEVICES.items()
        if Path(path).exists()
    ]
    if findings:
        return findings
    return [
        Finding(
            "tee",
            "TEE device",
            "note",
            f"none of {', '.join(_TEE_DEVICES)}: tee-runner works here but nothing is protected"
            " from this machine's owner",
        )
    ]


def _attesters() -> list[Finding]:
    try:
        from tee_side.attest.attesters import find_attester
    except ImportError:  # of a package that is said to be missing above
        return []
    findings = []
    for kind, what in _EVIDENCE.items():
        name = f"attester {kind}"
        try:
            find_attester(kind)
        except EvidenceError as error:
            detail = f"not here: got {error.got}, expected {error.expected}"
            findings.append(Finding("tee", name, "note", detail))
        else:
            findings.append(Finding("tee", name, "ok", f"evidence {what}"))
    return findings


def _generation_id() -> Finding:
    name, what = "generation id", "a snapshot of this VM that is resumed"
    if not has_generation_id():
        return Finding("tee", name, "note", f"{what} is not noticed: no vmgenid device")
    if watch() is None:
        remedy = "sysctl kernel.dmesg_restrict=0, or CAP_SYSLOG for tee-runner"
        return Finding("tee", name, "note", f"{what} is not noticed: no kernel log", remedy)
    return Finding("tee", name, "ok", f"{what} ends the run")


def _port(port: int) -> Finding:
    name = f"tcp port {port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Finding("ports", name, "note", "in use (a gpu-service, perhaps)")
            return Finding("ports", name, "missing", error.strerror or str(error))
    return Finding("ports", name, "ok", "free: gpu-service and tee-runner use it by default")
