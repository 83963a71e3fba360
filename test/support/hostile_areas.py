"""Areas that take hostile inputs: each draws an input, and feeds it as a server does.

`feed` tells whether an input was taken; one that is refused as the area's users are told gives
False. Any other error is a failure.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors.torch import save

from chat_template_cases import LLAMA, QWEN
from fake_backend import LIMITS
from file_readers import READERS
from grammar_cases import CALCULATION, PATTERN, PERSON, SETUP
from hostile_bodies import TEXT, TOOL, Bodies
from kept_prices import Start, runner_of, signed
from mutations import as_json, as_msgpack, mutated, spoilt
from serving_utils import make_model_dir
from sglang.srt.constrained.grammar_check import GrammarCheck, GrammarRefused, TooManyChecks
from sglang.srt.entrypoints.server_process import REFUSALS, check_start
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages import ipc
from sglang.srt.messages.control import AbortReq, ControlReply, EngineStatus, HealthPing
from sglang.srt.messages.requests import (
    BatchStrOutput,
    BatchTokenIDOutput,
    DecodeOptions,
    FinishReason,
    ProcessFailed,
    ReqOutput,
    ReqTextOutput,
    ToDetokenizer,
    ToFrontend,
    TokenizedGenerateReqInput,
    ToLauncher,
    ToScheduler,
)
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_files import INDEX
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.parser.chat_templates import RenderProcess, TemplateError
from sglang.srt.parser.render_messages import RenderRequest, RenderSetup
from sglang.srt.parser.render_process import _answer as answer_chat
from sglang.srt.registry import load
from sglang.srt.sampling.grammar import EBNF, GRAMMAR_FIELDS, JSON_SCHEMA, STRUCTURAL_TAG, Grammar
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.tensor_headers import read_all_headers
from sglang.srt.tokenizer import load_tokenizer
from sglang.srt.weight_sync.weight_reader import WeightReader, WeightUpdateError
from utils import make_random_llama

MAX_POSITIONS = 64
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


class Area(Protocol):
    """A place that hostile inputs reach."""

    def draw(self, chooser: random.Random) -> bytes:
        """Returns an input."""

    def feed(self, raw: bytes) -> bool:
        """Tells whether an input was taken, not refused."""

    def close(self) -> None:
        """Ends what the area holds."""


class _Folder:
    """An area that holds a folder."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.path = Path(self._directory.name)

    def close(self) -> None:
        self._directory.cleanup()


class Frames(_Folder):
    """Frames of the sockets between processes: those that hold no message are dropped, and those of
    unknown requests do no harm to detokenizer and front end."""

    def __init__(self) -> None:
        super().__init__()
        tokenizer = load_tokenizer(make_model_dir(self.path))
        self._detokenizer = DetokenizerManager(tokenizer, lambda message: None)
        self._front_end = TokenizerManager(
            tokenizer,
            LIMITS,
            lambda message: None,
            lambda: None,  # type: ignore[arg-type, return-value]
        )
        reason = FinishReason(type="stop", matched=3)
        output = ReqOutput(1, [5, 6], reason, 3, 2, 0, 0, options=DecodeOptions(True, False, ["a"]))
        spans = {"target": [("default", 0)]}
        text = ReqTextOutput(1, "a", [5], reason, 3, 1, 1, 0, weight_spans=spans)
        request = TokenizedGenerateReqInput(
            req_id=1, rid="a", input_ids=[1, 2], sampling_params=SamplingParams()
        )
        ping = HealthPing(call_id=1)
        messages: dict[Any, list[Any]] = {
            ToScheduler: [
                request,
                AbortReq(req_ids=[1], aborted_message="over"),
                ping,
            ],
            ToDetokenizer: [BatchTokenIDOutput(outputs=[output]), ping],
            ToFrontend: [
                BatchStrOutput(outputs=[text]),
                ControlReply(call_id=1, success=True, message="Done."),
                EngineStatus(stopped="Generation is paused."),
            ],
            ToLauncher: [ProcessFailed(role="scheduler", message="over")],
        }
        self._channels = [
            (msgspec.msgpack.Decoder(kind), [msgspec.to_builtins(each) for each in examples])
            for kind, examples in messages.items()
        ]
        self._takers: list[Callable[[Any], None]] = [
            lambda message: None,
            self._detokenizer.handle,
            self._front_end.handle,
            lambda message: None,
        ]

    def draw(self, chooser: random.Random) -> bytes:
        index = chooser.randrange(len(self._channels))
        value = mutated(chooser, chooser.choice(self._channels[index][1]))
        return bytes([index]) + as_msgpack(chooser, value)

    def feed(self, raw: bytes) -> bool:
        index = raw[0] % len(self._channels)
        message = ipc._read(self._channels[index][0], raw[1:])
        if message is not None:
            self._takers[index](message)
        return message is not None


