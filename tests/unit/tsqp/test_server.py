"""`tee-runner serve` says what is wrong with its settings first, and of its mistakes no word."""

import asyncio
import gc
import json
import shutil
import socket
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from click.testing import CliRunner

from protocol.errors import ModelError, SettingsError
from tee_side.chat import reply
from tee_side.chat.calls import CALL_FORMS
from tee_side.chat.template import Conversation
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.rows import each_row
from tests.kit.service import call
from tsqp.cli.tee_runner import command
from tsqp.llm import settings_from
from tsqp.run import server_settings
from tsqp.run.conversations import chat_template, default_sampling
from tsqp.run.load import added_leakage
from tsqp.run.server import _app, note_failure
from tsqp.run.settings import model_directory

# Where nothing listens: it must not come to that.
AWAY = ("--gpu", "tcp://127.0.0.1:1", "--connect-timeout-s", "60")


@each_row(
    ("options", "said"),
    [
        (("--page", "--host", "0.0.0.0"), "--page: got --host 0.0.0.0, expected an address of"),
        (("--tls-key", "{file}"), "--tls-certificate and --tls-key: got one of them, expected"),
        # Also before a key server is asked.
        (
            ("--tls-key", "{file}", "--seal-key-server", "https://127.0.0.1:1"),
            "--tls-certificate and --tls-key: got one of them, expected",
        ),
        (("--api-keys", "{file}"), "{file}"),
        (("--audit-log", "{file}"), "--audit-log: got another combination, expected"),
        (("--port", "{port}"), "127.0.0.1:{port}: got Address already in use, expected a free"),
    ],
)
def test_it_is_said_before_the_model_is_loaded(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "file"
    file.write_text("no PEM, no TOML = ")
    file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [option.format(file=file, port=port) for option in options]
        result = call("tee-runner", "serve", "demo", *AWAY, *given)
    assert result.returncode == 2
    assert said.format(file=file, port=port) in result.stderr
    assert "ready: " not in result.stderr


def told(*options: str) -> tuple[Any, Any, Any]:
    """Return a policy, what `serve` makes an engine with, and the settings it serves by."""
    with (
        mock.patch("tsqp.cli.serve.open_runner") as opened,
        mock.patch("tsqp.run.server.opened_parts"),
        mock.patch("tsqp.run.server.serve_forever") as served,
        mock.patch("signal.signal"),
    ):
        CliRunner().invoke(command, ["serve", "demo", *options], catch_exceptions=False)
    call = opened.call_args
    return call.args[1].policy, call.kwargs["engine"], served.call_args.args[1]


def test_what_adds_to_lengths_and_timing_is_off_where_they_hide_and_said_where_it_is_on() -> None:
    for options, reuses, said in (
        ("shielded", False, []),
        ("dealt --prefix-reuse", True, ["prefix reuse"]),
        ("shielded --speculative ngram", False, ["speculation"]),
        ("tee-only --speculative ngram", True, []),
    ):
        policy, engine, _ = told("--policy", *options.split())
        lines = [line.split(" adds to lengths")[0] for line in added_leakage(policy, engine)]
        assert (engine.prefix_reuse, lines) == (reuses, said), options


@each_row(
    ("options", "expected"),
    [
        ("--fixed-tempo-ms 5", {"tempo_s": 0.005}),
        ("", {"tempo_s": 0, "model.tool_parser": None, "model.sampling": {"top_k": 5}}),
        ("--generation-config none", {"model.sampling": {}}),
        (
            "--tool-parser glm --reasoning-effort low",
            {"model.tool_parser": "glm", "model.reasoning_effort": "low"},
        ),
    ],
)
def test_what_serve_is_told_is_the_server_s(options: str, expected: dict[str, Any]) -> None:
    settings = told("--policy", "tee-only", *options.split())[2]
    parts, fake = mock.Mock(keys=None, audit=None, identity=None), mock.MagicMock()
    with (
        mock.patch("tsqp.run.server._fingerprint"),
        mock.patch.multiple(
            "tsqp.run.server",
            chat_template=mock.Mock(),
            default_sampling=mock.Mock(return_value={"top_k": 5}),
        ),
        mock.patch("tsqp.run.server.create_app") as made,
    ):
        _app(fake, settings, None, parts, fake)
    served = made.call_args.args[0]
    assert {name: attrgetter(name)(served) for name in expected} == expected


def test_what_may_be_told_is_what_there_is() -> None:
    assert get_args(server_settings.ToolParser) == tuple(sorted(CALL_FORMS))
    assert server_settings.Effort == reply.Effort


@each_row(
    ("file", "expected"),
    [
        (None, {}),
        ({}, {}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": None, "pad_token_id": 3},
            {"temperature": 0.6, "top_k": 20},
        ),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": 0.6, "do_sample": True}, {"temperature": 0.6}),
        ({"top_p": 5}, "top_p"),
        ([], "generation_config.json"),
    ],
)
def test_a_model_s_sampling_is_what_its_file_says(
    tmp_path: Path, file: Any, expected: dict[str, float] | str
) -> None:
    path = tmp_path / "generation_config.json"
    path.unlink(missing_ok=True)
    if file is not None:
        path.write_text(json.dumps(file))
    if isinstance(expected, dict):
        assert default_sampling(tmp_path, None) == expected
    else:
        with pytest.raises(ModelError, match=expected):
            default_sampling(tmp_path, None)


def test_a_template_is_told_the_date_and_words_of_the_settings(tmp_path: Path) -> None:
    shutil.copytree(model_directory("demo"), tmp_path, dirs_exist_ok=True)
    written = "{{ strftime_now('%d.%m.%y') }} {{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(written)
    tokenizer, said = Tokenizer(tmp_path), "<|user|>"
    one = Conversation(messages=[{"role": "user", "content": said}])
    (control,) = tokenizer.encode(said, add_special_tokens=False)
    plain = chat_template(settings_from({"model": str(tmp_path)}), tokenizer).encode(one)
    assert control not in plain
    options = {"template_date": "2026-01-31", "control_tokens_in_content": True}
    told = chat_template(settings_from({"model": str(tmp_path), **options}), tokenizer)
    assert told.render(one) == f"31.01.26 {said}"
    assert told.encode(one)[-1] == control
    wrong = settings_from({"model": str(tmp_path), "template_date": "yesterday"})
    with pytest.raises(SettingsError, match=r"--template-date: got .*, expected a date"):
        chat_template(wrong, tokenizer)


SECRET = "what the client said"


def test_what_fails_on_the_loop_is_logged_without_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a callback, and in a task that is not waited for."""

    def fail() -> None:
        raise ValueError(SECRET)

    async def fails() -> None:
        fail()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(note_failure)
        loop.call_soon(fail)
        asyncio.create_task(fails())  # noqa: RUF006 - that nobody waits for it is the case
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(run())
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert (record.getMessage(), record.exc_info) == ("callback_failed", None)
        fields = record.fields  # type: ignore[attr-defined]
        assert fields["error"] == "ValueError"
        assert "test_server.py:" in fields["at"]
        assert SECRET not in str(vars(record))
