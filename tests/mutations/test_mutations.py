"""The table fits the tree, and what does not is an error."""

from pathlib import Path

import pytest

from tests.mutations import Mutation, MutationError, Result, Table, try_all


def test_every_mutation_fits_the_tree() -> None:
    table = Table.read()
    assert table.problems() == []
    assert len(table.mutations) >= 70
    assert {mutation.concern for mutation in table.mutations} == table.concerns.keys()


@pytest.mark.parametrize(("text", "times"), [("b = 1", 0), ("a = 1; a = 1", 2)])
def test_a_text_that_is_not_there_once_is_an_error(tmp_path: Path, text: str, times: int) -> None:
    mutation = Mutation("name", "masks", "file.py", "a = 1", "a = 2", "test_a.py::test_b")
    with pytest.raises(MutationError, match="got no such file"):
        mutation.applied(tmp_path)
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(MutationError, match=f"got the text {times} times, expected 1"):
        mutation.applied(tmp_path)
    # Nor the test that noticed it, if it has another name now.
    (tmp_path / "test_a.py").write_text("def test_bc(): ...")
    assert "name: got no test_a.py::test_b, which" in Table({}, [mutation]).problems(tmp_path)[1]


class _Copy:
    """Tests `a` fail without any mutation, and `b` notice everything."""

    def __init__(self, root: Path, *_options: str) -> None:
        self.root = root

    def run(self, tests: list[str]) -> Result:
        return Result("caught" if tests[0] == "a" else "missed", ["a"])

    def try_mutation(self, _mutation: Mutation, tests: list[str]) -> Result:
        return Result("caught" if tests[0] == "b" else "missed", [])

    def close(self) -> None: ...


def test_a_test_notices_what_it_did_not_fail_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutations.Copy", _Copy)
    monkeypatch.setattr(Table, "problems", lambda _: [])
    rows = [Mutation(by, f"of {by}", "", "", "", by) for by in "abcaa"]
    table = Table({}, rows)
    found = try_all(table, rows[1:3], 1, each=False)
    assert {name: one.outcome for name, one in found.items()} == {"b": "caught", "c": "missed"}
    with pytest.raises(MutationError, match=r"of a: \['a'\] fails without"):
        try_all(table, rows, 1, each=False)


def test_a_name_that_is_used_twice_is_an_error(tmp_path: Path) -> None:
    row = '{name = "n", file = "f", old = "o", new = "x", by = "t"}'
    for concern in ("a", "b"):
        (tmp_path / f"{concern}.toml").write_text(f"tests = []\nmistakes = [{row}]\n")
    with pytest.raises(MutationError, match="got n twice"):
        Table.read(tmp_path)
