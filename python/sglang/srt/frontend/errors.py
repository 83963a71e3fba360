"""The errors that clients are answered with, and how their texts name a field."""

from __future__ import annotations

MAX_NAME_CHARS = 64
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code, which clients look for


class RequestError(ValueError):
    """A client's mistake.

    Attributes:
        field: what is wrong, as the client wrote it; None for the body as a whole.
        message: one sentence, safe to show: it never holds more than a name of the input.
        code: what clients tell this kind of mistake by; None: by its status code.
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
        """Gives the same error, as a body with other names has it."""
        return RequestError(field, message, self.status_code, self.code)


class ServiceError(RuntimeError):
    """The server cannot answer, through no fault of the request.

    Attributes:
        status_code: 503 if trying again, here or elsewhere, can help; 500 otherwise.
    """

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code


def field_error(field: str | None, reason: str, code: str | None = None) -> RequestError:
    """The error "field: reason."."""
    return RequestError(field, f"{field}: {reason}." if field else f"{reason}.", code=code)


def shorten(name: str) -> str:
    """A client's own name for something, printable and cut to a length fit for a message."""
    printable = "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME_CHARS])
    return printable + ("..." if len(name) > MAX_NAME_CHARS else "")
