"""Decides who may use which route: API keys, and what a web page may do. No HTTP machinery in this
file.

A server on one's own machine can be reached by every web page that is open there. So:

- A page may use the server only if its `Origin` is in --allowed-origins, or is the server itself
  by a name that it knows: an IP address, localhost, --host, this machine's host name, or the host
  of an allowed origin. `Sec-Fetch-Site` must agree, where a browser sends it.
- Whatever a browser sends needs such a name in `Host`, except for the open routes: any other name
  may be a page's own that was pointed at this address (DNS rebinding).
- A browser changes nothing without an `Origin`: an `<img>` sends none, and on plain HTTP a browser
  says nothing of the page that holds it.

A followed link is not the page's own request: it may read, as a typed address may.

Everything that is no browser, such as curl, trainers and routers, may use any name. What tells a
browser is `Origin`, `Sec-Fetch-Site` or `Accept-Language`: it sends the last whatever a page does.
A client that sends `Accept-Language` too, as Deno's fetch does, counts as one.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sglang.srt.entrypoints.control_calls import CALL_PATHS
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.trainer_routes import TRAINER_PATHS
from sglang.srt.server_args import ServerArgs


class Access(Enum):
    """The key that a route asks for: none; --api-key; --admin-api-key, or else --api-key."""

    OPEN = "open"
    USER = "user"
    ADMIN = "admin"


# Every route that the application has, by its path as it was registered.
ROUTE_ACCESS: Mapping[str, Access] = {
    **dict.fromkeys(
        ("/", "/docs", "/health", "/health_generate", "/ready", "/metrics"), Access.OPEN
    ),
    **dict.fromkeys(
        (
            "/detokenize",
            "/generate",
            "/get_load",
            "/get_loads",
            "/get_model_info",
            "/get_server_info",
            "/get_weight_version",
            "/model_info",
            "/openapi.json",
            "/ping",
            "/server_info",
            "/tokenize",
            "/tokenizer_info",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/loads",
            "/v1/models",
            "/v1/models/{model:path}",
            "/weight_version",
        ),
        Access.USER,
    ),
    **dict.fromkeys(
        (
            "/abort_request",
            "/flush_cache",
            "/update_weights_from_tensor",
            *CALL_PATHS,
            *TRAINER_PATHS,
        ),
        Access.ADMIN,
    ),
}

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")  # scheme://host[:port]
# A proxy in front may go by the first one, and this server by another.
DECIDING_HEADERS = ("Authorization", "Host", "Origin", "Sec-Fetch-Mode", "Sec-Fetch-Site")
AUTHORIZATION = b"authorization"  # sglang-router sends a client's and its own, the same one
OWN_SITES = (b"same-origin", b"none")  # `none`: the user typed the address

ALLOW = "start it with --allowed-origins and the page's origin"
FOREIGN_PAGE = f"Web pages of another origin may not use this server; to let them, {ALLOW}."
UNKNOWN_HOST = (
    "A browser, or a client that sends Accept-Language as browsers do, asked for a host name that"
    " this server does not know. Use its IP address or --host, do not send Accept-Language, or"
    " start the server with --allowed-origins http://NAME:PORT."
)
NO_ORIGIN = (
    "A browser, or a client that sends Accept-Language as browsers do, may not change this server"
    " by a request without an Origin. Send an Origin, or no Accept-Language."
)
SENT_TWICE = "The header `{name}` was sent more than once; send it once."
NO_ADMIN_KEY = (
    "--allow-pickled-weights needs --admin-api-key: only who has that key may send them. Give one,"
    " or leave the flag out."
)
NO_KEY = "This route needs the header `Authorization: Bearer` with the {flag} of this server."


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused; the message names the remedy."""

    status_code: int
    message: str


