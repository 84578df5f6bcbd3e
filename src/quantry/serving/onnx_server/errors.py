"""What a client, or whoever started the server, is told when something cannot be done."""

from typing import Any

Json = dict[str, Any]


class RefusedError(Exception):
    """A request that is answered with an error, as OpenAI words it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def to_dict(self) -> Json:
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}


class GoneError(Exception):
    """The client has left, or the server ends."""


class StartError(Exception):
    """What is said, in one line, before the program ends with code 2."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
