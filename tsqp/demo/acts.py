"""The acts of the demo, one after another, and what comes after them."""

import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from protocol.errors import EndpointError
from protocol.model.config import read_config
from tee_side.chat.template import ChatTemplate, Conversation
from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import Policy, load_policy
from tsqp.demo.programs import (
    COMPUTING,
    LIES_AT,
    DemoServices,
    Liar,
    Tap,
    TapFeed,
    Tokens,
    generate,
    run_generate,
    stream_chat,
)
from tsqp.demo.verdict import (
    CLEAR_INTEGERS,
    RunCost,
    Verdict,
    act_panel,
    acts_table,
    chat_panel,
    check_refusal,
    checks_table,
    clear_reference,
    compare_floats,
    compare_integers,
    compare_served,
    lie_panel,
    operators_table,
    transformers_tokens,
)
from tsqp.extras import require
from tsqp.leakage_summary import leakage_summary
from tsqp.page.seen import VocabularyMatcher
from tsqp.processes import start_server
from tsqp.run.settings import model_directory

THREE_ACTS = {
    "tee-only": "all in the TEE",
    "attention-in-tee": "offloaded in the clear",
    "shielded": "offloaded under one-time pads",
}
# Once more: as a server, and then with a service that lies.
SERVED = LIED_TO = "shielded"
SAID = "Tell me a story about a fox."
SERVED_TITLE = "a chat over HTTP, with tee-runner serve"
LIES_TITLE = "and the service lies once"


@dataclass(frozen=True)
class Act:
    """A policy and what became of it. `requests`: what the tap heard, Init left out."""

    policy: Policy
    report: dict[str, Any]
    tokens: Tokens
    story: str
    requests: int


def run_demo(
    *, policies: Sequence[str], prompt: str, max_new_tokens: int, options: Sequence[str] = ()
) -> bool:
    """Run the demo with these policies; or in three acts, a chat over HTTP, and a lying service.

    `options`: of every tee-runner. Return whether the tokens are right, and the lie was refused.
    Raises TsqpError.
    """
    for module in ("transformers", "fastapi"):
        require(module, "tsqp demo", "the extra demo: pip install '.[demo]'")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A story may have characters that the terminal has not.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    chosen = [(load_policy(name), name) for name in policies or THREE_ACTS]
    console.print(
        "[bold]TSQP demo[/]: tee-runner is the TEE's part, gpu-service that of a GPU whose"
        " owner need not be trusted (here it computes on the CPU). A proxy on the wire sees what"
        " that owner can see."
    )
    # One token comes of the prompt alone: a service that is not asked cannot lie.
    lies = not policies and max_new_tokens > 1
    titles = [_title(policy, name) for policy, name in chosen]
    titles += [f"{SERVED}: {SERVED_TITLE}"] * (not policies) + [f"{LIED_TO}: {LIES_TITLE}"] * lies
    for number, title in enumerate(titles, 1):
        console.print(f"  {number}  {title}")
    console.print("Then every token is compared with a reference. All of it takes about a minute.")
    with tempfile.TemporaryDirectory(prefix="tsqp-demo-") as name, ExitStack() as running:
        folder = Path(name)
        services = DemoServices(running, folder, partial(console.print, soft_wrap=True))
        stage = Stage(console, services, folder, prompt, max_new_tokens, options)
        count = len(titles)
        acts = [
            stage.act(policy, name, f"{number} of {count}")
            for number, (policy, name) in enumerate(chosen, 1)
        ]
        served = (
            [] if policies else [stage.served(load_policy(SERVED), f"{len(acts) + 1} of {count}")]
        )
        lies = lies and acts[-1].requests > 0
        caught = [stage.lied_to(acts[-1], f"{count} of {count}")] if lies else []
        with console.status("comparing ..."):
            checks = [*stage.checks(acts), *served, *caught]
    costs = [RunCost(act.report) for act in acts]
    tables = [operators_table(cost) for cost in costs] if policies else []
    if len(costs) > 1:
        tables.append(acts_table(costs))
    for table in tables:
        console.print()
        console.print(table)
    notes = [
        "wire: round trip less what the service says it spent, and more than without the tap."
        " TEE: all the rest. Here both sides share one CPU, so nothing is gained in speed."
    ]
    if policies:
        notes.append(
            "What no operator accounts for, such as building requests, is everything else."
        )
    if any(act.report["pads"] for act in acts):
        notes.append("Pads were made on the way, and count; tee-runner pads make does it ahead.")
    if any(act.policy.services > 1 for act in acts):
        notes.append("Of service and dealer, which work at the same time, the slower one counts.")
    console.print(f"[dim]{' '.join(notes)}[/]")
    console.print()
    console.print(checks_table(checks))
    return all(check.passed for check in checks)


