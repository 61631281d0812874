"""Plays a malicious GPU against the whole trusted side, and never wins.

Services lie in every way that tests.kit.lies knows, stop, come back as others, with other models
or in each other's place, while a runner generates. After every step the tokens and logits are the
right ones, or there was one typed error; no pad was used twice; a retry sends what was sent before;
and no service was the dealer of the same run.

Only the sockets and the clock are not real: a wait for what does not come is over at once.
"""

import itertools
import os
import random
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpu_side.handler import RequestHandler
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights, load_weights
from protocol import channel
from protocol.channel import PendingChannel, Received
from protocol.errors import DeadlineExceededError, TsqpError
from protocol.tensors import Buffer
from tee_side import runner as runner_module
from tee_side.assembly import MaskSettings
from tee_side.policy.placement import load_policy
from tee_side.protect.pads.store import PadStore
from tee_side.remote import call as call_module
from tee_side.remote.call import CallPlan, carry_out
from tee_side.remote.services import connected, member, replicas
from tee_side.runner import Runner, RunnerSettings
from tests.kit.lie import MaliciousService
from tests.kit.lies import RESULT_LIES, WIRE_LIES, Lie, Memory
from tests.kit.model import SavedModel, make_model, token_ids

# The memory of a bomb is for the fuzzer; here it would only take time.
_LARGE = ("oversized", "deep or large containers")
LIES = [lie for lie in (*WIRE_LIES, *RESULT_LIES) if lie.name not in _LARGE]
TIMEOUT_S = 2.0
MAX_BYTES = 2**20
NEW_TOKENS = 2
PROMPTS = tuple(tuple(token_ids(count, seed=40 + count)) for count in (5, 9))
ENDPOINTS = tuple(f"tcp://127.0.0.1:{number}" for number in range(1, 5))
# Of a policy whose pads are dealt.
DEALER = ENDPOINTS[1]


