"""What a configuration needs of the network: its port, the machine's own name, proxies, and the Hub."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
from huggingface_hub import constants

from cluster.base_model import resolve_path
from cluster.schema import DEMO_MODEL, AppSettings
from deployments.doctor.finding import Finding, fault, ok, warning
from deployments.local_cluster import port_is_free
from deployments.serve_config import ServeConfig

PATIENCE_S = 5.0


def network_findings(config: ServeConfig | None) -> Iterator[Finding]:
    """All of them; without a configuration, those that do not depend on it."""
    if config is not None:
        yield _port(config.address)
    yield _own_name()
    yield _proxy("127.0.0.1" if config is None else str(urlsplit(config.address).hostname))
    if config is not None:
        yield _hub(config.settings)


def _port(address: str) -> Finding:
    where = urlsplit(address)
    assert where.hostname is not None, "the address was built from a host"
    assert where.port is not None, "the address was built from a port"
    try:
        # An address that is none of this machine's cannot be listened on either.
        socket.getaddrinfo(where.hostname, where.port)
    except OSError as error:
        return fault("port", f"{where.hostname!r} is no address: {error}", "write another in http_options.host")
    if port_is_free(where.hostname, where.port):
        return ok("port", f"{where.port} of {where.hostname} is free")
    if (replicas := _served_replicas(address)) is not None:
        return ok("port", f"{where.port}: a server of this project answers there, with {replicas} replicas")
    return fault(
        "port",
        f"{where.port} of {where.hostname} is taken, or not to be listened on",
        "choose another with --port, or in http_options",
    )


def _served_replicas(address: str) -> int | None:
    """What the server at an address says of its health; None where it is another program's."""
    try:
        # Not through a proxy: it is this very machine.
        with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
            return int(client.get(f"{address.replace('0.0.0.0', '127.0.0.1')}/health").json()["replicas"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        return ok("own name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return warning(
            "own name", f"{name} is no address here: {error}", "enter it in /etc/hosts: Ray's nodes look themselves up"
        )


def _proxy(host: str) -> Finding:
    proxies = sorted({url for scheme, url in urllib.request.getproxies().items() if scheme in ("http", "https", "all")})
    if not proxies:
        return ok("proxy", "none")
    if urllib.request.proxy_bypass(host):
        return ok("proxy", f"in use, but not for {host}")
    return warning(
        "proxy",
        f"requests to {host} would go through it",
        f"set NO_PROXY={host}, beside what it has: commands and clients need it",
    )


def _hub(settings: AppSettings) -> Finding:
    is_needed = settings.lora_config.allow_remote or (settings.model != DEMO_MODEL and not resolve_path(settings.model))
    if not is_needed:
        return ok("hub", "not needed: the model is no Hub id, and allow_remote is off")
    if constants.HF_HUB_OFFLINE:
        return ok("hub", "HF_HUB_OFFLINE is set: only what has been downloaded is served")
    try:
        status = httpx.head(constants.ENDPOINT, timeout=PATIENCE_S, follow_redirects=True).status_code
    except httpx.HTTPError as error:
        return warning(
            "hub",
            f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}",
            "set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 where everything has been downloaded",
        )
    token = (
        "with a token" if os.environ.get("HF_TOKEN") or os.path.exists(constants.HF_TOKEN_PATH) else "without a token"
    )
    return ok("hub", f"{constants.ENDPOINT} answers (status {status}), {token}")
