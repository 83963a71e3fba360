"""Builds a model and fills it, from safetensors or with random weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from sglang.srt.layers.experts import DOWN, GATE_UP, Experts, ExpertStack
from sglang.srt.layers.linear import Embedding, FusedLinear, Linear, part_of
from sglang.srt.layers.scaled_weight import CODES, ScaledWeight
from sglang.srt.model_config import ModelConfig, ModelPathError
from sglang.srt.model_loader.arriving_weights import ArrivingWeights
from sglang.srt.model_loader.held_formats import hold_in_8_bits
from sglang.srt.model_loader.weight_checks import WeightMismatch, check_finite
from sglang.srt.model_loader.weight_copies import WeightCopies, have_equal_values
from sglang.srt.model_loader.weight_files import read_directory, stored_weights
from sglang.srt.models.exchanged_modules import StepNorm
from sglang.srt.models.model import CheckpointNames, Model
from sglang.srt.platform import Platform
from sglang.srt.registry import load
from sglang.srt.shard import Cut, Shard
from sglang.srt.weight_format import SCALE, SCALES, UNREAD_SCALES, WEIGHT

logger = logging.getLogger(__name__)

DUMMY_STD = 0.02
DUMMY_SEED = 0
MAX_NAMED = 3  # weights in a line of the log
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Numbers of 8 bits mean nothing without their scales; see `ArrivingWeights`.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    config: ModelConfig, load_format: str, max_positions: int, dtype: torch.dtype, device: str
) -> Model:
    """Builds the architecture that config.json names.

    Args:
        load_format: `auto` or `safetensors` read the directory; `dummy` draws weights.
        max_positions: length of the RoPE table.

    Raises:
        ModelPathError: if the architecture lacks what config.json asks for, or if weights are
            missing, broken, misshapen, of a type that is not read, NaN or infinite.
    """
    architecture = load(config.model_class)
    with torch.device("meta"):
        model: Model = architecture(config, max_positions)
    if load_format != "dummy":
        _untie_if_stored_twice(model, config, dtype)
        _borrow_equal(model, config, dtype)
    model = model.to(dtype)
    hold_in_8_bits(model, config, dtype, torch.device(device), load_format == "dummy")
    model = _with_memory(model, config, device).eval()
    model.complete()
    if load_format == "dummy":
        _fill_dummy(model, config.shard)
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


def _borrow_equal(model: Model, config: ModelConfig, dtype: torch.dtype) -> None:
    """Lets a model borrow what another one has with the same values."""
    names = model.checkpoint_names
    stored = ((name, tensor) for name, tensor in read_directory(config.path) if names.holds(name))
    tensors = ((names.own_name(name), tensor) for name, tensor in stored)
    own = {name: tensor for name, tensor in tensors if name in names.borrowed}
    if names.lender is None or not own:
        return
    theirs = dict(read_directory(names.lender))
    for name, tensor in own.items():
        found = [theirs[other] for other in names.borrowed[name] if other in theirs]
        if found and have_equal_values(tensor, found[0], dtype):
            model.borrow(name)


def _with_memory(model: Model, config: ModelConfig, device: str) -> Model:
    """Each weight gets memory once, in its own type: torch keeps what it ever took from a device.

    Raises:
        ModelPathError: if the host has too little, which it might notice only when the memory is
            written; for a device it is torch's own error.
    """
    # Tables of positions are computed on the host, which takes as much again.
    num_bytes = 2 * sum(table.nbytes for table in model.buffers())
    if torch.device(device).type == "cpu":
        num_bytes += sum(weight.nbytes for weight in model.parameters())
    available = Platform.probe().available_host_bytes
    if num_bytes > available:
        raise config.refusal(
            f"weights and tables of these sizes take {num_bytes >> 30} GiB, which this host does"
            f" not have ({available >> 30} GiB are free); use a smaller model or --context-length"
        )
    _place(model, device)
    return model


def _place(model: nn.Module, device: str) -> None:
    """Does what `nn.Module.to_empty` does, without the import of torch's compiler that
    `torch.empty_like` of a tensor without memory takes."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in made:
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                made[weight] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[weight])
        for name, table in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(table.shape, dtype=table.dtype, device=device))


