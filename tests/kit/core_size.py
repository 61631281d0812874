"""How much code is trusted: `python -m tests.kit.core_size` prints it, module by module.

A code line has something on it that is no comment and no docstring. What counts are the modules of
our packages that a shielded run imports, the real command with a real service over a unix socket.
"""

import ast
import json
import tempfile
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.kit.service import FreshPython, running_service

ROOT = Path(__file__).resolve().parents[2]
RECORDED = tomllib.loads(Path(__file__).with_name("recorded.toml").read_text(encoding="utf-8"))

_PROMPT = ("--prompt", "Once", "--max-new-tokens", "2")

# Runs the command where neither package of experiments can be imported.
WITHOUT_LAB = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("tsqp.lab"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from tsqp.cli.tee_runner import main
sys.argv[0] = "tee-runner"
"""
# And writes which of our modules it has imported to a file.
_CHILD = """
import json
answer = sys.argv.pop(1)
try:
    main()
finally:
    files = {name: module.__file__ for name, module in list(sys.modules.items())
             if name.partition(".")[0] in ("protocol", "tee_side", "gpu_side", "tsqp")
             and (module.__file__ or "").endswith(".py")}
    with open(answer, "w") as file:
        json.dump(files, file)
"""


@cache
def code_lines(file: Path) -> int:
    """Count the lines that have code on them."""
    source = file.read_text(encoding="utf-8")
    numbered = enumerate(source.splitlines(), start=1)
    lines = {number for number, line in numbered if line.strip() and line.strip()[0] != "#"}
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            lines.update(_range_of(node))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(str())) as text, *_]:
                    documentation.update(_range_of(text))
    return len(lines - documentation)


def _range_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)


def imported_by_a_shielded_run(python: FreshPython) -> dict[str, Path]:
    """Run it, and return the files of our modules that were imported, by name."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "modules.json"
        arguments = ("generate", "demo", "--policy", "shielded", *_PROMPT)
        with running_service("demo", f"unix://{folder}/gpu", "--threads", "1") as service:
            given = (str(answer), *arguments, "--gpu", service.endpoint)
            done = python.run(WITHOUT_LAB + _CHILD, *given, folder=Path(folder))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return {name: Path(file) for name, file in json.loads(answer.read_text()).items()}


def all_of(*packages: str) -> list[Path]:
    return [file for package in packages for file in (ROOT / package).rglob("*.py")]


def total(files: Iterable[Path]) -> int:
    """Count the code lines of files."""
    return sum(map(code_lines, files))


def main() -> None:
    """Print the table."""
    with FreshPython() as python:
        files = imported_by_a_shielded_run(python)
    for name, file in sorted(files.items()):
        print(f"{total([file]):6}  {name}")  # noqa: T201
    print(f"{total(files.values()):6}  imported by a shielded run")  # noqa: T201
    apart = {name: set(all_of(f"tee_side/{name}")) for name in ("attest", "chat", "serve")}
    whole = set(all_of("protocol", "tee_side")).difference(*apart.values())
    print(f"{total(whole):6}  all of protocol and tee_side, without {' and '.join(apart)}")  # noqa: T201
    for name, there in apart.items():
        print(f"{total(there):6}  of tee_side/{name}")  # noqa: T201


if __name__ == "__main__":
    main()
