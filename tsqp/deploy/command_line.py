"""The kernel's command line, which is measured: what an image runs, and for which model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from protocol.errors import SettingsError
from tsqp.deploy.image import COMMAND_LINE, FACTS, require_image

# Of x86's kernel, with the zero that ends it.
MAX_COMMAND_LINE = 2047
# Nobody but the measured command line sets up the guest: no credentials and variables of the host's
# firmware.
_ALWAYS = (
    "console=ttyS0",
    "efi=noruntime",
    "panic=-1",
    "loglevel=4",
    "random.trust_bootloader=off",
    "systemd.import_credentials=no",
    "systemd.firstboot=off",
    "systemd.show_status=error",
)
# Before the digest of the manifest of what is at /model.
MANIFEST = "tsqp.manifest="
SELF_TEST = (*_ALWAYS, "tsqp.self-test")


def command_line(arguments: Sequence[str], manifest_digest: str | None) -> str:
    """Return the line of an image that starts tee-runner, or tsqp doctor, with these words.

    `manifest_digest`: of the model on the disk that the guest sees at /model. Raises SettingsError.
    """
    words = [*_ALWAYS, *(f"tsqp.arg={quote(word, safe='/:,=@+')}" for word in arguments)]
    if manifest_digest is not None:
        if re.fullmatch("[0-9a-f]{64}", manifest_digest) is None:
            expected = "64 hexadecimal digits in lower case"
            raise SettingsError("--manifest-digest", got="another text", expected=expected)
        words.append(f"{MANIFEST}{manifest_digest}")
    line = " ".join(words)
    if len(line) > MAX_COMMAND_LINE:
        got = f"{len(line)} characters"
        raise SettingsError("command line", got=got, expected=f"{MAX_COMMAND_LINE} at most")
    return line


def configure(image: Path, arguments: Sequence[str], manifest_digest: str | None) -> str:
    """Write what an image runs, and return its command line; nothing else of it changes.

    Raises SettingsError for what is no image with a runner.
    """
    require_image(image)
    facts = json.loads((image / FACTS).read_bytes())
    if facts["runner_wheel"] is None:
        raise SettingsError(str(image), got="a small image", expected="one with a runner")
    line = command_line(arguments, manifest_digest)
    (image / COMMAND_LINE).write_text(line)
    facts["files"][COMMAND_LINE] = hashlib.sha256(line.encode()).hexdigest()
    (image / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    return line
