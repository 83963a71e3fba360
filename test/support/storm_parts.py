"""Makes what a round of the storm puts around the scheduler: tiny models, a device whose pace is
drawn, and a thread that works when it is told to."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_heads import EAGLE, EAGLE3, Sizes
from eagle_models import (
    EMBEDDING,
    OUTPUT_HEAD,
    OUTPUTS,
    STANDALONE,
    write_eagle3_head,
    write_eagle_head,
)
from jumping_tier import JUMPING, RESTING
from ngram_serving import ngram_config
from policy_steps import mask_parts
from sglang.srt.draft_model_config import load_draft_config
from sglang.srt.head_config import load_head_config
from sglang.srt.head_layouts import LAYER_IDS
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import UpcomingStep
from sglang.srt.model_config import load_model_config
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter_configs import EagleConfig, StandaloneConfig
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, Worker
from storm_control import Weights
from storm_oracle import MASK, VOCAB_SIZE, DenseModel

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "mtp_mask_token_id": MASK,
}
DRAFTED = {**TINY, "num_hidden_layers": 4, "tie_word_embeddings": False}
DRAFT = {**DRAFTED, "num_hidden_layers": 2}
NOISE = 0.06  # of what the layers of a drafted target add, beside its last token's embedding
DRAFT_NOISE = 0.12  # the same of its draft model
BAD_NOISE = 1.0  # of draft models that take another's place
FOREIGN = (3, 9)  # tokens that heads do not draft
HEAD = Sizes(32, 48, 2, 2, 16, VOCAB_SIZE, VOCAB_SIZE - len(FOREIGN))


def write_checkpoint(path: Path, config: dict[str, Any], weights: Weights) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


class Checkpoints:
    """Three checkpoints of one shape; a round begins with the first.

    Args:
        make_weights: of a seed and a config, by the names of a checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        make_weights: Callable[[int, dict[str, Any]], Weights],
    ) -> None:
        self.weights: dict[Path, Weights] = {}
        for seed in range(3):
            path = directory / str(seed)
            self.weights[path] = make_weights(seed, config)
            write_checkpoint(path, config, self.weights[path])
        self.path, weights = next(iter(self.weights.items()))
        self.dense = DenseModel(config, weights)


class TinyModels(Checkpoints):
    """Those of rounds without a head, and in `drafted` those of rounds with one.

    Args:
        num_ranks: that are to hold each together.
    """

    def __init__(self, directory: Path, num_ranks: int = 1) -> None:
        kv_heads = {"num_key_value_heads": num_ranks}
        super().__init__(directory, {**TINY, **kv_heads}, tiny_weights)
        self.drafted = DraftedModels(directory / "drafted", {**DRAFTED, **kv_heads})
        self.num_ranks = num_ranks


TREES = {  # by depth
    1: (TreeShape(topk=3, depth=1, num_drafts=3),),
    2: (TreeShape(topk=2, depth=2, num_drafts=6),),
    3: (TreeShape(topk=4, depth=3, num_drafts=7), TreeShape(topk=2, depth=3, num_drafts=3)),
    5: (TreeShape(topk=2, depth=5, num_drafts=9),),
}


