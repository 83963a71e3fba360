"""Flags of ranks that cannot be met are refused before a process starts; what a launcher gives its
processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.srt.entrypoints.children import child_environ, places_of
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.layers.linear import part_of
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.flag_checks import num_threads_of
from sglang.srt.processes.rank_flags import check_devices, check_ranks
from sglang.srt.server_args import ServerArgs
from sglang.srt.shard import Shard
from sglang.srt.weight_format import WeightFormat

MODEL = load_model_config("demo")  # 4 heads over 2 KV heads, intermediate 768


def args(**flags: object) -> ServerArgs:
    return ServerArgs(**{"model_path": "demo", "tp_size": 2, **flags})


def test_ranks_that_do_not_divide_the_heads_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        check_ranks(args(tp_size=3), MODEL)
    assert str(error.value) == (
        "--tp-size 3 does not divide the model's num_attention_heads 4 and num_key_value_heads 2;"
        " each rank gets the same number. Ranks may be 1, 2."
    )
    odd = replace(MODEL, intermediate_size=767)
    with pytest.raises(ConfigError, match=r"intermediate_size 767; .* Ranks may be 1\.$"):
        check_ranks(args(), odd)
    check_ranks(args(), MODEL)
    check_ranks(args(tp_size=1), odd)


def test_ranks_have_equal_devices() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    check_devices(args(), [h100, h100])
    check_devices(args(), ["cpu", "cpu"])
    check_devices(args(device="cpu"), ["cpu", h100])
    with pytest.raises(ConfigError, match="torch finds none for rank 1 and 2: see `nvidia-smi`, "):
        check_devices(args(tp_size=3), [h100, "cpu", "cpu"])
    with pytest.raises(ConfigError, match="ranks have NVIDIA H100 80GB HBM3, NVIDIA L40S: choose"):
        check_devices(args(), [h100, "NVIDIA L40S"])


def test_each_rank_sees_the_gpu_after_that_of_the_rank_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seen(visible: str, **flags: object) -> dict[str, str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        places = places_of(args(**flags))
        assert [*places][-2:] == ["scheduler", "detokenizer"]
        environs = {role: child_environ(place.gpu_id) for role, place in places.items()}
        return {role: each["CUDA_VISIBLE_DEVICES"] for role, each in environs.items()}

    # A process takes the first GPU that it sees.
    assert seen("6,4,2", tp_size=3)["rank 1"] == "4"
    assert seen("6,4,2", tp_size=3)["rank 2"] == "2"
    assert seen("6,4,2", tp_size=3)["scheduler"] == "6,4,2"
    shifted = seen("6,4,2", base_gpu_id=1)
    assert (shifted["scheduler"], shifted["rank 1"]) == ("4", "2")
    assert seen("", device="auto")["rank 1"] == ""
    assert seen("6", device="cpu")["rank 1"] == "6"
    with pytest.raises(LaunchError, match="ask for GPU 1 of those that CUDA_VISIBLE_DEVICES names"):
        seen("6")


def test_ranks_share_the_cores_of_a_machine() -> None:
    assert [num_threads_of(args(tp_size=n), 4) for n in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize(("whole", "num_ranks"), [(12, 3), (13, 3), (5, 4), (2, 4)])
def test_parts_follow_each_other_and_make_the_whole(whole: int, num_ranks: int) -> None:
    cuts = [Shard(rank, num_ranks).cut(0, whole) for rank in range(num_ranks)]
    places = [place for cut in cuts for place in range(cut.start, cut.start + cut.size)]
    assert places == list(range(whole))
    assert all(cut.size <= cuts[0].size for cut in cuts)


def test_each_rank_has_its_part_of_each_part() -> None:
    parts, rows = (6, 2, 2), torch.arange(10)
    for rank in range(2):
        cut = Shard(rank, 2).cut(0, 10, parts)
        expected = torch.cat([part.chunk(2)[rank] for part in rows.split(parts)])
        assert part_of(rows, cut).equal(expected)
        assert not WeightFormat(2, 2).divides(cut)  # of 5 rows, blocks would be in two parts
    cut, blocks = Shard(1, 2).cut(0, 20, (12, 4, 4)), WeightFormat(2, 2)
    assert blocks.divides(cut)
    assert blocks.cut_of_scales(cut) == Shard(1, 2).cut(0, 10, parts)
    assert not WeightFormat(4, 4).divides(Shard(1, 2).cut(0, 24, (16, 4, 4)))


def test_no_process_may_use_multicast_of_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    assert child_environ()["NCCL_NVLS_ENABLE"] == "0"
    assert child_environ()["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
