"""A sealed directory reads as the plain one, or not at all: cut, mixed, old or changed."""

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.errors import ModelError, SealError
from protocol.model.at_rest import (
    CHUNK_BYTES,
    HEADER_BYTES,
    SEAL_FILE,
    TAG_BYTES,
    SealedModel,
    key_id,
    read_index,
    unwrap,
)
from protocol.model.config import read_config
from protocol.model.files import is_there, opened, read_bytes, use_seal
from tests.kit.rows import each_row
from tsqp.model_at_rest import rewrap, seal_model
from tsqp.run.settings import model_directory

DEMO = model_directory("demo")
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
STORED = CHUNK_BYTES + TAG_BYTES
SIZES = {"empty": 0, "byte": 1, "short": CHUNK_BYTES - 1, "chunk": CHUNK_BYTES}
SIZES |= {"long": CHUNK_BYTES + 1, "two": 2 * CHUNK_BYTES, "three": 2 * CHUNK_BYTES + 12_345}
# Of a folder that a run reads a file of; what else is in it is not read.
POOLING = "1_Pooling/config.json"
SIZES |= {POOLING: 40}
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
    (plain / POOLING).parent.mkdir()
    for name, size in SIZES.items():
        (plain / name).write_bytes(random.Random(name).randbytes(size))  # the same each time
    found = Seals(plain, *(root / name for name in ("first", "second", "other")), {})
    for name, key in (("first", KEY), ("second", KEY), ("other", OTHER_KEY)):
        found.digests[name] = seal_model(plain, key, root / name)[-1]
    return found


@pytest.fixture
def changed(seals: Seals, tmp_path: Path) -> Path:
    return shutil.copytree(seals.first, tmp_path / "sealed")


@contextmanager
def unsealed(directory: Path, key: bytes = KEY, digest: str | None = None) -> Iterator[SealedModel]:
    seal = SealedModel(directory, key, digest)
    use_seal(directory, seal.files)
    try:
        yield seal
    finally:
        use_seal(directory, None)


def read_all(directory: Path) -> None:
    """Open a seal and read every file of it to its end."""
    with unsealed(directory) as seal:
        for name in seal.files:
            read_bytes(directory / name, NO_LIMIT)


