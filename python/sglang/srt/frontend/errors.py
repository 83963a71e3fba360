"""The errors that clients are answered with, and how their texts name a field."""

from __future__ import annotations

MAX_NAME_CHARS = 64
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code, which clients look for


class RequestError(ValueError):
    """A client's mistake.

    Attributes:
        field: name of the wrong field, as the client wrote it; None for the body as a whole.
        message: one sentence, safe to show: it never holds more than a name of the input.
        code: the code by which clients recognize this kind of mistake; None: the status code.
    """

    def __init__(
        self,
        field: str | None,
        message: str,
        status_code: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.status_code = status_code
        self.code = code

    def in_terms(self, field: str | None, message: str) -> RequestError:
        """Returns the same error in terms of a body with other names."""
        return RequestError(field, message, self.status_code, self.code)


class ServiceError(RuntimeError):
    """The server cannot answer, and the request is not the reason.

    Attributes:
        status_code: 503 if trying again, here or elsewhere, can help; 500 otherwise.
    """

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code


def field_error(field: str | None, reason: str, code: str | None = None) -> RequestError:
    """Makes the error "field: reason."."""
    return RequestError(field, f"{field}: {reason}." if field else f"{reason}.", code=code)


def shorten(name: str) -> str:
    """Returns a client's own name for something, printable and cut to a length that fits a
    message."""
    printable = "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME_CHARS])
    return printable + ("..." if len(name) > MAX_NAME_CHARS else "")
