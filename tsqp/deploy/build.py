"""Builds a guest image: kernel, one initramfs that is the whole system, command line.

A directory tree keeps what an image needs: no shell login, no package manager, no traces.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from protocol.errors import SettingsError
from tsqp.deploy.image import COMMAND_LINE, FACTS, INITRAMFS, KERNEL, Lock, Suite, fetch
from tsqp.deploy.launch import SELF_TEST, command_line
from tsqp.deploy.packages import (
    EPOCH,
    TORCH_INDEX,
    Archive,
    build_own,
    call,
    call_inside,
    commit_of,
    install_packages,
    install_wheels,
    newest_kernel,
    resolve_wheels,
)

# All programs that stay, with no shell among them: links that they are started by, too.
_PROGRAMS = (
    *("usr/bin/kmod", "usr/bin/mount", "usr/bin/python3*", "usr/bin/systemctl", "usr/bin/umount"),
    *("usr/bin/systemd-tmpfiles", "usr/bin/systemd-sysusers", "usr/bin/udevadm"),
    *("usr/bin/systemd", "usr/sbin/modprobe"),
)

# Patterns below the root. Debian's package manager; logins; text for people; what a first start or
# another machine would have written.
_REMOVED = (
    "etc/apt",
    "etc/dpkg",
    "etc/hostname",
    "etc/ld.so.conf.d/fakeroot*",
    "etc/machine-id",
    "etc/resolv.conf",
    "root/.*",
    "etc/*-",
    "usr/lib/apt",
    "usr/lib/dpkg",
    "usr/lib/init",
    "usr/lib/kernel",
    "usr/lib/x86_64-linux-gnu/perl*",
    "usr/share/bash-completion",
    "usr/share/bug",
    "usr/share/debconf",
    "usr/share/doc",
    "usr/share/doc-base",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/keyrings",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/menu",
    "usr/share/perl*",
    "usr/share/polkit-1",
    "usr/share/zsh",
    "usr/lib/systemd/system-generators",
    "usr/lib/systemd/user-generators",
    "usr/lib/systemd/system/*getty*",
    "usr/lib/systemd/system/apt-*",
    "usr/lib/systemd/system/dpkg-*",
    "usr/lib/systemd/system/debug-shell.service",
    "usr/lib/systemd/system/emergency.service",
    "usr/lib/systemd/system/fstrim.*",
    "usr/lib/systemd/system/ldconfig.service",
    "usr/lib/systemd/system/systemd-journal-catalog-update.service",
    "usr/lib/systemd/system/systemd-journal-flush.service",
    "usr/lib/systemd/system/systemd-networkd-persistent-storage.service",
    "usr/lib/systemd/system/proc-sys-fs-binfmt_misc.*",
    "usr/lib/systemd/system/rescue.service",
    "usr/lib/systemd/system/*/*getty*",
    "usr/lib/systemd/system/*/proc-sys-fs-binfmt_misc.*",
    "etc/systemd/system/*",
    "dev/*",
    "run/*",
    "tmp/*",
    "var/backups",
    "var/cache/*",
    "var/lib/apt",
    "var/lib/dpkg",
    "var/lib/systemd/*",
    "var/log/*",
    "var/tmp/*",
)

# Of wheels: headers, tests and tools; what pip wrote about this installation; what people run.
_LIBRARIES = "usr/lib/python3/dist-packages"

_REMOVED_LIBRARIES = (
    "bin",
    "*.dist-info/INSTALLER",
    "*.dist-info/RECORD",
    "*.dist-info/REQUESTED",
    "*.dist-info/direct_url.json",
    "numpy/**/tests",
    "sympy/**/tests",
    "networkx/**/tests",
    "torch/bin/[!t]*",
    "torch/bin/te*",
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/lib/*.a",
    "tsqp/demo",
    "tsqp/lab",
    # Entry points of tsqp/lab.
    "tsqp-*.dist-info/entry_points.txt",
)

_WANTED_MODULES = (
    *("af_packet", "autofs4", "configfs", "erofs", "qemu_fw_cfg", "sev-guest", "tdx-guest"),
    *("tsm", "virtio_blk", "virtio_net", "vmw_vsock_virtio_transport"),
)

# Of these no device tells when they are needed.
_LOADED = ("configfs", "qemu_fw_cfg", "sev-guest", "tdx-guest", "tsm")

_ENABLED = {
    "multi-user.target.wants": ("tsqp.service", "systemd-networkd.service"),
    "sysinit.target.wants": ("tsqp-read-only.service",),
    "local-fs.target.wants": ("tmp.mount", "var.mount"),
}


def strip(root: Path) -> None:
    """Remove from a tree what an image has no use for, and set-uid bits."""
    kept = {path for pattern in _PROGRAMS for path in _found(root, pattern)}
    for folder in ("usr/bin", "usr/sbin"):
        for path in set((root / folder).iterdir()) - kept:
            _remove(path)
    for base, patterns in ((root, _REMOVED), (root / _LIBRARIES, _REMOVED_LIBRARIES)):
        for pattern in patterns:
            for path in _found(base, pattern):
                _remove(path)
    for path in list(root.rglob("__pycache__")):
        _remove(path)
    for path in root.rglob("*"):
        if not path.is_symlink() and path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID):
            path.chmod(path.stat().st_mode & 0o777)


def _found(base: Path, pattern: str) -> list[Path]:
    """Return what a pattern names: links as well that lead nowhere outside of the image."""
    parent, _, name = pattern.rpartition("/")
    folders = base.glob(parent) if parent else [base]
    entries = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    return [path for path in entries if fnmatchcase(path.name, name)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def add_units(root: Path) -> None:
    """Put in what starts the runner: systemd's units, and the program that reads the kernel's line.

    An empty machine-id: systemd makes one for each start, in memory.
    """
    units = root / "etc/systemd/system"
    ours = files("tsqp.deploy") / "guest"
    contents = {
        f"etc/systemd/system/{entry.name}": entry.read_text()
        for entry in ours.iterdir()
        if entry.name.endswith((".service", ".mount"))
    }
    contents |= {
        "etc/systemd/network/80-tsqp.network": (ours / "tsqp.network").read_text(),
        "usr/lib/tmpfiles.d/tsqp.conf": (ours / "tsqp.tmpfiles").read_text(),
        "usr/lib/tsqp/start.py": (ours / "start.py").read_text(),
        "etc/hostname": "tsqp\n",
        "etc/machine-id": "",
        "etc/modules-load.d/tsqp.conf": "".join(f"{name}\n" for name in _LOADED),
    }
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    for wants, names in _ENABLED.items():
        (units / wants).mkdir()
        for name in names:
            target = (
                units / name if (units / name).exists() else Path("/usr/lib/systemd/system", name)
            )
            inside = target.relative_to(root) if target.is_relative_to(root) else target
            (units / wants / name).symlink_to(Path("/") / inside)
    (units / "default.target").symlink_to("/usr/lib/systemd/system/multi-user.target")
    (root / "model").mkdir()
    (root / "init").symlink_to("usr/lib/systemd/systemd")


_ROOT = ("kmod", "python3", "systemd", "udev")

_ROOT_RUNNER = ("libstdc++6",)

_TOOLS = ("cpio", "kmod", "zstd")

_TOOLS_RUNNER = ("g++", "libpython3-dev", "python3-pip")

# Of zstd: more takes much longer, for a few per cent.
_LEVEL = 15


def resolve(
    suite: Suite,
    source: Path,
    *,
    small: bool,
    torch_index: str | None = None,
    scratch: Path | None = None,
) -> Lock:
    """Return what an image is made of today. Raises SettingsError."""
    with TemporaryDirectory(dir=scratch, prefix="tsqp-resolve-") as name:
        directory = Path(name).resolve()
        archive = Archive(suite, directory / "apt")
        wheels, build = (
            ((), ())
            if small
            else resolve_wheels(source, suite, directory, torch_index or TORCH_INDEX)
        )
        return Lock(
            suite=suite,
            kernel=newest_kernel(directory / "kernel"),
            root=archive.resolve(_ROOT if small else _ROOT + _ROOT_RUNNER),
            tools=archive.resolve(_TOOLS if small else _TOOLS + _TOOLS_RUNNER),
            wheels=wheels,
            build=build,
        )


def build(
    lock: Lock,
    source: Path,
    output: Path,
    progress: Callable[[str], None],
    *,
    packages: Sequence[Path] = (),
    jobs: int = 1,
    scratch: Path | None = None,
) -> None:
    """Build the image of a lock into a new directory. Raises SettingsError.

    `packages`: folders of saved packages. `scratch`: where temporary files go, some GB.
    Same lock and source give the same files, whatever the machine. Needs root.
    """
    line = " ".join(SELF_TEST) if lock.small else command_line((), None)
    SettingsError.unless(os.geteuid() == 0, "tsqp image build", "another user", "root")
    SettingsError.unless(
        not output.exists(), str(output), "something that exists", "a new directory"
    )
    with ExitStack() as stack:
        stack.callback(os.umask, os.umask(0o022))
        name = stack.enter_context(TemporaryDirectory(dir=scratch, prefix="tsqp-image-"))
        fetched, tools = Path(name).resolve() / "packages", Path(name).resolve() / "tools"
        root = tools / "image"
        progress(f"fetch {len(lock.artifacts)} packages")
        fetch(lock.artifacts, fetched, packages)
        progress("install the tools")
        install_packages(lock.suite, lock.tools, fetched, tools)
        progress("install the system")
        install_packages(lock.suite, lock.root, fetched, root)
        # Its files alone: none of its scripts is run.
        call(["dpkg-deb", "--extract", fetched / lock.kernel.file, tools / "kernel"])
        release = _add_kernel(tools)
        own = None
        if not lock.small:
            progress("build the runner")
            wheel = build_own(source, tools, lock.build, fetched)
            own = hashlib.sha256(wheel.read_bytes()).hexdigest()
            progress("install the runner")
            install_wheels(lock.wheels, wheel, fetched, tools)
        strip(root)
        add_units(root)
        progress("pack")
        unpacked = _pack(tools, jobs)
        made = {
            KERNEL: (tools / "kernel/boot" / f"vmlinuz-{release}").read_bytes(),
            INITRAMFS: (tools / INITRAMFS).read_bytes(),
            COMMAND_LINE: line.encode(),
        }
        facts = {
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in made.items()},
            "commit": commit_of(source),
            "lock": hashlib.sha256(lock.to_bytes()).hexdigest(),
            "runner_wheel": own,
            "unpacked_bytes": unpacked,
        }
        output.mkdir(parents=True)
        for name, content in made.items():
            (output / name).write_bytes(content)
        (output / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def _add_kernel(tools: Path) -> str:
    """Copy the modules that a guest needs, with those that they need, into the image.

    Return the kernel's name.
    """
    kernel = tools / "kernel"
    modules = next(
        path for base in ("usr/lib", "lib") for path in (kernel / base / "modules").glob("*")
    )
    release = modules.name
    into = tools / "image/usr/lib/modules" / release
    call_inside(
        tools, ["depmod", "--basedir", f"/{modules.parents[2].relative_to(tools)}", release]
    )
    wanted = {name.replace("_", "-") for name in _WANTED_MODULES}
    for line in (modules / "modules.dep").read_text().splitlines():
        module, _, others = line.partition(":")
        if Path(module).name.partition(".")[0].replace("_", "-") in wanted:
            for name in (module, *others.split()):
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(modules / name, into / name)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copyfile(modules / name, into / name)
    call_inside(tools, ["depmod", "--basedir", "/image", release])
    return release


def _pack(tools: Path, jobs: int) -> int:
    """Write the image's tree as a compressed archive, and return its size before that, in bytes.

    Names in order of their bytes, one time for all, inode numbers by position. zstd's result is the
    same for any number of threads from one on.
    """
    root = tools / "image"
    paths = sorted(os.fsencode(path.relative_to(root)) for path in root.rglob("*"))
    for path in (*(os.path.join(os.fsencode(root), path) for path in paths), os.fsencode(root)):
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
    (tools / "names").write_bytes(b"\0".join(paths) + b"\0")
    archive = tools / "image.cpio"
    copy = "cd /image && cpio --quiet --null --create --format=newc --reproducible </names"
    call_inside(tools, ["sh", "-c", f"{copy} >/{archive.name}"])
    size = archive.stat().st_size
    shutil.rmtree(root)
    squeeze = ["zstd", "--quiet", f"-{_LEVEL}", f"--threads={max(jobs, 1)}", "--rm"]
    call_inside(tools, [*squeeze, f"/{archive.name}", "-o", f"/{INITRAMFS}"])
    return size
