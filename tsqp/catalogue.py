"""The masks and policies that there are, as their own files describe them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from pydantic_core import to_jsonable_python

from protocol.errors import InputError, MaskError
from tee_side.plugins import installed
from tee_side.policy.placement import Policy, builtin_policies, load_policy, policy_names
from tee_side.protect.masks.mask import BUILTIN, Mask, ProvisionedMask, all_masks, find_mask
from tee_side.words import Operator, Phase, Verify
from tsqp.leakage_summary import SEEN, leakage_summary

Origin = Literal["built in", "research", "package", "file"]

# How far a policy is from giving the prompt away; the words are the tables' and the reports'.
Standing = Literal["nothing leaves", "clear", "broken", "not known to be broken"]

_RESEARCH = "tsqp.lab.research."

E = TypeVar("E")


class MaskOption(NamedTuple):
    """A field of a mask: `values` says in words what it may be."""

    name: str
    values: str
    required: bool
    default: Any

    @property
    def default_text(self) -> str:
        """Its default; "none" is what a policy file leaves out."""
        if self.default is None:
            return "required" if self.required else "none"
        return _number(self.default)

    def __str__(self) -> str:
        return f"{self.name} = {self.default_text} ({self.values})"


class MaskEntry(NamedTuple):
    """A mask, which says all of itself, and where it comes from."""

    mask: type[Mask]
    origin: Origin = "built in"

    @property
    def standing(self) -> Standing:
        """Whether it is broken, in the words of the tables."""
        return "broken" if self.mask.broken else "not known to be broken"

    @property
    def operators(self) -> list[Operator]:
        """The operators that it can hide."""
        return [operator for operator in get_args(Operator) if self.mask.supports(operator)]

    @property
    def about(self) -> str:
        """The docstring of its class."""
        return inspect.cleandoc(self.mask.__doc__ or "")

    @property
    def options(self) -> list[MaskOption]:
        """Its fields; their bounds are what pydantic checks."""
        described = self.mask.model_json_schema().get("properties", {})
        return [
            MaskOption(
                name=name,
                values=_values(described[name]),
                required=field.is_required(),
                default=None if field.is_required() else field.get_default(),
            )
            for name, field in self.mask.model_fields.items()
        ]

    def described(self) -> dict[str, Any]:
        """Return everything, as JSON has it."""
        mask = self.mask
        return {
            "name": mask.name,
            "kind": mask.kind,
            "hides": mask.hides,
            "known_break": mask.known_break,
            "broken": mask.broken,
            "uniform": mask.uniform,
            "source": mask.source,
            "tolerance": mask.tolerance,
            "cost": mask.cost,
            "arithmetic": mask.arithmetic,
            "provisioned": issubclass(mask, ProvisionedMask),
            "operators": self.operators,
            # Of a stranger's mask a default may be anything.
            "options": to_jsonable_python(
                [option._asdict() for option in self.options], fallback=str
            ),
            "about": self.about,
            "origin": self.origin,
        }

    def row(self) -> tuple[str, str]:
        """Return what a table says: what it is, and its claims, a line each."""
        mask, options = self.mask, "; ".join(map(str, self.options))
        facts = [mask.name, f"{mask.kind} mask", self.standing, f"tolerance {mask.tolerance:g}"]
        facts += [f"({self.origin})"] if self.origin != "built in" else []
        claims = [
            f"hides: {mask.hides}",
            f"known break: {mask.known_break}",
            f"cost: {mask.cost}",
            f"source: {mask.source}",
            *([f"options: {options}"] if options else []),
        ]
        return "\n".join(facts), "\n".join(claims)


class PolicyEntry(NamedTuple):
    """A policy, and where it comes from."""

    policy: Policy
    origin: Origin = "built in"

    @property
    def standing(self) -> Standing:
        """How far it is from giving the prompt away, by the weakest of its placements."""
        masks = [placement.mask for _, placement in self.policy.leaving()]
        if not masks:
            return "nothing leaves"
        if None in masks:
            return "clear"
        if any(mask.broken for mask in self.policy.masks):
            return "broken"
        return "not known to be broken"

    def described(self) -> dict[str, Any]:
        """Return what it sends away, as JSON has it."""
        policy = self.policy
        return {
            "name": policy.name,
            "summary": policy.summary,
            "arithmetic": policy.arithmetic,
            "services": policy.services,
            "masks": list(dict.fromkeys(mask.name for mask in policy.masks)),
            "leaves": [
                {
                    "operator": operator,
                    "layers": str(placement.layers) if placement.layers else None,
                    "phase": placement.phase,
                    "mask": placement.mask.name if placement.mask else None,
                    "verify": placement.verify,
                    "sees": SEEN[operator],
                }
                for operator, placement in policy.leaving()
            ],
            "standing": self.standing,
            "leakage_summary": leakage_summary(policy),
            "origin": self.origin,
        }

    def row(self, default: str) -> tuple[str, str]:
        """Return what a table says: what it is, and what crosses under each mask, a line each.

        `default`: the name of the default policy.
        """
        policy, count = self.policy, self.policy.services
        services = ("no service", "1 service", "1 service and a dealer")[count]
        services += "" if policy.arithmetic == "float" else f", {policy.arithmetic}"
        name = policy.name + (" (default)" if policy.name == default else "")
        facts = [name, self.standing, services]
        facts += [f"({self.origin})"] if self.origin != "built in" else []
        groups: dict[tuple[str | None, Phase | None, Verify], list[str]] = {}
        for operator, one in policy.leaving():
            mask = one.mask.name if one.mask else None
            groups.setdefault((mask, one.phase, one.verify), []).append(SEEN[operator])
        lines = [policy.summary]
        for (mask, phase, verify), seen in groups.items():
            how = f"under {mask}" if mask else "in the clear"
            when = f" at {phase}" if phase else ""
            checked = "" if verify == "none" else "; results verified"
            lines.append(f"- {how}{when}: {', '.join(dict.fromkeys(seen))}{checked}")
        return "\n".join(facts), "\n".join(lines)


def mask_entries() -> tuple[list[MaskEntry], dict[str, str]]:
    """Return all masks that have a name, built in and of packages.

    Of those of packages that do not load, return the names, and why, in one line.
    """
    return _loaded(all_masks().names(), find_mask_entry)


def _loaded(names: Iterable[str], load: Callable[[str], E]) -> tuple[list[E], dict[str, str]]:
    """Load what has a name; a package that is broken must not hide the others."""
    found, unusable = [], {}
    for name in names:
        try:
            found.append(load(name))
        except (InputError, MaskError) as error:
            unusable[name] = str(error)
    return found, unusable


def find_mask_entry(name_or_path: str) -> MaskEntry:
    """Return a mask by name, or that of a Python file. Raises MaskError and PluginError."""
    mask = find_mask(name_or_path)
    if "/" in name_or_path or ".py" in name_or_path:
        return MaskEntry(mask, "file")
    if BUILTIN.get(mask.name) is mask:
        return MaskEntry(mask)
    return MaskEntry(mask, "research" if mask.__module__.startswith(_RESEARCH) else "package")


def our_masks() -> dict[str, type[Mask]]:
    """Return the masks that ship with us by name: built in, and the research baselines."""
    research = [
        entry.name for entry in installed(all_masks().group) if entry.module.startswith(_RESEARCH)
    ]
    return {name: find_mask(name) for name in sorted({*BUILTIN, *research})}


def policy_entries() -> tuple[list[PolicyEntry], dict[str, str]]:
    """Return all policies that can be named, as `mask_entries` does."""
    built_in = builtin_policies()
    return _loaded(
        policy_names(),
        lambda name: PolicyEntry(load_policy(name), "built in" if name in built_in else "package"),
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


def needs_of(mask: type[Mask]) -> list[str]:
    """Say what a mask needs beside a service."""
    needs = {
        '`arithmetic = "int8"` in the policy': mask.arithmetic == "int8",
        "a key and weights from `tsqp provision`": issubclass(mask, ProvisionedMask),
        "factors made in advance, or dealers": mask.kind == "additive",
    }
    return [need for need, is_needed in needs.items() if is_needed]


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
