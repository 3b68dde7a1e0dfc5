"""What somebody who should not see or change another tenant's things may try, and how each try is judged."""

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.tenants.fleet import BASE, CANARIES, MAX_BODY_BYTES, SECRET, SECRET_FOLDER, TenantFleet

REFUSED = frozenset({400, 401, 403, 404, 405, 413, 429})
JSON = {"Content-Type": "application/json"}

CONTROL = "globex/absnt-7f3a"
"""A name of the same length as the secret one, that nobody has."""
OWN = "acme/own"
CHANGES = ("load", "unload", "pin", "unpin")


@dataclass(frozen=True)
class Try:
    """One request, and the statuses that are right for it."""

    method: str
    path: str
    """As it is written in the request line."""
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    allowed: frozenset[int] = REFUSED

    @property
    def sent(self) -> str:
        """All that it says itself, which an answer may repeat."""
        return f"{self.path} {self.content.decode('utf-8', 'replace')} {self.headers}"


def post(path: str, body: Any, allowed: frozenset[int] = REFUSED, **headers: str) -> Try:
    """A request with a JSON body."""
    return Try("POST", path, json.dumps(body).encode(), {**JSON, **headers}, allowed)


def chat(model: str, **fields: Any) -> dict[str, Any]:
    """Body of a short chat."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def completion(model: str, **fields: Any) -> dict[str, Any]:
    """Body of a short completion."""
    return {"model": model, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, **fields}


def uses(name: str, allowed: frozenset[int] = frozenset({404})) -> Iterator[Try]:
    """Every way to use a model, or to learn of it."""
    yield post("/v1/completions", completion(name), allowed)
    yield post("/v1/completions", completion(name, stream=True), allowed)
    yield post("/v1/completions", completion(name, n=2, echo=False, logprobs=1), allowed)
    yield post("/v1/chat/completions", chat(name), allowed)
    yield post("/v1/chat/completions", chat(name, stream=True), allowed)
    yield post("/tokenize", {"model": name, "prompt": "hi"}, allowed)
    yield post("/detokenize", {"model": name, "tokens": [1]}, allowed)
    yield Try("GET", f"/v1/models/{name}", allowed=allowed)
    yield Try("GET", f"/v1/models/{name.replace('/', '%2f')}", allowed=allowed)


def changes(name: str, allowed: frozenset[int]) -> Iterator[Try]:
    """Every way to change what has a name, but to load."""
    for operation in CHANGES[1:]:
        yield post(f"/v1/{operation}_lora_adapter", {"lora_name": name}, allowed)


def routes(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Method and path of every route an application describes, and of some that it does not."""
    for path, methods in description["paths"].items():
        for method in methods:
            yield method.upper(), path.replace("{model_id}", "common").replace("{", "").replace("}", "")
    for path in (
        "/v1/adapters", "/v1/fleet", "/v1/fleet/events", "/metrics", "/redoc", "/admin", "/v1/lora_aliases", "/",
    ):  # fmt: skip
        yield "GET", path


PUBLIC = ("/health", "/openapi.json", "/docs")
FOR_TENANTS = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


def without_key(description: dict[str, Any]) -> Iterator[Try]:
    """Every endpoint, for a client without a right key."""
    for method, path in routes(description):
        if path in PUBLIC:
            continue
        for body in (b"", b"{}", json.dumps(chat(BASE)).encode(), json.dumps({"lora_name": SECRET}).encode()):
            yield Try(method, path, body, JSON, frozenset({401}))
        for other in ("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"):
            yield Try(other, path, allowed=frozenset({401}))


def operators_routes(description: dict[str, Any], *, may_change: bool) -> Iterator[Try]:
    """Every endpoint that is not for this tenant's key."""
    for method, path in routes(description):
        is_change = path.endswith("_lora_adapter") and path.split("/")[-1].split("_")[0] in CHANGES
        if path in PUBLIC or path.startswith(FOR_TENANTS) or (is_change and may_change):
            continue
        for body in (b"", b"{}", json.dumps({"lora_name": OWN, "alias": "acme/x", "targets": {SECRET: 1}}).encode()):
            yield Try(method, path, body, JSON, frozenset({403, 404}))


