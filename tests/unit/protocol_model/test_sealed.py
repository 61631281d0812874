"""A sealed directory reads as the plain one, or not at all: cut, mixed, old or changed."""

from __future__ import annotations

import hashlib
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
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ModelError, SealError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import EMBEDDING, Checkpoint
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
    ChunkCipher,
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
    copy = tmp_path / "sealed"
    shutil.copytree(seals.first, copy)
    return copy


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


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


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


places = st.one_of(
    st.integers(0, SIZES["three"]),
    st.sampled_from([0, CHUNK_BYTES, 2 * CHUNK_BYTES, SIZES["three"]]).flatmap(
        lambda near: st.integers(max(0, near - 3), near + 3)
    ),
)


def test_any_range_is_that_of_the_plain_file(seals: Seals) -> None:
    path, plain = seals.first / "three", (seals.plain / "three").read_bytes()

    @settings(deadline=None, max_examples=300, derandomize=True)
    @given(places, places)
    def check(one: int, other: int) -> None:
        start, stop = sorted((one, other))
        buffer = bytearray(stop - start)
        with opened(path) as descriptor:
            if stop <= len(plain):
                fill(descriptor, memoryview(buffer), start, path)
                assert buffer == plain[start:stop]
            elif buffer:
                with pytest.raises(ModelError, match=rf"three: got \d+ bytes, expected {stop}$"):
                    fill(descriptor, memoryview(buffer), start, path)

    with unsealed(seals.first):
        check()


def test_a_model_with_weights_tokenizer_scales_and_manifest(tmp_path: Path) -> None:
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    shutil.copytree(DEMO, plain)
    (plain / MANIFEST_FILE).write_bytes(make_manifest(plain).to_bytes())
    seal_model(plain, KEY, sealed)
    config = read_config(plain)
    digests, scales = [], []
    with unsealed(sealed):
        for directory in (plain, sealed):
            manifest = Manifest.load(directory / MANIFEST_FILE)
            assert read_config(directory, manifest) == config
            for pinned in (None, manifest):
                checkpoint = Checkpoint(directory, pinned)
                of = model_digest(config, checkpoint), linear_digest(config, checkpoint)
                digests.append(of)
                path = calibration_path(directory, None)
                scales.append(Calibration.load(path, config, of[0], of[1], pinned).sites)
            assert Tokenizer(directory, manifest).to_json() == Tokenizer(plain).to_json()
        shape = (config.vocab_size, config.hidden_size)
        whole = [torch.empty(shape, dtype=torch.float32) for _ in range(2)]
        for directory, weight in zip((plain, sealed), whole, strict=True):
            Checkpoint(directory).copy_into(EMBEDDING, weight)
        assert torch.equal(*whole)
    assert len(set(digests)) == 1
    assert scales[0].keys() == scales[3].keys()
    assert len(scales[0]) == config.num_hidden_layers * len(FUSED_MODULES)
    for site, of in scales[0].items():
        assert torch.equal(of.weight_scale, scales[3][site].weight_scale)


def test_a_seal_names_what_there_is(seals: Seals, changed: Path) -> None:
    added = changed / "added.json"
    added.write_text("{}")
    (changed / CALIBRATION_FILE).write_bytes(b"plain")
    with unsealed(changed):
        assert not is_there(added)
        for path in (added, changed / CALIBRATION_FILE, changed / SEAL_FILE):
            with pytest.raises(SealError, match=f"{path.name}: got a file that was not sealed"):
                read_bytes(path, NO_LIMIT)
        with pytest.raises(SealError, match=f"{CALIBRATION_FILE}: got a file that was not sealed"):
            read_bytes(calibration_path(changed, None), NO_LIMIT, inside=False)
    assert is_there(added)
    assert read_bytes(added, 10) == b"{}"


def test_without_its_seal_a_sealed_file_is_called_that(seals: Seals) -> None:
    with pytest.raises(SealError, match=r"config.json: got a sealed file, expected .*--seal-key"):
        read_config(seals.first)