class Clock:
    """Stands for the module `time`: waiting only sets it forward."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def perf_counter_ns(self) -> int:
        # Two moments are never one.
        self.now_ns += 1000
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.wait_until(self.monotonic() + seconds)

    def wait_until(self, moment: float) -> None:
        # A little more: what is compared with `moment` afterwards has been rounded.
        self.now_ns = max(self.now_ns, int(moment * 1e9) + 1000)


class Process(MaliciousService):
    """A service process without a listener. `parts`: what it was in each session, 1 a dealer."""

    listener: Any

    def __init__(self, weights: ServiceWeights, seed: int) -> None:
        self.told = self.requests = 0
        self.memory, self._chance = Memory(), random.Random(seed)
        self._operators = RequestHandler(weights, MAX_BYTES)
        self._plan = self.lying_init = None
        self.listener = Mock()
        self.parts: dict[int, set[bool]] = {}

    def answer(self, client: bytes, frames: Sequence[bytes]) -> list[list[bytes]]:
        """Return the messages that it sends back."""
        self.listener.send.reset_mock()
        with torch.inference_mode():
            views = [memoryview(bytearray(frame)) for frame in frames]
            self._answer(Incoming((client,), views, 0))
        return [list(map(bytes, call.args[1])) for call in self.listener.send.call_args_list]


@dataclass
class World:
    """Which process is where; what was sent in the ring, for how many products, with which pads."""

    clock: Clock = field(default_factory=Clock)
    at: dict[str, Process | None] = field(default_factory=dict)
    session: int = 0
    ring: set[bytes] = field(default_factory=set)
    products: int = 0
    # With the stores themselves, so that no number of one is given to another.
    pads: set[tuple[PadStore, int, int]] = field(default_factory=set)
    repeated: list[tuple[int, int]] = field(default_factory=list)

    @property
    def processes(self) -> set[Process]:
        return {process for process in self.at.values() if process is not None}


class FakeChannel(PendingChannel):
    """A channel whose other end is a process of the world, in the same thread."""

    def __init__(self, world: World, endpoint: str, *, timeout_s: float, **_: object) -> None:
        assert timeout_s == TIMEOUT_S
        super().__init__(endpoint, timeout_s=timeout_s, max_message_bytes=MAX_BYTES)
        self._world = world
        self._process: Process | None = None
        self._name = secrets.token_bytes(8)
        self._arriving: deque[list[bytes]] = deque()

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        self._refuse_second_connection(method)
        world, endpoint = self._world, self.endpoint
        there = world.at[endpoint]
        if self._process is None:
            if there is None:
                world.clock.sleep(timeout_s)
                raise DeadlineExceededError(endpoint, got="nobody", expected="a gpu-service")
            self._process = there
        sent_ns = world.clock.perf_counter_ns()
        if self._process is there:
            message = [bytes(frame) for frame in frames]
            if method != "Init":
                there.parts.setdefault(world.session, set()).add(endpoint == DEALER)
            if method == "RingLinear":
                world.ring.add(message[1])
            self._arriving += there.answer(self._name, message)
        return sent_ns

    def _receive(self, deadline: float) -> Received | None:
        clock = self._world.clock
        if self._arriving:
            frames = self._arriving.popleft()
            return [memoryview(bytearray(frame)) for frame in frames], clock.perf_counter_ns()
        if self._process is not self._world.at[self.endpoint]:
            self._connection += 1
        elif deadline:
            clock.wait_until(deadline)
        return None

    def close(self) -> None:
        self._arriving.clear()


@cache
def _models(folder: Path) -> tuple[SavedModel, ServiceWeights, ServiceWeights]:
    """Return a model, its weights in a service, and those of another model of the same sizes."""
    loaded = []
    for name, seed in (("right", 1), ("other", 2)):
        directory = folder / name
        directory.mkdir()
        reference = make_model(directory, seed=seed, num_hidden_layers=2)
        weights = load_weights(directory, device=torch.device("cpu"), dtype=torch.float32)
        loaded.append((SavedModel(directory, reference), weights))
    return loaded[0][0], loaded[0][1], loaded[1][1]


@cache
def _right_answer(folder: Path, policy: str, prompt: int) -> tuple[list[int], torch.Tensor]:
    """Return tokens and logits of services that do not lie."""
    model, weights, _ = _models(folder)
    world = World(at={endpoint: Process(weights, 0) for endpoint in ENDPOINTS})
    with _patched(world), _open_run(model, policy) as run:
        return _generate(run, prompt)


def _open_run(model: SavedModel, policy: str) -> Runner:
    chosen = load_policy(policy)
    dealers = (DEALER,) if chosen.dealt else ()
    gpu = tuple(endpoint for endpoint in ENDPOINTS if endpoint not in dealers)
    return Runner(
        RunnerSettings(
            model.directory,
            chosen,
            gpu,
            dealers,
            MaskSettings(),
            dealer_in_the_clear=True,
            connect_timeout_s=TIMEOUT_S,
            request_timeout_s=TIMEOUT_S,
        )
    )


def _generate(run: Runner, prompt: int) -> tuple[list[int], torch.Tensor]:
    generation = run.generate(PROMPTS[prompt], max_new_tokens=NEW_TOKENS, with_text=False)
    found = list(generation.steps())
    return [one.token_id for one in found], torch.stack([one.logits_V for one in found])


@contextmanager
def _patched(world: World) -> Iterator[None]:
    """Have runners live in a world, which sees what they do."""
    # A game that is played again ends the same: whether a bit that is flipped below a pad comes
    # through depends on the pad.
    draw = random.Random(0)
    start = PadStore.start

    def read(store: PadStore, indices: range, site: int) -> Any:
        pads = {(store, index, site) for index in indices}
        world.repeated += [pad[1:] for pad in pads & world.pads]
        world.pads |= pads
        return start(store, indices, site)

    def read_all(store: PadStore, indices: range) -> Any:
        return {site: store.start(indices, site)() for site in store.layout.by_number}

    def called(plan: CallPlan, x_TI: Any) -> Any:
        world.products += 1
        return carry_out(plan, x_TI)

    with ExitStack() as patches:
        for owner, name, value in (
            *((module, "time", world.clock) for module in (channel, member, replicas, connected)),
            (os, "urandom", draw.randbytes),
            (secrets, "randbits", draw.getrandbits),
            (runner_module, "open_channel", partial(FakeChannel, world)),
            (PadStore, "start", read),
            (PadStore, "all_factors", read_all),
            (call_module, "carry_out", called),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


# What the adversary does, with up to two endpoints, before the next generation or in it.
KINDS = ("generate", "lie", "all lie", "stop", "restart", "other model", "swap", "copy", "close")


def moves(lies: Sequence[Lie]) -> st.SearchStrategy[list[Any]]:
    places, after, prompts = st.sampled_from(ENDPOINTS), st.integers(0, 6), st.integers(0, 1)
    move = st.tuples(st.sampled_from(KINDS), places, places, st.sampled_from(lies), after, prompts)
    return st.lists(move, min_size=6, max_size=10)


class Game:
    """`ended`: how generations did, of all games."""

    def __init__(self, folder: Path, policy: str, ended: Counter[str]) -> None:
        self.folder, self.policy, self.ended = folder, policy, ended
        self.model, self.weights, self.other = _models(folder)
        self.dealt = load_policy(policy).dealt
        self.world = World()
        self.run: Runner | None = None
        self.seeds = itertools.count()
        self.restart(*ENDPOINTS)

    def close(self) -> None:
        if self.run is not None:
            self.run.close()
        self.run = None

    def restart(self, *endpoints: str, other: bool = False) -> None:
        weights = self.other if other else self.weights
        for endpoint in endpoints:
            self.world.at[endpoint] = Process(weights, next(self.seeds))

    def generate(self, prompt: int) -> None:
        """Generate: what comes out is right, or one typed error."""
        right = _right_answer(self.folder, self.policy, prompt)
        told = sum(process.told for process in self.world.processes)
        try:
            if self.run is None:
                self.world.session += 1
                self.run = _open_run(self.model, self.policy)
            tokens, logits = _generate(self.run, prompt)
        except TsqpError as error:
            self.ended[type(error).__name__] += 1
            # Over; the next begins anew, and where it could not begin, with other services.
            if self.run is None:
                self.restart(*ENDPOINTS)
            self.close()
            return
        assert tokens == right[0], f"prompt {prompt}"
        assert torch.equal(logits, right[1]), f"prompt {prompt}: logits"
        lied = sum(process.told for process in self.world.processes) > told
        self.ended["right after a lie" if lied else "right"] += 1

    def move(self, kind: str, first: str, second: str, lie: Lie, after: int, prompt: int) -> None:
        at = self.world.at
        if kind == "stop":
            at[first] = None
        elif kind in ("restart", "other model"):
            self.restart(first, other=kind == "other model")
        elif kind == "swap":
            at[first], at[second] = at[second], at[first]
        elif kind == "copy":
            at[second] = at[first]
        elif kind == "close":
            self.close()
        else:
            for process in self.world.processes:
                if kind == "all lie" or (kind == "lie" and process is at[first]):
                    process.tell(lie, after)
            self.generate(prompt)

    def check(self) -> None:
        world = self.world
        assert not world.repeated, "a pad was used twice"
        # As many different tensors as products; not one more for all retries.
        assert len(world.ring) <= world.products
        for process in world.processes if self.dealt else ():
            assert all(len(parts) == 1 for parts in process.parts.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("malicious")


def play(
    folder: Path, policy: str, games: int, lies: Sequence[Lie], *phases: Phase
) -> Counter[str]:
    """Play; return how generations ended. Raises AssertionError where the GPU won."""
    ended: Counter[str] = Counter()

    @settings(max_examples=games, phases=phases, deadline=None, derandomize=True, database=None)
    @given(moves(lies))
    def one(played: list[Any]) -> None:
        game = Game(folder, policy, ended)
        with _patched(game.world), closing(game):
            for move in played:
                game.move(*move)
                game.check()

    one()
    return ended


@pytest.mark.parametrize("policy", ["shielded", "dealt"])
def test_a_malicious_gpu_never_wins(folder: Path, policy: str) -> None:
    ended = play(folder, policy, 8, LIES, *Phase)
    # It was neither left alone nor kept from everything.
    good = ended.pop("right"), ended.pop("right after a lie")
    assert min(good) > 0, good
    assert len(ended) > 1, ended
    assert ended.total() > 4, ended


def test_without_verification_it_wins(folder: Path) -> None:
    """The control: a lie about numbers is then believed."""
    path = folder / "trusting.toml"
    text = (files("tee_side") / "policy" / "builtin" / "shielded.toml").read_text(encoding="utf-8")
    path.write_text(text.replace('verify = "freivalds"', 'verify = "none"'), encoding="utf-8")
    # The shortest way to it is of no interest.
    with pytest.raises(AssertionError, match="prompt"):
        play(folder, str(path), 100, RESULT_LIES, Phase.generate)
