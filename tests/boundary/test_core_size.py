"""The trusted core only becomes smaller: what a shielded run imports is counted."""

from __future__ import annotations

from tests.kit.core_size import (
    RECORDED,
    ROOT,
    all_of,
    imported_by_a_shielded_run,
    total,
)


def test_a_shielded_run_imports_no_more_code_than_is_recorded() -> None:
    files = imported_by_a_shielded_run()
    assert all(ROOT in file.parents for file in files.values())
    assert {"tee_side.runner", "protocol.messages", "tsqp.cli.tee_runner"} <= files.keys()
    found = total(files.values())
    assert found <= RECORDED["core"]["imported"], "python -m tests.kit.core_size says what of it"
    assert not any(name.startswith(("tee_side.attest", "tee_side.serve")) for name in files)
    # Deferring an import is no reduction.
    apart = {name: set(all_of(f"tee_side/{name}")) for name in ("attest", "serve")}
    rest = set(all_of("protocol", "tee_side")).difference(*apart.values())
    assert total(rest) <= RECORDED["core"]["whole"]
    for name, found_there in apart.items():
        assert total(found_there) <= RECORDED["core"][name]


def test_compiled_code_has_a_number_of_its_own() -> None:
    sources = [
        file
        for package in ("protocol", "tee_side")
        for file in (ROOT / package).rglob("*")
        if file.suffix in {".cpp", ".h"}
    ]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in sources)
    assert lines <= RECORDED["native"]["lines"] <= 2_500
