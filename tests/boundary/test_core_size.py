"""The trusted core and what an RPC calls only become smaller; the experiments stay outside."""

from pathlib import Path

import pytest

from tests.kit.calls import measure
from tests.kit.core_size import (
    RECORDED,
    ROOT,
    WITHOUT_LAB,
    all_of,
    imported_by_a_shielded_run,
    total,
)
from tests.kit.rows import each_row
from tests.kit.service import FreshPython


def test_a_shielded_run_imports_no_more_code_than_is_recorded(fresh_python: FreshPython) -> None:
    files = imported_by_a_shielded_run(fresh_python)
    assert all(ROOT in file.parents for file in files.values())
    assert {"tee_side.runner", "protocol.messages", "tsqp.cli.tee_runner"} <= files.keys()
    found = total(files.values())
    assert found <= RECORDED["core"]["imported"], "python -m tests.kit.core_size says what of it"
    wings = ("tee_side.attest", "tee_side.chat", "tee_side.serve")
    assert not any(name.startswith(wings) for name in files)
    # Deferring an import is no reduction.
    apart = {name: set(all_of(f"tee_side/{name}")) for name in ("attest", "chat", "serve")}
    rest = set(all_of("protocol", "tee_side")).difference(*apart.values())
    assert total(rest) <= RECORDED["core"]["whole"]
    for name, found_there in apart.items():
        assert total(found_there) <= RECORDED["core"][name]


def test_compiled_code_has_a_number_of_its_own() -> None:
    files = [file for name in ("protocol", "tee_side") for file in (ROOT / name).rglob("*")]
    sources = [file.read_text("utf-8") for file in files if file.suffix in {".cpp", ".h"}]
    lines = sum(len(source.splitlines()) for source in sources)
    assert lines <= RECORDED["native"]["lines"] <= 2_700


@pytest.mark.slow  # two minutes of a busy machine, under sys.setprofile
def test_an_rpc_takes_no_more_calls_than_are_recorded() -> None:
    found = measure()
    assert found.keys() == RECORDED["calls"].keys()
    for side, calls in found.items():
        assert calls <= RECORDED["calls"][side], f"{side}: python -m tests.kit.calls"


@each_row(
    ("policy", "missing"),
    [(("row-mix",), "tsqp.lab"), (("published", "--gpu", "unix:///none"), "research.operators")],
)
def test_a_policy_of_the_lab_says_which_package_is_missing(
    fresh_python: FreshPython, tmp_path: Path, policy: tuple[str, ...], missing: str
) -> None:
    """Before a service is asked."""
    run = ("generate", "demo", "--prompt", "Once", "--policy", *policy)
    done = fresh_python.run(f"{WITHOUT_LAB}main()", *run, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
