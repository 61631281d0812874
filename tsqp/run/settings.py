"""The settings of our programs, each declared once, as a field of a dataclass.

A field is an option of the commands (`--max-kv-mib`), a variable of the environment, a key of a
TOML file (`tsqp.cli.config`), an argument of `tsqp.LLM`, which has pydantic check it, and a claim
of a server that proves what it runs (`tsqp.run.server_settings.claims`). Pydantic is not imported
here, because `--help` and the completion of a shell need the fields alone.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Interval, MinLen

S = TypeVar("S", bound="Settings")

MIB = 1024 * 1024
DEFAULT_PORT = 5555
DEFAULT_ENDPOINT = f"tcp://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_POLICY = "shielded"
# The word for the model that ships with us.
DEMO = "demo"

# In `Annotated`: a path that leads to a directory; others lead to a file.
DIRECTORY = "directory"

Count: TypeAlias = Annotated[int, Interval(ge=1)]
AtLeast0: TypeAlias = Annotated[int, Interval(ge=0)]
# More threads than that end a process of torch with a segmentation fault.
Threads: TypeAlias = Annotated[int, Interval(ge=1, le=1024)]
Seconds: TypeAlias = Annotated[float, Interval(gt=0, le=3600)]
Microseconds: TypeAlias = Annotated[float, Interval(ge=0, le=1e6)]
Text: TypeAlias = Annotated[str, MinLen(1)]
Kernels: TypeAlias = Literal["auto", "torch", "portable", "avx2", "vnni", "avx512", "amx"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a setting beside its name, type and default.

    `help`, `metavar`, `show_default`: shown by `--help`. `option`: its name as an option, where
    that differs. `complete`: what a shell completes. `claim`: whether a server that proves what it
    runs claims it; what only says where things are, or how long to wait, is `local`. `secret`: the
    value may hold a secret, so that it is not part of `repr`. `pins`: it says which model is meant,
    so that a settings file, which a manifest has to pin, must not hold it. `variable`: whether the
    environment and settings files may set it.
    """

    help: str | None = None
    metavar: str | None = None
    show_default: str | None = None
    option: str | None = None
    complete: Literal["file", "policy"] | None = None
    claim: bool = True
    secret: bool = False
    pins: bool = False
    variable: bool = True


def setting(default: Any, text: str | None = None, **more: Any) -> Any:
    """Declare a setting, which is claimed; see `local`."""
    said = Setting(help=text, **more)
    return field(default=default, repr=not said.secret, metadata={"setting": said})


# Of this machine: where things are, or how long to wait; not claimed.
local = partial(setting, claim=False)
# Of a file, which may be left out; the second one is of this machine, and not claimed.
file_setting = partial(setting, None, metavar="FILE")
local_file = partial(file_setting, claim=False)