class Configs(_Folder):
    """Files of a model's folder: what a start looks at before it loads weights, and the layers that
    it would make."""

    CONFIGS: tuple[dict[str, Any], ...] = (
        {},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "eos_token_id": [1, 5]},
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8,
         "use_sliding_window": True, "max_window_layers": 1,
         "layer_types": ["full_attention", "sliding_attention"]},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "dtype": "float16"},
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
                                 "weight_block_size": [128, 128]}},
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._model = make_model_dir(self.path / "model", **TINY)
        config = json.loads((self._model / "config.json").read_text())
        template = "{{ messages[0].content }}"
        token = {"content": "<bos>", "lstrip": False, "special": True}
        tokens = {"bos_token": token, "eos_token": "<eos>", "chat_template": template}
        self._examples: dict[str, list[Any]] = {
            "config.json": [{**config, **changes} for changes in self.CONFIGS],
            "generation_config.json": [{"eos_token_id": [1, 2], "top_k": 5, "temperature": 0.5}],
            "tokenizer_config.json": [
                {**tokens, "added_tokens_decoder": {"0": token}, "model_max_length": 64},
                {**tokens, "chat_template": [{"name": "default", "template": template}]},
            ],
            "special_tokens_map.json": [tokens],
            "tokenizer.json": [json.loads((self._model / "tokenizer.json").read_text())],
        }
        self._good = {file.name: file.read_bytes() for file in self._model.iterdir()}

    def draw(self, chooser: random.Random) -> bytes:
        name = chooser.choice(["config.json", "config.json", *self._examples])
        value = mutated(chooser, chooser.choice(self._examples[name]))
        return name.encode() + b"\n" + as_json(chooser, value)

    def feed(self, raw: bytes) -> bool:
        name, _, content = raw.partition(b"\n")
        file = self._model / name.decode()
        file.write_bytes(content)
        try:
            args = ServerArgs(model_path=str(self._model), load_format="dummy", device="cpu")
            check_start(args)
            config = load_model_config(str(self._model))
            with torch.device("meta"):
                load(config.model_class)(config, MAX_POSITIONS)
        except REFUSALS:
            return False
        finally:
            file.unlink()
            if file.name in self._good:
                file.write_bytes(self._good[file.name])
        return True


