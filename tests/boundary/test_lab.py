"""A shielded run needs nothing of the experiments: it passes where they cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("policy", ["shielded", "attention-in-tee"])
def test_a_run_of_the_core_passes_without_the_lab(
    fresh_python: FreshPython, policy: str, tmp_path: Path
) -> None:
    with running_service("demo", f"unix://{tmp_path}/gpu", "--arithmetic", "both") as service:
        run = ("generate", "demo", "--prompt", "Once", "--max-new-tokens", "4")
        arguments = (*run, "--policy", policy, "--gpu", service.endpoint)
        done = fresh_python.run(_WITHOUT_LAB, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_policy_of_the_lab_says_which_package_is_missing(
    fresh_python: FreshPython, tmp_path: Path
) -> None:
    run = ("generate", "demo", "--prompt", "Once", "--policy", "row-mix")
    done = fresh_python.run(_WITHOUT_LAB, *run, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "tsqp.lab" in done.stderr
    assert "Traceback" not in done.stderr


def test_operators_of_the_lab_say_which_package_is_missing(
    fresh_python: FreshPython, tmp_path: Path
) -> None:
    """Without a service: what the policy needs is looked for before one is asked."""
    run = ("generate", "demo", "--prompt", "Once", "--policy", "tsqp", "--gpu", "unix:///none")
    done = fresh_python.run(_WITHOUT_LAB, *run, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "tsqp.lab.research.operators" in done.stderr
    assert "Traceback" not in done.stderr
