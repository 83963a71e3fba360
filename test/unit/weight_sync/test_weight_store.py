"""Updating the weights of a running model: it then equals one that was loaded from the new
weights, and whatever cannot be taken leaves it as it was."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from model_harness import Feeder, sequence
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.weight_sync import weight_store
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from sglang.srt.weight_sync.weight_store import WeightStore
from utils import Setup, make_random_llama, make_random_model, make_runner

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
FAMILIES = {
    "tied": ("llama", {}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "biases": ("qwen2", {}),
    "norms of heads": ("qwen3", {}),
    "experts": ("mixtral", {"num_local_experts": 4}),
}
Tensors = dict[str, torch.Tensor]


class Pair:
    """Two checkpoints of one shape."""

    def __init__(self, path: Path, model_type: str = "llama", **changes: Any) -> None:
        self.old = make_random_model(model_type, path / "old", seed=1, **changes)
        self.new = make_random_model(model_type, path / "new", seed=2, num_shards=2, **changes)

    @property
    def new_tensors(self) -> Tensors:
        return {
            name: tensor
            for file in self.new.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model_type, changes = request.param
    return Pair(tmp_path_factory.mktemp("pair"), model_type, **changes)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("tied"))


@pytest.fixture
def runner(tied: Pair) -> ModelRunner:
    return make_runner(tied.old, Setup())


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the folder of temporary directories."""
    path = tmp_path / "temp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """[3, vocab_size] of a prompt in two parts and a token."""
    feeder = Feeder(runner, 1)
    tokens = sequence(30)
    parts = (tokens[:20], tokens[20:29], tokens[29:])
    return torch.stack([feeder.feed({"a": part})["a"] for part in parts])


def loaded_logits(path: Path) -> torch.Tensor:
    return logits_of(make_runner(path, Setup()))


def digest(runner: ModelRunner) -> dict[str, str]:
    """A hash of every parameter and buffer."""
    tensors = [*runner.model.named_parameters(), *runner.model.named_buffers()]
    return {
        name: hashlib.sha256(tensor.clone().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors
    }


def addresses(runner: ModelRunner) -> list[int]:
    return [parameter.data_ptr() for parameter in runner.model.parameters()]


def storage_sizes(runner: ModelRunner) -> set[int]:
    return {parameter.untyped_storage().nbytes() for parameter in runner.model.parameters()}


# --- updates -------------------------------------------------------------------------------------


def from_directory(store: WeightStore, pair: Pair) -> Tensors:
    return store.reader.from_directory(str(pair.new))


def from_file(store: WeightStore, pair: Pair) -> Tensors:
    staged: Tensors = {}
    for file in pair.new.glob("*.safetensors"):
        staged.update(store.reader.from_file(str(file)))
    return staged


def from_safetensors(store: WeightStore, pair: Pair) -> Tensors:
    return store.reader.from_safetensors(save(pair.new_tensors))


def from_tensors(store: WeightStore, pair: Pair) -> Tensors:
    return store.reader.from_tensors(iter(pair.new_tensors.items()))


SOURCES = [from_directory, from_file, from_safetensors, from_tensors]


@pytest.mark.long_matrix
@pytest.mark.parametrize("stage", SOURCES)
def test_an_updated_model_equals_a_loaded_one(
    pair: Pair, stage: Callable[[WeightStore, Pair], Tensors]
) -> None:
    runner = make_runner(pair.old, Setup())
    before, places = logits_of(runner), addresses(runner)
    staged = stage(runner.weights, pair)
    assert torch.equal(logits_of(runner), before), "Staging changed the model."
    runner.weights.apply(staged)
    expected = loaded_logits(pair.new)
    assert torch.equal(logits_of(runner), expected)
    assert not torch.allclose(expected, before, atol=0.1)
    assert addresses(runner) == places


@pytest.mark.parametrize("names", [[NORM], [K_PROJ], [UP_PROJ], [EMBEDDING], [NORM, K_PROJ]])
def test_a_part_of_the_weights_changes_that_part_alone(
    tied: Pair, runner: ModelRunner, tmp_path: Path, names: list[str]
) -> None:
    chosen = {name: tied.new_tensors[name] for name in names}
    mixed = make_random_llama(tmp_path / "mixed", seed=1)
    save_file(load_file(mixed / WEIGHTS) | chosen, mixed / WEIGHTS)
    runner.weights.apply(runner.weights.reader.from_tensors(chosen.items()))
    assert digest(runner) == digest(make_runner(mixed, Setup()))
    assert digest(runner) != digest(make_runner(tied.old, Setup()))


def test_an_update_of_the_embedding_changes_the_tied_head(tied: Pair, runner: ModelRunner) -> None:
    value = tied.new_tensors[EMBEDDING]
    runner.weights.apply(runner.weights.reader.from_tensors([(EMBEDDING, value)]))
    assert torch.equal(runner.model.get_parameter(HEAD), value)


def test_an_untied_head_and_the_embedding_are_two(tmp_path: Path) -> None:
    untied = Pair(tmp_path, tie_word_embeddings=False)
    runner = make_runner(untied.old, Setup())
    embedding = runner.model.get_parameter(EMBEDDING).clone()
    runner.weights.apply(runner.weights.reader.from_tensors([(HEAD, untied.new_tensors[HEAD])]))
    assert torch.equal(runner.model.get_parameter(HEAD), untied.new_tensors[HEAD])
    assert torch.equal(runner.model.get_parameter(EMBEDDING), embedding)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.float64])
def test_values_are_converted_when_staged(tied: Pair, source: torch.dtype) -> None:
    config = load_model_config(str(tied.old))
    model = load_model(config, "auto", 64, torch.bfloat16, "cpu")
    store = WeightStore(model, config)
    tensors = {name: tensor.to(source) for name, tensor in tied.new_tensors.items()}
    staged = store.reader.from_tensors(tensors.items())
    assert {tensor.dtype for tensor in staged.values()} == {torch.bfloat16}
    store.apply(staged)
    for name in (NORM, EMBEDDING):
        assert torch.equal(model.get_parameter(name), tensors[name].bfloat16())
    assert model.get_buffer("model.rotary.table").dtype == torch.float32


def test_what_is_computed_here_is_skipped(tied: Pair, runner: ModelRunner) -> None:
    inv_freq = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    tensors = [inv_freq, *tied.new_tensors.items()]
    runner.weights.apply(runner.weights.reader.from_tensors(tensors))
    assert torch.equal(logits_of(runner), loaded_logits(tied.new))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_source_may_change_after_staging(
    tied: Pair, runner: ModelRunner, dtype: torch.dtype
) -> None:
    source = tied.new_tensors[NORM].to(dtype)
    expected = source.float().clone()
    staged = runner.weights.reader.from_tensors([(NORM, source)])
    source.zero_()
    assert torch.equal(staged[NORM], expected)


def test_a_file_may_change_after_staging(tied: Pair, runner: ModelRunner, tmp_path: Path) -> None:
    file, value = tmp_path / "part.safetensors", tied.new_tensors[NORM]
    save_file({NORM: value}, file)
    staged = runner.weights.reader.from_file(str(file))
    with file.open("r+b") as opened:
        opened.seek(-value.nbytes, 2)
        opened.write(bytes(value.nbytes))
    assert torch.equal(staged[NORM], value)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "with gradient"])
def test_tensors_may_have_any_layout(tied: Pair, runner: ModelRunner, kind: str) -> None:
    value = tied.new_tensors[K_PROJ]
    source = {
        "transposed": value.t().contiguous().t(),
        "expanded": value[:, :1].expand(value.shape),
        "with gradient": torch.nn.Parameter(value),
    }[kind]
    staged = runner.weights.reader.from_tensors([(K_PROJ, source)])
    runner.weights.apply(staged)
    assert torch.equal(staged[K_PROJ], source)
    assert not runner.model.get_parameter(NORM).requires_grad
    assert not staged[K_PROJ].requires_grad


# --- refusals ------------------------------------------------------------------------------------


@pytest.fixture
def refusal(runner: ModelRunner) -> Iterator[Callable[[Callable[[WeightStore], Any]], str]]:
    """The one line that a call is refused with; at the end nothing of the model has changed."""
    before = digest(runner)

    def refused(call: Callable[[WeightStore], Any]) -> str:
        with pytest.raises(WeightUpdateError) as error:
            call(runner.weights)
        message = str(error.value)
        assert "\n" not in message
        assert len(message) < 500
        return message

    yield refused
    assert digest(runner) == before


Refusal = Callable[[Callable[[WeightStore], Any]], str]
BAD_TENSORS: dict[str, tuple[list[tuple[str, torch.Tensor]], list[str]]] = {
    "unknown": ([("model.layers.9.w", torch.ones(2))], ["model.layers.9.w", "LlamaForCausalLM"]),
    "fused name": ([("model.layers.0.self_attn.qkv_proj.weight", torch.ones(128, 64))], ["qkv"]),
    "shape": ([(K_PROJ, torch.ones(64, 64))], [K_PROJ, "[64, 64]", "[32, 64]"]),
    "broadcastable": ([(NORM, torch.ones(1))], [NORM, "[1]", "[64]"]),
    "scalar": ([(NORM, torch.tensor(1.0))], [NORM, "[]", "[64]"]),
    "twice": ([(NORM, torch.ones(64)), (NORM, torch.ones(64))], [NORM, "twice"]),
    "integers": ([(NORM, torch.ones(64, dtype=torch.int64))], [NORM, "int64"]),
    "bool": ([(NORM, torch.ones(64, dtype=torch.bool))], [NORM, "bool"]),
    "complex": ([(NORM, torch.ones(64, dtype=torch.complex64))], [NORM, "complex64"]),
    "float8": ([(NORM, torch.ones(64).to(torch.float8_e4m3fn))], [NORM, "float8"]),
    "meta": ([(NORM, torch.ones(64, device="meta"))], [NORM, "plain"]),
    "sparse": ([(NORM, torch.ones(64).to_sparse())], [NORM, "plain"]),
    "empty": ([], ["no weight"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_and_counted(
    value: float, dtype: torch.dtype, tied: Pair, tmp_path: Path, refusal: Refusal
) -> None:
    tensors = {NORM: torch.ones(64, dtype=dtype), K_PROJ: tied.new_tensors[K_PROJ].to(dtype)}
    tensors[K_PROJ].view(-1)[[5, 70, 2047]] = value
    file = tmp_path / "part.safetensors"
    save_file(tensors, file)
    for call in (
        lambda store: store.reader.from_tensors(tensors.items()),
        lambda store: store.reader.from_safetensors(save(tensors)),
        lambda store: store.reader.from_file(str(file)),
    ):
        message = refusal(call)
        assert f"{K_PROJ!r} with 3 of 2048 values NaN or infinite as float32" in message


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65520.0, torch.float32, torch.float16),
        (65536.0, torch.bfloat16, torch.float16),
        (3.4e38, torch.float32, torch.bfloat16),
        (-1e39, torch.float64, torch.float32),
    ],
)
def test_values_that_the_models_type_cannot_hold_are_refused(
    tied: Pair, value: float, source: torch.dtype, target: torch.dtype
) -> None:
    config = load_model_config(str(tied.old))
    store = WeightStore(load_model(config, "auto", 64, target, "cpu"), config)
    values = torch.ones(64, dtype=source)
    values[7] = value
    assert values.isfinite().all()
    with pytest.raises(WeightUpdateError, match=f"{NORM}.* 1 of 64 .* {str(target)[6:]};"):
        store.reader.from_tensors([(NORM, values)])


@pytest.mark.parametrize(("tensors", "parts"), BAD_TENSORS.values(), ids=list(BAD_TENSORS))
def test_bad_tensors_are_refused_after_good_ones_too(
    tensors: list[tuple[str, torch.Tensor]], parts: list[str], tied: Pair, refusal: Refusal
) -> None:
    good = [] if "no weight" in parts else [(EMBEDDING, tied.new_tensors[EMBEDDING])]
    message = refusal(lambda store: store.reader.from_tensors([*good, *tensors]))
    assert all(part in message for part in parts), message


def test_tensors_are_read_to_their_end_though_one_is_refused(refusal: Refusal) -> None:
    left = iter([("unknown", torch.ones(1)), *[(NORM, torch.ones(64))] * 3])
    assert "unknown" in refusal(lambda store: store.reader.from_tensors(left))
    assert next(left, None) is None


def test_the_first_reason_is_told_if_reading_on_fails(refusal: Refusal) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "unknown", torch.ones(1)
        raise WeightUpdateError("The trainer left.")

    assert "unknown" in refusal(lambda store: store.reader.from_tensors(tensors()))


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\0",
    "header cut": lambda data: data[:5],
    "empty": lambda data: b"",
    "text": lambda data: b"not safetensors at all" * 10,
    "huge header": lambda data: b"\xff" * 8 + data[8:],
    "broken JSON": lambda data: data[:8] + b"{" * 100 + data[108:],
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=list(SPOILS))
def test_broken_safetensors_are_refused(
    spoil: Callable[[bytes], bytes], tied: Pair, tmp_path: Path, refusal: Refusal
) -> None:
    data = spoil(save(tied.new_tensors))
    file = tmp_path / "part.safetensors"
    file.write_bytes(data)
    refusal(lambda store: store.reader.from_safetensors(data))
    assert str(file) in refusal(lambda store: store.reader.from_file(str(file)))


def raw_safetensors(entries: list[tuple[str, str, list[int], int, int]]) -> bytes:
    """A file with entries of name, type, shape, begin and end, as written; zeros as data."""
    parts = [
        f"{json.dumps(name)}:"
        + json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})
        for name, dtype, shape, begin, end in entries
    ]
    header = ("{" + ",".join(parts) + "}").encode()
    return struct.pack("<Q", len(header)) + header + bytes(max(entry[4] for entry in entries))


RAW: dict[str, list[tuple[str, str, list[int], int, int]]] = {
    "name twice": [(NORM, "F32", [64], 0, 256), (NORM, "F32", [64], 256, 512)],
    "overlap": [(NORM, "F32", [64], 0, 256), (EMBEDDING, "F32", [64], 128, 384)],
    "no such type": [(NORM, "F31", [64], 0, 256)],
    "four bits": [(NORM, "F4", [64], 0, 32)],
    "unsigned": [(NORM, "U16", [64], 0, 128)],
    "scales": [(NORM, "F8_E8M0", [64], 0, 64)],
    "size of another shape": [(NORM, "F32", [65], 0, 256)],
    "overflow": [(NORM, "F32", [1 << 62, 4], 0, 256)],
}


@pytest.mark.parametrize("entries", RAW.values(), ids=list(RAW))
def test_strange_headers_are_refused(
    entries: list[tuple[str, str, list[int], int, int]], tmp_path: Path, refusal: Refusal
) -> None:
    data = raw_safetensors(entries)
    file = tmp_path / "part.safetensors"
    file.write_bytes(data)
    refusal(lambda store: store.reader.from_safetensors(data))
    refusal(lambda store: store.reader.from_file(str(file)))


def test_a_plain_header_of_that_kind_is_taken(runner: ModelRunner) -> None:
    data = raw_safetensors([(NORM, "F32", [64], 0, 256)])
    assert torch.equal(runner.weights.reader.from_safetensors(data)[NORM], torch.zeros(64))


def test_a_checkpoint_must_be_complete(tied: Pair, tmp_path: Path, refusal: Refusal) -> None:
    tensors = tied.new_tensors
    del tensors[K_PROJ]
    save_file(tensors, tmp_path / WEIGHTS)
    message = refusal(lambda store: store.reader.from_directory(str(tmp_path)))
    assert K_PROJ in message
    assert str(tmp_path) in message


def test_a_bundled_model_goes_by_its_name(refusal: Refusal) -> None:
    """It is found, and has other shapes than this one."""
    message = refusal(lambda store: store.reader.from_directory("demo"))
    assert "tiny-code has a weight" in message


def test_a_directory_goes_by_the_same_names_as_at_the_start(
    tied: Pair, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tied.new.parent))
    staged = runner.weights.reader.from_directory(f"~/{tied.new.name}")
    assert staged.keys() == runner.weights.reader.from_directory(str(tied.new)).keys()
    with pytest.raises(WeightUpdateError, match=r"^model_path 'demo/' is not a .* or `demo`\.$"):
        runner.weights.reader.from_directory("demo/")


def test_a_name_in_two_files_of_a_checkpoint_is_refused(
    tied: Pair, tmp_path: Path, refusal: Refusal
) -> None:
    save_file(tied.new_tensors, tmp_path / "a.safetensors")
    save_file({NORM: torch.ones(64)}, tmp_path / "b.safetensors")
    message = refusal(lambda store: store.reader.from_directory(str(tmp_path)))
    assert "twice" in message
    assert NORM in message


@pytest.mark.parametrize("path", ["", "missing", "\0", "x" * 300])
def test_paths_that_name_nothing_are_refused(path: str, refusal: Refusal) -> None:
    for message in (
        refusal(lambda store: store.reader.from_directory(path)[:0]),
        refusal(lambda store: store.reader.from_file(path)),
    ):
        assert "is not a" in message


def test_a_directory_is_no_file_and_a_file_no_directory(tied: Pair, refusal: Refusal) -> None:
    refusal(lambda store: store.reader.from_file(str(tied.new)))
    refusal(lambda store: store.reader.from_directory(str(tied.old / WEIGHTS)))


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(path))


SPECIAL_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
}


@pytest.mark.parametrize("make", SPECIAL_FILES.values(), ids=list(SPECIAL_FILES))
def test_only_regular_files_are_read(
    make: Callable[[Path], None], tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    file, index = tmp_path / WEIGHTS, tmp_path / INDEX
    make(file)
    assert "is not a file" in refusal(lambda store: store.reader.from_file(str(file)))
    assert "no regular file" in refusal(lambda store: store.reader.from_directory(str(tmp_path)))
    index.write_text(json.dumps({"weight_map": {NORM: WEIGHTS}}))
    assert "no regular file" in refusal(lambda store: store.reader.from_directory(str(tmp_path)))
    index.unlink()
    file.rmdir() if file.is_dir() else file.unlink()
    make(index)
    assert INDEX in refusal(lambda store: store.reader.from_directory(str(tmp_path)))


def test_what_becomes_a_pipe_after_the_check_blocks_nothing(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / WEIGHTS
    make_pipe(file)
    monkeypatch.setattr(os.path, "isfile", lambda path: True)
    assert "no regular file" in refusal(lambda store: store.reader.from_file(str(file)))


def test_links_to_files_are_followed(tied: Pair, runner: ModelRunner, tmp_path: Path) -> None:
    for file in tied.new.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    runner.weights.apply(runner.weights.reader.from_directory(str(tmp_path)))
    assert torch.equal(logits_of(runner), loaded_logits(tied.new))


@pytest.mark.parametrize("read", ["file", "directory"])
def test_a_file_may_be_cut_while_weights_are_taken_from_it(
    read: str, runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file would end the process here."""
    file = shutil.copy(make_random_llama(tmp_path / "new", seed=2) / WEIGHTS, tmp_path)
    expected = {name: tensor.clone() for name, tensor in load_file(file).items()}
    place_of = WeightPlaces.place_of

    def cut_first(*args: Any) -> torch.Tensor | None:
        os.truncate(file, 0)
        return place_of(*args)

    monkeypatch.setattr(WeightPlaces, "place_of", cut_first)
    if read == "file":
        staged = runner.weights.reader.from_file(str(file))
    else:
        staged = runner.weights.reader.from_directory(str(tmp_path))
    assert os.path.getsize(file) == 0
    assert all(torch.equal(staged[name], expected[name]) for name in staged)


