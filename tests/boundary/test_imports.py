"""Tests of the boundary in the code: what the three packages load, and what they never call."""

import ast
import json
from pathlib import Path

import pytest

from tests.kit.service import FreshPython

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "tee_side", "gpu_side")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN_MODULES = {"transformers", "huggingface_hub", "rich", "click", "enlighten"}
OTHERS = {
    "protocol": {"tee_side", "gpu_side", "tsqp"},
    "tee_side": {"gpu_side", "tsqp"},
    "gpu_side": {"tee_side", "tsqp"},
}
CODE_LOADERS = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("code", "codeop", "runpy"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    "torch": {"load", "save", "hub", "package", "jit"},
    "np": {"load"},
    "numpy": {"load"},
    "os": {"system", "popen"},
    "yaml": {"load", "unsafe_load"},
}
FORBIDDEN_NAMES = {"trust_remote_code", "allow_pickle", "weights_only", "remote_code"}

_IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
without = []
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # the one package that is not installed for `make test`
            raise
        without.append(name)
print(json.dumps([names, sorted(sys.modules), without]))
"""


@pytest.mark.slow  # of what is written in the sources `make imports` says the same
@pytest.mark.parametrize("package", PACKAGES)
def test_package_loads_nothing_that_it_must_not(
    fresh_python: FreshPython, package: str, tmp_path: Path
) -> None:
    done = fresh_python.run(_IMPORT_EVERYTHING, package, folder=tmp_path, strict=True)
    assert done.returncode == 0, done.stderr
    imported, loaded, without = json.loads(done.stdout)
    assert set(without) <= {"gpu_side.cuda.ring"}
    compiled = f"{package}.native._native"
    own = {name for name in loaded if name.split(".")[0] == package} - {compiled}
    files = {path for path in SOURCES if path.relative_to(ROOT).parts[0] == package}
    assert len(own) + len(without) == len(files), "a module was not imported"
    assert set(imported) - {compiled} - set(without) <= own
    top = {name.split(".")[0] for name in loaded}
    assert not top & FORBIDDEN_MODULES
    assert not top & OTHERS[package]


def _root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def violations(source: str) -> list[str]:
    """Name everything in a source that could load code, or trust somebody else's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names} & CODE_LOADERS
        elif isinstance(node, ast.ImportFrom):
            root = (node.module or "").split(".")[0]
            taken = {alias.name for alias in node.names}
            names = ({root} & CODE_LOADERS) | (taken & FORBIDDEN_ATTRIBUTES.get(root, set()))
            names |= taken & CODE_LOADERS
        elif isinstance(node, ast.Attribute):
            names = {node.attr} & FORBIDDEN_ATTRIBUTES.get(_root_name(node.value), set())
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {node.func.id} & FORBIDDEN_CALLS
        elif isinstance(node, ast.keyword | ast.arg):
            names = {node.arg or ""} & FORBIDDEN_NAMES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = {node.value} & (FORBIDDEN_NAMES | CODE_LOADERS - {"code"})
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in sorted(names)]
    return found


def test_no_source_loads_code() -> None:
    assert len(SOURCES) > 20
    found = {str(path.relative_to(ROOT)): violations(path.read_text("utf-8")) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_scan_itself_finds() -> None:
    missed = [source for source in LOADING if not violations(source)]
    assert missed == []
    for source in ("json.load(f)", "model.eval()", "re.compile('x')", "code = 1"):
        assert violations(source) == []


LOADING = [
    "import pickle",
    "import pickle as p",
    "from pickle import loads",
    "from multiprocessing import pickle",
    "import torch\ntorch.load('x')",
    "import torch\nf = torch.load",
    "from torch import load",
    "torch.jit.load('x')",
    "torch.hub.load('x')",
    "eval('1')",
    "exec('1')",
    "__import__('x')",
    "f(trust_remote_code=True)",
    "f(**{'trust_remote_code': True})",
    "importlib.import_module('pickle')",
    "np.load('x', allow_pickle=True)",
]
