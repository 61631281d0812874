"""The masks and policies that there are, as their own files describe them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from protocol.errors import InputError, MaskError
from protocol.messages import Arithmetic
from tee_side.plugins import installed
from tee_side.policy.leakage_summary import SEEN
from tee_side.policy.placement import (
    Policy,
    PolicyArithmetic,
    builtin_policies,
    load_policy,
    policy_names,
)
from tee_side.protect.masks.mask import Kind, Mask, ProvisionedMask
from tee_side.protect.masks.registry import BUILTIN, all_masks, find_mask
from tee_side.words import Operator, Phase, Verify

Origin = Literal["built in", "research", "package", "file"]

# How far a policy is from giving the prompt away; the words are the tables' and the reports'.
Standing = Literal["nothing leaves", "clear", "broken", "not known to be broken"]

_RESEARCH = "tsqp.lab.research."

E = TypeVar("E")


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MaskOption(_Described):
    """A field of a mask: `values` says in words what it may be."""

    name: str
    values: str
    required: bool
    default: Any


class MaskEntry(_Described):
    """What a mask's class says of itself. `about`: its docstring."""

    name: str
    kind: Kind
    hides: str
    known_break: str
    broken: bool
    uniform: bool
    source: str
    tolerance: float
    cost: str
    arithmetic: Arithmetic
    services: int
    provisioned: bool
    operators: tuple[Operator, ...]
    options: tuple[MaskOption, ...]
    about: str
    origin: Origin


class Unusable(_Described):
    """A mask or policy of an installed package that does not load. `error`: why, in one line."""

    name: str
    error: str


class Leaving(_Described):
    """An operator that leaves the TEE, in one of its placements."""

    operator: Operator
    layers: str | None
    phase: Phase | None
    mask: str | None
    verify: Verify
    sees: str


class PolicyEntry(_Described):
    """What a policy sends away. `standing`: by the weakest of its placements."""

    name: str
    summary: str
    arithmetic: PolicyArithmetic
    services: int
    masks: tuple[str, ...]
    leaves: tuple[Leaving, ...]
    standing: Standing
    leakage_summary: str | None
    origin: Origin


def mask_entry(mask: type[Mask], origin: Origin = "built in") -> MaskEntry:
    """Read a mask's class."""
    return MaskEntry(
        name=mask.name,
        kind=mask.kind,
        hides=mask.hides,
        known_break=mask.known_break,
        broken=mask.broken,
        uniform=mask.uniform,
        source=mask.source,
        tolerance=mask.tolerance,
        cost=mask.cost,
        arithmetic=mask.arithmetic,
        services=mask.services,
        provisioned=issubclass(mask, ProvisionedMask),
        operators=tuple(operator for operator in get_args(Operator) if mask.supports(operator)),
        options=_options_of(mask),
        about=inspect.cleandoc(mask.__doc__ or ""),
        origin=origin,
    )


def mask_entries() -> tuple[list[MaskEntry], list[Unusable]]:
    """Return all masks that have a name, built in and of packages, and those that do not load."""
    return _loaded(all_masks().names(), find_mask_entry)


def _loaded(names: Iterable[str], load: Callable[[str], E]) -> tuple[list[E], list[Unusable]]:
    """Load what has a name; a package that is broken must not hide the others."""
    found, unusable = [], []
    for name in names:
        try:
            found.append(load(name))
        except (InputError, MaskError) as error:
            unusable.append(Unusable(name=name, error=str(error)))
    return found, unusable


def find_mask_entry(name_or_path: str) -> MaskEntry:
    """Return a mask by name, or that of a Python file. Raises MaskError and PluginError."""
    mask = find_mask(name_or_path)
    file = "/" in name_or_path or ".py" in name_or_path
    return mask_entry(mask, "file" if file else _origin(mask))


def _origin(mask: type[Mask]) -> Origin:
    if BUILTIN.get(mask.name) is mask:
        return "built in"
    return "research" if mask.__module__.startswith(_RESEARCH) else "package"


def our_masks() -> dict[str, type[Mask]]:
    """Return the masks that ship with us by name: built in, and the research baselines."""
    found = installed(all_masks().group)
    research = [entry.name for entry in found if entry.module.startswith(_RESEARCH)]
    return {name: find_mask(name) for name in sorted({*BUILTIN, *research})}


def policy_entry(policy: Policy, origin: Origin = "built in") -> PolicyEntry:
    """Read a policy."""
    leaves = tuple(
        Leaving(
            operator=operator,
            layers=str(placement.layers) if placement.layers else None,
            phase=placement.phase,
            mask=placement.mask.name if placement.mask else None,
            verify=placement.verify,
            sees=SEEN[operator],
        )
        for operator, placement in policy.leaving()
    )
    return PolicyEntry(
        name=policy.name,
        summary=policy.summary,
        arithmetic=policy.arithmetic,
        services=policy.services,
        masks=tuple(dict.fromkeys(mask.name for mask in policy.masks)),
        leaves=leaves,
        standing=_standing(policy),
        leakage_summary=policy.leakage_summary(),
        origin=origin,
    )


def policy_entries() -> tuple[list[PolicyEntry], list[Unusable]]:
    """Return all policies that can be named, as `mask_entries` does."""
    built_in = builtin_policies()
    return _loaded(
        policy_names(),
        lambda name: policy_entry(load_policy(name), "built in" if name in built_in else "package"),
    )


def _standing(policy: Policy) -> Standing:
    masks = [placement.mask for _, placement in policy.leaving()]
    if not masks:
        return "nothing leaves"
    if None in masks:
        return "clear"
    if any(mask.broken for mask in policy.masks):
        return "broken"
    return "not known to be broken"


def _options_of(mask: type[Mask]) -> tuple[MaskOption, ...]:
    """Read a mask's fields; their bounds are what pydantic checks."""
    described = mask.model_json_schema().get("properties", {})
    return tuple(
        MaskOption(
            name=name,
            values=_values(described[name]),
            required=field.is_required(),
            default=None if field.is_required() else field.get_default(),
        )
        for name, field in mask.model_fields.items()
    )


def _values(schema: dict[str, Any]) -> str:
    """Say in words what a JSON schema allows: `integer, at least 1 and at most 1024`."""
    if "anyOf" in schema:
        return " or ".join(sorted(map(_values, schema["anyOf"]), key=lambda text: text != "none"))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = {"null": "none"}.get(schema.get("type", ""), schema.get("type", "any"))
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{word} {_number(schema[key])}" for key, word in words.items() if key in schema]
    return f"{kind}, {' and '.join(bounds)}" if bounds else str(kind)


def needs_of(entry: MaskEntry) -> list[str]:
    """Say what a mask needs beside a service."""
    needs = ['`arithmetic = "int8"` in the policy'] if entry.arithmetic == "int8" else []
    needs += ["a key and weights from `tsqp provision`"] if entry.provisioned else []
    needs += [f"{entry.services} services"] if entry.services > 1 else []
    if entry.kind == "additive" and entry.services == 1:
        needs += ["factors made in advance"]
    return needs


def default_text(option: MaskOption) -> str:
    """Render an option's default; "none" is what a policy file leaves out."""
    if option.default is None:
        return "required" if option.required else "none"
    return _number(option.default)


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