def again(of: type[Settings], name: str, **changed: Any) -> Any:
    """Declare a setting of another model once more, with other facts."""
    known = next(one for one in fields(of) if one.name == name)
    return field(default=known.default, metadata={"setting": replace(said_of(known), **changed)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one command.

    `read_files`: settings files with their content; `of_files`: the names that they set.
    """

    # Of pydantic, which checks what `tsqp.LLM` is given: no setting may be nan or infinite.
    __pydantic_config__ = {"allow_inf_nan": False}  # noqa: RUF012 - no field

    read_files: tuple[tuple[Path, bytes], ...] = field(default=(), compare=False, repr=False)
    of_files: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


def said_of(one: Field[Any]) -> Setting:
    """Return what is known of a field."""
    found: Setting = one.metadata["setting"]
    return found


def option_of(name: str) -> str:
    """Return the option of a setting, as errors name it."""
    return f"--{name.replace('_', '-')}"


def settings_of(model: type[Settings]) -> dict[str, tuple[Field[Any], Any]]:
    """Return fields and types by name, a model's own before those of the models that it extends."""
    types, known = get_type_hints(model, include_extras=True), {f.name: f for f in fields(model)}
    own = [name for one in model.__mro__ for name in vars(one).get("__annotations__", ())]
    names = [name for name in dict.fromkeys(own) if "setting" in known[name].metadata]
    return {name: (known[name], types[name]) for name in names}


def plain_type(annotation: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Split an annotation: the type of one value, what limits it, and whether there are several."""
    origin = get_origin(annotation)
    parts = [one for one in get_args(annotation) if one not in (type(None), ...)]
    if origin is Annotated:
        return parts[0], tuple(parts[1:]), False
    if origin is tuple or type(None) in get_args(annotation):
        one, limits, several = plain_type(parts[0])
        return one, limits, several or origin is tuple
    return annotation, (), False


def model_directory(name: str) -> Path:
    """Return the directory of MODEL: the demo model that ships with us, or a path."""
    if name == DEMO:
        return Path(__file__).resolve().parent.parent / "demo_model"
    return Path(name).expanduser()


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    """What both programs are told of model and computing."""

    model: str = local(MISSING)
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "Default: the model's own."
    )
    kernels: Kernels = setting(
        "auto",
        "Instructions that the CPU computes with: the best that give right results, torch's, or"
        " these.",
    )
    threads: Threads | None = local(
        None, "CPU threads; default: one a core, less one that reads --bank where there are four."
    )
    max_message_mib: Annotated[int, Interval(ge=1, le=4096)] = local(
        512, "Larger messages are refused."
    )
    spin_us: Microseconds = local(
        0.0,
        "Look for a message so long before sleeping, where the last one came as soon: faster, and"
        " keeps a core busy.",
    )
    # The default is `protocol.liveness.DEFAULT_HEARTBEAT_TIMEOUT_S`, which takes long to import.
    heartbeat_timeout_s: Annotated[float, Interval(ge=0, le=3600)] = local(
        1.0,
        "End a tcp:// or ipc:// connection on which nothing has come for so long, though we ask"
        " four times in that time; longer than the largest tensor takes on the link. 0 is off.",
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(ComputeSettings):
    """What every run of the TEE side is told; `tsqp.LLM` takes these."""

    gpu: tuple[str, ...] = local(
        (DEFAULT_ENDPOINT,),
        "A gpu-service, of some layers (0-7, 8-) or all of them. Repeatable: those of the same"
        " layers stand in for each other.",
        metavar="ENDPOINT[=LAYERS]",
    )
    dealer: tuple[str, ...] = local(
        (),
        "A gpu-service of another owner, which multiplies pads for a policy that has them dealt"
        " (dealt). Repeatable: pads of several add up, and one that does not collude suffices.",
        metavar="ENDPOINT[=LAYERS]",
    )
    identity: Path | None = local_file(
        "Our secret key (tsqp keys new): services know us by it.", secret=True
    )
    service_key: tuple[str, ...] = local(
        (),
        "Public key of the service (40 characters, or its file): no other one is talked to. Once"
        " for all, or once for each --gpu, then each --dealer, in order.",
        metavar="KEY|FILE",
        complete="file",
    )
    http_token: tuple[Path, ...] = local(
        (),
        "Bearer token by which a service with a URL knows us, one line (mode 0600). Once for each"
        " URL of --gpu, then of --dealer, in order, or once for all where they have one host and"
        " port.",
        metavar="FILE",
        secret=True,
    )
    http_ca: Path | None = local_file(
        "CAs (PEM) by which https:// services are known; default: the system's."
    )
    connect_timeout_s: Seconds = local(10.0, "Wait so long for services at the start.")
    request_timeout_s: Seconds = local(60.0, "Wait so long for a result, or a lost service.")
    link_gbps: Annotated[float, Interval(gt=0, le=1e6)] | None = setting(
        None, "Take as long as a link of this bandwidth would (10^9 bit/s each way)."
    )
    link_rtt_us: Annotated[float, Interval(ge=0, le=1e7)] = setting(
        0.0, "Take as long as a link with this round-trip time would."
    )
    dealer_in_the_clear: bool = setting(
        False,
        "Let a policy whose pads are dealt use links of this machine without keys. An observer of"
        " all links, such as root on this machine, then reads prompt and answer.",
    )
    policy: str = local(
        DEFAULT_POLICY,
        "What leaves the TEE, and masked how; tsqp policies lists them.",
        metavar="NAME|FILE",
        complete="policy",
    )
    service_appraisal: Path | None = file_setting(
        "What services must be whose policy has them prove it: an appraisal policy, in TOML."
    )
    manifest: Path | None = local_file(
        "What MODEL must hold, byte for byte, as tsqp manifest wrote it.", pins=True
    )
    manifest_digest: str | None = local(
        None,
        "SHA-256 of the manifest: needed where it lies on a disk that is not trusted.",
        metavar="HEX",
        pins=True,
    )
    seal_key: Path | None = local_file(
        "MODEL is sealed (tsqp seal): the key that opens it.", secret=True, pins=True
    )
    seal_key_fd: AtLeast0 | None = local(
        None, "An open file, such as a pipe, that has this key.", pins=True
    )
    seal_key_command: str | None = local(
        None,
        "A command, run without a shell, whose stdout is this key: of a key service's tool.",
        metavar="COMMAND",
        secret=True,
        pins=True,
    )
    seal_digest: str | None = local(
        None,
        "SHA-256 that tsqp seal printed: no older seal, and no other model's, is taken.",
        metavar="HEX",
        pins=True,
    )
    key: Path | None = file_setting("Key of a feature mask, of tsqp provision.", secret=True)
    bank: Path | None = file_setting(
        "Pads made ahead by tee-runner pads make; default: made in memory, on the way."
    )
    bank_key: Path | None = file_setting(
        "Key of the bank, for the TEE alone, on another file system than the bank's, best one in"
        " memory; default: the bank's name and .key.",
        secret=True,
    )
    bank_index: Path | None = file_setting(
        "What of the bank is used up, where the host cannot restore an old copy, as the key;"
        " default: the bank's name and .index."
    )
    bank_witness: Path | None = file_setting(
        "Copy of the index, by which an index that was put back is noticed; default: in memory"
        " (within /dev/shm)."
    )
    bank_key_beside_bank: bool = setting(
        False,
        "Allow key and index on the bank's own file system: a copy of it, with recorded traffic,"
        " then gives every row away.",
    )
    when_out: Literal["wait", "tee", "fail"] = setting(
        "wait", "With no pads left: make more, compute in the TEE, or give up."
    )
    step_tokens: Count = setting(512, "Tokens in one step: longer prompts are prefilled in chunks.")
    micro_batches: Annotated[int, Interval(ge=1, le=64)] = setting(
        1,
        "Cut a step into so many parts that overlap: the TEE works on one while the services work"
        " on others.",
    )
    template_date: str | None = setting(
        None,
        "The date that a chat template is told, so that prompts repeat; default: the clock's.",
        metavar="YYYY-MM-DD",
    )
    control_tokens_in_content: bool = setting(
        False, "Encode control tokens that a message names as such. Unsafe: it can forge a turn."
    )
    max_kv_mib: Count | None = local(
        None, "Memory for keys and values of all sequences; default: 80 % of what is available."
    )


@dataclass(frozen=True, kw_only=True)
class TextSettings(RunSettings):
    """What `tee-runner generate` and `chat` are told beside: how to sample, and what to show."""

    max_new_tokens: Count = setting(256)
    temperature: Annotated[float, Interval(ge=0, le=100)] = setting(0.0, "0 is greedy.")
    top_k: AtLeast0 = setting(0, "0 is off.")
    top_p: Annotated[float, Interval(gt=0, le=1)] = setting(1.0)
    min_p: Annotated[float, Interval(ge=0, le=1)] = setting(0.0)
    repetition_penalty: Annotated[float, Interval(ge=0.01, le=100)] = setting(1.0)
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] | None = setting(
        None, "Default: a fresh one."
    )
    stop: tuple[Text, ...] = setting(
        (),
        "Stop string; repeatable, and one a line in the environment. Text is then decoded between"
        " tokens (docs/limitations.md).",
        metavar="TEXT",
    )
    stats: bool = setting(True, "Show tokens, times and traffic on stderr.")
    as_json: bool = setting(False, "One JSON object on stdout.", option="json")
