"""Says what a wrong path or method is answered with: what there is instead."""

from __future__ import annotations

import pytest

from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    path = make_model_dir(tmp_path_factory.mktemp("model"))
    return Server(str(path), load_tokenizer(path))


def message(server: Server, method: str, path: str, status: int) -> str:
    answer = server.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    return str(error["message"])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/api/generate", "/generate"),
        ("/Generate", "/generate"),
        ("/serverinfo", "/server_info"),
        ("/get_server_infos", "/get_server_info"),
        ("/update_weights_from_dist", "/update_weights_from_disk"),
        ("/pause", "/pause_generation"),
    ],
)
def test_404_names_the_route_that_was_meant(server: Server, path: str, meant: str) -> None:
    told = message(server, "POST", path, 404)
    assert f"{meant}," in told or f"{meant}." in told
    assert path in told
    assert "/openapi.json" in told


@pytest.mark.parametrize("path", ["/xyz", "/xyz/", "/" + "q" * 60_000, "/%0a%00"])
def test_404_far_from_every_route_names_the_main_ones_and_is_short(
    server: Server, path: str
) -> None:
    told = message(server, "GET", path, 404)
    assert "/v1/chat/completions" in told
    assert "/openapi.json" in told
    assert len(told) < 400


def test_405_names_all_methods_of_the_path(server: Server) -> None:
    for method, path, methods in [
        ("GET", "/generate", "POST, PUT"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/flush_cache", "GET, POST"),
        ("POST", "/v1/models/a/b", "GET"),
    ]:
        answer = server.request(method, path)
        told = answer.json()["error"]["message"]
        assert answer.status_code == 405
        assert answer.headers["allow"] == methods
        assert methods in told
        assert method in told
        assert "/openapi.json" in told
