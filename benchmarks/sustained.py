"""Whether offloading pays for as long as it lasts: `dealt` beside the TEE alone, pads counted.

    python -m benchmarks.sustained [--prompt 512] [--repeats 5] [--decode-steps 24] [--json FILE]

Reports of `tsqp bench` at the shape of Llama-3.2-1B, and of eight layers of Llama-3.1-8B's, against
a service and a dealer that answer at once, over shared memory. Both work on the TEE side's cores:
what they fill their replies with is counted against `dealt`. Pads of decoded tokens are made or
dealt apart, and their time is in the reports; pads of a prompt are dealt in its step. On a
processor with AMX all of it is measured again without: AMX multiplies for the TEE alone, and AMD's
processors have none.

Beside them what these cores can do at all, in GB/s: copy memory, and draw AES-CTR. What attention
does is worked out from the reports, and so are targets, on the page: the exit status is 0.
"""

import os
from functools import partial
from itertools import product
from statistics import median

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks.harness import CORES, Fields, Found, Options, Place, main, say
from benchmarks.record import complete
from protocol import native
from tee_side.model.batch import kv_bytes
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.run import Bench
from tsqp.lab.bench.shapes import Shape, find_shape
from tsqp.lab.measure import elapsed_us

# Of Llama-3.1-8B this many layers: its 32 take 16 GB.
_FEW = 8
# The shape, its policies, and (context, sequences) to decode with.
RUNS: dict[str, tuple[Shape, tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "1b": (
        find_shape("llama-3.2-1b"),
        ("dealt", "shielded", "tee-only-int8"),
        ((128, 1), (128, 8), (128, 32), (4096, 1)),
    ),
    "8b": (
        find_shape("llama-3.1-8b").with_layers(_FEW),
        ("dealt", "tee-only-int8"),
        ((128, 8),),
    ),
}
_BYTES = 1 << 28


def _speeds() -> Fields:
    """Return GB/s of a copy by all threads (bytes copied), and of AES-CTR by one; medians."""
    source = torch.ones(_BYTES, dtype=torch.uint8)
    target, zeros = torch.empty_like(source), bytes(1 << 24)
    key, counter = algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))
    draw = Cipher(key, counter).encryptor().update_into
    drawn = bytearray(len(zeros) + 15)
    torch.set_num_threads(CORES)
    copied_us, drawn_us = (
        median([elapsed_us(work) for _ in range(8)][1:])
        for work in (partial(target.copy_, source), partial(draw, zeros, drawn))
    )
    return {"memory_copy": _BYTES / copied_us / 1e3, "aes_one_core": len(zeros) / drawn_us / 1e3}


def measure(options: Options, place: Place) -> Found:
    """Measure every run. Raises TsqpError."""
    best = native.use().variant
    kernels = {"": best} | ({", AVX-512": "avx512"} if best == "amx" else {})
    reports: Fields = {}
    for (name, run), (suffix, variant) in product(RUNS.items(), kernels.items()):
        shape, policies, decode = run
        settings = BenchSettings(
            command=f"python -m benchmarks.sustained: {name}{suffix}",
            policies=tuple((one, load_policy(one)) for one in policies),
            model=place.model(shape, linear=True),
            transport="shm",
            kernels=variant,
            threads=CORES,
            gpu_threads=CORES,
            spin_us=300.0,
            baselines=False,
            plan=Plan(
                prefill=(options.prompt,),
                decode=decode,
                generation=None,
                repeats=options.repeats,
                decode_steps=options.decode_steps,
            ),
        )
        reports[name + suffix] = complete(Bench(settings, say).run())["report"]
    config = RUNS["1b"][0].config()
    return {
        "speeds_gb_s": _speeds(),
        "kv_token_bytes": kv_bytes(config, 1, torch.bfloat16),
        "reports": reports,
    }, True


if __name__ == "__main__":
    main(__doc__, measure, prompt=512, repeats=5, decode_steps=24)
