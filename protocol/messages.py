"""What the two sides say to each other: one frozen model per request and reply.

The models are the schema. How they become bytes, in the framed or the inline form, is in
`protocol.encoding`. Every field is bounded and checked here; unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field, FiniteFloat, model_validator

from protocol.tensors import Buffer, WireTensor
from protocol.validation import Strict

PROTOCOL_VERSION = 1
MAX_LAYERS = 4096
SESSION_BYTES = 16
MAX_TIMEOUT_MS = 3_600_000
MAX_TIMING_US = 2**53
# Of what evidence is asked with, and of what states it.
NONCE_BYTES, MAX_STATEMENT_BYTES = 32, 256 * 1024

ModuleName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FloatDtype = Literal["float32", "float16", "bfloat16"]
Arithmetic = Literal["float", "int8"]

LinearOperator = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# What multiplies by a weight: the layers' linear operators, and the LM head.
Projection: TypeAlias = LinearOperator | Literal["lm_head"]

# Modules that read the same input, in the order in which their outputs stand side by side.
FUSED_MODULES: dict[LinearOperator, tuple[ModuleName, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
LayerIndex: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]
ModuleNames: TypeAlias = Annotated[
    tuple[ModuleName, ...], Field(min_length=1, max_length=3, strict=False)
]
Digest: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
ByteCount: TypeAlias = Annotated[int, Field(ge=1, le=2**40)]
# First and last, both included.
Layers: TypeAlias = Annotated[tuple[LayerIndex, LayerIndex], Field(strict=False)]
# The most ranks of one service (`gpu-service --tensor-parallel`).
MAX_RANKS = 64
# Which rank's part of a weight's output columns, from 0, and of how many ranks.
Columns: TypeAlias = tuple[int, int]
# The columns of a service that computes by itself.
WHOLE: Columns = (0, 1)


def part_of(size: int, rank: int, ranks: int) -> slice:
    """Return which of `size` output columns a rank computes; sizes differ by one at most.

    Each rank computes whole products of its own columns, so nothing is added up, and integers are
    those of one process, bit for bit.
    """
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


# The key of AES-256.
SEED_BYTES = 32
SEED_SHAPE = (SEED_BYTES // 4,)  # as a tensor int32


class Message(Strict, arbitrary_types_allowed=True):
    """Base of everything that crosses the wire."""


class InitRequest(Message):
    """Ask what the service holds; with a `nonce` of 32 bytes, also for evidence of what it is."""

    method: ClassVar[str] = "Init"
    nonce: Annotated[bytes, Field(max_length=NONCE_BYTES)] = b""


class HealthRequest(Message):
    """Ask how the service is. Answered ahead of the work that waits."""

    method: ClassVar[str] = "Health"


class EmbeddingRequest(Message):
    """Look up token embeddings. `input_ids`: int64 [T] or [batch, T]; `dtype`: of the reply."""

    method: ClassVar[str] = "Embedding"
    input_ids: WireTensor
    dtype: FloatDtype


class _ModulesRequest(Message):
    """Base of what names modules of a layer."""

    layer_idx: LayerIndex
    module_names: ModuleNames


class LinearRequest(_ModulesRequest):
    """Apply one module of a layer, or several that share their input.

    `hidden_states`: float [..., in_features]. The reply holds the modules' outputs side by side on
    the last axis, in the order of `module_names`. `bias`: whether to add the modules' biases where
    the model has them; a masked input asks for none, because a bias is not linear.
    """

    method: ClassVar[str] = "Linear"
    hidden_states: WireTensor
    bias: bool = True


class RingLinearRequest(_ModulesRequest):
    """Apply modules as a Linear does, with their int8 weights, in the ring Z_2^32.

    `elements`: int32 [..., in_features]. The reply is int32 [..., sum of out_features]: the product
    modulo 2^32, without scales and without biases (`protocol.model.weights`).
    """

    method: ClassVar[str] = "RingLinear"
    elements: WireTensor


class SeededRingLinearRequest(_ModulesRequest):
    """A RingLinear of elements int32 [rows, columns] that the service draws itself, from a seed.

    `seed`: int32 [8], which `protocol.keystream` makes the elements of. `columns`: in_features.
    """

    method: ClassVar[str] = "SeededRingLinear"
    rows: Size
    columns: Size
    seed: WireTensor

    def standing_for(self, drawn: Buffer = b"") -> RingLinearRequest:
        """Return the same of these elements; of none, for who looks at its sizes alone."""
        elements, names = WireTensor("int32", (self.rows, self.columns), drawn), self.module_names
        return RingLinearRequest(layer_idx=self.layer_idx, module_names=names, elements=elements)


class MatmulRequest(Message):
    """Multiply two tensors, batched like `torch.matmul`. `a`: [..., M, K]; `b`: [..., K, N]."""

    method: ClassVar[str] = "Matmul"
    a: WireTensor
    b: WireTensor


class LMHeadRequest(Message):
    """Apply the LM head. `hidden_states`: float [..., hidden_size]."""

    method: ClassVar[str] = "LMHead"
    hidden_states: WireTensor


class RingLMHeadRequest(Message):
    """Apply the LM head's int8 weights in the ring Z_2^32, as a RingLinear does a layer's.

    `elements`: int32 [..., hidden_size]. The reply is int32 [..., vocab_size], without scales.
    """

    method: ClassVar[str] = "RingLMHead"
    elements: WireTensor


class SegmentRequest(Message):
    """Run consecutive whole layers, first to last included, whose KV cache the service keeps.

    `hidden_states`: float [T, hidden_size], the rows of several sequences side by side. `parts`:
    int64 [P, 7], whose rows it is, in order: session, session, start, rows, length, parent, parent.
    A session is 128 bits that the client has drawn; no other client can name it. It is cut to
    `start` tokens before its rows are added, or begins with so many tokens of its `parent` (0, 0:
    none). A session that the service has no `start` tokens of is answered with UNKNOWN_SESSION.
    `length`: how long it is once all that is pending has run, which RoPE may depend on. Of no rows:
    the client needs the session no more. `outputs`: int64 [N], rows that are wanted, rising; the
    reply holds their hidden states [N, hidden_size], or behind the last layer with `lm_head` their
    logits [N, vocab_size]. `sinks`, `recent`: a token attends to so many at the beginning, and so
    many that end with itself; `recent` 0: to all before it.
    """

    method: ClassVar[str] = "Segment"
    first_layer: LayerIndex
    last_layer: LayerIndex
    hidden_states: WireTensor
    parts: WireTensor
    outputs: WireTensor
    lm_head: bool = False
    sinks: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    recent: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0

    @property
    def goes_on(self) -> bool:
        """Whether a session has to be there: none can be unknown where all of them begin."""
        return any(memoryview(self.parts.data).cast("B").cast("q")[2::7])


class InitConfig(Message):
    """The sizes that a client of the published schema needs, under the published names."""

    num_layers: Size
    hidden_size: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size


class RotaryParams(Message):
    """`inv_freq`: float32 [head_dim / 2]; cos and sin are multiplied by `attention_scaling`."""

    inv_freq: WireTensor
    attention_scaling: FiniteFloat


class NormWeight(Message):
    """`weight`: float32 [hidden_size]."""

    weight: WireTensor
    eps: FiniteFloat


class InitReply(Message):
    """What the service holds.

    A client of the published schema builds its norms and RoPE from this. Ours compares it with its
    own model directory, to catch a service that was started with another model, and uses none of
    it: the service is not trusted. The digests are those of `protocol.model.checkpoint`;
    `max_message_bytes` is the service's limit for one message, either way; `arithmetic` says which
    linear weights it holds: those for Linear (float), those for RingLinear and RingLMHead (int8),
    or both.
    `provision_id`: None for a model directory; for weights transformed by a feature mask the id of
    the key that they belong to (`gpu_side.weights`), and then `model_digest` repeats it
    and `norm_weights` is empty. `instance_id`: random, of this service process, by which a runner
    notices that two endpoints lead to one service. `layers`: whose linear weights it holds; the
    embedding goes with layer 0 and the LM head with the model's last. `max_queued_requests` and
    `max_queued_bytes`: of one client, how much may wait; what is beyond is answered with
    QUEUE_FULL. `statement`: claims of the service and evidence of them for the request's nonce
    (`tee_side.attest.statement`), nothing without one. `ranks`: by how many processes it computes,
    each with its part of every weight's output columns (`part_of`). Only the framed form carries
    these eleven.
    """

    config: InitConfig
    rotary_emb_params: RotaryParams
    norm_weights: dict[str, NormWeight]
    model_digest: Digest
    linear_digest: Digest
    max_message_bytes: ByteCount
    arithmetic: Annotated[tuple[Arithmetic, ...], Field(min_length=1, max_length=2, strict=False)]
    provision_id: Digest | None
    instance_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    layers: Layers
    max_queued_requests: Size
    max_queued_bytes: ByteCount
    statement: Annotated[bytes, Field(max_length=MAX_STATEMENT_BYTES)] = b""
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1

    @model_validator(mode="after")
    def _consistent(self) -> InitReply:
        if self.layers[0] > self.layers[1]:
            raise ValueError("the first layer before the last")
        if len(set(self.arithmetic)) != len(self.arithmetic):
            raise ValueError("each arithmetic once")
        return self


class HealthReply(Message):
    """How the service is, in its own words.

    `status`: "draining" once it was told to stop: it finishes what it has and takes nothing new.
    `uptime_s`: since it was started. `queued_requests`, `queued_bytes`: what waits there, of all
    clients.
    """

    status: Literal["ready", "draining"]
    uptime_s: Annotated[FiniteFloat, Field(ge=0)]
    queued_requests: Annotated[int, Field(ge=0, le=2**31 - 1)]
    queued_bytes: Annotated[int, Field(ge=0, le=2**53)]


class TensorReply(Message):
    """The result of every other request."""

    output: WireTensor


class Timing(Message):
    """How long the service says it took: a claim by the untrusted side.

    Reports may print it; nothing may depend on it. `queue_us`: from picking the request up to
    starting on it, a lower bound of the time it waited. `compute_us`: decode, device transfer and
    the operator itself.
    """

    queue_us: Annotated[int, Field(ge=0, le=MAX_TIMING_US)]
    compute_us: Annotated[int, Field(ge=0, le=MAX_TIMING_US)]


# The same as TensorReply(...) and Timing(...), from their fields, with less Python around it.
tensor_reply = TensorReply.__pydantic_validator__.validate_python
checked_timing = Timing.__pydantic_validator__.validate_python

# Requests whose tensors are new each time, and all else is the same (`protocol.prepared`).
Preparable: TypeAlias = (
    EmbeddingRequest
    | LinearRequest
    | RingLinearRequest
    | SeededRingLinearRequest
    | MatmulRequest
    | LMHeadRequest
    | RingLMHeadRequest
    | SegmentRequest
)
Request: TypeAlias = InitRequest | HealthRequest | Preparable
Response: TypeAlias = InitReply | HealthReply | TensorReply

REQUEST_TYPES: dict[str, type[Request]] = {cls.method: cls for cls in get_args(Request)}
# Of methods whose good reply is no TensorReply.
OTHER_REPLIES: dict[str, type[Response]] = {"Init": InitReply, "Health": HealthReply}
