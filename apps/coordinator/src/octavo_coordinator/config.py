"""Options of the coordinator."""

import ipaddress
from dataclasses import dataclass, field
from typing import Any, Literal

from enginecore.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Options of the coordinator. Raises ConfigError when one is out of range or contradicts another."""

    host: str = _option("127.0.0.1", "address to listen on; another host's ranks need one it can reach")
    port: int = _option(7000, "port to listen on; the one above it is taken too")
    key_file: str | None = _option(None, "file with the key that ranks and servers must have")
    write_key: str | None = _option(None, "write a new key to this file and end")
    http_port: int | None = _option(None, "port on which GET /status answers with JSON; default: none")
    status: bool = _option(False, "show what a running coordinator knows, and end")
    address: str | None = _option(
        None,
        "the one that --status asks, host:port or the ipc://… that a server logs; default: host and port",
    )
    json: bool = _option(False, "show the status as JSON")
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "least serious messages to log")
    log_format: Literal["text", "json"] = _option("text", "format of the log on standard error")

    def __post_init__(self) -> None:
        if not 0 < self.port < 65535:
            raise ConfigError(f"port must be between 1 and 65534, got {self.port}")
        if self.http_port is not None and not 0 <= self.http_port <= 65535:
            raise ConfigError(f"http_port must be between 0 and 65535, got {self.http_port}")
        for name, is_given in (("address", self.address is not None), ("json", self.json)):
            if is_given and not self.status:
                raise ConfigError(f"{name} needs --status")
        serves = not self.status and self.write_key is None
        if serves and self.key_file is None and not _is_local(self.host):
            raise ConfigError(
                f"on {self.host} anybody could send requests' loads and start waves: give --key-file FILE, "
                "which --write-key FILE writes"
            )


def _is_local(host: str) -> bool:
    """Whether only this host reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
