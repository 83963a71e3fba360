"""check_model says what a start would: by headers alone, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headers_of_models import SIZES, write_model, write_shard
from sglang import check_model
from sglang.srt.model_config import ModelPathError, load_model_config, resolve_model_path
from sglang.srt.tensor_headers import read_headers

GOOD = "A server with this model should start.\n"
LLAMA: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 8,
    "dtype": "bfloat16",
}
HEAVY = ("torch", "transformers")


def shapes_of(entries: dict[str, Any]) -> dict[str, list[int]]:
    """Gives the shapes of a Llama's tensors that check_model looks at, and of one more."""
    hidden, kv = entries["hidden_size"], entries["num_key_value_heads"] * entries["head_dim"]
    shapes = {"model.embed_tokens.weight": [entries["vocab_size"], hidden]}
    for layer in range(entries["num_hidden_layers"]):
        for name in ("k_proj", "v_proj"):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = [kv, hidden]
    return shapes | {"model.norm.weight": [hidden]}


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert check_model.main([*words]) == code
    text = capsys.readouterr().out
    assert ("PROBLEM: " in text) == bool(code)
    return text


def rows(text: str) -> dict[str, str]:
    return {line[:12].rstrip(): line[12:] for line in text.splitlines()}


def test_it_says_how_a_model_is_served_and_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, LLAMA, shapes_of(LLAMA))
    text = said(capsys, 0, folder, "--device-memory", "1")
    found = rows(text)
    assert text.endswith(GOOD)
    assert "LlamaForCausalLM, by a file of its own (sglang.srt.models.llama)" in found["model"]
    # 4 layers, K and V, 2 heads of 8 values, 2 bytes each
    assert found["KV"].startswith("256 bytes per token, ")
    num_weights = 96 * 32 + 4 * 2 * 16 * 32 + 32
    left = int(0.88 * 2**30) - 2 * num_weights
    assert f", {left // 256} tokens in " in found["KV"]
    assert f"BF16 {2 * num_weights / 2**20:.1f} MiB" in found["weights"]


def test_shards_count_together_and_a_missing_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = shapes_of(LLAMA)
    folder = write_model(tmp_path, LLAMA, {})
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-{1 + index % 3}.safetensors" for index, name in enumerate(shapes)}
    for file in set(files.values()):
        write_shard(tmp_path / file, {name: shapes[name] for name in shapes if files[name] == file})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert f"in 3 files, {len(shapes)} tensors" in said(capsys, 0, folder)
    (tmp_path / "model-2.safetensors").unlink()
    text = said(capsys, 1, folder)
    assert "lacks model-2.safetensors; is the download complete?" in text


def test_a_file_that_is_cut_off_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, LLAMA, shapes_of(LLAMA))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is not a readable safetensors file" in said(capsys, 1, folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model.embed_tokens.weight": [97, 32]}, "shape [97, 32], but config.json asks for [96, "),
        ({"model.layers.3.self_attn.k_proj.weight": [8, 32]}, "120 values of K and V of a token"),
    ],
)
def test_tensors_of_another_config_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    folder = write_model(tmp_path, LLAMA, shapes_of(LLAMA) | change)
    assert expected in said(capsys, 1, folder)


def test_weights_of_another_type_are_a_problem_whatever_config_json_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, LLAMA, {})
    write_shard(tmp_path / "model.safetensors", shapes_of(LLAMA), "F8_E5M2")
    assert "of type F8_E5M2, which is not read; use the checkpoint in" in said(capsys, 1, folder)


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}
KEY = "model.layers.3.self_attn.k_proj"


def write_fp8(folder: Path, config: dict[str, Any], change: dict[str, list[int]]) -> str:
    """A model whose keys and values have 8 bits, with scales; what `change` gives no shape is not
    there."""
    wide = {name: shape for name, shape in shapes_of(LLAMA).items() if "_proj" not in name}
    short = {name: shape for name, shape in shapes_of(LLAMA).items() if "_proj" in name} | {
        name: shape for name, shape in change.items() if name.endswith(".weight")
    }
    scales = {name.replace(".weight", ".weight_scale_inv"): [2, 2] for name in short}
    scales |= {name: shape for name, shape in change.items() if name not in short}
    path = write_model(folder, config, {})
    files = {"BF16": wide, "F8_E4M3": short, "F16": scales}
    index = {}
    for dtype, shapes in files.items():
        there = {name: shape for name, shape in shapes.items() if shape}
        write_shard(folder / f"{dtype}.safetensors", there, dtype)
        index |= dict.fromkeys(there, f"{dtype}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({f"{KEY}.weight_scale_inv": []}, f"'{KEY}.weight' of 8 bits, but no scale of it"),
        ({f"{KEY}.weight": []}, "but no weight of 8 bits that it belongs to"),
        ({f"{KEY}.weight_scale_inv": [2, 3]}, "of shape [2, 3], but its weight of shape [16, 32]"),
        ({"model.norm.weight_scale": [1]}, "but no weight of 8 bits"),
    ],
)
def test_missing_and_wrong_scales_are_a_problem(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, list[int]],
    expected: str,
) -> None:
    assert expected in said(capsys, 1, write_fp8(tmp_path, {**LLAMA, **FP8}, change))


