"""The lists of policies and masks, and that docs/masks.md is what the classes say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from unittest import mock

import click
import pytest
from click.testing import CliRunner, Result
from pydantic import Field

from protocol.errors import MaskError, SettingsError
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Masked, RowMask
from tee_side.protect.masks.registry import MASKS
from tee_side.words import OPERATORS
from tests.kit.rows import each_row
from tsqp.catalogue import (
    find_mask_entry,
    main,
    mask_entries,
    mask_entry,
    masks_page,
    our_masks,
    policy_entries,
    policy_entry,
)
from tsqp.cli.main import command

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "masks.md"


class Extra(RowMask):
    """A mask of an installed package."""

    name: ClassVar[str] = "extra"
    hides: ClassVar[str] = "nothing | at all"
    known_break: ClassVar[str] = "looking"
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "a test"
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "none"

    way: Literal["left", "right"] = "left"
    size: Annotated[int, Field(gt=0, le=123456789)]

    def mask(self, x_TI: object, randomness: object) -> Masked:
        raise NotImplementedError


MINE = Policy(
    name="installed",
    summary="a policy of an installed package",
    operators=dict.fromkeys(OPERATORS, "tee")
    | {"o_proj": {"place": "gpu", "phase": None, "mask": "none", "verify": "none"}},
)


def _there() -> list[EntryPoint]:
    groups = ("tsqp.masks", "tsqp.policies")
    return [entry for group in groups for entry in entry_points(group=group)]


@pytest.fixture
def installed() -> Iterator[None]:
    """Two entry points, as a package would bring them, beside those that are there."""
    found = EntryPoints(
        [
            *_there(),
            EntryPoint("extra", f"{__name__}:Extra", "tsqp.masks"),
            EntryPoint("installed", f"{__name__}:MINE", "tsqp.policies"),
        ]
    )

    def select(**wanted: str) -> EntryPoints:
        return found.select(**wanted)

    with (
        mock.patch("tee_side.plugins.entry_points", select),
        mock.patch("tee_side.policy.placement.entry_points", select),
    ):
        yield


def _run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(command, arguments)


def _words(text: str) -> str:
    """Text without the line breaks that a table puts into it; columns stay apart."""
    return " ".join(text.split())


# ------------------------------------------------------------------------------ docs/masks.md


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == masks_page(), "stale: make docs"


def test_the_page_has_a_row_and_a_section_for_every_mask() -> None:
    lines = masks_page().splitlines()
    header = next(line for line in lines if line.startswith("| mask "))
    for name, mask in our_masks().items():
        (row,) = [line for line in lines if line.startswith(f"| [`{name}`]")]
        assert row.count(" | ") == header.count(" | ")
        for claim in (mask.hides, mask.known_break, mask.source, mask.cost):
            assert claim in row
        assert f"## {name}" in lines


def test_the_module_writes_the_page(tmp_path: Path) -> None:
    main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == masks_page()
    with pytest.raises(SettingsError):
        main([])


def test_the_page_does_not_depend_on_what_is_installed(installed: None) -> None:
    assert PAGE.read_text(encoding="utf-8") == masks_page()


# ----------------------------------------------------------------------------------- entries


def test_a_mask_entry_says_what_the_class_says() -> None:
    entry = find_mask_entry("row-permutation")
    mask = our_masks()["row-permutation"]
    assert (entry.hides, entry.known_break, entry.source) == (
        mask.hides,
        mask.known_break,
        mask.source,
    )
    assert entry.operators == OPERATORS
    (option,) = entry.options
    assert (option.name, option.default) == ("dummy_rows", 4)
    assert option.values == "integer, at least 1 and at most 1024"


def test_options_in_words() -> None:
    options = {option.name: option for option in mask_entry(Extra).options}
    assert options["way"].values == "left, right"
    assert options["size"].values == "integer, above 0 and at most 123456789"
    assert (options["size"].required, options["size"].default) == (True, None)
    (block,) = find_mask_entry("feature-permutation").options
    assert block.values == "none or integer, at least 2"
    assert (block.required, block.default) == (False, None)


@pytest.mark.parametrize(
    ("name", "standing"),
    [
        ("tee-only", "nothing leaves"),
        ("tsqp", "clear"),
        ("quantized-clear", "clear"),
        ("tsqp-permuted", "broken"),
        ("stip", "broken"),
        ("shielded", "not known to be broken"),
        ("two-server", "not known to be broken"),
    ],
)
def test_standing(name: str, standing: str) -> None:
    assert policy_entry(load_policy(name)).standing == standing


def test_one_clear_operator_beside_masked_ones_is_clear() -> None:
    operators = dict(load_policy("two-server").operators)
    clear = load_policy("quantized-clear").operators["o_proj"]
    mixed = Policy(name="m", summary="", arithmetic="int8", operators=operators | {"o_proj": clear})
    entry = policy_entry(mixed)
    assert entry.standing == "clear"
    assert {(one.operator, one.mask) for one in entry.leaves} >= {
        ("o_proj", None),
        ("qkv_proj", "shares"),
    }


def test_installed_masks_and_policies_are_listed(installed: None) -> None:
    masks = {entry.name: entry.origin for entry in mask_entries()[0]}
    ours = {name: "built in" if name in MASKS.builtin else "research" for name in our_masks()}
    assert masks == ours | {"extra": "package"}
    policies = {entry.name: entry.origin for entry in policy_entries()[0]}
    assert policies == dict.fromkeys(builtin_policies(), "built in") | {"installed": "package"}
    assert find_mask_entry("extra").origin == "package"


@pytest.fixture
def broken_package() -> Iterator[None]:
    """Entry points of a package that cannot be imported, and of one that registers a number."""
    found = EntryPoints(
        [*_there()]
        + [
            EntryPoint(name, value, group)
            for group in ("tsqp.masks", "tsqp.policies")
            for name, value in (("broken", "no_such_package:x"), ("number", "math:pi"))
        ]
    )
    with (
        mock.patch("tee_side.plugins.entry_points", found.select),
        mock.patch("tee_side.policy.placement.entry_points", found.select),
    ):
        yield


# ------------------------------------------------------------------------------ command line


@pytest.mark.parametrize("name", ["policies", "masks"])
def test_a_list_is_readable_in_80_columns(name: str) -> None:
    result = _run(name)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output


def test_policies_are_listed(installed: None) -> None:
    result = _run("policies")
    for entry in policy_entries()[0]:
        assert f"\n {entry.name} " in result.output
        assert f"\n {entry.standing} " in result.output
    assert "(package)" in result.output
    words = _words(result.output)
    assert "under pad at decode: hidden states" in words
    assert "2 services, int8" in words


def test_masks_are_listed() -> None:
    result = _run("masks")
    for entry in mask_entries()[0]:
        assert f"\n {entry.name} " in result.output
    words = _words(result.output)
    assert "dummy_rows = 4 (integer, at least 1" in words
    assert "sigma = 1 (number, above 0" in words


@each_row("name", sorted(our_masks()))
def test_one_mask_in_full(name: str) -> None:
    result = _run("masks", name)
    assert result.exit_code == 0, result.output
    entry = find_mask_entry(name)
    words = _words(result.output)
    for claim in (entry.about, entry.hides, entry.known_break, entry.source, entry.cost):
        assert _words(claim) in words
    assert max(map(len, result.output.splitlines())) <= 80


def test_json() -> None:
    masks = json.loads(_run("masks", "--json").stdout)
    entries = [entry.model_dump(mode="json") for entry in mask_entries()[0]]
    assert masks == {"masks": entries, "unusable": []}
    assert [entry["name"] for entry in entries if entry["uniform"]] == ["pad", "shares"]
    policies = json.loads(_run("policies", "--json").stdout)
    found = [entry.model_dump(mode="json") for entry in policy_entries()[0]]
    assert policies == {"policies": found, "unusable": [], "default": "shielded"}
    one = json.loads(_run("masks", "pad", "--json").stdout)
    assert one == find_mask_entry("pad").model_dump(mode="json")


@pytest.mark.parametrize(
    ("what", "wanted", "names"),
    [
        ("masks", "a subclass of a mask kind", our_masks()),
        ("policies", "a tee_side.policy.placement.Policy", builtin_policies()),
    ],
)
def test_what_does_not_load_is_an_error_line_beside_the_others(
    what: str, wanted: str, names: list[str], broken_package: None
) -> None:
    errors = {
        "broken": "entry point no_such_package:x: got ModuleNotFoundError: No module named"
        " 'no_such_package', expected one that loads",
        "number": f"entry point math:pi: got 3.141592653589793, expected {wanted}",
    }
    result = _run(what)
    assert result.exit_code == 0, result.output
    for name in names:
        assert f"\n {name} " in result.output
    for name, error in errors.items():
        assert f"error: {name} (package): {error}" in _words(result.output)
    listed = json.loads(_run(what, "--json").stdout)
    assert {entry["name"] for entry in listed[what]} == set(names)
    assert {one["name"]: one["error"] for one in listed["unusable"]} == errors


def test_an_unknown_mask_is_refused_with_those_that_there_are() -> None:
    result = _run("masks", "rot13")
    assert isinstance(result.exception, MaskError)
    assert "got 'rot13', expected one of cloak-segment, feature-" in str(result.exception)


def test_the_default_policy_is_marked() -> None:
    names = [line.strip() for line in _run("policies").stdout.splitlines() if "(default)" in line]
    assert [line.split()[0] for line in names] == ["shielded"]


def test_commands_are_registered() -> None:
    names = command.list_commands(click.Context(command))
    assert {"policies", "masks", "explain", "calibrate", "provision"} <= set(names)


# ---------------------------------------------------------------------------- docs/policies.md


@each_row("name", builtin_policies())
def test_the_page_on_policies_agrees_with_their_files(name: str) -> None:
    lines = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    (about,) = (row for row in cells if f"`{name}`" in row[0] and len(row) == 6)
    entry = policy_entry(load_policy(name))
    assert about[-1] == entry.standing
    for mask in entry.masks:
        assert f"under `{mask}`" in about[3]
    needs = about[4].replace("no service", "0 services")
    assert needs.startswith(str(entry.services))
    assert ("`tsqp calibrate`" in needs) == (entry.arithmetic == "int8")
