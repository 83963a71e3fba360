"""`serialized_named_tensors` of `/update_weights_from_tensor`: who may send them, and what becomes
of them."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from fake_server import Server
from sent_weights import pickle_of
from serving_utils import make_model_dir
from sglang.srt.entrypoints.access import AccessRules
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.messages.control import UpdateWeightsReq
from sglang.srt.sent_tensors import HostMemory, SentTensors
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import load_tokenizer
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

PATH = "/update_weights_from_tensor"
ALLOWED = {
    "allow_pickled_weights": True,
    "admin_api_key": "admin-key",
    "api_key": "user-key",
    "max_weight_bytes": 1 << 20,
}
KEY = {"Authorization": "Bearer admin-key"}
TENSOR = torch.tensor([1.0, 2.0, 3.0])
NEVER_READ = {"serialized_named_tensors": ["gASV"]}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_server(model_path: Path) -> Any:
    return lambda **flags: Server(str(model_path), load_tokenizer(model_path), **flags)


def post_from(server: Server, address: str, body: Any, **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(server.app, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(PATH, json=body, headers={**KEY, **headers})

    return asyncio.run(work())


NAMED = [("a", TENSOR), ("b", TENSOR)]
FLAT = FlattenedTensorBucket(named_tensors=[("a", TENSOR)])
BUCKET = {"flattened_tensor": FLAT.get_flattened_tensor(), "metadata": FLAT.get_metadata()}


def body_of(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": [base64.b64encode(data).decode()], **fields}


def plain(value: Any = NAMED, **fields: Any) -> dict[str, Any]:
    return body_of(MultiprocessingSerializer.serialize(value), **fields)


def pickled(value: Any = NAMED, **fields: Any) -> dict[str, Any]:
    return body_of(pickle_of(value), **fields)


@pytest.mark.parametrize("made", [plain, pickled])
def test_tensors_reach_the_scheduler_as_plain_data(make_server: Any, made: Any) -> None:
    server = make_server(**ALLOWED)
    body = made(weight_version="v2", flush_cache=False)
    answer = server.post(PATH, body, headers=KEY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"]
    message = server.only(UpdateWeightsReq)
    assert (message.weight_version, message.flush_cache) == ("v2", False)
    assert isinstance(message.source, SentTensors)
    assert message.source.memories == [HostMemory(0, 12)]
    assert [tensor.name for tensor in message.source.tensors] == ["a", "b"]
    assert not Path(message.source.path).exists()


def test_a_pickled_bucket_needs_its_load_format(make_server: Any) -> None:
    server = make_server(**ALLOWED)
    for load_format, status in ((None, 400), ("flattened_bucket", 200)):
        body = pickled(BUCKET, load_format=load_format)
        assert server.post(PATH, body, headers=KEY).status_code == status
    [tensor] = server.only(UpdateWeightsReq).source.tensors
    assert (tensor.name, tensor.shape, tensor.dtype) == ("a", [3], "float32")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_plain_data_need_no_flag_and_no_loopback(make_server: Any, address: str) -> None:
    """As `shared_memory` and safetensors; a trainer may call this machine by its own address."""
    server = make_server()
    for body in (plain(), plain(BUCKET, load_format="flattened_bucket")):
        answer = post_from(server, address, body)
        assert answer.status_code == 200, answer.text
    assert len(server.sent) == 2
    sources = [message.source for message in server.sent]
    assert not any(Path(source.path).exists() for source in sources)


@pytest.mark.parametrize("key", [None, "user-key", "wrong"])
def test_plain_data_need_the_key_that_the_route_needs(make_server: Any, key: str | None) -> None:
    server = make_server(admin_api_key="admin-key", api_key="user-key")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert server.post(PATH, plain(), headers=headers).status_code == 401
    assert not server.sent


def test_plain_data_have_the_limits_of_weights(make_server: Any) -> None:
    values = torch.zeros(1 << 16)
    server = make_server(max_weight_bytes=1 << 18)  # of the body; base64 is longer
    answer = server.post(PATH, plain([("a", values)]))
    assert (answer.status_code, "--max-weight-bytes" in answer.text) == (413, True)
    assert server.post(PATH, plain([("a", values[: 1 << 15])])).status_code == 200


def test_damaged_or_nameless_data_are_refused_and_the_server_serves(make_server: Any) -> None:
    server = make_server()
    whole = MultiprocessingSerializer.serialize(NAMED)
    for data in (whole[:-3], MultiprocessingSerializer.serialize(TENSOR)):
        answer = server.post(PATH, body_of(data))
        assert answer.status_code == 400
        assert answer.json()["message"].startswith("serialized_named_tensors: its entry is")
    assert not server.sent
    assert server.post(PATH, plain()).status_code == 200


def test_without_the_flag_pickles_are_refused_with_the_remedy(make_server: Any) -> None:
    server = make_server(admin_api_key="admin-key")
    answer = server.post(PATH, NEVER_READ, headers=KEY)
    assert answer.status_code == 400
    for remedy in ("--allow-pickled-weights", "--admin-api-key", "sglang.srt.utils"):
        assert remedy in answer.json()["message"]
    assert not server.sent


@pytest.mark.parametrize("key", [None, "user-key", "wrong"])
def test_only_who_has_the_admin_s_key_may_send_them(make_server: Any, key: str | None) -> None:
    server = make_server(**ALLOWED)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert server.post(PATH, NEVER_READ, headers=headers).status_code == 401
    assert not server.sent


@pytest.mark.parametrize("address", ["10.0.0.7", "::2", "::ffff:10.0.0.7", "localhost.evil", ""])
def test_only_this_machine_may_send_them(make_server: Any, address: str) -> None:
    server = make_server(**ALLOWED)
    answer = post_from(server, address, NEVER_READ)
    assert answer.status_code == 403
    assert "127.0.0.1" in answer.json()["message"]
    assert not server.sent


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_a_proxy_on_this_machine_may_not(make_server: Any, header: str) -> None:
    answer = post_from(make_server(**ALLOWED), "127.0.0.1", NEVER_READ, **{header: "127.0.0.1"})
    assert answer.status_code == 403


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_every_address_of_this_machine_is_one(make_server: Any, address: str) -> None:
    assert post_from(make_server(**ALLOWED), address, pickled()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"serialized_named_tensors": ["gASV", "gASV"]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": ["%"]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [""]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [7]}, "serialized_named_tensors[0]"),
        ({"serialized_named_tensors": "gASV"}, "serialized_named_tensors"),
        ({**NEVER_READ, "load_format": "direct"}, "load_format"),
        ({"safetensors": "AAAA", "load_format": "flattened_bucket"}, "load_format"),
        ({**NEVER_READ, "safetensors": "AAAA"}, "safetensors"),
        ({"serialized_named_tensors": []}, "safetensors"),
    ],
    ids=str,
)
def test_a_wrong_body_is_refused_by_its_field(
    make_server: Any, fields: dict[str, Any], field: str
) -> None:
    server = make_server(**ALLOWED)
    answer = server.post(PATH, fields, headers=KEY)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(field)
    assert not server.sent


def test_a_pickle_of_something_else_is_refused_and_the_server_serves(make_server: Any) -> None:
    server = make_server(**ALLOWED)
    evil = base64.b64encode(b"cos\nsystem\n(S'touch canary'\ntR.").decode()
    answer = server.post(PATH, {"serialized_named_tensors": [evil]}, headers=KEY)
    assert answer.status_code == 400
    assert "asks for os.system" in answer.json()["message"]
    assert server.post(PATH, pickled(), headers=KEY).status_code == 200


def test_the_flag_needs_the_admin_s_key(model_path: Path) -> None:
    args = ServerArgs(model_path=str(model_path), allow_pickled_weights=True, api_key="user-key")
    with pytest.raises(LaunchError, match="--admin-api-key"):
        AccessRules.of(args)
