"""What conversations of a run are read by; a run without any does not import it."""

from datetime import datetime

from protocol.errors import SettingsError, shown
from tee_side.chat.template import ChatTemplate
from tee_side.engine.tokenizer import Tokenizer
from tsqp.run.settings import RunSettings


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
