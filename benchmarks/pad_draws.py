"""What one draw of a pad takes.

    python -m benchmarks.pad_draws [--folder DIR] [--json FILE]

The folder should be on a real disk: on a memory-backed one fsync costs nothing. `make soak
ONLY=pads` counts a million draws with crashes between and inside them (tests/faults/test_pads.py).
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.harness import Found, Options, Place, main
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace, Purpose
from tee_side.protect.randomness import Keystream
from tee_side.protect.sites import PadLayout, SiteShape
from tsqp.lab.measure import elapsed_us

_REPEATS = 500


def time_one_site(folder: Path, in_features: int, out_features: int) -> dict[str, float]:
    """Return microseconds of one row's draw at a site, and of the cryptography in it alone."""
    layout = PadLayout((SiteShape(0, "qkv_proj", in_features, out_features),))
    purpose = Purpose.of(layout, mask="pad", model_digest="0" * 64, linear_digest="1" * 64)
    timed = BankPlace.at(folder / "timed", beside_bank=True)
    takes, draws, taken = [], [], list[range]()
    with BankFile.create(timed, purpose, capacity=_REPEATS, block=16) as bank:
        with bank.begin(_REPEATS) as batch:
            words = torch.zeros(_REPEATS, out_features, dtype=torch.int32)
            put_us = elapsed_us(partial(batch.put, 0, words))
            fill_us = (put_us + elapsed_us(batch.commit)) / _REPEATS
        for _ in range(_REPEATS):
            takes.append(elapsed_us(lambda: taken.append(bank.take(1))))
            draws.append(elapsed_us(partial(bank.factors, taken[-1], 0)))
    stream, sealer, nonce = Keystream(bytes(32)), AESGCM(bytes(32)), bytes(12)
    sealed = sealer.encrypt(nonce, bytes(4 * out_features), None)
    alone_us = _median_us(lambda: stream.rows(range(5, 6), 0, in_features))
    alone_us += _median_us(lambda: sealer.decrypt(nonce, sealed, None))
    found = {
        "factors_us_median": median(draws),
        "aes_ctr_and_gcm_alone_us": alone_us,
        "take_us_median": median(takes),
        "take_us_mean_with_fsync": sum(takes) / _REPEATS,
        "fill_us_with_fsync": fill_us,
    }
    return {name: round(us, 1) for name, us in found.items()}


def _median_us(call: Callable[[], object]) -> float:
    return median(elapsed_us(call) for _ in range(2000))


def measure(options: Options, _place: Place) -> Found:
    """Time one site."""
    size = {"in_features": 2048, "out_features": 8192}
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        timed = time_one_site(Path(name), **size)
    return {
        "cryptography": importlib.metadata.version("cryptography"),
        "one_row_at_one_site": {**size, **timed},
    }, True


if __name__ == "__main__":
    main(__doc__, measure, folder="")
