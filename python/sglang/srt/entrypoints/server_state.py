"""Holds the objects that the HTTP routes answer from."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from sglang.srt.control.client import ControlClient
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs


@dataclass
class ServerState:
    """The objects that the routes answer from. `manager` and `scheduler` are set once the server
    can serve.

    Attributes:
        private_directory: for files that only this user may read.
    """

    server_args: ServerArgs
    model_config: ModelConfig
    manager: TokenizerManager | None = None
    scheduler: SchedulerInfo | None = None
    private_directory: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    start_time: float = field(default_factory=time.monotonic)
    startup_time_s: float = 0.0

    @property
    def ready_manager(self) -> TokenizerManager:
        """The manager.

        Raises:
            ServiceError: with status 503 while the server starts.
        """
        if self.manager is None:
            raise ServiceError("The server is starting.", 503)
        return self.manager

    @property
    def control(self) -> ControlClient:
        """The manager's control client; raises as `ready_manager` does."""
        return self.ready_manager.control

    @property
    def model_name(self) -> str:
        """The name that clients see."""
        return self.server_args.served_model_name or self.server_args.model_path

    @property
    def num_kv_slots(self) -> int:
        """Size of the KV pool in tokens; 0 while the server starts."""
        return 0 if self.scheduler is None else self.scheduler.max_total_num_tokens

    @property
    def predicts_tokens(self) -> bool:
        """Tells whether requests may have multi-token prediction."""
        return self.scheduler is not None and self.scheduler.mtp_max_k > 0

    @property
    def weight_version(self) -> str:
        """Label of the weights that serve, as far as the scheduler has said."""
        if self.manager is None:
            return self.server_args.weight_version
        return self.manager.control.status.weight_version

    def become_ready(self, manager: TokenizerManager, scheduler: SchedulerInfo) -> None:
        self.startup_time_s = time.monotonic() - self.start_time
        self.scheduler = scheduler
        self.manager = manager
