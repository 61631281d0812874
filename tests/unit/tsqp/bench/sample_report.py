"""A report of plausible figures, made by formula: nothing in it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tee_side.words import Phase, Place
from tsqp.lab.bench.model import (
    STAGES,
    Baseline,
    Case,
    Generation,
    OperatorCost,
    PadMaking,
    PingPong,
    PolicyRun,
    Report,
    Setup,
    Span,
    Spread,
    Stages,
    Timeline,
)

HIDDEN, INTERMEDIATE, KV, VOCABULARY = 2048, 8192, 512, 128_256
POLICIES = ("tsqp", "attention-in-tee", "shielded")
LENGTHS = (128, 512)
BATCHES = (1, 8)

_IN = {"qkv_proj": HIDDEN, "o_proj": HIDDEN, "gate_up_proj": HIDDEN, "down_proj": INTERMEDIATE}
_OUT = {
    "qkv_proj": HIDDEN + 2 * KV,
    "o_proj": HIDDEN,
    "gate_up_proj": 2 * INTERMEDIATE,
    "down_proj": HIDDEN,
}
_ROUND_TRIP_US = 25.0
_MICROSECONDS_A_BYTE = 3e-4
# Of one row of one layer, in a TEE of two cores.
_LOCAL_US = {"rms_norm": 2.0, "rope": 1.5, "residual": 0.6, "silu_mul": 5.0}


def spread(median: float, runs: int = 5) -> Spread:
    return Spread(median=median, low=median * 0.96, high=median * 1.11, runs=runs)


def remote(rows: int, sent: float, received: float, *, rpcs: int = 1, masked: bool) -> Stages:
    return Stages(
        tee_us=0.04 * rows if masked else 0.0,
        mask_us=8 + sent * 4e-4 if masked else 0.0,
        verify_us=5 + received * 1e-4 if masked else 0.0,
        encode_us=6.0 * rpcs,
        wire_us=_ROUND_TRIP_US * rpcs + (sent + received) * _MICROSECONDS_A_BYTE,
        queue_us=1.5 * rpcs,
        gpu_us=9.0 * rpcs + rows * 0.05,
        decode_us=5.0 * rpcs,
        unmask_us=7 + received * 4e-4 if masked else 0.0,
    )


def operators(
    policy: str, phase: Phase, tokens: int, batch: int, layers: int
) -> Iterator[OperatorCost]:
    rows = tokens * batch if phase == "prefill" else batch
    context = tokens * batch
    published, nothing = policy == "tsqp", policy == "tee-only"
    masked = policy == "shielded"
    width = 4 if masked else 2

    def cost(
        name: str, layer: int | None, stages: Stages, *, place: Place = "tee", calls: int = 1
    ) -> OperatorCost:
        return OperatorCost(
            operator=name,
            layer=layer,
            place=place,
            calls=calls,
            rpcs=0,
            bytes_sent=0,
            bytes_received=0,
            stages=stages,
        )

    def sent_away(
        name: str, layer: int | None, sent: float, received: float, rpcs: int = 1
    ) -> OperatorCost:
        stages = remote(rows, sent, received, rpcs=rpcs, masked=masked)
        return cost(name, layer, stages, place="gpu").model_copy(
            update={"rpcs": rpcs, "bytes_sent": sent, "bytes_received": received}
        )

    if published:
        yield sent_away("embedding", None, rows * 8, rows * HIDDEN * width)
    else:
        yield cost("embedding", None, Stages(tee_us=20 + rows * 0.5))
    for layer in range(layers):
        # Layers are alike, but none is quite like another.
        slower = 1 + 0.03 * (layer % 3)
        for name, row_us in _LOCAL_US.items():
            calls = 2 if name in ("rms_norm", "residual", "rope") else 1
            yield cost(
                name, layer, Stages(tee_us=(4 + rows * row_us) * calls * slower), calls=calls
            )
        for name, size in _IN.items():
            rpcs = {"qkv_proj": 3, "gate_up_proj": 2}.get(name, 1) if published else 1
            if nothing:
                yield cost(name, layer, Stages(tee_us=size * _OUT[name] * (40e-6 + rows * 5e-6)))
            else:
                sent = rows * size * width * rpcs
                yield sent_away(name, layer, sent, rows * _OUT[name] * width, rpcs)
        scores = rows * (tokens if phase == "prefill" else context // batch) * 32
        if published:
            yield sent_away("attn_scores", layer, rows * HIDDEN * 2 + context * KV * 2, scores * 2)
            yield cost("softmax", layer, Stages(tee_us=6 + scores * 4e-4))
            yield sent_away("attn_values", layer, scores * 2 + context * KV * 2, rows * HIDDEN * 2)
        else:
            yield cost("attention", layer, Stages(tee_us=(20 + scores * 1.1e-3) * slower))
    yield cost("kv_cache", None, Stages(tee_us=15 + rows * 0.3))
    if published:
        yield sent_away("lm_head", None, batch * HIDDEN * 2, batch * VOCABULARY * 2)
    else:
        yield cost("lm_head", None, Stages(tee_us=26_000 + 900 * batch))
    yield cost("sample", None, Stages(tee_us=140 * batch))


def case(
    policy: str,
    phase: Phase = "decode",
    tokens: int = 128,
    batch: int = 1,
    *,
    micro_batches: int = 1,
    layers: int = 16,
) -> Case:
    costs = tuple(operators(policy, phase, tokens, batch, layers))
    total_us = sum(found.stages.total_us for found in costs)
    heavy = [c for c in costs if c.operator in ("embedding", "lm_head") and c.place == "tee"]
    heavy_us = sum(found.stages.total_us for found in heavy)
    # Micro-batches work at the same time: less time than the sum of the parts.
    rest_us = 900.0 if micro_batches == 1 else -0.35 * (total_us - heavy_us)
    step_ms = (total_us + rest_us) / 1e3
    heavy_ms = heavy_us / 1e3
    done = tokens * batch if phase == "prefill" else batch
    return Case(
        phase=phase,
        tokens=tokens,
        batch=batch,
        micro_batches=micro_batches,
        step_ms=spread(step_ms),
        heavy_ms=heavy_ms,
        overhead_ms=step_ms - heavy_ms,
        tokens_per_s=done / step_ms * 1e3,
        cpu_tee_ms=step_ms * 1.3,
        cpu_gpu_ms=0.0 if policy == "tee-only" else step_ms * 0.4,
        rpcs=sum(found.rpcs for found in costs),
        bytes_sent=sum(found.bytes_sent for found in costs),
        bytes_received=sum(found.bytes_received for found in costs),
        operators=costs,
        rest_us=rest_us,
    )


def timeline(
    policy: str,
    phase: Phase = "decode",
    tokens: int = 128,
    batch: int = 1,
    *,
    micro_batches: int = 1,
    layers: int = 16,
) -> Timeline:
    """Lay the stages of a case one after another; other micro-batches a little later."""
    in_order = sorted(
        operators(policy, phase, tokens, batch, layers),
        key=lambda c: (c.operator in ("lm_head", "sample"), -1 if c.layer is None else c.layer),
    )
    spans: list[Span] = []
    for lane in range(micro_batches):
        now = 40.0 + 130.0 * lane
        for found in in_order:
            # Request, way there, service, way back, reply.
            order = (
                "tee",
                "mask",
                "encode",
                "wire",
                "queue",
                "gpu",
                "wire",
                "decode",
                "unmask",
                "verify",
            )
            for stage in order:
                length = getattr(found.stages, f"{stage}_us") / (2 if stage == "wire" else 1)
                if length:
                    spans.append(
                        Span(
                            lane=lane,
                            operator=found.operator,
                            layer=found.layer,
                            stage=stage,
                            start_us=now,
                            duration_us=length,
                        )
                    )
                    now += length + 0.4
    return Timeline(phase=phase, tokens=tokens, batch=batch, spans=tuple(spans))


def leakage_summary(policy: str) -> str | None:
    if policy == "tee-only":
        return None
    seen = "uniform random numbers, lengths and timing" if policy == "shielded" else "<something>"
    return f"policy {policy}: the GPU sees {seen}"


def policy_run(
    policy: str,
    *,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    layers: int = 16,
) -> PolicyRun:
    cases = [case(policy, "prefill", tokens, layers=layers) for tokens in lengths]
    cases += [case(policy, "decode", tokens, layers=layers) for tokens in lengths]
    first_ms, each_ms = cases[len(lengths) - 1].step_ms.median, cases[-1].step_ms.median
    cases += [case(policy, "decode", lengths[0], n, layers=layers) for n in batches if n > 1]
    cases += [
        case(policy, "decode", lengths[0], n, micro_batches=2, layers=layers)
        for n in batches
        if n > 1
    ]
    return PolicyRun(
        policy=policy,
        summary=f"what {policy} does",
        leakage_summary=leakage_summary(policy),
        cases=tuple(cases),
        generation=Generation(
            prompt_tokens=512,
            new_tokens=64,
            ttft_ms=first_ms,
            tpot_ms=each_ms,
            total_ms=first_ms + 63 * each_ms,
        ),
        timelines=(
            timeline(policy, "prefill", lengths[-1], layers=layers),
            timeline(policy, "decode", lengths[0], layers=layers),
            timeline(policy, "decode", lengths[0], 8, micro_batches=2, layers=layers),
        ),
        tee_peak_bytes=1_180_000_000,
        gpu_peak_bytes=None if policy == "tee-only" else 610_000_000,
        kv_bytes=75_000_000,
        vocabulary_bytes=525_336_576,
        pads=PadMaking(phases=("decode",), token_ms=12.5, cpu_ms=24.0, batch_tokens=512)
        if policy == "shielded"
        else None,
    )


def baselines() -> tuple[Baseline, ...]:
    made = [
        Baseline(
            name="published",
            description="REQ socket, inline schema, float32, one RPC per module, no KV cache",
            phase="decode" if new else "prefill",
            tokens=tokens,
            new_tokens=new,
            dtype="float32",
            against="null",
            step_ms=spread(ms),
            round_trips=146,
            bytes_sent=tokens * 1_900_000,
            bytes_received=tokens * 2_100_000,
        )
        for tokens, new, ms in ((128, 0, 890.0), (512, 0, 7900.0), (512, 64, 8700.0))
    ]
    made += [
        Baseline(
            name="transformers",
            description="the same model on the same threads, with a KV cache",
            phase=phase,
            tokens=tokens,
            new_tokens=16 if phase == "decode" else 0,
            dtype="bfloat16",
            against="none",
            step_ms=spread(ms),
            round_trips=0,
            bytes_sent=0,
            bytes_received=0,
        )
        for phase, tokens, ms in (
            ("prefill", 128, 750.0),
            ("prefill", 512, 3100.0),
            ("decode", 128, 170.0),
        )
    ]
    return tuple(made)


def ping_pongs() -> tuple[PingPong, ...]:
    return tuple(
        PingPong(
            transport=transport,
            payload_bytes=payload,
            kind=kind,
            p50_us=(floor + payload * 2.5e-4) * (1.2 if kind == "ours" else 1.0),
            p90_us=(floor + payload * 2.5e-4) * 1.6,
            round_trips=2000,
        )
        for transport, floor in (("ipc", 120.0), ("unix", 13.0))
        for payload in (4096, 65_536, 1_048_576)
        for kind in ("ours", "raw")
    )


def setup(**changes: object) -> Setup:
    made = Setup(
        command="tsqp bench --shape llama-3.2-1b --device null --json out.json --html out.html",
        created="2026-01-02T03:04:05+00:00",
        machine={"processor": "AMD EPYC", "cores": 2, "memory_gib": 24, "torch": "2.13.0+cpu"},
        model="llama-3.2-1b",
        num_hidden_layers=16,
        dtype="bfloat16",
        device="null",
        transport="unix",
        link=None,
        tee_threads=2,
        gpu_threads=1,
    )
    return made.model_copy(update=changes)


def sample_report(
    policies: Sequence[str] = POLICIES,
    *,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    layers: int = 16,
) -> Report:
    """A complete run of some policies."""
    return Report(
        setup=setup(num_hidden_layers=layers),
        policies=tuple(
            policy_run(policy, lengths=lengths, batches=batches, layers=layers)
            for policy in policies
        ),
        baselines=baselines(),
        ping_pong=ping_pongs(),
    )


def of_device(device: str, **changes: object) -> Report:
    """A report of a run with that device; of what else it says, some changed."""
    return sample_report(layers=2).model_copy(update={"setup": setup(device=device), **changes})


def partial_reports() -> dict[str, Report]:
    """Everything that a report may lack, by a name for it."""
    whole = sample_report(layers=2)
    first = whole.policies[1]
    only_tee = policy_run("tee-only", layers=2)
    bare = first.model_copy(update={"cases": (), "generation": None, "timelines": ()})
    zero = dict.fromkeys(STAGES, 0.0)
    idle = first.cases[0].model_copy(
        update={
            "operators": tuple(
                c.model_copy(update={"stages": Stages(**zero)}) for c in first.cases[0].operators
            ),
            "rest_us": 0.0,
            "step_ms": spread(0.0, runs=1),
            "overhead_ms": 0.0,
            "tokens_per_s": 0.0,
        }
    )
    return {
        "interrupted": whole.model_copy(
            update={
                "policies": (
                    first.model_copy(
                        update={"cases": first.cases[:1], "generation": None, "timelines": ()}
                    ),
                ),
                "baselines": (),
                "ping_pong": (),
                "incomplete": "interrupted by SIGINT",
            }
        ),
        "nothing": whole.model_copy(
            update={"policies": (), "baselines": (), "ping_pong": (), "incomplete": "no service"}
        ),
        "no baselines": whole.model_copy(
            update={
                "policies": tuple(
                    r.model_copy(update={"timelines": ()}) for r in whole.policies[:2]
                ),
                "baselines": (),
            }
        ),
        "one policy": whole.model_copy(update={"policies": (first,)}),
        "no timeline": whole.model_copy(
            update={"policies": (first.model_copy(update={"timelines": ()}),)}
        ),
        "empty timeline": whole.model_copy(
            update={
                "policies": (
                    first.model_copy(
                        update={
                            "timelines": (Timeline(phase="decode", tokens=1, batch=1, spans=()),)
                        }
                    ),
                )
            }
        ),
        "tee-only": whole.model_copy(
            update={
                "policies": (only_tee,),
                "setup": setup(device="none", transport="none", gpu_threads=0, num_hidden_layers=2),
            }
        ),
        "no cases": whole.model_copy(update={"policies": (bare,)}),
        "no operators": whole.model_copy(
            update={
                "policies": (
                    first.model_copy(
                        update={
                            "cases": tuple(
                                c.model_copy(update={"operators": ()}) for c in first.cases
                            )
                        }
                    ),
                )
            }
        ),
        "no time at all": whole.model_copy(
            update={"policies": (first.model_copy(update={"cases": (idle,)}),)}
        ),
    }
