"""Real processes, small random models and free endpoints for tests."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from gpu_side.weights import ServiceWeights, load_weights
from protocol import native
from protocol.messages import (
    Request,
    Timing,
)
from protocol.model.checkpoint import Checkpoint, Shapes
from protocol.tensors import torch_dtype
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.engine import DEFAULT_STEP_TOKENS, Engine, EngineSettings
from tee_side.engine.step import Part, Sampled, run_step
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.model.operators import MicroBatchOperators, TeeModel, load_tee_model
from tee_side.observer import Observers
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.pads.source import Pads
from tee_side.protect.randomness import Randomness
from tee_side.words import LAYERLESS, OPERATORS, PadsFrom, Phase, Verify
from tests.kit.kernels import check_kernels
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.research.provisioning import provision
from tsqp.mask_kinds import FeatureMask

# Small, but with more than one query head per key/value head and a head_dim of its own.
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}

_WINDOW = {"sliding_window": 5}
# Layers with and without a window.
_LISTED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0}

# Of each kind the name of its classes in transformers, and settings in which what it differs by
# shows: the numbers are far from those that change nothing, and windows are short.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "ministral": ("Ministral", _WINDOW),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": _YARN
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
            | {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        _LISTED
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", _LISTED | {"query_pre_attn_scalar": 24}),
    "phi3": ("Phi3", _WINDOW),
    "phi4-mini": (
        "Phi3",
        {
            # Between a prompt of 24 tokens and what is generated.
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(3)],
                "long_factor": [2.0 + 0.5 * i for i in range(3)],
            },
        },
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
        | {"logits_scaling": 4.0},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _LISTED),
    "exaone4": ("Exaone4", _LISTED),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", _LISTED),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "ernie4.5": ("Ernie4_5", {"use_bias": True}),
    "helium": ("Helium", {"attention_bias": True, "head_dim": 8}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "attention_bias": True,
            "rope_parameters": _ROPE | {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", _WINDOW),
    "nemotron": ("Nemotron", {"mlp_bias": True}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True}),
    "cwm": ("Cwm", _LISTED | {"rope_parameters": _ROPE}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "apertus": ("Apertus", {"rope_parameters": _ROPE}),
}
# Those that differ from Llama by little, and run with whatever is tried under several policies.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# Without a size of heads of its own: it is hidden_size / num_attention_heads.
_NO_HEAD_DIM = {"qwen2", "phi3", "phi4-mini", "granite", "olmo2", "olmo3", "exaone4", "smollm3"} | {
    *("cohere", "cohere2", "stablelm", "starcoder2", "apertus")
}


def make_model(
    directory: Path, kind: str = "llama", seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """Save a random model of one kind, and return it in eval mode.

    Weights are larger than transformers' default and norms and biases are not constant, so that a
    mistake in any operator is visible in the logits.
    """
    name, own = KINDS[kind]
    settings = {**SIZES, **copy.deepcopy(own), **overrides}
    if kind in _NO_HEAD_DIM:
        settings.pop("head_dim")
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif parameter.dim() < 2:
                parameter.copy_(0.5 + 0.2 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.eval()
    model.save_pretrained(directory)
    return model


# Policies that need nothing but a model and a service, and compute in floats without masks.
POLICIES = ("tee-only", "published", "attention-in-tee")


def _files(directory: Path) -> tuple[tuple[Path, int], ...]:
    """Return what changes where a file of a directory has changed."""
    return tuple(sorted((file, file.stat().st_mtime_ns) for file in directory.iterdir()))


def served_weights(directory: Path, dtype: str) -> ServiceWeights:
    """Load weights once for all tests: a service changes none. Not where a file has changed."""
    return _loaded(_files(directory), directory, dtype, native.choice())


@lru_cache(maxsize=16)
def _loaded(_files: object, directory: Path, dtype: str, _kernels: native.Choice) -> ServiceWeights:
    with pytest.MonkeyPatch.context() as patch:
        # Tried once for all tests, as a process does for all that it loads.
        patch.setattr("gpu_side.cuda.products.check_kernels", check_kernels)
        return load_weights(directory, device=torch.device("cpu"), dtype=torch_dtype(dtype))


class _Known(Checkpoint):
    """A directory whose digests are computed once for all tests, where no file has changed."""

    _digests: ClassVar[dict[object, str]] = {}

    def digest(self, start: bytes, tensors: Shapes, rows: int) -> str:
        key = _files(self.directory), start, tuple(tensors)
        if key not in self._digests:
            self._digests[key] = super().digest(start, tensors, rows)
        return self._digests[key]


class LoopbackChannel(RecordingChannel):
    """A channel to the service's operators in this process, every message through the wire form.

    `requests` keeps what was asked, in order. What it was told of limits is kept, too, and held: no
    message of either side is larger. A test overrides `answer` to answer something else.
    """

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        super().__init__(served_weights(directory, dtype), "loopback")
        self.requests: list[Request] = []
        self.one_connection = False
        self.max_reply_bytes: int | None = None
        self.max_message_bytes: int | None = None

    def submit(
        self,
        request: Request,
        timeout_s: float | None = None,
        *,
        send_within_s: float | None = None,
    ) -> int:
        """Answer at once and keep the reply until it is waited for."""
        self.requests.append(request)
        request_id = super().submit(request, timeout_s)
        exchange = self._replies[request_id]
        assert _fits(exchange.bytes_sent, self.max_message_bytes)
        assert _fits(exchange.bytes_received, self.max_reply_bytes)
        timing = Timing(queue_us=1, compute_us=2)
        self._replies[request_id] = replace(exchange, elapsed_ns=4000, timing=timing)
        return request_id

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        return request_id in self._replies

    def use_one_connection(self) -> None:
        assert not self.requests
        self.one_connection = True

    def limit_replies(self, max_reply_bytes: int) -> None:
        assert not self.requests
        self.max_reply_bytes = max_reply_bytes

    @property
    def pending(self) -> int:
        """Replies that nobody has waited for or abandoned."""
        return len(self._replies)

    def limit_messages(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes


def _fits(size: int, most: int | None) -> bool:
    return most is None or size <= most


@dataclass
class Tee:
    """The trusted side, put together as `Runner` does, over a `LoopbackChannel`."""

    model: TeeModel
    lanes: list[MicroBatchOperators]
    channels: list[LoopbackChannel]
    assembly: Assembly

    @property
    def channel(self) -> LoopbackChannel | None:
        return self.channels[0] if self.channels else None

    def engine(self, step_tokens: int = DEFAULT_STEP_TOKENS) -> Engine:
        return Engine(self.model, self.lanes, EngineSettings(step_tokens=step_tokens))

    def cache(self, capacity: int) -> KVCache:
        return KVCache(self.model.config, capacity, self.model.dtype)

    def logits(
        self,
        token_ids: list[int],
        chunk: int | None = None,
        phase: Phase = "prefill",
        pads: PadsFrom = "stock",
    ) -> torch.Tensor:
        cache = self.cache(len(token_ids))
        size = chunk or len(token_ids)
        steps = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
        return torch.cat([self.step_logits(cache, ids, phase, pads) for ids in steps])

    def step_logits(
        self,
        cache: KVCache,
        token_ids: list[int],
        phase: Phase = "prefill",
        pads: PadsFrom = "stock",
    ) -> torch.Tensor:
        count = len(token_ids)
        chunks = (Chunk(cache, slice(0, count), cache.length + count),)
        batch = Batch(torch.tensor(token_ids), chunks, tuple(range(count)))
        ((logits_NV, _),) = run_step([Part(batch, phase, pads)], self.lanes)
        cache.commit(count)
        return logits_NV

    def greedy(self, prompt_ids: list[int], new_tokens: int) -> list[int]:
        """Return `new_tokens` greedy token ids."""
        engine = self.engine()
        sequence = engine.add(prompt_ids, max_new_tokens=new_tokens, eos_token_ids=frozenset())
        finish(engine)
        return sequence.token_ids


def assemble(
    directory: Path,
    policy: Policy | str = "tee-only",
    dtype: str = "float32",
    *,
    channel: LoopbackChannel | None = None,
    channels: list[LoopbackChannel] | None = None,
    observer: Observers | None = None,
    masks: MaskSettings | None = None,
    step_tokens: int = DEFAULT_STEP_TOKENS,
    randomness: Randomness | None = None,
    micro_batches: int = 1,
) -> Tee:
    """Put the trusted side together; a policy that needs a service gets a loopback one."""
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    (config, checkpoint), element = _Known.open(directory), torch_dtype(dtype)
    model = load_tee_model(config, checkpoint, element)
    assembly = Assembly(
        chosen, config, checkpoint, model, masks or MaskSettings(), step_tokens=step_tokens
    )
    given = list(channels or ([channel] if channel else []))
    while len(given) < chosen.services:
        given.append(LoopbackChannel(directory, dtype))
    given = given if chosen.dealt else given[: chosen.services]
    lanes = assembly.lanes(lambda _layer: given, observer, randomness, micro_batches=micro_batches)
    return Tee(model, lanes, given, assembly)


@dataclass(frozen=True)
class SavedModel:
    """A random model on disk, and transformers' own copy of it in memory."""

    directory: Path
    reference: transformers.PreTrainedModel

    def provisioned(self, mask: FeatureMask) -> tuple[Path, Path]:
        """Return a server's directory for a feature mask, and the key; made once a mask."""
        folder = self.directory.with_name(f"{self.directory.name}-{mask.name}-{hash(mask)}")
        if not folder.exists():
            folder.mkdir()
            provision(self.directory, mask, folder / "server", folder / "key")
        return folder / "server", folder / "key"

    def masks(self, policy: Policy, **settings: Any) -> MaskSettings:
        masks = MaskSettings(**settings)
        if policy.feature_mask is not None:
            masks = replace(masks, key=self.provisioned(policy.feature_mask)[1])
        return masks

    def services(self, policy: Policy, dtype: str = "float32") -> list[LoopbackChannel]:
        """Return the loopback services that a policy needs, with the weights that it needs."""
        directory = self.directory
        if policy.feature_mask is not None:
            directory = self.provisioned(policy.feature_mask)[0]
        return [LoopbackChannel(directory, dtype) for _ in range(policy.services)]

    def tee(
        self,
        policy: Policy | str,
        dtype: str = "float32",
        *,
        channels: list[LoopbackChannel] | None = None,
        **settings: Any,
    ) -> Tee:
        """Assemble any policy, with the files and the services that it needs.

        `settings`: of `assemble`, and fields of `MaskSettings` beside the key.
        """
        chosen = load_policy(policy) if isinstance(policy, str) else policy
        names = settings.keys() & {"observer", "step_tokens", "randomness", "micro_batches"}
        given = {name: settings.pop(name) for name in names}
        return assemble(
            self.directory,
            chosen,
            dtype,
            channels=self.services(chosen, dtype) if channels is None else channels,
            masks=self.masks(chosen, **settings),
            **given,
        )

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, prompt_ids: list[int], new_tokens: int) -> list[int]:
        """Return the reference's greedy token ids; computed once for all tests."""
        asked = (*prompt_ids, new_tokens)
        if asked not in self._greedy:
            self._greedy[asked], _ = greedy(self.reference, prompt_ids, new_tokens)
        return list(self._greedy[asked])

    @cached_property
    def _greedy(self) -> dict[tuple[int, ...], list[int]]:
        return {}


