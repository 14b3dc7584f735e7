"""Values that have a name: built in, added by a program, or offered by an installed package.

Command line, help, errors, tables of the docs and matrices of the tests read the names here and nowhere else.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from shardwright.common.package import FOLDER


class Named(Protocol):
    """A value of a registry."""

    @property
    def name(self) -> str:
        """The name by which configurations and arguments know the value."""

    @property
    def summary(self) -> str:
        """A sentence for the help and the docs: what the value does."""


class ExtensionError(ValueError):
    """A function of a registered value has raised an error, or has returned a value that cannot be used."""


def check_signature(owner: str, function: object, *arguments: str) -> None:
    """Check that a function can be called with these positional arguments. It is not called.

    Args:
        owner: the value and the function's place in it, as in "NamedMemory 'mine': plan".
        function: what is checked. Classes are functions, too. Functions without a readable signature pass.
        arguments: the names of the arguments, for the error message.

    Raises:
        ValueError: not a function, or its parameters do not fit.
    """
    expected = f"a function of {len(arguments)} arguments ({', '.join(arguments)})"
    if len(arguments) < 2:
        expected = (
            f"a function of one argument ({arguments[0]})" if arguments else "a function without arguments"
        )
    if not callable(function):
        raise ValueError(f"{owner}: expected {expected}, found {function!r} ({type(function).__name__})")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a function written in C
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(f"{owner}: expected {expected}, found {name}{signature}: {error}") from None


def call(owner: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a registered value's function.

    Raises:
        ExtensionError: the function has raised an error. The message names ``owner``, the error and its line.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raise ExtensionError(f"{owner} raised {in_words(error)}. Correct this function") from error


def in_words(error: BaseException) -> str:
    """An error's class, message and the line that raised it: the last one outside of installed packages, if any."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in lines if not _is_installed(file)]
    file, number = (own or lines or [("", 0)])[-1]
    where = f" ({os.path.basename(file)}, line {number})" if file else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"


