"""`tsqp demo`: a real gpu-service and a real tee-runner on loopback, and proof that it is right.

The runner's requests pass through a tap on their way to the service, so what is shown as received
is what is on the wire. The verdict compares token ids and logits with transformers.
"""

from __future__ import annotations

import codecs
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import rich.box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from protocol.errors import EndpointError, TsqpError
from tee_side.policy import Policy, load_policy
from tsqp.cli.program import model_directory
from tsqp.cli.status import bytes_for_people
from tsqp.tap import Seen, Tap

DTYPE = "float32"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
FEED_LINES = 14


class DemoError(TsqpError):
    """One of the demo's two processes ended before its work was done."""


def run_demo(*, policy: str, prompt: str, max_new_tokens: int) -> bool:
    """Run the demo; return whether the token ids are those of transformers."""
    console = Console(highlight=False)
    chosen = load_policy(policy)
    console.print(
        "[bold]TSQP demo[/]: light operators in one process (the TEE's part), heavy ones in"
        " another (the GPU's part; here it computes on the CPU)"
    )
    disclosure = chosen.disclosure() or f"policy {chosen.name}: nothing leaves the TEE"
    console.print(disclosure, markup=False)
    with tempfile.TemporaryDirectory(prefix="tsqp-demo-") as folder:
        report_path, logits_path = Path(folder) / "report.json", Path(folder) / "logits"
        command = [
            *("generate", "demo", "--policy", policy, "--prompt", prompt, "--dtype", DTYPE),
            *("--max-new-tokens", str(max_new_tokens)),
            *("--report", str(report_path), "--save-logits", str(logits_path)),
        ]
        feed = Feed()
        with _service(console, chosen) as endpoint, _tap(endpoint, feed) as tapped:
            _stream_story(console, [*command, "--gpu", tapped], prompt, feed, chosen)
        report = json.loads(report_path.read_text(encoding="utf-8"))
        console.print(_cost_table(report))
        console.print(
            "[dim]wire: round trip less what the service says it spent; it includes the tap that"
            " listens in. Operators without a line of their own (norms, RoPE, softmax, SiLU,"
            " sampling) and start-up of a step are in the last but one row.[/]"
        )
        return _verdict(console, report, logits_path)


class Feed:
    """The last requests that went over the wire, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Seen] = []
        self.last: deque[Seen] = deque(maxlen=FEED_LINES)

    def add(self, seen: Seen) -> None:
        """Take note of a request; called from the tap's thread."""
        self.count += 1
        if len(self.first) < FEED_LINES:
            self.first.append(seen)
        self.last.append(seen)


@contextmanager
def _service(console: Console, policy: Policy) -> Iterator[str | None]:
    """Start a gpu-service process and yield its endpoint; None if the policy needs none."""
    if not policy.needs_service:
        yield None
        return
    command = [_program("gpu-service"), "demo", "--bind", "tcp://127.0.0.1:*", "--dtype", DTYPE]
    with _child(command, stdout=subprocess.DEVNULL) as (process, log):
        line = log.ready_line(START_TIMEOUT_S)
        if line is None:
            raise DemoError(
                "gpu-service",
                got=log.last,
                expected=f"a line that says ready within {START_TIMEOUT_S:g} s",
            )
        endpoint = line.split("endpoint=", 1)[1].split()[0]
        console.print(f"gpu-service: process {process.pid}, ready at {endpoint}")
        yield endpoint


@contextmanager
def _child(
    command: list[str], *, stdout: int
) -> Iterator[tuple[subprocess.Popen[bytes], StderrReader]]:
    """Start one of our programs, and end it when the block ends in whatever way."""
    process = subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, env=_child_environment()
    )
    reader = StderrReader(process.stderr)
    try:
        yield process, reader
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()


def _child_environment() -> dict[str, str]:
    """Return our environment without settings of the two programs: the demo has its own.

    With a temperature, for example, the tokens would rightly differ from transformers'.
    """
    return {
        **{
            k: v for k, v in os.environ.items() if not k.startswith(("TEE_RUNNER_", "GPU_SERVICE_"))
        },
        "PYTHONUNBUFFERED": "1",
    }


class StderrReader:
    """Reads a child's stderr to its end in a thread of its own: a full pipe would block it.

    `last`: the last line that was not empty.
    """

    def __init__(self, stream: IO[bytes] | None) -> None:
        self.last = "no output"
        self._stream = stream
        self._ready: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._thread.start()

    def ready_line(self, timeout_s: float) -> str | None:
        """Return the line that says ready; None if the stream ends or time runs out before it."""
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def join(self) -> None:
        """Wait for the end of the stream, which comes when the child ends."""
        self._thread.join(END_TIMEOUT_S)

    def _read(self) -> None:
        with self._stream or open(os.devnull, "rb") as stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                self.last = text or self.last
                if " ready " in text:
                    self._ready.put(text)
        self._ready.put(None)


@contextmanager
def _tap(endpoint: str | None, feed: Feed) -> Iterator[str]:
    if endpoint is None:
        yield "tcp://127.0.0.1:9"  # never connected to: the policy needs no service
        return
    with Tap(endpoint, feed.add) as tap:
        yield tap.endpoint