def _fill_dummy(model: nn.Module, shard: Shard) -> None:
    """Normal weights as at initialization, from a fixed seed, another one for each rank's parts;
    norms stay at one."""
    cuts = _cuts(model)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
            continue
        if name.endswith(SCALE):
            nn.init.constant_(parameter, DUMMY_STD)
            continue
        seed = DUMMY_SEED + index + (shard.rank << 32 if cuts.get(name) else 0)
        generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dtype == CODES:
            wide = torch.empty_like(parameter, dtype=torch.float32)
            parameter.data.copy_(wide.normal_(generator=generator))
        else:
            parameter.data.normal_(0.0, DUMMY_STD, generator=generator)


def _fill(model: Model, config: ModelConfig) -> None:
    """Copies every tensor of the checkpoint to its place.

    Whether values are finite is looked up when all are there, where they are then, so no copy waits
    for it: 15 GiB take 0.05 s on an H100 (copies 0.7 s), and on a CPU a tenth of the copies' time.
    """
    places = WeightPlaces(model, config)
    device = next(model.parameters()).device
    copies, arriving = WeightCopies(device), ArrivingWeights(places, device)
    seen: dict[str, tuple[str, Path]] = {}  # by the model's name: the checkpoint's, and the file
    unread: list[str] = []
    source = config.path
    try:
        with tqdm(total=places.num_weights, desc="Weights", unit="tensor", disable=None) as bar:
            stored = (
                (piece, values, file)
                for name, tensor, file in stored_weights(config.path)
                for piece, values in arriving.take(name, tensor)
            )
            for name, tensor, source in stored:
                place = places.place_of(name, tensor.shape)
                if place is None:
                    unread.append(name)
                    continue
                places.check_values(name, tensor)
                own_name = places.own_name(name)
                if own_name in seen:
                    raise WeightMismatch(f"has weight {name!r} twice", "which files belong to it?")
                copies.copy(place, places.part_of(name, tensor))
                seen[own_name] = name, source
                bar.update()
        source = config.path
        arriving.check_complete()
        places.check_complete(seen.keys())
        for name, file in seen.values():
            source = file
            check_finite(name, places[name])
    except WeightMismatch as error:
        raise ModelPathError(f"{source} {error.problem}; {error.question}") from None
    finally:
        copies.finish()
    _name_unread(unread, model.checkpoint_names, config.path)


def _name_unread(unread: Sequence[str], names: CheckpointNames, path: Path) -> None:
    """Logs which tensors of a folder are not read; those of another model it says itself."""
    apart = [name for name in unread if name.startswith(names.apart)]
    others = [name for name in unread if name not in apart and names.holds(name)]
    for found, why in (
        (apart, "left to a drafter (--speculative-algorithm NEXTN)"),
        (others, "not read"),
    ):
        if found:
            few = ", ".join(found[:MAX_NAMED])
            are = "is" if len(found) == 1 else "are"
            named = "such as" if len(found) > MAX_NAMED else "that is"
            logger.info("%s of %s %s %s, %s %s.", _counted(found), path, are, why, named, few)


def _counted(names: Collection[str]) -> str:
    return "1 weight" if len(names) == 1 else f"{len(names)} weights"


