"""Resolves the flags `--speculative-...` of a server, or says why they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.environ import Environ
from sglang.srt.host import Host
from sglang.srt.model_config import load_model_config
from sglang.srt.platform import Platform
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.flag_checks import check_flags
from sglang.srt.processes.runtime_config import RuntimeConfig, resolve
from sglang.srt.server_args import ServerArgs

HOST = Host(devices=frozenset({"cpu"}), num_cores=4, available_bytes=1 << 33)
PLATFORM = Platform(device="cpu", num_cores=4, available_host_bytes=1 << 33, device_name="cpu")


def resolved(target: Path, environ: Environ | None = None, **flags: Any) -> RuntimeConfig:
    """Resolves the flags of a server over this model; flags are named without `speculative_`."""
    args, model = _args(target, **flags), load_model_config(str(target))
    return resolve(args, PLATFORM, model, environ or Environ())


def _args(target: Path, **flags: Any) -> ServerArgs:
    shared = {"mtp_mask_token_id", "tile_spec"}
    named = {name if name in shared else f"speculative_{name}": flags[name] for name in flags}
    return ServerArgs(model_path=str(target), **named)


def refusal(target: Path, is_early: bool = True, **flags: Any) -> str:
    """The one line that the server ends with, before any process starts or, if not `is_early`, in
    the scheduler alone."""
    with pytest.raises(ConfigError) as error:
        resolved(target, **flags)
    assert "\n" not in str(error.value)
    if is_early:
        with pytest.raises(ConfigError) as early:
            check_flags(_args(target, **flags), load_model_config(str(target)), Environ(), HOST)
        assert str(early.value) == str(error.value)
    return str(error.value)
