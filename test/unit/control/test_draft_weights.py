"""The weights of heads and draft models change while requests run: drafts change, tokens do not."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from draft_heads import DFLASH, EAGLE, EAGLE3, FILE
from drafted_serving import params_of, prompts
from eagle_models import (
    EMBEDDING,
    OUTPUT_HEAD,
    STANDALONE,
    write_block_head,
    write_draft,
    write_eagle3_head,
    write_eagle_head,
    write_models,
    write_target,
)
from eagle_serving import Served, right_tokens, setup_for
from sglang.srt.messages.control import (
    CheckWeightsReq,
    ContinueGenerationReq,
    ControlReply,
    FromBytes,
    FromDirectory,
    FromGroup,
    GetWeightsByNameReq,
    MemoryOccupationReq,
    PauseGenerationReq,
    UpdateWeightsReq,
    WeightSelector,
    WeightSessionReq,
)
from sglang.srt.weight_sync.weight_group import TensorSpec

torch.set_num_threads(1)
KINDS = (EAGLE, EAGLE3, DFLASH, STANDALONE)
# A head and a model of its own in each run.
EACH = pytest.mark.parametrize(
    "kind",
    [
        kind if kind in (EAGLE3, STANDALONE) else pytest.param(kind, marks=pytest.mark.long_matrix)
        for kind in KINDS
    ],
)
NUM_SWAPS = 30  # under load, of each kind
WORSE = 3.0  # noise of a head that guesses badly
# A weight of each kind's checkpoint, by its name there.
A_WEIGHT = {
    EAGLE: "fc.weight",
    EAGLE3: "midlayer.mlp.down_proj.weight",
    DFLASH: "layers.1.mlp.down_proj.weight",
    STANDALONE: "model.layers.0.mlp.down_proj.weight",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that go together, and of each kind one that guesses badly."""
    folder = tmp_path_factory.mktemp("heads")
    found = write_models(folder)
    return found | {
        f"other {EAGLE}": write_eagle_head(folder / "other1", 5, WORSE),
        f"other {EAGLE3}": write_eagle3_head(folder / "other3", found["target"], 5, WORSE),
        f"other {DFLASH}": write_block_head(folder / "other block", found["target"], 5, WORSE),
        f"other {STANDALONE}": write_draft(folder / "other draft", 5, WORSE),
        "other d2t": write_eagle3_head(folder / "other d2t", found["target"], 6, foreign=(0, 9)),
        "other target": write_target(folder / "other target", seed=4),
    }


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("*.safetensors")
    return load_file(file)