class Checkpoints(_Folder):
    """Safetensors: of a start, of the commands that look at a folder, of an update by a client."""

    def __init__(self) -> None:
        super().__init__()
        make_random_llama(self.path, **TINY)
        self._config = load_model_config(str(self.path))
        self._model = load_model(self._config, "auto", MAX_POSITIONS, torch.float32, "cpu")
        self._reader = WeightReader({"": WeightPlaces(self._model, self._config)})
        self._file = self.path / "model.safetensors"
        good = self._file.read_bytes()
        self._file.unlink()
        end = 8 + int.from_bytes(good[:8], "little")
        self._header, self._values = json.loads(good[8:end]), good[end:]
        names = sorted(self._header)
        self._index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}

    def draw(self, chooser: random.Random) -> bytes:
        if chooser.random() < 0.1:
            return b"i" + as_json(chooser, mutated(chooser, self._index))
        header, values = self._header, self._values
        if chooser.random() < 0.8:
            header = mutated(chooser, header)
        if chooser.random() < 0.3:
            values = spoilt(chooser, values)
        text = as_json(chooser, header)
        length = len(text)
        if chooser.random() < 0.1:
            length = chooser.choice([0, 1, length + 1, length - 1, 10**8, 2**63, 2**64 - 1])
        whole = length.to_bytes(8, "little") + text + values
        return b"f" + (spoilt(chooser, whole) if chooser.random() < 0.2 else whole)

    def feed(self, raw: bytes) -> bool:
        kind, data = raw[:1], raw[1:]
        file = self._file if kind == b"f" else self.path / INDEX
        file.write_bytes(data)
        taken = []
        try:
            for look in (lambda: read_all_headers(self.path), self._load):
                try:
                    look()
                    taken.append(True)
                except ModelPathError:
                    taken.append(False)
            if kind == b"f":
                try:
                    self._reader.from_safetensors(data)
                    taken.append(True)
                except WeightUpdateError:
                    taken.append(False)
        finally:
            file.unlink()
        return any(taken)

    def _load(self) -> None:
        load_model(self._config, "auto", MAX_POSITIONS, torch.float32, "cpu")


class Prices(_Folder):
    """Kept prices of steps: whatever a file holds, a start goes on."""

    def __init__(self) -> None:
        super().__init__()
        model = make_model_dir(self.path / "model")
        self._runners = runner_of(model), runner_of(model, hidden_width=32)
        self._cache = self.path / "cache"
        Start(self._cache, *self._runners)
        self._good = {file: file.read_bytes() for file in sorted(self._cache.iterdir())}

    def draw(self, chooser: random.Random) -> bytes:
        index = chooser.randrange(len(self._good))
        value = json.loads([*self._good.values()][index])
        return bytes([index]) + signed(as_json(chooser, mutated(chooser, value)))

    def feed(self, raw: bytes) -> bool:
        file = [*self._good][raw[0] % len(self._good)]
        file.write_bytes(raw[1:])
        measured = Start(self._cache, *self._runners).measured
        for each, content in self._good.items():
            each.write_bytes(content)
        return not measured


class FlagFiles(_Folder):
    """Files that flags name: n-gram corpora, token maps, adaptive lengths."""

    def __init__(self) -> None:
        super().__init__()
        make_model_dir(self.path / "model")
        texts = ["def main():\n    return 1", {"text": "hello hello", "id": 3}, "é😀 hello"]
        lines = [json.dumps(text).encode() for text in texts]
        slot = {"candidate_steps": [1, 3, 7], "ema_alpha": 0.2}
        steps = {"1": slot, "8": {"candidate_steps": [1]}, "warmup_batches": 10}
        tensor = save({"map": torch.arange(9)})
        self._draws: dict[str, Callable[[random.Random], bytes]] = {
            "corpus.jsonl": lambda chooser: b"\n".join(
                chooser.choice([line, as_json(chooser, mutated(chooser, json.loads(line)))])
                for line in lines
            ),
            "map.json": lambda chooser: as_json(chooser, mutated(chooser, [*range(9)])),
            "map.safetensors": lambda chooser: spoilt(chooser, tensor),
            "steps.json": lambda chooser: as_json(chooser, mutated(chooser, steps)),
        }

    def draw(self, chooser: random.Random) -> bytes:
        name = chooser.choice(["corpus.jsonl", "corpus.jsonl", *self._draws])
        return name.encode() + b"\n" + self._draws[name](chooser)

    def feed(self, raw: bytes) -> bool:
        name, _, content = raw.partition(b"\n")
        file = self.path / name.decode()
        file.write_bytes(content)
        try:
            READERS[name.decode()](file)
        except (UnicodeError, json.JSONDecodeError):
            raise  # it names no file
        except ValueError:
            return False
        return True


