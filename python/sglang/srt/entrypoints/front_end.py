"""The front end of a server or an Engine, from the flags and from what the scheduler found out."""

from __future__ import annotations

from sglang.srt.entrypoints.launch import FrontendChannels, open_hidden_files, open_request_log
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import ModelConfig
from sglang.srt.process_watch import ProcessWatch
from sglang.srt.processes.grammar_flags import grammar_setup
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer


def make_manager(
    channels: FrontendChannels,
    server_args: ServerArgs,
    tokenizer: Tokenizer,
    info: SchedulerInfo,
    watch: ProcessWatch,
    *,
    model: ModelConfig | None = None,
) -> TokenizerManager:
    """Makes the tokenizer manager on the front end's sockets.

    Args:
        model: gives OpenAI's routes their sampling defaults; None where there are no such routes.

    Raises:
        LaunchError: if a flag of requests makes no sense, or their log cannot be written.
    """
    limits = limits_from_flags(server_args, info, model)
    grammars = grammar_setup(server_args, info.vocab_size, info.eos_token_ids)
    request_log = open_request_log(server_args)
    return channels.make_manager(
        tokenizer,
        limits,
        request_log=request_log,
        grammars=grammars,
        watch=watch,
        hidden_files=open_hidden_files(server_args, info),
        weight_version=server_args.weight_version,
    )
