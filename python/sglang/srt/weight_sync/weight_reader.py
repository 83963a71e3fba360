"""Reads new weights of running models and checks them, beside the steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from sglang.srt.model_config import ModelPathError, resolve_model_path
from sglang.srt.model_loader.arriving_weights import ArrivingWeights
from sglang.srt.model_loader.loader import WeightPlaces
from sglang.srt.model_loader.weight_checks import WeightMismatch, check_finite
from sglang.srt.model_loader.weight_copies import have_equal_values
from sglang.srt.model_loader.weight_files import read_directory, read_file

TARGET, DRAFT = "", "draft."  # beginnings of the names of a model's weights

StagedWeights = dict[str, torch.Tensor]
"""Checkpoint name, behind its model's beginning, to a CPU tensor with all values of a weight,
whichever part of them a rank has, in the dtype of its place, checked and owned."""


class WeightUpdateError(ValueError):
    """Weights that cannot be taken; one line that says why and what to do."""


def split_name(name: str, beginnings: Iterable[str], otherwise: str = TARGET) -> tuple[str, str]:
    """Returns the beginning of a name, `otherwise` if it has none, and the checkpoint's name."""
    for beginning in beginnings:
        if beginning and name.startswith(beginning):
            return beginning, name.removeprefix(beginning)
    return otherwise, name


def weights_of(staged: StagedWeights, beginning: str) -> StagedWeights:
    """Returns the staged weights of one model, by the checkpoint's names."""
    found: StagedWeights = {}
    for name, tensor in staged.items():
        model, own_name = split_name(name, (DRAFT,))
        if model == beginning:
            found[own_name] = tensor
    return found


class WeightReader:
    """Looks at names, shapes and types of models only, so it may run beside a step.

    Args:
        places: of each model whose weights may come, by the beginning of its names.
        otherwise: the model whose weights have names without a beginning.

    Raises:
        WeightUpdateError: by every method, for sources that do not fit.
    """

    def __init__(self, places: Mapping[str, WeightPlaces], otherwise: str = TARGET) -> None:
        self._places = places
        self._otherwise = otherwise

    def from_directory(self, path: str) -> StagedWeights:
        """A complete checkpoint: a local directory with *.safetensors, or another name that
        --model-path takes.

        One file after the other is read into memory: at its peak this takes the bytes of the
        largest file beside what is staged.
        """
        flag = "model_path" if self._otherwise == TARGET else "model_path of the draft model"
        try:
            directory = resolve_model_path(path, flag)
        except ModelPathError as error:
            raise WeightUpdateError(str(error)) from None
        staged = self._stage(str(directory), read_directory(directory, in_memory=True))
        for beginning, places in self._places.items():
            given = weights_of(staged, beginning)
            if not given and beginning != self._otherwise:
                continue
            try:
                places.check_complete(given.keys())
            except WeightMismatch as error:
                raise WeightUpdateError(
                    f"{directory} {error.problem}; send a part of the weights as a file or as"
                    " tensors."
                ) from None
            missing = places.values_of_missing(given)
            staged |= {beginning + name: tensor for name, tensor in missing.items()}
        return staged

    def from_file(self, path: str) -> StagedWeights:
        """Some of the weights: a safetensors file.

        It is read into memory: at its peak this takes the bytes of the file beside what is staged.
        """
        if not os.path.isfile(path):
            raise WeightUpdateError(f"{path!r} is not a file; give a local safetensors file.")
        return self._stage(path, read_file(Path(path), in_memory=True))

    def from_safetensors(self, data: bytes) -> StagedWeights:
        """Some of the weights: what a safetensors file holds."""
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise WeightUpdateError(
                f"The data cannot be read as safetensors: {first_line(error)}; send"
                " what `safetensors.torch.save` returns."
            ) from None
        return self._stage("The data", _taken_from(tensors))

    def from_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Some of the weights, from any device.

        The tensors are read to their end even if one does not fit, since whoever sends them waits
        until all are taken.
        """
        iterator = iter(tensors)
        try:
            return self._stage("The source", iterator)
        except WeightUpdateError:
            with suppress(WeightUpdateError):  # the first reason is the one to tell
                for _ in iterator:
                    pass
            raise

    def _stage(self, source: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Copies of all tensors that have a place.

        Raises:
            WeightUpdateError: that begins with `source`.
        """
        staged: StagedWeights = {}
        arriving = {each: ArrivingWeights(places) for each, places in self._places.items()}
        try:
            for name, tensor in tensors:
                self._stage_one(source, name, tensor, arriving, staged)
            for each in arriving.values():
                each.check_complete()
        except WeightMismatch as error:
            hint = ", a draft model's with 'draft.' before it" if len(self._places) > 1 else ""
            raise WeightUpdateError(f"{source} {error.problem}; {error.remedy}{hint}.") from None
        except (ModelPathError, OSError) as error:
            raise WeightUpdateError(first_line(error)) from None
        if not staged:
            raise WeightUpdateError(f"{source} has no weight of this model; send one at least.")
        for beginning, places in self._places.items():
            check_shared(source, places, weights_of(staged, beginning))
            for name, other in places.shared.items():
                if {beginning + name, beginning + other} <= staged.keys():
                    staged[beginning + name] = staged[beginning + other]  # equal: one is enough
        return staged

    def _stage_one(
        self,
        source: str,
        name: str,
        tensor: torch.Tensor,
        arriving: Mapping[str, ArrivingWeights],
        staged: StagedWeights,
    ) -> None:
        claiming = (other for other, places in self._places.items() if places.claims(name))
        otherwise = next(claiming, self._otherwise)
        beginning, given_name = split_name(name, self._places, otherwise)
        places = self._places[beginning]
        for piece, values in arriving[beginning].take(given_name, tensor):
            place = places.place_of(piece, values.shape)
            if place is None:
                continue
            own_name = beginning + places.own_name(piece)
            if own_name in staged:
                raise WeightUpdateError(f"{source} has weight {name!r} twice; send it once.")
            places.check_values(piece, values)
            staged[own_name] = torch.empty(places.shape_of(piece), dtype=place.dtype)
            staged[own_name].copy_(values.detach())
            check_finite(name, staged[own_name])


def check_shared(source: str, places: WeightPlaces, weights: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        WeightUpdateError: if weights that have one memory in this model come with two values.
    """
    for name, other in places.shared.items():
        if not {name, other} <= weights.keys():
            continue
        if not have_equal_values(weights[name], weights[other], weights[name].dtype):
            raise WeightUpdateError(
                f"{source} has {name} with other values than {other}, but this model has one"
                " memory for both (tie_word_embeddings, and it was loaded without another"
                f" {name}); send both alike, in one call or session (begin_weight_update), or"
                " start the server with a folder whose files hold both."
            )


def first_line(error: Exception) -> str:
    """Returns an error's message, short enough for one line; torch's errors come with C++
    frames."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".;")


def _taken_from(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor, which ends in `tensors` when it is handed out: no second copy of everything."""
    while tensors:
        yield tensors.popitem()
