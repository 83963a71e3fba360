"""Training of draft heads computes what the runtime does when it drafts, and its folders load."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft_heads import FILE, Oracle
from sglang.srt.head_config import load_head_config
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.models.draft_head import DraftHead as ServedHead
from training.eagle_head import ALGORITHMS, EAGLE3, DraftHead, make_head, read_target
from training.eagle_head import tap_layers as trained_taps
from training.evaluate_eagle import Pair, continue_by_drafts, draft, summarize, teacher_forced
from training.evaluate_mtp import STATIC, check_lossless, continue_prompts
from training.export import model_config, write_json
from training.export_eagle import ARCHITECTURES, load_head, read_taps, write_head_folder
from training.model import Llama, LlamaShape
from training.own_text import continue_windows
from training.tokens import MASK_ID
from training.train_eagle import EagleTrainer, OwnText, draft_vocabulary, make_own_text
from utils import Setup, make_execution

VOCAB = 64
SHAPE = LlamaShape(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    head_dim=16,
    max_position_embeddings=128,
    rope_theta=900.0,
)
TARGET_IDS = torch.arange(1, 41) + torch.arange(1, 41) // 3  # with gaps, so offsets differ
NUM_TOKENS = 24
BOTH = pytest.mark.parametrize("algorithm", ALGORITHMS)


def in_bfloat16(model: torch.nn.Module) -> None:
    """Random weights that an exported folder holds exactly."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.6 * weight.shape[-1] ** -0.5)
            weight.copy_(weight.bfloat16().float())


@dataclass(frozen=True)
class Exported:
    """A pair, and the folders that were written of it."""

    pair: Pair
    base: Path
    folder: Path
    algorithm: str


@pytest.fixture(scope="module")
def target() -> Llama:
    torch.manual_seed(0)
    model = Llama(SHAPE).requires_grad_(False)
    in_bfloat16(model)
    return model


def make_pair(target: Llama, algorithm: str) -> Pair:
    torch.manual_seed(1)
    head = make_head(algorithm, target, TARGET_IDS)
    in_bfloat16(head)
    return Pair(target, head, trained_taps(algorithm, SHAPE.num_hidden_layers))


@pytest.fixture(params=ALGORITHMS)
def exported(request: pytest.FixtureRequest, target: Llama, tmp_path: Path) -> Exported:
    from safetensors.torch import save_file

    pair, base = make_pair(target, request.param), tmp_path / "base"
    base.mkdir()
    write_json(base / "config.json", model_config(target))
    save_file(target.to_hf_state_dict(), base / FILE, metadata={"format": "pt"})
    write_head_folder(tmp_path / "head", request.param, pair.head, pair.taps)
    return Exported(pair, base, tmp_path / "head", request.param)


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count, NUM_TOKENS), generator=generator)


# --- forward passes ------------------------------------------------------------------------------


@torch.no_grad()
def test_a_head_computes_what_the_oracle_does_of_its_folder(exported: Exported) -> None:
    pair, tokens = exported.pair, tokens_of(1)
    embedding = pair.target.embed_tokens.weight
    oracle = Oracle(exported.folder, embedding, embedding)
    oracle.tensors = {
        name: each if each.dtype in (torch.int64, torch.bool) else each.float()
        for name, each in oracle.tensors.items()
    }
    _, features = read_target(pair.target, tokens, pair.taps)
    hidden = oracle.combine(features[0, :-1])
    carried, logits = oracle.run(tokens[0, 1:].tolist(), hidden)
    own = pair.head(pair.target.embed_tokens(tokens[:, 1:]), pair.head.combine(features[:, :-1]))
    torch.testing.assert_close(own[0], carried, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pair.head.logits(own, embedding)[0], logits, rtol=1e-4, atol=1e-5)


