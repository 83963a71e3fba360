"""Bodies of control calls made from keywords, as the Engine's methods make them."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.control.body_reading import make_body
from sglang.srt.entrypoints.control_calls import CALL_ROUTES
from sglang.srt.frontend.errors import RequestError

BODIES = {route.body.__name__: route.body for route in CALL_ROUTES}
# What a body needs beside the field under test.
REQUIRED: dict[str, dict[str, Any]] = {
    "CheckWeightsReqInput": {"action": "compare"},
    "GetWeightsByNameReqInput": {"name": "w"},
    "InitWeightsUpdateGroupReqInput": {
        "master_address": "host",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
    },
    "UpdateWeightFromDiskReqInput": {"model_path": "folder"},
    "UpdateWeightVersionReqInput": {"new_version": "a"},
    "UpdateWeightsFromDistributedReqInput": {
        "names": ["a"],
        "dtypes": ["float32"],
        "shapes": [[1]],
    },
}
FIELDS = [(name, field) for name, body in BODIES.items() for field in body.__struct_fields__]


def test_the_required_fields_suffice() -> None:
    for name, body in BODIES.items():
        make_body(body, REQUIRED.get(name, {}))


@pytest.mark.long_matrix
@pytest.mark.parametrize("value", ["\ud800", ["\ud800"]], ids=["text", "list"])
@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_half_a_surrogate_pair_is_refused_in_every_field(
    name: str, field: str, value: str | list[str]
) -> None:
    """JSON cannot hold one, but callers in Python can give it."""
    with pytest.raises(RequestError) as caught:
        make_body(BODIES[name], {**REQUIRED.get(name, {}), field: value})
    assert caught.value.field is not None
    assert caught.value.field.partition("[")[0] == field
    caught.value.message.encode()
