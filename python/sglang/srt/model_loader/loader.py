"""Builds a model and fills it, from safetensors or with random weights."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from sglang.srt.layers.linear import FusedLinear
from sglang.srt.model_config import ModelConfig, ModelPathError
from sglang.srt.model_loader.weight_copies import WeightCopies, have_equal_values
from sglang.srt.models.model import Model
from sglang.srt.registry import HEADS, MODELS

logger = logging.getLogger(__name__)

DUMMY_STD = 0.02
DUMMY_SEED = 0
READ_BYTES = 1 << 24
MAX_NAMED = 3  # weights in a line of the log
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def load_model(
    config: ModelConfig, load_format: str, max_positions: int, dtype: torch.dtype, device: str
) -> Model:
    """Builds the architecture that config.json names.

    Args:
        load_format: `auto` or `safetensors` read the directory; `dummy` draws weights.
        max_positions: length of the RoPE table.

    Raises:
        ModelPathError: if the architecture is unknown or lacks what config.json asks for, or if
            weights are missing, broken or misshapen.
    """
    registry = HEADS if config.architecture in HEADS.names else MODELS
    if config.architecture not in registry.names:
        raise config.refusal(
            f"architecture {config.architecture!r} is not supported; use a checkpoint of one that"
            f" is known: {', '.join(MODELS.names)}"
        )
    architecture = registry.load(config.architecture)
    with torch.device("meta"):
        model: Model = architecture(config, max_positions)
    if load_format != "dummy":
        _untie_if_stored_twice(model, config, dtype)
    model = _with_memory(model.to(dtype), config, device).eval().requires_grad_(False)
    model.complete()
    if load_format == "dummy":
        _fill_dummy(model)
    else:
        _fill(model, config)
    return model.to(device)


def _untie_if_stored_twice(model: Model, config: ModelConfig, dtype: torch.dtype) -> None:
    """Unties weights that config.json ties and that differ in the files, as transformers does."""
    names = model.checkpoint_names
    if not names.tied:
        return
    wanted = {*names.tied, *names.tied.values()}
    tensors = ((names.own_name(name), tensor) for name, tensor in read_directory(config.path))
    stored = {name: tensor for name, tensor in tensors if name in wanted}
    if stored.keys() != wanted:
        return
    for name, other in names.tied.items():
        if not have_equal_values(stored[name], stored[other], dtype):
            logger.warning(
                "%s holds %s and %s with different values, so both are served, although"
                " tie_word_embeddings in config.json is true.",
                config.path,
                name,
                other,
            )
            model.untie()


def _with_memory(model: Model, config: ModelConfig, device: str) -> Model:
    """Each weight gets memory once, in its own type: torch keeps what it ever took from a device.

    Raises:
        ModelPathError: if the host has too little; for a device it is torch's own error.
    """
    try:
        return model.to_empty(device=device)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or torch.device(device).type != "cpu":
            raise
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        raise config.refusal(
            f"weights of these sizes take {num_bytes >> 30} GiB, which this host does not have; use"
            " a smaller model"
        ) from error


def _fill_dummy(model: nn.Module) -> None:
    """Normal weights as at initialization, from a fixed seed; norms stay at one."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator(parameter.device).manual_seed(DUMMY_SEED + index)
        parameter.data.normal_(0.0, DUMMY_STD, generator=generator)


def _fill(model: Model, config: ModelConfig) -> None:
    """Copies every tensor of the checkpoint to its place."""
    places = WeightPlaces(model, config)
    copies = WeightCopies(next(model.parameters()).device)
    seen: set[str] = set()
    unread: list[str] = []
    try:
        with tqdm(total=places.num_weights, desc="Weights", unit="tensor", disable=None) as bar:
            for name, tensor in read_directory(config.path):
                place = places.place_of(name, tensor.shape)
                if place is None:
                    unread.append(name)
                    continue
                places.check_values(name, tensor)
                own_name = places.own_name(name)
                if own_name in seen:
                    raise WeightMismatch(f"has weight {name!r} twice", "which files belong to it?")
                copies.copy(place, tensor)
                seen.add(own_name)
                bar.update()
        places.check_complete(seen)
    except WeightMismatch as error:
        raise ModelPathError(f"{config.path} {error.problem}; {error.question}") from None
    finally:
        copies.finish()
    if unread:
        few = ", ".join(unread[:MAX_NAMED])
        logger.info("%d weights of %s are not read, such as %s.", len(unread), config.path, few)


class WeightMismatch(ValueError):
    """Weights and a model that do not fit each other.

    Attributes:
        problem: what is wrong, to be put after the name of the source.
        question: what the user may have overlooked.
    """

    def __init__(self, problem: str, question: str) -> None:
        super().__init__(f"{problem}; {question}")
        self.problem, self.question = problem, question


