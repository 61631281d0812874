"""`python -m tsqp` is `tsqp`."""

from tsqp.cli.main import main

main()
