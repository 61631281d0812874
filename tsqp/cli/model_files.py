"""What is done with a model directory: accuracy, manifest, transformed weights, a seal."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import SettingsError, describe
from tsqp.cli.config import CONTEXT, PATH, config_option, model_argument, takes
from tsqp.cli.terminal import read_text
from tsqp.run.process import EXIT_FAILURE, bytes_for_people
from tsqp.run.settings import DEMO, RunSettings, model_directory

if TYPE_CHECKING:
    from protocol.messages import FloatDtype
    from tee_side.protect.masks.mask import Mask


_PLACE = click.Path(path_type=Path)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; it is told how much is done, of how much. Only its label without a terminal."""
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


def _require_place(path: Path, *, force: bool) -> None:
    """Refuse a file that is there, but by force, and one in no directory. Raises SettingsError."""
    SettingsError.unless(
        force or not path.exists(),
        str(path),
        "a file that exists",
        "none, or --force to overwrite it",
    )
    SettingsError.unless(path.parent.is_dir(), str(path), "no such directory", "one to write into")


@click.command(context_settings=CONTEXT)
@model_argument()
@click.option(
    "--text",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="UTF-8 text of the kind that the model will see; default: one of many kinds of ours.",
)
@click.option(
    "--token-ids",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Token ids instead of a text, for a model without tokenizer.json: numbers between spaces"
    " and line breaks, or a JSON list of lists, each a sequence of its own.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2, 65_536),
    default=2048,
    help="How many of it to run; memory grows with them.",
)
@config_option
@click.pass_context
def accuracy(
    context: click.Context,
    /,
    *,
    model: str,
    text: Path | None,
    token_ids: Path | None,
    tokens: int,
) -> None:
    """Say how good MODEL is in integers, which `shielded` and other policies compute in.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". Runs a text through it
    here, once in float32 and once in integers, and compares the next tokens. Exits with 1 where
    the model is poor. The policies that keep a prompt secret from a service all compute in
    integers; `tee-only` computes in floats, without a service.
    """
    from tsqp.accuracy import MAX_KL_NATS, MAX_PERPLEXITY_RATIO, measure, parse_ids, site_name

    SettingsError.unless(
        text is None or token_ids is None, "--token-ids", "--text, too", "one of them"
    )
    content = None if text is None else read_text(text, "--text")
    chunks = (
        None
        if token_ids is None
        else parse_ids(read_text(token_ids, "--token-ids"), f"--token-ids {token_ids}")
    )
    with _progress("measuring") as progress:
        found = measure(model_directory(model), content, tokens, progress, chunks=chunks)
    score = found.score
    click.echo(f"{model} in integers beside float32, over {score.tokens} next tokens:")
    click.echo(f"perplexity: {score.perplexity_ratio:.4f} times")
    click.echo(f"the same likeliest token: {score.agreement:.1%}")
    click.echo(f"mean KL divergence: {score.kl_nats:.2g} nats")
    click.echo(f"largest error of a product: {found.error:.2%}, at {site_name(found.worst)}")
    bounds = f"{MAX_PERPLEXITY_RATIO} times, {MAX_KL_NATS} nats"
    click.echo(f"{'good' if found.is_good else 'poor'} (good: at most {bounds})")
    if not found.is_good:
        context.exit(EXIT_FAILURE)


@click.command("import", context_settings=CONTEXT)
@click.argument("source", type=_PLACE)
@click.argument("directory", type=_PLACE)
@click.option(
    "--base",
    type=_PLACE,
    metavar="DIRECTORY",
    help="The model that an adapter was made for.",
)
@click.option(
    "--weights-dtype",
    "dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    allow_from_autoenv=False,
    help="What to write; default: SOURCE's, bfloat16 where it is quantised.",
)
@config_option
def import_(*, source: Path, directory: Path, base: Path | None, dtype: FloatDtype | None) -> None:
    """Make a plain model DIRECTORY of SOURCE, as it was published, where you trust the disk.

    SOURCE is a GGUF file, a directory with quantised weights (fp8, compressed-tensors, AWQ, GPTQ)
    or an adapter (LoRA) for --base, whose tokenizer counts where it has one. Weights become floats
    again, a block at a time, beside DIRECTORY in .DIRECTORY.import until all are there; the same
    command goes on with what an interrupted one left. DIRECTORY/import.json says what was read and
    written. tsqp manifest pins the result.
    """
    from tsqp.importing.plain import as_its_library_writes_it, import_model, open_source

    source, directory = source.expanduser(), directory.expanduser()
    with as_its_library_writes_it(source), _progress(f"import {source.name}") as show:
        opened = open_source(source, None if base is None else base.expanduser())
        record = import_model(opened, directory, dtype, show)
    shards = f"{record['settings']['dtype']} weights, shards: {len(record['files'])}"
    click.echo(f"{directory}: {shards}")


