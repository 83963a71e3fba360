"""Makes of the flags what every process that holds a model has: the models' runners and their
worker. There is one such process for each rank; the first one's also has the scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from sglang.srt.compile_cache import CompileCache, folder_of, open_cache
from sglang.srt.distributed.group import RankGroup, RankLostError
from sglang.srt.environ import Environ
from sglang.srt.messages.ipc import IpcAddresses
from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.observability.start_log import start_phase
from sglang.srt.platform import Platform
from sglang.srt.processes.end_of_text import with_tokenizer_eos
from sglang.srt.processes.rank_flags import check_devices
from sglang.srt.processes.runtime_config import RuntimeConfig, resolve, with_chunks_that_fit
from sglang.srt.processes.tokenizer_flags import tokenizer_folder
from sglang.srt.processes.worker_factory import drafter_models, make_worker, measure_prices
from sglang.srt.server_args import ServerArgs
from sglang.srt.shard import WHOLE, Shard
from sglang.srt.speculative.debug_trace import DebugTrace
from sglang.srt.step.price_table import PriceTable
from sglang.srt.tokenizer import Tokenizer
from sglang.srt.workers.tp_worker import TpModelWorker

logger = logging.getLogger(__name__)

EXCHANGE = "sglang.srt.layers.ops.rank_exchange"  # needs Triton
LAST_WORDS_S = 2.0  # the launcher looks several times meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """The models of a process, ready for steps.

    Attributes:
        draft_models: of `runners` behind the target.
        worker: runs this rank's part of each step.
        trace: None where nobody asked for it.
        ranks: that hold the model together; None: this process holds it all.
    """

    config: RuntimeConfig
    draft_models: list[ModelConfig]
    runners: RunnerGroup
    prices: PriceTable | None
    worker: TpModelWorker
    trace: DebugTrace | None
    ranks: RankGroup | None


def join_ranks(args: ServerArgs, addresses: IpcAddresses, rank: int) -> RankGroup | None:
    """Meets the other ranks; None where there are none."""
    if args.tp_size == 1:
        return None
    return RankGroup(Shard(rank, args.tp_size), addresses.meeting_point)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Ends the process when the block ends, with exit code 1, whatever its other threads wait for:
    a disk that hangs, or a trainer. After the loss of another rank it ends a little later: the
    launcher shall see and name that one's end, not this one's."""
    try:
        yield
    except RankLostError as error:
        logger.error("Another rank is lost, so this one ends: %s", error)
        time.sleep(LAST_WORDS_S)
    except Exception:  # nothing can go on after it
        logger.exception("This process fails.")
    os._exit(1)


def make_model_parts(
    args: ServerArgs, tokenizer: Tokenizer, private_cache: Path, ranks: RankGroup | None = None
) -> ModelParts:
    """Loads the models and makes their worker. All ranks do so together.

    Raises:
        ValueError: for a flag, model or size that cannot be had.
    """
    environ = Environ.read()
    model = load_model_config(args.model_path, impl=args.model_impl)
    model = with_tokenizer_eos(model, tokenizer_folder(args), tokenizer)
    is_first = ranks is None or ranks.shard.rank == 0
    for warning in model.warnings if is_first else ():
        logger.warning("%s", warning)
    model = replace(model, shard=WHOLE if ranks is None else ranks.shard)
    platform = Platform.probe()
    if ranks is not None:
        check_devices(args, ranks.texts(platform.device_name))
    config = resolve(args, platform, model, environ)
    draft_models = drafter_models(config.drafter, config.execution)
    kept = None
    if config.execution.device != "cpu":
        kept = use_cache(platform, private_cache).prices
        if ranks is not None:
            with start_phase("Connecting the GPUs of all ranks"):
                execution = config.execution
                exchange = room = None
                if not environ.nccl_sums:
                    exchange = import_module(EXCHANGE)
                    room = exchange.room_of(ranks.shard.num_ranks)
                dtype = getattr(torch, execution.dtype)
                ranks.connect_gpus(execution.device, dtype, exchange, room)
    runners = make_runners(config.execution, *draft_models, ranks=ranks)
    prices = measure_prices(config, runners.target, kept)
    path = environ.mtp_debug_trace if is_first else None
    trace = None if path is None or config.mtp is None else DebugTrace(path)
    worker = make_worker(
        runners,
        config.drafter,
        prices,
        on_step=None if trace is None else trace.launched,
        checks_kv=environ.kv_canary,
        simulated_accept_len=environ.simulated_accept_len,
    )
    return ModelParts(
        config=with_chunks_that_fit(config, runners.max_prompt_rows),
        draft_models=[each.model for each in draft_models],
        runners=runners,
        prices=prices,
        worker=worker,
        trace=trace,
        ranks=ranks,
    )


def use_cache(platform: Platform, private: Path) -> CompileCache:
    """Has what is compiled kept for the next start.

    Args:
        private: folder that takes it where it cannot be kept; it is made then.
    """
    cache = open_cache(folder_of(platform.device_name), private)
    if cache.is_private:
        logger.warning("%s %s: what is compiled now is not kept.", cache.kept, cache.problem)
    else:
        logger.info("Compiled kernels are kept in %s.", cache.kept)
    cache.use(os.environ)
    return cache
