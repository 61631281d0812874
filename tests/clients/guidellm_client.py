"""GuideLLM: a short benchmark of each endpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from checks import ADDRESS, MODEL, check, run, same, true

TOKENIZER = Path(__file__).parents[2] / "tsqp" / "demo_model"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

for path in PATHS:

    @check(f"{path}: five requests")
    def _(path: str = path) -> None:
        with TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = {
                "backend": f"kind=openai_http,target={ADDRESS},model={MODEL},request_format={path}",
                "profile": "kind=synchronous",
                "constraint": "kind=max_requests,count=5",
                "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
                "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
                "output": f"kind=json,path={report}",
            }
            command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
            command += [word for key, value in options.items() for word in (f"--{key}", value)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env={**os.environ, **OFFLINE}
            )
            true(not done.returncode, (done.stderr + done.stdout)[-400:])
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
            totals = benchmark["metrics"]["request_totals"]
            same((totals["successful"], totals["errored"]), (5, 0))


run("guidellm")
