"""lm-evaluation-harness against a real server: the numbers that it gets from transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.service import ENVIRONMENT, TEE_ONLY, running_server
from tsqp.run.settings import model_directory

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Sums of up to a hundred log-probabilities in float32.
TOLERANCE = 1e-4
STORIES = (
    ("Once upon a time there was a clever", [" fox", " of", " 7"], 0),
    ("She lived in a den near the", [" named", " island", "ing"], 1),
    ("Her friend sat down next to", [" was", " the the", " her"], 2),
    ("They tried again the next", [" day", " blanket", " slowly did"], 0),
    ("He was happy. He was", [" and", " proud", "."], 2),  # what no model says
    ("Tell me a story about a", ["?", " fox", " under"], 1),
)
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}{{choices[gold]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "story": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path) -> None:
    rows = [{"text": text, "choices": choices, "gold": gold} for text, choices, gold in STORIES]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / "rows.json")}}
    for name, fields in TASKS.items():
        task = {"task": name, **data, "test_split": "train", **fields}
        (folder / f"{name}.yaml").write_text(json.dumps(task))


@pytest.mark.slow
def test_the_harness_gets_the_numbers_of_transformers(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    demo = str(model_directory("demo"))
    by_hub = {"tokenizer": demo, "tokenizer_backend": "huggingface", "max_length": 512}
    with_bos = by_hub | {"add_bos_token": True}
    with running_server(*TEE_ONLY) as server:
        ours = {"base_url": f"{server.base_url}/completions", "model": "demo", "max_length": 512}
        runs = [
            ("transformers", with_bos | {"model": demo}, [*TASKS]),
            ("transformers", by_hub | {"model": demo}, [*TASKS]),
            ("local-completions", with_bos | ours | {"batch_size": 4}, [*TASKS]),
            # With our own /tokenize, which the harness finds by itself, and requests side by side.
            # It takes a BOS that is number 0 for none.
            (
                "local-completions",
                ours | {"num_concurrent": 4, "custom_prefix_token_id": 0},
                [*TASKS],
            ),
            # Of texts the harness does not count our BOS: it could not tell scores apart.
            ("local-completions", with_bos | ours | {"tokenized_requests": False}, ["story"]),
        ]
        subprocess.run(
            [sys.executable, "-m", "tests.kit.lm_eval_reference", str(tmp_path), json.dumps(runs)],
            check=True,
            env={**ENVIRONMENT, **OFFLINE, "HF_HOME": str(tmp_path / "hf")},
        )
    with_bos_wanted, wanted, *found = json.loads((tmp_path / "results.json").read_text())
    assert 0 < wanted["choice"]["metrics"]["acc,none"] < 1
    for one, reference in zip(found, (with_bos_wanted, wanted, with_bos_wanted), strict=True):
        for name, result in one.items():
            expected = reference[name]
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
            assert len(result["answers"]) == len(STORIES)
            for got, due in zip(_flat(result["answers"]), _flat(expected["answers"]), strict=True):
                assert got == (pytest.approx(due, abs=TOLERANCE) if isinstance(due, float) else due)


def _flat(answers: Any) -> list[float | bool | str]:
    """Return log-likelihoods, whether each is of the likeliest text, and texts: those are equal."""
    if isinstance(answers, list):
        return [part for one in answers for part in _flat(one)]
    return [answers]
