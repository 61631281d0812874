"""Which service is asked for what: `--gpu` and `--dealer ENDPOINT[=LAYERS]`, laid over a model.

Services with the same layers stand in for each other. A dealer multiplies pads, and is of another
owner than the service and than every other dealer. The ranges of layers of each owner must cover
the model without overlapping. No link is in the clear that hides what only two parties together may
know, unless the operator says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
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
WITHOUT_SHARES = "no share: --gpu names the service, and --dealer who multiplies its pads"
_ALL_LAYERS = LayerRange(0, None)
_SUFFIXES = re.compile(rf"(.+?)(?:=({LAYER_RANGE}))?")
# A header with its method, dtypes and shapes, and the lengths and padding around frames.
_HEADER_BYTES = 16 * 1024
# What Init says of each norm beside its weight: a name, dtype, shape, eps, and a frame's padding.
_NORM_BYTES = 512


def _require(holds: object, got: object, expected: str, option: str = "--gpu") -> None:
    SettingsError.unless(holds, option, str(got), expected)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One `--gpu`, or the `--dealer` of this number, from 1."""

    endpoint: str
    layers: LayerRange = _ALL_LAYERS
    dealer: int = 0

    @staticmethod
    def parse(text: str, option: str = "--gpu") -> ServiceSpec:
        """Read what a person wrote. Raises SettingsError and EndpointError.

        A path may hold `=` and `,`: only what looks like a range at its end is one.
        """
        match = _SUFFIXES.fullmatch(text)
        endpoint, layers = match.groups() if match else (text, None)
        _require(",columns" not in endpoint, repr(text), WITHOUT_COLUMNS, option)
        _require(",share" not in endpoint, repr(text), WITHOUT_SHARES, option)
        # Neither = nor , is in a host, a port, a number or a path of ours.
        no_path = endpoint.startswith(("tcp://", "vsock://", "http://", "https://"))
        _require(
            not (no_path and set("=,") & set(endpoint)),
            repr(text),
            "ENDPOINT[=LAYERS], LAYERS such as 0-7, 8- or 3",
            option,
        )
        parse_endpoint(endpoint)
        with SettingsError.instead_of(ValueError, option, repr(text), "a range that runs forwards"):
            found = LayerRange.parse(layers) if layers else _ALL_LAYERS
        return ServiceSpec(endpoint, found)

    def __str__(self) -> str:
        return f"{self.endpoint}{'' if self.layers == _ALL_LAYERS else f'={self.layers}'}"


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Services of one owner that stand in for each other; `last` is included.

    `dealer`: its number, 0 for the service.
    """

    dealer: int
    first: int
    last: int
    endpoints: tuple[str, ...]

    def __str__(self) -> str:
        dealer = f", pads of dealer {self.dealer}" if self.dealer else ""
        return f"layers {LayerRange(self.first, self.last)}{dealer}"


def read_services(
    gpu: Sequence[str] | None, dealers: Sequence[str], policy: Policy
) -> tuple[ServiceSpec, ...]:
    """Return the services that a policy uses, and behind them its dealers: none, if nothing leaves.

    `gpu`: None for the dealers alone. Dealers of the same layers have numbers of their own. Raises
    SettingsError for too few, one twice, dealers of a policy that has no pads dealt, and two owners
    on one host.
    """
    name = f"policy {policy.name}"
    _require(policy.dealt or not dealers, " ".join(dealers), f"no dealer, under {name}", "--dealer")
    if not policy.services:
        return ()
    _require(gpu or gpu is None, "no endpoint", f"a gpu-service, which {name} uses")
    needed = f"a gpu-service of another owner, which multiplies pads for {name}"
    _require(dealers or not policy.dealt, "no endpoint", needed, "--dealer")
    found = [ServiceSpec.parse(text) for text in gpu or ()]
    for text in dealers:
        spec = ServiceSpec.parse(text, "--dealer")
        alike = {one.dealer for one in found if one.layers.overlaps(spec.layers)}
        found.append(replace(spec, dealer=next(n for n in count(1) if n not in alike)))
    seen: dict[str, ServiceSpec] = {}
    hosts: dict[str, ServiceSpec] = {}
    for spec in found:
        if (other := seen.setdefault(spec.endpoint, spec)) is not spec:
            raise one_service(other, spec, spec.dealer or other.dealer)
        if is_beyond_loopback(spec.endpoint):
            other = hosts.setdefault(parse_endpoint(spec.endpoint).host.lower(), spec)
            got = f"{other.endpoint} and {spec.endpoint} on one host"
            _require(other.dealer == spec.dealer, got, "hosts of two owners", "--dealer")
    return tuple(found)


def dealer_names(
    specs: Sequence[ServiceSpec], keys: Sequence[ClientKeys | None]
) -> tuple[str, ...]:
    """Return of each dealer a name that no other has: keys, or endpoints without any; layers."""
    names: dict[int, list[str]] = {}
    for spec, own in zip(specs, keys, strict=True):
        if spec.dealer:
            name = own.service.decode() if own else spec.endpoint
            layers = "" if spec.layers == _ALL_LAYERS else f"={spec.layers}"
            names.setdefault(spec.dealer, []).append(name + layers)
    return tuple(" ".join(sorted(set(names[dealer]))) for dealer in sorted(names))


def plan_services(specs: Sequence[ServiceSpec], num_layers: int) -> tuple[ReplicaGroup, ...]:
    """Say which services are asked for which layers, in order, the dealers last. See the module.

    `specs`: of `read_services`. Raises SettingsError, which names both where two do not fit.
    """
    groups: dict[tuple[int, int, int], list[ServiceSpec]] = {}
    for spec in specs:
        first, last = spec.layers.first, spec.layers.last
        last = num_layers - 1 if last is None else last
        within = f"layers within 0-{num_layers - 1}, the model's"
        _require(max(first, last) < num_layers, spec, within)
        groups.setdefault((spec.dealer, first, last), []).append(spec)
    ordered = sorted(groups.items())
    end = (num_layers, num_layers, "the model's end")
    for owner in dict.fromkeys(owner for owner, _, _ in sorted(groups)):
        # Its parts, in order, have each layer once.
        option = "--dealer" if owner else "--gpu"
        parts = [(first, last, alike[0]) for (its, first, last), alike in ordered if its == owner]
        begin, before = 0, "the model's first layer"
        for first, last, named in (*parts, end):
            _require(
                first <= begin,
                f"no service for layers {LayerRange(begin, first - 1)}, between {before} and"
                f" {named}",
                f"each of the layers 0-{num_layers - 1}, of each owner",
                option,
            )
            overlap = f"{before} and {named}, which overlap"
            _require(first >= begin, overlap, "the same layers, or none in common", option)
            begin, before = last + 1, str(named)
    return tuple(
        ReplicaGroup(*where, tuple(spec.endpoint for spec in alike)) for where, alike in ordered
    )


def check_links(
    specs: Sequence[ServiceSpec],
    keys: Sequence[ClientKeys | None],
    policy: Policy,
    *,
    dealer_in_the_clear: bool,
) -> bool:
    """Refuse links on which one party could be two owners; return whether all are encrypted.

    The holder of a key that service and dealer have can be both, and an observer of links without
    keys takes the pad that crosses one from what crosses the other. Of https:// the host's name
    stands for the key. `specs`: of `read_services`. `dealer_in_the_clear`: allow links without keys
    that do not leave this machine. Raises SettingsError, also for keys of a stream, and for none
    where services have to be attested.
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
    if not policy.dealt:
        return True
    holders: dict[bytes, ServiceSpec] = {}
    secured = True
    for spec, own in zip(specs, keys, strict=True):
        if spec.endpoint.startswith("https://"):
            # What ends TLS there has one key, however many paths and services are behind it.
            ends_at = spec.endpoint.split("/")[2].lower().removesuffix(":443").encode()
            other = holders.setdefault(ends_at, spec)
            got = f"{other.endpoint} and {spec.endpoint}, behind one end of TLS"
            _require(other.dealer == spec.dealer, got, "two ends of two owners", "--dealer")
        elif own is not None:
            other = holders.setdefault(own.service, spec)
            SettingsError.unless(
                other.dealer == spec.dealer,
                "--service-key",
                f"one key for {other.endpoint} and {spec.endpoint}",
                "one --service-key for each --gpu and then each --dealer, and different keys for"
                " different owners, who do not collude",
            )
        else:
            secured = False
            leaves = is_beyond_loopback(spec.endpoint) or spec.endpoint.startswith(
                ("vsock:", "ivshmem:")
            )
            _require(
                dealer_in_the_clear and not leaves,
                f"{spec.endpoint} without keys",
                "--identity and --service-key (tcp:// and ipc:// can have them): an observer of all"
                f" links of policy {policy.name} takes the pads away and reads prompt and answer"
                + ("" if leaves else "; on one machine, --dealer-in-the-clear allows that"),
                "--dealer" if spec.dealer else "--gpu",
            )
    return secured


def one_service(first: object, second: object, dealer: int) -> SettingsError:
    """Refuse two names of one service: it would be two owners, or be asked again once it lied.

    `dealer`: its number, where one of them is a dealer. Against a mistake, not against a lie.
    """
    same = str(first) == str(second)
    twice = f"{first} twice" if same else f"{first} and {second}, one and the same"
    expected = "services of two owners, who do not collude" if dealer else "each service once"
    return SettingsError("--dealer" if dealer else "--gpu", twice, expected)


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
