"""Run by an environment in which nothing but the wheel is ours: its kernels load, and are right."""

import sys
from pathlib import Path

from protocol import native


def main() -> None:
    """Say which kernels the installed wheel has; the exit status is 1 if they do not run here."""
    choice = native.choice()
    installed = Path(native.__file__).is_relative_to(sys.prefix)
    if not (installed and native.library and not choice.refused):
        sys.exit(f"wheel: got {choice} from {native.__file__}, expected its own compiled kernels")
    print(f"wheel: {', '.join(native.library.variants())} of {native.__file__}")  # noqa: T201


if __name__ == "__main__":
    main()