@click.command(context_settings=CONTEXT)
@click.argument("name", metavar="ORG/NAME[@REVISION]")
@click.argument("directory", type=_PLACE)
@config_option
def pull(*, name: str, directory: Path) -> None:
    """Get a model from a hub into DIRECTORY, with a manifest, where you trust the disk.

    Only settings, tokenizer and safetensors: no code, no pickles. HF_ENDPOINT names another hub
    than huggingface.co, HF_TOKEN is for models that need one. Until all is there, the files are
    beside DIRECTORY, in .DIRECTORY.pull. Run tsqp import next where weights are quantised.
    """
    from tsqp.importing.pull import pull as run
    from tsqp.importing.sources import settings_of
    from tsqp.model_at_rest import MANIFEST_FILE, make_manifest

    directory = directory.expanduser()
    with _progress(f"pull {name}") as show:
        commit = run(name, directory, show)
    click.echo(f"{directory}: commit {commit}")
    if settings_of(directory)[1]:
        click.echo(f"its weights are quantised: run tsqp import {directory} ANOTHER")
        return
    with _progress("reading") as show:
        content = make_manifest(directory, show).to_bytes()
    (directory / MANIFEST_FILE).write_bytes(content)
    click.echo(f"SHA-256 of {MANIFEST_FILE}: {hashlib.sha256(content).hexdigest()}")


