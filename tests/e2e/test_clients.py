"""What clients get of a real `tee-runner serve`: OpenAI's SDK, TLS, keys, signals."""

import json
import signal
import ssl
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import URLError

import openai
import pytest

from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.answers import TokenBytes, token_name
from tests.kit.http_proxy import certificate
from tests.kit.service import TEE_ONLY, Server, call, running_server, running_service, until
from tsqp.run.settings import model_directory

PROMPT = "Once upon a time"
CHAT: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
OPTIONS: Any = {"model": "demo", "seed": 7, "max_tokens": 24}
# Answers that outlast what a test does meanwhile.
LONG = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "n": 16, "stream": True}


def client_of(server: Server, key: str = "unused", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0, **options)


def test_a_shielded_server_says_what_generate_says_whole_and_streamed(tmp_path: Path) -> None:
    sampling = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "7")
    prompt = ("--prompt", PROMPT, "--max-new-tokens", "24", "--json")
    options = ("--arithmetic", "int8", "--threads", "1")
    with running_service("demo", f"unix://{tmp_path}/gpu", *options) as service:
        gpu = ("--gpu", service.endpoint)
        wanted = json.loads(call("tee-runner", "generate", "demo", *gpu, *prompt, *sampling).stdout)
        with running_server(*gpu) as server, client_of(server) as client:
            assert any("uniform random numbers" in line for line in server.log)
            (answer,) = client.completions.create(
                prompt=PROMPT, temperature=0.8, top_p=0.9, logprobs=0, **OPTIONS
            ).choices
            whole = client.chat.completions.create(messages=CHAT, **OPTIONS)
            streamed = {"stream": True, "stream_options": {"include_usage": True}, **OPTIONS}
            chunks = list(client.chat.completions.create(messages=CHAT, **streamed))
    demo = TokenBytes(Tokenizer(model_directory("demo")))
    said = [json.loads(token_name(demo, at)[0]) for at in wanted["token_ids"]]
    assert answer.logprobs is not None
    assert answer.logprobs.tokens == said
    assert answer.text == wanted["text"]
    text, usage = whole.choices[0].message.content, whole.usage
    assert text
    assert usage is not None
    assert (whole.choices[0].finish_reason, usage.completion_tokens) == ("length", 24)
    assert len(chunks) > 20
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    assert chunks[-1].usage == usage


def test_every_option_of_answers_reaches_the_server(tmp_path: Path) -> None:
    """What each does is tested by itself; here, that the command passes it on. Over TLS."""
    key, log, pem = (tmp_path / name for name in ("audit.key", "audit.log", "proxy.pem"))
    assert call("tsqp", "audit", "new-key", str(key)).returncode == 0
    _, trusting = certificate(tmp_path)
    pem.chmod(0o600)
    options = (
        *("--served-model-name", "org/fox", "--default-max-tokens", "3", "--max-model-len", "100"),
        *("--round-usage", "16", "--pooling", "mean", "--allow-origin", "https://example.org"),
        *("--audit-log", str(log), "--audit-key-fd", "9"),
        *("--tls-certificate", str(pem), "--tls-key", str(pem)),
    )
    before = f"import os; os.dup2(os.open({str(key)!r}, os.O_RDONLY), 9)"
    fox: Any = {"model": "org/fox"}
    with (
        running_server(*TEE_ONLY, *options, before=before) as server,
        openai.DefaultHttpxClient(verify=trusting) as http,
        client_of(server, http_client=http) as client,
    ):
        assert server.address.startswith("https://127.0.0.1:")
        with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
            server.get("/health", tls=ssl.create_default_context())
        (model,) = client.models.list()
        assert (model.id, (model.model_extra or {})["max_model_len"]) == ("org/fox", 100)
        origin = {"origin": "https://example.org"}
        raw = client.chat.completions.with_raw_response.create(
            messages=CHAT, seed=7, extra_headers=origin, **fox
        )
        assert raw.headers["access-control-allow-origin"] == origin["origin"]
        answer = raw.parse()
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        assert answer.usage.prompt_tokens % 16 == 0

        def vector(**extra: Any) -> list[float]:
            found = client.embeddings.create(input="a fox and an owl", extra_body=extra, **fox)
            return found.data[0].embedding

        assert vector() == vector(pooling="mean") != vector(pooling="last")
    shown = call("tsqp", "audit", "show", str(log), "--key", str(key), "--json")
    counts = [json.loads(line).get("completion_tokens") for line in shown.stdout.splitlines()]
    assert 3 in counts


