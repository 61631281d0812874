"""Real processes, small random models and free endpoints for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("TSQP_", "GPU_", "TEE_"))},
    "OMP_NUM_THREADS": "1",
}

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

ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_model(
    directory: Path, kind: str = "llama", seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """Save a random model of one architecture, and return it in eval mode.

    Weights are larger than transformers' default and norms and biases are not constant, so that a
    mistake in any operator is visible in the logits.
    """
    config_class, model_class = ARCHITECTURES[kind]
    settings = {**SIZES, **overrides}
    if kind == "qwen2":
        settings.pop("head_dim")  # Qwen2 has none: hidden_size / num_attention_heads
    model = model_class(config_class(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.eval()
    model.save_pretrained(directory)
    return model


@dataclass
class Service:
    """A running gpu-service process."""

    process: subprocess.Popen[str]
    endpoint: str
    log: list[str] = field(default_factory=list)

    def stop(self, sent: int = signal.SIGTERM) -> int:
        """Send a signal, collect the rest of the log, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sent)
        remaining, _ = self.process.communicate(timeout=30)
        self.log += (remaining or "").splitlines()
        return self.process.returncode


@contextmanager
def running_service(
    model: Path | str, endpoint: str, *arguments: str, dtype: str = "float32"
) -> Iterator[Service]:
    """Start a real gpu-service process and wait for its ready line; stop it by its process id.

    `endpoint` may end in `:*` or `:0` to take a free port; `Service.endpoint` says which.
    """
    command = [
        str(Path(sys.executable).parent / "gpu-service"),
        str(model),
        "--bind",
        endpoint,
        "--dtype",
        dtype,
        *arguments,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    service = Service(process, endpoint)
    try:
        deadline = time.monotonic() + 60
        while not service.log or " ready " not in f" {service.log[-1]} ":
            line = process.stderr.readline() if process.stderr else ""
            if not line or time.monotonic() > deadline:
                raise RuntimeError("gpu-service did not become ready:\n" + "\n".join(service.log))
            service.log.append(line.rstrip("\n"))
        service.endpoint = service.log[-1].split("endpoint=", 1)[1].split()[0]
        yield service
    finally:
        service.stop()


def run(
    program: str, *arguments: str, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one of the installed programs to its end."""
    return subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**ENVIRONMENT, **environment},
        check=False,
    )