def path_tricks(fleet: TenantFleet) -> Iterator[Try]:
    """Ways to load what lies elsewhere."""
    acme, secret = str(fleet.root / "acme"), str(fleet.root / "globex" / SECRET_FOLDER)
    encoded = secret.replace("/", "%2f")
    for path in (
        secret, f"{acme}/../globex/{SECRET_FOLDER}", f"{acme}/./../globex/{SECRET_FOLDER}", f"{acme}//../globex/",
        f"{acme}/link", f"{acme}/link/", f"{acme}/link/.", f"{acme}/up/globex/{SECRET_FOLDER}", f"{acme}/relative",
        f"{acme}/chain", f"{acme}/dangling", f"{acme}/half", f"{acme}/up/acme/../globex/{SECRET_FOLDER}", "..", ".",
        "/",
        "~", "~root", f"../globex/{SECRET_FOLDER}", "/etc", "/etc/passwd", "/proc/self/root/etc", "/proc/self/cwd",
        "/dev/fd/0", f"/proc/self/root{secret}", encoded, acme + "%2f..%2fglobex", f"file://{secret}",
        f"{acme}\\..\\globex",
        acme + "/..%00/globex", "$HOME", "`id`", "$(id)", "|id", f"{acme}/\u2024\u2024/globex",
        f"{acme}/\uff0e\uff0e/globex",
        "a" * 5000, "/".join(["x"] * 3000), f"{acme}/" + "../" * 500 + "etc", "globex-org/zebra",
        "acme-org/../globex/x",
        "acme-org/x@../../globex", "acme-org/x", "hub:globex-org/x", "https://huggingface.co/globex/zebra", " ", "\t",
        "\n",
        f" {secret}", f"{secret} ", f"{acme}/own/adapter_config.json", f"{fleet.root}/shared/common", f"{fleet.root}",
    ):  # fmt: skip
        for in_place in (False, True):
            body = {"lora_name": "acme/spare", "lora_path": path, "load_inplace": in_place}
            yield post("/v1/load_lora_adapter", body, frozenset({400, 404}))


NAMES = (
    "globex/new", "globex//zebra-7f3a", "/globex/zebra-7f3a", "acme/../globex/zebra-7f3a", "acme:globex/zebra-7f3a",
    "globex:zebra-7f3a", "globex\\zebra-7f3a", "GLOBEX/zebra-7f3a", "globex/zebra-7f3a ", " globex/zebra-7f3a",
    "globex%2fzebra-7f3a", "g\u200blobex/zebra-7f3a", "\uff47lobex/zebra-7f3a", "globex\u2215zebra-7f3a",
    "\u202eglobex/x",
    "globex/zebra-7f3a@1", "globex/*", "*", "globex/", "globex", "operator", "operator/x", "acme", "a" * 256,
    "x" * 100_000,
    "globex/zebra-7f3a\x1freplacement", "\x1freplacement", "acme/own\x1freplacement", "globex/zebra-7f3a=x", "null",
    "\u0000", "\ud7ff/\uffff", "😀/😀", "é", "e\u0301", "..", "../..", "/", "//", "tiny/x", "acme /own", "Acme/own",
)  # fmt: skip
"""Names that are not acme's, however they look."""


def name_tricks(fleet: TenantFleet, *, may_change: bool) -> Iterator[Try]:
    """Ways to name what is another's."""
    for name in NAMES:
        yield post("/v1/completions", completion(name))
        yield post("/v1/chat/completions", chat(name))
        yield post("/tokenize", {"model": name, "prompt": "hi"})
        if may_change:
            body = {"lora_name": name, "lora_path": str(fleet.root / "acme" / "spare")}
            yield post("/v1/load_lora_adapter", body)
            yield post("/v1/load_lora_adapter", {**body, "load_inplace": True})
            yield from changes(name, REFUSED)
    for path in (
        "/v1/models/..%2f..%2ffleet", "/v1/models/%2e%2e/%2e%2e/fleet", "/v1/models/../fleet",
        "/v1/models//globex/zebra-7f3a",
        "/v1/models/globex%252fzebra-7f3a", "/v1/models/globex/zebra-7f3a/", "/v1/models/globex/zebra-7f3a%00",
        "/v1/models/globex/zebra-7f3a?x=1", "/v1/models/globex/zebra-7f3a%23", "/v1/models/./globex/zebra-7f3a",
        "/v1/models/acme/own/../../globex/zebra-7f3a", "/v1/models/%67lobex/zebra-7f3a",
        "/v1/models/glob%65x%2Fzebra-7f3a",
        "//v1/models/globex/zebra-7f3a", "/v1/models/globex;/zebra-7f3a", "/-/routes/../v1/models/globex/zebra-7f3a",
    ):  # fmt: skip
        yield Try("GET", path, allowed=REFUSED | {200} if path.startswith("/-/") else REFUSED)


