"""What `--device` names: a processor that computes, or a null device that only answers.

`null` answers at once: what remains of a run's time is not the device's. `model:PROFILE` answers
no earlier than the described accelerator would.

A profile describes an accelerator by a few numbers, and says how long each operator takes on it.
The roofline: a product takes as long as its arithmetic at the full rate or as the bytes that it
moves at the full bandwidth, whichever is more, and every kernel and every copy has to be launched.
What it says is a lower bound: real devices take longer, most of them much longer.
`gpu-service --device model:PROFILE` waits as long as it says, and `tsqp plan` adds it up.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
from pydantic import Field

from protocol.errors import SettingsError
from protocol.validation import Strict, validate_file

# An int8 product over ring elements, as `protocol.integer` does it on CUDA: four digits, so four
# times the arithmetic and four int32 products to add up.
DIGITS = 4

_RING_KERNELS = 13  # nine that split into digits, the product, three that add up

_ACCUMULATOR_BYTES = 4

Rate: TypeAlias = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]

Microseconds: TypeAlias = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class DeviceProfile(Strict):
    """An accelerator. All times are in microseconds.

    `tflops`: 10^12 float operations a second with 16-bit inputs, a multiplication and an addition
    being two; float32 runs at half of it, as TF32 does. `int8_tops`: the same of int8 products.
    `gb_per_s`: 10^9 bytes a second from its memory; `pcie_gb_per_s`: from and to the host, each
    way. `launch_us`: what starting a kernel or a copy takes.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,64}$")]
    tflops: Rate
    int8_tops: Rate
    gb_per_s: Rate
    launch_us: Microseconds
    pcie_gb_per_s: Rate

    def linear_us(
        self, rows: int, in_features: int, out_features: int, itemsize: int, integer: bool = False
    ) -> float:
        """Return the time of one product with a weight that is on the device.

        `itemsize`: bytes of an element of weights and activations. `integer`: the product in the
        ring Z_2^32 with int8 weights, for which `itemsize` is not used.
        """
        if not integer:
            return self.matmul_us(1, rows, in_features, out_features, itemsize)
        moved = (
            in_features * out_features
            + rows * in_features * (_ACCUMULATOR_BYTES + 2 * DIGITS)
            + rows * out_features * _ACCUMULATOR_BYTES * (2 * DIGITS + 1)
        )
        products = 2.0 * rows * in_features * out_features
        compute_us = products * DIGITS / (self.int8_tops * 1e6)
        return _RING_KERNELS * self.launch_us + max(compute_us, moved / (self.gb_per_s * 1e3))

    def matmul_us(self, batch: int, m: int, k: int, n: int, itemsize: int) -> float:
        """Return the time of a batch of products [m, k] @ [k, n], all operands moved once."""
        moved = batch * (m * k + k * n + m * n)
        return self._float_us(2.0 * batch * m * k * n, moved, itemsize)

    def embedding_us(self, tokens: int, hidden_size: int, itemsize: int) -> float:
        """Return the time of looking up `tokens` rows of an embedding on the device."""
        return self._float_us(0.0, 2 * tokens * hidden_size, itemsize)

    def transfer_us(self, size_bytes: int) -> float:
        """Return the time of one copy between host and device, one way, its launch included."""
        return self.launch_us + size_bytes / (self.pcie_gb_per_s * 1e3)

    def _float_us(self, operations: float, elements: int, itemsize: int) -> float:
        rate = self.tflops / 2 if itemsize > 2 else self.tflops
        memory_us = elements * itemsize / (self.gb_per_s * 1e3)
        return self.launch_us + max(operations / (rate * 1e6), memory_us)


# Rates and bandwidths are the vendor's peak figures, dense (half of those that a datasheet gives
# "with sparsity"), and PCIe's nominal rate of one direction. No datasheet has launch times: 5 us
# is what starting one kernel from Python takes on usual hosts, and is to be measured on yours.
_LAUNCH_US = 5.0

_PCIE_4_X16, _PCIE_5_X16 = 32.0, 64.0

