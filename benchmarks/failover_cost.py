"""What it costs, while all is well, that another service could be asked.

    python -m benchmarks.failover_cost [--model DIR] [--transports unix,tcp] [--rounds 300]
        [--json FILE]

Three runners decode a sequence each, a token in turns, over services that answer at once
(`--device null`): two know one service, and one knows two that stand in for each other.

`two_to_one`: the time of a token with two services set against that with one in the same round, the
median over all rounds. `noise`: how far the other runner with one service is from the first, which
is nothing but the machine: the distance from 1 within which their ratio's median is in eight of ten
blocks of rounds. Exit status 1 if two services cost more than that, or noise is more than 0.2, on a
machine that is too busy to tell.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    TRANSPORTS,
    Fields,
    Found,
    Options,
    Place,
    Repeated,
    main,
    noted,
    transports,
)
from protocol.errors import SettingsError
from tee_side.policy.placement import load_policy
from tee_side.runner import RunnerSettings
from tsqp.lab.measure import in_turns
from tsqp.run.settings import model_directory

POLICY = "attention-in-tee"
MOST_NOISE = 0.2
_WARM_UP, _PROMPT = 20, 8
# Medians of fewer rounds than this are far from each other whatever was measured.
_BLOCKS, _LEAST_BLOCK = 10, 5
# The columns of what is timed, as many services each.
_ONE, _AGAIN, _TWO = range(3)
_SERVICES = (1, 1, 2)


def _ratio(times: Sequence[Sequence[float]], column: int) -> float:
    """Return the median over all rounds of one runner's time by the first one's."""
    return median(row[column] / row[_ONE] for row in times)


def _noise(times: Sequence[Sequence[float]]) -> float:
    """Return how far the other runner's ratio is from 1 in all but two blocks."""
    count = max(1, min(_BLOCKS, len(times) // _LEAST_BLOCK))
    edges = [len(times) * n // count for n in range(count + 1)]
    distances = sorted(abs(_ratio(times[a:b], _AGAIN) - 1) for a, b in pairwise(edges))
    # Something else may have run for a moment; not all the time.
    return distances[count - 1 - count * 2 // _BLOCKS]


def _measure(model: Path, transport: str, rounds: int) -> Fields:
    """Measure a decoded token over one transport. Raises TsqpError."""
    with Place() as place:
        device = ("--device", "null", "--arithmetic", "float")
        gpu = [place.service(model, *device, transport=transport) for _ in range(max(_SERVICES))]
        policy, steps = load_policy(POLICY), _WARM_UP + rounds
        settings = [RunnerSettings(model, policy, tuple(gpu[:n]), threads=1) for n in _SERVICES]
        runners = [Repeated(place, one, tokens=_PROMPT, steps=steps) for one in settings]
        times = in_turns([one.timed_ms for one in runners], rounds, _WARM_UP)
    noise, two_to_one = _noise(times), _ratio(times, _TWO)
    return noted(
        "{transport}: {one_ms:.2f} ms a token; two to one {two_to_one:.3f}, noise {noise:.3f}",
        {
            "transport": transport,
            "rounds": rounds,
            "one_ms": median(row[_ONE] for row in times),
            "two_ms": median(row[_TWO] for row in times),
            "two_to_one": two_to_one,
            "noise": noise,
            # The same again differs as much, and little enough to tell.
            "ok": two_to_one <= 1 + noise and noise <= MOST_NOISE,
        },
    )


def measure(options: Options, _place: Place) -> Found:
    """Measure over each transport. Raises TsqpError."""
    SettingsError.unless(options.rounds >= 1, "--rounds", str(options.rounds), "1 or more")
    model = model_directory(options.model)
    results = [_measure(model, name, options.rounds) for name in transports(options.transports)]
    found = {"policy": POLICY, "most_noise": MOST_NOISE, "results": results}
    return found, all(one["ok"] for one in results)


if __name__ == "__main__":
    main(__doc__, measure, model="demo", transports=",".join(TRANSPORTS), rounds=300)
