"""Whether the time between tokens tells an observer of the requests which tokens showed text.

    python -m benchmarks.token_timing [--policy NAME] [--rounds 8] [--json FILE]

A copy of the demo model whose tokenizer shows nothing for every odd token id generates with
temperature 1, into a terminal. An observer notes when requests are sent. Two ways to show text take
turns, in processes of their own: `thread` is tee-runner's own (a printer by the clock), `inline`
decodes and writes between two tokens, as tee-runner did before.

For each token two times are measured: `gap`, from the last request before it was sampled to the
first one after, and `step`, from there to the first one of the token after it. `auc`: how often the
time of a token that showed text is longer than that of one that did not, 0.5 where they are alike
(Mann-Whitney), with its 95 % interval by DeLong (1988). `later_us`: how much longer, by the median.
"""

import json
import os
import pty
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import click
import numpy as np
from scipy.stats import rankdata

from benchmarks.harness import Found, Options, Place, main
from tee_side.engine.request import SamplingSettings
from tee_side.engine.tokenizer import TextStream, Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.cli.terminal import StatusLine, stream
from tsqp.lab.bench.prepare import endless
from tsqp.lab.bench.worker import Collector
from tsqp.lab.measure import in_fresh_process
from tsqp.run.settings import TextSettings, model_directory

WAYS = ("inline", "thread")
TOKENS = 480
PROMPT = [0, 813, 759, 262, 411]
# As often as tee-runner's status line was drawn, when it was drawn between tokens.
_REDRAW_S = 0.1


def half_silent(folder: Path) -> Path:
    """Return a demo model of which odd token ids are special tokens: their text is empty.

    No token ends a generation, so that all have the same length. `folder`: to make it in.
    """
    directory = endless(model_directory("demo"), folder)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    known = {one["id"] for one in content["added_tokens"]}
    content["added_tokens"] += [
        {"id": token_id, "content": text, "special": True, **flags}
        for text, token_id in content["model"]["vocab"].items()
        if token_id % 2 and token_id not in known
    ]
    path.unlink()  # it is the original under another name
    path.write_text(json.dumps(content), encoding="utf-8")
    return directory


def generate(
    way: str, model: Path, endpoint: str, policy: str, seed: int
) -> tuple[list[bool], list[float]]:
    """Generate into a terminal; return which tokens showed text, and when requests went, in us."""
    ours, theirs = pty.openpty()
    for stream_number in (1, 2):
        os.dup2(theirs, stream_number)
    # A process of its own, so that no thread of ours wakes up where text was shown.
    subprocess.Popen(["/bin/cat"], stdin=ours, stdout=subprocess.DEVNULL)
    settings = RunnerSettings(model, load_policy(policy), (endpoint,), threads=1)
    with Runner(settings, tokenizer=Tokenizer(model)) as runner:
        collector = Collector(keep_spans=True)
        runner.observe(collector)
        sampling = SamplingSettings(temperature=1.0, seed=seed)
        generation = runner.generate(PROMPT, max_new_tokens=TOKENS, sampling=sampling)
        if way == "thread":
            stream(runner, generation, TextSettings(model=str(model)))
        else:
            text, drawn = generation.text_stream(), 0.0
            with StatusLine("inline", generation) as status:
                for sampled in generation.steps():
                    if text is not None and (shown := text.feed(sampled.token_id)):
                        click.echo(shown, nl=False)
                    if (now := time.perf_counter()) - drawn > _REDRAW_S:
                        status.draw()
                        drawn = now
        decoder = TextStream(runner.tokenizer)
        showed = [decoder.feed(token_id) != "" for token_id in generation.token_ids]
    # The wire has two pieces of each request: there and back.
    wire = [span.start_us for span in collector.spans() if span.stage == "wire"]
    return showed, wire[::2]


def intervals(showed: list[bool], requests: list[float]) -> dict[str, list[tuple[bool, float]]]:
    """Return for each token but the first and last few whether it showed text, and its times."""
    each = len(requests) // len(showed)
    if each * len(showed) != len(requests):
        raise RuntimeError(f"{len(requests)} requests of {len(showed)} tokens")
    first, last = requests[::each], requests[each - 1 :: each]
    kept = range(8, len(showed) - 2)
    return {
        "gap": [(showed[n], first[n + 1] - last[n]) for n in kept],
        "step": [(showed[n], first[n + 2] - first[n + 1]) for n in kept],
    }


def summary(found: list[tuple[bool, float]]) -> dict[str, float | int | list[float]]:
    """Compare the times of tokens that showed text with those of tokens that did not.

    With the area under the curve and its 95 % interval (DeLong, DeLong and Clarke-Pearson).
    """
    printed = np.array([us for showed, us in found if showed])
    silent = np.array([us for showed, us in found if not showed])
    m, n = len(printed), len(silent)
    ranks = rankdata(np.concatenate([printed, silent]))
    over_silent = (ranks[:m] - rankdata(printed)) / n
    under_printed = 1 - (ranks[m:] - rankdata(silent)) / m
    area = float(over_silent.mean())
    error = float(np.sqrt(over_silent.var(ddof=1) / m + under_printed.var(ddof=1) / n))
    return {
        "printed": m,
        "silent": n,
        "auc": round(area, 4),
        "interval": [round(area - 1.96 * error, 4), round(area + 1.96 * error, 4)],
        "later_us": round(float(np.median(printed) - np.median(silent)), 1),
        "median_us": round(float(np.median([us for _, us in found])), 1),
    }


def measure(options: Options, place: Place) -> Found:
    """Let both ways take turns. Raises TsqpError."""
    times = defaultdict[tuple[str, str], list[tuple[bool, float]]](list)
    model, endpoint = half_silent(place.folder), place.service("demo")
    for seed in range(options.rounds):
        for way in WAYS if seed % 2 else WAYS[::-1]:
            found = intervals(
                *in_fresh_process(generate, way, model, endpoint, options.policy, seed)
            )
            for kind, values in found.items():
                times[way, kind] += values
    return {
        "policy": options.policy,
        "rounds": options.rounds,
        **{way: {kind: summary(times[way, kind]) for kind in ("gap", "step")} for way in WAYS},
    }, True


if __name__ == "__main__":
    main(__doc__, measure, policy="attention-in-tee", rounds=8)
