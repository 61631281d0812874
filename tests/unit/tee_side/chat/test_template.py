"""What a chat template may do, and what of a client's words it may make."""

import shutil
import sys
import traceback
from pathlib import Path

import pytest

from protocol.errors import ModelError, PromptError
from tee_side.chat import sandbox
from tee_side.chat.template import ChatTemplate, Conversation
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.rows import each_row
from tsqp.run.settings import model_directory

CANARY = "canary-5309"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer: byte-level BPE with BOS, as Llama 3 and Qwen have them."""
    path = tmp_path_factory.mktemp("byte-level")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory("demo") / name, path)
    return path


_DAMAGED = "chat_template.jinja: got Template"
_ENDLESS = r"chat template: got no end after 0\.2 s"
_LOOP, _END = "{% for i in range(99999) %}", "{% endfor %}"
_CALLS = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
# A number of 8,000 bits: one larger than others may be made, and no operation takes it.
_LARGE = "{% set n = 2 ** 2000 * 2 ** 2000 %}{% set m = n * n %}"


@each_row(
    ("template", "error", "said"),
    [
        # What it says of the messages is not shown.
        ("{{ raise_exception(messages[0].content) }}", PromptError, "TemplateError .* not shown"),
        ("{{ messages[0][messages[0].content] + 1 }}", PromptError, "not shown"),
        ("{{ 1 / 0 }}", PromptError, "ZeroDivisionError"),
        # It cannot leave its sandbox.
        ("{{ messages.append(1) }}", PromptError, "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", PromptError, "SecurityError"),
        ("{% include 'config.json' %}", PromptError, "TypeError"),
        # No other conversation would help.
        ("{% if %}", ModelError, _DAMAGED),
        ("{{ messages | no_such_filter }}", ModelError, _DAMAGED),
        # It has to end.
        (_LOOP + _LOOP + _END + _END, ModelError, _ENDLESS),
        (_CALLS + "{{ f(60) }}", ModelError, _ENDLESS),
        (_LOOP + "{% set x = range(99999) | map('int') | list %}" + _END, ModelError, _ENDLESS),
        (_LOOP + "x" * 100_000 + _END, ModelError, "more than 16777216 characters"),
        # The watch sees lines of Python alone, not how long one takes.
        ("{{ 10 ** (10 ** 10) }}", PromptError, "OverflowError"),
        ("{{ 'x' * 10 ** 10 }}", PromptError, "OverflowError"),
        ("{{ 10 ** 10 * [1] }}", PromptError, "OverflowError"),
        (_LARGE + "{{ m ** 2 }}", PromptError, "OverflowError"),
        ("{{ 'ab' * 2 }} {{ 2 ** 10 }} {{ 3 * 4 }} {{ 1.5 * 2 }}", None, "abab 1024 12 3.0"),
    ],
)
def test_what_a_template_may_do(
    directory: Path, tmp_path: Path, template: str, error: type[Exception] | None, said: str
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer, before = Tokenizer(tmp_path), sys.gettrace()
    found = ChatTemplate(tokenizer)
    messages = [{"role": "tool", "content": CANARY}]
    if error is None:
        assert tokenizer.decode(found.encode(Conversation(messages=messages))) == said
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_TEMPLATE_SECONDS", 0.2 if said == _ENDLESS else 10.0)
        with pytest.raises(error, match=said) as caught:
            found.encode(Conversation(messages=messages))
    assert str(tmp_path) in str(caught.value)
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert sys.gettrace() is before
