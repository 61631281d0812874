"""How `pip install` compiles the kernels: their files side by side, one on each core.

Named in pyproject.toml; setuptools alone compiles the files of an extension one after another.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class CompileKernels(build_ext):
    """The command `build_ext`, which asks the compiler for each file in a thread of its own."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one extension."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
            def compile_one(source: str) -> list[str]:
                objects: list[str] = compile_all([source], *args, **kwargs)
                return objects

            # setuptools sorts them; portable.cpp takes longest, so that it must not begin last.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = list(pool.map(compile_one, reversed(sources)))
            return [name for names in compiled for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)
