"""Makes the weights that the server of a mask may hold, and the key that stays behind.

Under a feature mask the server's directory has the transformed linear weights and `config.json`,
for the sizes. It has no tokenizer, embedding, LM head or norms: the server needs none of them, and
each would help to match its weights with the public ones. Biases are zero: they are added in the
TEE, and the real ones beside outputs would tell how the outputs are mapped. A segment mask's
server computes whole layers: it gets each of their tensors, and the LM head where that leaves.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file

from gpu_side.weights import PROVISION_FILE, Holds, Provision
from protocol.errors import FeatureKeyError, MaskError, ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    INDEX_FILE,
    Checkpoint,
    light_tensors,
    linear_digest,
    linear_tensors,
    lm_head_name,
    model_digest,
    module_name,
    norm_tensors,
)
from protocol.model.config import ModelConfig
from protocol.model.files import read_json
from protocol.model.weights import CPU, load_light, load_linear, load_tensor
from tee_side.protect.masks.mask import Mask
from tee_side.protect.randomness import KEY_BYTES
from tsqp.feature_key import FeatureKey
from tsqp.lab.research.feature_masks import noise_of
from tsqp.mask_kinds import (
    FeatureMask,
    KeyedSegment,
    SegmentMask,
    gain_of,
    keyed_segment,
    site_transform,
)

CONFIG_FILE = "config.json"

Progress = Callable[[int, int], None]
Tensors = dict[str, torch.Tensor]
# Makes one shard's tensors.
Shard: TypeAlias = Callable[[], Tensors]


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What was made: of which model, the bytes of the weights, what they are, and the key.

    `noise`: what that of the mask guarantees, None without any.
    """

    config: ModelConfig
    weight_bytes: int
    holds: Holds
    noise: str | None
    key: FeatureKey


def provision(
    model_dir: Path,
    mask: Mask,
    server_dir: Path,
    key_path: Path,
    progress: Progress | None = None,
) -> Provisioned:
    """Transform a model's weights for a server, and write the key that undoes it.

    One layer is in memory at a time, in the model's dtype, and one operator of it in float64, or
    the LM head, twice. `progress(done, total)` is called after every layer, and the LM head. A run
    that fails leaves nothing behind.

    Raises, before any work: MaskError for a mask of another kind, FeatureKeyError for a key
    that exists or would lie in the server's directory, ModelError for a server directory that is
    not empty, or a model that is not complete. MaskError and ModelError that name a tensor later.

    GPU side gets: `server_dir`, and must not get `key_path`.
    """
    if not isinstance(mask, FeatureMask | SegmentMask):
        raise MaskError(
            f"mask {mask.name}",
            got=f"a mask of kind {mask.kind}",
            expected="one of kind feature or segment",
        )
    linear = FUSED_MODULES if isinstance(mask, FeatureMask) else ()
    if missing := [operator for operator in linear if not mask.supports(operator)]:
        raise MaskError(
            f"mask {mask.name}",
            got=f"no support for {', '.join(missing)}",
            expected="all linear operators: a server that holds some in the clear gives them away",
        )
    with MaskError.instead_of(
        ValidationError, f"mask {mask.name}", "this name", "lower-case letters, digits and -"
    ):
        Provision(mask=mask.name, provision_id="0" * 64)
    server_dir, key_path = server_dir.resolve(), key_path.parent.resolve() / key_path.name
    _check_outputs(server_dir, key_path)
    config, checkpoint = Checkpoint.open(model_dir)
    shapes = light_tensors(config) | linear_tensors(config)
    checkpoint.require(shapes)
    checkpoint.refuse_extra(config)

    # Beside the directory that it becomes: a rename within a file system is one step.
    draft = server_dir.with_name(f".{server_dir.name}.{secrets.token_hex(8)}.partial")
    seed = secrets.token_bytes(KEY_BYTES)
    conversion = _Conversion(config, checkpoint, mask, seed, shapes)
    try:
        draft.mkdir()
        shutil.copyfile(model_dir / CONFIG_FILE, draft / CONFIG_FILE)
        holds, shards = conversion.shards()
        if holds == "model" and config.tie_word_embeddings:
            # The LM head has a weight of its own there.
            settings = read_json(draft / CONFIG_FILE) | {"tie_word_embeddings": False}
            text = json.dumps(settings, indent=2) + "\n"
            (draft / CONFIG_FILE).write_text(text, encoding="utf-8")
        weight_bytes = _write_weights(shards, draft, progress)
        key = FeatureKey.bind(
            mask=mask.name,
            options=mask.model_dump(mode="json"),
            seed=seed.hex(),
            model_digest=model_digest(config, checkpoint),
            linear_digest=linear_digest(config, checkpoint),
            server_linear_digest=linear_digest(config, Checkpoint(draft)),
        )
        marker = Provision(mask=mask.name, provision_id=key.provision_id, holds=holds)
        # The last file, so that a partial directory is none.
        (draft / PROVISION_FILE).write_text(
            json.dumps(marker.model_dump(), indent=2) + "\n", encoding="utf-8"
        )
        # The key first, because a directory without its key is worthless and does not look so: an
        # operator would copy it to the server, where nothing can undo the mask. A key without its
        # directory, after a crash between the two, is a small file that fits nothing.
        key.save(key_path)
        with ModelError.for_os(str(server_dir), "a new or an empty directory"):
            try:
                draft.rename(server_dir)
            except BaseException:
                key_path.unlink(missing_ok=True)
                raise
    finally:
        # Not there any more where all went well.
        shutil.rmtree(draft, ignore_errors=True)
    rows = checkpoint.blocks(EMBEDDING, shapes[EMBEDDING])
    lengths = (float(block.float().norm(dim=1).max()) for _, block in rows)
    return Provisioned(
        config, weight_bytes, holds, noise_of(mask, config, lambda: max(lengths)), key
    )


