"""A sealed directory reads as the plain one, or not at all: cut, mixed, old or changed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.errors import ModelError, SealError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.files import (
    fill,
    is_there,
    opened,
    read_bytes,
    read_start,
    require_inside,
    size_of,
    use_seal,
)
from protocol.model.identity import linear_digest, model_digest
from protocol.model.manifest import MANIFEST_FILE, Manifest
from protocol.model.sealed import (
    CHUNK_BYTES,
    HEADER_BYTES,
    SEAL_FILE,
    TAG_BYTES,
    SealedModel,
    key_id,
    read_index,
    unwrap,
)
from tee_side.engine.tokenizer import Tokenizer
from tee_side.protect.calibration import CALIBRATION_FILE, Calibration, calibration_path
from tests.kit.rows import each_row
from tsqp.cli.program import model_directory
from tsqp.manifest import make_manifest
from tsqp.seal import rewrap, seal_model

DEMO = model_directory("demo")
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
STORED = CHUNK_BYTES + TAG_BYTES
SIZES = {
    "empty": 0,
    "byte": 1,
    "short": CHUNK_BYTES - 1,
    "chunk": CHUNK_BYTES,
    "long": CHUNK_BYTES + 1,
    "two": 2 * CHUNK_BYTES,
    "three": 2 * CHUNK_BYTES + 12_345,
}
NO_LIMIT = 2**26


class Seals(NamedTuple):
    """A plain directory, a seal of it, a later one, and a seal of it for another key."""

    plain: Path
    first: Path
    second: Path
    other: Path
    digests: dict[str, str]


@pytest.fixture(scope="module")
def seals(tmp_path_factory: pytest.TempPathFactory) -> Seals:
    root = tmp_path_factory.mktemp("seals")
    plain = root / "plain"
    plain.mkdir()
    shutil.copy(DEMO / "config.json", plain)
    for name, size in SIZES.items():
        (plain / name).write_bytes(random.Random(name).randbytes(size))  # the same each time
    found = Seals(plain, *(root / name for name in ("first", "second", "other")), {})
    for name, key in (("first", KEY), ("second", KEY), ("other", OTHER_KEY)):
        found.digests[name] = seal_model(plain, key, root / name).digest
    return found


@pytest.fixture
def changed(seals: Seals, tmp_path: Path) -> Path:
    """A copy of the first seal, to change."""
    return shutil.copytree(seals.first, tmp_path / "sealed")


@contextmanager
def unsealed(directory: Path, key: bytes = KEY, digest: str | None = None) -> Iterator[SealedModel]:
    seal = SealedModel(directory, key, digest)
    use_seal(directory, seal)
    try:
        yield seal
    finally:
        use_seal(directory, None)


def read_all(directory: Path) -> None:
    """Open a seal and read every file of it to its end."""
    with unsealed(directory) as seal:
        for name in seal.names:
            read_bytes(directory / name, NO_LIMIT)


# ------------------------------------------------------------------------------ what can be read


def test_every_file_reads_as_it_was(seals: Seals) -> None:
    with unsealed(seals.first) as seal:
        assert sorted(seal.names) == sorted(path.name for path in seals.plain.iterdir())
        for name in seal.names:
            path, expected = seals.first / name, (seals.plain / name).read_bytes()
            assert is_there(path)
            assert read_bytes(path, len(expected)) == expected
            with opened(path) as descriptor:
                assert size_of(descriptor, path) == len(expected)
                for limit in (0, 10, CHUNK_BYTES, CHUNK_BYTES + 7):
                    assert read_start(descriptor, limit, path) == expected[:limit]
            if expected:
                with pytest.raises(ModelError, match=f"got {len(expected)} bytes, expected at mos"):
                    read_bytes(path, len(expected) - 1)


def test_any_range_is_that_of_the_plain_file(seals: Seals) -> None:
    path, plain = seals.first / "three", (seals.plain / "three").read_bytes()
    places = [0, 1, 5, CHUNK_BYTES // 2]
    for border in (CHUNK_BYTES, 2 * CHUNK_BYTES, SIZES["three"]):
        places += [border - 1, border, border + 1]
    with unsealed(seals.first), opened(path) as descriptor:
        for start, stop in itertools.combinations_with_replacement(places, 2):
            buffer = bytearray(stop - start)
            if stop <= len(plain):
                fill(descriptor, memoryview(buffer), start, path)
                assert buffer == plain[start:stop], (start, stop)
            elif buffer:
                with pytest.raises(ModelError, match=rf"three: got \d+ bytes, expected {stop}$"):
                    fill(descriptor, memoryview(buffer), start, path)


def test_a_model_with_weights_tokenizer_scales_and_manifest(tmp_path: Path) -> None:
    plain, sealed = shutil.copytree(DEMO, tmp_path / "plain"), tmp_path / "sealed"
    (plain / MANIFEST_FILE).write_bytes(make_manifest(plain).to_bytes())
    seal_model(plain, KEY, sealed)
    config = read_config(plain)
    with unsealed(sealed):
        manifest = Manifest.load(sealed / MANIFEST_FILE)
        assert read_config(sealed, manifest) == config
        digests = {
            (model_digest(config, checkpoint), linear_digest(config, checkpoint))
            for checkpoint in (Checkpoint(plain), Checkpoint(sealed), Checkpoint(sealed, manifest))
        }
        ((digest, linears),) = digests
        scales = calibration_path(sealed, None)
        assert Calibration.load(scales, config, digest, linears, manifest).sites
        assert Tokenizer(sealed, manifest).to_json() == Tokenizer(plain).to_json()


def test_a_seal_names_what_there_is(seals: Seals, changed: Path) -> None:
    with pytest.raises(SealError, match=r"config.json: got a sealed file, expected .*--seal-key"):
        read_config(seals.first)
    added = changed / "added.json"
    added.write_text("{}")
    (changed / CALIBRATION_FILE).write_bytes(b"plain")
    with unsealed(changed):
        assert not is_there(added)
        for path in (added, changed / CALIBRATION_FILE, changed / SEAL_FILE):
            for inside in (True, False):
                with pytest.raises(SealError, match=f"{path.name}: got a file that was not sealed"):
                    read_bytes(path, NO_LIMIT, inside=inside)
    assert read_bytes(added, 10) == b"{}"


def test_links_lead_where_they_like_to_the_same_bytes(
    changed: Path, seals: Seals, tmp_path: Path
) -> None:
    (changed / "three").rename(tmp_path / "elsewhere")
    (changed / "three").symlink_to(tmp_path / "elsewhere")
    with unsealed(changed):
        assert read_bytes(changed / "three", NO_LIMIT) == (seals.plain / "three").read_bytes()
        # A directory that is exchanged under the seal stays sealed.
        changed.rename(tmp_path / "away")
        changed.symlink_to(seals.plain)
        for name in ("three", "config.json"):
            with pytest.raises(SealError, match=f"{name}(: chunk 0)?: got "):
                read_bytes(changed / name, NO_LIMIT)
        # As of the scales, whose path goes through `require_inside`.
        with pytest.raises(SealError, match="three: chunk 0: got other bytes"):
            read_bytes(require_inside(changed / "three"), NO_LIMIT, inside=False)
        changed.unlink()
        changed.symlink_to(seals.first)  # the same bytes, elsewhere
        assert read_bytes(changed / "byte", 1) == (seals.plain / "byte").read_bytes()
        assert read_bytes(Path(os.path.relpath(changed)) / "byte", 1)


# --------------------------------------------------------------------------------- what is refused


def test_a_file_that_is_cut_or_longer_is_refused(changed: Path) -> None:
    for name in ("config.json", *SIZES):
        path = changed / name
        whole = path.read_bytes()
        places = {0, 1, HEADER_BYTES - 1, len(whole) - TAG_BYTES, len(whole) - 1}
        for border in range(HEADER_BYTES, len(whole) + 1, STORED):
            places |= {border - 1, border, border + 1, border + STORED // 2}
        contents = [whole[:place] for place in sorted(places) if 0 <= place < len(whole)]
        for content in (*contents, whole + b"\0", whole + whole[-STORED:]):
            path.write_bytes(content)
            with pytest.raises(SealError, match=f"/{name}: got {len(content)} bytes, expected "):
                SealedModel(changed, KEY)
        path.write_bytes(whole)
    path = changed / "three"
    with unsealed(changed), opened(path) as descriptor:  # or while it is used
        os.truncate(path, HEADER_BYTES + STORED)
        buffer = memoryview(bytearray(10))
        fill(descriptor, buffer, CHUNK_BYTES - 10, path)
        with pytest.raises(SealError, match=r"three: got \d+ bytes, expected "):
            fill(descriptor, buffer, CHUNK_BYTES - 9, path)


def _stored(path: Path, chunk: int) -> bytes:
    return path.read_bytes()[HEADER_BYTES + chunk * STORED :][:STORED]


def test_a_chunk_in_the_place_of_another_is_refused(changed: Path, seals: Seals) -> None:
    path = changed / "three"
    whole, first, second = path.read_bytes(), _stored(path, 0), _stored(path, 1)
    for chunk, content in (
        (0, second),
        (1, first),
        (0, _stored(changed / "two", 0)),
        (0, _stored(seals.second / "three", 0)),
        (0, _stored(seals.other / "three", 0)),
        (0, bytes(STORED)),
    ):
        start = HEADER_BYTES + chunk * STORED
        path.write_bytes(whole[:start] + content + whole[start + STORED :])
        with pytest.raises(SealError, match=f"/three: chunk {chunk}: got other bytes than were "):
            read_all(changed)


def _swap(directory: Path, _: Seals) -> None:
    (directory / "two").rename(directory / "x")
    (directory / "three").rename(directory / "two")
    (directory / "x").rename(directory / "three")


def _folder(directory: Path, _: Seals) -> None:
    (directory / "three").unlink()
    (directory / "three").mkdir()


def _pipe(directory: Path, _: Seals) -> None:
    (directory / "three").unlink()
    os.mkfifo(directory / "three")


def _mix(directory: Path, seals: Seals) -> None:
    """The wrapped key of one seal, and the list of files of another."""
    line = (directory / SEAL_FILE).read_bytes().partition(b"\n")[0]
    body = (seals.second / SEAL_FILE).read_bytes().partition(b"\n")[2]
    (directory / SEAL_FILE).write_bytes(line + b"\n" + body)


ANOTHER = "got the header of another file, or of another seal"


@each_row(
    ("change", "name", "said"),
    [
        (_swap, "(two|three)", ANOTHER),
        (lambda d, _: (d / "three").unlink(), "three", "got no such file"),
        (lambda d, _: (d / SEAL_FILE).unlink(), SEAL_FILE, "got no such file"),
        (lambda d, seals: shutil.copy(seals.second / "three", d), "three", ANOTHER),
        (lambda d, seals: shutil.copy(seals.second / SEAL_FILE, d), "(config.json|byte)", ANOTHER),
        (lambda d, seals: shutil.copy(seals.plain / "three", d), "three", ANOTHER),
        (_folder, "three", "got a directory"),
        (_pipe, "three", "got a pipe"),
        (_mix, SEAL_FILE, "got other bytes than were sealed"),
    ],
)
def test_files_of_another_place_or_seal_are_refused(
    seals: Seals, tmp_path: Path, change: Callable[[Path, Seals], object], name: str, said: str
) -> None:
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    copy = shutil.copytree(seals.first, tmp_path / "copy")
    change(copy, seals)
    with pytest.raises(SealError, match=f"/{name}: {said}"):
        SealedModel(copy, KEY)


def test_an_older_seal_is_told_by_its_digest_and_another_key_by_its_name(seals: Seals) -> None:
    assert SealedModel(seals.first, KEY).digest == seals.digests["first"]
    assert SealedModel(seals.second, KEY, seals.digests["second"].upper())
    with pytest.raises(SealError, match=r"sealed\.tsqp: SHA-256 of the seal: got ") as refused:
        SealedModel(seals.first, KEY, seals.digests["second"])
    assert refused.value.got == seals.digests["first"]
    assert seals.digests["second"] in refused.value.expected
    for directory, key, of in ((seals.first, OTHER_KEY, KEY), (seals.other, KEY, OTHER_KEY)):
        with pytest.raises(SealError, match=r"sealed\.tsqp: got a seal for key") as refused:
            SealedModel(directory, key)
        assert key_id(of) in refused.value.got
        assert key_id(key) in refused.value.expected
        assert key.hex() not in str(refused.value)


def test_no_changed_bit_of_the_index_is_taken(changed: Path) -> None:
    path = changed / SEAL_FILE
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(SealError, match=r"^index: got "):
            unwrap(bytes(flipped), KEY, "index")
    end = whole.index(b"\n")
    for content in (
        *(b"", whole[:end], whole[: end + 1], whole[end + 1 :], whole[:-1], whole + b" "),
        *(whole[:40] + b"x" + whole[41:], b"x" * 2**20),
    ):
        path.write_bytes(content)
        with pytest.raises(SealError, match=r"sealed\.tsqp: got "):
            SealedModel(changed, KEY)


def test_no_changed_bit_of_a_file_is_taken(changed: Path) -> None:
    path = changed / "three"
    whole = path.read_bytes()
    first, end = HEADER_BYTES + CHUNK_BYTES, len(whole)
    for place in (
        *(0, 7, 8, HEADER_BYTES - 1),  # magic and salt
        *(HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES // 2, first - 1),
        *(first, first + TAG_BYTES - 1, HEADER_BYTES + STORED, HEADER_BYTES + 2 * STORED),
        *(end - 1, end - TAG_BYTES, end - TAG_BYTES - 1),
    ):
        for bit in (0, 7):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            chunk = (place - HEADER_BYTES) // STORED
            said = ANOTHER if place < HEADER_BYTES else f"chunk {chunk}: got other"
            with pytest.raises(SealError, match=f"/three: {re.escape(said)}"):
                read_all(changed)


# ------------------------------------------------------------------------- sealing, and other keys


def test_the_format_is_what_the_module_says(seals: Seals) -> None:
    """Read by a second reader, of what stands in the docstring."""
    line, _, body = (seals.first / SEAL_FILE).read_bytes().partition(b"\n")
    name, version, of, nonce, wrapped = line.decode().split(" ")
    assert (name, version, of) == ("tsqp-sealed-model", "1", key_id(KEY))
    digest = hashlib.sha256(body)
    assert digest.hexdigest() == seals.digests["first"]
    content_key = AESGCM(KEY).decrypt(bytes.fromhex(nonce), bytes.fromhex(wrapped), digest.digest())
    files = json.loads(body)["files"]
    assert {name: files[name]["size"] for name in SIZES} == SIZES
    for name in SIZES:
        content = (seals.first / name).read_bytes()
        magic, salt, plain = content[:8], content[8:40], b""
        header = hashlib.sha256(magic + salt).digest()
        assert (magic, header.hex()) == (b"TSQPSEA1", files[name]["header"])
        key = HKDF(SHA256(), 32, salt, b"tsqp sealed file 1").derive(content_key)
        chunks = [content[start : start + STORED] for start in range(40, len(content), STORED)]
        for index, chunk in enumerate(chunks):
            bound = header + index.to_bytes(8) + (b"\1" if index == len(chunks) - 1 else b"\0")
            plain += AESGCM(key).decrypt(index.to_bytes(12), chunk, bound)
        assert plain == (seals.plain / name).read_bytes()


def test_nothing_random_is_used_twice(seals: Seals, changed: Path) -> None:
    rewrap(changed, KEY, KEY)
    lines = [(where / SEAL_FILE).read_bytes().split()[:5] for where in (*seals[1:4], changed)]
    assert len({line[3] for line in lines}) == 4  # nonces of the wrapped key
    keys = [unwrap(read_index(path / SEAL_FILE), KEY, "")[0] for path in seals[1:3]]
    assert len({*keys, bytes(32)}) == 3
    files = [path for where in seals[1:4] for path in where.iterdir() if path.name != SEAL_FILE]
    salts = [path.read_bytes()[8:HEADER_BYTES] for path in files]
    assert len(set(salts)) == len(salts)


def test_another_key_opens_the_same_seal(changed: Path, seals: Seals) -> None:
    before = {path.name: path.read_bytes() for path in changed.iterdir()}
    assert rewrap(changed, KEY, OTHER_KEY) == seals.digests["first"]
    with pytest.raises(SealError, match="got a seal for key"):
        SealedModel(changed, KEY)
    with unsealed(changed, OTHER_KEY, seals.digests["first"]):
        expected = (seals.plain / "three").read_bytes()
        assert read_bytes(changed / "three", NO_LIMIT) == expected
    after = {path.name: path.read_bytes() for path in changed.iterdir()}
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [SEAL_FILE]
    with pytest.raises(SealError, match="got a seal for key"):
        rewrap(changed, KEY, OTHER_KEY)
    assert (changed / SEAL_FILE).read_bytes() == after[SEAL_FILE]


def test_what_cannot_be_sealed_leaves_nothing(tmp_path: Path, seals: Seals) -> None:
    plain, output = shutil.copytree(seals.plain, tmp_path / "plain"), tmp_path / "sealed"
    (plain / "zzz").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="zzz: got a link that leads out"):
        seal_model(plain, KEY, output)
    (plain / "zzz").unlink()

    def full(_sealed: int, _total: int) -> None:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - raised here
        seal_model(plain, KEY, output, full)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    (plain / SEAL_FILE).write_text("x")
    with pytest.raises(SealError, match=r"sealed\.tsqp: got a file of this name"):
        seal_model(plain, KEY, output)
    (plain / SEAL_FILE).unlink()
    # Folders are left out, and links followed.
    (plain / "original").mkdir()
    (plain / "link").symlink_to("config.json")
    made = seal_model(plain, KEY, output)
    assert (made.files, made.skipped) == (len(SIZES) + 2, ("original",))
    with unsealed(output):
        assert read_bytes(output / "link", NO_LIMIT) == (DEMO / "config.json").read_bytes()
    for source, to, said in (
        (plain, output, "got something of this name, expected a new directory"),
        (plain, tmp_path / "none" / "sealed", "got no such directory to write to"),
        (seals.first, tmp_path / "twice", r"config\.json: got a sealed file"),
        (tmp_path / "none", tmp_path / "nothing", "got no such directory"),
    ):
        with pytest.raises((ModelError, SealError), match=said):
            seal_model(source, KEY, to)


def _peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_reading_and_sealing_take_a_few_chunks_beside_what_is_read(tmp_path: Path) -> None:
    plain, sealed, size = tmp_path / "plain", tmp_path / "sealed", 16 * CHUNK_BYTES + 12_345
    plain.mkdir()
    shutil.copy(DEMO / "config.json", plain)
    (plain / "large").write_bytes(bytes(size))
    assert _peak_of(lambda: seal_model(plain, KEY, sealed)) < 4 * CHUNK_BYTES
    path, block = sealed / "large", memoryview(bytearray(4 * CHUNK_BYTES))

    def in_blocks() -> None:
        with opened(path) as descriptor:
            for start in range(1000, size - len(block), len(block)):
                fill(descriptor, block, start, path)

    with unsealed(sealed):
        assert _peak_of(in_blocks) < 3.2 * CHUNK_BYTES
        # As large as a plain file is read, which is never held twice.
        assert _peak_of(lambda: read_bytes(path, size)) < size * 9 / 8 + 3.2 * CHUNK_BYTES