def new_key(name: str, *limits: str) -> tuple[str, str]:
    """Return a key and its entry."""
    made = call("tsqp", "api-key", name, *limits)
    assert made.returncode == 0, made.stderr
    return made.stderr.strip(), made.stdout


def test_keys_limits_signals_and_the_audit_log(tmp_path: Path) -> None:
    keys, log, audit_key = (tmp_path / name for name in ("keys.toml", "audit.log", "audit.key"))
    alice, first = new_key("alice", "--requests-per-minute", "2")
    bob, second = new_key("bob")
    carol, third = new_key("carol")
    keys.touch(0o600)
    keys.write_text(first + second)
    assert call("tsqp", "audit", "new-key", str(audit_key)).returncode == 0
    options = ("--api-keys", str(keys), "--audit-log", str(log), "--audit-key", str(audit_key))
    # Half-sent answers get five seconds; here it is known that they need more.
    before = "import tsqp.run.server; tsqp.run.server._SHUTDOWN_S = 0"
    with running_server(*TEE_ONLY, *options, before=before) as server:
        for nobody in ("", "tsqp-unknown", carol):
            with (
                client_of(server, nobody or "none") as client,
                pytest.raises(openai.AuthenticationError) as refused,
            ):
                client.models.list()
            assert refused.value.code == "invalid_api_key"
        assert json.loads(server.get("/health")) == {"status": "ok"}  # without a key

        with client_of(server, alice) as client:
            for left in ("1", "0"):
                raw = client.completions.with_raw_response.create(prompt=PROMPT, **OPTIONS)
                assert raw.headers["x-ratelimit-remaining-requests"] == left
            with pytest.raises(openai.RateLimitError) as limited:
                client.completions.create(prompt=PROMPT, **OPTIONS)
        assert limited.value.code == "rate_limit_exceeded"

        keys.write_text(second + third)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: _is_let_in(server, carol))
        assert not _is_let_in(server, alice)
        keys.write_text("not a key file")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "api_keys_unchanged" in server.process.stderr.readline())
        assert _is_let_in(server, carol)

        # An answer that takes long, of which the first event is here.
        connection = HTTPConnection(server.address.removeprefix("http://"), timeout=60)
        headers = {"content-type": "application/json", "authorization": f"Bearer {bob}"}
        connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
        with closing(connection), closing(connection.getresponse()) as reply:
            assert reply.readline().startswith(b"data: {")
            assert server.stop() == 128 + signal.SIGTERM
            # After some seconds of grace what still runs is cut off, and told so.
            assert '"code":"failed"' in reply.read().decode().split("\n\n")[-2]
    shown = call("tsqp", "audit", "show", str(log), "--key", str(audit_key), "--json")
    assert shown.returncode == 0, shown.stderr
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    requests = [record for record in records if record["kind"] == "request"]
    said = [(record["key"], record["outcome"], record["completion_tokens"]) for record in requests]
    assert said[:3] == [("alice", "ok", 24), ("alice", "ok", 24), ("alice", "RateLimitError", 0)]
    assert [one[:2] for one in said[3:]] == [("bob", "EngineError")]
    assert said[3][2] > 0
    # Of what is refused for its key's limits, nothing was read.
    assert [record["prompt_tokens"] for record in requests] == [5, 5, 0, 5]
    assert f"{len(records)} records" in shown.stderr


def _is_let_in(server: Server, key: str) -> bool:
    with client_of(server, key) as client:
        try:
            client.models.list()
        except openai.AuthenticationError:
            return False
    return True
