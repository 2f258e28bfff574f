"""The HTTP server's own options; those of the engine are in `enginecore.config`."""

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from enginecore.errors import ConfigError


def _option(default: Any, text: str, *, repeat: bool = False) -> Any:
    return field(default=default, metadata={"help": text, "repeat": repeat})


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the HTTP server. Raises ConfigError when one is out of range."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 or :: for every network")
    port: int = _option(8000, "port to listen on; 0: any free one")
    uds: str | None = _option(None, "path of a Unix socket to listen on, in place of host and port")
    root_path: str = _option("", "path that a proxy in front puts before the routes, such as /llm")
    ssl_certfile: str | None = _option(None, "file of the certificate chain in PEM, to speak TLS")
    ssl_keyfile: str | None = _option(None, "file of the certificate's private key; default: in ssl_certfile")
    ssl_ca_certs: str | None = _option(
        None, "file of authorities in PEM: clients must show a certificate by one of them"
    )
    api_key: tuple[str, ...] = _option(
        (),
        "key that clients must send as a bearer token; can be given again; default: none",
        repeat=True,
    )
    api_key_file: str | None = _option(
        None, "file of further keys, one a line, each after a name for the log and a colon, or alone"
    )
    max_requests_per_key: int | None = _option(
        None, "requests that may generate at a time with one key; more get 429; default: no limit"
    )
    max_queue: int | None = _option(
        None, "requests that may wait for their first step; more get 429 with Retry-After; default: no limit"
    )
    max_body_bytes: int = _option(64 << 20, "largest body of a request; a larger one gets 413")
    admin_routes: bool = _option(
        False, "serve routes that change what all clients share: POST /reset_prefix_cache"
    )
    served_model_name: tuple[str, ...] = _option(
        (), "names by which clients may call the model; default: MODEL as given"
    )
    api_server_count: int | None = _option(
        None, "processes that speak HTTP, on one port; default: one for each data-parallel rank"
    )
    shutdown_timeout: float = _option(
        30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C before they are aborted"
    )
    cors_origins: tuple[str, ...] = _option((), "web origins whose pages may call the server, * for all")
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "least serious messages to log; info has a line for each request, debug for each probe too"
    )
    log_format: Literal["text", "json"] = _option("text", "format of the log on standard error")
    live_page: bool = _option(True, "serve a page at / with a chat and a view of the engine")
    otlp_traces_endpoint: str | None = _option(
        None, "URL of a collector, which gets a span of each request by OTLP over HTTP; default: none"
    )
    metrics_prefix: str = _option("octavo_", "beginning of the metrics' names; vllm: gives vLLM's own names")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(
                f"shutdown_timeout must be finite and at least 0 seconds, got {self.shutdown_timeout}"
            )
        if self.api_server_count is not None and self.api_server_count < 1:
            raise ConfigError(f"api_server_count must be at least 1, got {self.api_server_count}")
        object.__setattr__(self, "api_key", tuple(_checked_key(key, "api_key") for key in self.api_key))
        for name in ("max_requests_per_key", "max_queue"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_requests_per_key is not None and not self.keys():
            raise ConfigError("max_requests_per_key needs api_key or api_key_file: there are no keys")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise ConfigError(f"root_path must be like /llm, without a / at its end, got {self.root_path!r}")
        if self.uds == "":
            raise ConfigError("uds is empty: give a path, or leave the option out")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
                raise ConfigError(
                    f"cors_origins must hold origins like https://example.com, or *, got {origin!r}"
                )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_keyfile and ssl_ca_certs need ssl_certfile")
        if self.otlp_traces_endpoint is not None:
            _check_endpoint(self.otlp_traces_endpoint)
        if "" in self.served_model_name:
            raise ConfigError("served_model_name holds an empty name")

    def keys(self) -> dict[str, str]:
        """Return the clients' keys by name; of those without one it is "key 1" and so on.

        Raises:
            ConfigError: the file cannot be read, or holds no key, a wrong one, or a name twice.
        """
        lines = [("api_key", key) for key in self.api_key]
        if self.api_key_file is not None:
            lines += [(f"api_key_file {self.api_key_file}", line) for line in _lines(self.api_key_file)]
        found: dict[str, str] = {}
        for number, (source, line) in enumerate(lines, start=1):
            name, colon, key = line.partition(":") if source != "api_key" else ("", "", line)
            name = name.strip() if colon else f"key {number}"
            if not name.isprintable() or name in found:
                raise ConfigError(f"{source}: the name of key {number} is empty or not the only one")
            found[name] = _checked_key(key if colon else line, source)
        return found

    @property
    def scheme(self) -> str:
        """Scheme of the server's address."""
        return "http" if self.ssl_certfile is None else "https"

    def tls(self) -> ssl.SSLContext | None:
        """Return what TLS needs, None where plain HTTP is spoken.

        Raises:
            ConfigError: a file cannot be read, or does not hold what it should.
        """
        if self.ssl_certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=_refuse_password)
        except OSError as error:
            key = f" and ssl_keyfile {self.ssl_keyfile}" if self.ssl_keyfile else ""
            raise ConfigError(f"ssl_certfile {self.ssl_certfile}{key}: {_reason(error)}") from error
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ConfigError(f"ssl_ca_certs {self.ssl_ca_certs}: {_reason(error)}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(
            "otlp_traces_endpoint must be a URL for OTLP over HTTP, such as http://localhost:4318/v1/traces, "
            f"got {url!r}"
        )


def _lines(path: str) -> list[str]:
    """Return the lines of a file of keys that are neither empty nor comments."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"api_key_file {path}: {reason}") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"api_key_file {path} holds no key")
    return found


def _checked_key(key: str, source: str) -> str:
    """Return a key without blanks around it: secrets made with an editor end with a line break."""
    key = key.strip()
    if not key:
        raise ConfigError(f"{source} is empty: give a key, or leave the option out")
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{source}: a key may hold visible ASCII characters only, for a header to carry it")
    return key


def _refuse_password() -> str:
    raise ConfigError("ssl_keyfile needs a password: give a key without one")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"it is not what TLS needs ({error.reason or error})"
    return error.strerror or str(error)