# The fixture `saved_model`.
Models = Callable[..., SavedModel]


def finish(engine: Engine) -> list[Sampled]:
    """Run every sequence to its end."""
    return [sampled for step in engine.run(engine.running) for sampled in step]


def stocked(tee: Tee, tokens: int) -> Pads:
    """Make pads for so many tokens, and return their source."""
    (pads,) = tee.assembly.pads.values()
    if tokens:
        pads.fill(tokens)
    return pads


# How an operator leaves in the clear, and is believed.
CLEAR = {"place": "gpu", "mask": "none", "verify": "none"}


def policy_of(operators: dict[Any, Any] | None = None, **settings: Any) -> Policy:
    """Return a policy with everything in the TEE but these operators, or but a segment's layers.

    None leaves an operator out. `settings`: other fields.
    """
    given = operators or {}
    placed = {**dict.fromkeys(LAYERLESS if "segment" in given else OPERATORS, "tee"), **given}
    placed = {operator: value for operator, value in placed.items() if value is not None}
    return Policy.model_validate({"name": "n", "summary": "s", "operators": placed, **settings})


def with_results(policy: Policy | str, verify: Verify) -> Policy:
    """Return a policy whose results are all verified so; what stays in the TEE stays."""
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    return chosen.model_copy(
        update={
            "operators": {
                operator: tuple(
                    p.model_copy(update={"verify": verify}) if p.place == "gpu" else p
                    for p in placements
                )
                for operator, placements in chosen.operators.items()
            }
        }
    )


def token_ids(count: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return ids


def greedy(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Return the new token ids, and the logits [new tokens, vocab] that each was taken from."""
    prompt = torch.tensor([list(prompt_ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, prompt.shape[1] :].tolist(), torch.cat(output.logits)
