"""Finds models of the Hugging Face hub by name: in the local cache first, else by a download.

Files come in two steps: config, tokenizer and chat templates, then weights. So a model that cannot
be served is refused before its weights are fetched. No other file is, above all no code.
"""

from __future__ import annotations

import errno
import glob
import logging
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from functools import partial
from pathlib import Path

from sglang.srt.model_config import ModelPathError
from sglang.srt.model_files import PICKLED, is_small_file, weight_names, why_no_weights

logger = logging.getLogger(__name__)

NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,255}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
PART = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")
MAIN = "main"
LISTING_TIMEOUT_S = 10.0
MAX_REASON_CHARS = 200
NOT_WRITTEN = (errno.EACCES, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS)
WEIGHTS = "its weights"
HTTP_LIBRARIES = ("httpx", "httpx2")  # of the hub's library, by its version

Choice = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the hub, as flags name it.

    Attributes:
        flag: what names it.
        name: OWNER/NAME.
        revision: branch, tag or commit.
        cache: folder of the cache; None for the one that HF_HUB_CACHE or HF_HOME names.
    """

    flag: str
    name: str
    revision: str = MAIN
    cache: Path | None = None

    def folder(self, needed: Collection[Sequence[str]]) -> Path:
        """Finds the model's small files; their folder may hold the weights too.

        Args:
            needed: patterns of names. Where no file matches one of each, the hub is asked.

        Raises:
            ModelPathError: if the files are not to be had; the text names the remedy.
        """
        folder = self._cached()
        missing = []
        if folder is not None:
            names = file_names(folder)
            missing = [any_of[0] for any_of in needed if not _match(names, any_of)]
            if not missing:
                return folder
        return self._download(self.revision, self._choose_small_files, missing)

    def fetch_weights(self, folder: Path, *, pickled_too: bool) -> None:
        """Downloads the weights, as far as the folder with the small files lacks them.

        Args:
            pickled_too: takes pickled ones where there are no others.

        Raises:
            ModelPathError: if they are not to be had; the text names the remedy.
        """
        choose = partial(_choose_weights, folder, pickled_too)
        if missing := _missing(choose, file_names(folder)):
            self._download(folder.name, partial(self._choose_some, choose), missing)
        if missing := _missing(choose, file_names(folder)):
            raise self._refusal("the hub has no such file", missing)

    def _cached(self) -> Path | None:
        """Finds the folder in the cache, in which files may be missing; None if there is none."""
        storage = self._cache() / f"models--{self.name.replace('/', '--')}"
        try:
            commit = (storage / "refs" / self.revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = self.revision
        folder = storage / "snapshots" / commit
        return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None

    def _cache(self) -> Path:
        from huggingface_hub import constants

        return self.cache or Path(constants.HF_HUB_CACHE)

    def _choose_small_files(self, names: Sequence[str]) -> Sequence[str]:
        found = [name for name in names if is_small_file(name)]
        if not found:
            raise ModelPathError(f"{self.flag} {self.name!r} has no config and no tokenizer.")
        return found

    def _choose_some(self, choose: Choice, names: Sequence[str]) -> Sequence[str]:
        at_top = [name for name in names if "/" not in name]
        found = choose(at_top)
        if not found:
            raise ModelPathError(
                f"{self.flag} {self.name!r} has no *.safetensors file with the model's weights;"
                f" {why_no_weights(at_top)}, or use --load-format dummy."
            )
        return found

    def _download(self, revision: str, choose: Choice, missing: Sequence[str]) -> Path:
        """Downloads what `choose` takes of the names of all files; returns their folder.

        Args:
            missing: what a copy in the cache lacks; empty without one.
        """
        from huggingface_hub import HfApi, constants, snapshot_download

        if constants.HF_HUB_OFFLINE:
            raise self._refusal("HF_HUB_OFFLINE is set", missing)
        for library in HTTP_LIBRARIES:  # each would write a line per request
            logging.getLogger(library).setLevel(logging.WARNING)
        try:
            info = HfApi().model_info(self.name, revision=revision, timeout=LISTING_TIMEOUT_S)
            chosen = choose([file.rfilename for file in info.siblings or ()])
            logger.info("Downloading %s to %s: %s", self.name, self._cache(), ", ".join(chosen))
            patterns = [glob.escape(name) for name in chosen]
            folder = snapshot_download(
                self.name, revision=revision, cache_dir=self._cache(), allow_patterns=patterns
            )
        except ModelPathError:
            raise
        except Exception as error:  # noqa: BLE001 - of several libraries; a start ends in one line
            raise self._refusal(_reason(error), missing) from None
        return Path(folder)

    def _refusal(self, reason: str, missing: Sequence[str]) -> ModelPathError:
        cached = f"in the cache {self._cache()}"
        lack = f"its copy {cached} lacks {_first_of(missing)}" if missing else f"not {cached}"
        revision = "" if self.revision == MAIN else f" --revision {self.revision}"
        return ModelPathError(
            f"{self.flag} {self.name!r} is no folder here, {lack}, and {reason}. Where there is a"
            f" network, `hf download {self.name}{revision} --local-dir DIR` gets it; then"
            f" {self.flag} DIR."
        )


def file_names(folder: Path) -> list[str]:
    """Lists the names of what is a file in a folder, or a link to one."""
    return [path.name for path in folder.iterdir() if path.is_file()]


def _match(names: Sequence[str], patterns: Iterable[str]) -> bool:
    return any(matching(names, pattern) for pattern in patterns)


def _choose_weights(folder: Path, pickled_too: bool, names: Sequence[str]) -> Sequence[str]:
    return weight_names(folder, names)[0] or (matching(names, PICKLED) if pickled_too else [])


def _missing(choose: Choice, present: Sequence[str]) -> list[str]:
    """Names what is missing of the weights: as an index says, or the names of the parts."""
    chosen = choose(present)
    expected = {part for name in chosen for part in _all_parts(name)}
    return sorted(expected.difference(present)) if chosen else [WEIGHTS]


def _all_parts(name: str) -> list[str]:
    if not (match := PART.fullmatch(name)):
        return [name]
    stem, count, suffix = match.groups()
    return [f"{stem}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _reason(error: Exception) -> str:
    """Says why a download failed, and what can be done here."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "its authors ask for a login: accept their terms on its page, and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "the hub knows no such model, or shows it only to who sets HF_TOKEN"
        case errors.RevisionNotFoundError():
            return "the hub has no such revision of it"
    text = textwrap.shorten(str(error), MAX_REASON_CHARS, placeholder=" ...").rstrip(".")
    if isinstance(error, OSError) and error.errno in NOT_WRITTEN:
        return f"it cannot be written there ({text}): --download-dir names another cache"
    return f"it cannot be downloaded ({type(error).__name__}: {text})"