class Grammars:
    """JSON schemas, regular expressions, EBNF and structural tags, in the processes that check
    them."""

    def __init__(self) -> None:
        import asyncio

        self._loop = asyncio.new_event_loop()
        self._check = GrammarCheck(msgspec.structs.replace(SETUP, max_check_seconds=1))

    def draw(self, chooser: random.Random) -> bytes:
        kind = chooser.choice([JSON_SCHEMA, JSON_SCHEMA, *GRAMMAR_FIELDS])
        tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}}
        match kind:
            case "json_schema":
                text = as_json(chooser, mutated(chooser, PERSON))
            case "structural_tag":
                tags = {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [{**tag, "end": "</f>"}],
                }
                whole = {"type": STRUCTURAL_TAG, "format": tags}
                text = as_json(chooser, mutated(chooser, whole))
            case _:
                text = spoilt(chooser, (CALCULATION if kind == EBNF else PATTERN).encode())
        return kind.encode() + b"\n" + text

    def feed(self, raw: bytes) -> bool:
        kind, _, text = raw.partition(b"\n")
        grammar = Grammar(kind.decode(), text.decode("utf-8", "replace"))
        try:
            self._loop.run_until_complete(self._check.check(grammar))
        except (GrammarRefused, TooManyChecks):
            return False
        return True

    def close(self) -> None:
        self._check.close()
        self._loop.close()


class TooLong(BaseException):
    """A template takes more time than it has in a test."""


class Templates:
    """Chat templates, by the function of the process that renders. One that takes too much time or
    memory, which ends that process, is rendered by such a process too."""

    SECONDS, MEMORY_MIB = 0.5, 1024
    CHATS: tuple[dict[str, Any], ...] = (
        {"messages": [TEXT], "tools": None, "add_generation_prompt": True},
        {"messages": [{"role": "system", "content": "a"}, TEXT], "tools": [TOOL]},
        {"messages": [TEXT, {"role": "assistant", "content": "b"}], "tools": None},
    )

    def draw(self, chooser: random.Random) -> bytes:
        source = chooser.choice([LLAMA, QWEN, "{{ messages[0].content }}"]).encode()
        other = chooser.choice([LLAMA, QWEN]).encode()
        at = chooser.randrange(len(other))
        source = spoilt(chooser, source) + other[at : at + chooser.choice([0, 0, 40])]
        return bytes([chooser.randrange(len(self.CHATS))]) + source

    def feed(self, raw: bytes) -> bool:
        setup = RenderSetup(
            templates={"default": raw[1:].decode("utf-8", "replace")},
            max_chars=100_000,
            max_seconds=1,
            max_memory_mib=self.MEMORY_MIB,
        )
        number = raw[0] % len(self.CHATS)
        request = RenderRequest(
            template="default",
            variables={"bos_token": "<s>", "eos_token": "</s>", **self.CHATS[number]},
            continue_final_message=number == 2,
            is_turn=False,
        )
        try:
            with limited(self.SECONDS, self.MEMORY_MIB):
                reply = answer_chat(msgspec.msgpack.encode(request), setup, {})
        except TooLong:
            process = RenderProcess(setup)
            try:
                process.render(request)
            except TemplateError:
                return False
            finally:
                process.close()
            return True
        return reply.text is not None

    def close(self) -> None:
        """Holds nothing."""


@contextmanager
def limited(seconds: float, memory_mib: int) -> Iterator[None]:
    """Limits the time and the further memory of what runs in it."""

    def end(number: int, frame: Any) -> None:
        raise TooLong

    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_mib * 2**20, old[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, old)
        signal.signal(signal.SIGALRM, before)


AREAS: dict[str, tuple[Callable[[], Area], int]] = {  # and the share of inputs
    "bodies": (Bodies, 30),
    "frames": (Frames, 20),
    "configs": (Configs, 15),
    "checkpoints": (Checkpoints, 15),
    "kept prices": (Prices, 10),
    "files of flags": (FlagFiles, 10),
    "grammars": (Grammars, 5),
    "templates": (Templates, 5),
}


BY_BYTES = ("frames", "checkpoints", "kept prices", "templates")  # that take any bytes


def area_of(seed: int) -> str:
    """Returns the area of a seed's input."""
    shares = [share for _, share in AREAS.values()]
    return random.Random(f"area {seed}").choices([*AREAS], shares)[0]
