"""Former names of methods and parameters. They work for one more release and warn."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
NewName = str | tuple[str, Callable[[Any], Any]]  # with a function that converts the value


def warn_renamed(former: str, name: str, stacklevel: int = 4) -> None:
    """Warn the code that uses the former name, so many calls above."""
    warnings.warn(
        f"{former} is now {name}; the former name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def renamed(**names: NewName) -> Callable[[F], F]:
    """Accept parameters under former names: `@renamed(patience="retry_for")`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if names.keys() & kwargs.keys():
                kwargs = dict(_current(kwargs, names))
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _current(given: dict[str, Any], names: dict[str, NewName]) -> Iterator[tuple[str, Any]]:
    for former, value in given.items():
        name = names.get(former, former)
        if isinstance(name, tuple):
            name, convert = name
            value = convert(value)
        if name != former:
            warn_renamed(f"{former}=", f"{name}=")
        yield name, value


class FormerMethods:
    """Finds methods that moved to `admin`, for one more release."""

    if not TYPE_CHECKING:  # type checkers know the current names only

        def __getattr__(self, name: str) -> Any:
            admin = self.__dict__.get("admin")
            if name.startswith("_") or not inspect.isroutine(getattr(type(admin), name, None)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_renamed(f"client.{name}", f"client.admin.{name}", stacklevel=3)
            return getattr(admin, name)
