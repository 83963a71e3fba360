"""The process tree of one server or Engine: start, readiness, death watch, stop."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zmq

from sglang.srt.constrained.grammar_check import GrammarCheck
from sglang.srt.constrained.grammar_messages import GrammarSetup
from sglang.srt.entrypoints.children import Child, places_of
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.environ import Environ
from sglang.srt.flag_values import public_fields
from sglang.srt.frontend.hidden_files import HiddenFiles
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.host import Host
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.control import DEFAULT_WEIGHT_VERSION, EngineStatus
from sglang.srt.messages.ipc import AsyncReceiver, ChildConfig, IpcAddresses, Receiver, Sender
from sglang.srt.messages.requests import (
    ProcessFailed,
    ProcessReady,
    SchedulerInfo,
    ToFrontend,
    ToLauncher,
    ToScheduler,
)
from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.process_watch import LOOK_S, ProcessWatch
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.end_of_text import with_tokenizer_eos
from sglang.srt.processes.flag_bounds import check_numbers
from sglang.srt.processes.flag_checks import check_flags, check_is_no_head
from sglang.srt.processes.model_folders import ModelFolders
from sglang.srt.processes.tokenizer_flags import tokenizer_folder, tokenizer_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
RANK_STOP_S = 3.0  # a rank may be stopped for so long
POLL_MS = 20

TMPDIR_REMEDY = "Set TMPDIR to a writable directory with a short path."

OnEnd = Callable[[str], None]


class ProcessTree:
    """The children of one server. They end with this process, however it ends.

    Args:
        on_end: called once, from a thread, when a child ends without being told to after all are
            ready, or has been stopped for too long; told which one, and how.
        waiting: children that run already, by role, and wait to be told what to do; None: they are
            started when the tree is.

    Attributes:
        watch: says which children are stopped.

    Raises:
        LaunchError: if there is no place for the sockets.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        on_end: OnEnd,
        waiting: Mapping[str, Child] | None = None,
    ) -> None:
        self._server_args = server_args
        self._on_end = on_end
        self._waiting = waiting or {}
        self.watch = ProcessWatch(server_args.watchdog_timeout)
        self._places = places_of(server_args)
        self._ranks = [role for role, place in self._places.items() if place.rank]
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        try:
            self.addresses, self._directory = IpcAddresses.create()
        except OSError as error:
            raise LaunchError(f"No directory for sockets: {error}. {TMPDIR_REMEDY}") from None

    @property
    def private_directory(self) -> Path:
        """A directory that only this user can enter; it ends with the processes."""
        return Path(self._directory)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {role: child.pid for role, child in self._children.items()}

    def start(self) -> SchedulerInfo:
        """Starts the children and waits until all are ready; blocks for seconds to minutes.

        Raises:
            LaunchError: if a child cannot start or ends, or `stop` is called meanwhile.
        """
        start = time.monotonic()
        roles = " and the ".join(self._places)
        logger.info("%s: starting the %s.", self._server_args.model_path, roles)
        receiver: Receiver[ProcessReady | ProcessFailed] = Receiver(
            self.addresses.launcher, ToLauncher
        )
        try:
            with self._lock:
                for role, place in self._places.items():
                    if not self._stopping.is_set():
                        child = self._waiting.get(role)
                        self._configure(
                            role, child or Child(place.module, place.gpu_id), place.rank
                        )
            return self._wait_ready(receiver, start)
        finally:
            receiver.close()

    def stop(self) -> None:
        """Ends the children by the end of their standard input, by force after `STOP_TIMEOUT_S` or
        where they are stopped.

        May be called more than once.
        """
        with self._lock:
            self._stopping.set()
            for role, child in self._children.items():
                if child.stdin is not None:
                    child.stdin.close()
                if self.watch.stopped(role):
                    child.kill()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for role, child in self._children.items():
                try:
                    child.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    logger.warning("The %s did not stop in time and is killed.", role)
                    child.kill()
                    child.wait()
            self.watch.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _configure(self, role: str, child: Child, rank: int) -> None:
        """Tells a child what to do."""
        reading, writing = child.beats
        self._children[role] = child.process
        self.watch.add(role, child.process.pid, reading)
        config = ChildConfig(public_fields(self._server_args), self.addresses, writing, rank)
        try:
            child.tell(msgspec.json.encode(config))
        except BrokenPipeError:
            logger.debug("The %s ended before it read its configuration.", role)

    def _wait_ready(
        self, receiver: Receiver[ProcessReady | ProcessFailed], start: float
    ) -> SchedulerInfo:
        waiting, info = {*self._places}, None
        while waiting:
            if self._stopping.is_set():
                raise LaunchError("The start was interrupted.")
            if not receiver.poll(POLL_MS):
                self._raise_if_dead(receiver)
                if reason := self._stopped_rank() or self.watch.overdue():
                    raise LaunchError(f"{reason} while starting.")
                continue
            for message in receiver.drain():
                if isinstance(message, ProcessFailed):
                    raise LaunchError(message.message)
                waiting.discard(message.role)
                info = message.scheduler or info
                elapsed = time.monotonic() - start
                logger.info("The %s is ready after %.1f s.", message.role, elapsed)
        if info is None:
            raise LaunchError("The scheduler did not say what it can do.")
        threading.Thread(target=self._watch_children, name="children-watch", daemon=True).start()
        return info

    def _raise_if_dead(self, receiver: Receiver[ProcessReady | ProcessFailed]) -> None:
        """Raises if a child has ended and left no last message that says why."""
        for role, child in self._children.items():
            if child.poll() is not None and not receiver.poll(POLL_MS):
                raise LaunchError(
                    f"The {role} process ended with exit code {child.returncode} while starting;"
                    " its last log lines say why."
                )

    def _watch_children(self) -> None:
        """Looks at them until the first one ends, or all are told to."""
        while not self._stopping.wait(LOOK_S):
            with self._lock:
                if self._stopping.is_set():
                    return
                reason = self._end_of_a_child() or self._stopped_rank() or self.watch.overdue()
            if reason is not None:
                self._on_end(reason)
                return

    def _stopped_rank(self) -> str | None:
        """Names a rank that has been stopped for too long; None where there is none. The others
        wait for it, so no request would ever end."""
        if not self._ranks:
            return None
        stop = self.watch.stopped_for(RANK_STOP_S, *self._ranks)
        return None if stop is None else f"{stop} for {RANK_STOP_S:g} s, and the others wait for it"

    def _end_of_a_child(self) -> str | None:
        """Names the child that has ended, and how; None while all live."""
        for role, child in self._children.items():
            if (code := child.poll()) is not None:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"The {role} process ended with {how}"
        return None


