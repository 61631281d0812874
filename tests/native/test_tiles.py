"""Products and attention by AMX tiles; emulated, as no processor here has them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol import native
from tests.native.compiling import ROOT, checked, compiled, must_end, options, run, skip_without

SANITIZER = "address,undefined"
OVER_AVX512 = "-DWITH_AVX512"
VARIANTS = () if native.library is None else native.library.variants()
KERNEL = Path("protocol/native/amx.h")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Mistakes in the kernel, any of which the program must notice.
FAULTS = {
    "rows of a register": ("{TILE, TILE,", "{TILE, TILE - 1,"),
    "bytes of a register": ("{64, 64, 64, 64, 64, 64, 64, 64}", "{64, 64, 64, 64, 64, 64, 32, 64}"),
    "palette": ("palette = 1", "palette = 0"),
    "not set": ("  _tile_loadconfig(&SHAPES);\n", ""),
    "not released": ("  _tile_release();\n", ""),
    "sums not zero": ("  _tile_zero(3);\n", ""),
    "other rows": ("_tile_dpbssd(2, 5, 6)", "_tile_dpbssd(2, 4, 6)"),
    "other panel": ("panels + (x.deep + k) * PANEL", "panels + k * PANEL"),
    "rows beyond the last": ("row + TILE < last ? row + TILE : last", "row + TILE"),
    "rows left out": ("row += 2 * TILE", "row += 3 * TILE"),
    "outputs left out": ("j < wide", "j + PAIR < wide"),
    "inputs left out": ("k < x.deep", "k + STEP < x.deep"),
    "digit's weight": ("<< 8", "<< 7"),
    "digits apart": ("digit < x.digits - 1", "digit < 0"),
    "bits flipped": ("x.deep, 0, panels", "x.deep, BALANCE, panels"),
    "panel not packed": ("wide / PANEL, x.deep", "wide / PANEL - 1, x.deep"),
}

# And in that of attention.
ATTENTION = Path("tee_side/native/attention_tiles.h")
FAULTS_OF_ATTENTION = {
    "rows of queries": ("= (uint8_t)queries", "= (uint8_t)(queries > 1 ? queries - 1 : 1)"),
    "shape of others": ("here != shaped", "!shaped"),
    "not released after it": ("  _tile_release();\n", ""),
    "other sums": ("_tile_dpbf16ps(2, 4, 5)", "_tile_dpbf16ps(1, 4, 5)"),
    "sums not kept": ("if (add)", "if (!add)"),
    "pairs left out": ("k < depth", "k + TILE_PAIRS < depth"),
    "vectors left out": ("v < vectors", "v + TILE_VECTORS < vectors"),
}


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that builds the program, of the sources in a folder."""
    skip_without(SANITIZER, tmp_path_factory.mktemp("empty"))

    def built(root: Path = ROOT, *flags: str) -> Path:
        given = [*options()[0], *checked(SANITIZER), "-Wno-unused-function", *flags]
        program = tmp_path_factory.mktemp("tiles") / "tiles"
        sources = (str(root / "tests/native/tiles.cpp"), str(ROOT / "protocol/native/pool.cpp"))
        must_end(compiled(*given, "-I", str(root), *sources, "-pthread", "-o", str(program)))
        return program

    return built


@pytest.fixture(scope="session")
def program(build: Callable[..., Path]) -> Path:
    return build()


def test_products_and_attention_end_without_a_report(
    program: Path, build: Callable[..., Path]
) -> None:
    for built in (program, *([build(ROOT, OVER_AVX512)] if "avx512" in VARIANTS else [])):
        ended = run(built)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("fault", [*FAULTS, *FAULTS_OF_ATTENTION])
def test_a_fault_of_a_kernel_is_noticed(
    fault: str, build: Callable[..., Path], tmp_path: Path
) -> None:
    of_attention = fault in FAULTS_OF_ATTENTION
    if of_attention and "avx512" not in VARIANTS:
        pytest.skip("a processor without AVX512-BF16")
    change = FAULTS_OF_ATTENTION[fault] if of_attention else FAULTS[fault]
    _changed(tmp_path, ATTENTION if of_attention else KERNEL, *change)
    program = build(tmp_path, OVER_AVX512) if of_attention else build(tmp_path)
    ended = run(program, *(["attention"] if of_attention else []))
    assert ended.returncode
    assert ended.stdout or ended.stderr


def _changed(root: Path, kernel: Path, old: str, new: str) -> None:
    """Copy the sources, with one thing changed."""
    for folder in ("protocol/native", "tee_side/native", "tests/native"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("*.so"))
    text = (root / kernel).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (root / kernel).write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "report"),
    [
        ("palette", "a palette that there is not"),
        ("rows", "more rows than a register has"),
        ("bytes", "more bytes a row than a register has"),
        ("reserved", "a reserved byte that is not 0"),
        ("half", "rows without bytes"),
        ("unset", "used without a shape"),
        ("absent", "a register without a shape"),
        ("twice", "a register used twice"),
        ("mismatch", "other outputs on the right than of sums"),
        ("overrun", "heap-buffer-overflow"),
        ("kept", "a thread ended that has not released them"),
    ],
)
def test_the_emulator_refuses_what_a_processor_does(kind: str, report: str, program: Path) -> None:
    ended = run(program, kind)
    assert ended.returncode
    assert report in ended.stderr
