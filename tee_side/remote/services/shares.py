"""Which service gets which share, where a policy has two, and who could read both.

No link that shares depend on is in the clear unless the operator says so. Imported for policies of
two shares alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.endpoint import is_beyond_loopback, parse_endpoint
from protocol.errors import SettingsError
from tee_side.remote.services.plan import ServiceSpec, require
from tee_side.words import LayerRange

if TYPE_CHECKING:
    from protocol.curve import ClientKeys


def give_shares(specs: Sequence[ServiceSpec], needed: int, uses: str) -> tuple[ServiceSpec, ...]:
    """Return the services with their shares, of as many as are `needed`. See `assign_shares`.

    `uses`: what the policy expects, for errors. Raises SettingsError.
    """
    said = [spec for spec in specs if spec.share is not None]
    if not said:
        return _by_position(specs)
    for spec in specs:
        expected = "share= for all of them, or for none"
        require(spec.share is not None, f"{said[0]} and {spec}", expected)
    for share in range(1, needed + 1):
        there = any(spec.share == share for spec in specs)
        require(there, f"no service for share {share} beside {said[0]}", uses)
    return tuple(specs)


def _by_position(specs: Sequence[ServiceSpec]) -> tuple[ServiceSpec, ...]:
    hosts: dict[str, ServiceSpec] = {}
    found: list[ServiceSpec] = []
    for spec in specs:
        alike = [other for other in specs if _overlap(spec.layers, other.layers)]
        require(
            len(alike) <= 2,
            f"{' and '.join(map(str, alike))} without share=",
            "share=1 or share=2 for each: services with the same share stand in for each other,"
            " and belong to one owner",
        )
        given = replace(spec, share=1 if alike[0] is spec else 2)
        found.append(given)
        if is_beyond_loopback(spec.endpoint):
            other = hosts.setdefault(parse_endpoint(spec.endpoint).host.lower(), given)
            require(
                other.share == given.share,
                f"{other.endpoint} and {spec.endpoint} on one host, with a share each",
                "hosts of two owners, or share= for each where that host is no owner's (a gateway)",
            )
    return tuple(found)


def _overlap(one: LayerRange | None, other: LayerRange | None) -> bool:
    return one is None or other is None or one.first in other or other.first in one


def keep_apart(
    specs: Sequence[ServiceSpec],
    keys: Sequence[ClientKeys | None],
    policy: str,
    *,
    shares_in_the_clear: bool,
) -> bool:
    """Refuse links from which one party could read two shares; return whether all are encrypted.

    See `check_links`; `policy`: its name. Raises SettingsError.
    """
    holders: dict[bytes, ServiceSpec] = {}
    secured = True
    for spec, own in zip(specs, keys, strict=True):
        if spec.endpoint.startswith("https://"):
            # What ends TLS there has one key, however many paths and services are behind it.
            ends_at = spec.endpoint.split("/")[2].lower().removesuffix(":443").encode()
            other = holders.setdefault(ends_at, spec)
            got = f"{other.endpoint} and {spec.endpoint}, behind one end of TLS, a share each"
            require(other.share == spec.share, got, "hosts of two owners")
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
            to_host = spec.endpoint.startswith(("vsock:", "ivshmem:"))
            leaves = is_beyond_loopback(spec.endpoint) or to_host
            require(
                shares_in_the_clear and not leaves,
                f"{spec.endpoint} without keys",
                "--identity and --service-key (tcp:// and ipc:// can have them): an observer of all"
                f" links of policy {policy} adds the shares and reads prompt and answer"
                + ("" if leaves else "; on one machine, --shares-in-the-clear allows that"),
            )
    return secured
