"""Environment switches: words and numbers, and a refusal that names the variable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang.srt.environ import Environ

RETRACT = "SGLANG_TEST_RETRACT"
ACC_LEN = "SGLANG_SIMULATE_ACC_LEN"
SWITCHES = {
    "SGLANG_STRICT_INVARIANTS": "strict_invariants",
    "SGLANG_MTP_KV_LEAK_DEBUG": "kv_leak_debug",
    "SGLANG_CUDA_GRAPH_POISON": "graph_poison",
    "SGLANG_KV_CANARY": "kv_canary",
    "SGLANG_MTP_FIXED_K": "mtp_fixed_k",
    "SGLANG_NCCL_SUMS": "nccl_sums",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (RETRACT, ACC_LEN, *SWITCHES):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_on_by_default() -> None:
    assert Environ.read() == Environ() == Environ(0, False)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        *[(text, 0) for text in ("", "0", "false", "No", "OFF", "  ")],
        *[("true", 3), ("Yes", 3), ("on", 3), ("1", 1), ("3", 3), (" 17 ", 17)],
    ],
)
def test_retraction_interval_is_a_number_or_a_word(
    monkeypatch: pytest.MonkeyPatch, text: str, steps: int
) -> None:
    monkeypatch.setenv(RETRACT, text)
    assert Environ.read() == Environ(test_retract_interval=steps)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(
    ("text", "is_on"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_switches(monkeypatch: pytest.MonkeyPatch, name: str, text: str, is_on: bool) -> None:
    monkeypatch.setenv(name, text)
    assert Environ.read() == replace(Environ(), **{SWITCHES[name]: is_on})


@pytest.mark.parametrize("name", [RETRACT, *SWITCHES])
@pytest.mark.parametrize("text", ["maybe", "-1", "1.5", "0x3", "3 steps"])
def test_anything_else_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name) as error:
        Environ.read()
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "tokens"), [("", None), ("0", None), ("3", 3.0), (" 2.5 ", 2.5), ("1", 1.0)]
)
def test_a_simulated_length_is_a_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, text: str, tokens: float | None
) -> None:
    monkeypatch.setenv(ACC_LEN, text)
    assert Environ.read() == Environ(simulated_accept_len=tokens)


@pytest.mark.parametrize("text", ["0.5", "-1", "nan", "inf", "many"])
def test_a_length_that_no_step_has_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ACC_LEN, text)
    with pytest.raises(ValueError, match=rf"{ACC_LEN}='{text}'"):
        Environ.read()


def test_the_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    Environ.read()
    monkeypatch.setenv(RETRACT, "5")
    assert Environ.read().test_retract_interval == 5