def _is_installed(file: str) -> bool:
    """Whether a file of code belongs to Python, to this package or to another installed one."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {FOLDER, os.path.dirname(os.__file__)}
    return file.startswith(("<", *(f"{folder}{os.sep}" for folder in folders)))


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """The values of one kind.

    A value is known by its name once :meth:`add` has been called with it, or where an installed package declares it as
    an entry point of the group ``shardwright.<plural of what>``. An import path, "my_package.my_module:MY_VALUE",
    needs neither. Its module may lie in the current folder, too, which is searched last.

    Args:
        what: the word for one value, as in error messages.
        plural: the same for several, and the last part of the entry points' group.
        kind: the class of the values.
        builtin: the first of them.
        other_names: by the names that other projects use, in small letters, names of values: for error messages.
    """

    def __init__(
        self,
        what: str,
        plural: str,
        kind: type[T],
        builtin: Iterable[T] = (),
        other_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.other_names = other_names
        self.what = what
        self.group = f"shardwright.{plural}"
        self.kind = kind
        self._values: dict[str, T] = {}
        for value in builtin:
            self.add(value)
        self._builtin = frozenset(self._values)

    def is_value(self, value: object) -> bool:
        """Whether this is a value of the registry's kind."""
        return isinstance(value, self.kind)

    def add(self, value: T) -> T:
        """Make ``value`` known by its name, and return it.

        Raises:
            TypeError: not a value of this kind.
            ValueError: another value has this name, or the name has a colon, as import paths have.
        """
        if not self.is_value(value):
            raise TypeError(
                f"Only a {self.kind.__name__} can be added as a {self.what}, got {type(value).__name__}"
            )
        if not value.name or ":" in value.name:
            raise ValueError(
                f"A {self.what} needs a name without a colon, since a colon marks an import path; got {value.name!r}"
            )
        if self._values.setdefault(value.name, value) != value:
            raise ValueError(f"The {self.what} {value.name!r} already exists. Choose another name")
        return value

    def names(self) -> tuple[str, ...]:
        """All names, the built-in ones first."""
        return (*self._values, *(name for name in self._offered() if name not in self._values))

    def known(self) -> Iterator[T]:
        """The values that are built in or were added: nothing is imported for them."""
        return iter(tuple(self._values.values()))

    def __iter__(self) -> Iterator[T]:
        """All values, the built-in ones first."""
        return map(self.get, self.names())

    def get(self, name: str) -> T:
        """The value of this name, or at this import path.

        Raises:
            ValueError: there is none, it cannot be imported, or it is of another kind.
        """
        if name in self._values:
            return self._values[name]
        if ":" in name:
            module, _, attribute = name.partition(":")
            if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
                raise ValueError(f"{self.what}: expected an import path package.module:NAME, found {name!r}")
            return self._imported(name, EntryPoint(name, f"{module}:{attribute}", self.group))
        if offered := self._offered().get(name):
            value = self._imported(name, offered)
            if value.name != name:
                raise ValueError(f"{self.what} {name!r}: the name of {offered.value} is {value.name!r}")
            return self.add(value)
        near = self.other_name(name) or next(iter(difflib.get_close_matches(name, self.names(), 1)), None)
        raise ValueError(
            f"{self.what}: expected {self.expected()}, found {name!r}"
            + (f"; did you mean {near!r}?" if near else "")
        )

    def other_name(self, name: str) -> str | None:
        """The name here of what another project calls ``name``, as in ShardingStrategy.FULL_SHARD; None: not known."""
        return self.other_names.get(name.lower().rpartition(".")[2].replace("-", "_"))

    def origin(self, name: str) -> str:
        """In words, where the value of this name comes from. Imports nothing."""
        if name in self._builtin:
            return "built in"
        if ":" in name:
            return name
        point = self._offered().get(name)
        if point is None:
            return "added by this program"
        return point.value + (f" of {point.dist.name} {point.dist.version}" if point.dist is not None else "")

    def expected(self) -> str:
        """In words, what :meth:`get` takes."""
        path = "an import path (package.module:NAME)"
        return f"one of {', '.join(names)}, or {path}" if (names := self.names()) else path

    def _offered(self) -> dict[str, EntryPoint]:
        return _entry_points(self.group, tuple(sys.path))

    def _load(self, name: str, point: EntryPoint) -> Any:
        return _load(f"{self.what} {name!r}", point)

    def _imported(self, name: str, point: EntryPoint) -> T:
        value = self._load(name, point)
        if not self.is_value(value):
            found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
            raise ValueError(
                f"{self.what} {name!r}: expected a {self.kind.__name__} at {point.value}, found {found}"
            )
        return value


@functools.cache
def _entry_points(group: str, folders: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Those of the packages in folders of ``sys.path``, whose files take a tenth of a second to read."""
    return {point.name: point for point in entry_points(group=group)}


def import_value(what: str, path: str) -> Any:
    """The value at an import path, "my_package.my_module:name". The current folder is searched last.

    Args:
        what: what the path is for, as in error messages.

    Raises:
        ValueError: it cannot be imported.
    """
    return _load(f"{what} {path!r}", EntryPoint(path, path, ""))


def _load(what: str, point: EntryPoint) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        return point.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        top = point.module.removesuffix(".py").partition(".")[0]
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing and missing != top:
            reason += f". {point.module} imports {missing}: install it"
        elif isinstance(error, AttributeError) and error.obj is sys.modules.get(point.module):
            names = [name for name in vars(error.obj) if not name.startswith("_")]
            near = difflib.get_close_matches(str(error.name), names, 1)
            reason += (
                f"; did you mean {point.module}:{near[0]}?" if near else "; correct the name after the colon"
            )
        elif missing:
            reason += f". Start in the folder that has {top}.py or {top}/, or name that folder in PYTHONPATH"
            if point.module.endswith(".py"):
                reason += f". An import path has no .py: {point.module.removesuffix('.py')}:{point.attr}"
        raise ValueError(f"{what} cannot be imported from {point.value}: {reason}") from error