def _check_outputs(server_dir: Path, key_path: Path) -> None:
    """Refuse, before any work, what could not be written at its end, or must not be."""
    exists, anew = os.path.lexists(server_dir), "a new or an empty directory"
    writable = os.W_OK | os.X_OK
    for refused, error, path, got, expected in (
        (
            key_path.is_relative_to(server_dir),
            FeatureKeyError,
            key_path,
            "a key within the server's directory",
            "one outside: it must not reach the server",
        ),
        (
            os.path.lexists(key_path),
            FeatureKeyError,
            key_path,
            "a file that exists",
            "a new one: no key is overwritten",
        ),
        (
            not os.access(key_path.parent, writable),
            FeatureKeyError,
            key_path,
            "no such directory to write to",
            "a file in one",
        ),
        (
            not os.access(server_dir.parent, writable),
            ModelError,
            server_dir.parent,
            "no such directory to write to",
            "one",
        ),
        (exists and not server_dir.is_dir(), ModelError, server_dir, "a file", anew),
        (
            server_dir.is_dir() and any(server_dir.iterdir()),
            ModelError,
            server_dir,
            "files in it",
            anew,
        ),
    ):
        error.unless(not refused, str(path), got, expected)


def _write_weights(shards: list[Shard], directory: Path, progress: Progress | None) -> int:
    """Write the shards and their index. Return the bytes of all tensors."""
    weight_map: dict[str, str] = {}
    total = 0
    for done, shard in enumerate(shards, 1):
        name = f"model-{done:05d}-of-{len(shards):05d}.safetensors"
        tensors = shard()
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            # Which is how the library says that a disk is full.
            raise ModelError(
                str(directory / name),
                got=str(error)[:160],
                expected="a file that can be written",
            ) from None
        # The library writes for its owner alone; the service may run as another user.
        (directory / name).chmod((directory / CONFIG_FILE).stat().st_mode & 0o777)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        if progress is not None:
            progress(done, len(shards))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