@BOTH
@torch.no_grad()
def test_drafting_from_many_places_at_once_is_drafting_from_each(
    target: Llama, algorithm: str
) -> None:
    """Written out: the rows before a place as the target gives them, then rows that each read what
    the row before gave."""
    pair, tokens, num_steps = make_pair(target, algorithm), tokens_of(3), 4
    head = pair.head
    _, features = read_target(target, tokens, pair.taps)
    embedded, hidden = target.embed_tokens(tokens[:, 1:]), head.combine(features[:, :-1])
    starts = torch.tensor([0, 1, 6, 7, 19])
    given = head.unroll(embedded, hidden, starts, num_steps)
    for index, start in enumerate(starts.tolist()):
        rows = hidden[:, : start + 1]
        for step in range(num_steps):
            last = head(embedded[:, : rows.shape[1]], rows)[:, -1]
            torch.testing.assert_close(given[step][:, index], last, rtol=1e-4, atol=1e-5)
            rows = torch.cat((rows, last[:, None]), dim=1)


class Served:
    """The runtime's target and head of the folders, on one request."""

    def __init__(self, exported: Exported) -> None:
        setup = Setup(num_pages=256)
        execution = make_execution(
            exported.base,
            setup,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            max_graph_width=0,
        )
        name = ARCHITECTURES[exported.algorithm]
        config = load_head_config(str(exported.folder), name, execution.model)
        self.taps = () if config.taps is None else config.taps.layers
        capture = HiddenCapture(self.taps, all_rows=True)
        self.group: RunnerGroup = make_runners(
            replace(execution, capture=capture), replace(execution, model=config)
        )
        slots = self.group.memory.table.req_to_token[0]
        slots.copy_(torch.arange(1, len(slots) + 1))

    def batch(self, tokens: list[int], start: int, hidden: torch.Tensor | None) -> ForwardBatch:
        positions = torch.arange(start, start + len(tokens))
        return ForwardBatch(
            input_ids=torch.tensor(tokens),
            positions=positions,
            slots=self.group.memory.table.req_to_token[0, positions].long(),
            rows=torch.tensor([0]),
            q_lens=[len(tokens)],
            kv_lens=torch.tensor([start + len(tokens)]),
            kv_len_upper_bounds=[start + len(tokens)],
            bounds_are_exact=True,
            hidden=hidden,
        )

    def drafts(self, tokens: list[int], num_steps: int) -> list[int]:
        """The chain behind a text."""
        read = self.group.target.forward(self.batch(tokens, 0, None))
        features = read.hidden if read.taps is None else read.taps
        runner = self.group.runners[1]
        head = runner.model
        assert isinstance(head, ServedHead)
        fed, hidden, start, drafts = tokens[1:], features[:-1].clone(), 0, []
        for _ in range(num_steps):
            given = runner.forward(self.batch(fed, start, hidden)).hidden[-1:].clone()
            best = runner.compute_logits(given).argmax(dim=-1)
            drafts.append(int(head.to_target_ids(best)))
            start += len(fed)
            fed, hidden = drafts[-1:], given
        return drafts


def test_the_runtime_drafts_what_evaluation_does(exported: Exported) -> None:
    text = tokens_of(4)
    lens = torch.tensor([9, 2, 20, 14])
    own = draft(exported.pair, text, lens, num_steps=4)
    served = Served(exported)
    assert served.taps == exported.pair.taps
    for row, length in enumerate(lens.tolist()):
        assert served.drafts(text[row, :length].tolist(), 4) == own[row].tolist()


def test_a_folder_reads_back_as_it_was_and_names_its_target(exported: Exported) -> None:
    config: ModelConfig = load_model_config(str(exported.folder))
    assert (config.num_layers, config.rope.theta) == (1, SHAPE.rope_theta)
    assert config.context_len == SHAPE.max_position_embeddings
    head: DraftHead = load_head(exported.folder, SHAPE)
    assert read_taps(exported.folder) == exported.pair.taps
    assert torch.equal(head.target_ids, exported.pair.head.target_ids)
    for name, weight in exported.pair.head.state_dict().items():
        assert torch.equal(head.state_dict()[name], weight)
    tensors = load_file(exported.folder / FILE)
    floats = {each.dtype for name, each in tensors.items() if name not in ("d2t", "t2d")}
    assert floats == {torch.bfloat16}
    if exported.algorithm == EAGLE3:
        ids = torch.arange(len(TARGET_IDS)) + tensors["d2t"]
        assert torch.equal(ids, TARGET_IDS)
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], TARGET_IDS)


# --- text that the target writes -----------------------------------------------------------------