class WeightPlaces:
    """Where in a model each weight of a checkpoint belongs: a parameter, or rows of a fused one.

    The places are views: they stay valid as long as the model keeps its parameters' storages.

    Attributes:
        shared: weights without memory of their own, each with the one whose memory it has.
    """

    def __init__(self, model: Model, config: ModelConfig) -> None:
        self._architecture = config.architecture
        self._names = model.checkpoint_names
        self._problem_of = model.problem_of
        self._by_name = _targets(model)
        for name in self._names.computed:
            self._by_name.pop(name)
        self.shared = {
            name: other
            for name, other in self._names.tied.items()
            if model.get_parameter(name) is model.get_parameter(other)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        """The place of a weight that is known to have one; no autograd."""
        return self._by_name[self.own_name(name)]

    def own_name(self, name: str) -> str:
        """The model's name of a weight, which checkpoints may call otherwise."""
        return self._names.own_name(name)

    @property
    def names(self) -> list[str]:
        """The model's names of all weights; of those that share memory one."""
        return sorted(self._by_name.keys() - self.shared.keys())

    def find(self, name: str) -> torch.Tensor | None:
        """The place of a weight by a checkpoint's name, if there is one; no autograd."""
        return self._by_name.get(self.own_name(name))

    @property
    def num_weights(self) -> int:
        """Weights of a complete checkpoint."""
        return len(self.names)

    def place_of(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """What a weight of this shape fills; None for one that is computed here.

        Raises:
            WeightMismatch: if the model has no such weight, or one of another shape.
        """
        place = self._by_name.get(self.own_name(name))
        if place is None:
            if self._may_be_ignored(name):
                return None
            raise WeightMismatch(
                f"has a weight {name!r} that {self._architecture} does not know",
                "is `architectures` in config.json right, or of a draft head"
                " --speculative-algorithm?",
            )
        if list(place.shape) != list(shape):
            raise WeightMismatch(
                f"has a weight {name!r} with shape {list(shape)}, but config.json asks for"
                f" {list(place.shape)}",
                "do they belong together? Of a draft head, is --speculative-algorithm right?",
            )
        return place

    def check_values(self, name: str, tensor: torch.Tensor) -> None:
        """
        Raises:
            WeightMismatch: if the values are of a type that the weight cannot hold, or none that
                the model can use.
        """
        place, problem = self[name], None
        if not place.is_floating_point() and tensor.dtype not in INTEGERS:
            problem = f"of type {tensor.dtype}, but it holds integers"
        problem = problem or self._problem_of(self.own_name(name), tensor)
        if problem is not None:
            raise WeightMismatch(f"has a weight {name!r} {problem}", "is the file intact?")

    def values_of_missing(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values, on the host, of weights that a checkpoint with the values `given` leaves out."""
        missing = self._names.zero_if_missing - given.keys()
        zeros = {name: torch.zeros_like(self[name], device="cpu") for name in missing}
        filled = self._names.filled_by_tied(given.keys())
        return zeros | {
            name: given[other] for name, other in filled.items() if name not in self.shared
        }

    def check_complete(self, names: Set[str]) -> None:
        """Raises WeightMismatch if the model needs weights beside `names`."""
        may_miss = self._names.zero_if_missing | self._names.filled_by_tied(names).keys()
        missing = set(self.names) - names - may_miss
        if missing:
            raise WeightMismatch(
                f"lacks {len(missing)} weights, such as {min(missing)!r}",
                "is the download complete?",
            )

    def _may_be_ignored(self, name: str) -> bool:
        """Tensors that some checkpoints carry and that are not read here."""
        return name in self._names.ignored or name.endswith("rotary_emb.inv_freq")


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's name of each weight to the tensor (or rows of a fused one) that it fills."""
    targets: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, FusedLinear):
                targets[prefix + name] = parameter.data
                continue
            parent = module_name.rpartition(".")[0]
            for shard in module.shards:
                targets[f"{parent}.{shard}.{name}"] = module.shard_of(parameter.data, shard)
    return targets | _stored_buffers(model)


def _stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not isinstance(value, nn.Parameter)
    }


def read_directory(path: Path, in_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, one file after the other; see `read_file`."""
    for file in _weight_files(path):
        yield from read_file(file, in_memory)


def read_file(file: Path, in_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a safetensors file, by name; they may be views of the file.

    Args:
        in_memory: reads the file as a whole before anything is taken from it. Otherwise the file is
            mapped, and the process ends if somebody makes it shorter meanwhile.

    Raises:
        ModelPathError: if the file is missing or broken or no regular one, or if it changes while
            it is read into memory.
    """
    try:
        _check_regular(file)
        with (
            _copy_in_memory(file) if in_memory else nullcontext(file) as place,
            safe_open(place, framework="pt") as weights,
        ):
            for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, weights.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelPathError(f"{file} is not a readable safetensors file: {error}.") from None


def _check_regular(file: Path) -> None:
    """Raises OSError for what is there and would block or never end, such as a pipe."""
    if os.path.lexists(file) and not os.path.isfile(file):
        raise OSError("it is no regular file")


@contextmanager
def _copy_in_memory(file: Path) -> Iterator[Path]:
    """A path to a copy in memory, which nobody else can change.

    Raises:
        OSError: if the file cannot be read, or changed meanwhile.
    """
    with (
        open(os.memfd_create("weights"), "w+b", buffering=0) as copy,
        open(file, "rb", buffering=0, opener=_open_at_once) as source,
    ):
        before = os.fstat(source.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise OSError("it is no regular file")
        num_left = before.st_size
        while num_left and (data := source.read(min(num_left, READ_BYTES))):
            num_left -= len(data)
            while data:
                data = data[copy.write(data) :]
        after = os.fstat(source.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError("it changed while it was read")
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting for the other end of what has become a pipe since it was checked."""
    return os.open(path, flags | os.O_NONBLOCK)


def _weight_files(path: Path) -> list[Path]:
    """The files of the index, if there is one, else every *.safetensors."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            _check_regular(index)
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            # Only names inside the directory: an index must not reach other files.
            files = sorted({path / Path(name).name for name in names})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ModelPathError(f"{index} is not a safetensors index.") from None
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = [file.name for file in path.iterdir() if file.suffix in PICKLED]
        remedy = "convert the weights"
        if pickled:
            remedy = (
                f"{min(pickled)} is not read, since such files can hold code: convert the folder"
                " with scripts/convert_checkpoint.py"
            )
        raise ModelPathError(
            f"{path} has no *.safetensors file; {remedy}, or use --load-format dummy."
        )
    return files
