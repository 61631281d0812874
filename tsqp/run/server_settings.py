"""What a program that proves itself, or serves, is told alone, and what it claims of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from annotated_types import Interval

from tsqp.run.settings import (
    AtLeast0,
    Count,
    RunSettings,
    Settings,
    file_setting,
    local,
    local_file,
    said_of,
    setting,
    settings_of,
)

# As tee_side.chat.calls and tee_side.chat.reply have them, which take long to import.
ToolParser: TypeAlias = Literal[
    "cohere",
    "deepseek",
    "deepseek-v3.1",
    "glm",
    "granite",
    "hermes",
    "llama3",
    "mistral",
    "mistral-v3",
    "phi",
    "qwen3-coder",
    "seed",
]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
AttesterKind: TypeAlias = Literal["snp", "tdx", "simulated"]


def claims(settings: Settings) -> Iterator[tuple[str, object]]:
    """Yield what a server claims of its settings, by their names.

    Of a file, that there is one: where it is belongs to this machine alone.
    """
    for name, (known, _) in settings_of(type(settings)).items():
        if said_of(known).claim:
            value = getattr(settings, name)
            yield name, isinstance(value, Path) or value


@dataclass(frozen=True, kw_only=True)
class EvidenceSettings(Settings):
    """What a program is told that proves what it runs."""

    attest: AttesterKind | None = local(
        None, "Prove to clients what runs here, by evidence of this hardware."
    )
    attest_certificate: tuple[Path, ...] = local(
        (), "Of AMD's, in DER or PEM, where the host gives none; repeatable.", metavar="FILE"
    )
    attest_collateral: Path | None = local_file("TDX: Intel's; SEV-SNP: AMD's CRL.")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(EvidenceSettings, RunSettings):
    """What `tee-runner serve` is told beside: clients, their limits, and how requests are run."""

    host: str = local("127.0.0.1", "Address to listen at.")
    port: Annotated[int, Interval(ge=0, le=65535)] = local(8000, "0: one that is free.")
    tls_certificate: Path | None = local_file("PEM, with its chain.")
    tls_key: Path | None = local_file("PEM, of the certificate.", secret=True)
    seal_key_server: str | None = local(
        None,
        "MODEL is sealed: a tsqp keyserver that gives its key to what --attest proves.",
        metavar="URL",
    )
    api_keys: Path | None = file_setting(
        "Clients that may ask, and how much (tsqp api-key); SIGHUP reads it again. Default: all."
    )
    allow_origin: tuple[str, ...] = setting(
        (), "Of web pages that may ask, * for all; repeatable.", metavar="ORIGIN"
    )
    served_model_name: str | None = local(None, "Default: the name of MODEL.", metavar="NAME")
    max_model_len: Count | None = setting(None, "Prompt and answer; default: the model's context.")
    default_max_tokens: Count = setting(1024, "Of an answer without max_tokens.")
    max_sequences: Count = setting(64, "That run at a time; others wait.")
    max_waiting: Count = setting(256, "Requests that wait; others get 503.")
    speculative: Literal["none", "ngram"] = setting(
        "none",
        "Guess tokens from what the text repeats. Same text, fewer round trips; more pads.",
    )
    speculative_tokens: Annotated[int, Interval(ge=1, le=16)] = setting(4, "Guessed at a time.")
    prefix_reuse: bool | None = setting(
        None,
        "Keep keys and values of earlier turns, for later ones of the same API key.",
        show_default="on, but off where pads hide what leaves",
    )
    fixed_tempo_ms: Annotated[float, Interval(ge=0, le=60_000)] = setting(
        0.0, "Send a token at most so often, on a clock of its own; 0: as they come."
    )
    round_usage: Count = setting(1, "Tell token counts as multiples of this number.")
    pooling: Literal["last", "mean"] | None = setting(
        None, "Of /v1/embeddings.", show_default="what the model's files say, or the last token"
    )
    tool_parser: ToolParser | None = setting(
        None, "The form of MODEL's tool calls.", show_default="recognised from its chat template"
    )
    reasoning_effort: Effort | None = setting(
        None, "How much to think for requests that do not say.", show_default="the model's own"
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto", "Sample as MODEL's generation_config.json says where a request does not say."
    )
    audit_log: Path | None = file_setting("Sealed log of requests: key, time, tokens; no text.")
    audit_key: Path | None = local_file("Its key (tsqp audit new-key).", secret=True)
    audit_key_fd: AtLeast0 | None = local(None, "An open file that has its key.")
    page: bool = setting(False, "For development: a page to chat at /, with what left.")
