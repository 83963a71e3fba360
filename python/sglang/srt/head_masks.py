"""Reads what a head is fed in place of tokens that are not known yet: P-EAGLE, DFlash; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.head_layouts import DFLASH, MASK_DEPTHS, MASK_TOKENS, Layout
from sglang.srt.model_config import ModelConfig

BLOCK_SIZE, FROM_ANCHOR = "block_size", "sample_from_anchor"
MAX_BLOCK_SIZE = 64  # rows of a block


@dataclass(frozen=True)
class MaskInput:
    """Describes what a head is fed in place of what is not known: of P-EAGLE (arXiv 2602.01469) a
    token and hidden states, of DFlash (arXiv 2602.06036) the tokens of a block but its first one.

    Attributes:
        token_id: in place of the token.
        num_dims: of P-EAGLE's tensor `mask_hidden`, which is in place of the taps: [1, width], or
            [1, 1, width].
        depths: drafts that a head of P-EAGLE was trained for; None: its config.json does not say.
        block_size: rows of a block of DFlash, with that of the certain token; None: P-EAGLE.
    """

    token_id: int
    num_dims: int = 0
    depths: int | None = None
    block_size: int | None = None


def read_mask_input(
    config: ModelConfig, shape: tuple[int, ...], layout: Layout
) -> MaskInput | None:
    """Returns what a head with mask tokens is fed; None for other heads.

    Args:
        shape: of `mask_hidden`.

    Raises:
        ModelPathError: if the entries name no token, or several, or no block that can be drafted.
    """
    if not layout.has_masks:
        return None
    ids = {name: config.integer(name, None, minimum=0) for name in MASK_TOKENS}
    found = {value for value in ids.values() if value is not None}
    is_block = layout.kind == DFLASH
    if len(found) != 1:
        raise config.refusal(
            f"a head of {'DFlash' if is_block else 'P-EAGLE'} is fed a mask token, and"
            f" {', '.join(MASK_TOKENS)} name {sorted(found) or 'none'}; write the one that it was"
            " trained with"
        )
    [token_id] = found
    if token_id >= config.vocab_size:
        raise config.refusal(
            f"the mask token is {token_id}, but vocab_size is {config.vocab_size}; write the one"
            " that it was trained with"
        )
    if not is_block:
        depths = [count for name in MASK_DEPTHS if (count := config.integer(name, None, minimum=1))]
        return MaskInput(token_id, len(shape), min(depths, default=None))
    block_size = config.integer(BLOCK_SIZE, None, minimum=2)
    if block_size is None:
        raise config.refusal(
            f"{BLOCK_SIZE} is missing, the rows that a head of DFlash drafts from; write the number"
            " that it was trained with"
        )
    if block_size > MAX_BLOCK_SIZE:
        raise config.refusal(
            f"{BLOCK_SIZE} is {block_size}, but must be at most {MAX_BLOCK_SIZE}; use a head with"
            " smaller blocks"
        )
    if config.flag(FROM_ANCHOR):
        raise config.refusal(
            f"{FROM_ANCHOR} is true, so each row gives the token after it, as those of DSpark;"
            " use a head of DFlash whose rows give their own"
        )
    return MaskInput(token_id=token_id, block_size=block_size)
