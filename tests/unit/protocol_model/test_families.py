"""Every family refuses what it cannot explain, and finds its tensors wherever a file has them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protocol.errors import ModelError
from protocol.model.architectures import ARCHITECTURES, NEUTRAL
from protocol.model.checkpoint import (
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
    model_digest,
)
from protocol.model.config import read_config
from tests.equivalence.tolerances import FLOAT32_LOGITS
from tests.kit.model import KINDS, Models, assemble, make_model, token_ids
from tests.kit.rows import each_row

Tensors = dict[str, torch.Tensor]


def _change(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def _settle(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _check(directory: Path) -> None:
    config, checkpoint = Checkpoint.open(directory)
    checkpoint.require(light_tensors(config) | linear_tensors(config))
    checkpoint.refuse_extra(config)


def test_the_table_of_tests_has_every_architecture(saved_model: Models) -> None:
    names = {read_config(saved_model(kind).directory).architecture for kind in KINDS}
    assert names == set(ARCHITECTURES)
    assert len(names) >= 29


@each_row("kind", KINDS)
def test_a_tensor_that_is_missing_misshapen_or_too_much_is_named(
    saved_model: Models, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(saved_model(kind).directory, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    _check(tmp_path)
    names = sorted(load_file(tmp_path / SINGLE_FILE))
    layer = [name for name in names if ".layers.1." in name and "act_fn" not in name]
    for name in (
        layer[0],
        next(n for n in layer if "norm" in n),
        next(n for n in layer if "_proj" in n),
    ):
        for change, said in (
            (lambda t, name=name: t.pop(name), "got no such tensor"),
            (lambda t, name=name: t.update({name: torch.ones(3, 5)}), r"got shape \[3, 5\]"),
            (
                lambda t, name=name: t.update({f"{name}.more": torch.ones(2)}),
                "got a tensor that config.json does not explain",
            ),
        ):
            _change(tmp_path, change)
            with pytest.raises(ModelError, match=said) as caught:
                _check(tmp_path)
            assert name in str(caught.value)
            (tmp_path / SINGLE_FILE).write_bytes(whole)


@each_row("kind", KINDS)
def test_a_number_of_another_family_is_refused_by_its_key(
    saved_model: Models, tmp_path: Path, kind: str
) -> None:
    """It would be another model without it; a value that changes nothing is none."""
    shutil.copytree(saved_model(kind).directory, tmp_path, dirs_exist_ok=True)
    content, table = (tmp_path / "config.json").read_text(), read_config(tmp_path).table
    read = {number.key for number in table.numbers.values()}
    read |= {"sliding_window"} if table.windows != "none" else set()
    read |= {"no_rope_layers"} if table.rope == "listed" else set()
    for key in NEUTRAL.keys() - read:
        _settle(tmp_path, **{key: 7})
        with pytest.raises(ModelError, match=rf"config\.json: {key}: got 7, expected .+, for a"):
            read_config(tmp_path)
        for neutral in (None, *table.neutral.get(key, NEUTRAL[key])):
            _settle(tmp_path, **{key: neutral})
            read_config(tmp_path)
        (tmp_path / "config.json").write_text(content)
    rope = json.loads(content)["rope_parameters"]
    rope = next(iter(rope.values())) if "full_attention" in rope else rope
    for key in {"alpha", "partial_rotary_factor"} - table.rope_keys:
        _settle(tmp_path, rope_parameters=rope | {key: 0.5})
        with pytest.raises(ModelError, match=f"{key}: got 0.5"):
            read_config(tmp_path)


def test_keys_of_rope_that_nobody_reads_change_nothing(saved_model: Models, tmp_path: Path) -> None:
    """As a popular distillate of Qwen3 has `attn_factor` beside yarn."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = saved_model("qwen3", rope_parameters={**yarn, "rope_theta": 1e4})
    shutil.copytree(model.directory, tmp_path, dirs_exist_ok=True)
    _settle(
        tmp_path, rope_parameters=None, rope_theta=1e4, rope_scaling=yarn | {"attn_factor": 0.8}
    )
    ids = token_ids(40)
    FLOAT32_LOGITS.check(assemble(tmp_path).logits(ids), model.logits(ids))


