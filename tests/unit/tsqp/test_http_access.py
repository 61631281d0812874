"""Which token of --http-token goes to which URL of --gpu."""

from pathlib import Path

import pytest

from protocol.curve import HttpAccess
from protocol.errors import SettingsError
from tests.kit.rows import each_row
from tsqp.llm import settings_from
from tsqp.run.load import read_http_access
from tsqp.run.settings import RunSettings


def told(**given: object) -> RunSettings:
    return settings_from({"model": "demo", **given})


ONE, TWO = (f"tsqp-{letter * 43}" for letter in "ot")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    found = {}
    for token in (ONE, TWO):
        path = tmp_path / token[-1]
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        found[token] = str(path)
    return found


@each_row(
    ("gpu", "tokens", "expected"),
    [
        (["https://a.example"], [ONE], [ONE]),
        (["https://a.example=0-7", "https://b.example/x=8-"], [ONE, TWO], [ONE, TWO]),
        # What has keys in place of tokens is not counted.
        (["https://a.example", "tcp://c:1", "http://127.0.0.1:1"], [ONE, TWO], [ONE, TWO]),
        (["unix:///s", "https://a.example"], [ONE], [ONE]),
        (["https://a.example:1/x", "https://A.example:1/y"], [ONE], [ONE, ONE]),
    ],
)
def test_tokens_go_with_urls_in_order(
    gpu: list[str], tokens: list[str], expected: list[str], files: dict[str, str]
) -> None:
    settings = told(gpu=gpu, http_token=[files[token] for token in tokens])
    found = read_http_access(settings, None)
    urls = [text.partition("=")[0].partition(",")[0] for text in gpu if text.startswith("http")]
    assert found == {url: HttpAccess(one) for url, one in zip(urls, expected, strict=True)}


@each_row(
    ("gpu", "tokens", "said"),
    [
        (["https://a.example", "https://b.example"], [ONE], "got one for several hosts"),
        (["https://localhost", "http://localhost"], [ONE], "got one for several hosts"),
        (["https://a.example"], [ONE, TWO], "got 2 for 1 endpoints, expected one for all of them"),
        (["tcp://a:1"], [ONE], "got tcp://a:1, expected a service with a URL"),
    ],
)
def test_a_token_reaches_no_service_of_another_owner(
    gpu: list[str], tokens: list[str], said: str, files: dict[str, str]
) -> None:
    settings = told(gpu=gpu, http_token=[files[token] for token in tokens])
    with pytest.raises(SettingsError, match=said) as info:
        read_http_access(settings, None)
    assert info.value.where == "--http-token"


def test_without_tokens_one_file_of_cas_is_for_all(tmp_path: Path) -> None:
    pem = tmp_path / "ca.pem"
    pem.write_text("PEM")
    pem.chmod(0o644)
    gpu = ["https://a.example", "https://b.example"]
    found = read_http_access(told(gpu=gpu, http_ca=pem), None)
    assert found == dict.fromkeys(gpu, HttpAccess(ca="PEM"))
    assert read_http_access(told(gpu=gpu), None) == {}
