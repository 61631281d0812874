"""Placement policies: which operator runs where, in which layers and phases, and masked how.

A policy is data: a small TOML file (the built-in ones are in `tee_side/policy/builtin`), or a
Python file with a `Policy` named `POLICY`:

    name = "my-policy"
    summary = "..."
    arithmetic = "int8"

    [operators]
    embedding = "tee"
    o_proj = { place = "gpu", mask = "pad", verify = "freivalds" }
    qkv_proj = [
        { phase = "prefill", place = "tee" },
        { phase = "decode", layers = "0-3", place = "tee" },
        { phase = "decode", layers = "4-", place = "gpu", mask = "pad", verify = "none" },
    ]
    ...

Every operator must be placed, for every layer and phase exactly once. What leaves the TEE states
its `mask` and its `verify`; "none" is the only way to send something unmasked or unverified.

    segment = { layers = "4-", place = "gpu", mask = "cloak-segment", verify = "none" }

places consecutive whole layers at once: the service computes them in one call, attention and KV
cache and all, so that their operators are not placed one by one. `lm_head` under the same mask
behind a segment of the last layers is part of its call. `window = { sinks = 4, recent = 1024 }`
has its tokens attend to no others (StreamingLLM, arXiv 2309.17453), which changes the answers.

    [service]
    attested = "snp+nvidia"

has every service prove by such evidence what it is, before anything is sent to it. Where it must,
`place = "attested"` says that this is what the placement relies on.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from protocol.errors import MaskError, PluginError, PolicyError, describe
from protocol.messages import FUSED_MODULES, Arithmetic, Projection
from protocol.validation import did_you_mean, first_problem, refusal
from tee_side.protect.masks.mask import AdditiveMask, Mask, ProvisionedMask, find_mask, is_path
from tee_side.words import (
    LAYERLESS,
    OPERATORS,
    PHASES,
    PRODUCTS,
    PROJECTIONS,
    Attested,
    LayerRange,
    Operator,
    Phase,
    Place,
    Site,
    Verify,
    is_linear,
    is_projection,
)

_SUFFIX = ".toml"
# Built-in policies of other names than before.
_RENAMED = {"tsqp": "published", "tsqp-permuted": "published-permuted", "two-server": "dealt"}
_ENTRY_POINTS = "tsqp.policies"
_FOLDER = "folder"
_BUILTIN = files("tee_side.policy") / "builtin"

_MOST_TOKENS = 2**31 - 1
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

_SEGMENT: Operator = "segment"

# What every placement that leaves the TEE must state, and how.
_STATED = {
    "mask": 'the name of a mask, a table with its name and options, or "none" to send the clear',
    "verify": '"freivalds", or "none" to believe every result',
}


def _layer_range(value: object) -> LayerRange:
    """Read `3`, "3", "0-3" or "4-". Raises ValueError, which pydantic catches."""
    if isinstance(value, LayerRange):
        return value
    return LayerRange.parse("" if isinstance(value, bool) else str(value))


def _mask(value: object, info: ValidationInfo) -> Mask | None:
    """Read a mask: an instance, a name or path, a table with `name` and its options, or "none"."""
    if value == "none":
        return None
    if isinstance(value, Mask):
        return value
    options = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", None)
    if not isinstance(name, str):
        got = "a table without a name" if isinstance(value, dict) else describe(value)
        raise refusal(got, _STATED["mask"])
    try:
        mask = find_mask(name, (info.context or {}).get(_FOLDER))
        return mask(**options)
    except ValidationError as error:
        problem = first_problem(error, mask.model_fields)
        raise refusal(problem.got, problem.expected, f"{name}: {problem.field}") from None
    except (MaskError, PluginError) as error:
        where = "" if error.where == "mask" else error.where
        raise refusal(error.got, error.expected, where) from None


class AttentionWindow(BaseModel, frozen=True, extra="forbid"):
    """Tokens that one attends to: so many at the beginning, and the last, itself included."""

    sinks: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] = 0
    recent: Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


class Placement(BaseModel, frozen=True, extra="forbid", arbitrary_types_allowed=True):
    """Where an operator runs: in which layers (None: all) and in which phase (None: both).

    Of what leaves, `mask` and `verify` must be given; mask "none" reads as None. `verify`: how
    results are checked. "freivalds" refuses wrong ones (docs/verification.md), of integers all, of
    floats those that rounding does not explain; "none" believes them. Place "attested": on the GPU
    side, and only where services have to prove what they are. `window`: of a segment's attention.
    """

    place: Place
    mask: Annotated[SerializeAsAny[Mask] | None, BeforeValidator(_mask)] = None
    verify: Verify = "none"
    layers: Annotated[LayerRange | None, BeforeValidator(_layer_range)] = None
    phase: Phase | None = None
    window: AttentionWindow | None = None

    @property
    def leaves(self) -> bool:
        """Whether it runs on the GPU side."""
        return self.place != "tee"

    @model_validator(mode="after")
    def _states_protection(self) -> Placement:
        for key, expected in _STATED.items():
            if self.leaves and key not in self.model_fields_set:
                raise refusal("nothing", expected, key)
        return self

    def covers(self, layer: int, phase: Phase) -> bool:
        """Say whether this is about a layer in a phase."""
        return (self.layers is None or layer in self.layers) and self.phase in (None, phase)

    @property
    def scope(self) -> str:
        """What this is about, such as `layers 4- decode`; empty if about everything."""
        layers = f"layers {self.layers}" if self.layers else None
        return " ".join(filter(None, (layers, self.phase)))

    def __str__(self) -> str:
        under = f"under {self.mask.name}" if self.mask else ""
        verified = "verified" if self.verify != "none" else ""
        window = f"window {self.window.sinks}+{self.window.recent}" if self.window else ""
        return " ".join(filter(None, [self.scope, self.place, under, verified, window]))


def _placements(value: object) -> object:
    """Read "tee", one table, or a list of tables."""
    if isinstance(value, str):
        value = {"place": value}
    return value if isinstance(value, list | tuple) else (value,)


class Segment(NamedTuple):
    """Layers `first` to `last`, both included, that a service computes in one call.

    `head`: the last norm and the LM head behind them, too.
    """

    first: int
    last: int
    placed: Placement
    head: bool


Placements: TypeAlias = Annotated[
    tuple[Placement, ...], Field(min_length=1), BeforeValidator(_placements)
]


class ServiceTerms(BaseModel, frozen=True, extra="forbid"):
    """What every service must prove, by which evidence; see `appraise_service`."""

    attested: Attested


class Policy(BaseModel, frozen=True, extra="forbid"):
    """Where each operator runs.

    `one_rpc_per_module`: q, k, v, gate and up each travel alone. `arithmetic`: whether the linear
    operators and the LM head are computed in floats; in int8 weights and a ring of integers,
    wherever they run; or ("int8-dynamic", in the TEE alone) in int8 weights and inputs of eight
    bits. `prefill`: "stock" where a
    prompt leaves under pads only while `decode_share` (None: half) of the pads that are kept ready
    stays for decode; otherwise the TEE computes it, to the same bits.
    """

    # Printed in status lines and reports.
    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    summary: Annotated[str, Field(max_length=200)]
    one_rpc_per_module: bool = False
    # Of these, services know `Arithmetic` alone.
    arithmetic: Literal["float", "int8", "int8-dynamic"] = "float"
    prefill: Literal["always", "stock"] = "always"
    decode_share: Annotated[float, Field(ge=0, le=1)] | None = None
    service: ServiceTerms = ServiceTerms(attested="none")
    operators: dict[Operator, Placements]

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, handler: ModelWrapValidatorHandler[Policy]) -> Policy:
        """Raise PolicyError, which pydantic lets pass, instead of an error that names a field."""
        try:
            policy = handler(given)
        except ValidationError as error:
            raise _refused(given, error) from None
        policy._refuse_conflicts()
        return policy

    def _refuse_if(self, wrong: object, where: str, got: str, expected: str) -> None:
        PolicyError.unless(not wrong, f"policy {self.name}: {where}", got, expected)

    def _refuse_conflicts(self) -> None:
        """Refuse what does not go together, whatever the model is. Raises PolicyError."""
        needed = LAYERLESS if "segment" in self.operators else OPERATORS
        missing = [name for name in needed if name not in self.operators]
        self._refuse_if(
            missing, "operators", f"nothing for {', '.join(missing)}", "every operator placed"
        )
        masks = [p.mask for _, p in self.leaving() if p.phase in (None, "prefill")]
        padded = masks and all(isinstance(mask, AdditiveMask) for mask in masks)
        unfit = self.arithmetic != "int8" or not padded
        expected = 'arithmetic = "int8" and a pad on what leaves at prefill: pads are in stock'
        self._refuse_if(self.prefill == "stock" and unfit, "prefill", "'stock'", expected)
        alone = self.prefill == "always" and self.decode_share is not None
        self._refuse_if(alone, "decode_share", 'without prefill = "stock"', "both or none")
        for operator, placed in self._placed():
            where = _joined(operator, placed.scope)
            for wrong, got, expected in self._conflicts_of(operator, placed):
                self._refuse_if(wrong, where, got, expected)

    def _placed(self) -> Iterator[tuple[Operator, Placement]]:
        """Yield how each operator is placed, in the order of a forward pass; a segment last."""
        for operator in (*OPERATORS, _SEGMENT):
            for placed in self.operators.get(operator, ()):
                yield operator, placed

    def _conflicts_of(
        self, operator: Operator, placed: Placement
    ) -> Iterator[tuple[object, str, str]]:
        """Yield, for each rule of a placement, whether it is broken, by what, and what would do."""
        in_tee, segment, checked = not placed.leaves, operator == "segment", placed.verify != "none"
        verify, arithmetic = f'verify = "{placed.verify}"', f'arithmetic = "{self.arithmetic}"'
        proven = placed.place != "attested" or self.service.attested != "none"
        yield from (
            (not proven, 'place = "attested"', 'attested in [service], such as "snp+nvidia"'),
            (
                segment and in_tee,
                'place = "tee"',
                "its operators placed one by one: a segment is a service's",
            ),
            (segment and checked, verify, '"none": whole layers have no check'),
            (
                segment and placed.phase is not None,
                f"phase {placed.phase}",
                "both phases: its KV cache is the service's",
            ),
            (
                segment and self.arithmetic != "float",
                arithmetic,
                '"float", in which services compute layers',
            ),
            (not segment and placed.window is not None, "window", "none: a segment has one alone"),
            (
                placed.layers is not None and operator in LAYERLESS,
                f"layers {placed.layers}",
                "no layers, as it belongs to none",
            ),
            (
                checked and in_tee,
                f'{verify} with place = "tee"',
                "none: nothing comes back that could be wrong",
            ),
        )
        if (mask := placed.mask) is not None:
            able = ", ".join(name for name in (*OPERATORS, _SEGMENT) if mask.supports(name))
            yield from (
                (in_tee, f'mask {mask.name} with place = "tee"', "no mask in the TEE"),
                (
                    checked and not mask.verifiable,
                    f"{verify} under {mask.described()}",
                    "a mask whose results are the plain ones, within its tolerance",
                ),
                (
                    not mask.supports(operator),
                    f"mask {mask.name}",
                    f"one that works on {operator}; {mask.name} works on {able}",
                ),
                (
                    mask.arithmetic != self.arithmetic and is_projection(operator),
                    arithmetic,
                    f'"{mask.arithmetic}", which mask {mask.name} needs',
                ),
            )
        yield (
            self.arithmetic == "int8-dynamic" and not in_tee,
            f'place = "gpu" with {arithmetic}',
            'place = "tee": no service computes in it',
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        """What are sites: the linear operators, and the LM head of integers.

        In floats it may be the embedding's own matrix, and registered packages send it.
        """
        return tuple(FUSED_MODULES) if self.arithmetic == "float" else PROJECTIONS

    @property
    def served_arithmetic(self) -> Arithmetic:
        """In what services compute the linear operators, where they do."""
        return "int8" if self.arithmetic == "int8" else "float"

    def check(self, num_layers: int) -> None:
        """Check the policy against a model's size.

        Raises PolicyError that names policy, operator and layer: a layer beyond the model,
        one that is placed twice or not at all, or feature masks that cannot go together.
        """
        for operator, placed in self.leaving():
            # Validated when it was made; a copy that pydantic did not validate may say less.
            for key, expected in _STATED.items():
                missing = key not in placed.model_fields_set
                self._refuse_if(missing, _joined(operator, key), "nothing", expected)
        segments = self.segments(num_layers)
        covered = {layer for one in segments for layer in range(one.first, one.last + 1)}
        for operator in (*OPERATORS, _SEGMENT):
            placements = self.operators.get(operator, ())
            for layers in (placement.layers for placement in placements):
                beyond = layers is not None and (layers.last or layers.first) >= num_layers
                expected = f"layers within 0-{num_layers - 1}, which is what the model has"
                self._refuse_if(beyond, operator, f"layers {layers}", expected)
            for layer in range(1 if operator in LAYERLESS else num_layers):
                for phase in PHASES:
                    found = [p for p in placements if p.covers(layer, phase)]
                    within = operator not in LAYERLESS and layer in covered
                    wanted = int(within == (operator == "segment"))
                    where = _joined(operator, "" if operator in LAYERLESS else f"layer {layer}")
                    got = f"{len(found)} placements in {phase}"
                    got += f" ({'; '.join(map(str, found))})" if found else ""
                    expected = "exactly one" if wanted else "none, within a segment"
                    self._refuse_if(len(found) != wanted, where, got, expected)
        heads = [p.mask for p in self.operators["lm_head"] if p.mask and p.mask.kind == "segment"]
        behind = any(segment.head for segment in segments)
        for head in heads:
            got = f"mask {head.name} behind no segment of the last layers under the same"
            self._refuse_if(not behind, "lm_head", got, "one, in whose call it is")
        # A clear product beside a feature mask: the server has no clear weights then.
        if (feature := self.feature_mask) is not None:
            expected = (
                "in the TEE, or under the same mask with the same options: a provisioned server"
                " holds transformed linear weights and nothing else"
            )
            for operator, placed in self.leaving():
                under = placed.mask.described() if placed.mask else "no mask"
                apart = placed.mask != feature and operator not in PRODUCTS
                got = f"{under} beside {feature.described()}"
                self._refuse_if(apart, _joined(operator, placed.scope), got, expected)

    def at(self, operator: Operator, layer: int, phase: Phase) -> Placement:
        """Return the placement of an operator in a layer (0 where it has none) and a phase.

        Of one within a segment it is the segment's.
        """
        found = chain(self.operators.get(operator, ()), self.operators.get("segment", ()))
        return next(p for p in found if p.covers(layer, phase))

    def segments(self, num_layers: int) -> list[Segment]:
        """Return the segments of a model of so many layers, in order."""
        found = []
        for placed in self.operators.get("segment", ()):
            first = placed.layers.first if placed.layers else 0
            last = num_layers - 1
            if placed.layers and placed.layers.last is not None:
                last = min(last, placed.layers.last)
            behind = [(p.leaves, p.mask, p.verify, p.phase) for p in self.operators["lm_head"]]
            head = last == num_layers - 1 and behind == [(True, placed.mask, "none", None)]
            found.append(Segment(first, last, placed, head))
        return sorted(found, key=lambda segment: segment.first)

    def sites(self, num_layers: int, placed: Callable[[Placement], bool]) -> list[Site]:
        """Return the sites of a model of so many layers that are placed so in some phase."""
        return [
            (layer, operator)
            for layer in range(num_layers)
            for operator in self.projections
            if is_linear(operator) or layer == num_layers - 1
            if any(placed(self.at(operator, layer, phase)) for phase in PHASES)
        ]

    def sites_here(self, num_layers: int) -> list[Site]:
        """Return the sites that the TEE computes in some phase, or when pads are not in stock."""

        def stays(placed: Placement) -> bool:
            mask = placed.mask
            spared = self.prefill == "stock" and isinstance(mask, AdditiveMask) and not mask.dealt
            return placed.place == "tee" or spared

        return self.sites(num_layers, stays)

    def sites_under(self, num_layers: int, mask: Mask) -> list[Site]:
        """Return the sites that are under a mask in some phase."""
        return self.sites(num_layers, lambda placement: placement.mask == mask)

    def leaving(self) -> Iterator[tuple[Operator, Placement]]:
        """Return what leaves the TEE, in the order of a forward pass."""
        return (found for found in self._placed() if found[1].leaves)

    @property
    def services(self) -> int:
        """How many services the policy needs: none, one, or one and a dealer."""
        return 1 + self.dealt if any(self.leaving()) else 0

    @property
    def dealt(self) -> bool:
        """Whether dealers multiply pads, who must not collude with the service."""
        return any(isinstance(mask, AdditiveMask) and mask.dealt for mask in self.masks)

    @property
    def verified(self) -> bool:
        """Whether results of something that leaves are checked."""
        return any(placement.verify != "none" for _, placement in self.leaving())

    @property
    def left_to_decode(self) -> float | None:
        """Which share of the room for pads a prompt must leave to decode; None: it may take all."""
        if self.prefill == "always":
            return None
        return 0.5 if self.decode_share is None else self.decode_share

    @property
    def splits_phases(self) -> bool:
        """Whether prefill and decode are placed differently: rows of both have other operators."""
        return any(placement.phase for _, placement in self._placed())

    @property
    def masks(self) -> list[Mask]:
        """Every mask in use, once."""
        found: list[Mask] = []
        for _, placement in self.leaving():
            if placement.mask is not None and placement.mask not in found:
                found.append(placement.mask)
        return found

    @property
    def feature_mask(self) -> ProvisionedMask | None:
        """The mask in use that a server's weights are transformed for; `check` refuses another."""
        return next((mask for mask in self.masks if isinstance(mask, ProvisionedMask)), None)


