"""Puts the HTTP server together: engine, keys, limits, audit log, metrics, page."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import logging
import os
import signal
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import uvicorn
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol import native
from protocol.errors import EndpointError, ResumedError, SettingsError
from tee_side.protect.resumption import ResumeWatch, watch
from tee_side.runner import Runner
from tee_side.serve.answers import OfferedModel
from tee_side.serve.app import Guarded, create_app
from tee_side.serve.audit_log import AuditLog
from tee_side.serve.background import BackgroundEngine, State
from tee_side.serve.errors import ApiError, loading
from tee_side.serve.exchange import Serving, anyone
from tee_side.serve.grammar import GrammarCompiler
from tee_side.serve.identity import Attestation, Identity, Sealing
from tee_side.serve.keys import ApiKeys, Limits
from tee_side.serve.watch import Metrics, Watch
from tsqp.key_files import AUDIT_KEY
from tsqp.run.conversations import chat_template, default_sampling
from tsqp.run.load import policy_digest
from tsqp.run.process import EXIT_REFUSED, complain
from tsqp.run.server_settings import ServeSettings

if TYPE_CHECKING:
    from tsqp.page.feed import Feed

log = logging.getLogger("tee_side")

_SHUTDOWN_S = 5
_BACKLOG = 1024
_SYNC_S = 1.0
_TRIM_S = 10.0

# Names of a certificate and its key, in PEM.
Tls: TypeAlias = "tuple[str | Path, str | Path]"


class Parts(NamedTuple):
    """What a server has of its own, opened before a model is loaded.

    `tls`: names of certificate and key, None without TLS.
    """

    listening: socket.socket
    tls: Tls | None
    keys: ApiKeys | None
    audit: AuditLog | None
    identity: Identity | None
    starting: Starting


class Starting:
    """Answers every request with 503 while the model is loaded, from a thread; see `close`."""

    def __init__(self, listening: socket.socket, tls: Tls | None) -> None:
        self._server = uvicorn.Server(_configured(_not_yet, tls))
        # The server closes what it is given.
        given = {"sockets": [listening.dup()]}
        self._thread = threading.Thread(target=self._server.run, kwargs=given, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. New clients wait in the backlog until the server itself accepts them.

        A client that has connected, and has not sent a request yet, is disconnected.
        """
        self._server.should_exit = True
        self._thread.join()