class Stage:
    """What all acts share: the services, the prompt, and where to show them."""

    def __init__(
        self,
        console: Console,
        services: DemoServices,
        folder: Path,
        prompt: str,
        max_new_tokens: int,
        options: Sequence[str] = (),
    ) -> None:
        self._console = console
        self._services = services
        self._folder = folder
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._options = options
        self._matcher = VocabularyMatcher(model_directory("demo"))

    def act(self, policy: Policy, name: str, number: str) -> Act:
        """Generate under one policy, with the tap in between, and show it."""
        console = self._console
        console.print()
        reach, feed = self._services.reach(policy), TapFeed()
        summary = (
            leakage_summary(policy, links_encrypted=False)
            or f"policy {policy.name}: nothing leaves the TEE"
        )
        title = f"{number}  {_title(policy, name)}"
        if name not in THREE_ACTS:  # too long for a title
            console.print(Text(policy.summary, style="dim"))
        console.print(Text(summary))
        story = Text(self._prompt, style="bold")

        def panel(**after: Any) -> Panel:
            return act_panel(
                title,
                story,
                feed,
                width=console.width,
                ascii_only=console.options.ascii_only,
                services=policy.services,
                broken=any(mask.broken for mask in policy.masks),
                **after,
            )

        tap = Tap(reach.endpoints[0], feed.add, endpoint=self._services.endpoint("tap"))
        with tap, self._live(panel) as draw:

            def show(piece: str) -> None:
                story.append(piece, style="not bold")
                draw()

            arguments = self._arguments(name, reach.options(tap.endpoint))
            report, tokens = generate(arguments, self._folder, show)
        EndpointError.unless(
            feed.requests or not report["rpc"]["count"],
            "tap",
            "no requests",
            "the runner's requests",
        )
        story.rstrip()
        said = str(story).removeprefix(self._prompt)
        reading = self._matcher.read(feed.inputs, report["prompt_token_ids"], said)
        count, per_token = len(tokens.ids), report["timing"]["tpot_s"]
        pace = f", {1 / per_token:.0f} a second" if per_token else ""
        subtitle = f"{count} token{'s' if count != 1 else ''}{pace}"
        console.print(panel(subtitle=subtitle, reading=reading))
        return Act(policy, report, tokens, said, feed.requests)

    @contextmanager
    def _live(self, panel: Callable[[], Panel]) -> Iterator[Callable[[], None]]:
        """Show a panel during the block, on a terminal; what is given draws it again."""
        if not self._console.is_terminal:
            yield lambda: None
            return
        with Live(panel(), console=self._console, refresh_per_second=12, transient=True) as live:
            yield lambda: live.update(panel())

    def served(self, policy: Policy, number: str) -> Verdict:
        """Chat over HTTP with `tee-runner serve`, show it as it comes, and check every token."""
        console, answer = self._console, list[str]()
        title = f"{number}  {policy.name}: {SERVED_TITLE}"

        def panel() -> Panel:
            return chat_panel(title, SAID, "".join(answer).rstrip(), width=console.width)

        console.print()
        arguments = [
            "--policy",
            policy.name,
            *self._services.reach(policy).options(),
            *self._options,
        ]
        with ExitStack() as running:
            pid, url = start_server(running, ["demo", "--port", "0", *COMPUTING, *arguments])
            console.print(f"tee-runner serve: process {pid}, ready at {url}")
            draw = running.enter_context(self._live(panel))

            def show(piece: str) -> None:
                answer.append(piece)
                draw()

            tokens = stream_chat(url, SAID, self._max_new_tokens, show)
        console.print(panel())
        prompt_ids = ChatTemplate(Tokenizer(model_directory("demo"))).encode(
            Conversation(messages=[{"role": "user", "content": SAID}])
        )
        return compare_served(policy.name, tokens, self._quietly(CLEAR_INTEGERS, prompt_ids))

    def lied_to(self, honest: Act, number: str) -> Verdict:
        """Generate once more, with one number of one reply changed, and show what comes of it.

        `honest`: the same run without the lie.
        """
        console, shown = self._console, list[str]()
        liar = Liar(min(LIES_AT, -(-honest.requests // 2)))
        reach = self._services.reach(honest.policy)
        console.print()
        tap_endpoint = self._services.endpoint("tap")
        with Tap(reach.endpoints[0], liar.hear, liar.answer, tap_endpoint) as tap:
            status, last = run_generate(
                self._arguments(LIED_TO, reach.options(tap.endpoint)), shown.append
            )
        if liar.lie is None:
            raise EndpointError("tap", got="no reply to lie in", expected="the service's replies")
        story = "".join(shown).rstrip()
        title = f"{number}  {honest.policy.name}: {LIES_TITLE}"
        console.print(lie_panel(title, self._prompt, story, liar.lie, last, width=console.width))
        return check_refusal(honest.policy.name, liar.lie, status, last, story, honest.story)

    def checks(self, acts: Sequence[Act]) -> list[Verdict]:
        """Compare every act with what it must be equal to."""
        prompt_ids = acts[0].report["prompt_token_ids"]
        # Ours ends at the end of the context; transformers goes on.
        room = read_config(model_directory("demo")).context_length - len(prompt_ids)
        floats = transformers_tokens(prompt_ids, min(self._max_new_tokens, room))
        clear: dict[str, Tokens] = {}
        found = []
        for act in acts:
            if act.policy.arithmetic == "float":
                found.append(compare_floats(act.tokens, floats))
                continue
            name = clear_reference(act.policy, self._folder)
            if name not in clear:
                clear[name] = self._quietly(name)
            found.append(compare_integers(act.tokens, clear[name], floats))
        return found

    def _quietly(self, name: str, prompt_ids: Sequence[int] = ()) -> Tokens:
        """Generate from the prompt, or from others given as ids."""
        options = self._services.reach(load_policy(name)).options()
        arguments = self._arguments(name, options, prompt_ids)
        return generate(arguments, self._folder, lambda _: None)[1]

    def _arguments(
        self, name: str, options: list[str], prompt_ids: Sequence[int] = ()
    ) -> list[str]:
        ids = ",".join(map(str, prompt_ids))
        prompt = ("--prompt-token-ids", ids) if ids else ("--prompt", self._prompt)
        length = ("--max-new-tokens", str(self._max_new_tokens))
        return ["--policy", name, *prompt, *options, *self._options, *length]


def _title(policy: Policy, name: str) -> str:
    return policy.name if name not in THREE_ACTS else f"{policy.name}: {THREE_ACTS[name]}"
