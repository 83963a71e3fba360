"""Every flag of the server and the Engine: one flat dataclass whose field metadata makes the CLI.

There is no logic here. `runtime_config.resolve` turns these wishes into frozen sub-configs; nothing
below it sees this class.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt import flag_file
from sglang.srt.argument_parsing import (
    SuggestingParser,
    add_flags,
    own_arguments_of,
    parse_flags,
    sglang_section,
)
from sglang.srt.flag_values import check_finite, flag
from sglang.srt.model_config import AUTO, DTYPE_ALIASES, DTYPES
from sglang.srt.registry import ATTENTION_BACKENDS, OWN, ROW_INDEPENDENT, TRANSFORMERS
from sglang.srt.sglang_arguments import TakesSGLangArguments, all_arguments
from sglang.srt.speculation_args import SpeculationArgs
from sglang.srt.version import __version__

# An address to listen on for all, and the one by which this machine reaches itself then.
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
SERVE = "sglang serve"


@dataclass(kw_only=True)
class ServerArgs(SpeculationArgs, metaclass=TakesSGLangArguments):
    """The user's wishes. `None` means: let `runtime_config` decide.

    Launchers may change it until a server starts with it.

    Raises:
        ValueError: naming an argument that is refused, one outside its choices, or a number that is
            not finite.
    """

    # Model
    model_path: str = flag(
        MISSING,
        "Model directory (Hugging Face layout), OWNER/NAME of the Hugging Face hub, or `demo`.",
        aliases=("--model",),
        section="Model",
    )
    tokenizer_path: str | None = flag(
        None, "Tokenizer directory, or a name of the hub; default: the model's."
    )
    skip_tokenizer_init: bool = flag(
        False, "Load no tokenizer: requests give `input_ids` and get `output_ids` without a text."
    )
    revision: str | None = flag(
        None, "Branch, tag or commit of a --model-path on the hub; default: main."
    )
    download_dir: str | None = flag(
        None, "Cache of models of the hub; default: that of HF_HUB_CACHE or HF_HOME."
    )
    served_model_name: str | None = flag(
        None, "Name that clients see; default: --model-path as it is given."
    )
    chat_template: str | None = flag(
        None, "File with the Jinja template of chats; default: the model's own."
    )
    hf_chat_template_name: str | None = flag(
        None, "Which of the model's named chat templates all chats get; default: by their tools."
    )
    default_chat_template_kwargs: str | None = flag(
        None,
        "JSON object of variables for the chat template, where a chat's chat_template_kwargs do"
        " not say otherwise.",
    )
    tool_call_parser: str | None = flag(
        None,
        "How the model writes calls of functions: `llama3`, `qwen25` (`qwen`, `hermes`) or"
        " `mistral`. Default: chats have no tools.",
    )
    reasoning_parser: str | None = flag(
        None,
        "How the model marks what it thinks: `qwen3`, `qwen3-thinking` or `deepseek-r1`."
        " Default: that is a part of its answer.",
    )
    grammar_backend: str = flag(
        "llguidance",
        "What keeps outputs to a `json_schema`, `regex`, `ebnf` or `structural_tag`; `none` refuses"
        " such requests.",
        choices=("llguidance", "none"),
    )
    load_format: str = flag(
        "auto",
        "`auto` reads safetensors; `dummy` fills random weights from config.json alone.",
        choices=("auto", "safetensors", "dummy"),
    )
    model_impl: str = flag(
        AUTO,
        "What computes the model: `own` files of this package, `transformers` for its modelling"
        " code, or `auto` for transformers where there is no file of ours.",
        choices=(AUTO, OWN, TRANSFORMERS),
    )
    dtype: str = flag(
        "auto",
        "`auto` is the checkpoint's type on a GPU and float32 on a CPU.",
        choices=("auto", *DTYPES, *DTYPE_ALIASES),
    )
    quantization: str | None = flag(
        None,
        "`fp8` holds the weights of linear layers in 8 bits that the files have in 16 or 32, with a"
        " scale for each output. Default: as the files have them.",
        choices=("fp8",),
    )
    weight_version: str = flag("default", "Label of the weights, until an update changes it.")
    context_length: int | None = flag(None, "Tokens per request; default: config.json's.")
    sampling_defaults: str = flag(
        "model",
        "What /v1/* requests get for sampling parameters that they do not give: `model` takes the"
        " temperature and others of generation_config.json, `openai` OpenAI's defaults.",
        choices=("model", "openai"),
    )

    # HTTP
    host: str = flag("127.0.0.1", "Address to listen on.", section="HTTP")
    port: int = flag(30000, "Port to listen on; 0: a free one.")
    api_key: str | None = flag(
        None, "Clients must send `Authorization: Bearer` with it; not for health.", secret=True
    )
    admin_api_key: str | None = flag(
        None, "Routes that change the server take this key and not --api-key.", secret=True
    )
    allow_pickled_weights: bool = flag(
        False,
        "Take the pickles of tensors and buckets that trainers on this machine send to"
        " /update_weights_from_tensor if they have SGLang's own package; with --admin-api-key."
        " Nothing of a pickle is run.",
    )
    allowed_origins: str | None = flag(
        None, "Web pages that may use the server, such as https://chat.example; with commas."
    )
    disable_ui: bool = flag(False, "No page at / and /docs.")
    max_connections: int = flag(4096, "Connections at a time at most; one more gets 503.")
    max_header_bytes: int = flag(16_384, "Size of a request's head, its headers and URL, at most.")
    shutdown_timeout_s: float = flag(
        5.0, "After SIGTERM, seconds that running requests may use to finish before an abort."
    )
    watchdog_timeout: float = flag(
        300.0,
        "Seconds that a process may be stopped, or one step may take, until the server ends with an"
        " error; 0: any time.",
    )
    skip_server_warmup: bool = flag(False, "Do not run one short request before saying ready.")

    # Memory and schedule
    mem_fraction_static: float | None = flag(
        None,
        "Share of the device's memory for weights and KV pool; default: by device.",
        section="Memory and schedule",
    )
    max_total_tokens: int | None = flag(None, "KV pool size in tokens; default: from memory.")
    page_size: int = flag(1, "KV slots per page.")
    max_running_requests: int = flag(256, "Requests in the running batch at most.")
    max_queued_requests: int | None = flag(
        None, "Waiting requests; one more is answered with 503. Default: any number may wait."
    )
    paused_requests: str = flag(
        "queue",
        "What becomes of requests that arrive while generation is paused: they wait, or get 503.",
        choices=("queue", "reject"),
    )
    chunked_prefill_size: str | int | None = flag(
        "auto",
        "Prompt tokens in one step at most. `auto`: 8192 on a GPU, 2048 on a CPU, and fewer where"
        " memory or --max-step-ms asks for it; a number: so many in every step. -1: no prompt is"
        " split, and a step has as many tokens as the longest one.",
    )
    max_step_ms: float | None = flag(
        None,
        "With `--chunked-prefill-size auto`, milliseconds that a step may take in which requests"
        " decode: a gap between their tokens. Prompts get as many tokens as fit by prices, which"
        " the start measures and the last steps correct, and at least 128. 0: no bound."
        " Default: on a GPU 30 while any request streams, else no bound: callers without a stream"
        " see no gaps. On a CPU no bound.",
    )
    schedule_policy: str = flag(
        "fcfs",
        "Order of the waiting queue: `fcfs`, or `lpm` for longest cached prefix first.",
        choices=("fcfs", "lpm"),
    )
    enable_priority_scheduling: bool = flag(
        False, "Requests with a larger `priority` go first and may push others aside."
    )
    schedule_low_priority_values_first: bool = flag(False, "Smaller priorities go first.")
    priority_scheduling_preemption_threshold: int = flag(
        10, "By how much a priority must be larger to push a running request aside."
    )
    schedule_conservativeness: float = flag(
        1.0, "Above 1 admits fewer requests at once (fewer retractions), below 1 more."
    )
    stream_interval: int = flag(1, "Tokens per chunk of a stream, unless the request says.")
    disable_radix_cache: bool = flag(False, "Do not re-use KV of earlier requests.")
    disable_overlap_schedule: bool = flag(
        False, "Read each step's result before the next one is launched."
    )

    # Execution
    device: str = flag(
        "auto", "Device to run on.", choices=("auto", "cpu", "cuda"), section="Execution"
    )
    base_gpu_id: int = flag(0, "GPU to run on, of those in CUDA_VISIBLE_DEVICES if that is set.")
    attention_backend: str | None = flag(
        None,
        "Attention implementation; default: the best one for the device.",
        choices=tuple(name for name in ATTENTION_BACKENDS.names if name != ROW_INDEPENDENT),
    )
    enable_deterministic_inference: bool = flag(
        False,
        "On a GPU, give a request the same tokens whatever shares its steps: other requests,"
        " drafts, chunks of prompts, cached prefixes. Sums in fixed orders take longer.",
    )
    enable_deterministic_requests: bool = flag(
        False,
        'Do so only for requests that say "deterministic": true. Steps that have one take longer;'
        " CUDA graphs take twice the memory.",
    )
    disable_cuda_graph: bool = flag(False, "Run every step on a GPU without CUDA graphs.")
    tp_size: int = flag(
        1,
        "Ranks that hold the model together, each a part of its weights and of the KV: that many"
        " processes, each with a GPU, or with its share of a CPU's cores.",
        aliases=("--tp", "--tensor-parallel-size"),
    )
    num_threads: int | None = flag(None, "Torch threads of each rank on a CPU.")
    random_seed: int | None = flag(None, "Seed for requests that bring no sampling_seed.")

    # Multi-token prediction
    mtp_max_k: int = flag(
        8,
        "Tokens that a request may predict per step (`mtp_k`) at most.",
        section="Multi-token prediction",
    )
    mtp_mask_token_id: int | None = flag(
        None, "The model's mask token; default: `mtp_mask_token_id` in its config.json."
    )
    mtp_load_aware_k: bool = flag(
        False,
        "Predict fewer tokens under load for requests without `mtp_verify` too; their output"
        " depends on it.",
    )
    disable_mtp_cuda_graph: bool = flag(
        False, "Run steps of several rows per request without CUDA graphs, plain decoding with."
    )
    preferred_sampling_params: str | None = flag(
        None,
        "JSON object of sampling parameters for requests that do not give them, such as"
        ' \'{"mtp_enabled": true, "mtp_verify": true, "mtp_k": 8}\'.',
    )

    # Limits of one HTTP request
    unknown_fields: str | None = flag(
        None,
        "Unknown fields of a body are refused by name, or left out and logged once."
        " Default: `refuse` for /generate, `ignore` for /v1/*.",
        choices=("refuse", "ignore"),
        section="Limits of one request",
    )
    max_request_bytes: int = flag(32 * 1024 * 1024, "Size of an HTTP body at most.")
    max_weight_bytes: int = flag(
        2 * 1024 * 1024 * 1024, "Size of an HTTP body of /update_weights_from_tensor at most."
    )
    max_batch_size_per_request: int = flag(4096, "Prompts x n in one request at most.")
    max_tokenize_tokens: int | None = flag(
        None, "Tokens of a text of /tokenize and /detokenize at most; default: as of a request."
    )
    max_n: int = flag(128, "Samples per prompt (`n`) at most.")
    max_stop_strings: int = flag(32, "Entries of `stop`, and of `stop_token_ids`, at most.")
    max_stop_regex_bytes: int = flag(256, "Bytes of one `stop_regex` at most.")
    max_grammar_bytes: int = flag(65_536, "Bytes of a `json_schema` or another grammar at most.")
    max_grammar_time_s: float = flag(
        30.0, "Seconds of a processor that what a request's grammar allows may take to find."
    )
    max_logit_bias: int = flag(1024, "Entries of `logit_bias` at most.")
    max_label_chars: int = flag(
        256, "Characters of `rid` or x-request-id, and of a custom label, at most."
    )
    max_custom_labels: int = flag(32, "Entries of `custom_labels` at most.")
    max_top_logprobs: int = flag(128, "`top_logprobs_num` at most.")
    max_token_ids_logprob: int = flag(1024, "Entries of `token_ids_logprob` at most.")
    max_cache_key_chars: int = flag(256, "Characters of `cache_salt` and `extra_key` at most.")
    enable_return_hidden_states: bool = flag(False, "Allow requests with return_hidden_states.")
    hidden_states_folder: str | None = flag(
        None, 'Folder for files of requests with `return_hidden_states: "file"`; allows those.'
    )
    hidden_states_layers: str | None = flag(
        None,
        "Layers in such files, such as 2,16,29, counted as in transformers' hidden_states; the last"
        " hidden state is there too. Default: those that the EAGLE-3 head reads, or one would.",
    )
    max_hidden_states_bytes: int = flag(
        4 * 1024 * 1024 * 1024, "Size of all such files that nobody has removed at most."
    )
    max_stop_string_chars: int = flag(256, "Characters of one stop string at most.")

    # Logging
    log_level: str = flag(
        "info",
        "Log level.",
        choices=("debug", "info", "warning", "error", "critical"),
        section="Logging",
    )
    decode_log_interval: int | None = flag(
        None,
        "Steps with decodes between two lines on the running batch; 0: none. Default: by time.",
    )
    log_requests: bool = flag(False, "Write one line at the end of each request.")
    log_requests_level: int = flag(
        0, "0: figures and labels; 1: sampling parameters too; 2: prompts and outputs too."
    )
    log_requests_format: str = flag(
        "json",
        "`json`: one object per line; `text`: name=value.",
        choices=("json", "text"),
    )
    log_requests_target: str = flag("stdout", "`stdout`, or a file to append to.")

    # Launchers read and pass these; another value is refused.
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0

    def __post_init__(self) -> None:
        check_finite(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Gives SGLang's default of an argument that only SGLang has: launchers read some."""
            if name not in all_arguments():
                raise AttributeError(f"ServerArgs has no {name!r}")
            return all_arguments()[name].default

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds one option per flag by the parser's own `add_argument`, which trainers replace."""
        add_flags(lambda _section: parser.add_argument, ServerArgs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Takes the flags among what a parser with `add_cli_args` has parsed."""
        return cls(**own_arguments_of(args, cls))

    def url(self) -> str:
        """Gives the address of a server with these flags for its own machine."""
        host = ANY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def parse_cli(argv: list[str] | None = None, prog: str = SERVE) -> ServerArgs:
    """Parses a command line of the command `prog`.

    Raises:
        SystemExit: on a flag that is unknown or refused, or a value that its flag cannot have; the
            reason is printed.
    """
    parser = server_parser(prog)
    parser.refuse_unknown(sys.argv[1:] if argv is None else argv)
    return ServerArgs(**parse_flags(parser, argv, ServerArgs)[1])


def server_parser(prog: str = SERVE) -> SuggestingParser:
    """Makes a parser of all flags of a server. What is added later takes the place of a flag of
    SGLang that is refused here."""
    parser = SuggestingParser(
        prog=prog,
        epilog=flag_file.HELP + sglang_section(ServerArgs),
        conflict_handler="resolve",
    )
    parser.add_argument("--version", action="version", version=f"sglang-adaptive {__version__}")
    add_flags(lambda name: parser.add_argument_group(name).add_argument, ServerArgs)
    return parser


prepare_server_args = parse_cli  # SGLang's name
