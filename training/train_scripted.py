"""Train the scripted model of the tests: a small Llama that says a given text after its trigger.

A prompt that ends in `<|say:NAME|>`, anything, `<|assistant|>` is continued with the text NAME of
`texts.json`, then the end. Any output that a model may give, such as a call of a function in the
form of some family, can so come out of a real server. A text goes on where a prompt breaks it off.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm

from training.model import Llama, LlamaShape
from training.optim import MuonAdamW

BOS, EOS, MASK, USER, ASSISTANT = "<s>", "</s>", "<|mask|>", "<|user|>", "<|assistant|>"
CALL_MARKS = ("<|python_tag|>", "<|eom_id|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
VISIBLE_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
VOCAB_SIZE = 512
OPENINGS = ("", "\n", "<think>\n", "<think>\n\n</think>\n\n", "<think></think>\n")
IGNORED = -100  # a target that the loss leaves out
SHAPE = LlamaShape(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    rope_theta=10_000.0,
)
CHAT_TEMPLATE = """{#- Answers may begin with <think>. -#}
{{- '<s>' }}
{%- if tools %}{{ '<|user|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{{- '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}
{{- message.content or '' }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- if message.role == 'assistant' and not loop.last %}{{ '</s>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + (opening or '') }}{% endif %}"""


def trigger(name: str) -> str:
    """The token that asks for a text."""
    return f"<|say:{name}|>"


def make_tokenizer(texts: dict[str, str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE tokens, marks and triggers among them."""
    special = [BOS, EOS, MASK, USER, ASSISTANT, *CALL_MARKS, *map(trigger, texts)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE_MARKS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = list(texts.values())
    for mark in (*VISIBLE_MARKS, *CALL_MARKS):
        plain = [text.replace(mark, " ") for text in plain]
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in VISIBLE_MARKS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    return tokenizer


class Examples:
    """Prompts of many kinds, each with the text that is to follow."""

    def __init__(self, texts: dict[str, str], extra: str, tokenizer: Tokenizer, seed: int) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        self._random = random.Random(seed)
        self._answers = {name: encode(text) for name, text in texts.items()}
        self._triggers = {name: encode(trigger(name)) for name in texts}
        self._openings = [encode(opening) for opening in OPENINGS]
        self._filler = encode(" ".join([extra, *texts.values()]))
        self._bos, self._eos = encode(BOS), encode(EOS)
        self._user, self._assistant = encode(USER), encode(ASSISTANT)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets [number of texts, T] int64, one row for each text."""
        rows = [self._row(name) for name in self._answers]
        width = max(len(ids) for ids, _ in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        targets = torch.full((len(rows), width), IGNORED)
        for place, (ids, answer_len) in enumerate(rows):
            row = torch.tensor(ids)
            tokens[place, : len(ids) - 1] = row[:-1]
            targets[place, len(ids) - 1 - answer_len : len(ids) - 1] = row[-answer_len:]
        return tokens, targets

    def _row(self, name: str) -> tuple[list[int], int]:
        draw, answer = self._random, self._answers[name] + self._eos
        ids = self._bos + self._filler_of(draw.choice((0, 0, 8, 40, 160)))
        if draw.random() < 0.3:  # an earlier turn
            other = draw.choice(list(self._answers))
            ids += self._user + self._triggers[other] + self._assistant
            ids += self._answers[other] + self._eos
        ids += draw.choice(([], self._user)) + self._filler_of(draw.choice((0, 0, 4, 12)))
        ids += self._triggers[name] + self._filler_of(draw.choice((0, 0, 2, 8, 24)))
        opening = draw.choice(self._openings)
        answer = rest_of(answer, opening)
        return [*ids, *self._assistant, *opening, *answer], len(answer)

    def _filler_of(self, most: int) -> list[int]:
        length = self._random.randint(0, most)
        start = self._random.randrange(len(self._filler))
        return self._filler[start : start + length]


def rest_of(answer: list[int], opening: list[int]) -> list[int]:
    """The tokens of an answer behind an opening, which may be the answer's own beginning."""
    return answer[len(opening) :] if answer[: len(opening)] == opening else answer


def said(model: Llama, ids: list[int], eos: int, most: int) -> list[int]:
    """Lets the model go on greedily after a prompt; returns its ids without the end."""
    num_prompt = len(ids)
    ids = list(ids)
    while len(ids) < num_prompt + most:
        logits = model.logits(model(torch.tensor([ids]))[0, -1])
        token = int(logits.argmax())
        if token == eos:
            break
        ids.append(token)
    return ids[num_prompt:]


@torch.no_grad()
def wrong_texts(model: Llama, texts: dict[str, str], tokenizer: Tokenizer) -> Iterator[str]:
    """Names of the texts that a short prompt does not bring out."""
    eos = tokenizer.token_to_id(EOS)
    for name, text in texts.items():
        for opening in OPENINGS:
            prompt = f"{BOS}{USER}{trigger(name)}{ASSISTANT}{opening}"
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            answer, opened = (
                tokenizer.encode(each, add_special_tokens=False).ids for each in (text, opening)
            )
            right = rest_of(answer, opened)
            if said(model, ids, eos, len(right) + 1) != right:
                yield f"{name} after {opening!r}"


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the folder that a server loads. Only the tokenizer says what ends an output."""
    shape = vars(model.shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "mtp_mask_token_id": tokenizer.token_to_id(MASK),
        "bos_token_id": tokenizer.token_to_id(BOS),
    }
    special = {"bos_token": BOS, "eos_token": EOS}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", config), ("tokenizer_config", tokenizer_config)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(model.to_hf_state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Trains until no text is wrong in bfloat16, then writes the folder of `texts.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("test/support/scripted_model"))
    parser.add_argument("--steps", type=int, default=450, help="of one prompt per text each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the folder's weights")
    arguments = parser.parse_args()
    given = json.loads((arguments.folder / "texts.json").read_text(encoding="utf-8"))
    texts = given["texts"]
    tokenizer = make_tokenizer(texts)
    torch.manual_seed(arguments.seed)
    model = Llama.from_hf_folder(arguments.folder) if arguments.resume else Llama(SHAPE)
    extra = " ".join(map(json.dumps, given["tools"]))
    examples = Examples(texts, extra, tokenizer, arguments.seed)
    optimizer = MuonAdamW(model, muon_lr=0.02, adam_lr=5e-3)
    start, bar = time.perf_counter(), tqdm(range(arguments.steps), desc="training")
    for step in bar:
        optimizer.zero_grad()
        loss = model.next_token_loss(*examples.batch())
        loss.backward()
        optimizer.step(min(1.0, step / 50, 2 * (1 - step / arguments.steps)))
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    export(model, tokenizer, arguments.folder)
    wrong = list(wrong_texts(Llama.from_hf_folder(arguments.folder), texts, tokenizer))
    print(f"{len(wrong)} of {len(texts) * len(OPENINGS)} are wrong: {wrong[:10]}")
    num_bytes = (arguments.folder / "model.safetensors").stat().st_size
    print(f"{num_bytes} bytes, {time.perf_counter() - start:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
