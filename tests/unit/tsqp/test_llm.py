"""A model in Python: what comes back, and by which names."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.train_demo import train_demo
from protocol.errors import EngineError, LimitError, ModelError, PromptError, SettingsError
from protocol.model.checkpoint import SINGLE_FILE
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.model import Models
from tests.kit.rows import each_row
from tsqp import LLM, SamplingParams
from tsqp.accuracy import measure
from tsqp.run.settings import model_directory

PROMPT = "Once upon a time"
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", policy="tee-only-int8", max_num_seqs=4, threads=1) as made:
        yield made


def test_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [PROMPT, "The cat", [5, 6, 7], "Tom", "A small house"]
    together = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == [*prompts[:2], None, *prompts[3:]]
    assert together[2].prompt_token_ids == [5, 6, 7]
    assert "".join(llm.stream(PROMPT, GREEDY)) == together[0].outputs[0].text
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate([prompt], GREEDY)[0]  # type: ignore[list-item]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].text == output.outputs[0].text
    assert llm.stats.running == llm.stats.waiting == 0


def test_a_chat_is_asked_and_read_as_over_http(tmp_path: Path) -> None:
    """Tools are in the prompt; what follows the beginning of thinking is no text."""
    shutil.copytree(model_directory("demo"), tmp_path, dirs_exist_ok=True)
    written = "{{ tools | tojson }} {{ documents[0].text }} {{ begins }} {{ reasoning_effort }}"
    written += "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}<think>"
    (tmp_path / "chat_template.jinja").write_text(f"{{# <tool_call> </think> #}}{written}")
    function = {"name": "weather", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    with LLM(str(tmp_path), policy="tee-only", threads=1) as llm:
        asked: dict[str, Any] = {"documents": [{"text": "hi"}], "tools": tools}
        said = [{"role": "developer", "content": [{"type": "text", "text": "ab"}]}]
        more: dict[str, Any] = {"reasoning_effort": "low", "chat_template_kwargs": {"begins": "so"}}
        (output,) = llm.chat(said, GREEDY, **more, **asked)
        (sample,) = output.outputs
        text = Tokenizer(tmp_path).decode(output.prompt_token_ids)
        assert text == f"{json.dumps(tools)} hi so lowsystem ab<think>"
        assert (sample.text, sample.tool_calls) == ("", [])
        assert sample.reasoning == Tokenizer(tmp_path).decode(sample.token_ids).strip()
        strict = [{"type": "function", "function": function | {"strict": True}}]
        for wrong, expected in (
            ({"tools": [{"type": "x"}]}, "functions, as OpenAI's"),
            ({"tools": strict}, "got strict, expected none that is"),
            ({"reasoning_effort": "none"}, "a model that always thinks"),
            ({"reasoning_effort": "off"}, "expected one of none, minimal"),
            ({"chat_template_kwargs": {"tools": []}}, "tools, which stands beside these"),
            ({"chat_template_kwargs": 5}, "expected a mapping"),
            ({"messages": None}, "expected mappings"),
            ({"messages": [{"content": "a"}]}, "got turns of another form, expected OpenAI's"),
        ):
            with pytest.raises(PromptError, match=expected):
                llm.chat(**{"messages": [], "sampling_params": GREEDY} | asked | wrong)  # type: ignore[arg-type]


def test_a_chat_has_samples_with_log_probabilities_up_to_a_stop_string(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    params = SamplingParams(n=2, seed=7, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (output,) = llm.chat(messages, params)
    one, two = output.outputs
    assert one.text != two.text
    for sample in output.outputs:
        found = [(each.token_id, len(each.top)) for each in sample.logprobs or []]
        assert found == [(token_id, 2) for token_id in sample.token_ids]
    read = [found and found.token_id for found in output.prompt_logprobs or []]
    assert read == [None, *output.prompt_token_ids[1:]]
    params = SamplingParams(seed=7, max_tokens=5, stop=one.text[3:6])
    stopped = llm.chat(messages, params)[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == (one.text[:3], "stop")


def test_a_stream_that_is_given_up_frees_its_place(llm: LLM) -> None:
    for _ in range(6):  # more than run at a time
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        stream.close()
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_prompt_that_is_refused_ends_those_before_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    before = llm.stats.generation_tokens
    with pytest.raises(PromptError):
        llm.generate([PROMPT, []], params)
    while llm.stats.running + llm.stats.waiting:
        time.sleep(0.01)
    assert llm.stats.generation_tokens - before < 400


@each_row(
    "wrong",
    [
        lambda llm: llm.generate([[]]),
        lambda llm: llm.generate([[10**6]]),
        lambda llm: llm.generate(["word " * 5000]),
        lambda llm: llm.generate([[1.5]]),
        lambda llm: llm.generate("a", {"max_tokens": 3}),
        lambda llm: llm.generate("a", SamplingParams(stop=[1])),  # type: ignore[list-item]
        lambda llm: llm.generate("a", SamplingParams(temperature=-1)),
        lambda llm: llm.generate("a", SamplingParams(n=5)),  # more than run at a time
        lambda llm: llm.chat([[{"role": "user", "content": "a"}]]),
        lambda llm: list(llm.stream([{"role": "user", "content": "a"}, "b"])),
    ],
    ids=map(str, range(10)),
)
def test_what_is_of_another_kind_is_refused_and_ends_nothing(llm: LLM, wrong: Any) -> None:
    with pytest.raises((PromptError, LimitError)):
        wrong(llm)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].finish_reason == "length"


@each_row(
    ("option", "value", "said"),
    [
        ("polcy", "shielded", "LLM: got the option 'polcy', expected .*did you mean policy"),
        ("max_new_tokens", 5, "SamplingParams"),
        ("threads", 0, "LLM: threads: got 0, expected greater than or equal to 1"),
        ("threads", True, "LLM: threads: got True"),
        ("when_out", "never", "LLM: when_out: got 'never', expected 'wait', 'tee' or 'fail'"),
        ("tool_parser", "x", "LLM: tool_parser: got another form, expected one of deepseek, "),
        ("gpu", [3], r"LLM: gpu\.0: got 3"),
        ("spin_us", float("nan"), "LLM: spin_us: got nan"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(option: str, value: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        LLM("/nowhere", **{option: value})


def test_a_stream_that_is_open_when_the_model_is_closed_ends_with_an_error() -> None:
    with LLM("demo", policy="tee-only-int8", threads=1) as llm:
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        llm.close()
        with pytest.raises(EngineError):
            list(stream)


@pytest.mark.slow
def test_a_demo_model_that_was_trained_loads(tmp_path: Path) -> None:
    train_demo(tmp_path, tokens=6000, validation_documents=20, tokenizer_documents=400)
    with LLM(str(tmp_path), policy="tee-only", threads=1) as llm:
        assert len(llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))) == 1


def test_vectors_are_those_of_transformers_as_the_models_own_files_say(
    saved_model: Models, tmp_path: Path
) -> None:
    """In Qwen3-Embedding's layout: names without prefix, the last token, length 1, a prompt."""
    model = saved_model("qwen3", vocab_size=1024, tie_word_embeddings=True)
    shutil.copytree(model.directory, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory("demo") / name, tmp_path)
    weights = load_file(tmp_path / SINGLE_FILE)
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, tmp_path / SINGLE_FILE)
    kinds = ("Transformer", "Pooling", "Normalize")
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    prompts = {"prompts": {"query": "The question is: ", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    texts = ["a fox and an owl", "The cat"]
    with LLM(str(tmp_path), policy="tee-only", threads=1) as llm:
        found = llm.embed(texts)
        asked = llm.embed(texts[0], prompt_name="query")
        short = llm.embed(texts[0], dimensions=8)
        for wrong in ({"prompt_name": "other"}, {"dimensions": 0}, {"dimensions": 49}):
            with pytest.raises(PromptError, match=f"{next(iter(wrong))}: got another value"):
                llm.embed(texts[0], **wrong)
    tokenizer, body = Tokenizer(tmp_path), model.reference.base_model
    for text, vector in zip(
        [*texts, "The question is: a fox and an owl"], found + asked, strict=True
    ):
        with torch.inference_mode():
            last = body(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=-1)
        torch.testing.assert_close(torch.tensor(vector), expected, rtol=0, atol=2e-5)
    cut = torch.nn.functional.normalize(torch.tensor(found[0][:8]), dim=-1)
    torch.testing.assert_close(torch.tensor(short[0]), cut)
    # Without an LM head, as the larger ones are published: vectors alone.
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    with LLM(str(tmp_path), policy="tee-only", threads=1) as llm:
        again = torch.tensor(llm.embed(texts))  # which share a step or do not
        torch.testing.assert_close(again, torch.tensor(found), rtol=0, atol=2e-5)
        with pytest.raises(PromptError, match="got a model without an LM head"):
            llm.generate(texts)
    with pytest.raises(ModelError, match="got a model without an LM head"):
        measure(tmp_path, "a text")
    (tmp_path / "modules.json").write_text('[{"type": "models.Dense"}]')
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with LLM(str(tmp_path), policy="tee-only", threads=1) as llm:
        llm.generate(texts[:1], SamplingParams(max_tokens=1))
        with pytest.raises(ModelError, match=r"modules\.json"):
            llm.embed(texts)
