"""Tests of the demo model's training, and of the demo model that the package ships."""

import itertools
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tsqp
from tsqp.tools.train_demo.chat_format import (
    BEGIN,
    END,
    END_OF_TURN,
    render,
    without_special_tokens,
)
from tsqp.tools.train_demo.conversation import Document
from tsqp.tools.train_demo.corpus import Corpus
from tsqp.tools.train_demo.evaluation import VALIDATION_FILE, evaluate
from tsqp.tools.train_demo.progress import LineProgress, default_progress
from tsqp.tools.train_demo.record import TrainingRecord, read_record, write_record
from tsqp.tools.train_demo.train import OutputDirectoryError, learning_rate, train_demo

SHIPPED = Path(tsqp.__file__).parent / "demo_model"


def _tiny_run(output: Path) -> TrainingRecord:
    return train_demo(
        output,
        seed=3,
        tokens=6000,
        threads=1,
        progress=LineProgress(),
        validation_documents=4,
        tokenizer_documents=300,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingRecord]:
    output = tmp_path_factory.mktemp("demo") / "model"
    return output, _tiny_run(output)


@pytest.mark.slow
def test_saved_directory_loads(trained: tuple[Path, TrainingRecord]) -> None:
    output, record = trained
    model = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.dtype == torch.float32
    assert sum(weight.numel() for weight in model.parameters()) == record.parameters
    assert len(tokenizer) == model.config.vocab_size == 1024
    assert tokenizer("Once")["input_ids"][0] == model.config.bos_token_id
    ends = tokenizer.convert_tokens_to_ids([END, END_OF_TURN])
    assert model.generation_config.eos_token_id == ends
    assert not model.generation_config.do_sample


@pytest.mark.slow
def test_tokenizer_restores_any_text(trained: tuple[Path, TrainingRecord]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    for text in ("Mia's kite , and\n  more.", "Straße 雨 🎈"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_chat_template_agrees_with_the_training_text(
    trained: tuple[Path, TrainingRecord],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    turns = (("user", "Hello!"), ("assistant", "Hi."), ("user", "A story, please."))
    messages = [{"role": role, "content": text} for role, text in turns]
    whole = tokenizer.encode(render(Document((), turns)), add_special_tokens=False)
    prompt = tokenizer.apply_chat_template(messages, return_dict=False)
    assert [*prompt, tokenizer.eos_token_id] == whole
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == [*prompt, tokenizer.convert_tokens_to_ids("<|assistant|>")]


@pytest.mark.slow
def test_record_holds_the_loss_of_the_saved_weights(
    trained: tuple[Path, TrainingRecord],
) -> None:
    output, record = trained
    assert read_record(output) == record
    assert json.loads((output / "training.json").read_text("utf-8")) == asdict(record)
    assert evaluate(output).nats_per_token == pytest.approx(
        record.validation_loss_nats_per_token, abs=1e-4
    )
    assert str(output) not in (output / "README.md").read_text("utf-8")
    assert record.validation_documents == 4
    assert record.steps == 3


@pytest.mark.slow
def test_same_seed_gives_identical_weights_and_leaves_global_state_alone(
    trained: tuple[Path, TrainingRecord], tmp_path: Path
) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    _tiny_run(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", VALIDATION_FILE):
        assert (tmp_path / "again" / name).read_bytes() == (trained[0] / name).read_bytes()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_output_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me", "utf-8")
    with pytest.raises(OutputDirectoryError, match="not empty"):
        train_demo(tmp_path)
    with pytest.raises(OutputDirectoryError):
        train_demo(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text("utf-8") == "keep me"


def test_training_text_has_no_validation_story() -> None:
    corpus = Corpus(1, 30)
    held_out = {without_special_tokens(text) for text in corpus.validation}
    seen = {without_special_tokens(text) for text in itertools.islice(corpus.texts("t"), 500)}
    assert len(held_out) == 30
    assert not held_out & seen


def test_rows_have_the_length_asked_for() -> None:
    corpus = Corpus(1, 1)
    encode = lambda text: [ord(character) for character in text]  # noqa: E731
    packed = list(itertools.islice(corpus.packed_rows("t", encode, 100), 20))
    aligned = list(itertools.islice(corpus.aligned_rows("t", encode, 100), 20))
    assert {len(row) for row in packed + aligned} == {100}
    joined = "".join(itertools.islice(corpus.texts("t"), 20))
    assert "".join(chr(code) for row in packed for code in row) == joined[:2000]
    assert all("".join(map(chr, row)).startswith(BEGIN) for row in aligned)


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    peak = rates.index(max(rates))
    assert 0 < peak < 10
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)


def test_progress_prints_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(default_progress(), LineProgress)
    with LineProgress(every=2) as progress:
        for step in (1, 2, 3):
            progress.update(step, 3, step * 10, 1.5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["2/3", "3/3"]
    assert all("loss 1.5000" in line and "tokens/s" in line for line in lines)


def test_shipped_model_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    needed = {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "training.json", "validation.txt",
        "README.md",
    }  # fmt: skip
    assert needed <= files.keys()
    assert sum(files.values()) < 10_000_000


def _sections(directory: Path) -> dict[str, str]:
    """Return the text of a model card by heading, without its line breaks."""
    parts = re.split(r"^##? ", (directory / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    texts = (part.partition("\n") for part in parts if part)
    return {title: " ".join(text.split()) for title, _, text in texts}


def test_the_shipped_card_is_what_training_writes_but_for_the_calibration(tmp_path: Path) -> None:
    """The shipped model was calibrated afterwards, which is all that its card has changed."""
    write_record(tmp_path, read_record(SHIPPED))
    made, shipped = _sections(tmp_path), _sections(SHIPPED)
    assert list(made) == list(shipped)
    assert {title for title in made if made[title] != shipped[title]} == {"Calibration"}
    for words in (
        "`calibration.safetensors` holds the activation scales that policies with integer"
        " arithmetic need, `shielded` among them.",
        "from a text of many kinds that ships with TSQP (`tsqp/calibration_text.txt`), not from the"
        " training or validation text",
        "It holds digests of the model and is refused beside another one. The scales come out the"
        " same; the order of names in the file's header may not.",
        "`tsqp calibrate ",
    ):
        assert words in made["Calibration"]
        assert words in shipped["Calibration"]
    assert not (tmp_path / "calibration.safetensors").exists()
    assert (SHIPPED / "calibration.safetensors").exists()


@pytest.mark.slow
def test_shipped_model_has_its_recorded_loss() -> None:
    record = read_record(SHIPPED)
    evaluation = evaluate(SHIPPED)
    assert evaluation.nats_per_token == pytest.approx(
        record.validation_loss_nats_per_token, abs=1e-3
    )
    assert evaluation.bits_per_byte == pytest.approx(record.validation_bits_per_byte, abs=1e-3)
    assert (evaluation.documents, evaluation.tokens) == (
        record.validation_documents,
        record.validation_tokens,
    )
    assert evaluation.nats_per_token < math.log(1024) / 4


@pytest.mark.slow
def test_shipped_model_tells_a_story_about_the_hero_asked_for() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(SHIPPED)
    tokenizer: Any = AutoTokenizer.from_pretrained(SHIPPED)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me a story about Mia and a kite."}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=256)
    text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert text.endswith(END_OF_TURN)
    assert "Mia" in text
    assert len(text.split()) >= 60
