"""Has dealers multiply pads ahead of use, and looks whether they did.

A dealer is a service of another owner. It is sent a fresh seed for a group of rows of a site, and
returns u = r W of the rows r that it expands from the seed: nothing of it depends on any input, so
it can be asked long before, over a link that is slow. Several dealers each get seeds of their own;
r and u are the sums. Each one's u is checked alone, before it is added: one that lies is named.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy
import torch

from protocol.channel import Channel
from protocol.errors import ReplyError, TsqpError, VerificationError
from protocol.model.config import ModelConfig
from protocol.prepared import PreparedRequest
from protocol.tensors import WireTensor
from tee_side.protect.masks.mask import Seed
from tee_side.protect.pads.store import MadePads
from tee_side.protect.sites import SiteShape
from tee_side.protect.verification import ExactCheck, sums
from tee_side.remote.call import ChannelsAt, ring_request
from tee_side.words import Site

# Requests that a dealer has at once: as many as shared memory has slots (`protocol.shared_memory`),
# or up to twice as many, so that it works on the next site while one is checked.
UNDER_WAY = 8

_EXPECTED = "what the weights of the TEE's own model give"


def holds_in_ring(check: ExactCheck, r_TI: torch.Tensor, u_TO: torch.Tensor) -> bool:
    """Say whether u = r W modulo 2^32, both int32.

    In the ring 2^31 times an even number is 0: a u that is off by a multiple of 2^v and no higher
    power of two passes a vector with probability 2^(v - 32). The least that a dealer can be off by,
    the highest bit alone, so passes with 1/4 for each row that has it, and is then refused where
    the pad is used, with the product (docs/verification.md).
    """
    differs_Tk = sums(u_TO, check.vectors_kO) - sums(r_TI, check.low_kI)
    return not (differs_Tk & 0xFFFFFFFF).any()


class Asked:
    """The products of a site that dealers are asked for, and have not answered yet."""

    def __init__(self, site: SiteShape, request: PreparedRequest) -> None:
        self.site, self._request = site, request
        # Dealer, group of rows, channel, seed and request id.
        self._waiting: list[tuple[int, int, Channel, Seed, int]] = []

    def ask(self, channels: Sequence[Channel], batch: MadePads) -> None:
        """Send each dealer its seeds of a batch. Raises what sending raises."""
        if len(channels) != len(batch.dealers):
            raise ValueError(f"dealers: got {len(channels)}, expected {len(batch.dealers)}")
        for dealer, channel in enumerate(channels):
            for group, key in enumerate(batch.seeds(dealer, self.site.number)):
                seed = Seed(key, (batch.group, self.site.in_features))
                asked = channel.start(*seed.crossing(self._request))
                self._waiting.append((dealer, group, channel, seed, asked))

    def take(self, check: ExactCheck | None, u_NO: torch.Tensor) -> None:
        """Write u, the sum over dealers, to `u_NO`; each one's part is checked.

        Raises VerificationError or ReplyError for one that lies, which is not asked again, and what
        waiting for replies raises.
        """
        groups = u_NO.numpy().reshape(-1, *self._request.reply_shape)
        while self._waiting:
            dealer, group, channel, seed, asked = self._waiting[0]
            exchange = channel.wait(asked)
            del self._waiting[0]
            # The reply may lie where the dealer can still write: copy it once, let go of it, and
            # check the copy.
            own = numpy.empty_like(groups[group]) if dealer else groups[group]
            try:
                numpy.copyto(own, self._request.output(exchange).numpy())
            except ReplyError as of_another_form:
                channel.distrust(exchange, of_another_form)
                raise
            exchange.output = None
            u_TO = torch.from_numpy(own)
            if check is not None and not holds_in_ring(check, seed.elements(), u_TO):
                where = f"pads of {self.site} from {exchange.endpoint}"
                error = VerificationError(where, "a wrong product", _EXPECTED)
                channel.distrust(exchange, error)
                raise error
            if dealer:
                groups[group] += own

    def abandon(self) -> None:
        """Wait for no reply any more."""
        for _, _, channel, _, asked in self._waiting:
            channel.abandon(asked)


class Dealing:
    """The dealers of a run, as who fills its store asks them: by one thread at a time.

    `channels_at`: of the dealers of a layer, for this alone; `check_of`: returns what a site's
    products are checked with, None where the policy believes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        channels_at: ChannelsAt,
        check_of: Callable[[Site], ExactCheck | None],
    ) -> None:
        self.failure: TsqpError | None = None
        self._layers = config.num_hidden_layers
        self._channels_at, self._check_of = channels_at, check_of
        self._lied: TsqpError | None = None

        @lru_cache(maxsize=4 * config.num_hidden_layers + 1)
        def prepared(site: SiteShape, rows: int) -> PreparedRequest:
            elements = WireTensor("int32", (rows, site.in_features), b"")
            found = ring_request(config, site.site, elements)
            found.read_once = True
            return found

        self._prepared = prepared

    def multiply(self, batch: MadePads) -> Iterator[tuple[SiteShape, torch.Tensor]]:
        """Yield u of each site of a batch, while dealers work on the next ones.

        Raises VerificationError for a dealer that lies, or has lied before, and what asking raises.
        """
        asked: deque[Asked] = deque()
        of_site = len(batch.groups)
        most = max(UNDER_WAY, min(2 * of_site, 2 * UNDER_WAY))
        try:
            for site in batch.layout.sites:
                self._refuse_liars()
                while asked and (len(asked) + 1) * of_site > most:
                    yield self._taken(asked, batch)
                asked.append(Asked(site, self._prepared(site, batch.group)))
                asked[-1].ask(self._channels_at(site.layer), batch)
            while asked:
                yield self._taken(asked, batch)
            self._refuse_liars()
        except TsqpError as error:
            self.failure = error
            if isinstance(error, VerificationError | ReplyError):
                self._lied = error
            raise
        finally:
            for one in asked:
                one.abandon()
        self.failure = None

    def accuse(self, where: str) -> VerificationError:
        """Ask no dealer any more, because a pad that was used is wrong; return the error for it."""
        every = chain.from_iterable(map(self._channels_at, range(self._layers)))
        names = " or ".join(dict.fromkeys(channel.endpoint for channel in every))
        error = VerificationError(f"{where}: a pad from {names}", "a wrong product", _EXPECTED)
        self.failure = self._lied = error
        return error

    def _refuse_liars(self) -> None:
        if self._lied is not None:
            raise self._lied

    def _taken(self, asked: deque[Asked], batch: MadePads) -> tuple[SiteShape, torch.Tensor]:
        first = asked[0]
        u_NO = batch.buffer(first.site.number)
        first.take(self._check_of(first.site.site), u_NO)
        asked.popleft()
        return first.site, u_NO
