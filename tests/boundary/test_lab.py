"""A shielded run needs nothing of the experiments: it passes where they cannot be imported."""

from __future__ import annotations

from pathlib import Path

from tests.kit.rows import each_row
from tests.kit.service import FreshPython, running_service

# Of both packages of experiments: an import of either is what a machine without them would raise.
_WITHOUT_LAB = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("tsqp.lab"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from tsqp.cli.tee_runner import main
sys.argv[0] = "tee-runner"
main()
"""


def test_a_run_of_the_core_passes_without_the_lab(
    fresh_python: FreshPython, tmp_path: Path
) -> None:
    with running_service("demo", f"unix://{tmp_path}/gpu", "--arithmetic", "both") as service:
        run = ("generate", "demo", "--prompt", "Once", "--max-new-tokens", "4")
        for policy in ("shielded", "attention-in-tee"):
            arguments = (*run, "--policy", policy, "--gpu", service.endpoint)
            done = fresh_python.run(_WITHOUT_LAB, *arguments, folder=tmp_path)
            assert done.returncode == 0, f"{policy}: {done.stderr}"
            assert done.stdout.strip()


@each_row(
    ("policy", "missing"),
    [(("row-mix",), "tsqp.lab"), (("tsqp", "--gpu", "unix:///none"), "research.operators")],
)
def test_a_policy_of_the_lab_says_which_package_is_missing(
    fresh_python: FreshPython, tmp_path: Path, policy: tuple[str, ...], missing: str
) -> None:
    """Before a service is asked."""
    run = ("generate", "demo", "--prompt", "Once", "--policy", *policy)
    done = fresh_python.run(_WITHOUT_LAB, *run, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
