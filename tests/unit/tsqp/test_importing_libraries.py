"""Files that other libraries have written are what those libraries read of them: `make release`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.kit.model import Models
from tests.kit.rows import each_row
from tsqp.importing.plain import import_model, open_source
from tsqp.importing.sources import Directory

pytestmark = pytest.mark.slow
OUTPUTS, INPUTS = 60, 128
GROUPS = {"strategy": "group", "group_size": 32}
BLOCKS = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [32, 32]}
WORDS = [
    *({"num_bits": bits, **GROUPS} for bits in (2, 3, 4, 8)),
    *({"num_bits": 4, "symmetric": False, **more} for more in (GROUPS, {"strategy": "channel"})),
]
NUMBERS = [
    *({"num_bits": 8, "strategy": strategy} for strategy in ("tensor", "channel")),
    *({"num_bits": 8, "symmetric": False, "strategy": kind} for kind in ("tensor", "channel")),
    *({"num_bits": 8, "type": "float", "strategy": kind} for kind in ("tensor", "channel")),
    BLOCKS,
]


@each_row("args", [*WORDS, *NUMBERS])
def test_compressed_tensors(tmp_path: Path, args: dict[str, Any]) -> None:
    """Of every kind of scale, with zero points and without; read in pieces."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    packed = args in WORDS
    named = "PackedQuantizationCompressor" if packed else "NaiveQuantizationCompressor"
    compressor = getattr(compressors, named)
    kind = quantization.QuantizationArgs(**args)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=kind)
    torch.manual_seed(0)
    high, wide = kind.block_structure or (1, kind.group_size or INPUTS)
    shape = {"tensor": (1,), "channel": (OUTPUTS, 1)}.get(
        kind.strategy, (-(-OUTPUTS // high), -(-INPUTS // wide))
    )
    given = {"weight": torch.randn(OUTPUTS, INPUTS), "weight_scale": torch.rand(shape) * 0.2 + 0.1}
    if not kind.symmetric:
        half = 2 ** (kind.num_bits - 1)
        given["weight_zero_point"] = torch.randint(1 - half, half, shape).to(torch.int8)
    stored = compressor.compress(given, scheme)
    right = compressor.decompress(dict(stored), scheme)["weight"].float()
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    tensors = {f"one.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, directory / "model.safetensors")
    groups = {"config_groups": {"group_0": {"weights": json.loads(kind.model_dump_json())}}}
    said = {"quantization_config": {"quant_method": "compressed-tensors", **groups}}
    (directory / "config.json").write_text(json.dumps(said))
    source = Directory(directory)
    assert source.shape("one.weight") == (OUTPUTS, INPUTS)
    assert source.left(["one.weight"]) == []
    pieces = [slice(first, min(first + 24, OUTPUTS)) for first in range(0, OUTPUTS, 24)]
    assert torch.equal(torch.cat([source.rows("one.weight", rows) for rows in pieces]), right)


@each_row(
    "more",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"layers.1.self_attn.q_proj": 20}},
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 8, r".*\.2\..*": 2}},
        {"layers_to_transform": [1]},
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft(saved_model: Models, tmp_path: Path, more: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    base = saved_model("llama").directory
    read: Any = AutoModelForCausalLM
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], **more
    )
    adapted = peft.get_peft_model(read.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    adapted.save_pretrained(directory)
    right = adapted.merge_and_unload().state_dict()
    target = directory.with_suffix(".made")
    import_model(open_source(directory, base), target, "float32")
    (shard,) = target.glob("*.safetensors")
    for name, tensor in load_file(shard).items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-5)
