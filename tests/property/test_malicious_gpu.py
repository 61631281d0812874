"""Plays a malicious GPU against the whole trusted side, and never wins.

Services lie in every way that tests.kit.lies knows, stop, come back as others, with other models
or in each other's place, while a runner generates. After every step the tokens and logits are the
right ones, or there was one typed error within the deadline and a second; no pad was used twice; a
retry sends what was sent before; and no service saw both shares of anything.

Only the sockets and the clock are not real: a wait for what does not come is over at once.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from gpu_side.encoding import Form, encode_reply, open_request, read_request
from gpu_side.handler import RequestHandler
from gpu_side.weights import ServiceWeights, load_weights
from protocol import pending
from protocol.errors import DeadlineExceededError, ErrorCode, ProtocolError, TsqpError
from protocol.messages import HealthRequest, InitRequest, Response
from protocol.pending import PendingChannel, Received
from protocol.tensors import Buffer
from tee_side import runner as runner_module
from tee_side.assembly import MaskSettings
from tee_side.policy.placement import load_policy
from tee_side.protect.pads.store import PadStore
from tee_side.remote import linear as linear_module
from tee_side.remote.call import CallPlan, carry_out
from tee_side.remote.services import connected, member, replicas
from tee_side.runner import Runner, RunnerSettings
from tests.kit.lies import REORDERED, RESULT_LIES, WIRE_LIES, Lie, Memory, Occasion
from tests.kit.model import SavedModel, make_model, token_ids

# The memory of a bomb is for the fuzzer; here it would only take time.
_LARGE = ("oversized", "deep or large containers")
LIES = [lie for lie in (*WIRE_LIES, *RESULT_LIES) if lie.name not in _LARGE]
TIMEOUT_S = 2.0
MAX_BYTES = 2**20
NEW_TOKENS = 2
PROMPTS = tuple(tuple(token_ids(count, seed=40 + count, vocab_size=64)) for count in (5, 9))
ENDPOINTS = tuple(f"tcp://127.0.0.1:{number}" for number in range(1, 5))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


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


class Process:
    """A service process: its name, its model, and what the adversary told it."""

    def __init__(self, weights: ServiceWeights, seed: int) -> None:
        self.operators = RequestHandler(weights, MAX_BYTES)
        self.chance = random.Random(seed)
        self.memory = Memory()
        # For each of the next requests.
        self.plan: deque[Lie | None] = deque()
        self.told = 0
        # Shares that it was sent, by the session that sent them.
        self.shares: dict[int, set[int]] = {}

    def answer(self, client: bytes, frames: Sequence[bytes]) -> list[list[bytes]]:
        """Return the messages that it sends back."""
        opened = open_request([memoryview(bytearray(f)) for f in frames], MAX_BYTES)
        request = read_request(opened)
        memory, compute = self.memory, self._compute
        response: Response | ErrorCode
        try:
            response = compute(request)
        except ProtocolError as error:
            response = error.code
        if isinstance(response, ErrorCode) or isinstance(request, InitRequest):
            honest = encode_reply(Form.FRAMED, opened.request_id, opened.method, response)
            return [[bytes(frame) for frame in honest]]
        occasion = Occasion(
            client, request, opened.request_id, response, compute, memory, self.chance
        )
        lie = self.plan[0] if self.plan else None
        # Swapping two replies takes two requests.
        if self.plan and (lie is not REORDERED or memory.held is not None):
            self.plan.popleft()
        sent, memory.owed = [*memory.owed], []
        sent += [occasion.encoded()] if lie is None else lie.tell(occasion)
        self.told += lie is not None
        memory.earlier.append((client, occasion.encoded()))
        memory.results.append(occasion.output)
        del memory.earlier[:-8], memory.results[:-8]
        return sent

    def _compute(self, request: Any) -> Response:
        if isinstance(request, HealthRequest):
            raise ProtocolError("Health", got="it", expected="", code=ErrorCode.UNKNOWN_METHOD)
        with torch.inference_mode():
            return self.operators.apply(request)[0]


@dataclass
class World:
    """Which process is at which endpoint, and what was sent in the ring."""

    clock: Clock
    at: dict[str, Process | None]
    session: int = 0
    ring: set[bytes] = field(default_factory=set)


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
            share = int(endpoint[-1]) % 2
            if method != "Init":
                there.shares.setdefault(world.session, set()).add(share)
            if method in ("RingLinear", "SeededRingLinear"):
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
        reference = make_model(directory, seed=seed, **SIZES)
        weights = load_weights(directory, device=torch.device("cpu"), dtype=torch.float32)
        loaded.append((SavedModel(directory, reference), weights))
    return loaded[0][0], loaded[0][1], loaded[1][1]


@cache
def _right_answer(folder: Path, policy: str, prompt: int) -> tuple[list[int], torch.Tensor]:
    """Return tokens and logits of services that do not lie."""
    model, weights, _ = _models(folder)
    world = World(Clock(), {})
    world.at = {endpoint: Process(weights, 0) for endpoint in ENDPOINTS}
    with _patched(world, Witness()), _open_run(model, policy) as run:
        return _generate(run, prompt)


def _open_run(model: SavedModel, policy: str) -> Runner:
    chosen, gpu = load_policy(policy), ENDPOINTS
    if chosen.services > 1:
        gpu = tuple(f"{endpoint},share={1 + n % 2}" for n, endpoint in enumerate(ENDPOINTS))
    return Runner(
        RunnerSettings(
            model.directory,
            chosen,
            gpu,
            MaskSettings(calibration=model.calibration),
            shares_in_the_clear=True,
            connect_timeout_s=TIMEOUT_S,
            request_timeout_s=TIMEOUT_S,
        )
    )


def _generate(run: Runner, prompt: int) -> tuple[list[int], torch.Tensor]:
    generation = run.generate(PROMPTS[prompt], max_new_tokens=NEW_TOKENS, with_text=False)
    found = list(generation.steps())
    return [one.token_id for one in found], torch.stack([one.logits_V for one in found])


class Witness:
    """Looks on: which pads were read, how many products there were, how long a reply took."""

    def __init__(self) -> None:
        self.pads: set[tuple[int, int, int]] = set()
        self.repeated: list[tuple[int, int, int]] = []
        self.products = 0
        self.longest_s = 0.0
        # Kept, so that no number of a store is given to another.
        self._stores: dict[int, PadStore] = {}

    def read(self, store: PadStore, indices: range, site: int) -> None:
        self._stores[id(store)] = store
        for index in indices:
            pad = id(store), index, site
            if pad in self.pads:
                self.repeated.append(pad)
            self.pads.add(pad)


@contextmanager
def _patched(world: World, witness: Witness) -> Iterator[None]:
    """Have runners live in a world, under the eyes of a witness."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pending, member, replicas, connected):
            patch.setattr(module, "time", world.clock)
        # A game that is played again ends the same: whether a bit that is flipped below a pad comes
        # through depends on the pad.
        draw = random.Random(0)
        patch.setattr(os, "urandom", draw.randbytes)
        patch.setattr(secrets, "randbits", draw.getrandbits)
        patch.setattr(
            runner_module,
            "open_channel",
            lambda endpoint, **settings: FakeChannel(world, endpoint, **settings),
        )
        factors, wait = PadStore.factors, replicas.Replicas.wait

        def read(store: PadStore, indices: range, site: int) -> Any:
            witness.read(store, indices, site)
            return factors(store, indices, site)

        def read_all(
            store: PadStore, indices: range
        ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
            return {site: store.factors(indices, site) for site in store.layout.by_number}

        def called(plan: CallPlan, x_TI: Any) -> Any:
            witness.products += 1
            return carry_out(plan, x_TI)

        def waited(channel: replicas.Replicas, request_id: int) -> Any:
            began = world.clock.monotonic()
            try:
                return wait(channel, request_id)
            finally:
                witness.longest_s = max(witness.longest_s, world.clock.monotonic() - began)

        patch.setattr(PadStore, "factors", read)
        patch.setattr(PadStore, "all_factors", read_all)
        patch.setattr(linear_module, "carry_out", called)
        patch.setattr(replicas.Replicas, "wait", waited)
        yield


endpoints = st.sampled_from(ENDPOINTS)
prompts = st.integers(0, len(PROMPTS) - 1)


class MaliciousGpu(RuleBasedStateMachine):
    """`folder`, `policy`, `ended` (how generations did): set on a subclass for each test."""

    folder: Path
    policy: str
    ended: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.model, self.weights, self.other = _models(self.folder)
        self.world = World(Clock(), {})
        self.witness = Witness()
        self.services = load_policy(self.policy).services
        self.stack = ExitStack()
        self.stack.enter_context(_patched(self.world, self.witness))
        self.run: Runner | None = None
        self.wrong: list[str] = []
        self.seed = 0

    def teardown(self) -> None:
        if self.run is not None:
            self.run.close()
        self.stack.close()

    def _process(self, weights: ServiceWeights | None = None) -> Process:
        self.seed += 1
        return Process(weights or self.weights, self.seed)

    @initialize()
    def begin(self) -> None:
        self.world.at = {endpoint: self._process() for endpoint in ENDPOINTS}

    @rule(prompt=prompts)
    def generate(self, prompt: int) -> None:
        """Generate: what comes out is right, or one typed error."""
        right = _right_answer(self.folder, self.policy, prompt)
        told = sum(self._lies())
        try:
            if self.run is None:
                self.world.session += 1
                self.run = _open_run(self.model, self.policy)
            tokens, logits = _generate(self.run, prompt)
        except TsqpError as error:
            self.ended[type(error).__name__] += 1
            # Over; the next begins anew, and where it could not begin, with other services.
            if self.run is None:
                self.begin()
            else:
                self.run.close()
            self.run = None
            return
        if tokens != right[0] or not torch.equal(logits, right[1]):
            self.wrong.append(f"prompt {prompt}: {tokens}, not {right[0]}")
        self.ended["right after a lie" if sum(self._lies()) > told else "right"] += 1

    def _lies(self) -> Iterator[int]:
        return (process.told for process in self.world.at.values() if process is not None)

    @rule(prompt=prompts, endpoint=endpoints, lie=st.sampled_from(LIES), after=st.integers(0, 6))
    def lie(self, prompt: int, endpoint: str, lie: Lie, after: int) -> None:
        """Have one of them lie, and generate."""
        process = self.world.at[endpoint]
        if process is not None:
            process.plan += [*[None] * after, lie]
        self.generate(prompt)

    @rule(prompt=prompts, lie=st.sampled_from(LIES), after=st.integers(0, 6))
    def all_lie(self, prompt: int, lie: Lie, after: int) -> None:
        """Have all of them lie, and generate."""
        for process in {process for process in self.world.at.values() if process is not None}:
            process.plan += [*[None] * after, lie]
        self.generate(prompt)

    @rule(endpoint=endpoints)
    def stop(self, endpoint: str) -> None:
        self.world.at[endpoint] = None

    @rule(endpoint=endpoints)
    def restart(self, endpoint: str) -> None:
        self.world.at[endpoint] = self._process()

    @rule(endpoint=endpoints)
    def restart_with_another_model(self, endpoint: str) -> None:
        self.world.at[endpoint] = self._process(self.other)

    @rule(first=endpoints, second=endpoints)
    def change_places(self, first: str, second: str) -> None:
        at = self.world.at
        at[first], at[second] = at[second], at[first]

    @rule(first=endpoints, second=endpoints)
    def answer_in_two_places(self, first: str, second: str) -> None:
        self.world.at[second] = self.world.at[first]

    @rule()
    def begin_another_session(self) -> None:
        if self.run is not None:
            self.run.close()
        self.run = None

    @invariant()
    def right_or_one_typed_error(self) -> None:
        assert not self.wrong, self.wrong

    @invariant()
    def within_the_deadline(self) -> None:
        assert self.witness.longest_s <= TIMEOUT_S + 1

    @invariant()
    def no_pad_is_used_twice(self) -> None:
        assert not self.witness.repeated

    @invariant()
    def what_is_sent_again_is_the_same(self) -> None:
        """As many different tensors as products, a share each; not one more for all retries."""
        assert len(self.world.ring) <= self.witness.products * self.services

    @invariant()
    def nobody_saw_both_shares(self) -> None:
        if self.services == 1:
            return
        for process in self.world.at.values():
            if process is not None:
                assert all(len(shares) == 1 for shares in process.shares.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("malicious")


def play(folder: Path, policy: str, *, games: int = 300, controlled: bool = True) -> Counter[str]:
    """Play; return how generations ended. Raises AssertionError where the GPU won.

    `controlled`: it should, and the shortest way to it is of no interest.
    """
    ended: Counter[str] = Counter()
    fields = {"folder": folder, "policy": policy, "ended": ended}
    machine = type("Machine", (MaliciousGpu,), fields)
    run_state_machine_as_test(
        machine,
        settings=settings(
            # A way to win has to be met with; it ends the search.
            max_examples=games,
            stateful_step_count=14,
            phases=[Phase.generate] if controlled else list(Phase),
            deadline=None,
            derandomize=True,
            database=None,
            print_blob=False,
        ),
    )
    return ended


@pytest.mark.parametrize("policy", ["shielded", "two-server"])
def test_a_malicious_gpu_never_wins(folder: Path, policy: str) -> None:
    ended = play(folder, policy, games=8, controlled=False)
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
    with pytest.raises(AssertionError, match="prompt"):
        play(folder, str(path))
