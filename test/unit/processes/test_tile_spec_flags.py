"""The flags `--tile-spec` and `--tile-spec-cache-dir`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from draft_heads import write_eagle
from sglang.srt.environ import Environ
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.runtime_config import RuntimeConfig, resolve
from sglang.srt.server_args import ServerArgs, parse_cli
from sglang.srt.speculative.drafter_configs import EagleConfig
from sglang.srt.step.step_sizes import MAX_REQUESTS
from speculation_flags_cases import PLATFORM


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_eagle(tmp_path_factory.mktemp("head")))


def resolved(target: Path, head: str | None, simulated: float | None = None, **flags: Any) -> Any:
    drafter = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": head}
    args = ServerArgs(model_path=str(target), **(drafter if head else {}), **flags)
    environ = Environ(simulated_accept_len=simulated)
    return resolve(args, PLATFORM, load_model_config(str(target)), environ)


def options_of(config: RuntimeConfig) -> RoundOptions:
    assert config.drafter is not None
    options = config.drafter.options
    assert isinstance(options, EagleConfig)
    return options.rounds


def test_without_the_flag_nothing_changes(target: Path, head: str) -> None:
    config = resolved(target, head)
    assert options_of(config).tile_spec_cache is None
    assert (config.needs.keeps_confidence, config.needs.price_cache) == (False, None)


@pytest.mark.parametrize("folder", [None, "", "somewhere/else"])
def test_prices_are_kept_below_the_current_folder_or_in_the_one_named(
    target: Path, head: str, folder: str | None
) -> None:
    config = resolved(target, head, tile_spec=True, tile_spec_cache_dir=folder)
    expected = Path(folder or "tile_spec/cache")
    assert options_of(config).tile_spec_cache == config.needs.price_cache == expected
    assert config.needs.keeps_confidence
    assert config.needs.needs_prices
    options = options_of(config)
    assert (options.tier_policy, options.num_steps) == ("load_aware", 3)


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_load_aware": "off"},
        {"speculative_adaptive": True, "speculative_adaptive_strategy": "ema"},
    ],
)
def test_any_rule_for_the_number_of_drafts_goes_with_it(
    target: Path, head: str, flags: dict[str, Any]
) -> None:
    """Prices are measured though the rule needs none."""
    config = resolved(target, head, tile_spec=True, **flags)
    assert config.needs.needs_prices
    plain = resolved(target, head, **flags)
    assert not plain.needs.needs_prices
    assert options_of(config).states == options_of(plain).states


REFUSED: dict[str, dict[str, Any]] = {
    "--tile-spec-cache-dir needs --speculative-algorithm EAGLE, EAGLE3, NEXTN, DFLASH, STANDALONE"
    " or NGRAM; use that, or leave it out.": {
        "head": None,
        "tile_spec_cache_dir": "x",
    },
    "--tile-spec-cache-dir needs --tile-spec; use that, or leave it out.": {
        "tile_spec_cache_dir": "x"
    },
    f"--tile-spec divides rows among {MAX_REQUESTS} requests at most; lower"
    f" --max-running-requests {MAX_REQUESTS + 1}.": {
        "tile_spec": True,
        "max_running_requests": MAX_REQUESTS + 1,
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(target: Path, head: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(target, **{"head": head, **REFUSED[line]})
    assert str(error.value) == line


def test_with_simulated_acceptance_all_drafts_are_verified(
    target: Path, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = resolved(target, head, simulated=2.5, tile_spec=True)
    assert options_of(config).tile_spec_cache is None
    assert "--tile-spec has no effect here: SGLANG_SIMULATE_ACC_LEN" in caplog.text


def test_the_command_line_has_both(target: Path) -> None:
    args = parse_cli(["--model-path", str(target), "--tile-spec", "--tile-spec-cache-dir", "x"])
    assert (args.tile_spec, args.tile_spec_cache_dir) == (True, "x")