@click.command(context_settings=CONTEXT)
@model_argument()
@click.option(
    "--output",
    "-o",
    type=PATH,
    metavar="FILE",
    help='Default: manifest.json inside MODEL. Needed for "demo", which is part of this program.',
)
@click.option(
    "--also",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Pin this file, too, by its name: a policy, settings, the public key of a service, a mask."
    " Repeatable.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@config_option
def manifest(*, model: str, output: Path | None, also: tuple[Path, ...], force: bool) -> None:
    """Write the digests of everything in MODEL that the TEE reads, where you trust the disk.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". tee-runner --manifest
    then refuses a directory that differs in a byte, and every policy, settings file, service key
    and mask of yours that --also did not name. A host that can write to the disk can change a
    manifest on it: keep the printed digest where it cannot, and give it to tee-runner
    --manifest-digest.
    """
    from protocol.model.config import read_config
    from tsqp.model_at_rest import MANIFEST_FILE, make_manifest

    directory = model_directory(model)
    SettingsError.unless(
        output is not None or model != DEMO,
        "--output",
        "none",
        "a file: the demo model's directory is the program's",
    )
    read_config(directory)
    path = directory / MANIFEST_FILE if output is None else output
    _require_place(path, force=force)
    with _progress("reading") as show:
        made = make_manifest(directory, show, also)
    content = made.to_bytes()
    path.write_bytes(content)
    beside = f", also {', '.join(made.also)}" if made.also else ""
    click.echo(f"{path}: {len(made.files)} files, {len(made.tensors)} tensors{beside}")
    click.echo(f"SHA-256 of it: {hashlib.sha256(content).hexdigest()}")


def _complete_mask(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    from tsqp.catalogue import our_masks

    found = our_masks().items()
    kinds = ("feature", "segment")
    return [name for name, mask in found if mask.kind in kinds and name.startswith(incomplete)]


@click.command(context_settings=CONTEXT)
@model_argument()
@click.option(
    "--mask",
    required=True,
    metavar="NAME|FILE",
    shell_complete=_complete_mask,
    help="A feature mask: feature-permutation, feature-rotation; a segment mask: stip-segment,"
    " cloak-segment; or a Python file.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    allow_from_autoenv=False,
    metavar="KEY=VALUE",
    help="An option of the mask, as the policy will have it; repeatable.",
)
@click.option(
    "--server-dir",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="New directory with the weights for gpu-service.",
)
@click.option(
    "--key",
    allow_from_autoenv=False,  # elsewhere it is a key to read
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="New file for the key, which tee-runner needs (--key) and must stay secret.",
)
@config_option
def provision(
    *, model: str, mask: str, options: tuple[str, ...], server_dir: Path, key: Path
) -> None:
    """Transform the weights of MODEL for a server that must not see plain activations.

    MODEL is a Hugging Face directory, or "demo". Run it where the weights and the key may be seen:
    in the TEE, or on a machine of your own. These masks are weak; the last line says how weak.
    """
    from tee_side.protect.masks.mask import find_mask
    from tsqp.lab.research.provisioning import provision as run

    chosen = _with_options(find_mask(mask), options)
    with _progress(f"provision {model}") as show:
        made = run(model_directory(model), chosen, server_dir, key, show)
    size = bytes_for_people(made.weight_bytes)
    click.echo(
        f"{server_dir}: {made.config.num_hidden_layers} layers, {size}: copy it to the GPU host,"
        " and nothing else"
    )
    click.echo(f"{key}: stays in the TEE, with a copy in a safe place: no other key fits")
    if made.holds != "linears":
        rest = ", norms and LM head" if made.holds == "layers" else ""
        click.echo(
            f"the client keeps of {model}: config.json, the tokenizer, embedding{rest}; the server"
            " must get neither these nor the key"
        )
    if made.noise is not None:
        click.echo(f"noise: {made.noise}")
    click.echo(f"{chosen.name} is known not to hide: {chosen.known_break}")


def _with_options(mask: type[Mask], options: tuple[str, ...]) -> Mask:
    """Make a mask from `key=value` texts. Raises SettingsError."""
    from pydantic import ValidationError

    from protocol.validation import first_problem

    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        SettingsError.unless(equals, "--option", describe(option), "KEY=VALUE")
        SettingsError.unless(name not in values, f"--option {name}", "it twice", "it once")
        values[name] = value
    try:
        return mask(**values)
    except ValidationError as error:
        problem = first_problem(error)
        field = problem.field or "--option"
        if problem.kind == "extra_forbidden":
            known = ", ".join(mask.model_fields) or "none: the mask has no options"
            raise SettingsError(
                f"--option {field}", got=f"no option of mask {mask.name}", expected=known
            ) from None
        raise SettingsError(
            f"--option {field} of mask {mask.name}",
            got=problem.got,
            expected=problem.expected,
        ) from None


_to = click.option(
    "--to",
    type=PATH,
    required=True,
    allow_from_autoenv=False,  # the recipient is named each time
    metavar="KEYFILE",
    help="Key that opens it from now on, of tsqp seal new-key.",
)


class _ModelFirst(click.Group):
    """A group in which `model` may be left out: `tsqp seal MODEL` is `tsqp seal model MODEL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name the command where the first argument is an option of its own."""
        first = args[0].partition("=")[0] if args else ""
        if first.startswith("-") and first not in {"-h", "--help", "--config"}:
            args = ["model", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, `model` where the first argument names none."""
        named = args[0] in self.commands
        return super().resolve_command(ctx, args if named else ["model", *args])


@click.group(cls=_ModelFirst, context_settings=CONTEXT)
@config_option
def seal() -> None:
    """Encrypt a model directory, so that its disk learns no more than names and sizes of files.

    tsqp seal MODEL --to KEYFILE -o DIR; "model" may be left out.
    """


@seal.command("model", context_settings=CONTEXT)
@model_argument()
@_to
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    allow_from_autoenv=False,
    metavar="DIR",
    help="New directory, with the same names of files, for tee-runner --seal-key.",
)
@config_option
def seal_model(*, model: str, to: Path, output: Path) -> None:
    """Encrypt the files of MODEL into the directory DIR.

    MODEL is a Hugging Face directory, or "demo". Run it where model and key may be seen. A host
    that can write to the disk can put an older seal back: keep the printed digest
    where it cannot, and give it to tee-runner --seal-digest.
    """
    from tsqp.key_files import SEAL_KEY
    from tsqp.model_at_rest import seal_model as run

    key = SEAL_KEY.read(to)
    with _progress(f"seal {model}") as show:
        files, plain_bytes, skipped, digest = run(model_directory(model), key, output, show)
    if skipped:
        click.echo(f"left out, as they are no files: {', '.join(skipped)}", err=True)
    click.echo(f"{output}: {files} files, {bytes_for_people(plain_bytes)}, sealed")
    click.echo(f"SHA-256 of the seal: {digest}")


@seal.command("new-key", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@config_option
def new_seal_key(file: Path) -> None:
    """Make a key: FILE, which must stay secret, in the TEE and where models are sealed."""
    from protocol.model.at_rest import key_id
    from tsqp.key_files import SEAL_KEY

    key = SEAL_KEY.new(file)
    click.echo(
        f"{file}: key {key_id(key)}; without it no model that is sealed to it can be read: keep a"
        " copy in a safe place"
    )


@seal.command(context_settings=CONTEXT)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@takes(RunSettings, "seal_key", "seal_key_fd", "seal_key_command")
@_to
@config_option
def rewrap(*, settings: RunSettings, directory: Path, to: Path) -> None:
    """Have the sealed DIRECTORY opened by another key: only sealed.tsqp is written again.

    The digest stays. A party that kept the old sealed.tsqp and the old key can still open it: where
    that matters, seal the model again.
    """
    from tsqp.key_files import SEAL_KEY, provided_key
    from tsqp.model_at_rest import rewrap as run

    digest = run(
        directory,
        provided_key(settings.seal_key, settings.seal_key_fd, settings.seal_key_command),
        SEAL_KEY.read(to),
    )
    click.echo(f"{directory}: for the key of {to} from now on")
    click.echo(f"SHA-256 of the seal, as before: {digest}")
