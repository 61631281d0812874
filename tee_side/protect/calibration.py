"""Activation scales for integer arithmetic, fixed before anything runs, and their file.

A *site* is one linear operator of one layer. With int8 weights w (one scale per output column) and
inputs x = round(input / input_scale), every sum of a product is bounded by Cauchy and Schwarz:

    |x . w_j| <= ||x|| ||w_j|| <= ||x|| max_j ||w_j||        must stay below 2^31

so a row whose norm is at most (2^31 - 1) / max_j ||w_j|| cannot wrap in the ring Z_2^32, whatever
its direction. Each row is checked for that, and refused otherwise. These scales never
depend on a request, as some leave the TEE; pads are drawn for rings, not for ranges.

The file holds the weights' scales too, so that a TEE without linear weights can scale results back.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from protocol.errors import CalibrationError, ModelError, describe
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import MAX_HEADER_BYTES, TORCH_DTYPES, parse_header
from protocol.model.config import ModelConfig
from protocol.model.files import read_bytes, require_inside
from tee_side.words import Site

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

log = logging.getLogger("tee_side")

CALIBRATION_FILE = "calibration.safetensors"

# Sums must fit a signed 32-bit integer, or they could not be told from what they wrapped to.
MAX_SUM = 2**31 - 1

# Room above the largest row that calibration saw: a row beyond it would end a generation. On the
# demo model, rows of its own text are at most 2.4 times as large as those of a text of another
# kind. Where inputs have no outliers there is far more room than this.
HEADROOM = 4.0

# How far a float32 power of 2^(1/4) is from one, in steps, at most.
_ROUNDED = 1e-5

# A headroom that is none.
_SMALLEST = 1e-300

TABLES = ("input_scale", "norm_limit", "max_norm")
FORMAT = {"format": "tsqp-calibration", "version": "1"}
_DIGEST = ("[0-9a-f]{64}", "64 hexadecimal digits")
# Of the file's metadata: a pattern for each, and what it says.
_METADATA = {name: (value, value) for name, value in FORMAT.items()} | {
    "model_digest": _DIGEST,
    "linear_digest": _DIGEST,
    "tokens": ("[1-9][0-9]{0,17}", "a number"),
}


@dataclass(frozen=True, eq=False)
class SiteScales:
    """The scales of one site, and the largest row that calibration saw there.

    `weight_scale`: float32 [N], what one step of column j's int8 weights stands for; `input_scale`:
    what one step of an input stands for; `norm_limit`: largest Euclidean norm of a row of integer
    inputs whose sums cannot wrap, (2^31 - 1) / max_j ||w_j||; `max_norm`: largest Euclidean norm of
    a row of inputs, as floats, rounded up to a power of 2^(1/4) when the calibration is made: an
    exact one identifies a token of a private text.
    """

    input_scale: float
    weight_scale: torch.Tensor
    norm_limit: float
    max_norm: float

    @cached_property
    def factor_N(self) -> torch.Tensor:  # noqa: N802 - a tensor, named by its shape
        """Float32 [N], what one step of a product stands for."""
        return self.weight_scale * self.input_scale

    @property
    def headroom(self) -> float:
        """How many times as large as the largest row seen an input row may be."""
        largest = self.max_norm / self.input_scale
        # A file may hold any positive numbers, also such as are too small to divide by.
        return max(self.norm_limit / largest, _SMALLEST) if largest else math.inf


@dataclass(frozen=True, eq=False)
class Calibration:
    """The scales of every site of a model, and what they were made from.

    `model_digest`, `linear_digest`: those of `protocol.model.checkpoint`; `tokens`: how many tokens
    calibration saw.
    """

    sites: dict[Site, SiteScales]
    model_digest: str
    linear_digest: str
    tokens: int

    def check_ring(self) -> None:
        """Check that the largest rows seen, times `HEADROOM`, stay within the ring.

        Raises CalibrationError for the site that needs most.
        """
        layer, operator = site = min(self.sites, key=lambda site: self.sites[site].headroom)
        headroom = self.sites[site].headroom
        # 1e-6: what rounding may take from a scale that uses the ring up.
        if not headroom >= HEADROOM * (1 - 1e-6):
            bits = math.log2(MAX_SUM * HEADROOM / headroom)
            raise CalibrationError(
                "ring Z_2^32", f"2^{bits:.1f} for {operator} in layer {layer}", "at most 2^31"
            )

    def check_weights(self, site: Site, weight_scale: torch.Tensor, max_norm: float) -> None:
        """Check a site against the quantised weights that are in use.

        `weight_scale`: float32 [N]; `max_norm`: largest Euclidean norm of a row of the integer
        weights. Raises CalibrationError where results would be scaled wrongly or could wrap.
        """
        layer, operator = site
        where = f"{operator} in layer {layer}"
        scales = self.sites[site]
        limit = norm_limit(max_norm)
        CalibrationError.unless(
            scales.norm_limit <= limit,
            f"{where}: norm limit of these weights",
            f"{scales.norm_limit:.6g}",
            f"at most {limit:.6g} (calibrate again)",
        )
        CalibrationError.unless(
            torch.equal(scales.weight_scale, weight_scale),
            f"{where}: weight scales",
            "others than those of these weights",
            "the same (calibrate again)",
        )

    @staticmethod
    def load(
        path: Path,
        config: ModelConfig,
        model_digest: str,
        linear_digest: str | None = None,
        manifest: Manifest | None = None,
    ) -> Calibration:
        """Read a file and check it against a model.

        `linear_digest`: None where the TEE has no linear weights; the service's is then compared
        with the file's in the handshake. `manifest`: the file's content must be that
        of the calibration that it names, wherever the file is. Raises CalibrationError: no such
        file, damaged, of another version or model, with sites missing or left over, scales that are
        not positive and finite, or a ring that is too small for what calibration saw; and
        ManifestError.
        """
        metadata, tensors = _read(path, config, manifest)
        for name, digest in {"model_digest": model_digest, "linear_digest": linear_digest}.items():
            same = digest in (None, metadata[name])
            expected = f"{digest}, the digest of this model"
            CalibrationError.unless(same, f"{path}: {name}", metadata[name], expected)
        order: list[Site] = [
            (layer, op) for layer in range(config.num_hidden_layers) for op in FUSED_MODULES
        ]
        rows = zip(*(tensors[name].flatten().tolist() for name in TABLES), strict=True)
        sites = {
            site: SiteScales(input_scale, tensors[weight_scale_name(site)], limit, max_norm)
            for site, (input_scale, limit, max_norm) in zip(order, rows, strict=True)
        }
        found = Calibration(
            sites, metadata["model_digest"], metadata["linear_digest"], int(metadata["tokens"])
        )
        found.check_ring()
        steps = [4 * math.log2(scales.max_norm) for scales in sites.values() if scales.max_norm]
        if any(abs(step - round(step)) > _ROUNDED for step in steps):
            remedy = {"file": path, "expected": "rounded ones: tsqp calibrate MODEL --force"}
            log.warning("calibration_has_exact_norms", extra={"fields": remedy})
        return found


def norm_limit(max_norm: float) -> float:
    """Return the largest norm of an integer input row that cannot wrap.

    `max_norm`: largest Euclidean norm of a row of the int8 weights; weights that are all zero
    bound nothing, but an input must still fit an integer.
    """
    return MAX_SUM / max(1.0, max_norm)


def calibration_path(model: Path, given: Path | None) -> Path:
    """Return the file to read: the one given, else the one beside the model.

    Raises CalibrationError, which names the command that makes one, if there is none; and
    ModelError for a link out of the model's directory.
    """
    path = require_inside(model / CALIBRATION_FILE) if given is None else given
    option = "" if given is None else f" --output {given}"
    expected = f"one made by: tsqp calibrate {model}{option}"
    CalibrationError.unless(path.is_file(), f"activation scales {path}", "no such file", expected)
    return path


def weight_scale_name(site: Site) -> str:
    """Return the name of a site's tensor in the file."""
    layer, operator = site
    return f"{layer}.{operator}.weight_scale"


