"""For people: command line, Python API, demo, training of the demo model, reports."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsqp.llm import LLM, RequestOutput, SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Commands of this package import no torch before they need it.
    if name in __all__:
        from tsqp import llm

        return getattr(llm, name)
    raise AttributeError(name)
