"""Weights on their way to a GPU: exact in every type, and nothing is left beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.model_config import load_model_config
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_copies import WeightCopies
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from sglang.srt.weight_sync.weight_store import WeightStore

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

CUDA = torch.device("cuda", 0)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("place_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_values", [1, 63, 64, 65, 1000])
def test_a_weight_of_any_size_and_type_arrives(
    num_values: int, weight_type: torch.dtype, place_type: torch.dtype
) -> None:
    copies = WeightCopies(CUDA, chunk_bytes=256)
    weights = [torch.randn(num_values, 3).to(weight_type) for _ in range(20)]
    places = [torch.zeros(num_values, 3, dtype=place_type, device=CUDA) for _ in weights]
    for place, weight in zip(places, weights, strict=True):
        copies.copy(place, weight)
    copies.finish()
    for place, weight in zip(places, weights, strict=True):
        assert torch.equal(place.cpu(), weight.to(place_type))


def test_rows_of_a_fused_weight_are_filled_alone() -> None:
    copies = WeightCopies(CUDA, chunk_bytes=256)
    whole = torch.zeros(40, 7, device=CUDA)
    weight = torch.randn(20, 7)
    copies.copy(whole.narrow(0, 10, 20), weight)
    copies.finish()
    assert torch.equal(whole[10:30].cpu(), weight)
    assert not whole[:10].any()
    assert not whole[30:].any()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_takes_the_memory_of_its_weights_alone(load_format: str) -> None:
    config = load_model_config("demo")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(config, load_format, 4096, torch.bfloat16, "cuda")
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert torch.cuda.max_memory_allocated() - before < 1.02 * num_bytes + 64 * len(tensors) * 8
    if load_format == "auto":
        on_host = dict(load_model(config, "auto", 4096, torch.bfloat16, "cpu").named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.cpu(), on_host[name]), name


def test_a_tied_head_is_compared_with_the_embedding_that_serves() -> None:
    config = load_model_config("demo")
    model = load_model(config, "auto", 64, torch.bfloat16, "cuda")
    store, embedding = WeightStore(model, config), model.get_parameter(EMBEDDING).cpu()
    store.apply(store.reader.from_tensors([(HEAD, embedding)]))
    with pytest.raises(WeightUpdateError, match=HEAD):
        store.apply(store.reader.from_tensors([(HEAD, -embedding)]))
    assert torch.equal(model.get_parameter(HEAD).cpu(), embedding)


def test_a_model_that_its_files_untie_has_both_on_the_device(tmp_path: Path) -> None:
    folder = shutil.copytree(load_model_config("demo").path, tmp_path / "model")
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {HEAD: -tensors[EMBEDDING]}, file)
    model = load_model(load_model_config(str(folder)), "auto", 64, torch.bfloat16, "cuda")
    head, embedding = (model.get_parameter(name) for name in (HEAD, EMBEDDING))
    assert head.device.type == "cuda"
    assert torch.equal(head, -embedding)