def _read(
    path: Path, config: ModelConfig, manifest: Manifest | None
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Read metadata and tensors, both checked by themselves and against the model's shape."""
    layers = config.num_hidden_layers
    # Shape and dtype (safetensors' name) of every tensor.
    layout: dict[str, tuple[tuple[int, ...], str]] = {
        name: ((layers, len(FUSED_MODULES)), "F64") for name in TABLES
    }
    for operator in FUSED_MODULES:
        _, (out_features, _) = config.row_layout(operator)
        for layer in range(layers):
            layout[weight_scale_name((layer, operator))] = ((out_features,), "F32")
    most = MAX_HEADER_BYTES + sum(8 * math.prod(shape) for shape, _ in layout.values())
    try:
        # The whole file at once, so that what is verified is what is used.
        content = read_bytes(path, most, inside=False)
        if manifest is not None:
            manifest.check_file(path, content, CALIBRATION_FILE)
        header = parse_header(content, len(content), str(path))
    except ModelError as error:
        raise CalibrationError(error.where, error.got, "a file made by tsqp calibrate") from None
    for name, (pattern, expected) in _METADATA.items():
        value = header.metadata.get(name)
        CalibrationError.unless(
            value is not None and re.fullmatch(pattern, value),
            f"{path}: {name}",
            "nothing" if value is None else describe(value),
            expected,
        )
    if unknown := sorted(header.metadata.keys() - _METADATA.keys()):
        raise CalibrationError(
            f"{path}: metadata {describe(unknown[0])}", "an unknown key", "no such key"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in layout.items():
        found = header.entries.get(name)
        if found is None or (found.shape, found.dtype) != (shape, dtype):
            raise CalibrationError(
                f"{path}: {name}",
                f"{found.dtype} {describe(list(found.shape))}" if found else "no such tensor",
                f"{dtype} {list(shape)}",
            )
        begin, end = (header.data_begin + offset for offset in found.data_offsets)
        raw = bytearray(content[begin:end])
        tensors[name] = torch.frombuffer(raw, dtype=TORCH_DTYPES[dtype]).reshape(shape)
    if extra := sorted(header.entries.keys() - tensors.keys()):
        raise CalibrationError(
            f"{path}: {describe(extra[0])}",
            "a tensor that the model does not explain",
            f"the sites of {layers} layers",
        )
    for name, tensor in tensors.items():
        # The largest row seen may be zero: a model's weights may be.
        positive = tensor >= 0 if name == "max_norm" else tensor > 0
        if len(bad := tensor[~(positive & tensor.isfinite())]):
            raise CalibrationError(
                f"{path}: {name}", f"{bad[0].item():g}", "positive finite numbers"
            )
    # A column of weights that is not all zero has a norm of at least 1.
    largest = tensors["norm_limit"].max().item()
    expected = f"at most {MAX_SUM}: the ring's"
    CalibrationError.unless(largest <= MAX_SUM, f"{path}: norm_limit", f"{largest:g}", expected)
    return header.metadata, tensors
