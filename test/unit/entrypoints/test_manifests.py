"""The manifest of Kubernetes: its parts name each other, and its commands have the flags."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from code_shape import ROOT
from sglang.srt.entrypoints.replica_flags import ReplicaFlags, parse_serve

SERVER, ROUTER = "sglang-server", "sglang-router"


@pytest.fixture(scope="module")
def parts() -> dict[tuple[str, str], Any]:
    """Returns the parts of the manifest by kind and name."""
    text = (ROOT / "examples/kubernetes/servers.yaml").read_text(encoding="utf-8")
    found = [*yaml.safe_load_all(text)]
    return {(part["kind"], part["metadata"]["name"]): part for part in found}


def container(parts: dict[tuple[str, str], Any], name: str) -> dict[str, Any]:
    spec = parts["Deployment", name]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (found,) = spec["template"]["spec"]["containers"]
    return found


def test_the_servers_would_start(parts: dict[tuple[str, str], Any]) -> None:
    found = container(parts, SERVER)
    assert found["command"] == ["sglang", "serve"]
    args, flags = parse_serve(found["args"])
    assert flags == ReplicaFlags()
    assert args.port == found["ports"][0]["containerPort"]
    assert args.port == found["readinessProbe"]["httpGet"]["port"]
    pod = parts["Deployment", SERVER]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout_s


def test_the_router_finds_the_servers(parts: dict[tuple[str, str], Any]) -> None:
    launch_router = pytest.importorskip(
        "sglang_router.launch_router", reason="the package sglang-router is not installed"
    )
    found = container(parts, ROUTER)
    assert found["command"] == ["python", "-m", launch_router.__name__]
    args = launch_router.parse_router_args(found["args"])
    server = parts["Deployment", SERVER]["spec"]
    assert args.service_discovery
    assert args.selector == server["selector"]["matchLabels"]
    (port,) = container(parts, SERVER)["ports"]
    assert args.service_discovery_port == port["containerPort"]
    assert args.port == parts["Service", "sglang"]["spec"]["ports"][0]["port"]


def test_roles_and_the_policy_name_the_parts(parts: dict[tuple[str, str], Any]) -> None:
    account = parts["ServiceAccount", ROUTER]["metadata"]["name"]
    template = parts["Deployment", ROUTER]["spec"]["template"]
    assert template["spec"]["serviceAccountName"] == account
    binding = parts["RoleBinding", ROUTER]
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    assert ("Role", binding["roleRef"]["name"]) in parts
    assert parts["Service", "sglang"]["spec"]["selector"] == template["metadata"]["labels"]
    policy = parts["NetworkPolicy", SERVER]["spec"]
    servers = parts["Deployment", SERVER]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == servers
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": template["metadata"]["labels"]}}]