@torch.no_grad()
def test_continued_windows_are_the_targets_greedy_text_behind_their_prompts(target: Llama) -> None:
    windows, lens = tokens_of(3), torch.tensor([5, 17, 1])
    generator = torch.Generator().manual_seed(0)
    text = continue_windows(target, windows, lens, torch.zeros(3), generator)
    logits = target.logits(target(text))
    logits[..., MASK_ID] = float("-inf")
    for row, length in enumerate(lens.tolist()):
        assert torch.equal(text[row, :length], windows[row, :length])
        assert torch.equal(text[row, length:], logits[row, length - 1 : -1].argmax(dim=-1))


@torch.no_grad()
def test_sampled_continuations_follow_the_targets_distribution(target: Llama) -> None:
    count, temperature = 4000, 0.8
    windows = tokens_of(1)[:, :4].expand(count, -1)
    lens, generator = torch.full((count,), 3), torch.Generator().manual_seed(0)
    heat = torch.full((count,), temperature)
    text = continue_windows(target, windows, lens, heat, generator)
    logits = target.logits(target(windows[:1, :3]))[0, -1] / temperature
    logits[MASK_ID] = float("-inf")
    found = torch.bincount(text[:, 3], minlength=VOCAB) / count
    assert float((found - logits.softmax(-1)).abs().max()) < 0.025
    assert found[MASK_ID] == 0


# --- evaluation and training ---------------------------------------------------------------------


@pytest.mark.long_matrix
@BOTH
def test_text_by_drafts_is_the_targets_own(target: Llama, algorithm: str) -> None:
    """Heads of random weights guess badly: nearly every round rejects."""
    pair, prompts = make_pair(target, algorithm), tokens_of(4)
    plain = continue_prompts(target, prompts, 1, STATIC, False, "plain")
    rounds = continue_by_drafts(pair, prompts, 3, "drafts")
    check_lossless(rounds.made, plain, "drafts")
    num_rounds = torch.bincount(rounds.prompts, minlength=4)
    assert torch.equal(num_rounds, rounds.made.num_steps)
    kept = torch.zeros(4, dtype=torch.int64).index_add(0, rounds.prompts, rounds.num_accepted + 1)
    assert ((kept >= 64) & (kept < 64 + 4)).all()
    assert 1.0 <= summarize(rounds, 3)["accept_length_all"] < 2.0


@pytest.mark.long_matrix
@BOTH
def test_training_teaches_a_head_to_draft(target: Llama, algorithm: str) -> None:
    arguments = Namespace(
        algorithm=algorithm, unrolled=3, starts=12, feature_weight=0.5, batch_size=8, context=32,
        own_share=0.5, own_rows=32, own_batch=16, long_context=64, long_rows=1, long_every=20,
        muon_lr=0.02, adam_lr=3e-3, weight_decay=0.01, compile=False, minutes=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (4000,), generator=generator, dtype=torch.int32)
    own = make_own_text(arguments, target, tokens, generator)
    ids, covered = draft_vocabulary(own, 48)
    assert 0.5 < covered < 1.0
    pair = Pair(target, make_head(algorithm, target, ids), trained_taps(algorithm, 6))
    before = [weight.clone() for weight in pair.head.parameters()]
    probe = own.windows.numpy().astype(np.uint16).flatten()
    trainer = EagleTrainer(arguments, pair, tokens, own, probe, generator)
    trainer.warm_up()
    for weight, old in zip(pair.head.parameters(), before, strict=True):
        assert torch.equal(weight, old)

    def accepted() -> float:
        return teacher_forced(pair, probe, 32, 1, torch.device("cpu"))["accepted"][0]

    untrained = accepted()
    for _ in range(60):
        trainer._backward(next(trainer.windows))
        trainer._step(1.0)
    assert accepted() > untrained + 0.15
    assert all(weight.grad is None for weight in target.parameters())


def test_a_draft_vocabulary_is_what_the_target_writes_most_often() -> None:
    counts = torch.tensor([5, 0, 9, 1, 5, 0])
    ids, covered = draft_vocabulary(OwnText(torch.empty(0), counts, 0.0), 3)
    assert ids.tolist() == [0, 2, 4]
    assert covered == pytest.approx(19 / 20)
