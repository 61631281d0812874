"""EleutherAI's evaluation harness: by completions with log-probabilities, and by chats."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused"}

from checks import BASE_URL, MODEL, SAID, check, run, same
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROWS = [{"text": "The cat", "choices": [" sat", " ran"], "gold": 0}] * 3
TASKS: Any = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_target": SAID,
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 64, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
_folder = TemporaryDirectory()
os.environ["HF_HOME"] = _folder.name
_rows = Path(_folder.name) / "rows.json"
_rows.write_text("\n".join(map(json.dumps, ROWS)))
_DATA = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(_rows)}}
for _name, _fields in TASKS.items():
    _task = {"task": _name, **_DATA, "test_split": "train", "doc_to_text": "{{text}}", **_fields}
    (Path(_folder.name) / f"{_name}.yaml").write_text(json.dumps(_task))


def _metrics(kind: str, path: str, tasks: list[str], **options: Any) -> dict[str, Any]:
    given = {"model": MODEL, "base_url": f"{BASE_URL}/{path}", **options}
    manager = TaskManager(include_path=_folder.name, include_defaults=False)
    found = simple_evaluate(
        model=kind,
        model_args=given,
        tasks=tasks,
        task_manager=manager,
        bootstrap_iters=0,
        apply_chat_template=kind == "local-chat-completions",
    )
    return found["results"]


@check("local-completions: likelihoods and texts")
def _() -> None:
    remote = {"tokenizer_backend": "remote", "batch_size": 2, "max_length": 512}
    found = _metrics("local-completions", "completions", ["choice", "text"], **remote)
    same(found["choice"]["sample_len"], len(ROWS))
    same(found["text"]["exact_match,none"], 1)


@check("local-chat-completions: texts")
def _() -> None:
    found = _metrics("local-chat-completions", "chat/completions", ["text"], num_concurrent=2)
    same(found["text"]["exact_match,none"], 1)


run("lm_eval")
