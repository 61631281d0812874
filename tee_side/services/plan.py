"""Who is asked for what: `--gpu ENDPOINT[=LAYERS][,share=1|2]`, read and laid over a model.

Services with the same layers and the same share stand in for each other. A share's ranges of layers
must cover the model without overlapping. A service never gets two shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from protocol.curve import ClientKeys
from protocol.endpoint import parse_endpoint
from protocol.errors import SettingsError
from tee_side.layer_range import LAYER_RANGE, LayerRange
from tee_side.policy import Policy

GRAMMAR = "ENDPOINT[=LAYERS][,share=1|2], LAYERS such as 0-7, 8- or 3"
_SUFFIXES = re.compile(rf"(?P<rest>.+?)(=(?P<layers>{LAYER_RANGE}))?(,share=(?P<share>[12]))?")


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One `--gpu`. `layers`: None for all of them; `share`: 1 or 2, None where it is not said."""

    endpoint: str
    layers: LayerRange | None = None
    share: int | None = None

    @staticmethod
    def parse(text: str) -> ServiceSpec:
        """Read what a person wrote. Raises SettingsError and EndpointError.

        A path may hold `=` and `,`: only what looks like layers or a share at its end is one.
        """
        match = _SUFFIXES.fullmatch(text)
        endpoint = text if match is None else match["rest"]
        scheme = endpoint.partition("://")[0]
        odd = "=,"  # neither is in a host, a port or a number
        if ",share" in endpoint or (scheme in ("tcp", "vsock") and set(odd) & set(endpoint)):
            raise SettingsError("--gpu", got=repr(text), expected=GRAMMAR)
        parse_endpoint(endpoint)
        layers = None
        if match is not None and match["layers"] is not None:
            try:
                layers = LayerRange.parse(match["layers"])
            except ValueError:
                raise SettingsError(
                    "--gpu", got=repr(text), expected="a range that runs forwards"
                ) from None
        share = int(match["share"]) if match is not None and match["share"] else None
        return ServiceSpec(endpoint, layers, share)

    def __str__(self) -> str:
        layers = "" if self.layers is None else f"={self.layers}"
        return f"{self.endpoint}{layers}" + ("" if self.share is None else f",share={self.share}")


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Services that stand in for each other. `share` counts from 1; `last` is included."""

    share: int
    first: int
    last: int
    endpoints: tuple[str, ...]


def assign_shares(specs: Sequence[ServiceSpec], policy: Policy) -> tuple[ServiceSpec, ...]:
    """Return the services that a policy uses, with their shares of two: none, if nothing leaves.

    Without `share=`, those of the same layers take turns. Raises SettingsError for too few, one
    twice, and shares that the policy has not.
    """
    needed = policy.services
    if not needed:
        return ()
    if len(specs) < needed:
        count = {0: "no endpoint", 1: "one endpoint"}.get(len(specs), f"{len(specs)} endpoints")
        raise _too_few(count, policy)
    seen: dict[str, ServiceSpec] = {}
    for spec in specs:
        if (other := seen.setdefault(spec.endpoint, spec)) is not spec:
            raise one_service(other, spec, needed)
    if needed == 1:
        for spec in specs:
            if spec.share == 2:
                raise SettingsError(
                    "--gpu", got=str(spec), expected=f"no share: policy {policy.name} uses one"
                )
        return tuple(specs)
    said = [spec for spec in specs if spec.share is not None]
    if not said:
        return tuple(_in_turns(specs))
    if len(said) < len(specs):
        silent = next(spec for spec in specs if spec.share is None)
        raise SettingsError(
            "--gpu", got=f"{said[0]} and {silent}", expected="share= for all of them, or for none"
        )
    for share in range(1, needed + 1):
        if not any(spec.share == share for spec in specs):
            raise _too_few(f"nobody for share {share} beside {said[0]}", policy)
    return tuple(specs)


def plan_services(
    specs: Sequence[ServiceSpec], policy: Policy, num_layers: int
) -> tuple[ReplicaGroup, ...]:
    """Say who is asked for which share of which layers, in order. See the module.

    Raises SettingsError, which names both where two do not fit together.
    """
    groups: dict[tuple[int, int, int], list[ServiceSpec]] = {}
    for spec in assign_shares(specs, policy):
        first, last = _resolved(spec, num_layers)
        groups.setdefault((spec.share or 1, first, last), []).append(spec)
    planned = []
    for share in range(1, policy.services + 1):
        parts = sorted((first, last) for of, first, last in groups if of == share)
        named = {part: groups[share, *part][0] for part in parts}
        _check_cover(parts, named, num_layers)
        planned += [
            ReplicaGroup(share, *part, tuple(spec.endpoint for spec in groups[share, *part]))
            for part in parts
        ]
    return tuple(planned)


def check_shares_apart(specs: Sequence[ServiceSpec], keys: Sequence[ClientKeys | None]) -> None:
    """Refuse one key for services with different shares: who holds it can be both of them.

    `specs`: with their shares. Raises SettingsError.
    """
    holders: dict[bytes, ServiceSpec] = {}
    for spec, own in zip(specs, keys, strict=True):
        if own is None:
            continue
        other = holders.setdefault(own.service, spec)
        if (other.share or 1) != (spec.share or 1):
            raise SettingsError(
                "--service-key",
                got=f"one key for {other.endpoint} and {spec.endpoint}, which get a share each",
                expected="one --service-key for each --gpu, and different keys for different"
                " shares: services that do not collude share no key",
            )


def _in_turns(specs: Sequence[ServiceSpec]) -> Iterator[ServiceSpec]:
    count: dict[LayerRange | None, int] = {}
    for spec in specs:
        turn = count[spec.layers] = count.get(spec.layers, 0) + 1
        yield replace(spec, share=2 - turn % 2)


def _resolved(spec: ServiceSpec, num_layers: int) -> tuple[int, int]:
    if spec.layers is None:
        return 0, num_layers - 1
    first, last = spec.layers.first, spec.layers.last
    last = num_layers - 1 if last is None else last
    if max(first, last) >= num_layers:
        raise SettingsError(
            "--gpu", got=str(spec), expected=f"layers within 0-{num_layers - 1}, the model's"
        )
    return first, last


def _check_cover(
    parts: Sequence[tuple[int, int]], named: dict[tuple[int, int], ServiceSpec], num_layers: int
) -> None:
    begin, before = 0, "the model's first layer"
    for part in parts:
        first, last = part
        if first > begin:
            missing = LayerRange(begin, first - 1)
            raise SettingsError(
                "--gpu",
                got=f"nobody for layers {missing}, between {before} and {named[part]}",
                expected=f"each of the layers 0-{num_layers - 1}, for each share",
            )
        if first < begin:
            raise SettingsError(
                "--gpu",
                got=f"{before} and {named[part]}, which overlap",
                expected="the same layers, or none in common",
            )
        begin, before = last + 1, str(named[part])
    if begin < num_layers:
        raise SettingsError(
            "--gpu",
            got=f"nobody for layers {LayerRange(begin, num_layers - 1)}, between {before}"
            " and the model's end",
            expected=f"each of the layers 0-{num_layers - 1}, for each share",
        )


def _too_few(got: str, policy: Policy) -> SettingsError:
    needed = policy.services
    return SettingsError(
        "--gpu",
        got=got,
        expected=f"{needed}, because policy {policy.name} uses"
        + (" a gpu-service" if needed == 1 else f" {needed} that do not collude"),
    )


def one_service(first: object, second: object, shares: int = 2) -> SettingsError:
    """Refuse two names of one service: it would get both shares, or be asked again once it lied.

    Against a mistake, not against a lie.
    """
    same = str(first) == str(second)
    twice = f"{first} twice" if same else f"{first} and {second}, one and the same"
    expected = "each service once" if shares == 1 else "two that do not collude"
    return SettingsError("--gpu", got=twice, expected=expected)