@dataclass(frozen=True)
class AccessRules:
    """The rules that follow from the flags and this machine.

    Attributes:
        allowed_origins: in lower case, as browsers send them.
        known_hosts: names beside IP addresses and localhost, in lower case, without ports.
    """

    api_key: bytes | None = field(default=None, repr=False)
    admin_api_key: bytes | None = field(default=None, repr=False)
    allowed_origins: frozenset[str] = frozenset()
    known_hosts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, server_args: ServerArgs) -> AccessRules:
        """The rules of a server.

        Raises:
            LaunchError: if a key or an origin is one that no client can send, or a key is missing.
        """
        if server_args.allow_pickled_weights and server_args.admin_api_key is None:
            raise LaunchError(NO_ADMIN_KEY)
        origins = _origins(server_args.allowed_origins)
        machine = socket.gethostname().lower()
        hosts = {server_args.host.lower(), machine, machine.partition(".")[0]}
        return cls(
            _key("--api-key", server_args.api_key),
            _key("--admin-api-key", server_args.admin_api_key),
            origins,
            frozenset({*hosts, *(_host_name(_host_of(origin)) for origin in origins)} - {""}),
        )

    def knows(self, host: str) -> bool:
        """Tells whether no stranger can have pointed this `Host` (name, maybe a port) at the
        server."""
        name = _host_name(host)
        if name in self.known_hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def refusal_of(
    rules: AccessRules, access: Access, headers: Sequence[tuple[bytes, bytes]]
) -> Refusal | None:
    """Finds what is wrong with a request for a route, if anything.

    Args:
        headers: names, in lower case, and values, as they were sent.
    """
    counts = Counter(name for name, _ in headers)
    counts[AUTHORIZATION] = len({value for name, value in headers if name == AUTHORIZATION})
    for name in DECIDING_HEADERS:
        if counts[name.lower().encode()] > 1:
            return Refusal(400, SENT_TWICE.format(name=name))
    found = dict(headers)
    return _refusal_of_page(rules, access, found) or _refusal_of_key(rules, access, found)


def _refusal_of_page(
    rules: AccessRules, access: Access, headers: Mapping[bytes, bytes]
) -> Refusal | None:
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if b"origin" in headers:
        origin = headers[b"origin"].decode("latin-1").lower()
        if origin in rules.allowed_origins:
            return None
        if not host or _host_of(origin) != host:
            return Refusal(403, FOREIGN_PAGE)
    is_link = headers.get(b"sec-fetch-mode") == b"navigate" and access is not Access.ADMIN
    if headers.get(b"sec-fetch-site", b"none").strip().lower() not in OWN_SITES and not is_link:
        return Refusal(403, FOREIGN_PAGE)
    if access is Access.OPEN or not _is_from_browser(headers):
        return None
    if not rules.knows(host):
        return Refusal(403, UNKNOWN_HOST)
    if access is Access.ADMIN and b"origin" not in headers:
        return Refusal(403, NO_ORIGIN)
    return None


def _is_from_browser(headers: Mapping[bytes, bytes]) -> bool:
    if b"origin" in headers or b"sec-fetch-site" in headers:
        return True
    # Node's fetch sends Accept-Language too, and Sec-Fetch-Mode, which browsers send with the site.
    return b"accept-language" in headers and b"sec-fetch-mode" not in headers


def _refusal_of_key(
    rules: AccessRules, access: Access, headers: Mapping[bytes, bytes]
) -> Refusal | None:
    key, flag = rules.api_key, "--api-key"
    if access is Access.ADMIN and rules.admin_api_key is not None:
        key, flag = rules.admin_api_key, "--admin-api-key"
    if access is Access.OPEN or key is None:
        return None
    scheme, _, token = headers.get(AUTHORIZATION, b"").partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key):
        return None
    return Refusal(401, NO_KEY.format(flag=flag))


def _host_of(origin: str) -> str:
    """Returns what a browser sends as `Host` to this origin."""
    return origin.partition("://")[2]


def _host_name(host: str) -> str:
    """`Host` in lower case, without the port, the brackets of an IPv6 address and a last dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _key(flag: str, value: str | None) -> bytes | None:
    if value is None:
        return None
    if not value or value != value.strip() or not value.isprintable():
        raise LaunchError(
            f"{flag} is empty, or has control characters or spaces around it: no client can send"
            " it. Give another key, or leave the flag out."
        )
    return value.encode()


def _origins(text: str | None) -> frozenset[str]:
    origins = frozenset(entry.strip().lower() for entry in (text or "").split(",")) - {""}
    for origin in sorted(origins):
        if not ORIGIN.fullmatch(origin):
            raise LaunchError(
                f"--allowed-origins: {origin!r} is no origin, such as https://chat.example or"
                " http://localhost:3000 (no path; several with commas)."
            )
    return origins
