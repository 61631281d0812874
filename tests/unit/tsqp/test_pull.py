"""Models from a hub, by its own client: a small one here that is right, or is not."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants, file_download

from protocol.errors import ModelError, SettingsError, TsqpError
from protocol.model.checkpoint import Checkpoint
from tests.kit.model import Models
from tests.kit.rows import each_row
from tsqp.cli.model_files import pull as command
from tsqp.importing.pull import pull

COMMIT = "c" * 40
_LARGE = (".safetensors", "tokenizer.json")


class Hub:
    """What it offers, by name; `fault`: what it does wrong."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.fault, self.got, self.commit = files, "", list[str](), COMMIT

    def said(self) -> dict[str, Any]:
        """The commit and its files, as the API says."""
        siblings = []
        for name, content in self.files.items():
            git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            one: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git}
            if name.endswith(_LARGE):
                digest = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(one)
        return {
            "id": "org/name",
            "sha": self.commit,
            "siblings": siblings,
            "private": False,
            "downloads": 0,
            "tags": [],
        }

    def serve(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        if path.startswith("/api/models/org/name"):
            return self._answer(request, json.dumps(self.said()).encode(), {}, body)
        if path.startswith("/elsewhere/"):
            return self._answer(
                request, b"<html>", {"ETag": '"e"', "X-Repo-Commit": self.commit}, body
            )
        name = path.removeprefix(f"/org/name/resolve/{self.commit}/")
        if name not in self.files:
            return self._answer(request, b"{}", {}, body, 404)
        content = self.files[name]
        if body:
            self.got.append(name)
            if self.fault == "bytes" and name.endswith(".safetensors"):
                content = content[:-1] + bytes([content[-1] ^ 1])
        if self.fault == "elsewhere" and name.endswith(".safetensors"):
            return self._answer(request, b"", {"Location": "/elsewhere/" + name}, body, 302)
        digest = hashlib.sha256(self.files[name]).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        return self._answer(request, content, headers, body)

    def _answer(
        self,
        request: BaseHTTPRequestHandler,
        content: bytes,
        headers: dict[str, str],
        body: bool,
        status: int = 200,
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            stops = self.fault == "stops" and len(content) > 10_000
            request.wfile.write(content[: len(content) // 2] if stops else content)


@pytest.fixture
def hub(saved_model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    directory = saved_model("llama").directory
    offered = Hub({path.name: path.read_bytes() for path in directory.iterdir()})
    offered.files |= {"modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x02"}
    offered.files |= {"consolidated.safetensors": b"the same once more", "tokenizer.model": b"\n"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            offered.serve(self, body=True)

        def do_HEAD(self) -> None:
            offered.serve(self, body=False)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        # What HF_ENDPOINT sets, read when the client is imported.
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # It waits a second before each of five attempts.
        monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _seconds: None))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield offered
        server.shutdown()
        thread.join()


def test_it_gets_what_a_directory_needs_and_no_code(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert pull("org/name@main", target) == COMMIT
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.model"}
    assert {path.name for path in target.iterdir()} == {*names, "pull.json"}
    assert all((target / name).read_bytes() == hub.files[name] for name in names)
    assert json.loads((target / "pull.json").read_text())["commit"] == COMMIT
    Checkpoint.open(target)
    with pytest.raises(SettingsError, match="expected a name that is free"):
        pull("org/name", target)


@each_row("fault", ["bytes", "stops", "elsewhere"])
def test_what_comes_wrong_leaves_nothing_that_looks_whole(
    hub: Hub, tmp_path: Path, fault: str
) -> None:
    """A second run gets what is not there yet."""
    target, hub.fault = tmp_path / fault, fault
    with pytest.raises((TsqpError, OSError)):
        pull("org/name", target)
    assert not target.exists()
    hub.fault, hub.got[:] = "", []
    pull("org/name", target)
    assert hub.got == ["model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@each_row("few", [False, True])
def test_the_command_says_what_comes_next(hub: Hub, tmp_path: Path, few: bool) -> None:
    if few:
        settings = json.loads(hub.files["config.json"]) | {"quantization_config": {"bits": 4}}
        hub.files["config.json"] = json.dumps(settings).encode()
    ran = CliRunner().invoke(command, ["org/name", str(tmp_path / str(few))])
    assert ran.exit_code == 0
    said = "tsqp import" if few else "SHA-256 of manifest.json: "
    assert said in ran.output.splitlines()[-1]
    assert (tmp_path / str(few) / "manifest.json").exists() is not few


def test_nothing_is_left_of_another_commit(hub: Hub, tmp_path: Path) -> None:
    target, hub.fault = tmp_path / "model", "stops"
    with pytest.raises(SettingsError, match="expected a hub that answers"):
        pull("org/name", target)
    hub.fault, hub.commit = "", "d" * 40
    del hub.files["tokenizer.model"]
    assert pull("org/name", target) == hub.commit
    assert not (target / "tokenizer.model").exists()


def test_a_hub_with_pickles_alone_or_another_or_no_model_is_told(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelError, match="got pickles, which can run code"):
        pull("org/name", tmp_path / "model")
    assert not hub.got
    hub.files["model.safetensors"] = b"long"
    hub.files["config.json"] = b'{"architectures": ["MixtralForCausalLM"]}'
    with pytest.raises(ModelError, match=r"org/name/config\.json: architectures: got 'Mixtral"):
        pull("org/name", tmp_path / "model")
    assert hub.got == ["config.json"]
    with pytest.raises(SettingsError, match="expected a model that this hub lets you read"):
        pull("org/other", tmp_path / "model")
    with pytest.raises(SettingsError, match="expected a model that this hub lets you read"):
        pull("no such name", tmp_path / "model")
    assert not (tmp_path / "model").exists()