def test_every_file_and_any_range_of_it_reads_as_it_was(seals: Seals) -> None:
    places = [0, 1, CHUNK_BYTES // 2]
    for border in (CHUNK_BYTES, 2 * CHUNK_BYTES, SIZES["three"]):
        places += [border - 1, border, border + 1]
    with unsealed(seals.first) as seal:
        assert sorted(seal.files) == sorted(["config.json", *SIZES])
        for name in seal.files:
            path, expected = seals.first / name, (seals.plain / name).read_bytes()
            assert read_bytes(path, len(expected)) == expected
            with opened(path) as file:
                assert file.size == len(expected)
                assert file.start(CHUNK_BYTES + 7) == expected[: CHUNK_BYTES + 7]
            if expected:
                with pytest.raises(ModelError, match=f"got {len(expected)} bytes, expected at mos"):
                    read_bytes(path, len(expected) - 1)
        path, plain = seals.first / "three", (seals.plain / "three").read_bytes()
        with opened(path) as file:
            for start, stop in itertools.combinations(places, 2):
                buffer = bytearray(stop - start)
                if stop <= len(plain):
                    file.fill(memoryview(buffer), start)
                    assert buffer == plain[start:stop], (start, stop)
                    continue
                with pytest.raises(ModelError, match=rf"three: got \d+ bytes, expected {stop}$"):
                    file.fill(memoryview(buffer), start)


def test_a_seal_names_what_there_is(seals: Seals, changed: Path) -> None:
    with pytest.raises(SealError, match=r"config.json: got a sealed file, expected .*--seal-key"):
        read_config(seals.first)
    added, inner = changed / "added.json", changed / POOLING
    for path in (added, inner.with_name("added")):
        path.write_text("{}")
    with unsealed(changed):
        assert not is_there(added)
        assert not is_there(inner.with_name("added"))
        assert is_there(inner)
        for path in (added, inner.with_name("added"), changed / SEAL_FILE):
            for inside in (True, False):
                with pytest.raises(SealError, match=f"{path.name}: got a file that was not sealed"):
                    read_bytes(path, NO_LIMIT, inside=inside)
    # A directory that is exchanged under the seal stays sealed.
    with unsealed(changed):
        shutil.rmtree(changed)
        changed.symlink_to(seals.plain)
        for name in ("three", "config.json"):
            with pytest.raises(SealError, match=f"{name}(: chunk 0)?: got "):
                read_bytes(changed / name, NO_LIMIT)


def test_a_file_that_is_cut_or_longer_is_refused(changed: Path) -> None:
    for name in ("config.json", "empty", "chunk", "three"):
        path = changed / name
        whole = path.read_bytes()
        places = {0, 1, HEADER_BYTES - 1, len(whole) - TAG_BYTES, len(whole) - 1}
        for border in range(HEADER_BYTES, len(whole) + 1, STORED):
            places |= {border - 1, border, border + 1}
        contents = [whole[:place] for place in sorted(places) if 0 <= place < len(whole)]
        for content in (*contents, whole + b"\0", whole + whole[-STORED:]):
            path.write_bytes(content)
            with pytest.raises(SealError, match=f"/{name}: got {len(content)} bytes, expected "):
                SealedModel(changed, KEY)
        path.write_bytes(whole)


def test_a_chunk_in_the_place_of_another_is_refused(changed: Path, seals: Seals) -> None:
    path, first = changed / "three", slice(HEADER_BYTES, HEADER_BYTES + STORED)
    whole = path.read_bytes()
    for other in (changed / "two", seals.second / "three", seals.other / "three"):
        path.write_bytes(whole[:HEADER_BYTES] + other.read_bytes()[first] + whole[first.stop :])
        with pytest.raises(SealError, match="/three: chunk 0: got other bytes than were "):
            read_all(changed)
    second = whole[first.stop :][:STORED]
    path.write_bytes(whole[:HEADER_BYTES] + second + whole[first] + whole[first.stop + STORED :])
    with pytest.raises(SealError, match="/three: chunk 0: got other bytes than were "):
        read_all(changed)


def _swap(directory: Path, _: Seals) -> None:
    (directory / "two").rename(directory / "x")
    (directory / "three").rename(directory / "two")
    (directory / "x").rename(directory / "three")


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
    with pytest.raises(SealError, match=r"sealed\.tsqp: got a seal for key") as refused:
        SealedModel(seals.first, OTHER_KEY)
    assert key_id(KEY) in refused.value.got
    assert key_id(OTHER_KEY) in refused.value.expected
    assert OTHER_KEY.hex() not in str(refused.value)


def test_no_changed_bit_of_the_index_is_taken(changed: Path) -> None:
    path = changed / SEAL_FILE
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(SealError, match=r"^index: got "):
            unwrap(bytes(flipped), KEY, "index")
    for content in (b"", whole[:-1], whole + b" ", b"x" * 2**20):
        path.write_bytes(content)
        with pytest.raises(SealError, match=r"sealed\.tsqp: got "):
            SealedModel(changed, KEY)


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


def test_nothing_random_is_used_twice(changed: Path, seals: Seals) -> None:
    """Nonces of the wrapped key, content keys, salts; and another key opens the same seal."""
    assert rewrap(changed, KEY, OTHER_KEY) == seals.digests["first"]
    SealedModel(changed, OTHER_KEY, seals.digests["first"])
    nonces = [(where / SEAL_FILE).read_bytes().split()[3] for where in (*seals[1:4], changed)]
    assert len(set(nonces)) == 4
    keys = [unwrap(read_index(path / SEAL_FILE), KEY, "")[0] for path in seals[1:3]]
    assert len({*keys, bytes(32)}) == 3
    found = [path for where in seals[1:4] for path in where.rglob("*") if path.is_file()]
    files = [path for path in found if path.name != SEAL_FILE]
    assert len(files) == 3 * (1 + len(SIZES))
    assert len({path.read_bytes()[8:HEADER_BYTES] for path in files}) == len(files)


def test_what_cannot_be_sealed_leaves_nothing(tmp_path: Path, seals: Seals) -> None:
    plain, output = shutil.copytree(seals.plain, tmp_path / "plain"), tmp_path / "sealed"
    (plain / "zzz").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="zzz: got a link that leads out"):
        seal_model(plain, KEY, output)
    (plain / "zzz").unlink()
    (plain / SEAL_FILE).write_text("x")
    with pytest.raises(SealError, match=r"sealed\.tsqp: got a file of this name"):
        seal_model(plain, KEY, output)
    (plain / SEAL_FILE).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    for source, to, said in (
        (plain, seals.second, "got something of this name, expected a new directory"),
        (seals.first, output, r"config\.json: got a sealed file"),
    ):
        with pytest.raises((ModelError, SealError), match=said):
            seal_model(source, KEY, to)
