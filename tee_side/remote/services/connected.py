"""All services of a run: connected, checked, and found by layer."""

import math
import time
from collections.abc import Sequence

from protocol.channel import Channel
from protocol.errors import AbsentError, DeadlineExceededError, EndpointError
from protocol.prepared import Traffic
from tee_side.remote.services.member import TURN_S, ConnectOptions, Instances, Member
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import Replicas, aggregate_errors

# A start that takes longer says what it waits for.
TELL_S = 1.0
# How long a start waits for services that others stand in for.
_GRACE_S = 1.0


class Services:
    """The services of a run, once `connect` has found them.

    `groups`: of `plan_services`; none where nothing leaves the TEE. What is for an owner goes to
    its own group and to no other, whatever fails. `traffic`: of all of them.
    """

    def __init__(
        self, groups: Sequence[ReplicaGroup], num_layers: int, options: ConnectOptions
    ) -> None:
        self.traffic = Traffic()
        instances, timeout_s = Instances(), options.timeout_s
        self._groups = tuple(
            Replicas(
                [Member(one, group, options, instances, self.traffic) for one in group.endpoints],
                timeout_s=timeout_s,
                traffic=self.traffic,
            )
            for group in groups
        )
        by_owner = sorted(zip(groups, self._groups, strict=True), key=lambda pair: pair[0].dealer)
        self._at: tuple[tuple[Channel, ...], ...] = tuple(
            tuple(channel for group, channel in by_owner if group.first <= layer <= group.last)
            for layer in range(num_layers)
        )

    @property
    def connected(self) -> int:
        """How many services are connected."""
        return sum(one.session is not None for group in self._groups for one in group.members)

    @property
    def waits(self) -> bool:
        """Whether a request waits for a service that was lost. Any thread may ask."""
        return any(group.waits for group in self._groups)

    def at(self, layer: int) -> tuple[Channel, ...]:
        """Return the channels of a layer: the service's, then each dealer's."""
        return self._at[layer]

    def connect(self, timeout_s: float) -> None:
        """Connect to all, and check what they hold before anything secret is sent.

        A service that is not there is waited for, or where another stands in for it left out, with
        a warning. What refuses us and has no stand-in is not waited for.
        When the time is up, each that is missing gets a last turn, of a moment.
        Raises ModelMismatchError, ReplyError, ProtocolError and SettingsError (one process at two
        endpoints) in any case, DeadlineExceededError and EndpointError where no other stands in.
        """
        deadline = time.monotonic() + timeout_s
        tell = time.monotonic() + TELL_S
        late = False
        members = [(group, member) for group in self._groups for member in group.members]
        while (missing := [pair for pair in members if pair[1].session is None]) and not late:
            enough = all(group.is_ready for group in self._groups)
            if enough:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            until, now = deadline, time.monotonic()
            if late := now >= until:
                # What has come while this process was stopped was not looked at yet.
                until = now + TURN_S
            for group, member in missing:
                turn = until if len(missing) == 1 else min(until, time.monotonic() + TURN_S)
                member.try_connect(min(turn, tell))
                if member.quarantined is not None:
                    raise member.quarantined
                may_come = len(group.members) > 1 or isinstance(member.error, AbsentError)
                if isinstance(member.error, EndpointError) and not may_come:
                    raise member.error
            if not enough and time.monotonic() >= tell:
                tell = math.inf
                for group, member in missing:
                    if not group.is_ready:
                        member.log_waiting(deadline, "--connect-timeout-s")
        for group in self._groups:
            if not group.is_ready:
                errors = {one.endpoint: one.error or _silent(one.endpoint) for one in group.members}
                # A lone one that has said what is wrong is not said to be late.
                silent = any(isinstance(one, DeadlineExceededError) for one in errors.values())
                waited_s = timeout_s if silent or len(errors) > 1 else None
                raise aggregate_errors("Init", errors, waited_s)
        for _, member in missing:
            member.log("service_missing", member.error or _silent(member.endpoint))

    def close(self) -> None:
        """Disconnect from all."""
        for group in self._groups:
            group.close()


def _silent(endpoint: str) -> DeadlineExceededError:
    return DeadlineExceededError(endpoint, "no answer yet", "a reply to Init")
