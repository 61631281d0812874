"""Compiles one grammar within limits of the kernel, as a program of its own.

The library's limits bound most of what a grammar can cost, but not all: intersections of patterns,
terminals that double each other and `multipleOf` take minutes or gigabytes of a text of 1 KiB, and
a thread that does so cannot be ended. A process can. It reads the grammar from its standard input;
exit status 0 says that it may be compiled. Nothing of it is written anywhere, a core dump included.
"""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CPU_SECONDS = 2
_BYTES = 1 << 30


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a grammar at its beginning, its first mask computed; `is_error` where it is refused.

    Silent, and its errors do not hold the grammar's text.
    """
    from llguidance import LLMatcher, LLParserLimits

    # Defaults would let one grammar take 1.5 s for its first mask, 0.5 s for each later one, and
    # 500 MB.
    limits = LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return matcher


def main() -> int:
    """Try the grammar on standard input."""
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    return int(compiled(LLTokenizer("byte"), sys.stdin.read()).is_error())


if __name__ == "__main__":
    sys.exit(main())
