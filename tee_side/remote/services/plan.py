"""Which service is asked for what: `--gpu ENDPOINT[=LAYERS][,share=1|2]`, laid over a model.

Services with the same layers and share stand in for each other. A share's ranges of layers must
cover the model without overlapping. A service never gets two shares, and no link that shares depend
on is in the clear unless the operator says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from protocol.endpoint import is_beyond_loopback, parse_endpoint
from protocol.errors import SettingsError
from protocol.messages import MAX_STATEMENT_BYTES
from protocol.model.config import ModelConfig
from tee_side.policy.placement import Policy
from tee_side.protect.masking import MaskRules
from tee_side.words import LAYER_RANGE, LayerRange, Operator, is_projection

if TYPE_CHECKING:
    from protocol.curve import ClientKeys

WITHOUT_COLUMNS = (
    "no columns, which were removed: several GPUs of a host are one gpu-service with"
    " --tensor-parallel N, and several hosts hold layers each (gpu-service --layers, --gpu"
    " ENDPOINT=LAYERS)"
)
_ALL_LAYERS = LayerRange(0, None)
_SUFFIXES = re.compile(rf"(.+?)(?:=({LAYER_RANGE}))?(?:,share=([12]))?")
# A header with its method, dtypes and shapes, and the lengths and padding around frames.
_HEADER_BYTES = 16 * 1024
# What Init says of each norm beside its weight: a name, dtype, shape, eps, and a frame's padding.
_NORM_BYTES = 512


def _require(holds: object, got: object, expected: str) -> None:
    SettingsError.unless(holds, "--gpu", str(got), expected)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One `--gpu`. `share`: 1 or 2, None where it is not said."""

    endpoint: str
    layers: LayerRange = _ALL_LAYERS
    share: int | None = None

    @staticmethod
    def parse(text: str) -> ServiceSpec:
        """Read what a person wrote. Raises SettingsError and EndpointError.

        A path may hold `=` and `,`: only what looks like one of the rest at its end is one.
        """
        match = _SUFFIXES.fullmatch(text)
        endpoint, layers, share = match.groups() if match else (text, None, None)
        _require(",columns" not in endpoint, repr(text), WITHOUT_COLUMNS)
        # Neither = nor , is in a host, a port, a number or a path of ours.
        no_path = endpoint.startswith(("tcp://", "vsock://", "http://", "https://"))
        _require(
            ",share" not in endpoint and not (no_path and set("=,") & set(endpoint)),
            repr(text),
            "ENDPOINT[=LAYERS][,share=1|2], LAYERS such as 0-7, 8- or 3",
        )
        parse_endpoint(endpoint)
        with SettingsError.instead_of(
            ValueError, "--gpu", repr(text), "a range that runs forwards"
        ):
            found = LayerRange.parse(layers) if layers else _ALL_LAYERS
        return ServiceSpec(endpoint, found, int(share) if share else None)

    def __str__(self) -> str:
        layers = "" if self.layers == _ALL_LAYERS else f"={self.layers}"
        share = "" if self.share is None else f",share={self.share}"
        return f"{self.endpoint}{layers}{share}"


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Services that stand in for each other. `share`: from 1 to `shares`; `last` is included."""

    share: int
    first: int
    last: int
    endpoints: tuple[str, ...]
    shares: int = 1

    def __str__(self) -> str:
        share = f", share {self.share} of {self.shares}" if self.shares > 1 else ""
        return f"layers {LayerRange(self.first, self.last)}{share}"


def assign_shares(specs: Sequence[ServiceSpec], policy: Policy) -> tuple[ServiceSpec, ...]:
    """Return the services that a policy uses, with their shares of two: none, if nothing leaves.

    Without `share=`, the first of two endpoints for the same layers gets share 1. Raises
    SettingsError for too few, one twice, shares that the policy does not have, and where only
    `share=` can tell which gets which: more than two endpoints, or two on one host.
    """
    needed = policy.services
    if not needed:
        return ()
    used = "a gpu-service" if needed == 1 else f"{needed} that do not collude"
    uses = f"{needed}, because policy {policy.name} uses {used}"
    _require(len(specs) >= needed, "one endpoint" if specs else "no endpoint", uses)
    seen: dict[str, ServiceSpec] = {}
    for spec in specs:
        if (other := seen.setdefault(spec.endpoint, spec)) is not spec:
            raise one_service(other, spec, needed)
        _require(needed > 1 or spec.share != 2, spec, f"no share: policy {policy.name} uses one")
    said = [spec for spec in specs if spec.share is not None]
    if needed == 1:
        return tuple(specs)
    if not said:
        return _by_position(specs)
    for spec in specs:
        _require(spec.share, f"{said[0]} and {spec}", "share= for all of them, or for none")
    for share in range(1, needed + 1):
        got = f"no service for share {share} beside {said[0]}"
        _require(any(spec.share == share for spec in specs), got, uses)
    return tuple(specs)


def _by_position(specs: Sequence[ServiceSpec]) -> tuple[ServiceSpec, ...]:
    hosts: dict[str, ServiceSpec] = {}
    found: list[ServiceSpec] = []
    for spec in specs:
        alike = [other for other in specs if spec.layers.overlaps(other.layers)]
        _require(
            len(alike) <= 2,
            f"{' and '.join(map(str, alike))} without share=",
            "share=1 or share=2 for each: services with the same share stand in for each other,"
            " and belong to one owner",
        )
        given = replace(spec, share=1 if alike[0] is spec else 2)
        found.append(given)
        if is_beyond_loopback(spec.endpoint):
            other = hosts.setdefault(parse_endpoint(spec.endpoint).host.lower(), given)
            _require(
                other.share == given.share,
                f"{other.endpoint} and {spec.endpoint} on one host, with a share each",
                "hosts of two owners, or share= for each where that host is no owner's (a gateway)",
            )
    return tuple(found)


def plan_services(
    specs: Sequence[ServiceSpec], policy: Policy, num_layers: int
) -> tuple[ReplicaGroup, ...]:
    """Say which services are asked for which share of which layers, in order. See the module.

    Raises SettingsError, which names both where two do not fit together.
    """
    groups: dict[tuple[int, int, int], list[ServiceSpec]] = {}
    for spec in assign_shares(specs, policy):
        first, last = spec.layers.first, spec.layers.last
        last = num_layers - 1 if last is None else last
        within = f"layers within 0-{num_layers - 1}, the model's"
        _require(max(first, last) < num_layers, spec, within)
        groups.setdefault((spec.share or 1, first, last), []).append(spec)
    ordered = sorted(groups.items())
    end = (num_layers, num_layers, "the model's end")
    for share in range(1, policy.services + 1):
        # Its parts, in order, have each layer once.
        parts = [(first, last, alike[0]) for (its, first, last), alike in ordered if its == share]
        begin, before = 0, "the model's first layer"
        for first, last, named in (*parts, end):
            _require(
                first <= begin,
                f"no service for layers {LayerRange(begin, first - 1)}, between {before} and"
                f" {named}",
                f"each of the layers 0-{num_layers - 1}, for each share",
            )
            overlap = f"{before} and {named}, which overlap"
            _require(first >= begin, overlap, "the same layers, or none in common")
            begin, before = last + 1, str(named)
    return tuple(
        ReplicaGroup(*where, tuple(spec.endpoint for spec in alike), policy.services)
        for where, alike in ordered
    )


def check_links(
    specs: Sequence[ServiceSpec],
    keys: Sequence[ClientKeys | None],
    policy: Policy,
    *,
    shares_in_the_clear: bool,
) -> bool:
    """Refuse links from which one party could read two shares; return whether all are encrypted.

    The holder of a key that two shares have can be both services, and an observer of links without
    keys adds what crosses them. Of https:// the host's name stands for the key. `specs`: with their
    shares. `shares_in_the_clear`: allow links without keys that do not leave this machine. Raises
    SettingsError, also for keys of a stream, and for none where services have to be attested.
    """
    attested = policy.service.attested != "none"
    for spec, own in zip(specs, keys, strict=True):
        if own is not None:
            from protocol.curve import require_zmq_keys

            require_zmq_keys(spec.endpoint)
        _require(
            own is not None or not attested,
            f"{spec.endpoint} without keys",
            "--identity and --service-key: the key of its link is in its evidence",
        )
    SettingsError.unless(
        not attested or len({own and own.service for own in keys}) == len(keys),
        "--service-key",
        "one for several services",
        "one --service-key for each --gpu: each attested service makes its own",
    )
    if policy.services < 2:
        return True
    holders: dict[bytes, ServiceSpec] = {}
    secured = True
    for spec, own in zip(specs, keys, strict=True):
        if spec.endpoint.startswith("https://"):
            # What ends TLS there has one key, however many paths and services are behind it.
            ends_at = spec.endpoint.split("/")[2].lower().removesuffix(":443").encode()
            other = holders.setdefault(ends_at, spec)
            got = f"{other.endpoint} and {spec.endpoint}, behind one end of TLS, a share each"
            _require(other.share == spec.share, got, "hosts of two owners")
        elif own is not None:
            other = holders.setdefault(own.service, spec)
            SettingsError.unless(
                other.share == spec.share,
                "--service-key",
                f"one key for {other.endpoint} and {spec.endpoint}, which get a share each",
                "one --service-key for each --gpu, and different keys for different"
                " shares: services that do not collude share no key",
            )
        else:
            secured = False
            leaves = is_beyond_loopback(spec.endpoint) or spec.endpoint.startswith(
                ("vsock:", "ivshmem:")
            )
            _require(
                shares_in_the_clear and not leaves,
                f"{spec.endpoint} without keys",
                "--identity and --service-key (tcp:// and ipc:// can have them): an observer of all"
                f" links of policy {policy.name} adds the shares and reads prompt and answer"
                + ("" if leaves else "; on one machine, --shares-in-the-clear allows that"),
            )
    return secured


def one_service(first: object, second: object, shares: int = 2) -> SettingsError:
    """Refuse two names of one service: it would get both shares, or be asked again once it lied.

    Against a mistake, not against a lie.
    """
    same = str(first) == str(second)
    twice = f"{first} twice" if same else f"{first} and {second}, one and the same"
    expected = "each service once" if shares == 1 else "two that do not collude"
    return SettingsError("--gpu", twice, expected)


def largest_reply(policy: Policy, config: ModelConfig, step_tokens: int, dtype: torch.dtype) -> int:
    """Return a bound in bytes for every reply that a run can ask for, Init's among them.

    Without it a service could make the TEE take, and keep, as much as the message limit allows for
    every small request.

    `step_tokens`: rows of a step; `dtype`: of the TEE. Attention products are [K, G * T, S] with as
    many keys as the model has positions.
    """
    sizes, heads = [init_reply_bytes(config)], config.num_attention_heads
    products: dict[Operator, int] = {
        "attn_scores": heads * config.max_position_embeddings,
        "attn_values": heads * config.head_dim,
    }
    for operator, placement in policy.leaving():
        # How many numbers come back for each row that was sent, and of how many bytes.
        numbers, itemsize = products.get(operator, config.hidden_size), dtype.itemsize
        if is_projection(operator):
            numbers = config.row_layout(operator)[1][0]
            itemsize = torch.int32.itemsize if policy.arithmetic == "int8" else itemsize
        sizes.append(MaskRules(placement.mask).most_rows(step_tokens) * numbers * itemsize)
    statement = 0 if policy.service.attested == "none" else MAX_STATEMENT_BYTES
    return max(sizes) + _HEADER_BYTES + statement


def init_reply_bytes(config: ModelConfig) -> int:
    """Return a bound in bytes for an Init reply, without its header's fixed part."""
    norms = 2 * config.num_hidden_layers + 1
    return norms * (4 * config.hidden_size + _NORM_BYTES) + 4 * config.head_dim
