"""A head that config.json ties to the embedding: one memory for both, unless the files hold two
different ones. What is served equals transformers, and no update of a head is ignored."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from model_harness import Feeder, Model, assert_close, sequence
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_copies import have_equal_values
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from sglang.srt.weight_sync.weight_store import WeightStore
from utils import Setup, make_random_model, make_runner

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model as most are stored: without a head."""
    return make_random_model("qwen2", tmp_path_factory.mktemp("tied") / "plain")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """Other weights of the same shape, and a head that is not their embedding."""
    folder = make_random_model("qwen2", tmp_path_factory.mktemp("tied") / "other", seed=2)
    return load_file(folder / WEIGHTS) | {HEAD: torch.randn(320, 64) * 0.2}


@pytest.fixture
def runner(plain: Path) -> ModelRunner:
    return make_runner(plain, Setup())


def stored(source: Path, target: Path, changes: Tensors, without: str = "") -> Path:
    """A copy of a folder with other weights."""
    shutil.copytree(source, target)
    tensors = load_file(source / WEIGHTS) | changes
    tensors.pop(without, None)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


def last_logits(runner: ModelRunner) -> torch.Tensor:
    return Feeder(runner, 1).feed({"a": sequence(30)})["a"]


def assert_served_as_by_transformers(runner: ModelRunner, path: Path) -> None:
    assert_close(last_logits(runner), Model(path).expected(sequence(30))[-1])


def is_tied(runner: ModelRunner) -> bool:
    head, embedding = (runner.model.get_parameter(name) for name in (HEAD, EMBEDDING))
    return head.data_ptr() == embedding.data_ptr()


# --- loading -------------------------------------------------------------------------------------


