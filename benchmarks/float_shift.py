"""How far a service that stays below the tolerance of float checks can move the logits.

    python -m benchmarks.float_shift [--model DIR] [--positions 24] [--steps 8] [--json FILE]

Products of floats are verified within a tolerance (`tsqp.lab.research.float_check.FloatCheck`); a
service that knows it may add an error of that length to every row of every product. This searches
for the worst one: at each linear operator and at the LM head, for every position of the context, an
error along the gradient of the objective, as long as the limit lets through, projected back to that
length in each of `--steps` iterations (projected gradient ascent, the first of which starts from no
error). The objective is the logit of the runner-up less that of the likeliest token, at the last
position. What is found is a lower bound of what can be reached; lengths are those whose expected
estimate is the limit itself, which about half of such checks would refuse, so for a single position
it is nearer to an upper one.

The forward pass is transformers' own in float32 on the demo model's validation text; the tolerance
is that of the dtype named. `margin`: likeliest less runner-up; `shift`: by how much it shrank;
`flipped`: where the runner-up has overtaken.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Fields, Found, Options, Place, main, say
from benchmarks.train_demo import VALIDATION_FILE
from protocol.errors import SettingsError
from protocol.tensors import torch_dtype
from tee_side.engine.tokenizer import Tokenizer
from tsqp.lab.research.float_check import Tolerance
from tsqp.run.settings import model_directory

DTYPES = ("float32", "float16", "bfloat16")
_CONTEXT = 64
# Modules that are verified as one product.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


class _Product:
    """The modules of one product, and the error [1, T, O] that is added to all that they return.

    `limit`: how long a row of it may be, [1, T, 1], as of the last pass.
    """

    def __init__(self, modules: Sequence[torch.nn.Linear]) -> None:
        weight = torch.cat([module.weight.detach() for module in modules]).double()
        self._gain = float(weight.norm()) / math.sqrt(weight.shape[1])
        self._width, start = len(weight), 0
        for module in modules:
            module.register_forward_hook(partial(self._add, start))
            start += module.out_features

    def start(self, relative: float, tokens: int) -> None:
        """Begin a search without errors."""
        self._relative, self._exact = relative, torch.zeros(1, tokens, self._width)
        self.error = torch.zeros_like(self._exact, requires_grad=True)

    def _add(
        self, start: int, _module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        columns = slice(start, start + output.shape[-1])
        self._exact[..., columns] = output.detach()
        size, length = (x.norm(dim=-1, keepdim=True) for x in (self._exact, inputs[0].detach()))
        self.limit = self._relative * (size + self._gain * length)
        return output + self.error[..., columns]

    def ascend(self) -> None:
        """Go along the gradient, and back to the limit's length."""
        error = self.error.detach()
        if (gradient := self.error.grad) is not None:
            error = error + gradient / _length(gradient) * self.limit
        self.error = (error * (self.limit / _length(error)).clamp_max(1.0)).requires_grad_()


def _length(x: torch.Tensor) -> torch.Tensor:
    """Return the length of each row, and not zero."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30)
    return length


class Search:
    """The model with an error at every product."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.train(False)
        self._model.requires_grad_(False)
        named = dict(self._model.named_modules())
        self._products = [_Product([self._model.lm_head])]
        for layer in range(self._model.config.num_hidden_layers):
            for names in _FUSED:
                block = "self_attn" if names[0] in ("q_proj", "o_proj") else "mlp"
                prefix = f"model.layers.{layer}.{block}"
                self._products.append(_Product([named[f"{prefix}.{name}"] for name in names]))

    def worst(self, ids: Sequence[int], relative: float, steps: int) -> tuple[float, float]:
        """Return the margin without errors, and the smallest that was found with them."""
        for product in self._products:
            product.start(relative, len(ids))
        logits = self._logits(ids)
        first, second = (int(token) for token in logits.topk(2).indices)
        margin = smallest = float((logits[first] - logits[second]).detach())
        for _ in range(steps):
            (logits[second] - logits[first]).backward()
            for product in self._products:
                product.ascend()
            logits = self._logits(ids)
            others = logits.detach().clone()
            others[first] = -math.inf
            smallest = min(smallest, float(logits[first] - others.max()))
        return margin, smallest

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=torch.tensor([ids])).logits[0, -1]
        return logits


def measure(options: Options, _place: Place) -> Found:
    """Search at some positions of the text, in every dtype. Raises TsqpError."""
    directory, positions = model_directory(options.model), options.positions
    file = directory / VALIDATION_FILE
    SettingsError.unless(file.is_file(), str(file), "no such file", "text to search on")
    ids = Tokenizer(directory).encode(file.read_text(encoding="utf-8")[:200_000])
    starts = [number * (len(ids) - _CONTEXT) // positions for number in range(positions)]
    search = Search(directory)
    results: list[Fields] = []
    for dtype in DTYPES:
        relative = Tolerance.of(torch_dtype(dtype), None).relative
        found = [search.worst(ids[at : at + _CONTEXT], relative, options.steps) for at in starts]
        shifts = [margin - smallest for margin, smallest in found]
        result = {
            "dtype": dtype,
            "relative": relative,
            "positions": positions,
            "shift_median": median(shifts),
            "shift_largest": max(shifts),
            "margin_median": median(margin for margin, _ in found),
            "flipped": sum(smallest < 0 for _, smallest in found),
        }
        say(f"{result}")
        results.append(result)
    return {
        "model": options.model,
        "context": _CONTEXT,
        "steps": options.steps,
        "results": results,
    }, True


if __name__ == "__main__":
    main(__doc__, measure, model="demo", positions=24, steps=8)
