"""One call a step beside one call an operator, over a modelled link of 20 ms round trip.

    python -m benchmarks.segments [--json FILE]

Llama-3.2-1B's shape against a service that takes as long as an H100 would, and every policy with
segments on the demo model against a service that computes. Each policy is a `tsqp bench` of its
own, in processes of its own. `ratio`: of a decoded token under `attention-in-tee`, of that model,
to one under the policy; exit status 1 if `clear-segment` of the 1b shape is below 20.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Fields, Found, Options, Place, main, noted
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.results import Report

RTT_US = 20_000
ONE_BY_ONE = "attention-in-tee"
LEAST_RATIO = 20.0
_CASE = ("--prefill", "128", "--context", "128", "--batch", "1", "--repeats", "3")
_MODELS = {
    "llama-3.2-1b": ("--shape", "llama-3.2-1b", "--device", "model:h100"),
    "demo": ("demo", "--device", "cpu"),
}
_POLICIES = {
    "llama-3.2-1b": (ONE_BY_ONE, "clear-segment", "attested-segment"),
    "demo": (ONE_BY_ONE, "clear-segment", "attested-segment", "stip-segment", "cloak-segment"),
}


def tsqp(*words: str) -> None:
    """Run the command. Raises subprocess.CalledProcessError."""
    subprocess.run([sys.executable, "-m", "tsqp", *words], check=True, stdout=sys.stderr)


def _report(model: str, name: str, folder: Path) -> Report:
    """Measure one policy."""
    needs: tuple[str, ...] = ()
    if (mask := load_policy(name).feature_mask) is not None:
        served, key = str(folder / name), str(folder / f"{name}.key")
        tsqp("provision", model, "--mask", mask.name, "--server-dir", served, "--key", key)
        needs = ("--server-model", served, "--key", key)
    link = ("--transport", "unix", "--link-rtt-us", str(RTT_US), "--no-baselines")
    document = folder / f"{model}-{name}.json"
    output = ("--decode-steps", "12", "--json", str(document))
    tsqp("bench", *_MODELS[model], "--policy", name, *needs, *_CASE, *link, *output)
    return Report.model_validate_json(document.read_bytes())


def measure(_options: Options, place: Place) -> Found:
    """Measure every policy of both models."""
    results: list[Fields] = []
    for model, policies in _POLICIES.items():
        token_ms = 0.0
        for name in policies:
            prompt, token = _report(model, name, place.folder).policies[0].cases
            token_ms = token_ms or token.step_ms.median
            results.append(
                noted(
                    "{model}, {policy}: {token_ms:.1f} ms a token ({ratio:.1f})",
                    {
                        "model": model,
                        "policy": name,
                        "token_ms": token.step_ms.median,
                        "prompt_ms": prompt.step_ms.median,
                        "ratio": token_ms / token.step_ms.median,
                        "rpcs": token.rpcs,
                        "bytes": token.bytes_sent + token.bytes_received,
                    },
                )
            )
    clear = next(r for r in results if r["policy"] == "clear-segment")
    return {"rtt_us": RTT_US, "results": results}, clear["ratio"] >= LEAST_RATIO


if __name__ == "__main__":
    main(__doc__, measure)
