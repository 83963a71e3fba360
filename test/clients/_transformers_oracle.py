"""Computes with transformers what a model says: log-likelihoods of texts, and greedy
continuations."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Oracle:
    """The model of a folder in float32, on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def continuation(self, context: str, continuation: str, adds_bos: bool) -> tuple[float, bool]:
        """(sum of log-probabilities, whether each token is the likeliest) of a continuation.

        White space at the context's end belongs to the continuation.

        Raises:
            ValueError: a token holds parts of both.
        """
        text = context + continuation
        context = context.rstrip()
        ids, head = self._ids(text, adds_bos), self._ids(context, adds_bos)
        if ids[: len(head)] != head:
            raise ValueError(f"A token holds the end of {context!r} and more.")
        return self._score(ids, len(head))

    def whole_text(self, text: str, adds_bos: bool) -> float:
        """Sum of log-probabilities of a text's tokens behind a BOS: of all that encoding gives,
        a BOS of its own among them if it adds one."""
        return self._score([self._tokenizer.bos_token_id, *self._ids(text, adds_bos)], 1)[0]

    def generate(
        self, context: str, adds_bos: bool, stops: tuple[str, ...], num_tokens: int
    ) -> str:
        """The greedy continuation, up to the first of the stops."""
        return self._continue(self._ids(context, adds_bos), stops, num_tokens)

    def answer(
        self, messages: list[dict[str, str]], stops: tuple[str, ...], num_tokens: int
    ) -> str:
        """The greedy answer in a chat, up to the first of the stops."""
        prompt = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._continue(self._ids(prompt, False), stops, num_tokens)

    def _continue(self, prompt: list[int], stops: tuple[str, ...], num_tokens: int) -> str:
        ids = torch.tensor([prompt])
        output = self._model.generate(ids, do_sample=False, max_new_tokens=num_tokens)
        text = self._tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    def _ids(self, text: str, adds_bos: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=adds_bos)["input_ids"]
        return ids

    @torch.no_grad()
    def _score(self, ids: list[int], start: int) -> tuple[float, bool]:
        """Returns the log-likelihood of the tokens from `start` on, each behind all those before
        it, and whether all of them are the greedy ones."""
        logits = self._model(torch.tensor([ids])).logits[0, start - 1 : -1]  # [T, vocabulary]
        wanted = torch.tensor(ids[start:])  # [T]
        logprobs = torch.log_softmax(logits, -1).gather(-1, wanted[:, None])
        return logprobs.sum().item(), bool((logits.argmax(-1) == wanted).all())