class WeightPlaces:
    """Finds where in a model each weight of a checkpoint belongs: a parameter, or rows of a fused
    one. Where ranks divide a weight, its place is for this rank's part of it.

    The places are views: they stay valid as long as the model keeps its parameters' storages.

    Attributes:
        form: of the weights that have 8 bits.
        shared: weights without memory of their own, each with the one whose memory it has.
        lent: weights that are those of another model, each with its place and name there.
    """

    def __init__(self, model: Model, config: ModelConfig) -> None:
        self.form = config.weight_format
        self._architecture = config.architecture
        self._names = model.checkpoint_names
        self._problem_of = model.problem_of
        self._by_name = _targets(model)
        self._cuts = _cuts(model)
        self._stacks = _stacks(model)
        for name in self._names.computed:
            self._by_name.pop(name)
        self.shared = {
            name: other
            for name, other in self._names.tied.items()
            if model.get_parameter(name) is model.get_parameter(other)
        }
        self.lent: dict[str, tuple[torch.Tensor, str]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The place of a weight that is known to have one; no autograd."""
        own_name = self.own_name(name)
        return self.lent[own_name][0] if own_name in self.lent else self._by_name[own_name]

    def lend(self, lender: WeightPlaces) -> None:
        """Gives what the model borrows its places in the model that lends it."""
        for name in self._names.borrowed.keys() & self._names.ignored:
            found = (each for each in self._names.borrowed[name] if lender.find(each) is not None)
            theirs = next(found)
            self.lent[name] = lender[theirs], lender.shared.get(theirs, theirs)
            if (cut := lender.cut_of(theirs)) is not None:
                self._cuts[name] = cut

    def own_name(self, name: str) -> str:
        """The model's name of a weight, which checkpoints may call otherwise."""
        module, _, last = self._names.own_name(name).rpartition(".")
        return f"{module}.{SCALE}" if last in SCALES else self._names.own_name(name)

    def claims(self, name: str) -> bool:
        """Tells whether a tensor is for this model among those of another one's files."""
        return name.startswith(self._names.only)

    @property
    def names(self) -> list[str]:
        """The model's names of all weights; of those that share memory one."""
        return sorted(self._by_name.keys() - self.shared.keys())

    def find(self, name: str) -> torch.Tensor | None:
        """The place of a weight by a checkpoint's name, if there is one; no autograd."""
        own_name = self.own_name(name)
        stack = self._stacks.get(own_name)
        return self._by_name.get(own_name) if stack is None else stack.own_part

    def value_of(self, name: str) -> torch.Tensor | None:
        """The values that serve by a checkpoint's name, if there is such a weight: in place, but of
        8 bits a copy in float32."""
        place = self.find(name)
        if place is None or place.dtype != CODES:
            return place
        scales = self[f"{name.removesuffix(WEIGHT)}{SCALE}"]
        return ScaledWeight(place, scales, self.form).values(torch.float32)

    def stacked_in(self, name: str) -> list[str]:
        """Names the weights that a checkpoint may hold as one under this name, in order of its
        rows; empty for the name of a weight."""
        stack = self._stacks.get(self.own_name(name))
        return [] if stack is None else [piece for piece, _ in stack.split(stack.own_part)]

    @property
    def num_weights(self) -> int:
        """Weights of a complete checkpoint."""
        return len(self.names)

    def pieces_of(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Gives the weights of which a checkpoint's tensor is made: those of all experts, if it
        holds them in one, and as a rule itself."""
        stack = self._stacks.get(self.own_name(name))
        if stack is None or list(tensor.shape) != stack.shape:
            return [(name, tensor)]
        return stack.split(tensor.detach())

    def place_of(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Returns the tensor that a weight of this shape fills, or must be equal to if it is lent;
        None for one that is not read.

        Raises:
            WeightMismatch: if the model has no such weight, or one of another shape.
        """
        own_name = self.own_name(name)
        place = self[name] if own_name in self.lent else self._by_name.get(own_name)
        if place is None:
            if self.may_be_ignored(name):
                return None
            if own_name in self._stacks:
                raise _wrong_shape(name, shape, self._stacks[own_name].shape)
            raise WeightMismatch(
                f"has a weight {name!r} that {self._architecture} does not know",
                "is `architectures` in config.json right, or of a draft head"
                " --speculative-algorithm?",
            )
        if self.shape_of(name) != list(shape):
            raise _wrong_shape(name, shape, self.shape_of(name))
        return place

    def cut_of(self, name: str) -> Cut | None:
        """The part of a weight that this rank has; None: all."""
        return self._cuts.get(self.own_name(name))

    def shape_of(self, name: str) -> list[int]:
        """The shape of a weight that is known to have a place, as checkpoints have it."""
        shape, cut = list(self[name].shape), self.cut_of(name)
        if cut is not None:
            shape[cut.dim] = cut.whole
        return shape

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a weight that its place takes; tensor: all of them."""
        cut = self.cut_of(name)
        return tensor if cut is None else part_of(tensor, cut)

    def check_values(self, name: str, tensor: torch.Tensor) -> None:
        """
        Raises:
            WeightMismatch: if the values are of a type that the weight cannot hold, or none that
                the model can use.
        """
        dtype, question = self[name].dtype, "is the file intact?"
        problem: str | None
        if tensor.is_meta or tensor.layout != torch.strided:
            problem = "without plain values"
        elif dtype != tensor.dtype and tensor.dtype not in (
            FLOATS if dtype.is_floating_point else INTEGERS
        ):
            wanted = "integers"
            if dtype.is_floating_point:
                wanted = "floating point values of 16 bits at least, or float8_e4m3fn with a scale"
            problem = f"of type {tensor.dtype}, but it holds {wanted}"
        else:
            problem = self._problem_of(self.own_name(name), tensor)
        if problem is not None:
            raise WeightMismatch(f"has a weight {name!r} {problem}", question)

    def values_of_missing(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values, on the host, of weights that a checkpoint with the values `given` leaves out."""
        missing = self._names.zero_if_missing - given.keys()
        zeros = {name: torch.zeros(self.shape_of(name), dtype=self[name].dtype) for name in missing}
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
                f"lacks {_counted(missing)}, such as {min(missing)!r}",
                "is the download complete?",
            )

    def may_be_ignored(self, name: str) -> bool:
        """Tensors that some checkpoints carry and that are not read here."""
        if not self._names.holds(name):
            return True
        ignored_ends = ("rotary_emb.inv_freq", *(f".{scale}" for scale in UNREAD_SCALES))
        return self.own_name(name) in self._names.ignored or name.endswith(ignored_ends)


def _wrong_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> WeightMismatch:
    return WeightMismatch(
        f"has a weight {name!r} with shape {list(shape)}, but config.json asks for {list(wanted)}",
        "do they belong together? Of a draft head, is --speculative-algorithm right?",
    )


def _stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """The model's name of each parameter that holds a weight of all experts, to what it is."""
    return {
        f"{module_name}.{parameter}": ExpertStack(module, module_name, parameter)
        for module_name, module in model.named_modules()
        if isinstance(module, Experts)
        for parameter in (GATE_UP, DOWN)
    }


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's name of each weight to the tensor (or rows of a fused one) that it fills."""
    targets: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if isinstance(module, Experts):
            targets |= {prefix + name: place for name, place in module.places().items()}
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, FusedLinear):
                targets[prefix + name] = parameter.data
                continue
            parent = module_name.rpartition(".")[0]
            for shard in module.shards:
                targets[f"{parent}.{shard}.{name}"] = module.shard_of(parameter.data, shard)
    return targets | _stored_buffers(model)


def _cuts(model: nn.Module) -> dict[str, Cut]:
    """The model's name of each weight that ranks divide, to the part that this one has."""
    found: dict[str, Cut | None] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, Experts):
            found |= {f"{module_name}.{name}": cut for name, cut in module.cuts().items()}
        for name, _ in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear):
                parent = module_name.rpartition(".")[0]
                for shard in module.shards:
                    cut = _cut_of(module, name, module.cut_of_shard(shard))
                    found |= {f"{parent}.{shard}.{name}": cut, f"{module_name}.{name}": cut}
            elif isinstance(module, Linear | Embedding | StepNorm):
                own = WEIGHT if name == SCALE else name
                found[f"{module_name}.{name}"] = _cut_of(module, name, module.cut_of(own))
    return {name: cut for name, cut in found.items() if cut is not None}


def _cut_of(module: nn.Module, parameter: str, cut: Cut | None) -> Cut | None:
    """The part of a parameter, by that of the weight or bias that it is or belongs to."""
    if parameter != SCALE or not isinstance(module, Linear) or module.form is None:
        return cut
    return module.form.cut_of_scales(cut)


def _stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not isinstance(value, nn.Parameter)
    }
