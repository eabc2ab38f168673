"""The functions of the program: handlers of messages, and hooks that run around them.

The annotation of a handler's first parameter decides what it gets. `Message` (or none at all) is
the message; any other type is the payload, decoded and checked: a msgspec struct, a dataclass, a
`TypedDict`, a pydantic model, or a plain type. A second parameter is the message beside the
payload. With `batches` both are lists, and the type is that of an item: `list[Order]`. The last
parameter of a consumer with state is the state.

A hook is a generator. The code before `yield` runs before the call, the code after it runs after
the call. An exception of the handler is raised at the `yield`. Async generators run in the event
loop, plain ones too, so they must not block for long.
"""

import contextvars
import inspect
import typing
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import msgspec
import msgspec.inspect

from penstock.client.messages import Received
from penstock.errors import InvalidRequest

Handler = Callable[..., Any]
Hook = Callable[..., AbstractAsyncContextManager[Any]]
Decode = Callable[[bytes], Any]


class Misfit(Exception):
    """A payload that does not fit the handler's type. The text says where."""


class BoundHandler:
    """A handler and the arguments that it takes."""

    def __init__(self, function: Handler, *, batches: bool, stateful: bool = False) -> None:
        self.function = function
        self.threaded = not inspect.iscoroutinefunction(function)
        self._batches = batches
        wanted = _parameters(function)
        if stateful:
            if len(wanted) < 2:
                raise InvalidRequest(
                    f"{_name(function)} takes {len(wanted)} arguments: the last one of a consumer "
                    "with state is the state"
                )
            wanted.pop()
        self._with_message = len(wanted) > 1
        self._decode = _decoder(wanted[0] if wanted else Any, batches, function)
        if self._with_message and self._decode is None:
            raise InvalidRequest(
                f"{_name(function)} takes {len(wanted)} arguments: a consumer's function takes the "
                "message, or the payload by its type and the message"
            )

    def payload(self, message: Received) -> Any:
        """Return the handler's argument for a message. Raises `Misfit` if it does not fit."""
        if self._decode is None:
            return message
        return self._decode(bytes(message.raw))

    async def call(
        self,
        payloads: Sequence[Any],
        messages: Sequence[Received],
        threads: ThreadPoolExecutor | None,
        *more: Any,
    ) -> None:
        """Run the handler with these arguments and `more`, in a thread when it is not async."""
        arguments: list[Any] = [list(payloads) if self._batches else payloads[0]]
        if self._with_message:
            arguments.append(list(messages) if self._batches else messages[0])
        arguments += more
        if threads is None:
            await self.function(*arguments)
            return
        context = contextvars.copy_context()
        result = await get_running_loop().run_in_executor(
            threads, context.run, _call, self.function, arguments
        )
        if isinstance(result, Awaitable):
            await result


def _call(function: Handler, arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except StopIteration as error:  # a future cannot carry one: the worker would wait forever
        raise RuntimeError("the handler raised StopIteration") from error


def _parameters(function: Handler) -> list[Any]:
    """Return the types of the required arguments, `Any` for those without an annotation."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a builtin
        return [Any]
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        if any(parameter.annotation is not parameter.empty for parameter in parameters):
            raise InvalidRequest(
                f"the annotations of {_name(function)} cannot be read: {error}. Types that a "
                "consumer decodes are defined at the top of a module"
            ) from error
        hints = {}
    return [
        hints.get(parameter.name, Any)
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]


def _decoder(wanted: Any, batches: bool, function: Handler) -> Decode | None:
    """Return a decoder of the payload's JSON, or None if the handler takes the message."""
    if batches and typing.get_origin(wanted) in (list, Sequence):
        (wanted,) = typing.get_args(wanted)
    elif batches and wanted not in (Any, list):
        raise InvalidRequest(
            f"with batches=True {_name(function)} gets a list: annotate it as list[...]"
        )
    if wanted in (Any, object, list if batches else None):
        return None
    if isinstance(wanted, type) and issubclass(wanted, Received):
        return None
    name = getattr(wanted, "__name__", str(wanted))
    validate = getattr(wanted, "model_validate_json", None)  # a pydantic model
    try:
        decode = validate or msgspec.json.Decoder(wanted).decode
    except TypeError as error:
        raise InvalidRequest(f"payloads cannot be decoded as {name}: {error}") from error
    if not validate and isinstance(msgspec.inspect.type_info(wanted), msgspec.inspect.CustomType):
        raise InvalidRequest(
            f"payloads cannot be decoded as {name}: use a msgspec struct, a dataclass or a pydantic"
            " model"
        )

    def checked(text: bytes) -> Any:
        try:
            return decode(text)
        except ValueError as error:  # of msgspec and of pydantic alike
            raise Misfit(f"the payload does not fit {name}: {error}") from error

    return checked


def _name(function: Handler) -> str:
    return getattr(function, "__qualname__", repr(function))


def hook_of(function: Callable[..., Any]) -> Hook:
    """Return the context manager that a generator function makes."""
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function)
    if not inspect.isgeneratorfunction(function):
        raise InvalidRequest(f"{function.__qualname__} has no yield: a hook is a generator")
    plain = contextmanager(function)

    @asynccontextmanager
    async def in_loop(*arguments: Any) -> AsyncIterator[Any]:
        with plain(*arguments) as value:
            yield value

    return in_loop
