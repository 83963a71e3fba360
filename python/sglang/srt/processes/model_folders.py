"""Turns names of models in flags into folders, once, before any process starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from sglang.srt.flag_values import as_flag
from sglang.srt.hub_models import MAIN, NAME, REVISION, HubModel, file_names
from sglang.srt.model_config import ModelPathError, resolve_model_path
from sglang.srt.model_files import CONFIG, PICKLED, TOKENIZERS, weight_names
from sglang.srt.pickled_weights import converted
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MODEL, TOKENIZER, DRAFT = "model_path", "tokenizer_path", "speculative_draft_model_path"
DUMMY = "dummy"


@dataclass(frozen=True)
class ModelFolders:
    """Holds what the flags name, as folders that have at least configs and tokenizers.

    Attributes:
        args: the flags with these folders.
        hub: by field of `args`, what comes from the hub.
    """

    args: ServerArgs
    hub: Mapping[str, HubModel]

    @classmethod
    def find(cls, args: ServerArgs) -> ModelFolders:
        """Looks for folders, then in the cache of the hub, then at the hub.

        Raises:
            ModelPathError: if there is no such model; the text names the flag and the remedy.
        """
        _check_revisions(args)
        has_own = bool(args.tokenizer_path) or args.skip_tokenizer_init
        tokenizer = () if has_own else (TOKENIZERS,)
        tokenizer_revision = args.revision if args.tokenizer_path == args.model_path else None
        folders: dict[str, Any] = {}
        hub: dict[str, HubModel] = {}
        for field, path, revision, needed in (
            (MODEL, args.model_path, args.revision, ((CONFIG,), *tokenizer)),
            (TOKENIZER, args.tokenizer_path, tokenizer_revision, (TOKENIZERS,)),
            (
                DRAFT,
                args.speculative_draft_model_path,
                args.speculative_draft_model_revision,
                ((CONFIG,),),
            ),
        ):
            if path is not None:
                found = _local_or_hub(path, as_flag(field), revision, args.download_dir)
                if isinstance(found, HubModel):
                    hub[field] = found
                    found = found.folder(needed)
                elif revision not in (None, MAIN):
                    logger.warning("Revision %s has no effect: %s is a folder.", revision, found)
                folders[field] = str(found)
        name = args.served_model_name or args.model_path
        return cls(replace(args, served_model_name=name, **folders), hub)

    def with_weights(self) -> ServerArgs:
        """Fetches what weights are missing, and converts those of a draft model that are pickled.

        Raises:
            ModelPathError: if they are not to be had; the text names the flag and the remedy.
        """
        draft = self.args.speculative_draft_model_path
        if self.args.load_format == DUMMY:
            return self.args
        for field, path in ((MODEL, self.args.model_path), (DRAFT, draft)):
            if path is not None and field in self.hub:
                self.hub[field].fetch_weights(Path(path), pickled_too=field == DRAFT)
        if draft is None or not _is_pickled(Path(draft)):
            return self.args
        logger.info("%s %s is converted to safetensors, if it is not yet.", as_flag(DRAFT), draft)
        try:
            folder = converted(Path(draft))
        except ModelPathError as error:
            raise ModelPathError(f"{as_flag(DRAFT)}: {error}") from None
        return replace(self.args, speculative_draft_model_path=str(folder))


def _check_revisions(args: ServerArgs) -> None:
    for flag, revision in (
        ("--revision", args.revision),
        ("--speculative-draft-model-revision", args.speculative_draft_model_revision),
    ):
        if revision is not None and not REVISION.fullmatch(revision):
            raise ModelPathError(
                f"{flag} {revision!r} is no branch, tag or commit; leave it out for {MAIN!r}."
            )


def _local_or_hub(path: str, flag: str, revision: str | None, cache: str | None) -> Path | HubModel:
    """Finds a folder, or takes the path for a name of the hub.

    Raises:
        ModelPathError: for a path that is neither a folder nor may be a name of the hub.
    """
    try:
        return resolve_model_path(path, flag)
    except ModelPathError:
        if os.path.lexists(os.path.expanduser(path)):
            raise
        if NAME.fullmatch(path):
            return HubModel(
                flag=flag,
                name=path,
                revision=revision or MAIN,
                cache=None if cache is None else Path(os.path.expanduser(cache)),
            )
        raise ModelPathError(
            f"{flag} {path!r} is neither a directory nor a name of the Hugging Face hub"
            " (OWNER/NAME)."
        ) from None


def _is_pickled(folder: Path) -> bool:
    """Tells whether a folder has pickled weights alone."""
    names = file_names(folder)
    return bool(matching(names, PICKLED)) and not weight_names(folder, names)[0]