def builtin_policies() -> list[str]:
    """Return the names of the policies that ship with us."""
    return sorted(Path(e.name).stem for e in _BUILTIN.iterdir() if e.name.endswith(_SUFFIX))


def policy_names() -> list[str]:
    """Return the names of built-in policies and of those that installed packages bring."""
    from tee_side.plugins import installed  # of no use to a run under a policy of ours

    return sorted({*builtin_policies(), *(e.name for e in installed(_ENTRY_POINTS))})


def load_policy(name_or_path: str) -> Policy:
    """Load a policy by name, or a file by its path (it has a `/`, or ends in `.toml` or `.py`).

    A Python file, or an entry point of the group `tsqp.policies`, is run in the TEE: load only
    what you trust. No package is imported for a built-in name. Raises PolicyError that names file,
    policy, operator and field, and PluginError for a Python file or package that does not load.
    """
    if name_or_path in builtin_policies():
        text = (_BUILTIN / f"{name_or_path}{_SUFFIX}").read_text(encoding="utf-8")
        return _parse(text, name_or_path, None)
    from tee_side import plugins  # of no use to a run under a policy of ours

    path = Path(name_or_path)
    if is_path(name_or_path) or path.suffix == _SUFFIX:
        if path.suffix == ".py":
            return _checked(plugins.load_object(name_or_path, "POLICY"), name_or_path)
        with PolicyError.for_os(
            str(path), "a policy file", UnicodeDecodeError, "text that is not UTF-8"
        ):
            return _parse(plugins.read_checked(path).decode("utf-8"), str(path), path.parent)
    if name_or_path in _RENAMED:
        raise PolicyError("policy", repr(name_or_path), f"its new name, {_RENAMED[name_or_path]!r}")
    if (entry := plugins.one_entry_point(_ENTRY_POINTS, name_or_path)) is not None:
        return _checked(plugins.load_entry_point(entry), f"entry point {entry.value}")
    raise PolicyError(
        "policy",
        repr(name_or_path),
        f"one of {', '.join(policy_names())}, or a path to a .toml or .py file",
    )