# ------------------------------------------------------------------------------------- conversion


@dataclass(frozen=True)
class _Conversion:
    """The tensors of a model as the server of a mask gets them, shard by shard.

    Each is in the dtype that the model has it in. What makes them raises ModelError and MaskError
    that name a tensor. `shapes`: of all tensors of the model.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    mask: FeatureMask | SegmentMask
    seed: bytes
    shapes: Mapping[str, tuple[int, ...]]

    def shards(self) -> tuple[Holds, list[Shard]]:
        """Return what the server will hold, and what makes it: a shard per layer, or one more."""
        layers = range(self.config.num_hidden_layers)
        if isinstance(self.mask, FeatureMask):
            return "linears", [partial(self._linears, self.mask, layer) for layer in layers]
        keyed = keyed_segment(self.mask, self.config, self.seed)
        shards: list[Shard] = [partial(self._layer, keyed, layer) for layer in layers]
        if not self.mask.hides_head:
            return "layers", shards
        return "model", [*shards, partial(self._head, keyed)]

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a tensor, in the model's own dtype unless another one is asked for."""
        dtype = dtype or self.checkpoint.rows(name, 0, 1).dtype
        return load_tensor(self.checkpoint, name, self.shapes[name], dtype=dtype)

    def _stored(self, name: str, made: torch.Tensor) -> torch.Tensor:
        """Return a transformed tensor in the dtype that the model has it in, float32 if in none."""
        held = self.checkpoint.holds([name])
        dtype = self.checkpoint.rows(name, 0, 1).dtype if held else torch.float32
        stored = made.to(dtype).contiguous()
        ModelError.unless(
            bool(stored.isfinite().all()),
            f"{self.checkpoint.directory}: {name}",
            "values that are not finite, transformed",
            f"weights that mask {self.mask.name} leaves within {dtype}",
        )
        return stored

    def _linears(self, mask: FeatureMask, layer: int) -> Tensors:
        """Transform a layer's linear operators; one of them is in float64 at a time."""
        config, checkpoint, tensors = self.config, self.checkpoint, Tensors()
        light = load_light(config, layer, partial(load_tensor, checkpoint, dtype=torch.float32))
        for operator in FUSED_MODULES:
            gain = gain_of(config, light, operator)
            transform = site_transform(mask, config, self.seed, layer, operator, gain)
            plain = load_linear(
                checkpoint, config, layer, operator, dtype=torch.float64, device=CPU
            )
            weight = transform.weight(plain.weight)
            for module, rows in plain.rows.items():
                name = module_name(layer, module)
                tensors[f"{name}.weight"] = self._stored(f"{name}.weight", weight[rows])
                if module in config.biased_modules:
                    bias = checkpoint.rows(f"{name}.bias", 0, 1)
                    tensors[f"{name}.bias"] = bias.new_zeros(len(weight[rows]))
        return tensors

    def _layer(self, keyed: KeyedSegment, layer: int) -> Tensors:
        """Transform a layer; only one module of it is in float64 at a time."""
        prefix = f"model.layers.{layer}."

        def read(names: Iterable[str]) -> Tensors:
            return {name.removeprefix(prefix): self._read(name, torch.float64) for name in names}

        tensors, norms = Tensors(), read(norm_tensors(self.config, layer))
        for module in self.config.table.modules:
            start = f"{module_name(layer, module)}."
            own = [name for name in self.shapes if name.startswith(start)]
            tensors |= {
                prefix + short: self._stored(prefix + short, made)
                for short, made in keyed.layer(layer, norms | read(own)).items()
            }
        return tensors

    def _head(self, keyed: KeyedSegment) -> Tensors:
        """Transform what is behind the last layer, in its own dtype: float64 is too large."""
        return keyed.head(self._read(FINAL_NORM), self._read(lm_head_name(self.config)))
