"""Placement policies: which operator runs where, in which layers and phases, and masked how.

A policy is data: a small TOML file (the built-in ones are in `tee_side/policies`), or a Python file
with a `Policy` named `POLICY`:

    name = "my-policy"
    summary = "..."
    arithmetic = "int8"

    [operators]
    embedding = "tee"
    o_proj = { place = "gpu", mask = "pad", verify = "freivalds" }
    qkv_proj = [
        { phase = "prefill", place = "tee" },
        { phase = "decode", layers = "0-3", place = "tee" },
        { phase = "decode", layers = "4-", place = "gpu", mask = "pad" },
    ]
    ...

Every operator must be placed, for every layer and phase exactly once: nothing is sent away, or
kept, because a line was forgotten.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from protocol.errors import MaskError, PolicyError, describe
from protocol.messages import Arithmetic
from tee_side.disclosure import disclosure
from tee_side.layer_range import LayerRange
from tee_side.masks.mask import FeatureMask, Mask
from tee_side.masks.registry import find_mask
from tee_side.plugins import PluginError, is_path, load_entry_point, load_object
from tee_side.refusals import first_problem, refusal
from tee_side.vocabulary import (
    LAYERLESS,
    OPERATORS,
    PHASES,
    Operator,
    Phase,
    Place,
    Verify,
    is_linear,
)

_SUFFIX = ".toml"
_ENTRY_POINTS = "tsqp.policies"
_FOLDER = "folder"

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def _layer_range(value: object) -> LayerRange:
    """Read `3`, "3", "0-3" or "4-". Raises ValueError, which pydantic catches."""
    if isinstance(value, LayerRange):
        return value
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    # What is no text is refused as such a text would be.
    return LayerRange.parse(text if isinstance(text, str) else "")


def _scope(layers: LayerRange | None, phase: Phase | None) -> str:
    return " ".join(([f"layers {layers}"] if layers else []) + ([phase] if phase else []))


def _mask(value: object, info: ValidationInfo) -> object:
    """Read a mask: an instance, a name or path, or a table with `name` and its options."""
    if value is None or isinstance(value, Mask):
        return value
    options = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", None)
    if not isinstance(name, str):
        got = "a table without a name" if isinstance(value, dict) else describe(value)
        raise refusal(got, "the name of a mask, or a table with its name and options")
    folder = (info.context or {}).get(_FOLDER)
    try:
        return find_mask(name, folder)(**options)
    except ValidationError as error:
        problem = first_problem(error)
        option = ".".join(str(part) for part in problem.path)
        raise refusal(problem.got, problem.expected, f"{name}: {option}") from None
    except (MaskError, PluginError) as error:
        where = "" if error.where == "mask" else error.where
        raise refusal(error.got, error.expected, where) from None


class Placement(BaseModel):
    """Where an operator runs: in which layers (None: all) and in which phase (None: both).

    `verify`: how results are checked. `freivalds` refuses wrong ones (docs/verification.md), of
    integers all, of floats those that rounding does not explain; `none` believes them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    place: Place
    mask: Annotated[SerializeAsAny[Mask] | None, BeforeValidator(_mask)] = None
    verify: Verify = "none"
    layers: Annotated[LayerRange | None, BeforeValidator(_layer_range)] = None
    phase: Phase | None = None

    def covers(self, layer: int, phase: Phase) -> bool:
        """Say whether this is about a layer in a phase."""
        return (self.layers is None or layer in self.layers) and self.phase in (None, phase)

    @property
    def scope(self) -> str:
        """What this is about, such as `layers 4- decode`; empty if about everything."""
        return _scope(self.layers, self.phase)

    def __str__(self) -> str:
        under = f"under {self.mask.name}" if self.mask else ""
        verified = "verified" if self.verify != "none" else ""
        return " ".join(filter(None, [self.scope, self.place, under, verified]))


