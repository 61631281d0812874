"""Runs lm-evaluation-harness on tasks of a folder, in a process of its own without a network.

    python -m tests.kit.lm_eval_reference FOLDER '[["local-completions", {...}, ["task"]], ...]'

Writes FOLDER/results.json: for each run its metrics, and what was answered to each request.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager


@register_model("transformers")
class Reference(LocalCompletionsAPI):
    """The harness's own client, whose requests transformers answers in this process."""

    def model_call(
        self, messages: Any, *, generate: bool = True, gen_kwargs: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Answer in OpenAI's form, with no more than the harness reads."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        with torch.inference_mode():
            answer = _continued if generate else _scored
            choices = [answer(self, model, ids, gen_kwargs) for ids in messages]
        return {"choices": [{"index": at, **choice} for at, choice in enumerate(choices)]}


def _scored(_: Reference, model: Any, ids: list[int], __: Any) -> dict[str, Any]:
    scores_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = scores_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    top = [{"": best} for best in scores_TV.amax(-1).tolist()]
    # The last entry is of a token that follows, which the harness leaves out.
    return {"logprobs": {"token_logprobs": [None, *own, 0.0], "top_logprobs": [None, *top]}}


def _continued(client: Reference, model: Any, ids: list[int], wanted: Any) -> dict[str, Any]:
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=wanted["max_gen_toks"],
        do_sample=False,
    )
    text = client.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return {"text": text.split(wanted["until"][0])[0]}


def evaluate(folder: Path, model: str, options: dict[str, Any], names: list[str]) -> dict[str, Any]:
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(
        model, options, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True
    )
    return {
        name: {
            "metrics": {
                key: value
                for key, value in found["results"][name].items()
                if isinstance(value, float)
            },
            "answers": [one["resps"] for one in found["samples"][name]],
        }
        for name in names
    }


if __name__ == "__main__":
    here = Path(sys.argv[1])
    results = [evaluate(here, *one) for one in json.loads(sys.argv[2])]
    (here / "results.json").write_text(json.dumps(results))
