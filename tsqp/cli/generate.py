"""`tee-runner generate`: text from one prompt."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from protocol.errors import TsqpError
from tsqp.cli.config import CONTEXT, config_option, takes
from tsqp.cli.terminal import chosen_prompt, describe_error, stream
from tsqp.run.load import load, open_runner, policy_digest, sampling_of
from tsqp.run.settings import TextSettings

if TYPE_CHECKING:
    import torch

    from tee_side.engine.generation import Generation
    from tsqp.operator_table import OperatorTable


class PrivateFile(click.File):
    """A file to write that its owner alone can read: mode 0600, also where it was there before."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> BinaryIO:
        """Open it for appending, so that a run that is refused leaves an old file as it was."""
        try:
            file = open(value, "ab", opener=partial(os.open, mode=0o600))  # noqa: SIM115
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.fail(f"{value}: got {reason}, expected a file to write", param, ctx)
        if ctx is not None:
            ctx.call_on_close(partial(_close, file))
        return file


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # what could not be written was said by `_write`
        file.close()


@click.command(context_settings=CONTEXT)
@click.option("--prompt", metavar="TEXT")
@click.option(
    "--prompt-file",
    metavar="FILE",
    help="UTF-8; - reads standard input. A final newline and a byte-order mark are dropped.",
)
@click.option("--prompt-token-ids", metavar="1,2,3")
@click.option(
    "--report",
    type=PrivateFile(),
    metavar="FILE",
    help="Write the JSON object, with totals per operator, to this file.",
)
@click.option(
    "--save-logits",
    type=PrivateFile(),
    metavar="FILE",
    help="Write the logits of every new token to this safetensors file, to compare them.",
)
@takes(TextSettings)
@config_option
@click.pass_context
def generate(
    context: click.Context,
    /,
    *,
    settings: TextSettings,
    prompt: str | None,
    prompt_file: str | None,
    prompt_token_ids: str | None,
    report: BinaryIO | None,
    save_logits: BinaryIO | None,
) -> None:
    """Generate text from a prompt.

    MODEL is a Hugging Face directory, or "demo". Prompt and answer are on this machine only: what
    the GPU side can see of them is the policy's, and the first line on stderr says it.
    """
    given = chosen_prompt(
        context, prompt=prompt, prompt_file=prompt_file, prompt_token_ids=prompt_token_ids
    )
    table: OperatorTable | None = None
    if report:
        from tsqp.operator_table import OperatorTable

        table = OperatorTable()
    logits: list[torch.Tensor] = []
    generation: Generation | None = None
    described: dict[str, object] = {}
    try:
        sampling = sampling_of(settings)
        # Token ids are enough for a model without a tokenizer; what comes out are token ids, too.
        loaded = load(settings, text_needed=isinstance(given, str))
        if isinstance(given, str):
            given = [] if loaded.tokenizer is None else loaded.tokenizer.encode(given)
        with open_runner(settings, loaded, table) as runner:
            generation = runner.generate(
                given,
                max_new_tokens=settings.max_new_tokens,
                sampling=sampling,
                stop=settings.stop,
                with_text=loaded.tokenizer is not None,
            )
            result = stream(runner, generation, settings, logits if save_logits else None)
            # The digest of the model reads the configuration and every light weight.
            if settings.as_json or report:
                from protocol import native

                # With what it was made with, so that it can be made again.
                described = result.model_dump() | {
                    "model": settings.model,
                    "model_digest": runner.digests[0],
                    "policy_digest": policy_digest(runner.policy).hex(),
                    "kernels": native.choice().variant,
                    "cores": runner.cores._asdict(),
                    "seed": sampling.seed,
                }
    except TsqpError as error:
        if settings.as_json:  # an object too, with the tokens so far
            token_ids, text = (generation.token_ids, generation.text) if generation else ([], "")
            click.echo(
                json.dumps(
                    {"error": describe_error(error), "token_ids": token_ids, "text": text or ""}
                )
            )
        raise
    if settings.as_json:
        click.echo(json.dumps(described))
    if report and table:
        operators = {name: totals.described() for name, totals in table.totals.items()}
        _write(report, json.dumps(described | {"operators": operators}, indent=1).encode())
    if save_logits:
        import torch
        from safetensors.torch import save

        _write(save_logits, save({"logits": torch.stack(logits).to(torch.float32)}))


def _write(file: BinaryIO, content: bytes) -> None:
    """Write and flush, because click drops errors of closing. Raises OSError with the name."""
    try:
        with suppress(OSError):  # a device has no length
            file.truncate(0)
        file.write(content)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None
