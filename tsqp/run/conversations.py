"""What a model's files say of conversations and sampling; a run without either imports none."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import SettingsError, shown
from protocol.model.files import find_file, read_json
from protocol.validation import validate_known
from tee_side.chat.template import ChatTemplate
from tee_side.engine.request import SamplingSettings
from tee_side.engine.tokenizer import Tokenizer
from tsqp.run.settings import RunSettings

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def chat_template(settings: RunSettings, tokenizer: Tokenizer) -> ChatTemplate:
    """Return what conversations of a run are read by. Raises ModelError, SettingsError."""
    said, date = settings.template_date, None
    if said is not None:
        with SettingsError.instead_of(
            ValueError, "--template-date", shown(said), "a date, as 2026-01-31"
        ):
            date = datetime.fromisoformat(said)
    trusted = settings.control_tokens_in_content
    return ChatTemplate(tokenizer, date, control_tokens_in_content=trusted)


def default_sampling(directory: Path, manifest: Manifest | None) -> dict[str, float]:
    """Return how a model wants to be sampled, by the names of SamplingSettings.

    Nothing where it wants the likeliest tokens. Raises ModelError, ManifestError.
    """
    if (path := find_file(directory, _FILE, manifest)) is None:
        return {}
    said = read_json(path, manifest)
    given = {name: said[name] for name in _SAMPLING if said.get(name) is not None}
    read = validate_known(SamplingSettings, given, str(path))
    return {} if said.get("do_sample") is False else read.model_dump(include=set(given))