def test_links_lead_where_they_like_to_the_same_bytes(changed: Path, tmp_path: Path) -> None:
    (changed / "three").rename(tmp_path / "elsewhere")
    (changed / "three").symlink_to(tmp_path / "elsewhere")
    read_all(changed)
    (changed / "two").unlink()
    os.mkfifo(changed / "two")
    with pytest.raises(SealError, match="two: got a pipe"):
        read_all(changed)


def test_a_directory_that_is_changed_under_the_seal_stays_sealed(
    changed: Path, seals: Seals, tmp_path: Path
) -> None:
    with unsealed(changed):
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


@pytest.mark.parametrize("name", ["config.json", *SIZES])
def test_a_file_that_is_cut_or_longer_is_refused(changed: Path, name: str) -> None:
    path = changed / name
    whole = path.read_bytes()
    borders = range(HEADER_BYTES, len(whole) + 1, STORED)
    places = {0, 1, HEADER_BYTES - 1, len(whole) - TAG_BYTES, len(whole) - 1}
    places |= {border + by for border in borders for by in (-1, 0, 1, STORED // 2)}
    for place in sorted(place for place in places if 0 <= place < len(whole)):
        path.write_bytes(whole[:place])
        with pytest.raises(SealError, match=f"/{name}: got {place} bytes, expected "):
            SealedModel(changed, KEY)
    for more in (b"\0", whole[-STORED:]):
        path.write_bytes(whole + more)
        with pytest.raises(SealError, match=rf"/{name}: got {len(whole + more)} bytes, expected"):
            SealedModel(changed, KEY)
    path.write_bytes(whole)
    read_all(changed)


def test_a_file_that_is_cut_while_it_is_used_is_refused(changed: Path) -> None:
    path = changed / "three"
    with unsealed(changed), opened(path) as descriptor:
        os.truncate(path, HEADER_BYTES + STORED)
        buffer = memoryview(bytearray(10))
        fill(descriptor, buffer, CHUNK_BYTES - 10, path)
        with pytest.raises(SealError, match=r"three: got \d+ bytes, expected "):
            fill(descriptor, buffer, CHUNK_BYTES - 9, path)


def stored(path: Path, chunk: int) -> bytes:
    return path.read_bytes()[HEADER_BYTES + chunk * STORED :][:STORED]


def put(path: Path, chunk: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + chunk * STORED)
        file.write(content)


def test_a_chunk_in_the_place_of_another_is_refused(changed: Path, seals: Seals) -> None:
    path = changed / "three"
    first, second = stored(path, 0), stored(path, 1)
    for place, content in (
        (0, second),
        (1, first),
        (0, stored(changed / "two", 0)),
        (0, stored(seals.second / "three", 0)),
        (0, stored(seals.other / "three", 0)),
        (0, bytes(STORED)),
    ):
        put(path, place, content)
        with pytest.raises(SealError, match=f"/three: chunk {place}: got other bytes than were "):
            read_all(changed)
        put(path, 0, first)
        put(path, 1, second)
    read_all(changed)


def test_a_chunk_is_bound_to_its_place_its_file_and_the_end() -> None:
    header = os.urandom(HEADER_BYTES)
    cipher = ChunkCipher(KEY, header, 2 * CHUNK_BYTES)
    sealed = bytearray(cipher.seal(0, b"plain"))
    assert cipher.open(0, sealed) == b"plain"
    for other, chunk in (
        (cipher, 1),
        (ChunkCipher(KEY, header, CHUNK_BYTES), 0),  # there it is the last
        (ChunkCipher(KEY, os.urandom(HEADER_BYTES), 2 * CHUNK_BYTES), 0),
        (ChunkCipher(KEY, bytes([header[0] ^ 1]) + header[1:], 2 * CHUNK_BYTES), 0),
        (ChunkCipher(OTHER_KEY, header, 2 * CHUNK_BYTES), 0),
    ):
        with pytest.raises(InvalidTag):
            other.open(chunk, sealed)
    last = bytearray(cipher.seal(1, b"plain"))
    with pytest.raises(InvalidTag):  # of a longer file it would not be
        ChunkCipher(KEY, header, 3 * CHUNK_BYTES).open(1, last)


def swap_files(directory: Path, _seals: Seals) -> None:
    (directory / "two").rename(directory / "x")
    (directory / "three").rename(directory / "two")
    (directory / "x").rename(directory / "three")


def drop(directory: Path, _seals: Seals) -> None:
    (directory / "three").unlink()


def drop_the_index(directory: Path, _seals: Seals) -> None:
    (directory / SEAL_FILE).unlink()


def older_file(directory: Path, seals: Seals) -> None:
    shutil.copy(seals.second / "three", directory)


def older_index(directory: Path, seals: Seals) -> None:
    shutil.copy(seals.second / SEAL_FILE, directory)


def plain_file(directory: Path, seals: Seals) -> None:
    shutil.copy(seals.plain / "three", directory)


def folder(directory: Path, _seals: Seals) -> None:
    (directory / "three").unlink()
    (directory / "three").mkdir()


def mixed_index(directory: Path, seals: Seals) -> None:
    """The wrapped key of one seal, and the list of files of another."""
    line = (directory / SEAL_FILE).read_bytes().partition(b"\n")[0]
    body = (seals.second / SEAL_FILE).read_bytes().partition(b"\n")[2]
    (directory / SEAL_FILE).write_bytes(line + b"\n" + body)


HEADER_OF_ANOTHER = "got the header of another file, or of another seal"


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (swap_files, "(two|three)", HEADER_OF_ANOTHER),
        (drop, "three", "got no such file"),
        (drop_the_index, SEAL_FILE, "got no such file"),
        (older_file, "three", HEADER_OF_ANOTHER),
        (older_index, "(config.json|byte)", HEADER_OF_ANOTHER),
        (plain_file, "three", HEADER_OF_ANOTHER),
        (folder, "three", "got a directory"),
        (mixed_index, SEAL_FILE, "got other bytes than were sealed"),
    ],
)
def test_files_of_another_place_or_seal_are_refused(
    changed: Path, seals: Seals, change: Callable[[Path, Seals], None], name: str, said: str
) -> None:
    change(changed, seals)
    with pytest.raises(SealError, match=f"/{name}: {said}"):
        SealedModel(changed, KEY)


