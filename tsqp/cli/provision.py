"""`tsqp provision`: make the weights that a server may hold, and the key that stays in the TEE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import SettingsError, describe
from tsqp.cli.program import model_directory
from tsqp.cli.settings import CONTEXT, config_option, model_argument
from tsqp.cli.status import bytes_for_people

if TYPE_CHECKING:
    from tee_side.protect.masks.mask import Mask


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
    from tee_side.protect.masks.registry import find_mask
    from tsqp.lab.research.provisioning import provision as run

    chosen = _with_options(find_mask(mask), options)
    # Silent where stderr is no terminal, but for its label.
    with click.progressbar(length=1, label=f"provision {model}", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        made = run(model_directory(model), chosen, server_dir, key, progress)
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

    from protocol.validation import first_fault

    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise SettingsError("--option", got=describe(option), expected="KEY=VALUE")
        if name in values:
            raise SettingsError(f"--option {name}", got="it twice", expected="it once")
        values[name] = value
    try:
        return mask(**values)
    except ValidationError as error:
        fault = first_fault(error)
        field = fault.field or "--option"
        if fault.kind == "extra_forbidden":
            known = ", ".join(mask.model_fields) or "none: the mask has no options"
            raise SettingsError(
                f"--option {field}", got=f"no option of mask {mask.name}", expected=known
            ) from None
        raise SettingsError(
            f"--option {field} of mask {mask.name}",
            got=fault.got,
            expected=fault.expected,
        ) from None