# By name, as help lists them.
PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        # NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM: BF16 312, INT8 624, 2,039 GB/s,
        # PCIe Gen4.
        DeviceProfile(
            name="a100",
            tflops=312.0,
            int8_tops=624.0,
            gb_per_s=2039.0,
            launch_us=_LAUNCH_US,
            pcie_gb_per_s=_PCIE_4_X16,
        ),
        # NVIDIA H100 Tensor Core GPU datasheet, SXM: BF16 1,979 and INT8 3,958 with sparsity,
        # 3.35 TB/s, PCIe Gen5.
        DeviceProfile(
            name="h100",
            tflops=989.4,
            int8_tops=1978.9,
            gb_per_s=3350.0,
            launch_us=_LAUNCH_US,
            pcie_gb_per_s=_PCIE_5_X16,
        ),
        # NVIDIA H200 Tensor Core GPU datasheet, SXM: the H100's rates, 4.8 TB/s, PCIe Gen5.
        DeviceProfile(
            name="h200",
            tflops=989.4,
            int8_tops=1978.9,
            gb_per_s=4800.0,
            launch_us=_LAUNCH_US,
            pcie_gb_per_s=_PCIE_5_X16,
        ),
        # NVIDIA L4 Tensor Core GPU datasheet: BF16 242 and INT8 485 with sparsity, 300 GB/s,
        # PCIe Gen4 x16.
        DeviceProfile(
            name="l4",
            tflops=121.0,
            int8_tops=242.5,
            gb_per_s=300.0,
            launch_us=_LAUNCH_US,
            pcie_gb_per_s=_PCIE_4_X16,
        ),
        # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: BF16 with float32 accumulation
        # 165.2, INT8 660.6, 1,008 GB/s, PCIe Gen4 x16.
        DeviceProfile(
            name="rtx-4090",
            tflops=165.2,
            int8_tops=660.6,
            gb_per_s=1008.0,
            launch_us=_LAUNCH_US,
            pcie_gb_per_s=_PCIE_4_X16,
        ),
    )
}

_KNOWN = f"{', '.join(PROFILES)}, or the path of a TOML file that describes one"


def find_profile(name: str) -> DeviceProfile:
    """Return a built-in profile by its name, or the one in the TOML file at that path.

    Raises SettingsError: for an unknown name one that lists those there are, for a file one that
    names the first bad key.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    SettingsError.unless(
        name and (path.suffix == ".toml" or path.is_file()),
        "accelerator profile",
        repr(name),
        _KNOWN,
    )
    try:
        with SettingsError.for_os(str(path), _KNOWN):
            content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        # Malformed TOML, text that is not UTF-8, an integer of thousands of digits, deep nesting.
        raise SettingsError(
            str(path), got=f"invalid TOML ({error})"[:160], expected="TOML"
        ) from None
    return validate_file(DeviceProfile, content, str(path), SettingsError)


@cache
def multiplies_bfloat16() -> bool:
    """Say whether this processor multiplies bfloat16 by itself (AVX512-BF16)."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in every torch
    return capabilities is not None and bool(capabilities().get("avx512_bf16", False))


@dataclass(frozen=True)
class NullDevice:
    """Computes nothing. Answers at once, or as late as an accelerator of that profile would."""

    profile: DeviceProfile | None = None

    def __str__(self) -> str:
        return "null" if self.profile is None else f"model:{self.profile.name}"


Device: TypeAlias = torch.device | NullDevice


def parse_device(name: str) -> Device:
    """Read `cpu`, `cuda`, `cuda:N`, `null` or `model:PROFILE`.

    Raises SettingsError when it is not there, or no such profile is.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if name == "null":
        return NullDevice()
    if kind == "model":
        return NullDevice(find_profile(index))
    SettingsError.unless(
        kind == "cuda" and (not index or index.isdecimal()) and not name.endswith(":"),
        "--device",
        repr(name),
        "cpu, cuda, cuda:N, null or model:PROFILE",
    )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    SettingsError.unless(
        int(index or 0) < count,
        "--device",
        f"{name!r} with {count} CUDA devices here",
        "a device there is",
    )
    return torch.device(name)
