"""Checks redirects: none may weaken encryption, leave http(s), or lead into the user's own network."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

from localllm.errors import DownloadError

from .names import shown

_CHECK = "check HF_ENDPOINT and the network"


def origin_of(url: str) -> tuple[str, str, int]:
    """Return (scheme, host, port), the origin a token is bound to. Raises ValueError for an invalid URL."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def judge_redirect(source: str, location: str, home: str) -> str:
    """Return the absolute target of a Location header. Raises DownloadError if following it would be unsafe."""
    old = origin_of(source)
    try:
        target = urljoin(source, location)
        new = origin_of(target)
    except ValueError as error:
        raise DownloadError(f"{old[1]} redirects to {shown(location)!r}, which is not a valid URL", _CHECK) from error
    problem = None
    if new[0] not in ("http", "https"):
        problem = f"to a {shown(new[0], 12)}: URL"
    elif old[0] == "https" and new[0] == "http":
        problem = "from https to http"
    elif _is_inside(new[1]) and not _is_inside(origin_of(home)[1]):
        problem = f"to the internal address {shown(new[1])}"
    elif _is_link_local(new[1]):
        problem = f"to the link-local address {shown(new[1])}"
    if problem:
        raise DownloadError(f"{old[1]} redirects {problem}, which is not allowed", _CHECK)
    return target


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # connect() also accepts 2130706433 and 0x7f.1
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_inside(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and not address.is_global)


def _is_link_local(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_link_local
