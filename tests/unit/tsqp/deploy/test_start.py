"""The program that starts the runner in the guest: from the kernel's command line."""

from __future__ import annotations

import os

import pytest

from tests.tables import each_row
from tests.unit.tsqp.deploy.test_lock import KERNEL, SMALL
from tsqp.deploy.build import Recipe, command_line
from tsqp.deploy.guest.start import command, require_seed

RUNNER = SMALL.model_copy(update={"wheels": (KERNEL,)})
DIGEST = "0123456789abcdef" * 4
PINNED = ["--manifest", "/model/manifest.json", "--manifest-digest", DIGEST]
SERVE = ["serve", "/model", "--host", "0.0.0.0"]


@each_row(
    ("arguments", "digest", "expected"),
    [
        ((), None, SERVE),
        ((), DIGEST, SERVE + PINNED),
        (("generate", "demo"), None, ["generate", "demo"]),
        (("--prompt", "Once upon\n%20 a=b é\\"), None, ["--prompt", "Once upon\n%20 a=b é\\"]),
        (("serve", "/model", "--attest=snp"), DIGEST, ["serve", "/model", "--attest=snp", *PINNED]),
        (("tsqp.manifest=x",), None, ["tsqp.manifest=x"]),
        (("",), None, [""]),
    ],
)
def test_the_runner_gets_the_words_of_the_build(
    arguments: tuple[str, ...], digest: str | None, expected: list[str]
) -> None:
    line = command_line(RUNNER, Recipe(arguments=arguments, manifest_digest=digest))
    assert line.isascii()
    assert line.isprintable()
    assert command(f"{line}\n") == expected


def test_a_small_image_asks_for_the_self_test() -> None:
    assert "tsqp.self-test" in command_line(SMALL, Recipe()).split()
    assert "tsqp.self-test" not in command_line(RUNNER, Recipe()).split()


def test_a_generator_without_a_seed_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_seed()

    def unseeded(size: int, flags: int) -> bytes:
        assert (size, flags) == (1, os.GRND_NONBLOCK)
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", unseeded)
    with pytest.raises(SystemExit, match="got no seed"):
        require_seed()