@pytest.mark.parametrize("change", ["cut", "longer", "other values"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: str, tied: Pair, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / WEIGHTS
    save_file(tied.new_tensors, file)
    data = file.read_bytes()
    fstat, is_about_size = os.fstat, iter([False, True])  # first it is asked what kind it is

    def change_after(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        if next(is_about_size, False):
            file.write_bytes({"cut": data[:-1], "longer": data + b"1"}.get(change, data))
        return found

    os.utime(file, (0, 0))
    monkeypatch.setattr(os, "fstat", change_after)
    assert "changed while" in refusal(lambda store: store.reader.from_file(str(file)))


def test_a_directory_without_weights_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    assert "*.safetensors" in refusal(lambda store: store.reader.from_directory(str(tmp_path)))


# --- release and restore -------------------------------------------------------------------------


def test_release_frees_every_parameter_and_restore_brings_all_back(
    pair: Pair, temp_dir: Path
) -> None:
    runner = make_runner(pair.old, Setup())
    before, hashes = logits_of(runner), digest(runner)
    tables = [buffer.clone() for buffer in runner.model.buffers()]
    runner.weights.release()
    assert runner.weights.is_released
    assert storage_sizes(runner) == {0}
    assert all(map(torch.equal, runner.model.buffers(), tables))
    assert not list(temp_dir.iterdir()), "This would stay if the process were killed."
    runner.weights.restore()
    assert not runner.weights.is_released
    assert digest(runner) == hashes
    assert torch.equal(logits_of(runner), before)


def test_weights_may_be_released_and_updated_again_and_again(
    tied: Pair, runner: ModelRunner, temp_dir: Path
) -> None:
    for path in (tied.new, tied.old, tied.new):
        staged = runner.weights.reader.from_directory(str(path))
        runner.weights.release()
        runner.weights.restore()
        runner.weights.apply(staged)
        runner.weights.release()
        runner.weights.restore()
        assert torch.equal(logits_of(runner), loaded_logits(path))
    head, embedding = (runner.model.get_parameter(name) for name in (HEAD, EMBEDDING))
    assert head.data_ptr() == embedding.data_ptr()


def test_weights_are_staged_but_not_applied_while_released(
    tied: Pair, runner: ModelRunner, temp_dir: Path
) -> None:
    before = digest(runner)
    runner.weights.release()
    staged = runner.weights.reader.from_directory(str(tied.new))
    with pytest.raises(WeightUpdateError, match="released"):
        runner.weights.apply(staged)
    assert storage_sizes(runner) == {0}
    runner.weights.restore()
    assert digest(runner) == before
    runner.weights.apply(staged)
    assert torch.equal(logits_of(runner), loaded_logits(tied.new))


def test_release_and_restore_take_turns(runner: ModelRunner, temp_dir: Path) -> None:
    before = digest(runner)
    with pytest.raises(WeightUpdateError, match="not released"):
        runner.weights.restore()
    runner.weights.release()
    with pytest.raises(WeightUpdateError, match="already"):
        runner.weights.release()
    runner.weights.restore()
    assert digest(runner) == before


def test_weights_that_cannot_be_put_aside_stay(
    runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(runner)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(WeightUpdateError, match="TMPDIR"):
        runner.weights.release()
    assert not runner.weights.is_released
    assert digest(runner) == before


def test_weights_stay_if_the_disk_is_full(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(runner)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: io.FileIO("/dev/full", "r+"))
    with pytest.raises(WeightUpdateError, match="No space left"):
        runner.weights.release()
    assert not runner.weights.is_released
    assert digest(runner) == before


@pytest.mark.parametrize("chunk_bytes", [1000, 4096])
def test_a_copy_may_have_many_chunks(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(weight_store, "COPY_BYTES", chunk_bytes)
    before = digest(runner)
    runner.weights.release()
    runner.weights.restore()
    assert digest(runner) == before


def test_a_failed_restore_stays_released_and_may_be_tried_again(
    runner: ModelRunner, temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(runner)
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the store closes it)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: file)
    runner.weights.release()
    kept = os.pread(file.fileno(), 1 << 30, 0)
    file.truncate(len(kept) // 2)
    with pytest.raises(WeightUpdateError, match="try again"):
        runner.weights.restore()
    assert runner.weights.is_released
    assert storage_sizes(runner) == {0}
    os.pwrite(file.fileno(), kept, 0)
    runner.weights.restore()
    assert digest(runner) == before


def test_weights_that_numpy_holds_too_stay(runner: ModelRunner, temp_dir: Path) -> None:
    before, weight = digest(runner), runner.model.get_parameter(NORM).numpy()
    with pytest.raises(WeightUpdateError, match="shared"):
        runner.weights.release()
    assert not runner.weights.is_released
    assert digest(runner) == before
    assert weight.any()


def test_no_step_runs_without_weights_or_kv(runner: ModelRunner, temp_dir: Path) -> None:
    feeder = Feeder(runner, 1)
    feeder.feed({"a": [1, 2]})
    runner.weights.release()
    with pytest.raises(AssertionError, match="weights"):
        feeder.feed({"a": [3]})
    runner.weights.restore()
    runner.kv_pool.release()
    with pytest.raises(AssertionError, match="KV"):
        feeder.feed({"a": [3]})
