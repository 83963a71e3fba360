"""Options of forward passes, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TREE_ROWS = 64  # rows of a request that may be a tree: one bit each


@dataclass(frozen=True, slots=True)
class HiddenCapture:
    """The hidden states that a forward pass returns beside those of the rows read. They are named
    once, when the model's runner is made.

    Attributes:
        layers: the layers whose inputs a drafter wants. The input of layer i is the residual stream
            after i layers (0: the embedding), before layer i normalizes it; transformers calls it
            `hidden_states[i]`. It is of all T rows.
        all_rows: the last layer computes all T rows, even those that are not read.
        returned: layers whose inputs requests may be given, counted likewise.
    """

    layers: tuple[int, ...] = ()
    all_rows: bool = False
    returned: tuple[int, ...] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Names the layers whose inputs the pass returns (`ModelOutput.taps`), each at least once:
        those of the drafter, then those that only requests are given."""
        return self.layers + tuple(each for each in self.returned if each not in self.layers)

    @property
    def places(self) -> list[int]:
        """Gives the place of each of `returned` among `taps`."""
        return [self.taps.index(layer) for layer in self.returned]

    def check(self, num_layers: int) -> None:
        """
        Raises:
            ValueError: if a model of `num_layers` layers has no such layer.
        """
        unknown = [layer for layer in self.taps if not 0 <= layer < num_layers]
        if unknown:
            raise ValueError(
                f"The inputs of layers {unknown} are asked for, but the model's layers are 0 to"
                f" {num_layers - 1}."
            )


NO_CAPTURE = HiddenCapture()