def test_another_head_in_the_files_is_served_and_said(
    plain: Path, other: Tensors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(plain, tmp_path / "model", {HEAD: other[HEAD]})
    with caplog.at_level(logging.WARNING, "sglang"):
        runner = make_runner(path, Setup())
    assert [HEAD in line and EMBEDDING in line for line in caplog.messages] == [True]
    assert not is_tied(runner)
    assert_served_as_by_transformers(runner, path)
    assert not torch.allclose(last_logits(runner), last_logits(make_runner(plain, Setup())))


@pytest.mark.parametrize("kind", ["no head", "the same head", "the head alone"])
def test_a_head_that_is_the_embedding_stays_tied_without_a_word(
    plain: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = {HEAD: load_file(plain / WEIGHTS)[EMBEDDING]}
    changes = {} if kind == "no head" else head
    without = EMBEDDING if kind == "the head alone" else ""
    path = stored(plain, tmp_path / "model", changes, without)
    with caplog.at_level(logging.WARNING, "sglang"):
        runner = make_runner(path, Setup())
    assert not caplog.messages
    assert is_tied(runner)
    assert_served_as_by_transformers(runner, path)


def test_heads_are_compared_in_the_type_that_serves(plain: Path, tmp_path: Path) -> None:
    embedding = load_file(plain / WEIGHTS)[EMBEDDING]
    path = stored(plain, tmp_path / "model", {HEAD: embedding.bfloat16()})
    for dtype, expected in ((torch.float32, False), (torch.bfloat16, True)):
        model = load_model(load_model_config(str(path)), "auto", 64, dtype, "cpu")
        head, shared = (model.get_parameter(name) for name in (HEAD, EMBEDDING))
        assert (head.data_ptr() == shared.data_ptr()) == expected


def test_dummy_weights_are_tied_whatever_the_files_hold(
    plain: Path, other: Tensors, tmp_path: Path
) -> None:
    path = stored(plain, tmp_path / "model", {HEAD: other[HEAD]})
    assert is_tied(make_runner(path, Setup(), load_format="dummy"))


# --- updates of a model that was loaded untied ---------------------------------------------------


@pytest.fixture
def untied(plain: Path, other: Tensors, tmp_path: Path) -> ModelRunner:
    return make_runner(stored(plain, tmp_path / "untied", {HEAD: other[HEAD]}), Setup())


def test_an_update_of_an_untied_model_sets_both(
    untied: ModelRunner, plain: Path, other: Tensors, tmp_path: Path
) -> None:
    head = torch.flip(other[HEAD], (0,))
    path = stored(plain, tmp_path / "model", other | {HEAD: head})
    untied.weights.apply(untied.weights.reader.from_directory(str(path)))
    assert_served_as_by_transformers(untied, path)
    untied.weights.apply(untied.weights.reader.from_tensors([(HEAD, other[HEAD])]))
    assert torch.equal(untied.model.get_parameter(EMBEDDING), other[EMBEDDING])
    assert torch.equal(untied.model.get_parameter(HEAD), other[HEAD])


@pytest.mark.parametrize("without", [HEAD, EMBEDDING])
def test_a_folder_with_one_of_both_sets_both_of_an_untied_model(
    untied: ModelRunner, plain: Path, other: Tensors, tmp_path: Path, without: str
) -> None:
    path = stored(plain, tmp_path / "model", other, without)
    untied.weights.apply(untied.weights.reader.from_directory(str(path)))
    assert_served_as_by_transformers(untied, path)
    assert not is_tied(untied)


# --- updates of a tied model ---------------------------------------------------------------------


def from_directory(store: WeightStore, path: Path) -> Tensors:
    return store.reader.from_directory(str(path))


def from_file(store: WeightStore, path: Path) -> Tensors:
    return store.reader.from_file(str(path / WEIGHTS))


def from_safetensors(store: WeightStore, path: Path) -> Tensors:
    return store.reader.from_safetensors(save(load_file(path / WEIGHTS)))


def from_tensors(store: WeightStore, path: Path) -> Tensors:
    return store.reader.from_tensors(iter(load_file(path / WEIGHTS).items()))


SOURCES = [from_directory, from_file, from_safetensors, from_tensors]
EVERY_SOURCE = pytest.mark.parametrize("stage", SOURCES)
Stage = Callable[[WeightStore, Path], Tensors]


@EVERY_SOURCE
def test_another_head_is_refused_before_anything_waits_for_it(
    runner: ModelRunner, plain: Path, other: Tensors, tmp_path: Path, stage: Stage
) -> None:
    path = stored(plain, tmp_path / "model", other)
    with pytest.raises(WeightUpdateError) as error:
        stage(runner.weights, path)
    message = str(error.value)
    assert all(part in message for part in (HEAD, EMBEDDING, "tie_word_embeddings", "start"))
    assert "\n" not in message
    assert len(message) < 500


@EVERY_SOURCE
def test_a_head_that_is_the_new_embedding_is_taken(
    runner: ModelRunner, plain: Path, other: Tensors, tmp_path: Path, stage: Stage
) -> None:
    path = stored(plain, tmp_path / "model", other | {HEAD: other[EMBEDDING].clone()})
    runner.weights.apply(stage(runner.weights, path))
    assert is_tied(runner)
    assert_served_as_by_transformers(runner, path)


def test_a_folder_with_the_head_alone_updates_both(
    runner: ModelRunner, plain: Path, other: Tensors, tmp_path: Path
) -> None:
    path = stored(plain, tmp_path / "model", other, without=EMBEDDING)
    runner.weights.apply(runner.weights.reader.from_directory(str(path)))
    assert_served_as_by_transformers(runner, path)


def in_buckets(runner: ModelRunner, tensors: Tensors, names: list[str]) -> Iterator[Tensors]:
    for name in names:
        yield runner.weights.reader.from_tensors([(name, tensors[name])])


def test_both_may_come_in_calls_of_their_own(
    runner: ModelRunner, plain: Path, other: Tensors, tmp_path: Path
) -> None:
    path = stored(plain, tmp_path / "model", other, without=HEAD)
    tensors = load_file(path / WEIGHTS)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    for staged in in_buckets(runner, tensors, sorted(tensors, reverse=True)):
        runner.weights.apply(staged)
    assert_served_as_by_transformers(runner, path)


@pytest.mark.parametrize("names", [[HEAD, NORM, EMBEDDING], [EMBEDDING, NORM, HEAD]])
def test_both_may_come_in_any_order_of_one_session(
    runner: ModelRunner, other: Tensors, names: list[str]
) -> None:
    tensors = other | {HEAD: other[EMBEDDING].clone()}
    session: Tensors = {}
    for staged in in_buckets(runner, tensors, names):
        session.update(staged)
    runner.weights.apply(session)
    assert torch.equal(runner.model.get_parameter(HEAD), other[EMBEDDING])


@pytest.mark.parametrize("names", [[HEAD], [HEAD, NORM], [NORM, EMBEDDING, HEAD]])
def test_another_head_is_refused_when_all_calls_of_its_update_are_there(
    runner: ModelRunner, other: Tensors, names: list[str]
) -> None:
    before = {name: value.clone() for name, value in runner.model.named_parameters()}
    session: Tensors = {}
    for staged in in_buckets(runner, other, names):
        session.update(staged)
    with pytest.raises(WeightUpdateError, match=f"{HEAD}.*{EMBEDDING}"):
        runner.weights.apply(session)
    assert runner.weights.num_updates == 0
    for name, value in runner.model.named_parameters():
        assert torch.equal(value, before[name]), name


def test_a_later_pair_of_a_session_takes_the_place_of_an_earlier_one(
    runner: ModelRunner, other: Tensors
) -> None:
    first, second = other[EMBEDDING], torch.flip(other[EMBEDDING], (0,))
    session: Tensors = {}
    for value in (first, second):
        session.update(
            runner.weights.reader.from_tensors([(EMBEDDING, value), (HEAD, value.clone())])
        )
    runner.weights.apply(session)
    assert torch.equal(runner.model.get_parameter(HEAD), second)


def test_a_head_of_another_shape_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(WeightUpdateError, match=rf"{HEAD}.*\[321, 64\].*\[320, 64\]"):
        runner.weights.reader.from_tensors([(HEAD, torch.zeros(321, 64))])


def test_the_tied_head_is_found_by_its_name_and_counted_once(runner: ModelRunner) -> None:
    weights = runner.weights
    head = weights.value_of(HEAD)
    assert head is not None
    assert torch.equal(head, runner.model.get_parameter(EMBEDDING))
    assert EMBEDDING in weights.names()
    assert HEAD not in weights.names()


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_one_value_makes_weights_different(chunk_bytes: int) -> None:
    one = torch.randn(7, 5)
    for place in ((0, 0), (3, 2), (6, 4)):
        other = one.clone()
        assert have_equal_values(one, other, torch.float32, chunk_bytes)
        other[place] += 1.0
        assert not have_equal_values(one, other, torch.float32, chunk_bytes)
    assert not have_equal_values(one, one[:6], torch.float32, chunk_bytes)