def test_scales_of_a_type_that_no_start_takes_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_fp8(tmp_path, {**LLAMA, **FP8}, {})
    found = read_headers(tmp_path).items()
    shapes = {name: [*header.shape] for name, header in found if "_scale" in name}
    write_shard(tmp_path / "F16.safetensors", shapes, "F8_E8M0")
    assert "of type F8_E8M0, which is not read" in said(capsys, 1, folder)


@pytest.mark.parametrize(
    ("block", "memory"), [([8, 16], "becomes that"), (None, "0.0 MiB of them fp8")]
)
def test_weights_of_8_bits_count_as_they_are_held_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], block: list[int] | None, memory: str
) -> None:
    entries = {"quant_method": "fp8", "weight_block_size": block}
    change = (
        {}
        if block
        else {
            f"{KEY[:13]}{layer}.self_attn.{name}.weight_scale_inv": [1]
            for layer in range(4)
            for name in ("k_proj", "v_proj")
        }
    )
    folder = write_fp8(tmp_path, {**LLAMA, "quantization_config": entries}, change)
    assert memory in rows(said(capsys, 0, folder, "--device-memory", "1"))["memory"]


def test_a_model_larger_than_the_memory_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, LLAMA, shapes_of(LLAMA))
    assert "more than 88% of" in said(capsys, 1, folder, "--device-memory", "0.00001")


def test_a_type_that_no_gpu_serves_is_a_problem_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, {**LLAMA, "dtype": "float64"}, shapes_of(LLAMA))
    assert "'float64', none of float32, " in said(capsys, 1, folder, "--device-memory", "1")


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf", "x", "1e99"])
def test_a_memory_that_is_none_is_refused(memory: str) -> None:
    with pytest.raises(SystemExit) as end:
        check_model.main(["demo", "--device-memory", memory])
    assert end.value.code == 2


def test_it_refuses_in_the_words_of_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, {**LLAMA, "num_experts": 8}, {})
    with pytest.raises(ModelPathError) as error:
        load_model_config(folder)
    assert f"PROBLEM: {error.value}\n" in said(capsys, 1, folder)


def test_pickled_weights_alone_are_a_problem_with_the_command_that_converts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path, LLAMA, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "convert the folder with sglang convert-checkpoint" in said(capsys, 1, folder)


def test_wrong_sizes_of_a_family_without_a_file_of_its_own_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {**LLAMA, "architectures": ["Olmo2ForCausalLM"], "hidden_size": [1]}
    folder = write_model(tmp_path, entries, {})
    assert "hidden_size is [1], but must be" in said(capsys, 1, folder)


@pytest.mark.parametrize(
    ("head", "algorithm"),
    [("demo-eagle", "EAGLE"), ("demo-eagle3", "EAGLE3"), ("demo-nextn", "NEXTN")],
)
def test_a_head_is_named_with_the_algorithm_that_takes_it(
    capsys: pytest.CaptureFixture[str], head: str, algorithm: str
) -> None:
    flag = f"--speculative-algorithm {algorithm}"
    assert flag in said(capsys, 0, head)
    target = resolve_model_path("demo")
    assert f"It can draft for {target}: {flag}; " in said(capsys, 0, head, "--target", "demo")


def test_a_head_of_another_target_and_one_without_a_drafter_are_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, 1, "demo-nextn", "--target", "demo-draft")
    assert "use a head that was trained for this target" in text
    entries = {**LLAMA, "architectures": ["Qwen3DSparkModel"]}
    assert "it is a head of DSpark" in said(capsys, 1, write_model(tmp_path, entries, {}))


def test_a_draft_model_is_compared_with_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "STANDALONE.\n" in said(capsys, 0, "demo-draft", "--target", "demo")
    folder = write_model(tmp_path, LLAMA, shapes_of(LLAMA))
    assert "vocab_size is 96, but that of the target" in said(capsys, 1, folder, "--target", "demo")


def test_a_head_is_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 1, "demo-draft", "--target", "demo-eagle3")
    assert "only drafts for another model" in text


def test_a_family_that_is_no_name_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {**LLAMA, "architectures": ["LlamaForCausalLMNextN"], "model_type": {"a": 1}}
    folder = write_model(tmp_path, entries, {})
    assert "of the family {'a': 1} has" in said(capsys, 1, folder, "--target", "demo")


def test_it_names_the_drafters_that_a_model_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(said(capsys, 0, "demo"))["drafters"]
    assert found.startswith("multi-token prediction (mask token 2), NGRAM; ")


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from sglang.check_model import main; assert main(['demo']) == 0;"
        f" assert not sys.modules.keys() & {set(HEAVY)}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
