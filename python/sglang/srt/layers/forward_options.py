"""Options of forward passes, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TREE_ROWS = 64  # rows of a request that may be a tree: one bit each


@dataclass(frozen=True, slots=True)
class HiddenCapture:
    """The hidden states that a forward pass returns beside those of the rows read. A drafter asks
    for them once, when its target's runner is made.

    Attributes:
        layers: the layers whose inputs are wanted. The input of layer i is the residual stream
            after i layers (0: the embedding), before layer i normalizes it; transformers calls it
            `hidden_states[i]`. It is of all T rows.
        all_rows: the last layer computes all T rows, even those that are not read.
    """

    layers: tuple[int, ...] = ()
    all_rows: bool = False

    def check(self, num_layers: int) -> None:
        """
        Raises:
            ValueError: if a model of `num_layers` layers has no such layer.
        """
        unknown = [layer for layer in self.layers if not 0 <= layer < num_layers]
        if unknown:
            raise ValueError(
                f"The inputs of layers {unknown} are asked for, but the model's layers are 0 to"
                f" {num_layers - 1}."
            )


NO_CAPTURE = HiddenCapture()
