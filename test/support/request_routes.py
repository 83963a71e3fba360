"""Checks of a request by each route that generates, up to where it would be sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fake_backend import Backend
from serving_utils import make_model_dir
from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.chat_settings import ChatSettings
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import ChatCompletion
from sglang.srt.entrypoints.openai.serving_completions import Completion
from sglang.srt.frontend.generate_body import CheckedRequest, check_generate_request
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.template_files import TemplateFiles
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
OPENAI_ROUTES = ["completions", "chat"]
ROUTES = ["generate", *OPENAI_ROUTES]


class Server:
    """The front end of a server, over a model in a new folder."""

    def __init__(self, folder: Path) -> None:
        self._manager = Backend(load_tokenizer(make_model_dir(folder))).manager
        self.templates = ChatTemplates(TemplateFiles({"default": "hello"}))

    def check(self, route: str, limits: RequestLimits, fields: dict[str, Any]) -> SamplingParams:
        """Sampling parameters of a request with these, as they would be sent."""
        self._manager.limits = limits
        checked: CheckedRequest
        if route == "generate":
            checked = check_generate_request({"text": "hello", "sampling_params": fields}, limits)
        elif route == "completions":
            body = CompletionRequest(prompt="hello", **fields)
            checked = Completion(self._manager, body, "m")._checked
        else:
            body = msgspec.convert({"messages": MESSAGES, **fields}, ChatCompletionRequest)
            checked = ChatCompletion(
                self._manager, ChatSettings(self.templates), body, "m"
            )._checked
        return checked.prompts[0].sampling_params
