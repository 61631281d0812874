"""Row: wrong results under a verified policy.

Products of the demo model, at every linear operator of every layer, on what the model itself feeds
them: in the integers of the default policy, and in float32. A service's wrong results must all be
refused, and its right ones, in every dtype, never. What crosses a wire is in `malicious_service`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from protocol.integer import exact_product
from protocol.messages import FUSED_MODULES, LinearRequest, RingLinearRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import CPU, load_linear
from protocol.tensors import to_torch
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import ExactCheck
from tee_side.words import Site
from tests.kit.lies import WRONG, surely_wrong
from tests.kit.model import LoopbackChannel, assemble
from tests.soak.demo import DEMO, prompt
from tests.soak.row import RowResult, note, progress
from tsqp.lab.research.float_check import FloatCheck, Tolerance

NAME = "wrong results, verified policy"
TEST = (
    "one element, low-rank error, swapped layer, stale reply, sign, x(1 + 1e-3), zeros, in int8 or"
    " float32 by chance; honest checks in bfloat16 and float16, too"
)
PASS = "0 missed; 0 false alarms in 1,000,000 honest checks"
FULL, SHORT = 10_000, 140
MINUTES = 3

# Honest checks for each wrong result: 1,000,000 in all.
HONEST_FOR_EACH = 100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = (*WRONG, "swapped layer", "stale reply")
_TOKENS = 200


class Arithmetic(NamedTuple):
    """A site's weight and check in one arithmetic, and inputs that the model feeds it."""

    inputs: torch.Tensor
    weight: QuantizedLinear | torch.Tensor
    check: ExactCheck | FloatCheck
    tolerance: Tolerance | None

    def product(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Compute as the service does."""
        if isinstance(self.weight, QuantizedLinear):
            return exact_product(x_TI, self.weight.weight)
        product: torch.Tensor = linear(x_TI, self.weight)
        return product

    def holds(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> bool:
        """Check as the trusted side does."""
        if isinstance(self.check, ExactCheck):
            return self.check.holds(x_TI, y_TO)
        assert self.tolerance is not None
        return self.check.holds(x_TI, y_TO, [x_TI], self.tolerance)

    def varied(self, rows: int, chance: random.Random) -> torch.Tensor:
        """Return inputs that differ from each other and from all before."""
        picked = torch.tensor([chance.randrange(len(self.inputs)) for _ in range(rows)])
        x_TI: torch.Tensor = self.inputs[picked]
        if x_TI.is_floating_point():
            factor = 2.0 ** chance.uniform(-4, 4)
            near: torch.Tensor = x_TI * factor * (1 + 0.1 * torch.randn(x_TI.shape))
            return near.to(x_TI.dtype)
        # Smaller in places, never larger: what passed the range check passes it still.
        return (x_TI * torch.rand(x_TI.shape)).round().to(torch.int32)


@dataclass
class Products:
    """Every site in every arithmetic; `redraw` takes other secrets."""

    sites: dict[Site, dict[str, Arithmetic]]

    @property
    def all(self) -> list[tuple[Site, str]]:
        """Every site with every arithmetic."""
        return [(site, name) for site, found in self.sites.items() for name in found]

    def redraw(self) -> None:
        """Draw the checks' secrets anew, as every run does."""
        randomness = Randomness()
        for found in self.sites.values():
            for name, one in found.items():
                check: ExactCheck | FloatCheck
                if isinstance(one.weight, QuantizedLinear):
                    check = ExactCheck.draw(one.weight.weight, randomness)
                else:
                    check = FloatCheck.draw(one.weight, randomness)
                found[name] = one._replace(check=check)


def _inputs(policy: str) -> dict[Site, torch.Tensor]:
    """Return what a policy that hides nothing sends for some text, by site."""
    channel = LoopbackChannel(DEMO)
    assemble(DEMO, policy, channel=channel).logits(prompt(_TOKENS, random.Random(1)))
    found = {}
    for request in channel.requests:
        if isinstance(request, LinearRequest | RingLinearRequest):
            sent = request.hidden_states if isinstance(request, LinearRequest) else request.elements
            for operator, modules in FUSED_MODULES.items():
                if request.module_names == modules:
                    found[request.layer_idx, operator] = to_torch(sent).clone()
    return found


def load_products() -> Products:
    """Prepare every linear operator of the demo model."""
    config, checkpoint, randomness = read_config(DEMO), Checkpoint(DEMO), Randomness()
    integers, floats = _inputs("quantized-clear"), _inputs("attention-in-tee")
    sites: dict[Site, dict[str, Arithmetic]] = {}
    for (layer, operator), x_TI in integers.items():
        quantized = load_quantized(checkpoint, config, layer, operator)
        exact = ExactCheck.draw(quantized.weight, randomness)
        found = {"int8": Arithmetic(x_TI, quantized, exact, None)}
        for dtype in DTYPES:
            weight = load_linear(
                checkpoint, config, layer, operator, dtype=dtype, device=CPU
            ).weight
            near = FloatCheck.draw(weight, randomness)
            fed = floats[layer, operator].to(dtype)
            found[str(dtype)] = Arithmetic(fed, weight, near, Tolerance.of(dtype, None))
        sites[layer, operator] = found
    return Products(sites)


def lie(
    kind: str,
    products: Products,
    site: Site,
    name: str,
    x_TI: torch.Tensor,
    right: torch.Tensor,
    chance: random.Random,
) -> torch.Tensor:
    """Return a wrong result for a product."""
    one = products.sites[site][name]
    if kind == "swapped layer":
        layer, operator = site
        other = products.sites[layer - 1 if layer else 1, operator][name]
        wrong = other.product(x_TI)
    elif kind == "stale reply":
        wrong = one.product(one.varied(len(x_TI), chance))
    else:
        wrong = WRONG[kind](right, chance)
    return surely_wrong(wrong, right, chance)


def run(count: int) -> RowResult:
    """Check so many wrong results, and a hundred times as many right ones."""
    began = time.monotonic()
    chance = random.Random(20)
    torch.manual_seed(20)
    with torch.inference_mode():
        products = load_products()
        missed = {name: Counter[str]() for name in ("int8", "torch.float32")}
        told: Counter[str] = Counter()
        # In half precision x(1 + 1e-3) is what rounding does.
        exact = [(site, name) for site, name in products.all if name in missed]
        kinds = itertools.cycle(KINDS)
        for done in range(count):
            (site, name), kind = chance.choice(exact), next(kinds)
            told[name] += 1
            one = products.sites[site][name]
            x_TI = one.varied(chance.choice([1, 1, 4]), chance)
            wrong = lie(kind, products, site, name, x_TI, one.product(x_TI), chance)
            if one.holds(x_TI, wrong):
                missed[name][kind] += 1
                note(f"missed: {kind} at {site} in {name}")
            progress(done // 10)
        alarms = {name: 0 for _, name in products.all}
        checks = dict.fromkeys(alarms, 0)
        for site, name, rows in _honest(products, count * HONEST_FOR_EACH):
            one = products.sites[site][name]
            x_TI = one.varied(rows, chance)
            y_TO = one.product(x_TI)
            # One row, one check, as at decode.
            for row in range(rows):
                alarms[name] += not one.holds(x_TI[row : row + 1], y_TO[row : row + 1])
            checks[name] += rows
            progress((count + 9 * sum(checks.values()) // HONEST_FOR_EACH) // 10)
    honest = sum(checks.values())
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            **{
                f"missed in {name.removeprefix('torch.')}": f"{found.total():,} of {told[name]:,}"
                for name, found in missed.items()
            },
            "false alarms": f"{sum(alarms.values()):,} of {honest:,}",
            "of them in integers": f"{alarms['int8']:,} of {checks['int8']:,}",
        },
        time.monotonic() - began,
        passed=not any(found.total() for found in missed.values())
        and all(told[name] for name in missed)
        and not any(alarms.values())
        and honest >= count * HONEST_FOR_EACH,
    )


def _honest(products: Products, checks: int) -> Iterator[tuple[Site, str, int]]:
    """Say what to check: all sites and arithmetics in turns, with other secrets each time."""
    rows = max(1, min(125, checks // len(products.all)))
    for place in range(-(-checks // rows)):
        if place % len(products.all) == 0:
            products.redraw()
        yield *products.all[place % len(products.all)], rows