class DraftedModels(Checkpoints):
    """Targets as `eagle_models` has them, whose heads and draft model often foresee them and often
    do not."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        super().__init__(directory, config, drafted_weights)
        layers = {"eagle_config": {LAYER_IDS: [0, 1, 2]}}
        self._heads = {
            EAGLE: write_eagle_head(directory / EAGLE, sizes=HEAD),
            EAGLE3: write_eagle3_head(
                directory / EAGLE3, self.path, sizes=HEAD, foreign=FOREIGN, **layers
            ),
        }
        draft = drafted_weights(0, DRAFT, DRAFT_NOISE)
        self._draft = write_checkpoint(directory / STANDALONE, DRAFT, draft)
        others = {
            EAGLE: write_eagle_head(directory / "other1", 1, BAD_NOISE, HEAD),
            EAGLE3: write_eagle3_head(
                directory / "other3", self.path, 1, BAD_NOISE, HEAD, FOREIGN, **layers
            ),
            STANDALONE: write_checkpoint(
                directory / "other draft", DRAFT, drafted_weights(1, DRAFT, BAD_NOISE)
            ),
        }
        self._heads_of = {
            kind: [(folder / "model.safetensors").read_bytes() for folder in (first, others[kind])]
            for kind, first in {**self._heads, STANDALONE: self._draft}.items()
        }
        self._token_map = directory / "token_map.json"
        self._token_map.write_text(json.dumps([i for i in range(VOCAB_SIZE) if i not in FOREIGN]))

    def heads_for(self, drafter: DrafterConfig) -> list[bytes]:
        """The files of draft models that fit where this drafter's serves; none if it has none."""
        options = drafter.options
        if isinstance(options, EagleConfig):
            return self._heads_of[options.head.architecture]
        return self._heads_of[STANDALONE] if isinstance(options, StandaloneConfig) else []

    def drafter(self, chooser: random.Random) -> DrafterConfig:
        """A head of either kind, or the draft model, that drafts one or more tokens, of
        heads in chains or trees; or earlier text does."""
        if chooser.random() < 0.25:
            num_drafts, breadth = chooser.choice([1, 5]), chooser.choice([1, 3])
            aside = random.Random(str(chooser.getstate()))  # as below
            texts = [[aside.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
            return ngram_config(
                num_drafts,
                breadth,
                99,
                suppressed=(MASK,),
                by_frequency=aside.random() < 0.5,
                min_breadth=aside.randint(1, breadth),
                corpus=aside.choice([None, texts]),
                corpus_budget=aside.choice([None, 2]),
            )
        kind = chooser.choice([*self._heads, STANDALONE])
        num_steps = chooser.choice([1, 2, 3, 3, 5])
        target = load_model_config(str(self.path))
        if kind == STANDALONE:
            draft = load_draft_config(str(self._draft), target, self.path)
            rounds = RoundOptions(num_steps, num_free=0)
            return DrafterConfig("standalone", StandaloneConfig(draft, rounds, (MASK,)))
        token_map = str(self._token_map) if kind == EAGLE and chooser.random() < 0.3 else None
        head = load_head_config(str(self._heads[kind]), kind, target, token_map)
        # Draws nothing more of the chooser: seeds of earlier finds replay the same rounds.
        shapes: list[TreeShape | None] = [None, None, *TREES[num_steps]]
        aside = random.Random(str(chooser.getstate()))
        tree = aside.choice(shapes)
        policy = "fixed" if tree else aside.choice(["fixed", JUMPING, RESTING])
        rounds = RoundOptions(num_steps, policy, tree=tree)
        return DrafterConfig("eagle", EagleConfig(head, rounds, (MASK,)))


def tiny_weights(seed: int, config: dict[str, Any] = TINY) -> Weights:
    """Random weights of a model as `config` says, whose tokens repeat now and then."""
    torch.manual_seed(seed)
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    kv_size, q_size = config["num_key_value_heads"] * head, config["num_attention_heads"] * head
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, size), "model.norm.weight": (size,)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm.weight": (size,),
            f"{name}post_attention_layernorm.weight": (size,),
            f"{name}self_attn.q_proj.weight": (q_size, size),
            f"{name}self_attn.k_proj.weight": (kv_size, size),
            f"{name}self_attn.v_proj.weight": (kv_size, size),
            f"{name}self_attn.o_proj.weight": (size, q_size),
            f"{name}mlp.gate_proj.weight": (inner, size),
            f"{name}mlp.up_proj.weight": (inner, size),
            f"{name}mlp.down_proj.weight": (size, inner),
        }
    return {
        name: torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.3
        for name, shape in shapes.items()
    }


def drafted_weights(seed: int, config: dict[str, Any] = DRAFTED, noise: float = NOISE) -> Weights:
    """A target whose next token depends on its last one for the most part. The first two seeds
    have the same embeddings, so their heads go on guessing well."""
    weights = tiny_weights(seed, config)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        if name.endswith(OUTPUTS):
            tensor *= noise
    generator = torch.Generator().manual_seed(seed // 2)
    embedding = torch.randn(weights[EMBEDDING].shape, generator=generator) * 0.3
    embedding[:, 0] = 1.0
    return weights | {EMBEDDING: embedding, OUTPUT_HEAD: embedding.roll(7, 0).clone()}


class LaterExecutor:
    """Runs what is submitted when it is told to, instead of in a thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, work))
        return future

    def run_one(self) -> None:
        if not self._waiting:
            return
        future, work = self._waiting.pop(0)
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - the future's reader gets it
            future.set_exception(error)


class RandomLengths(FixedLength):
    """A length policy that knows no reason; verified output must not depend on it."""

    def __init__(self, chooser: random.Random) -> None:
        super().__init__(mask_parts())
        self._random = chooser

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(self._random.randint(1, upcoming.longest))


class LateResult(GenerationBatchResult):
    """Is ready, or not yet, by chance, as the result of a device is."""

    __slots__ = ("was_ready",)

    @property
    def is_ready(self) -> bool:
        return self.was_ready


class LateWorker:
    """A worker on whose results one may have to wait."""

    def __init__(self, worker: Worker, chooser: random.Random) -> None:
        self.worker = worker
        self._random = chooser

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self.worker.step_width(params)

    def observe(self, result: HostResult) -> None:
        self.worker.observe(result)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        result = self.worker.forward_batch_generation(batch)
        names = [entry.name for entry in dataclasses.fields(result) if entry.init]
        late = LateResult(**{name: getattr(result, name) for name in names})
        object.__setattr__(late, "was_ready", self._random.random() < 0.5)
        return late
