"""Names that launchers import from SGLang and that stand for nothing here.

The names can be imported, so that a launcher's other parts work, and whoever uses one is told what
to use instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

NO_PARTS = (
    "Each process of a server is started by the server itself: leave the argument out, or hand"
    " this name on as it is."
)


class RefusedName:
    """Stands for a function, class or object that is not here.

    Raises:
        NotImplementedError: with the name and the remedy, when it is called, or an attribute of it
            is read or set.
    """

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_line", f"{name} is not here. {NO_PARTS}")

    def __repr__(self) -> str:
        return f"<{self._line}>"

    def __call__(self, *args: Any, **fields: Any) -> NoReturn:
        raise NotImplementedError(self._line)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # whoever looks at an object asks for these, and may go without
            raise AttributeError(name)
        raise NotImplementedError(self._line)

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotImplementedError(self._line)


# A launcher hands these on to `_launch_subprocesses`.
init_tokenizer_manager = RefusedName("init_tokenizer_manager")
run_scheduler_process = RefusedName("run_scheduler_process")
run_detokenizer_process = RefusedName("run_detokenizer_process")