def test_a_tied_embedding_is_the_head_only_where_the_files_agree(tmp_path: Path) -> None:
    """Another matrix beside it is the head, as for transformers."""
    make_model(tmp_path, tie_word_embeddings=True)
    tied, checkpoint = Checkpoint.open(tmp_path)
    digest = model_digest(tied, checkpoint)
    embedding = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"]
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    same, checkpoint = Checkpoint.open(tmp_path)
    assert same == tied
    assert model_digest(same, checkpoint) == digest
    halves = embedding.to(torch.bfloat16)
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": halves}))
    assert not Checkpoint.open(tmp_path)[0].tie_word_embeddings
    other = embedding.clone()
    other[300, 7] += 0.5
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": other}))
    apart, checkpoint = Checkpoint.open(tmp_path)
    assert not apart.tie_word_embeddings
    assert model_digest(apart, checkpoint) != digest
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = token_ids(9)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    for policy in ("tee-only", "published"):
        FLOAT32_LOGITS.check(assemble(tmp_path, policy).logits(ids), expected)


@each_row("kind", ["ministral3", "apertus", "cwm"])
def test_a_file_that_says_nothing_of_rope_has_what_its_class_has(
    saved_model: Models, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / kind
    shutil.copytree(saved_model(kind).directory, target)
    settings = json.loads((target / "config.json").read_text())
    del settings["rope_parameters"]
    (target / "config.json").write_text(json.dumps(settings))
    reference: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids(40)])).logits[0]
    FLOAT32_LOGITS.check(assemble(target).logits(token_ids(40)), expected)


def test_a_wrapper_says_outside_whether_its_head_is_the_embedding(
    saved_model: Models, tmp_path: Path
) -> None:
    """As transformers 5 saves Mistral 3, of which the text model says that it is not."""
    model = saved_model("mistral", tie_word_embeddings=True)
    shutil.copytree(model.directory, tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    _change(
        tmp_path,
        lambda t: [
            t.update({n.replace("model.", "model.language_model.", 1): t.pop(n)}) for n in [*t]
        ],
    )
    _check(tmp_path)
    FLOAT32_LOGITS.check(assemble(tmp_path).logits(token_ids(9)), model.logits(token_ids(9)))
    wrapper["text_config"] = text | {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    with pytest.raises(ModelError, match="text_config: model_type: got 'qwen3', expected one of"):
        read_config(tmp_path)


@each_row("prefix", ["", "language_model.model.", "model.language_model."])
def test_names_may_have_another_beginning(saved_model: Models, tmp_path: Path, prefix: str) -> None:
    """As embedding models have none, and the text model of a larger file has a longer one."""
    model = saved_model("gemma3")
    shutil.copytree(model.directory, tmp_path, dirs_exist_ok=True)

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            new = name.replace("model.", prefix, 1)
            if name == "lm_head.weight" and prefix == "language_model.model.":
                new = "language_model.lm_head.weight"
            tensors[new] = tensors.pop(name)
        if prefix:
            tensors["vision_tower.patch.weight"] = torch.ones(3)

    _change(tmp_path, rename)
    if prefix:
        settings = json.loads((tmp_path / "config.json").read_text())
        wrapper = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": settings,
            "vision_config": {"hidden_size": 8},
        }
        (tmp_path / "config.json").write_text(json.dumps(wrapper))
    _check(tmp_path)
    ids = token_ids(9)
    FLOAT32_LOGITS.check(assemble(tmp_path).logits(ids), model.logits(ids))


@each_row(
    ("made", "got", "expected"),
    [
        ("model.gguf", "a GGUF file", "tsqp import"),
        ("model.safetensors", "a file", "in which it may be"),
        ("adapter/adapter_config.json", "no config.json but an adapter", "tsqp import --base"),
        (None, "no such directory", "a Hugging Face directory"),
    ],
)
def test_what_is_no_directory_is_told_and_what_helps(
    tmp_path: Path, made: str | None, got: str, expected: str
) -> None:
    path = tmp_path / (made or "none")
    if made:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    with pytest.raises(ModelError) as caught:
        read_config(path.parent if path.suffix == ".json" else path)
    assert caught.value.got == got
    assert expected in caught.value.expected
    # Before sizes that it does not have.
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3Model"]}')
    with pytest.raises(ModelError, match="got 'Qwen3Model', expected Qwen3ForCausalLM, whose"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="as tsqp pull gets from a hub"):
        read_config(Path("org/name"))
