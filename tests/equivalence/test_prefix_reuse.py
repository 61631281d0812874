"""What was kept of earlier requests, or comes of another sample's prompt, changes no bit."""

import torch

from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import Request, SamplingSettings
from tests.kit.model import Models, Tee, finish, token_ids
from tests.kit.rows import each_row

DTYPES = ("float32", "bfloat16", "float16", "bfloat16")
POLICIES = ("quantized-clear", "shielded", "shielded-prefill", "dealt")
SHARED = token_ids(40)
WARM = SamplingSettings(temperature=1.5, top_k=50, seed=11)


def _engine(tee: Tee, **settings: object) -> Engine:
    return Engine(tee.model, tee.lanes, EngineSettings(step_tokens=16, **settings))  # type: ignore[arg-type]


def _request(ids: list[int], **settings: object) -> Request:
    wanted: dict[str, object] = {"max_new_tokens": 5, "stop_ids": frozenset(), **settings}
    return Request(prompt_ids=tuple(ids), **wanted)  # type: ignore[arg-type]


def _answers(engine: Engine, request: Request) -> list[tuple[list[int], torch.Tensor]]:
    sequences = engine.admit(request)
    seen: list[list[torch.Tensor]] = [[] for _ in sequences]
    for sampled in finish(engine):
        seen[sequences.index(sampled.sequence)].append(sampled.logits_V)
    return [(s.token_ids, torch.stack(found)) for s, found in zip(sequences, seen, strict=True)]


def _assert_same(
    found: list[tuple[list[int], torch.Tensor]], expected: list[tuple[list[int], torch.Tensor]]
) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, logits), (_, others) in zip(found, expected, strict=True):
        assert torch.equal(logits, others)


@each_row(("policy", "dtype"), zip(POLICIES, DTYPES, strict=True))
def test_with_and_without_reuse_answers_are_the_same(
    saved_model: Models, policy: str, dtype: str
) -> None:
    tee = saved_model("llama", num_hidden_layers=2).tee(policy, dtype)
    texts = [SHARED, [*SHARED[:30], 5, 6, 7], [*SHARED, 9], SHARED]
    engine, reused = _engine(tee, prefix_reuse=True), []
    for ids in texts:
        (expected,) = _answers(_engine(tee), _request(ids))
        before = engine.counts.prefix_hits
        _assert_same(_answers(engine, _request(ids)), [expected])
        reused.append(engine.counts.prefix_hits - before)
    # The last answer but one began with all of the first prompt; a prompt keeps a token for itself.
    assert reused == [0, 30, 40, 39]
    assert engine.counts.prompt_tokens == sum(map(len, texts)) - sum(reused)


def test_keys_that_depend_on_a_sequence_s_length_are_nobody_else_s(saved_model: Models) -> None:
    """Those of Phi-4-mini have other frequencies behind 32 tokens; a draft does not change them."""
    tee, long = saved_model("phi4-mini").tee("quantized-clear"), token_ids(50)
    engine = _engine(tee, prefix_reuse=True)
    for ids, reused in ((long, 0), (long[:24], 0), (long[:26], 24), (long, 0)):
        before = engine.counts.prefix_hits
        (expected,) = _answers(_engine(tee), _request(ids))
        _assert_same(_answers(engine, _request(ids)), [expected])
        assert engine.counts.prefix_hits - before == reused
    # Of twelve tokens, which repeat.
    tee, drafting = saved_model("phi4-mini", vocab_size=12).tee("quantized-clear"), 0
    for length in range(24, 32):
        wanted = _request(token_ids(length, length, vocab_size=12), max_new_tokens=16)
        engine = _engine(tee, speculative_tokens=6)
        _assert_same(_answers(engine, wanted), _answers(_engine(tee), wanted))
        drafting += engine.counts.accepted_tokens
    assert drafting


def test_a_conversation_finds_what_was_said_in_it(saved_model: Models) -> None:
    """Prompt and answer, but for the last token, which is never fed back."""
    tee = saved_model("llama", num_hidden_layers=2).tee("quantized-clear")
    engine = _engine(tee, prefix_reuse=True)
    ((first, _),) = _answers(engine, _request(SHARED))
    longer = _request([*SHARED, *first, 1, 2, 3])
    found = _answers(engine, longer)
    hits = engine.counts.prefix_hits
    assert hits == len(SHARED) + len(first) - 1
    _assert_same(found, _answers(_engine(tee), longer))
    # What is read of a prompt is not left out.
    (sequence,) = engine.admit(_request(SHARED, prompt_logprobs=0))
    finish(engine)
    assert (sequence.reused_tokens, engine.counts.prefix_hits) == (0, hits)
    assert sequence.reader is not None
    assert len(sequence.reader.result().logprobs) == len(SHARED) - 1


def test_what_is_kept_makes_room_for_what_runs(saved_model: Models) -> None:
    tee = saved_model("llama", num_hidden_layers=2).tee("quantized-clear")
    one = _engine(tee).admit(_request(SHARED))[0].cache.nbytes
    engine = _engine(tee, prefix_reuse=True, max_kv_bytes=2 * one)
    for seed in range(4):
        ids = token_ids(40, seed)
        _assert_same(_answers(engine, _request(ids)), _answers(_engine(tee), _request(ids)))
        assert engine.kv_bytes <= 2 * one
    assert engine.kv_bytes == 2 * one
    _answers(engine, _request(SHARED, samples=2))


@each_row(("policy", "prompt"), zip(POLICIES, (1, 2, 40, 17), strict=True))
def test_samples_are_the_same_requests_alone_with_seeds_of_their_own(
    saved_model: Models, policy: str, prompt: int
) -> None:
    tee = saved_model("llama", num_hidden_layers=2).tee(policy)
    ids, engine = token_ids(prompt, seed=3), _engine(tee)
    found = _answers(engine, _request(ids, samples=3, sampling=WARM))
    # The prompt is computed once for all samples; its last step gives each its first token.
    assert (engine.counts.prompt_tokens, engine.counts.generation_tokens) == (prompt, 3 * 5)
    assert engine.counts.steps == -(-prompt // 16) + 4
    assert WARM.seed is not None
    for index, one in enumerate(found):
        seeded = WARM.model_copy(update={"seed": WARM.seed + index})
        alone = _request(ids, sampling=seeded)
        _assert_same([one], _answers(_engine(tee), alone))
    assert len({tuple(tokens) for tokens, _ in found}) == 3
