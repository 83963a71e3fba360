"""The flags of heads that draft: what a server is made of, and what is refused by name."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest

from block_heads import write_block_head
from draft_heads import BLOCK_SIZE, DFLASH, EAGLE, EAGLE3, write_eagle, write_eagle3, write_p_eagle
from sglang.srt.environ import Environ
from sglang.srt.flag_values import as_flag, flags_of, value_type
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.config_error import Refusal
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.speculation_flags import drafter_from_flags
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculation_args import SpeculationArgs
from sglang.srt.speculative.drafter_configs import EagleConfig
from sglang.srt.speculative.drafter_options import AcceptThresholds
from speculation_flags_cases import refusal, resolved

WRITERS = {"EAGLE": write_eagle, "EAGLE3": write_eagle3}
CAPTURES = {"EAGLE": HiddenCapture(all_rows=True), "EAGLE3": HiddenCapture((2, 4, 5))}
BOTH = pytest.mark.parametrize("algorithm", WRITERS)
HINTS = get_type_hints(SpeculationArgs)
PATH = "--speculative-draft-model-path"


@BOTH
def test_the_head_and_what_it_needs_follow_from_the_flags(
    target: Path, tmp_path: Path, algorithm: str
) -> None:
    head = WRITERS[algorithm](tmp_path)
    config = resolved(target, algorithm=algorithm, draft_model_path=str(head))
    assert config.drafter is not None
    options = config.drafter.options
    assert isinstance(options, EagleConfig)
    assert options.rounds.num_steps == 3
    needs, execution = config.needs, config.execution
    assert (needs.max_drafts, needs.max_rows, needs.max_slots, needs.token_shift) == (3, 4, 6, 1)
    assert needs.capture == execution.capture == CAPTURES[algorithm]
    assert execution.max_decode_rows == 4
    assert config.scheduler.num_draft_steps == 3
    [model] = drafter_models(config.drafter, execution)
    assert model.model.architecture == {"EAGLE": EAGLE, "EAGLE3": EAGLE3}[algorithm]
    assert model.capture == HiddenCapture()
    assert model.row_width == execution.row_width


@pytest.mark.parametrize(
    ("flags", "num_steps", "warns"),
    [
        ({"num_steps": 5}, 5, False),
        ({"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2}, 1, False),
        ({"num_steps": 5, "eagle_topk": 1, "num_draft_tokens": 8}, 5, True),
        ({"num_draft_tokens": 7}, 6, False),
        ({"eagle_topk": 1}, 3, False),
        ({"algorithm": "eagle"}, 3, False),
    ],
)
def test_a_chain_has_a_token_more_than_steps(
    target: Path,
    tmp_path: Path,
    flags: dict[str, Any],
    num_steps: int,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = write_eagle(tmp_path)
    caplog.set_level(logging.WARNING)
    config = resolved(target, **{"algorithm": "EAGLE", "draft_model_path": str(head), **flags})
    assert config.needs.max_drafts == num_steps
    assert (
        "--speculative-num-draft-tokens 8 has no effect beside --speculative-num-steps 5: a chain"
        in caplog.text
    ) == warns


@pytest.mark.parametrize(
    ("flags", "simulated", "policy", "passes"),
    [
        ({}, None, "load_aware", (1, 2)),
        ({"load_aware": "on", "num_steps": 1}, None, "load_aware", ()),
        ({"num_steps": 20}, None, "load_aware", (1, 2, 4, 8, 16, 19)),
        ({"load_aware": "off"}, None, "fixed", (2,)),
        ({"load_aware": "off", "num_steps": 1}, None, "fixed", ()),
        ({"load_aware": "on"}, 2.5, "fixed", (2,)),
    ],
)
def test_the_number_of_drafts_follows_the_load_unless_it_is_pinned(
    target: Path,
    tmp_path: Path,
    flags: dict[str, Any],
    simulated: float | None,
    policy: str,
    passes: tuple[int, ...],
) -> None:
    head = write_eagle(tmp_path)
    all_flags = {"algorithm": "EAGLE", "draft_model_path": str(head), **flags}
    environ = Environ(simulated_accept_len=simulated)
    config = resolved(target, environ=environ, **all_flags)
    assert config.drafter is not None
    assert config.drafter.options.rounds.tier_policy == policy
    assert config.needs.needs_prices == (policy == "load_aware")
    [model] = drafter_models(config.drafter, config.execution)
    assert tuple(model.draft_steps) == passes


@pytest.mark.parametrize(
    ("flags", "num_drafts", "passes"),
    [
        ({}, 5, (1, 2, 3, 4, 5)),
        ({"num_steps": 2, "load_aware": "off"}, 2, (2,)),
        ({"num_draft_tokens": 6, "load_aware": "off"}, 5, (5,)),
        ({"dflash_block_size": 6, "load_aware": "off"}, 5, (5,)),
        ({"adaptive": True, "num_steps": 2}, 5, (1, 2, 3, 4, 5)),
    ],
)
def test_a_head_of_blocks_drafts_any_number_of_its_rows(
    target: Path, tmp_path: Path, flags: dict[str, Any], num_drafts: int, passes: tuple[int, ...]
) -> None:
    """All by default; slots for the whole block behind the rows that verify."""
    head = write_block_head(tmp_path)
    config = resolved(target, algorithm="DFLASH", draft_model_path=str(head), **flags)
    assert config.drafter is not None
    needs = config.needs
    assert (needs.max_drafts, needs.token_shift) == (num_drafts, 0)
    assert needs.max_slots == 1 + num_drafts + BLOCK_SIZE
    assert needs.capture == HiddenCapture((2, 4, 5))
    [model] = drafter_models(config.drafter, config.execution)
    assert model.model.architecture == DFLASH
    assert tuple(model.draft_steps) == passes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_steps": 6}, "num-steps 6 drafts 6 tokens, but the head's blocks have 5; lower it"),
        ({"num_draft_tokens": 7}, "num-draft-tokens 7 drafts 6 tokens, but the head's blocks"),
        ({"adaptive": True, "adaptive_config": "aggressive"}, "the head's blocks have 5"),
        ({"eagle_topk": 2}, "leave it out: a block is a chain"),
        ({"dflash_block_size": 5}, "is not 6, the rows of a block that the head was trained for"),
        ({"algorithm": "EAGLE3"}, "use --speculative-algorithm DFLASH"),
    ],
)
def test_what_a_block_cannot_have_is_refused(
    target: Path, tmp_path: Path, flags: dict[str, Any], said: str
) -> None:
    head = str(write_block_head(tmp_path))
    assert said in refusal(target, **{"algorithm": "DFLASH", "draft_model_path": head, **flags})


@pytest.mark.parametrize(("num_steps", "warns"), [(4, False), (5, True)])
def test_more_drafts_than_a_head_of_mask_tokens_was_trained_for_get_a_warning(
    target: Path, tmp_path: Path, num_steps: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head = str(write_p_eagle(tmp_path, num_depths=4))
    resolved(target, algorithm="EAGLE3", draft_model_path=head, num_steps=num_steps)
    said = "was trained for 4 drafts, and of 5 those behind them are seldom right"
    assert (said in caplog.text) == warns
    assert ("--speculative-num-steps 4 would keep to them" in caplog.text) == warns


def test_a_head_may_be_left_out_where_attention_reads_where_its_kv_starts(
    target: Path, tmp_path: Path
) -> None:
    flags = {"algorithm": "EAGLE", "draft_model_path": str(write_eagle(tmp_path))}
    config = resolved(target, load_aware="off", **flags)
    known = config.execution.capabilities
    for reads in (True, False):
        capabilities = mock.PropertyMock(return_value=replace(known, reads_kv_starts=reads))
        with mock.patch.object(type(config.execution), "capabilities", capabilities):
            [head] = drafter_models(config.drafter, config.execution)
        assert head.may_rest == reads


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"algorithm": "STANDALONE"}, f"--speculative-algorithm STANDALONE needs {PATH}"),
        (
            {"algorithm": "EAGEL"},
            "EAGEL is unknown; there are EAGLE, EAGLE3, NEXTN, DFLASH, STANDA",
        ),
        ({"algorithm": "EAGLE"}, f"--speculative-algorithm EAGLE needs {PATH}"),
        (
            {"algorithm": "EAGLE", "num_steps": 0},
            "--speculative-num-steps 0 must be a whole number from 1 to 63",
        ),
        (
            {"algorithm": "EAGLE", "num_draft_tokens": 1},
            "num-draft-tokens 1 must be a whole number from 2 to 64",
        ),
        ({"accept_threshold_single": -0.1}, "--speculative-accept-threshold-single -0.1 must be"),
        (
            {"accept_threshold_acc": 1.1},
            "--speculative-accept-threshold-acc 1.1 must be a number from 0",
        ),
        ({"algorithm": "EAGLE", "draft_model_path": "no/such"}, f"{PATH} 'no/such' is not a dir"),
    ],
)
def test_flags_that_cannot_be_met_are_named(target: Path, flags: dict[str, Any], said: str) -> None:
    assert said in refusal(target, **flags)


HEADS, NGRAM = {"EAGLE", "EAGLE3", "NEXTN", "DFLASH"}, {"NGRAM"}
TAKERS = {  # of flags that not every algorithm takes
    "speculative_draft_model_path": HEADS | {"STANDALONE"},
    "speculative_draft_model_revision": HEADS | {"STANDALONE"},
    "speculative_adaptive_config": HEADS | {"STANDALONE"},
    "speculative_adaptive_strategy": HEADS | {"STANDALONE"},
    "speculative_eagle_topk": HEADS - {"DFLASH"},
    "speculative_token_map": HEADS,
    "speculative_dflash_block_size": {"DFLASH"},
}
ALL = HEADS | NGRAM | {"STANDALONE"}
SWITCHES = ("speculative_adaptive", "tile_spec")


def asked_for(target: Path, **flags: Any) -> Asked:
    args, model = ServerArgs(model_path=str(target), **flags), load_model_config(str(target))
    return Asked(args=args, model=model, suppressed_token_ids=(), environ=Environ())


def value_that_asks(name: str) -> Any:
    """A value of a flag that is not its default."""
    entry, kind = flags_of(SpeculationArgs)[name], value_type(HINTS[name])
    others = [each for each in entry.metadata["choices"] or () if each != entry.default]
    return others[0] if others else {str: "x", int: 2}.get(kind, 0.5)


@pytest.mark.parametrize("algorithm", [None, *sorted(ALL)])
def test_flags_that_an_algorithm_does_not_take_are_refused_with_those_that_do(
    target: Path, algorithm: str | None
) -> None:
    for name in flags_of(SpeculationArgs).keys() - {"speculative_algorithm", *SWITCHES}:
        takers = NGRAM if "_ngram_" in name else TAKERS.get(name, ALL)
        # NGRAM names the switch instead, which has no effect there, as a warning says.
        if algorithm in takers | (NGRAM if "_adaptive_" in name else set()):
            continue
        flags = {"speculative_algorithm": algorithm, name: value_that_asks(name)}
        with pytest.raises(Refusal) as error:
            drafter_from_flags(asked_for(target, **flags))
        known, needed = error.value.problem.split(" --speculative-algorithm ")
        assert (error.value.flag, known) == (as_flag(name), "needs")
        assert set(re.split(", | or ", needed)) == takers
        assert "leave it out" in error.value.remedy


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_that_change_nothing_are_warned_of(
    target: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert drafter_from_flags(asked_for(target, **{name: True})) is None
    assert caplog.messages == [
        f"{as_flag(name)} has no effect here: nothing is drafted without --speculative-algorithm."
    ]


@pytest.mark.parametrize(
    "thresholds", [{}, {"single": 0.5}, {"acc": 0.25}, {"single": 0, "acc": 0}]
)
def test_thresholds_reach_what_confirms_drafts(
    target: Path, tmp_path: Path, thresholds: dict[str, float]
) -> None:
    flags = {f"accept_threshold_{name}": value for name, value in thresholds.items()}
    head = str(write_eagle(tmp_path))
    config = resolved(target, algorithm="EAGLE", draft_model_path=head, **flags)
    assert config.drafter is not None
    assert config.drafter.thresholds == AcceptThresholds(**thresholds)
    assert config.drafter.thresholds.is_exact == (not thresholds)


@BOTH
def test_heads_that_cannot_be_used_are_refused_before_weights_are_loaded(
    target: Path, tmp_path: Path, algorithm: str
) -> None:
    write = WRITERS[algorithm]

    def said(folder: Path, **flags: Any) -> str:
        return refusal(target, algorithm=algorithm, draft_model_path=str(folder), **flags)

    assert "vocab_size is 99, but that of the target is 320" in said(
        write(tmp_path / "vocabulary", vocab_size=99)
    )
    assert "hidden_size is 32" in said(write(tmp_path / "size", hidden_size=32))
    assert "architecture 'Other' is of no head" in said(
        write(tmp_path / "kind", architectures=["Other"])
    )
    broken = write(tmp_path / "broken")
    (broken / "config.json").write_text("[")
    assert "config.json" in said(broken)
    (tmp_path / "map.json").write_text(json.dumps([1, 999]))
    assert "has 999" in said(
        write(tmp_path / "right", draft_vocab_size=None), token_map=str(tmp_path / "map.json")
    )


def test_a_mask_token_is_suppressed_and_multi_token_prediction_is_off(
    target: Path, tmp_path: Path
) -> None:
    head = str(write_eagle(tmp_path))
    assert resolved(target, mtp_mask_token_id=7).mtp is not None
    config = resolved(target, mtp_mask_token_id=7, algorithm="EAGLE", draft_model_path=head)
    assert config.mtp is None
    assert config.needs.suppressed_token_ids == (7,)