def header_tricks() -> Iterator[Try]:
    """Headers that a proxy or the framework might take for more than they are."""
    for name, value in (
        ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-User", "operator"), ("X-Real-IP", "127.0.0.1"),
        ("Forwarded", "for=127.0.0.1"), ("Host", "localhost"), ("X-Tenant", "globex"), ("X-API-Key", "operator"),
        ("OpenAI-Organization", "globex"), ("serve_multiplexed_model_id", SECRET), ("serve-multiplexed-model-id",
        SECRET),
        ("session_id", "replica:x"), ("X-Session-Id", "replica:x"), ("X-Request-Id", "globex\\r\\nX: y"),
        ("X-HTTP-Method-Override", "DELETE"), ("X-Original-URL", "/fleet"), ("X-Rewrite-URL", "/fleet"), ("Cookie",
        "key=operator"),
    ):  # fmt: skip
        for request in (
            post("/v1/completions", completion(SECRET), frozenset({404})), Try("GET", "/v1/models",
            allowed=frozenset({200})),
            post("/v1/completions", completion(BASE), frozenset({200})),
        ):  # fmt: skip
            yield Try(request.method, request.path, request.content, {**request.headers, name: value}, request.allowed)


def bodies() -> Iterator[Try]:
    """Bodies that are too large, too deep, or no JSON."""
    large = b'{"model": "tiny", "prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    deep = b'{"model": "tiny", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/load_lora_adapter"):
        yield Try("POST", path, large, JSON, frozenset({413, 403}))
        odd = (b"", b"null", b"[]", b'"x"', b"\xff\xfe", b"{" * 1000, b'{"model": NaN}', b"1" * 5000)
        for content in (deep, *wide(), *odd):
            yield Try("POST", path, content, JSON)
        yield Try("POST", path, b"model=tiny", {"Content-Type": "application/x-www-form-urlencoded"})
        yield Try("POST", path, b'{"model": "tiny"}', {"Content-Type": "text/plain"})


def wide() -> Iterator[bytes]:
    """Bodies with a great many of something, each of which takes a moment to look at."""
    silent, nobody = {"role": "user", "content": ""}, {"role": "x"}
    for body in (
        {**chat(BASE), **{f"k{index}": 0 for index in range(10_000)}}, chat(BASE, messages=[silent] * 8193),
        chat(BASE, messages=[nobody] * 8_000), chat(BASE, logit_bias={f"k{index}": "x" for index in range(10_000)}),
        {"tokens": [-1] * 50_000},
    ):  # fmt: skip
        yield json.dumps(body, separators=(",", ":")).encode()


def found_canaries(request: Try, text: str) -> list[str]:
    """What an answer holds of another tenant's that the request did not say itself."""
    rest = text
    for said in sorted(_said(request), key=len, reverse=True):
        rest = rest.replace(said, "")
    return [canary for canary in CANARIES if canary in rest]


def _said(request: Try) -> set[str]:
    """The words of a request that an answer may repeat, as they look within JSON."""
    paths = {request.path, unquote(request.path), unquote(request.path.partition("?")[0])}
    # What remains of a path when a client or a proxy has gone up its steps.
    paths |= {posixpath.normpath(path) for path in paths}
    words = {path.removeprefix("/v1/models/").strip("/") for path in paths} | set(request.headers.values())
    try:
        body = json.loads(request.content)
    except (ValueError, RecursionError):
        body = None
    for value in body.values() if isinstance(body, dict) else ():
        if isinstance(value, str):
            words.add(value)
    words |= {word.split("@")[0] for word in words} | {repr(word)[1:-1] for word in words}
    words |= {json.dumps(word)[1:-1] for word in words}
    return {word for word in words if word.strip()}
