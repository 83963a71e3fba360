"""Handles fields of a body that neither this server nor SGLang knows."""

from __future__ import annotations

import logging

from sglang.srt.frontend.errors import field_error

logger = logging.getLogger(__name__)

MAX_LOGGED_NAMES = 100  # clients choose the names, so the log must not grow with them

NOT_KNOWN = "is not a known field"


class UnknownFields:
    """Refuses unknown fields by name, or leaves them out and logs each name once.

    Safe to use from several threads: at worst a name is logged twice.
    """

    def __init__(self, are_refused: bool) -> None:
        self.are_refused = are_refused
        self._logged: set[str] = set()

    def meet(self, field: str, reason: str = NOT_KNOWN) -> None:
        """Handles an unknown field; `field` is printable and short.

        Raises:
            RequestError: naming it, if it is refused.
        """
        if self.are_refused:
            raise field_error(field, reason)
        if field in self._logged or len(self._logged) >= MAX_LOGGED_NAMES:
            return
        self._logged.add(field)
        logger.warning("A request has the field %r, which %s; it is left out.", field, reason)
        if len(self._logged) == MAX_LOGGED_NAMES:
            logger.warning("Further names of unknown fields are not logged.")


REFUSED = UnknownFields(are_refused=True)