class Swapped(Served):
    """A server whose draft model's weights are changed."""

    def __init__(self, paths: dict[str, Path], kind: str, **changes: Any) -> None:
        self.paths, self.kind = paths, kind
        super().__init__(paths, kind, 3, setup_for(3, **changes))

    def ask(self, kind: type, **fields: Any) -> ControlReply:
        message = kind(call_id=random.randrange(10**9), **fields)
        self.inbox.messages.append(message)
        for _ in range(10_000):
            self.step()
            if (reply := self.reply_to(message.call_id)) is not None:
                return reply
            time.sleep(0.001)  # for the thread that reads weights
        raise AssertionError(f"No answer to {kind.__name__}.")

    def update(
        self, folder: Path, selector: WeightSelector, beginning: str = "", **fields: Any
    ) -> ControlReply:
        weights = {beginning + name: tensor for name, tensor in tensors_of(folder).items()}
        source = FromBytes(data=save(weights))
        return self.ask(UpdateWeightsReq, source=source, selector=selector, **fields)

    def load(self, folder: Path, selector: WeightSelector = "draft", **fields: Any) -> ControlReply:
        source = FromDirectory(path=str(folder))
        return self.ask(UpdateWeightsReq, source=source, selector=selector, **fields)

    def value(self, name: str) -> Any:
        return self.ask(GetWeightsByNameReq, name=name, truncate_size=1).fields.get("parameter")

    def draft_weight(self) -> Any:
        return self.value(f"draft.{A_WEIGHT[self.kind]}")

    def start(self) -> list[int]:
        ids = [self.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
        for _ in range(4):
            self.step()
        return ids

    def end(self, ids: list[int]) -> list[list[int]]:
        """The tokens of requests; the ledger is exact and the KV canary was silent."""
        self.run()
        self.check()
        assert all(self.outputs[req_id].num_ends == 1 for req_id in ids)
        return [self.outputs[req_id].token_ids for req_id in ids]

    def confirmed_share(self) -> float:
        """The share of drafts that are right, of all prompts from now on."""
        before = dict(self.seen)
        for index, prompt in enumerate(prompts()):
            self.submit(prompt, **params_of(index))
        self.run()
        more = {name: self.seen[name] - before.get(name, 0) for name in ("confirmed", "fed")}
        return more["confirmed"] / more["fed"]


def first_rows(folder: Path, name: str) -> Any:
    return tensors_of(folder)[name][:1].tolist()


@EACH
def test_tokens_are_the_same_before_during_and_after_swaps_under_load(
    paths: dict[str, Path], kind: str
) -> None:
    """Greedy and seeded requests; swaps at any step, while running, paused or by a session."""
    harness, right = Swapped(paths, kind, page_size=4, enable_overlap=True), None
    right, chooser = right_tokens(paths["target"]), random.Random(kind)
    ids: list[int] = []
    epoch = harness.ledger.weight_epoch
    for number in range(NUM_SWAPS):
        if len(ids) < len(right) * 2:
            index = len(ids) % len(right)
            ids.append(harness.submit(prompts()[index], **params_of(index)))
        for _ in range(chooser.randrange(3)):
            harness.step()
        folder = paths[kind if number % 2 else f"other {kind}"]
        paused = chooser.choice([None, None, "retract", "in_place"])
        if paused is not None:
            assert harness.ask(PauseGenerationReq, mode=paused).success
        reply = harness.update(folder, "draft", weight_version=f"head-{number}")
        assert reply.success, reply
        assert harness.draft_weight() == first_rows(folder, A_WEIGHT[kind])
        if paused is not None:
            harness.send(ContinueGenerationReq)
    while len(ids) < len(right) * 2:
        index = len(ids) % len(right)
        ids.append(harness.submit(prompts()[index], **params_of(index)))
    assert harness.end(ids) == right * 2
    assert harness.ledger.weight_epoch == epoch + NUM_SWAPS
    labels = [harness.outputs[req_id].weight_spans for req_id in ids]
    assert {spans["target"][0][0] for spans in labels} == {"default"}
    assert all(len(spans["target"]) == 1 for spans in labels)
    assert any(len(spans["draft"]) > 1 for spans in labels), "no swap was within a request"


def test_drafts_are_those_of_the_weights_that_serve(paths: dict[str, Path]) -> None:
    """Bad ones come of bad weights, and the same good ones again when the good ones are back."""
    harness = Swapped(paths, EAGLE3)
    good = harness.confirmed_share()
    assert harness.load(paths[f"other {EAGLE3}"]).success
    bad = harness.confirmed_share()
    assert harness.load(paths[EAGLE3]).success
    assert bad < 0.7 * good
    assert harness.confirmed_share() == good


def test_no_cached_prefix_outlives_the_head_that_computed_it(paths: dict[str, Path]) -> None:
    """Neither what was cached nor what a request that saw the swap would leave."""
    harness = Swapped(paths, EAGLE3)
    prompt = prompts()[4]
    harness.generate([prompt], **params_of(0))
    [live] = [harness.submit(prompt, **params_of(0))]
    for _ in range(3):
        harness.step()
    assert harness.outputs[live].cached_tokens > 0
    reply = harness.load(paths[f"other {EAGLE3}"], flush_cache=False)
    assert reply.fields["num_with_old_draft_kv"] == 1
    harness.run()
    again = [harness.submit(prompt, **params_of(0)) for _ in range(2)]
    harness.run()
    assert harness.outputs[again[0]].cached_tokens == 0
    harness.generate([prompt], **params_of(0))
    harness.check()


def test_an_update_of_the_head_waits_for_no_request_and_one_of_the_target_does(
    paths: dict[str, Path],
) -> None:
    harness = Swapped(paths, EAGLE3)
    ids = harness.start()
    harness.load(paths[f"other {EAGLE3}"])
    assert any(harness.outputs[req_id].finish_reason is None for req_id in ids)
    assert harness.load(paths["target"], "target").success
    assert all(
        harness.outputs[req_id].finish_reason is not None
        for req_id in ids
        if harness.outputs[req_id].token_ids
    )
    assert harness.end(ids) == right_tokens(paths["target"])


class Group:
    """A joined group that gives what it is asked for, as `WeightGroup` does."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def receive(self, specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            tensor = self._tensors[spec.name]
            assert (spec.dtype, spec.shape) == (str(tensor.dtype), tuple(tensor.shape))
            yield spec.name, tensor


@pytest.mark.parametrize(("selector", "beginning"), [("draft", ""), ("all", "draft.")])
def test_a_group_brings_the_weights_of_a_head_and_its_table_of_tokens(
    paths: dict[str, Path], selector: WeightSelector, beginning: str
) -> None:
    new = {beginning + name: tensor for name, tensor in tensors_of(paths["other d2t"]).items()}
    del new[f"{beginning}t2d"]
    harness = Swapped(paths, EAGLE3)
    ids = harness.start()
    harness.scheduler.control._weights._groups["g"] = Group(new)  # type: ignore[assignment]
    source = FromGroup(
        group_name="g",
        names=[*new],
        dtypes=[str(tensor.dtype) for tensor in new.values()],
        shapes=[[*tensor.shape] for tensor in new.values()],
    )
    reply = harness.ask(UpdateWeightsReq, source=source, selector=selector)
    assert reply.fields["num_draft_tensors"] == len(new)
    assert harness.value("draft.d2t") == new[f"{beginning}d2t"][:1].tolist()
    assert harness.end(ids) == right_tokens(paths["target"])


# ---------------------------------------------------------------- which weights change


@EACH
def test_all_takes_what_it_is_given_and_says_if_the_draft_model_stays(
    paths: dict[str, Path], kind: str
) -> None:
    harness = Swapped(paths, kind)
    old, new = paths[kind], paths[f"other {kind}"]
    reply = harness.load(paths["target"], "all", weight_version="t1")
    assert "The draft model keeps its own" in reply.message
    assert (reply.fields["num_draft_tensors"], reply.fields["weight_version"]) == (0, "t1")
    assert reply.fields["draft_weight_version"] == "default"
    assert harness.draft_weight() == first_rows(old, A_WEIGHT[kind])
    reply = harness.update(new, "all", "draft.", weight_version="d1")
    assert reply.message == "Weights updated."
    assert reply.fields["num_draft_tensors"] == reply.fields["num_tensors"] > 5
    assert (reply.fields["weight_version"], reply.fields["draft_weight_version"]) == ("t1", "d1")
    assert harness.draft_weight() == first_rows(new, A_WEIGHT[kind])
    both = FromDirectory(path=str(paths["other target"]), draft_path=str(old))
    reply = harness.ask(UpdateWeightsReq, source=both, weight_version="b")
    assert (reply.message, reply.fields["draft_weight_version"]) == ("Weights updated.", "b")
    assert harness.draft_weight() == first_rows(old, A_WEIGHT[kind])
    assert harness.value(OUTPUT_HEAD) == first_rows(paths["other target"], OUTPUT_HEAD)
    state = harness.scheduler.control.internal_state()
    assert (state["weight_version"], state["draft_weight_version"]) == ("b", "b")
    got = harness.generate(prompts(), **params_of(0))
    plain = Served({"target": paths["other target"]}, None, 0, setup_for(0))
    assert got == plain.generate(prompts(), **params_of(0))


@pytest.fixture(scope="module")
def sharing(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models with a head that has the target's embedding, and one with the other target's."""
    folder = tmp_path_factory.mktemp("sharing")
    found = dict(paths)
    for key, target in ((EAGLE, "target"), (f"other {EAGLE}", "other target")):
        found[key] = folder / key
        shutil.copytree(paths[key], found[key])
        embedding = tensors_of(paths[target])[EMBEDDING]
        save_file({**tensors_of(paths[key]), EMBEDDING: embedding}, found[key] / FILE)
    return found


@pytest.mark.parametrize("selector", ["draft", "all"])
def test_an_embedding_that_the_head_borrows_cannot_get_other_values(
    sharing: dict[str, Path], selector: WeightSelector
) -> None:
    harness = Swapped(sharing, EAGLE)
    beginning = "" if selector == "draft" else "draft."
    reply = harness.update(sharing[f"other {EAGLE}"], selector, beginning)
    assert not reply.success
    assert "embed_tokens.weight of the draft model" in reply.message
    assert "leave it out" in reply.message
    assert harness.draft_weight() == first_rows(sharing[EAGLE], A_WEIGHT[EAGLE])
    assert harness.update(sharing[EAGLE], selector, beginning).success


def test_what_a_head_borrows_may_come_with_the_new_weights_of_its_target(
    sharing: dict[str, Path],
) -> None:
    harness = Swapped(sharing, EAGLE)
    target, head = str(sharing["other target"]), str(sharing[f"other {EAGLE}"])
    assert harness.ask(WeightSessionReq, action="begin").success
    assert harness.load(Path(head)).success
    assert not harness.ask(WeightSessionReq, action="commit").success
    assert harness.load(Path(target), "target").success
    assert harness.ask(WeightSessionReq, action="commit").success
    old = FromDirectory(path=str(sharing["target"]), draft_path=head)
    assert not harness.ask(UpdateWeightsReq, source=old).success
    assert harness.value(EMBEDDING) == first_rows(Path(target), EMBEDDING)


def test_wrong_weights_of_one_model_leave_both_as_they_were(paths: dict[str, Path]) -> None:
    harness = Swapped(paths, EAGLE3)
    assert harness.ask(CheckWeightsReq, action="snapshot", selector="all").success
    nan = torch.full_like(tensors_of(paths[EAGLE3])["fc.weight"], float("nan"))
    target, head = tensors_of(paths["other target"]), tensors_of(paths[EAGLE3])
    del target[OUTPUT_HEAD], head[OUTPUT_HEAD]  # both models have one, of two shapes
    d2t = tensors_of(paths[EAGLE3])["d2t"] + 100
    wrong: list[tuple[WeightSelector, dict[str, torch.Tensor], str]] = [
        ("draft", {"fc.weight": nan}, "NaN"),
        ("draft", {"d2t": d2t}, "draft token 0"),
        ("draft", target, "has a weight 'model."),
        ("target", head, "LlamaForCausalLM does not know"),
        ("all", {**target, "fc.weight": torch.zeros_like(nan)}, "with 'draft.' before it"),
        ("all", {**target, "draft.fc.weight": torch.zeros(1, 2)}, "with shape"),
    ]
    for selector, weights, problem in wrong:
        source = FromBytes(data=save(weights))
        reply = harness.ask(UpdateWeightsReq, source=source, selector=selector)
        assert not reply.success
        assert problem in reply.message
    assert not harness.load(paths["target"], "draft").success
    assert not harness.load(paths[EAGLE3], "target").success
    assert harness.ask(CheckWeightsReq, action="compare").success
    assert harness.end(harness.start()) == right_tokens(paths["target"])


def test_a_session_changes_both_models_at_its_commit(paths: dict[str, Path]) -> None:
    harness = Swapped(paths, EAGLE3)
    new = paths[f"other {EAGLE3}"]
    for action, is_new in (("rollback", False), ("commit", True)):
        assert harness.ask(WeightSessionReq, action="begin").success
        assert harness.update(new, "draft", weight_version="d").fields["staged"]
        assert harness.load(paths["other target"], "target", weight_version="t").fields["staged"]
        assert harness.draft_weight() == first_rows(paths[EAGLE3], A_WEIGHT[EAGLE3])
        reply = harness.ask(WeightSessionReq, action=action)
        assert reply.success
        labels = reply.fields["weight_version"], reply.fields["draft_weight_version"]
        assert labels == (("t", "d") if is_new else ("default", "default"))
    assert harness.draft_weight() == first_rows(new, A_WEIGHT[EAGLE3])
    assert harness.value(OUTPUT_HEAD) == first_rows(paths["other target"], OUTPUT_HEAD)


def test_weights_of_the_draft_model_are_noted_compared_and_reset(paths: dict[str, Path]) -> None:
    harness = Swapped(paths, EAGLE3)
    assert harness.value(A_WEIGHT[EAGLE3]) is None, "a name without draft. is the target's"
    assert harness.ask(CheckWeightsReq, action="snapshot", selector="all").success
    assert harness.ask(CheckWeightsReq, action="reset").success
    assert harness.draft_weight() == first_rows(paths[EAGLE3], A_WEIGHT[EAGLE3])
    assert harness.load(paths["target"], "target").success
    assert harness.ask(CheckWeightsReq, action="compare").success
    assert harness.ask(CheckWeightsReq, action="reset", selector="draft").success
    reply = harness.ask(CheckWeightsReq, action="compare")
    assert "draft." in reply.message
    assert harness.ask(CheckWeightsReq, action="compare", selector="target").success
    assert not harness.ask(CheckWeightsReq, action="compare", selector="draft").success
    assert harness.end(harness.start()) == right_tokens(paths["target"])
    assert harness.load(paths[EAGLE3]).success
    assert harness.ask(CheckWeightsReq, action="compare").success
    assert harness.ask(CheckWeightsReq, action="snapshot").success
    reply = harness.ask(CheckWeightsReq, action="compare", selector="draft")
    assert "no snapshot of these weights" in reply.message
    assert harness.ask(CheckWeightsReq, action="compare").success
    reply = harness.ask(CheckWeightsReq, action="compare", selector="all")
    assert "with action snapshot and selector all first" in reply.message


def test_weights_of_a_draft_model_are_refused_where_there_is_none(paths: dict[str, Path]) -> None:
    plain = Served({"target": paths["target"]}, None, 0, setup_for(0))
    data = save(tensors_of(paths[EAGLE3]))
    message = UpdateWeightsReq(call_id=1, source=FromBytes(data=data), selector="draft")
    reply = plain.call(message)
    assert not reply.success
    assert "--speculative-draft-model-path" in reply.message
    reply = plain.call(CheckWeightsReq(call_id=2, action="snapshot", selector="draft"))
    assert "--speculative-draft-model-path" in reply.message
    assert "draft_weight_version" not in plain.scheduler.control.internal_state()


def test_a_head_that_is_half_written_stops_generation_until_it_is_whole(
    paths: dict[str, Path],
) -> None:
    harness = Swapped(paths, EAGLE3)
    store = harness.group.runners[1].weights
    with mock.patch.object(store, "apply", side_effect=RuntimeError("half-way")):
        reply = harness.load(paths[f"other {EAGLE3}"])
    assert reply.status_code == 500
    assert "half-way" in harness.scheduler.control.state.unusable
    assert not harness.load(paths["target"], "target").success
    assert not harness.update(paths[EAGLE3], "draft").success, "which might be a part"
    assert harness.load(paths[EAGLE3]).success
    assert harness.end(harness.start()) == right_tokens(paths["target"])


def test_released_weights_of_a_head_cannot_change(paths: dict[str, Path]) -> None:
    harness = Swapped(paths, EAGLE3)
    harness.pause("abort")
    harness.send(MemoryOccupationReq, action="release", tags=["weights"])
    assert "Memory is released" in harness.load(paths[EAGLE3]).message
    harness.send(MemoryOccupationReq, action="resume", tags=["weights"])
    assert harness.load(paths[f"other {EAGLE3}"]).success
    harness.send(ContinueGenerationReq)
    assert harness.end(harness.start()) == right_tokens(paths["target"])