def test_an_older_seal_is_told_by_its_digest_alone(seals: Seals) -> None:
    assert SealedModel(seals.first, KEY).digest == seals.digests["first"]
    assert SealedModel(seals.second, KEY, seals.digests["second"].upper())
    with pytest.raises(SealError, match=r"sealed\.tsqp: SHA-256 of the seal: got ") as refused:
        SealedModel(seals.first, KEY, seals.digests["second"])
    assert refused.value.got == seals.digests["first"]
    assert seals.digests["second"] in refused.value.expected


def test_another_key_is_refused_and_named(seals: Seals) -> None:
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


@each_row(
    "place",
    [
        *(0, 7, 8, HEADER_BYTES - 1),  # magic and salt
        *(HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES // 2, HEADER_BYTES + CHUNK_BYTES - 1),
        *(HEADER_BYTES + CHUNK_BYTES, HEADER_BYTES + STORED - 1),  # the first tag
        *(HEADER_BYTES + STORED, HEADER_BYTES + 2 * STORED),
        *(-1, -TAG_BYTES, -TAG_BYTES - 1),
    ],
)
def test_no_changed_bit_of_a_file_is_taken(changed: Path, place: int) -> None:
    path = changed / "three"
    for bit in (0, 7):
        flip(path, place, bit)
        chunk = max(0, place % path.stat().st_size - HEADER_BYTES) // STORED
        said = HEADER_OF_ANOTHER if 0 <= place < HEADER_BYTES else f"chunk {chunk}: got other"
        with pytest.raises(SealError, match=f"/three: {re.escape(said)}"):
            read_all(changed)
        flip(path, place, bit)


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


def test_a_file_says_nothing_but_its_size(seals: Seals) -> None:
    for name in SIZES:
        plain, sealed = (seals.plain / name).read_bytes(), (seals.first / name).read_bytes()
        assert len(sealed) == HEADER_BYTES + len(plain) + TAG_BYTES * -(-len(plain) // CHUNK_BYTES)
        if name not in ("empty", "byte"):
            assert sealed != (seals.second / name).read_bytes()
            for start in range(0, len(plain) - 16, 4096):
                assert plain[start : start + 16] not in sealed


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


def test_folders_are_left_out_and_links_are_followed(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    (plain / "original").mkdir(parents=True)
    shutil.copy(DEMO / "config.json", plain)
    (plain / "link").symlink_to("config.json")
    made = seal_model(plain, KEY, tmp_path / "sealed")
    assert (made.files, made.skipped) == (2, ("original",))
    assert made.plain_bytes == 2 * (DEMO / "config.json").stat().st_size
    with unsealed(tmp_path / "sealed"):
        content = read_bytes(tmp_path / "sealed" / "link", NO_LIMIT)
    assert content == (DEMO / "config.json").read_bytes()


def test_what_cannot_be_sealed_leaves_nothing(tmp_path: Path, seals: Seals) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(seals.plain, plain)
    output = tmp_path / "sealed"
    (plain / "zzz").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="zzz: got a link that leads out"):
        seal_model(plain, KEY, output)
    (plain / "zzz").unlink()
    os.mkfifo(plain / "zzz")
    with pytest.raises(ModelError, match="zzz: got a pipe"):
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
    output.mkdir()
    with pytest.raises(ModelError, match="got something of this name, expected a new directory"):
        seal_model(plain, KEY, output)
    with pytest.raises(ModelError, match="got no such directory to write to"):
        seal_model(plain, KEY, tmp_path / "none" / "sealed")
    with pytest.raises(SealError, match=r"config\.json: got a sealed file"):
        seal_model(seals.first, KEY, tmp_path / "twice")
    with pytest.raises(ModelError, match="got no such directory"):
        seal_model(tmp_path / "none", KEY, tmp_path / "nothing")


# ------------------------------------------------------------------------------------------ memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed directory with a file of 16 chunks and a half."""
    root = tmp_path_factory.mktemp("large")
    (root / "plain").mkdir()
    shutil.copy(DEMO / "config.json", root / "plain")
    (root / "plain" / "large").write_bytes(bytes(16 * CHUNK_BYTES + CHUNK_BYTES // 2))
    seal_model(root / "plain", KEY, root / "sealed")
    return root / "sealed"


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_reading_takes_a_few_chunks_beside_what_is_read(large: Path, tmp_path: Path) -> None:
    path, size = large / "large", 16 * CHUNK_BYTES + CHUNK_BYTES // 2
    block = memoryview(bytearray(4 * CHUNK_BYTES))

    def in_blocks() -> None:
        with opened(path) as descriptor:
            for start in range(1000, size - len(block), len(block)):
                fill(descriptor, block, start, path)

    with unsealed(large):
        assert peak_of(in_blocks) < 3.2 * CHUNK_BYTES
        # As large as a plain file is read, which is never held twice.
        assert peak_of(lambda: read_bytes(path, size)) < size * 9 / 8 + 3.2 * CHUNK_BYTES


def test_sealing_takes_a_few_chunks(large: Path, tmp_path: Path) -> None:
    plain = large.parent / "plain"
    assert peak_of(lambda: seal_model(plain, KEY, tmp_path / "again")) < 4 * CHUNK_BYTES