async def _not_yet(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await loading().response()(scope, receive, send)


def _configured(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    certificate, key = tls or (None, None)
    return uvicorn.Config(
        app,
        # Nothing of a request is logged: paths and headers may hold what a client says.
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ssl_certfile=certificate,
        ssl_keyfile=key,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


@contextmanager
def opened_parts(settings: ServeSettings, identity: Identity | None) -> Iterator[Parts]:
    """Open the address, the keys and the audit log, and read the certificate.

    `identity`: whose certificate it is, in place of a file. Raises EndpointError, SettingsError,
    KeyFileError and AuditLogError.
    """
    tls: Tls | None = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = settings.tls_certificate, settings.tls_key
        # Read once, so that the command says what is wrong with them.
        with SettingsError.for_os(
            "--tls-certificate and --tls-key",
            "a certificate and its key, as PEM, without a passphrase",
            ValueError,
            ValueError.__name__,
        ):
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*tls, "")
    keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
    path, file, descriptor = settings.audit_log, settings.audit_key, settings.audit_key_fd
    with ExitStack() as opened:
        if identity is not None:
            tls = opened.enter_context(tls_files(identity))
        given = [] if file is None else [partial(AUDIT_KEY.read, file)]
        given += [] if descriptor is None else [partial(AUDIT_KEY.read_from, descriptor)]
        SettingsError.unless(
            len(given) == (path is not None),
            "--audit-log",
            "another combination",
            "--audit-log with one of --audit-key and --audit-key-fd, or none of them",
        )
        audit = None if path is None else opened.enter_context(AuditLog(path, given[0]()))
        host, port = settings.host, settings.port
        listening = opened.enter_context(
            socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        )
        with EndpointError.for_os(f"{host}:{port}", "a free address"):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(_BACKLOG)
        starting = opened.enter_context(closing(Starting(listening, tls)))
        yield Parts(listening, tls, keys, audit, identity, starting)


@contextmanager
def tls_files(identity: Identity) -> Iterator[tuple[str, str]]:
    """Give names for the certificate and key of an identity, which never are on a disk.

    What takes names alone, as OpenSSL does, can open them in the block.
    """
    certificate = ssl.DER_cert_to_PEM_cert(identity.certificate).encode()
    key = identity.tls_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with ExitStack() as opened:
        names = []
        for content in (certificate, key):
            descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
            opened.callback(os.close, descriptor)
            os.write(descriptor, content)
            names.append(f"/proc/self/fd/{descriptor}")
        yield names[0], names[1]


def serve_forever(
    runner: Runner,
    settings: ServeSettings,
    parts: Parts,
    say: Callable[[str], None],
    feed: Feed | None,
) -> None:
    """Serve until a signal ends it. `say`: tells a person what happens."""
    if parts.audit is not None:
        parts.audit.record("start", policy=runner.policy.name)
    parts.starting.close()
    # What uvicorn's own command takes: the loop of libuv, where there is one.
    config = uvicorn.Config("", loop="auto", log_config=None)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as loop:
        loop.run(_serve(runner, settings, parts, say, feed))


async def _serve(
    runner: Runner,
    settings: ServeSettings,
    parts: Parts,
    say: Callable[[str], None],
    feed: Feed | None,
) -> None:
    listening, audit = parts.listening, parts.audit
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(note_failure)
    scheme = "http" if parts.tls is None else "https"
    host, port = listening.getsockname()[:2]
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    if (resumption := watch()) is not None:
        loop.add_reader(resumption, end_if_resumed, resumption)

    def tell(state: State) -> None:
        say(f"ready: {address}/v1" if state == "ready" else "the engine has failed")

    engine = BackgroundEngine(
        runner.engine,
        call=loop.call_soon_threadsafe,
        filling=runner.filling,
        totals=runner.totals,
        waits=lambda: runner.services.waits,
        tell=tell,
    )
    app = _app(runner, settings, feed, parts, engine)
    server = uvicorn.Server(_configured(app, parts.tls))
    # SIGHUP is ignored where no API key file is given.
    loop.add_signal_handler(signal.SIGHUP, bool if parts.keys is None else parts.keys.reload)
    # Each thread's heap stays as large as it ever was: 64 streams took 4 MiB more in six minutes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    chores = [] if trim is None else [asyncio.create_task(_every(_TRIM_S, partial(trim, 0)))]
    if audit is not None:
        chores.append(asyncio.create_task(_every(_SYNC_S, audit.sync)))
    engine.start()
    try:
        await server.serve(sockets=[listening])
    finally:
        await asyncio.to_thread(engine.close)
        for chore in chores:
            chore.cancel()
            with suppress(asyncio.CancelledError):
                await chore


def end_if_resumed(resumption: ResumeWatch) -> None:
    """End this process at once where its VM was resumed from a snapshot.

    No cleaning up runs, and no client gets an answer: records of TLS and of the audit log would be
    made of keys and counters that another copy of this VM has, too.
    """
    try:
        resumption.check()
    except ResumedError as error:
        complain(f"tee-runner: error: {error}")
        os._exit(EXIT_REFUSED)


def note_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the type and the line of an error in a callback or a task, and not its text.

    asyncio's default message includes `str(error)`, which may quote a prompt.
    """
    error: BaseException | None = context.get("exception")
    fields = {"error": type(error).__name__}
    if error is not None and error.__traceback__ is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fields["at"] = f"{frame.filename}:{frame.lineno}"
    log.error("callback_failed", extra={"fields": fields})


def _app(
    runner: Runner,
    settings: ServeSettings,
    feed: Feed | None,
    parts: Parts,
    engine: BackgroundEngine,
) -> ASGIApp:
    config, policy = runner.config, runner.policy
    keys, audit, identity = parts.keys, parts.audit, parts.identity
    name = settings.served_model_name or Path(settings.model).resolve().name
    model = OfferedModel(
        name=name,
        policy=policy.name,
        config=config,
        tokenizer=runner.tokenizer,
        template=chat_template(settings, runner.tokenizer),
        max_model_len=runner.engine.context,
        default_max_tokens=settings.default_max_tokens,
        system_fingerprint=_fingerprint(runner),
        created=int(time.time()),
        read_embedding=partial(runner.embedding, settings.pooling),
        tool_parser=settings.tool_parser,
        reasoning_effort=settings.reasoning_effort,
        sampling=(
            default_sampling(runner.settings.model, runner.settings.manifest)
            if settings.generation_config == "auto"
            else {}
        ),
    )
    compiler = GrammarCompiler(runner.tokenizer, config.vocab_size, config.eos_token_ids)
    limits = Limits(keys.of if keys is not None else lambda _: None)
    metrics = Metrics(
        name, engine.stats, None if audit is None else lambda: (audit.errors, audit.lost)
    )
    serving = Serving(
        engine=engine,
        model=model,
        compile_grammar=compiler.compile,
        version=version("tsqp"),
        watch=Watch(limits, metrics, audit, policy.name),
        authorise=anyone if keys is None else partial(_authorise, keys),
        tempo_s=settings.fixed_tempo_ms / 1e3,
        round_usage=settings.round_usage,
        receipts=None if identity is None else identity.receipts,
    )
    app = create_app(serving, allow_origins=settings.allow_origin)

    async def scrape(request: HttpRequest) -> Response:
        content, content_type = metrics.page(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    app.router.routes.append(Guarded("/metrics", scrape, methods=["GET"], include_in_schema=False))
    if identity is not None:
        app.add_api_route(
            "/v1/attestation", Attestation(identity).answer, methods=["GET"], response_model=None
        )
    if feed is not None:
        from tsqp.page.feed import PageRequests, page_routes

        app.router.routes.extend(page_routes(feed, runner))
        app.add_middleware(PageRequests, feed=feed)
    return app if identity is None else Sealing(app, identity.hpke_key)


def _fingerprint(runner: Runner) -> str:
    """Name everything beside the request that the bits of an answer depend on.

    The version and the kernels' variant are written out. The rest is a digest: model, policy,
    dtype, and for sampling torch's version and the instructions that it has chosen.
    """
    said = [*runner.digests, policy_digest(runner.policy).hex()]
    said += [str(runner.dtype), version("torch"), torch.backends.cpu.get_cpu_capability()]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return f"tsqp-{version('tsqp')}-{native.choice().variant}-{digest[:16]}"


def _authorise(keys: ApiKeys, request: HttpRequest) -> str:
    key = keys.find(request.headers.get("authorization"))
    if key is None:
        raise ApiError(
            401,
            "an API key that is known is needed: Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
    return key.name


async def _every(seconds: float, work: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(work)
