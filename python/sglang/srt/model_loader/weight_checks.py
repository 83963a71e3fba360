"""The error of weights that do not fit a model, and a check of their values."""

from __future__ import annotations

import torch

from sglang.srt.layers.scaled_weight import CODES


class WeightMismatch(ValueError):
    """Weights and a model that do not fit each other.

    Attributes:
        problem: what is wrong, to be put after the name of the source.
        question: what the user may have overlooked, of a model's folder.
        remedy: what to do who sends them to a running model.
    """

    def __init__(
        self,
        problem: str,
        question: str,
        remedy: str = "send weights as the model's own checkpoint has them",
    ) -> None:
        super().__init__(f"{problem}; {question}")
        self.problem, self.question, self.remedy = problem, question, remedy


def check_finite(name: str, values: torch.Tensor) -> None:
    """Checks the values of a weight in the type that serves, which may hold less than the file's.

    Raises:
        WeightMismatch: if one is NaN or infinite.
    """
    if not values.numel() or not values.is_floating_point():
        return
    dtype = str(values.dtype).removeprefix("torch.")
    if values.dtype == CODES:
        values = values.to(torch.float16)
    low, high = values.aminmax()  # NaN if there is one; needs no memory
    if (low.isfinite() & high.isfinite()).item():
        return
    num_wrong = values.numel() - int(values.isfinite().sum())
    raise WeightMismatch(
        f"has a weight {name!r} with {num_wrong} of {values.numel()} values NaN or infinite as"
        f" {dtype}",
        "is the file intact? If so, choose a --dtype that can hold its values",
        f"send finite values that {dtype} can hold",
    )
