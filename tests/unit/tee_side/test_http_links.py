"""Services with a URL among others: what is read, and which links may carry shares."""

from __future__ import annotations

import pytest

from protocol.errors import EndpointError, SettingsError
from tee_side.policy.layer_range import LayerRange
from tee_side.policy.placement import load_policy
from tee_side.remote.services.plan import ServiceSpec, assign_shares, check_links
from tests.kit.rows import each_row

TWO = load_policy("two-server")


def _checked(*gpu: str, in_the_clear: bool = False) -> bool:
    specs = assign_shares([ServiceSpec.parse(text) for text in gpu], TWO)
    return check_links(specs, [None] * len(specs), TWO, shares_in_the_clear=in_the_clear)


@each_row(
    ("text", "layers", "share"),
    [
        ("https://gpu.example", None, None),
        ("https://gpu.example/model", None, None),
        ("http://127.0.0.1:1=0-7", LayerRange(0, 7), None),
        ("https://gpu.example:8443/a/b=8-,share=2", LayerRange(8, None), 2),
    ],
)
def test_a_url_is_an_endpoint(text: str, layers: LayerRange | None, share: int | None) -> None:
    spec = ServiceSpec.parse(text)
    assert (spec.layers, spec.share) == (layers, share)
    assert str(spec) == text


@each_row("text", ["https://a=b", "https://a/b,c", "http://a:1=x", "http://a,share=3"])
def test_a_url_holds_neither_equals_signs_nor_commas(text: str) -> None:
    with pytest.raises((SettingsError, EndpointError)):
        ServiceSpec.parse(text)


def test_shares_may_cross_verified_tls() -> None:
    assert _checked("https://one.example", "https://two.example/x")
    assert _checked("https://127.0.0.1:1", "https://127.0.0.1:2")


@each_row(
    "gpu",
    [
        ("http://one.example", "https://two.example"),
        ("https://one.example", "http://127.0.0.1:1"),
        ("http://127.0.0.1:1", "http://127.0.0.1:2"),
    ],
)
def test_shares_never_cross_plain_http(gpu: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"got http://.* without keys"):
        _checked(*gpu)


def test_on_one_machine_the_operator_may_allow_plain_http() -> None:
    local = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert not _checked(*local, in_the_clear=True)
    with pytest.raises(SettingsError, match=r"got http://one\.example without keys"):
        _checked("http://one.example", "https://two.example", in_the_clear=True)


@each_row(
    "gpu",
    [
        ("https://one.example/a,share=1", "https://one.example/b,share=2"),
        ("https://one.example,share=1", "https://ONE.example:443/b,share=2"),
        ("https://127.0.0.1:1/a", "https://127.0.0.1:1/b"),
    ],
)
def test_what_ends_tls_for_both_shares_would_read_them(gpu: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="behind one end of TLS"):
        _checked(*gpu)


def test_two_urls_on_one_host_have_one_owner() -> None:
    with pytest.raises(SettingsError, match="on one host, with a share each"):
        _checked("https://one.example:1", "https://one.example:2")
    with pytest.raises(SettingsError, match="on one host, with a share each"):
        _checked("https://one.example/a", "tcp://one.example:5")
