"""Tries other people's clients against the real server, and writes a page of what they could do.

    python -m tests.clients.run --page docs/operate/clients.md

Each client gets an environment of its own in --place, with the newest version that its registry
has, and runs in a process of its own against `tests.kit.scripted_server`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from tee_side.chat.calls import CALL_FORMS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 600


@dataclass(frozen=True)
class Client:
    """A client: its packages, the program that tries it, and what it is called.

    `torch`: it needs that, too.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    torch: bool = False

    @property
    def node(self) -> bool:
        """Whether it is one for Node."""
        return self.program.endswith(".mjs")


CLIENTS = [
    Client("openai (Python)", "openai_client.py", ("openai",)),
    Client("openai (Node)", "openai_client.mjs", ("openai", "zod")),
    Client("OpenAI Agents SDK", "agents_client.py", ("openai-agents",)),
    Client("LangChain", "langchain_client.py", ("langchain", "langchain-openai")),
    Client(
        "LlamaIndex",
        "llamaindex_client.py",
        ("llama-index-llms-openai-like", "llama-index-llms-openai"),
    ),
    Client("LiteLLM", "litellm_client.py", ("litellm",)),
    Client("Instructor", "instructor_client.py", ("instructor",)),
    Client("Haystack", "haystack_client.py", ("haystack-ai",)),
    Client(
        "Vercel AI SDK",
        "ai_client.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
    ),
    Client("llm", "llm_client.py", ("llm",)),
    Client("lm-evaluation-harness", "lm_eval_client.py", ("lm_eval[api]",)),
    Client("GuideLLM", "guidellm_client.py", ("guidellm",), torch=True),
]


@dataclass(frozen=True)
class Row:
    """What came of a check; `reason`: why not, "" for yes."""

    client: str
    version: str
    check: str
    reason: str


def _torch() -> str:
    """Return which one this repository is tested with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(client: Client, folder: Path) -> None:
    """Make a client's environment, if it is not there."""
    if (folder / ".ok").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if client.node:
        (folder / "package.json").write_text("{}")
        commands = [["npm", "install", "--silent", "--ignore-scripts", *client.packages]]
    else:
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet"]
        commands = [
            [sys.executable, "-m", "venv", "."],
            # Older ones take minutes to find versions that go together.
            [*pip, "--upgrade", "pip"],
            # First, alone and exactly, as in the Makefile.
            *([[*pip, *os.environ.get("TORCH_ARGS", "").split(), _torch()]] * client.torch),
            [*pip, "--no-compile", *client.packages],
        ]
    for command in commands:
        subprocess.run(command, cwd=folder, check=True)
    (folder / ".ok").touch()


@contextmanager
def serving(form: str) -> Iterator[str]:
    """Run the server; yield its address."""
    command = [sys.executable, "-m", "tests.kit.scripted_server", "--form", form]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None or not (address := server.stdout.readline().strip()):
                raise SystemExit("tests.kit.scripted_server: got no address, expected one")
            yield address
        finally:
            server.terminate()


def attempt(client: Client, folder: Path, address: str) -> Iterator[Row]:
    """Run a client's program, and yield what it prints."""
    with TemporaryDirectory() as home:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ONLY": os.environ.get("ONLY", ""),
            "OPENAI_API_KEY": "unused",
            "DO_NOT_TRACK": "1",
            "HAYSTACK_TELEMETRY_ENABLED": "False",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        if client.node:
            for name in ("checks.mjs", client.program):
                shutil.copy(HERE / name, folder / name)
            command = ["node", str(folder / client.program), address]
        else:
            command = [str(folder / "bin" / "python"), str(HERE / client.program), address]
        found = 0
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=home,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            printed, failed = done.stdout, done.stderr if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            printed, failed = (late.stdout or b"").decode(), f"more than {LIMIT_S} s"
        for line in printed.splitlines():
            if line.startswith('{"version":'):
                found += 1
                yield Row(client.name, **json.loads(line))
        if failed or not found:
            yield Row(client.name, "", "the program", failed[-400:] or "nothing was printed")


def page(rows: list[Row]) -> str:
    """Return the text of docs/operate/clients.md."""
    lines = [
        "# Clients",
        "",
        "For application developers. Afterwards you know which clients of OpenAI's API were tried,"
        " and with what result.",
        "",
        "`make clients` installs each client from its registry, unchanged, in the newest version"
        f" ({datetime.now(UTC):%Y-%m-%d}), runs it against the real server on this machine, and"
        " writes this page. In place of a model there is a script (`tests/kit/scripted_server.py`):"
        " what is tried is the server's API, and the expected answer of each check is known. The"
        " programs are in `tests/clients`; `make clients ONLY=llm_client.py` runs one, and writes"
        " nothing.",
        "",
        f"{sum(not row.reason for row in rows)} of {len(rows)} checks pass.",
        "",
        "| client | version | check | works |",
        "|---|---|---|---|",
    ]
    for row in rows:
        reason = row.reason.replace("|", "\\|")
        said = f"no: {reason[:200]}" if reason else "yes"
        lines.append(f"| {row.client} | {row.version} | {row.check} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try them."""
    parser = argparse.ArgumentParser(prog="tests.clients.run", description="see above")
    parser.add_argument("--place", type=Path, default=ROOT / "build" / "clients", help="of clients")
    parser.add_argument("--page", type=Path, help="what is written")
    parser.add_argument("--only", action="append", help="a client, by the name of its program")
    parser.add_argument(
        "--form", choices=CALL_FORMS, default="hermes", help="how calls are written"
    )
    options = parser.parse_args()
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        said = f"{row.client} {row.version} | {row.check} | {row.reason or 'yes'}"
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()

    for client in CLIENTS:
        if options.only and client.program not in options.only:
            continue
        folder = options.place.resolve() / client.program.replace(".", "-")
        install(client, folder)
        with serving(options.form) as address:
            for row in attempt(client, folder, address):
                tell(row)
        # How calls are written is nothing that a client sees: one of them tries all forms.
        for form in sorted(CALL_FORMS.keys() - {options.form}) if client is CLIENTS[0] else ():
            with serving(form) as address:
                found = sorted(attempt(client, folder, address), key=lambda row: not row.reason)
            tell(replace(found[0], check=f"all of these, of a model of the form {form}"))
    if options.page is not None:
        options.page.write_text(page(rows))
    return int(any(row.reason for row in rows))


if __name__ == "__main__":
    sys.exit(main())
