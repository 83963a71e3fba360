"""The errors of flags that cannot be met."""

from __future__ import annotations


class ConfigError(ValueError):
    """A flag that cannot be met on this machine or with this model."""


class Refusal(ConfigError):
    """Refuses a flag in one line: `FLAG PROBLEM; REMEDY.`

    Attributes:
        flag: as on a command line, with its value where that is what is wrong.
        problem: a predicate of it.
        remedy: what to do instead, in the imperative.
    """

    def __init__(self, flag: str, problem: str, remedy: str) -> None:
        super().__init__(f"{flag} {problem}; {remedy}.")
        self.flag, self.problem, self.remedy = flag, problem, remedy