def _checked(found: object, where: str) -> Policy:
    if isinstance(found, Policy):
        return found
    raise PolicyError(where, describe(found), "a tee_side.policy.placement.Policy")


def _parse(text: str, where: str, folder: Path | None) -> Policy:
    try:
        return Policy.model_validate(tomllib.loads(text), context={_FOLDER: folder})
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.where}", error.got, error.expected) from None
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits is a ValueError
        raise PolicyError(where, f"invalid TOML ({error})", "a policy") from None


def _refused(given: object, error: ValidationError) -> PolicyError:
    """Say what pydantic refuses, by policy, operator, layers and phase as far as they are known."""
    problem = first_problem(error, {**Policy.model_fields, **Placement.model_fields})
    table = given if isinstance(given, dict) else {}
    name = table.get("name")
    known = isinstance(name, str) and re.fullmatch(_NAME, name)
    policy = f"policy {name}" if known else "policy"
    match problem.path:
        case ("operators", operator, "[key]"):
            expected = f"one of {', '.join(OPERATORS)}{did_you_mean(operator, OPERATORS)}"
            return PolicyError(f"{policy}: operators", describe(operator), expected)
        case ("operators", operator, int(index), *fields):
            scope = _raw_scope(table["operators"][operator], index, fields)
            where = _joined(policy, operator, scope, *fields, problem.where)
        case ("operators", *path) | path:
            where = _joined(policy, *path, problem.where)
    return PolicyError(where, problem.got, problem.expected)


def _raw_scope(placements: Any, index: int, fields: Sequence[str | int]) -> str:
    """Name one of an operator's placements before it is validated: by what it says, or number."""
    several = placements if isinstance(placements, list | tuple) else [placements]
    said = several[index] if isinstance(several[index], dict) else {}
    layers, phase = (None if key in fields else said.get(key) for key in ("layers", "phase"))
    scope = [f"layers {layers}"] if isinstance(layers, str | int) else []
    scope += [phase] if phase in PHASES else []
    return " ".join(scope) or (f"placement {index + 1}" if len(several) > 1 else "")


def _joined(*parts: object) -> str:
    return ": ".join(str(part) for part in parts if part != "")
