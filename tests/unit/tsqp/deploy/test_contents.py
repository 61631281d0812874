"""What stays in an image's tree, and what starts in it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.kit.rows import each_row
from tsqp.deploy.contents import add_modules, add_units, strip

GONE = (
    "etc/apt/sources.list",
    "etc/shadow-",
    "usr/bin/apt-get",
    "usr/bin/dpkg",
    "usr/bin/bash",
    "usr/bin/perl5.40.1",
    "usr/bin/dash",
    "usr/bin/sh",
    "usr/bin/some-program-of-tomorrow",
    "usr/sbin/agetty",
    "usr/sbin/sulogin",
    "usr/lib/systemd/system-generators/systemd-getty-generator",
    "usr/lib/systemd/system/getty@.service",
    "usr/lib/systemd/system/getty.target.wants/getty@tty1.service",
    "usr/lib/systemd/system/debug-shell.service",
    "usr/lib/python3/dist-packages/bin/tsqp",
    "usr/lib/python3/dist-packages/x-1.dist-info/direct_url.json",
    "usr/lib/python3/dist-packages/x-1.dist-info/RECORD",
    "usr/lib/python3/dist-packages/torch/bin/protoc",
    "usr/lib/python3/dist-packages/torch/bin/test_api",
    "usr/lib/python3/dist-packages/torch/include/a/b.h",
    "usr/lib/python3/dist-packages/numpy/_core/tests/test.py",
    "usr/lib/python3/dist-packages/tsqp/lab/x.py",
    "usr/lib/python3/dist-packages/tsqp-0.dist-info/entry_points.txt",
    "usr/lib/python3.13/__pycache__/os.cpython-313.pyc",
    "usr/share/doc/a/copyright",
    "var/cache/ldconfig/aux-cache",
    "var/lib/dpkg/status",
    "var/log/dpkg.log",
)
KEPT = (
    "etc/passwd",
    "usr/bin/python3",
    "usr/bin/mount",
    "usr/lib/systemd/systemd",
    "usr/lib/systemd/system/multi-user.target",
    "usr/lib/python3/dist-packages/torch/bin/torch_shm_manager",
    "usr/lib/python3/dist-packages/x-1.dist-info/METADATA",
    "usr/lib/python3/dist-packages/tsqp/demo_model/config.json",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with a file of each kind."""
    for name in GONE + KEPT:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "usr/bin/mount").chmod(0o4755)
    (tmp_path / "usr/bin/dangling").symlink_to("nowhere")
    return tmp_path


def test_no_login_no_package_manager_and_no_traces_stay(root: Path) -> None:
    strip(root)
    assert [name for name in GONE if (root / name).exists()] == []
    assert [name for name in KEPT if not (root / name).exists()] == []
    assert stat.S_IMODE((root / "usr/bin/mount").stat().st_mode) == 0o755


def test_a_link_is_removed_and_not_what_it_leads_to(root: Path, tmp_path: Path) -> None:
    outside = root / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (root / "usr/share/man").symlink_to(outside)
    strip(root)
    assert not (root / "usr/share/man").is_symlink()
    assert (outside / "kept").exists()


def test_links_that_only_the_image_can_follow_count(root: Path) -> None:
    (root / "usr/sbin/modprobe").symlink_to("/nowhere/kmod")
    (root / "etc/resolv.conf").symlink_to("/nowhere/resolv.conf")
    strip(root)
    assert (root / "usr/sbin/modprobe").is_symlink()
    assert not (root / "etc/resolv.conf").is_symlink()


def test_what_starts_is_ours_and_nothing_leads_out_of_the_image(root: Path) -> None:
    strip(root)
    add_units(root)
    units = root / "etc/systemd/system"
    wanted = {path.name: str(path.readlink()) for path in units.glob("*.wants/*")}
    assert wanted == {
        "tsqp.service": "/etc/systemd/system/tsqp.service",
        "tsqp-read-only.service": "/etc/systemd/system/tsqp-read-only.service",
        "tmp.mount": "/etc/systemd/system/tmp.mount",
        "var.mount": "/etc/systemd/system/var.mount",
        "systemd-networkd.service": "/usr/lib/systemd/system/systemd-networkd.service",
    }
    assert (root / "init").resolve() == root / "usr/lib/systemd/systemd"
    assert (root / "etc/machine-id").read_bytes() == b""
    assert "def main" in (root / "usr/lib/tsqp/start.py").read_text()
    assert (units / "tsqp-model.service").exists()
    # What no device asks for, and what no driver enables.
    loaded = (root / "etc/modules-load.d/tsqp.conf").read_text().split()
    assert {"sev-guest", "tdx-guest", "tsm", "configfs"} <= set(loaded)
    assert " - - - - 1" in (root / "usr/lib/tmpfiles.d/tsqp.conf").read_text()


@each_row(
    ("dependencies", "expected"),
    [
        ("k/erofs.ko.xz: k/crc.ko.xz\nk/crc.ko.xz:\n", {"erofs.ko.xz", "crc.ko.xz"}),
        ("k/erofs.ko.xz:\nk/floppy.ko.xz: k/crc.ko.xz\n", {"erofs.ko.xz"}),
        # File names have either sign.
        ("k/virtio-blk.ko.xz:\nk/sev_guest.ko:\n", {"virtio-blk.ko.xz", "sev_guest.ko"}),
    ],
)
def test_modules_come_with_what_they_need(
    dependencies: str, expected: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree = tmp_path_factory.mktemp("kernel")
    modules = tree / "6.12"
    (modules / "k").mkdir(parents=True)
    for name in ("erofs.ko.xz", "crc.ko.xz", "floppy.ko.xz", "virtio-blk.ko.xz", "sev_guest.ko"):
        (modules / "k" / name).write_text(name)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        (modules / name).touch()
    add_modules(modules, dependencies, tree / "root")
    found = (tree / "root/usr/lib/modules/6.12/k").iterdir()
    assert {path.name for path in found} == expected
