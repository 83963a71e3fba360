from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class RouterArgs:
    worker_urls: list[str] = field(default_factory=list)
    host: str = "0.0.0.0"
    port: int = 30000
    policy: str = "cache_aware"
    mini_lb: bool = False
    log_level: str | None = None
    prometheus_port: int | None = None
    prometheus_host: str | None = None
    shutdown_grace_period_secs: int = 180
    api_key: str | None = None
    cors_allowed_origins: list[str] = field(default_factory=list)
    control_plane_api_keys: list[Any] = field(default_factory=list)

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser,
        use_router_prefix: bool = False,
        exclude_host_port: bool = False,
    ) -> None:
        assert use_router_prefix
        assert exclude_host_port
        parser.add_argument("--router-policy", default="cache_aware")
        parser.add_argument("--router-log-level", default="info")
        parser.add_argument("--router-prometheus-port", type=int, default=29000)
        parser.add_argument("--router-mini-lb", action="store_true")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, use_router_prefix: bool = False) -> RouterArgs:
        given = {name.removeprefix("router_"): value for name, value in vars(args).items()}
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in known})
