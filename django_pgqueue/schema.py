"""
What a payload must look like: ``Queue("orders", schema=Order)``.

A schema turns what is published into JSON, and JSON into what a handler gets. It is made of what the project gives:
a type that pydantic or msgspec knows (neither is needed otherwise), a function, or a pair of functions.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast, get_origin, is_typeddict

from django_pgqueue.exceptions import PayloadError

if TYPE_CHECKING:
    # Only there can it have a default, on the oldest Python: a bare `Message` is a `Message[Any]`.
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P")


class Schema(Protocol[P]):
    """
    A pair of functions. Any object that has both may be given as ``schema=``.

    What they raise, a ``ValueError`` at best, says why a payload does not fit.
    """

    def dump(self, payload: P, /) -> Any:
        """Return the JSON value that is stored for a payload. Called by publish."""

    def load(self, value: Any, /) -> P:
        """Return the payload that a stored JSON value stands for. Called before a message is handled."""


class Validation(Generic[P]):
    """A schema as the queue uses it: what does not fit is a ``PayloadError`` that says where."""

    def __init__(self, schema: Schema[P]) -> None:
        self._schema = schema

    def dump(self, payload: P, root: str = "$") -> Any:
        """Return the JSON value to publish."""
        return self._checked(self._schema.dump, payload, root)

    def dump_many(self, payloads: Iterable[P]) -> list[Any]:
        """Return the JSON values to publish. The path of what does not fit starts with its position."""
        return [self.dump(payload, f"[{position}]") for position, payload in enumerate(payloads)]

    def load(self, value: Any) -> P:
        """Return the payload to handle."""
        return cast(P, self._checked(self._schema.load, value, "$"))

    def _checked(self, function: Callable[[Any], Any], value: Any, root: str) -> Any:
        try:
            return function(value)
        except PayloadError as error:
            raise PayloadError(error.reason, error.path.replace("$", root, 1)) from None
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
            raise PayloadError(text, root) from error


def validation_of(schema: Any) -> Validation[Any]:
    """
    Return the schema that a project means.

    Raises ``ValueError`` for what is none, ``ImportError`` for a type that needs pydantic or msgspec where neither is
    installed.
    """
    if not isinstance(schema, type) and callable(getattr(schema, "dump", None)) and callable(schema.load):
        return Validation(schema)
    if is_type(schema):
        return Validation(schema_of_type(schema))
    if callable(schema) and not inspect.iscoroutinefunction(schema):
        return Validation(FunctionSchema(schema))
    raise ValueError(f"schema must be a type, a function, or have dump() and load(), not {schema!r:.80}")


def is_type(schema: object) -> bool:
    return isinstance(schema, type) or get_origin(schema) is not None or is_typeddict(schema)


def schema_of_type(schema: Any) -> Schema[Any]:
    """Return what pydantic or msgspec makes of a type: each its own classes, pydantic first what both know."""
    if hasattr(schema, "__struct_fields__"):
        return MsgspecSchema(schema)
    if find_spec("pydantic"):
        return PydanticSchema(schema)
    if find_spec("msgspec"):
        return MsgspecSchema(schema)
    raise ImportError(
        f"schema={schema!r:.80} is a type, which needs pydantic or msgspec; without them give a function,"
        " or an object with dump() and load()"
    )


@dataclasses.dataclass(frozen=True)
class FunctionSchema:
    """A function that takes the JSON value: at a publish it only checks, its result is what is handled."""

    function: Callable[[Any], Any]

    def dump(self, payload: Any) -> Any:
        # It may change what it is given.
        self.function(copy.deepcopy(payload))
        return payload

    def load(self, value: Any) -> Any:
        return self.function(value)


class PydanticSchema:
    """Whatever pydantic validates: a model, a dataclass, a TypedDict, ``list[int]``."""

    def __init__(self, schema: Any) -> None:
        from pydantic import TypeAdapter

        self._adapter: Any = TypeAdapter(schema)

    def dump(self, payload: Any) -> Any:
        payload = self._checked(self._adapter.validate_python, payload)
        # An instance of the type pydantic takes unseen, but not what becomes of it.
        value = self._adapter.dump_python(payload, mode="json", by_alias=True, warnings=False)
        return coming_back(value, payload, self.load(value))

    def load(self, value: Any) -> Any:
        # As JSON: a strict type takes text for a date from there alone.
        return self._checked(self._adapter.validate_json, json.dumps(value))

    def _checked(self, validate: Callable[[Any], Any], value: Any) -> Any:
        from pydantic import ValidationError

        try:
            return validate(value)
        except ValidationError as error:
            # Its own text quotes what was given.
            first = error.errors(include_url=False, include_input=False)[0]
            raise PayloadError(first["msg"], path_of(first["loc"])) from None


class MsgspecSchema:
    """Whatever msgspec converts: a Struct, a dataclass, a TypedDict, ``list[int]``."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def dump(self, payload: Any) -> Any:
        from msgspec import to_builtins

        value = to_builtins(payload, str_keys=True)
        loaded = self.load(value)
        # A dict stands for what the type makes of it.
        return value if isinstance(payload, dict) else coming_back(value, payload, loaded)

    def load(self, value: Any) -> Any:
        from msgspec import ValidationError, convert

        try:
            return convert(value, self._schema)
        except ValidationError as error:
            text, _, path = str(error).partition(" - at ")
            raise PayloadError(text, path.strip("`") or "$") from None


def coming_back(value: Any, payload: Any, loaded: Any) -> Any:
    """Return the JSON of a payload. Raises ``PayloadError`` where a handler would get something else."""
    # What compares by identity alone never comes back as it was.
    is_comparable = any("__eq__" in vars(base) for base in type(payload).__mro__[:-1])
    if is_comparable and loaded != payload:
        raise PayloadError(f"{type(payload).__name__} would not come back from JSON as it is")
    return value


def path_of(steps: tuple[int | str, ...]) -> str:
    """Return pydantic's place of an error as a JSON path."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def misfit(error: BaseException) -> str:
    """Return why a stored payload does not fit, for its history."""
    return f"schema: {error if isinstance(error, PayloadError) else type(error).__name__}"
