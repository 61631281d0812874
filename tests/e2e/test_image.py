"""A small image: built twice it is the same, it starts, and it says that it was resumed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.guest import BOOT_S, build, missing, small_guest
from tsqp.deploy.image import LOCK, first_difference

BUILD_S = 900
UEFI = Path("/usr/share/ovmf/OVMF.fd")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BUILD_S + 5 * BOOT_S)]

FIRST, SECOND, THIRD = (f"{digit * 8}-1111-4111-8111-111111111111" for digit in "123")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where images are, for as long as the tests run."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    made = tmp_path_factory.mktemp("images")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def image(folder: Path) -> Path:
    """A small image of today's packages."""
    save = ("--save", folder / "packages", "--jobs", "1")
    return build(folder / "first", "--small", *save, timeout_s=BUILD_S)


def test_another_build_of_its_lock_is_the_same(image: Path, folder: Path) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    again = build(
        folder / "a" / "second",
        "--small",
        *("--lock", image / LOCK, "--packages", folder / "packages", "--jobs", "2"),
        *("--scratch", scratch),
        timeout_s=BUILD_S,
        TZ="Asia/Tokyo",
        LANG="de_DE.UTF-8",
        LC_ALL="tr_TR.UTF-8",
        PYTHONHASHSEED="7",
    )
    assert first_difference(image, again) is None
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("uefi", [False, True])
def test_it_starts_under_emulation_and_says_how_it_stands(uefi: bool, image: Path) -> None:
    if uefi and not UEFI.exists():
        pytest.skip("no ovmf")
    with small_guest(image, FIRST, firmware=UEFI if uefi else None) as guest:
        first, second = guest.report(asked=False), guest.report()
        guest.say("off")
        guest.read_to_the_end()
    assert first == second
    assert first["system"] == "Debian GNU/Linux 12 (bookworm)"
    assert first["python"].startswith("3.11.")
    facts = ("root", "seeded", "resumed")
    assert [first[name] for name in facts] == ["ro", True, False]
    assert "Power down" in guest.seen
    # No login is offered on the console.
    assert "login:" not in guest.seen


@pytest.fixture(scope="module")
def snapshot(image: Path) -> Path:
    """Of a guest that was not resumed."""
    file = image.with_name("snapshot")
    with small_guest(image, FIRST) as first:
        assert not first.report(asked=False)["resumed"]
        first.order("stop")
        first.order("migrate", uri=f"exec:cat > {file}")
        first.await_status("query-migrate", "completed")
    return file


@pytest.mark.parametrize(("generation", "resumed"), [(SECOND, True), (THIRD, True), (FIRST, False)])
def test_a_snapshot_says_that_it_was_resumed(
    generation: str, resumed: bool, image: Path, snapshot: Path
) -> None:
    with small_guest(image, generation, snapshot) as again:
        again.await_status("query-status", "paused")
        again.order("cont")
        # The kernel's word comes a moment after the guest runs.
        assert any(again.report()["resumed"] for _ in range(30)) == resumed