def _stream_story(
    console: Console, arguments: list[str], prompt: str, feed: Feed, policy: Policy
) -> None:
    """Run tee-runner and show its text as it comes, beside what the GPU side receives."""
    command = [_program("tee-runner"), *arguments]
    with _child(command, stdout=subprocess.PIPE) as (process, errors):
        story = Text(prompt, style="bold")
        if console.is_terminal:
            first = _side_by_side(story, feed, console.width)
            with Live(first, console=console, refresh_per_second=12) as live:
                for piece in _pieces(process):
                    story.append(piece, style="not bold")
                    live.update(_side_by_side(story, feed, console.width))
        else:
            console.print(f"\n{prompt}", end="", soft_wrap=True, markup=False)
            for piece in _pieces(process):
                console.file.write(piece)
                console.file.flush()
            console.print(_feed_table(feed.first, feed, "What the GPU side received first"))
        status = process.wait(START_TIMEOUT_S)
        errors.join()
    if status != 0:
        raise DemoError("tee-runner", got=errors.last, expected="exit status 0")
    if policy.needs_service and feed.count == 0:
        raise EndpointError("tap", got="no requests", expected="the runner's requests")


def _pieces(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield decoded output as it comes, keeping a character together that is split over reads."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if process.stdout is None:
        return
    while chunk := os.read(process.stdout.fileno(), 4096):
        yield decoder.decode(chunk)


def _side_by_side(story: Text, feed: Feed, width: int) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=2)
    # On 80 columns the names of the operators leave room for two numbers.
    received = _feed_table(list(feed.last), feed, None, numbers=4 if width >= 110 else 2)
    grid.add_row(
        Panel(story, title="tee-runner: the story", height=FEED_LINES + 6),
        Panel(
            received,
            title=f"gpu-service: receives ({feed.count} requests)",
            height=FEED_LINES + 6,
            padding=0,
        ),
    )
    return grid


def _feed_table(rows: list[Seen], feed: Feed, title: str | None, numbers: int = 4) -> Table:
    caption = f"{len(rows)} of {feed.count} requests" if title else None
    table = Table(
        title=title,
        caption=caption,
        box=rich.box.SIMPLE_HEAD,
        title_justify="left",
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("layer", justify="right")
    table.add_column("operator", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("first numbers")
    for seen in rows:
        table.add_row(
            "" if seen.layer is None else str(seen.layer),
            seen.what,
            "x".join(map(str, seen.shape)),
            " ".join(
                f"{n:.0f}" if seen.dtype == "int64" else f"{n:+.3f}" for n in seen.numbers[:numbers]
            ),
        )
    return table


def _cost_table(report: dict[str, Any]) -> Table:
    table = Table(
        title="Cost per operator",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for name in ("operator", "where"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "RPCs", "sent", "received", "TEE ms", "wire ms", "GPU ms"):
        table.add_column(name, justify="right", no_wrap=True)
    placed = 0.0
    columns = ("tee_s", "wire_s", "gpu_s")
    sums = dict.fromkeys(columns, 0.0)
    for name, row in report["operators"].items():
        # Waiting in the service's queue is neither wire nor GPU; with one client it is next to 0.
        times = {**{c: row[c] for c in columns}, "wire_s": row["wire_s"] + row["queue_s"]}
        placed += sum(times.values())
        sums = {c: sums[c] + times[c] for c in columns}
        table.add_row(
            name,
            row["place"],
            str(row["calls"]),
            str(row["round_trips"]),
            _size(row["bytes_sent"]),
            _size(row["bytes_received"]),
            *(_milliseconds(times[c]) for c in columns),
        )
    rest = max(0.0, report["timing"]["total_s"] - placed)
    sums["tee_s"] += rest
    table.add_row("everything else", "tee", "", "", "", "", _milliseconds(rest), "", "")
    table.add_section()
    rpc = report["rpc"]
    table.add_row(
        "total",
        "",
        "",
        str(rpc["count"]),
        _size(rpc["bytes_sent"]),
        _size(rpc["bytes_received"]),
        *(_milliseconds(sums[c]) for c in columns),
    )
    return table


def _size(size: int) -> str:
    return bytes_for_people(size) if size else ""


def _milliseconds(seconds: float) -> str:
    """Render a time in 6 characters at most, so that the table fits a terminal of 80 columns."""
    if seconds == 0:
        return ""
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _verdict(console: Console, report: dict[str, Any], logits_path: Path) -> bool:
    """Run the same prompt through transformers, in this process, and compare."""
    import torch
    import transformers
    from safetensors.torch import load_file

    # Untyped: transformers' annotations of `generate` do not hold for its own models.
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    model = library.AutoModelForCausalLM.from_pretrained(
        model_directory("demo"), dtype=torch.float32
    )
    prompt_ids = torch.tensor([report["prompt_token_ids"]])
    ours: list[int] = report["token_ids"]
    with torch.inference_mode():
        output = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=len(ours),
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    theirs: list[int] = output.sequences[0, prompt_ids.shape[1] :].tolist()
    our_logits = load_file(logits_path)["logits"]
    their_logits = torch.cat(output.logits).float()
    shared = min(len(our_logits), len(their_logits))
    difference = (our_logits[:shared] - their_logits[:shared]).abs().max().item()
    identical = ours == theirs
    where = "" if identical else f" from token {_first_difference(ours, theirs)} on"
    word = "[bold green]identical[/]" if identical else f"[bold red]NOT identical{where}[/]"
    console.print(
        f"transformers {transformers.__version__}, same prompt, {DTYPE}: {len(ours)} token ids"
        f" {word}, largest logit difference {difference:.1e}",
        soft_wrap=True,
    )
    return identical


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _program(name: str) -> str:
    """Return the path of one of our own programs, beside this interpreter or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise DemoError(name, got="no such program", expected="it beside python or on PATH")
    return found