def _placements(value: object) -> object:
    """Read "tee", one table, or a list of tables."""
    if isinstance(value, str):
        return ({"place": value},)
    several = isinstance(value, list | tuple)
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not found:
        raise refusal("an empty list", "at least one placement")
    for placement in found:
        if not isinstance(placement, dict | Placement):
            expected = "a table with place" if several else '"tee", "gpu", or a table with place'
            raise refusal(describe(placement), expected)
    return found


Placements: TypeAlias = Annotated[
    tuple[Placement, ...], Field(min_length=1), BeforeValidator(_placements)
]


class Policy(BaseModel):
    """Where each operator runs.

    `one_rpc_per_module`: q, k, v, gate and up each travel alone. `arithmetic`: whether the linear
    operators and the LM head are computed in floats, or in int8 weights and a ring of integers,
    wherever they run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Printed in status lines and reports.
    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    summary: Annotated[str, Field(max_length=200)]
    one_rpc_per_module: bool = False
    arithmetic: Arithmetic = "float"
    operators: dict[Operator, Placements]

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, handler: ModelWrapValidatorHandler[Policy]) -> Policy:
        """Raise PolicyError, which pydantic lets pass, instead of an error that names a field."""
        try:
            policy = handler(given)
        except ValidationError as error:
            raise _refused(given, error) from None
        policy._check_consistent()
        return policy

    def _check_consistent(self) -> None:
        if missing := [name for name in OPERATORS if name not in self.operators]:
            raise PolicyError(
                f"policy {self.name}: operators",
                got=f"nothing for {', '.join(missing)}",
                expected="every operator placed",
            )
        for operator in OPERATORS:
            for placement in self.operators[operator]:
                self._check_placement(operator, placement)

    def _check_placement(self, operator: Operator, placement: Placement) -> None:
        where = _joined(f"policy {self.name}", operator, placement.scope)
        if placement.layers is not None and operator in LAYERLESS:
            raise PolicyError(
                f"policy {self.name}: {operator}",
                got=f"layers {placement.layers}",
                expected="no layers, as it belongs to none",
            )
        if placement.verify != "none":
            self._check_verify(where, placement)
        if placement.mask is not None:
            self._check_mask(where, operator, placement.place, placement.mask)
        if self.arithmetic == "int8" and (operator, placement.place) == ("lm_head", "gpu"):
            raise PolicyError(
                where,
                got='place = "gpu" with arithmetic = "int8"',
                expected='place = "tee", or arithmetic = "float": no service has integers for it',
            )

    def _check_verify(self, where: str, placement: Placement) -> None:
        if placement.place == "tee":
            raise PolicyError(
                where,
                got=f'verify = "{placement.verify}" with place = "tee"',
                expected="none: nothing comes back that could be wrong",
            )
        if placement.mask is not None and not placement.mask.verifiable:
            raise PolicyError(
                where,
                got=f'verify = "{placement.verify}" under {placement.mask.described()}',
                expected="a mask whose results are the plain ones, within its tolerance",
            )

    def _check_mask(self, where: str, operator: Operator, place: Place, mask: Mask) -> None:
        if place == "tee":
            raise PolicyError(
                where, got=f'mask {mask.name} with place = "tee"', expected="no mask in the TEE"
            )
        if not mask.supports(operator):
            able = ", ".join(name for name in OPERATORS if mask.supports(name))
            raise PolicyError(
                where,
                got=f"mask {mask.name}",
                expected=f"one that works on {operator}; {mask.name} works on {able}",
            )
        if mask.arithmetic != self.arithmetic and is_linear(operator):
            raise PolicyError(
                where,
                got=f'arithmetic = "{self.arithmetic}"',
                expected=f'"{mask.arithmetic}", which mask {mask.name} needs',
            )

    def check(self, num_hidden_layers: int) -> None:
        """Check the policy against a model's size.

        Raises PolicyError that names policy, operator and layer: a layer that the model has not,
        one that is placed twice or not at all, or feature masks that cannot go together.
        """
        for operator in OPERATORS:
            for placement in self.operators[operator]:
                self._check_layers(operator, placement, num_hidden_layers)
            for layer in range(1 if operator in LAYERLESS else num_hidden_layers):
                for phase in PHASES:
                    self._check_once(operator, layer, phase)
        self._check_feature_masks()

    def _check_layers(self, operator: Operator, placement: Placement, layers: int) -> None:
        if placement.layers is None:
            return
        if (placement.layers.last or placement.layers.first) >= layers:
            raise PolicyError(
                f"policy {self.name}: {operator}",
                got=f"layers {placement.layers}",
                expected=f"layers within 0-{layers - 1}, which is what the model has",
            )

    def _check_once(self, operator: Operator, layer: int, phase: Phase) -> None:
        found = [p for p in self.operators[operator] if p.covers(layer, phase)]
        if len(found) != 1:
            where = "" if operator in LAYERLESS else f": layer {layer}"
            raise PolicyError(
                f"policy {self.name}: {operator}{where}",
                got=f"{len(found)} placements in {phase}"
                + (f" ({'; '.join(map(str, found))})" if found else ""),
                expected="exactly one",
            )

    def _check_feature_masks(self) -> None:
        """Refuse a clear product beside a feature mask: the server has no clear weights then."""
        feature = self.feature_mask
        if feature is None:
            return
        for operator, placement in self.leaving():
            if placement.mask != feature and (is_linear(operator) or operator in LAYERLESS):
                mask = placement.mask.described() if placement.mask else "no mask"
                raise PolicyError(
                    _joined(f"policy {self.name}", operator, placement.scope),
                    got=f"{mask} beside {feature.described()}",
                    expected="in the TEE, or under the same mask with the same options: a"
                    " provisioned server holds transformed linear weights and nothing else",
                )

    def at(self, operator: Operator, layer: int, phase: Phase) -> Placement:
        """Return the placement of an operator in a layer (0 where it has none) and a phase."""
        return next(p for p in self.operators[operator] if p.covers(layer, phase))

    def leaving(self) -> Iterator[tuple[Operator, Placement]]:
        """Yield what leaves the TEE."""
        for operator in OPERATORS:
            for placement in self.operators[operator]:
                if placement.place == "gpu":
                    yield operator, placement

    def on_gpu(self, operator: Operator) -> bool:
        """Say whether the operator leaves the TEE, in some layer and phase."""
        return any(placement.place == "gpu" for placement in self.operators[operator])

    @property
    def verified(self) -> bool:
        """Whether results of something that leaves are checked."""
        return any(placement.verify != "none" for _, placement in self.leaving())

    @property
    def needs_service(self) -> bool:
        """Whether anything leaves the TEE at all."""
        return any(True for _ in self.leaving())

    @property
    def services(self) -> int:
        """How many services the policy needs: none, one, or two that do not collude."""
        return max((p.mask.services if p.mask else 1 for _, p in self.leaving()), default=0)

    @property
    def splits_phases(self) -> bool:
        """Whether prefill and decode are placed differently, and so cannot share a step."""
        return any(p.phase for placements in self.operators.values() for p in placements)

    @property
    def masks(self) -> list[Mask]:
        """Every mask in use, once."""
        found: list[Mask] = []
        for _, placement in self.leaving():
            if placement.mask is not None and placement.mask not in found:
                found.append(placement.mask)
        return found

    @property
    def feature_mask(self) -> FeatureMask | None:
        """The feature mask in use; `check` refuses a second one."""
        return next((mask for mask in self.masks if isinstance(mask, FeatureMask)), None)

    def disclosure(self) -> str | None:
        """Say in one line what the GPU side learns; None if nothing leaves."""
        leaving = list(self.leaving())
        return disclosure(
            self.name,
            [(operator, p.mask) for operator, p in leaving],
            verified=all(p.verify != "none" for _, p in leaving),
        )


def builtin_policies() -> list[str]:
    """Return the names of the policies that ship with us."""
    folder = files("tee_side") / "policies"
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)]
    return sorted(name.removesuffix(_SUFFIX) for name in names)


def policy_names() -> list[str]:
    """Return the names of built-in policies and of those that installed packages bring."""
    return sorted({*builtin_policies(), *(e.name for e in entry_points(group=_ENTRY_POINTS))})


def load_policy(name_or_path: str) -> Policy:
    """Load a policy by name, or a file by its path (it has a `/`, or ends in `.toml` or `.py`).

    A Python file, or an entry point of the group `tsqp.policies`, is run in the TEE: load only
    what you trust. No package is imported for a built-in name. Raises PolicyError that names file,
    policy, operator and field, and PluginError for a Python file or package that does not load.
    """
    if is_path(name_or_path) or name_or_path.endswith(_SUFFIX):
        path = Path(name_or_path)
        if path.suffix == ".py":
            return _checked(load_object(str(path), "POLICY"), str(path))
        try:
            return _parse(path.read_text(encoding="utf-8"), str(path), path.parent)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "text that is not UTF-8"
            raise PolicyError(str(path), got=reason, expected="a policy file") from None
    if name_or_path in builtin_policies():
        resource = files("tee_side") / "policies" / f"{name_or_path}{_SUFFIX}"
        return _parse(resource.read_text(encoding="utf-8"), name_or_path, None)
    for entry in entry_points(group=_ENTRY_POINTS, name=name_or_path):
        return _checked(load_entry_point(entry), f"entry point {entry.value}")
    raise PolicyError(
        "policy",
        got=repr(name_or_path),
        expected=f"one of {', '.join(policy_names())}, or a path to a .toml or .py file",
    )


def _checked(found: object, where: str) -> Policy:
    if isinstance(found, Policy):
        return found
    raise PolicyError(where, got=describe(found), expected="a tee_side.policy.Policy")


def _parse(text: str, where: str, folder: Path | None) -> Policy:
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits is a ValueError
        raise PolicyError(where, got=f"invalid TOML ({error})", expected="a policy") from None
    try:
        return Policy.model_validate(content, context={_FOLDER: folder})
    except RecursionError as error:
        raise PolicyError(where, got=f"invalid TOML ({error})", expected="a policy") from None
    except PolicyError as error:
        raise PolicyError(
            f"{where}: {error.where}", got=error.got, expected=error.expected
        ) from None


def _refused(given: object, error: ValidationError) -> PolicyError:
    """Say what pydantic refuses, by policy, operator, layers and phase as far as they are known."""
    problem = first_problem(error)
    table = given if isinstance(given, dict) else {}
    name = table.get("name")
    known = isinstance(name, str) and re.fullmatch(_NAME, name)
    policy = f"policy {name}" if known else "policy"
    match problem.path:
        case ("operators", operator, "[key]"):
            expected = f"one of {', '.join(OPERATORS)}"
            return PolicyError(f"{policy}: operators", got=describe(operator), expected=expected)
        case ("operators", operator, int(index), *fields):
            operators = table.get("operators") or {}
            scope = _raw_scope(operators.get(operator), index, fields)
            where = _joined(policy, operator, scope, *fields, problem.where)
        case ("operators", operator):
            where = _joined(policy, operator, problem.where)
        case path:
            where = _joined(policy, *path, problem.where)
    return PolicyError(where, got=problem.got, expected=problem.expected)


def _raw_scope(placements: object, index: int, fields: list[str | int]) -> str:
    """Name one of an operator's placements before it is validated: by what it says, or number."""
    several = placements if isinstance(placements, list | tuple) else [placements]
    placement = several[index]
    if isinstance(placement, dict):
        layers, phase = placement.get("layers"), placement.get("phase")
        try:
            found = _layer_range(layers) if layers is not None and "layers" not in fields else None
        except ValueError:
            found = None  # a problem of its own, which comes after the first
        scope = _scope(found, phase if phase in PHASES else None)
        if scope:
            return scope
    return f"placement {index + 1}" if len(several) > 1 else ""


def _joined(*parts: object) -> str:
    return ": ".join(str(part) for part in parts if part != "")