def find_model(server_args: ServerArgs) -> tuple[ModelFolders, Tokenizer]:
    """Looks at the numbers of flags, then finds the folders that they name, then `check_model`.

    Raises:
        ConfigError, ModelPathError, TokenizerError: what it says is one line for the user.
    """
    check_numbers(server_args)
    folders = ModelFolders.find(server_args)
    return folders, check_model(folders.args)


def check_model(server_args: ServerArgs) -> Tokenizer:
    """Looks at all flags, and reads what a model directory must have for a start to make sense,
    before any process is told what to do. No torch.

    Raises:
        ConfigError: for a flag that cannot be met.
        ModelPathError: if the model's directory or config.json cannot be read, or names an
            architecture that is not supported.
        TokenizerError: if the tokenizer cannot be read.
    """
    model = load_model_config(server_args.model_path, impl=server_args.model_impl)
    check_is_no_head(model)
    tokenizer = tokenizer_from_flags(server_args)
    folder = tokenizer_folder(server_args)
    beyond = {i: token for token, i in tokenizer.vocabulary().items() if i >= model.vocab_size}
    if beyond:
        logger.warning(
            "The tokenizer in %s has %d tokens beyond the model's vocab_size %d, such as %r. No"
            " output has one, and a prompt with one is refused; if that is not meant, see"
            " --tokenizer-path.",
            folder,
            len(beyond),
            model.vocab_size,
            beyond[min(beyond)],
        )
    _check_before_start(server_args, with_tokenizer_eos(model, folder, tokenizer))
    return tokenizer


