"""What is imported is what its library, or the definition of its layout, says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError, SettingsError
from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.model import Models, assemble, token_ids
from tests.kit.rows import each_row
from tsqp.cli.model_files import import_
from tsqp.importing import plain
from tsqp.importing.plain import import_model, open_source
from tsqp.importing.sources import Source

GROUP = 16
Tensors = dict[str, torch.Tensor]


def _imported(directory: Path, **given: Any) -> Tensors:
    """Import a directory beside it, and return what was written."""
    target = directory.with_name(f"{directory.name}-plain")
    import_model(open_source(directory, given.pop("base", None)), target, **given)
    tensors: Tensors = {}
    for shard in target.glob("*.safetensors"):
        tensors |= load_file(shard)
    Checkpoint.open(target)  # it is a model like any other
    return tensors


def _packed(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Numbers [n, k] as words [n, k / (32 / bits)], the first in the lowest bits."""
    each = 32 // bits
    shifts = bits * torch.arange(each)
    words = (numbers.long().unflatten(1, (-1, each)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _in_groups(weight: torch.Tensor, at_I: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Random numbers of four bits, zero points and scales of groups: also what they stand for."""
    outputs, inputs = weight.shape
    groups = int(at_I.max()) + 1
    numbers, zeros = torch.randint(16, (outputs, inputs)), torch.randint(1, 15, (outputs, groups))
    scales = torch.rand(outputs, groups) + 0.1
    exact = (numbers - zeros[:, at_I]) * scales[:, at_I]
    return numbers, zeros, scales, exact


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, exact = _in_groups(weight, torch.arange(weight.shape[1]) // GROUP)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(x: torch.Tensor) -> torch.Tensor:
        return _packed(x.t().unflatten(1, (-1, 8))[..., order].flatten(1))

    return {"qweight": words(numbers), "qzeros": words(zeros), "scales": scales.t()}, exact


def _gptq(weight: torch.Tensor, *, less: int = 1) -> tuple[Tensors, torch.Tensor]:
    at_I = torch.randperm(weight.shape[1]) // GROUP  # as activations order them
    numbers, zeros, scales, exact = _in_groups(weight, at_I)
    words = _packed(numbers).t().contiguous(), _packed((zeros - less).t())
    kept = {"qweight": words[0], "qzeros": words[1], "scales": scales.t(), "g_idx": at_I.int()}
    return kept, exact


def _compressed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, exact = _in_groups(weight, torch.arange(weight.shape[1]) // GROUP)
    zero_words = _packed(zeros.t()).t()
    kept = {"weight_packed": _packed(numbers), "weight_zero_point": zero_words}
    return kept | {"weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}, exact


def _fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    outputs, inputs = weight.shape
    few, scales = (
        weight.to(torch.float8_e4m3fn),
        torch.rand(-(-outputs // 32), -(-inputs // 32)) + 0.5,
    )
    spread = scales.repeat_interleave(32, 0)[:outputs].repeat_interleave(32, 1)[:, :inputs]
    return {"weight": few, "weight_scale_inv": scales}, few.float() * spread


def _fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    few = weight.to(torch.float8_e4m3fn)
    return {"weight": few, "weight_scale": torch.tensor(0.7)}, few.float() * 0.7


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    few, scales = torch.randint(-127, 128, weight.shape).to(torch.int8), torch.rand(len(weight), 1)
    return {"weight": few, "weight_scale": scales}, few.float() * scales


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    outputs, inputs = weight.shape
    blocks = torch.randint(256, (outputs, inputs // 32, 16)).to(torch.uint8)
    scales = torch.randint(120, 130, (outputs, inputs // 32)).to(torch.uint8)
    # Of an expert: transposed by it.
    exact = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, exact


Method = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
_GROUPED = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}}}
METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "fp8 in blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8": (_fp8, {"quant_method": "fp8"}),
    "int8": (_int8, {"quant_method": "compressed-tensors"}),
    "compressed-tensors": (_compressed, {"quant_method": "compressed-tensors", **_GROUPED}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq v2": (
        lambda weight: _gptq(weight, less=0),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "mxfp4": (_mxfp4, {"quant_method": "compressed-tensors"}),
}


@each_row("name", METHODS)
def test_weights_in_few_bits_become_the_floats_they_stand_for(
    saved_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of all linear modules, whose rows are read in pieces."""
    torch.manual_seed(0)
    method, settings = METHODS[name]
    model = saved_model("llama", hidden_size=64, num_attention_heads=4)
    source = tmp_path / name
    shutil.copytree(model.directory, source)
    tensors, exact = load_file(source / SINGLE_FILE), Tensors()
    for weight in [name for name in tensors if name.endswith("_proj.weight")]:
        kept, exact[weight] = method(tensors.pop(weight))
        stem = weight.removesuffix("weight")
        tensors |= {f"{stem}{part}": tensor.contiguous() for part, tensor in kept.items()}
    save_file(tensors, source / SINGLE_FILE)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=f"quantised by {settings['quant_method']}.*tsqp import"):
        Checkpoint.open(source)
    monkeypatch.setattr(plain, "_BLOCK_ELEMENTS", 24 * 64)
    found = _imported(source, dtype="float32")
    ran = CliRunner().invoke(import_, [str(source), str(tmp_path / f"{name} again")])
    assert ran.output.splitlines()[-1].endswith("again: bfloat16 weights, shards: 1")
    for weight, right in exact.items():
        torch.testing.assert_close(found[weight], right, rtol=1e-6, atol=1e-6)
    for weight in ("model.norm.weight", "lm_head.weight"):
        assert torch.equal(found[weight], tensors[weight])


def test_an_adapter_becomes_part_of_its_base(saved_model: Models, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = saved_model("llama")
    plain_weights = load_file(model.directory / SINGLE_FILE)
    down, up = torch.randn(4, 48), torch.randn(96, 4)
    stem = "model.layers.1.self_attn.q_proj"
    pair = {"lora_A": down, "lora_B": up}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}
    for more, scale in (
        ({}, 1.5),
        ({"use_rslora": True}, 3.0),
        ({"alpha_pattern": {"q_proj": 8}}, 2),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(given | more))
        save_file(
            {f"base_model.model.{stem}.{kind}.weight": x for kind, x in pair.items()},
            adapter / "adapter_model.safetensors",
        )
        shutil.rmtree(tmp_path / "adapter-plain", ignore_errors=True)
        (adapter / "chat_template.jinja").write_text("as it was trained")
        found = _imported(adapter, base=model.directory, dtype="float32")
        right = plain_weights[f"{stem}.weight"] + scale * (up @ down)
        torch.testing.assert_close(found.pop(f"{stem}.weight"), right)
        assert all(torch.equal(found[name], plain_weights[name]) for name in found)
    copied = tmp_path / "adapter-plain" / "chat_template.jinja"
    assert copied.read_text() == "as it was trained"
    with pytest.raises(SettingsError, match="--base: got none"):
        open_source(adapter)
    for key, value in (
        *(
            ("use_dora", True),
            ("peft_type", "IA3"),
            ("bias", "all"),
            ("init_lora_weights", "pissa"),
        ),
        *(("modules_to_save", ["lm_head"]), ("of a later version", True)),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(given | {key: value}))
        with pytest.raises(ModelError, match=f"{key}: got"):
            open_source(adapter, model.directory)
    (adapter / "adapter_config.json").write_text(json.dumps(given))
    with pytest.raises(ModelError, match="is it of another base"):
        open_source(adapter, saved_model("llama", hidden_size=96).directory)
    (adapter / "adapter_config.json").write_text(json.dumps(given | {"r": 8}))
    with pytest.raises(ModelError, match="or rank"):
        open_source(adapter, model.directory)
    for kept, said in (({f"{stem}.lora_A.weight": down}, "half a pair"), ({}, "expected pairs")):
        save_file(kept, adapter / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=said):
            open_source(adapter, model.directory)


def _floats(source: Source) -> torch.Tensor:
    assert source.shape("one.weight") == (48, 64)
    return source.rows("one.weight", slice(0, 8))


@each_row(
    ("tensors", "settings", "said"),
    [
        ({"weight": torch.ones(48, 64).to(torch.float8_e4m3fn)}, {}, "F8_E4M3 without a scale"),
        (
            {"weight": torch.ones(48, 64).to(torch.int8), "weight_scale": torch.ones(24, 1)},
            {"quant_method": "compressed-tensors"},
            r"weight_scale: got \(24, 1\), expected \(48, 1\)",
        ),
        ({"weight": torch.ones(48, 64)}, {"quant_method": "hqq"}, "got 'hqq', expected one of fp8"),
        (
            {"weight": torch.ones(48, 64)},
            {"quant_method": "fp8"},
            "got 'fp8', expected its tensors",
        ),
        (
            {"weight": torch.ones(48, 64)},
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            "got transform_config, expected scales of weights alone",
        ),
        (
            {"weight": torch.ones(48, 64)},
            {"quant_method": "compressed-tensors"}
            | {"config_groups": {str(n): {"weights": {"num_bits": n}} for n in (4, 8)}},
            "groups of several kinds",
        ),
        (
            {"qweight": torch.ones(8, 48).int(), "scales": torch.ones(4, 48)},
            {"quant_method": "gptq", "bits": 4},
            "qzeros: got no such tensor",
        ),
        (
            {"weight_packed": torch.ones(48, 8).int(), "weight_shape": torch.tensor([48, 64])}
            | {"weight_scale": torch.ones(48, 3)},
            _GROUPED | {"quant_method": "compressed-tensors"},
            r"weight_scale: got \(48, 3\), expected \(48, 4\)",
        ),
    ],
)
def test_weights_in_few_bits_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: Tensors, settings: dict[str, Any], said: str
) -> None:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    save_file({f"one.{part}": x for part, x in tensors.items()}, directory / SINGLE_FILE)
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(ModelError, match=said):
        _floats(open_source(directory))


def test_an_index_beside_one_file_or_out_of_the_directory_is_not_followed(
    saved_model: Models, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(saved_model("llama").directory, source)
    weight_map = {"model.norm.weight": "../other.safetensors"}
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert source / SINGLE_FILE in open_source(source).files
    (source / SINGLE_FILE).rename(tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="expected the name of a file in the same directory"):
        open_source(source)


def test_an_interrupted_import_goes_on_behind_the_last_shard(
    saved_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is no model until all of it is."""
    monkeypatch.setattr(plain, "_SHARD_BYTES", 64 * 1024)
    model, target = saved_model("llama"), tmp_path / "made"
    written: list[str] = []
    write = plain._write

    def stopping(source: Any, path: Path, *rest: Any) -> str:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        return write(source, path, *rest)

    monkeypatch.setattr(plain, "_write", stopping)
    with pytest.raises(KeyboardInterrupt):
        import_model(open_source(model.directory), target)
    assert not target.exists()
    (target.with_name(".made.import") / "of another run").touch()
    before, written[:] = list(written), []
    monkeypatch.setattr(
        plain, "_write", lambda *given: written.append(given[1].name) or write(*given)
    )
    record = import_model(open_source(model.directory), target)
    assert not set(before) & set(written)
    assert set(record["files"]) == {*before, *written}
    other = tmp_path / "other"
    shutil.copytree(saved_model("llama", seed=1).directory, other)
    target.rename(target.with_name(".made.import"))
    import_model(open_source(other), target)
    assert not (target / "of another run").exists()
    shutil.rmtree(target)
    import_model(open_source(model.directory), target)
    assert set(record["sources"]) == {"config.json", "generation_config.json", SINGLE_FILE}
    ids = token_ids(6)
    assert torch.equal(assemble(target).logits(ids), assemble(model.directory).logits(ids))
    with pytest.raises(SettingsError, match="expected a name that is free"):
        import_model(open_source(model.directory), target)


@each_row(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight: got no such tensor"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"got shape \[47\]"),
        (
            lambda t: t.update({"model.more": torch.ones(4)}),
            "what config.json does not explain, 1 in all: model.more",
        ),
        (
            lambda t: t["model.norm.weight"].fill_(torch.nan),
            "NaN or infinity.* finite in float32",
        ),
    ],
)
def test_tensors_that_the_table_does_not_explain_are_named(
    saved_model: Models, tmp_path: Path, change: Callable[[Tensors], Any], said: str
) -> None:
    source = tmp_path / said[:9]
    shutil.copytree(saved_model("llama").directory, source)
    tensors = load_file(source / SINGLE_FILE)
    change(tensors)
    save_file(tensors, source / SINGLE_FILE)
    with pytest.raises(ModelError, match=said):
        import_model(open_source(source), tmp_path / "made")
    assert not (tmp_path / "made").exists()


@each_row(
    ("settings", "said"),
    [
        ({"group_size": "128"}, "TypeError"),
        ({"config_groups": [1]}, "AttributeError"),
        ({"weight_block_size": [0, 0]}, "ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_together_is_an_error_of_the_source(
    saved_model: Models, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    source = tmp_path / said
    shutil.copytree(saved_model("llama").directory, source)
    tensors = load_file(source / SINGLE_FILE)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(96, 1)
    save_file(tensors, source / SINGLE_FILE)
    raw = json.loads((source / "config.json").read_text())
    few = {"quant_method": "compressed-tensors"} | settings
    (source / "config.json").write_text(json.dumps(raw | {"quantization_config": few}))
    ran = CliRunner().invoke(import_, [str(source), str(tmp_path / "made")])
    assert isinstance(ran.exception, ModelError)
    assert ran.exception.where == str(source)
    assert ran.exception.got.startswith(said)


def test_the_text_model_of_a_wrapper_and_one_without_a_head(
    saved_model: Models, tmp_path: Path
) -> None:
    """Its weights have the type that is written, wherever config.json says so."""
    model = saved_model("qwen3", tie_word_embeddings=False)
    for name, prefix in (("wrapped", "language_model.model."), ("bare", "")):
        source = tmp_path / name
        shutil.copytree(model.directory, source)
        tensors = load_file(source / SINGLE_FILE)
        del tensors["lm_head.weight"]
        renamed = {n.replace("model.", prefix, 1): tensor for n, tensor in tensors.items()}
        save_file(renamed, source / SINGLE_FILE)
        if prefix:
            text = json.loads((saved_model("mistral").directory / "config.json").read_text())
            text["dtype"] = "bfloat16"
            shutil.copy(saved_model("mistral").directory / SINGLE_FILE, source)
            own = load_file(source / SINGLE_FILE)
            save_file(
                {n.replace("model.", prefix, 1): tensor for n, tensor in own.items()},
                source / SINGLE_FILE,
            )
            wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
            (source / "config.json").write_text(json.dumps(wrapper))
        _imported(source, dtype="float32")
        config, _ = Checkpoint.open(tmp_path / f"{name}-plain")
        assert (config.dtype, config.generates) == ("float32", bool(prefix))


def test_a_tokenizer_of_sentencepiece_is_made_tokenizer_json_and_no_code_runs(
    saved_model: Models, tmp_path: Path
) -> None:
    source, target = tmp_path / "model", tmp_path / "made"
    shutil.copytree(saved_model("llama").directory, source)
    text = source / "text.txt"
    text.write_text("the cat sat on the mat with an owl and a fox\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(source / "tokenizer"), vocab_size=22, minloglevel=2
    )
    said = {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (source / "own.py").write_text("raise SystemExit")
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    import_model(open_source(source), target)
    ids = Tokenizer(target).encode("the owl sat", add_special_tokens=False)
    right = sentencepiece.SentencePieceProcessor(str(source / "tokenizer.model"))
    assert ids == right.encode("the owl sat")
