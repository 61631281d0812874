"""Placement policies: which operator runs where, as data.

A policy is a small TOML file (the built-in ones are in `tee_side/policies`):

    name = "attention-in-tee"
    summary = "..."
    one_rpc_per_module = false
    [operators]
    embedding = "tee"
    qkv_proj = "gpu"
    ...

Every operator must be placed: nothing is sent away, or kept, because a line was forgotten.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protocol.errors import PolicyError, describe, expectation

Operator = Literal[
    "embedding",
    "qkv_proj",
    "attn_scores",
    "attn_values",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "lm_head",
]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
Place = Literal["tee", "gpu"]

_SUFFIX = ".toml"

# What the GPU side sees of an operator that is sent to it in the clear.
_SEEN: dict[Operator, str] = {
    "embedding": "the token ids",
    "qkv_proj": "hidden states",
    "attn_scores": "queries and keys",
    "attn_values": "attention probabilities and values",
    "o_proj": "attention outputs",
    "gate_up_proj": "hidden states",
    "down_proj": "MLP activations",
    "lm_head": "the logits",
}


class Policy(BaseModel):
    """Where each operator runs. `one_rpc_per_module`: q, k, v, gate and up each travel alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Printed in status lines and reports.
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    summary: Annotated[str, Field(max_length=200)]
    one_rpc_per_module: bool = False
    operators: dict[Operator, Place]

    @field_validator("operators")
    @classmethod
    def _all_placed(cls, operators: dict[Operator, Place]) -> dict[Operator, Place]:
        if missing := [name for name in OPERATORS if name not in operators]:
            raise ValueError(f"every operator placed; missing: {', '.join(missing)}")
        return operators

    def on_gpu(self, operator: Operator) -> bool:
        """Say whether the operator leaves the TEE."""
        return self.operators[operator] == "gpu"

    @property
    def needs_service(self) -> bool:
        """Whether anything leaves the TEE at all."""
        return any(self.on_gpu(operator) for operator in OPERATORS)

    def disclosure(self) -> str | None:
        """Say in one line what the GPU side learns; None if nothing leaves.

        Nothing is masked yet, so hidden states alone already give the prompt away to whoever
        holds the public weights (vocabulary matching, arXiv 2505.18332).
        """
        if not self.needs_service:
            return None
        seen = list(dict.fromkeys(_SEEN[name] for name in OPERATORS if self.on_gpu(name)))
        direct = [what for what in ("the token ids", "the logits") if what in seen]
        verdict = (
            f"{' and '.join(direct)}: the prompt and the answer themselves"
            if direct
            else "from which the prompt and the answer can be recovered"
        )
        return f"policy {self.name}: the GPU sees {', '.join(seen)} in the clear - {verdict}"


def builtin_policies() -> list[str]:
    """Return the names of the policies that ship with us."""
    folder = files("tee_side") / "policies"
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)]
    return sorted(name.removesuffix(_SUFFIX) for name in names)


def load_policy(name_or_path: str) -> Policy:
    """Load a built-in policy by name, or a file by its path (it has a `/` or ends in `.toml`).

    Raises PolicyError that names the policy or the file and field.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIX):
        path = Path(name_or_path)
        try:
            return _parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "text that is not UTF-8"
            raise PolicyError(str(path), got=reason, expected="a policy file") from None
    if name_or_path not in builtin_policies():
        raise PolicyError(
            "policy",
            got=repr(name_or_path),
            expected=f"one of {', '.join(builtin_policies())}, or a path to a .toml file",
        )
    resource = files("tee_side") / "policies" / f"{name_or_path}{_SUFFIX}"
    return _parse(resource.read_text(encoding="utf-8"), name_or_path)


def _parse(text: str, where: str) -> Policy:
    try:
        return Policy.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(where, got=f"invalid TOML ({error})", expected="a policy") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise PolicyError(
            f"{where}: {field}" if field else where,
            got=describe(first["input"]) if first["type"] != "missing" else "nothing",
            expected=expectation(first["type"], first["msg"]),
        ) from None