def _check_before_start(server_args: ServerArgs, model: ModelConfig) -> None:
    """Raises ConfigError for what would end the start later."""
    try:
        info = check_flags(server_args, model, Environ.read(), Host.probe())
        limits_from_flags(server_args, info)
        if log := open_request_log(server_args):
            log.close()
    except (LaunchError, ValueError) as error:
        raise ConfigError(str(error)) from None


def open_request_log(server_args: ServerArgs) -> RequestLog | None:
    """The request log, if it is wanted.

    Raises:
        LaunchError: if its file cannot be written.
    """
    if not server_args.log_requests:
        return None
    target = server_args.log_requests_target
    try:
        level, line_format = server_args.log_requests_level, server_args.log_requests_format
        return RequestLog(target, level, line_format)
    except OSError as error:
        raise LaunchError(
            f"--log-requests-target {target} cannot be written: {error.strerror}."
        ) from None


def open_hidden_files(server_args: ServerArgs, info: SchedulerInfo) -> HiddenFiles | None:
    """Makes the folder of files of hidden states, if there may be any.

    Raises:
        LaunchError: if it cannot be made.
    """
    if server_args.hidden_states_folder is None:
        return None
    parent, most = Path(server_args.hidden_states_folder), server_args.max_hidden_states_bytes
    try:
        return HiddenFiles(parent, most, info.hidden_layers, info.hidden_row_bytes)
    except OSError as error:
        raise LaunchError(
            f"--hidden-states-folder {parent} cannot be written to: {error.strerror}."
        ) from None


class FrontendChannels:
    """The front end's two sockets, what checks grammars for it, and its log of requests; make and
    close it in the thread of the loop that uses it.

    Raises:
        LaunchError: if they cannot be made where the addresses say.
    """

    def __init__(self, addresses: IpcAddresses) -> None:
        try:
            self.receiver: AsyncReceiver[ToFrontend] = AsyncReceiver(addresses.frontend, ToFrontend)
        except zmq.ZMQError as error:
            raise LaunchError(f"{addresses.frontend}: {error}. {TMPDIR_REMEDY}") from None
        self.sender: Sender[ToScheduler] = Sender(addresses.scheduler)
        self._grammars: GrammarCheck | None = None
        self._request_log: RequestLog | None = None
        self._hidden_files: HiddenFiles | None = None

    def make_manager(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        *,
        request_log: RequestLog | None = None,
        grammars: GrammarSetup | None = None,
        watch: ProcessWatch | None = None,
        hidden_files: HiddenFiles | None = None,
        weight_version: str = DEFAULT_WEIGHT_VERSION,
    ) -> TokenizerManager:
        """Makes a tokenizer manager on these sockets; log, check and files end with them."""
        send, receive = self.sender.send, self.receiver.receive
        self._grammars = None if grammars is None else GrammarCheck(grammars)
        self._request_log, self._hidden_files = request_log, hidden_files
        manager = TokenizerManager(
            tokenizer,
            limits,
            send,
            receive,
            request_log=request_log,
            grammars=self._grammars,
            watch=watch,
            hidden_files=hidden_files,
        )
        manager.control.status = EngineStatus(weight_version=weight_version)
        return manager

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        if self._request_log is not None:
            self._request_log.close()
        if self._hidden_files is not None:
            self._hidden_files.close()
        self.sender.close()
        self.receiver.close()
