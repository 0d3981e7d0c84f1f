"""
Schemas of payloads: ``Queue("orders", schema=Order)``.

A schema converts published payloads to JSON, and JSON to the payloads that handlers get. A project gives a type that
pydantic or msgspec supports (neither is required otherwise), a function, or a pair of functions.
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
    # On older Pythons, only this TypeVar supports a default, which makes a bare `Message` a `Message[Any]`.
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P")


class Schema(Protocol[P]):
    """
    A pair of functions. Any object that has both is accepted as ``schema=``.

    Their exception, preferably a ``ValueError``, says why a payload does not match.
    """

    def dump(self, payload: P, /) -> Any:
        """Return the JSON value to store for a payload. Called when a message is published."""

    def load(self, value: Any, /) -> P:
        """Return the payload for a stored JSON value. Called before a message is handled."""


class Validation(Generic[P]):
    """A schema as a queue uses it. Raises ``PayloadError``, with the path, if a payload does not match."""

    def __init__(self, schema: Schema[P]) -> None:
        self._schema = schema

    def dump(self, payload: P, root: str = "$") -> Any:
        """Return the JSON value to publish."""
        return self._checked(self._schema.dump, payload, root)

    def dump_many(self, payloads: Iterable[P]) -> list[Any]:
        """Return the JSON values to publish. The path of a ``PayloadError`` starts with the position."""
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
    Return the ``Validation`` for a project's ``schema`` argument.

    Raises ``ValueError`` if the argument is not a schema, and ``ImportError`` if it is a type and neither pydantic nor
    msgspec is installed.
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
    """Return the schema for a type, from msgspec for its own classes, or else from pydantic if it is installed."""
    if hasattr(schema, "__struct_fields__"):
        return MsgspecSchema(schema)
    if find_spec("pydantic"):
        return PydanticSchema(schema)
    if find_spec("msgspec"):
        return MsgspecSchema(schema)
    raise ImportError(
        f"schema={schema!r:.80} is a type, which requires pydantic or msgspec; without them, use a function,"
        " or an object with dump() and load()"
    )


@dataclasses.dataclass(frozen=True)
class FunctionSchema:
    """A function of the JSON value. A publish only checks the value with it; handlers get the function's result."""

    function: Callable[[Any], Any]

    def dump(self, payload: Any) -> Any:
        # A copy, because the function may change its argument.
        self.function(copy.deepcopy(payload))
        return payload

    def load(self, value: Any) -> Any:
        return self.function(value)


class PydanticSchema:
    """A type that pydantic validates: a model, a dataclass, a TypedDict, ``list[int]``."""

    def __init__(self, schema: Any) -> None:
        from pydantic import TypeAdapter

        self._adapter: Any = TypeAdapter(schema)

    def dump(self, payload: Any) -> Any:
        payload = self._checked(self._adapter.validate_python, payload)
        # pydantic accepts an instance of the type without validating it, so the JSON is validated below.
        value = self._adapter.dump_python(payload, mode="json", by_alias=True, warnings=False)
        return coming_back(value, payload, self.load(value))

    def load(self, value: Any) -> Any:
        # As JSON text, because a strict type accepts text for a date only from JSON.
        return self._checked(self._adapter.validate_json, json.dumps(value))

    def _checked(self, validate: Callable[[Any], Any], value: Any) -> Any:
        from pydantic import ValidationError

        try:
            return validate(value)
        except ValidationError as error:
            # The text of the error itself quotes the input.
            first = error.errors(include_url=False, include_input=False)[0]
            raise PayloadError(first["msg"], path_of(first["loc"])) from None


class MsgspecSchema:
    """A type that msgspec converts: a Struct, a dataclass, a TypedDict, ``list[int]``."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def dump(self, payload: Any) -> Any:
        from msgspec import to_builtins

        value = to_builtins(payload, str_keys=True)
        loaded = self.load(value)
        # A dict is not compared: it is loaded as an instance of the type.
        return value if isinstance(payload, dict) else coming_back(value, payload, loaded)

    def load(self, value: Any) -> Any:
        from msgspec import ValidationError, convert

        try:
            return convert(value, self._schema)
        except ValidationError as error:
            text, _, path = str(error).partition(" - at ")
            raise PayloadError(text, path.strip("`") or "$") from None


def coming_back(value: Any, payload: Any, loaded: Any) -> Any:
    """Return the JSON of a payload. Raises ``PayloadError`` if a handler would get a different payload."""
    # An object that is compared by identity never equals its loaded copy.
    is_comparable = any("__eq__" in vars(base) for base in type(payload).__mro__[:-1])
    if is_comparable and loaded != payload:
        raise PayloadError(f"{type(payload).__name__} would be different after conversion to JSON and back")
    return value


def path_of(steps: tuple[int | str, ...]) -> str:
    """Return the location of a pydantic error as a JSON path."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def misfit(error: BaseException) -> str:
    """Return the reason why a stored payload does not match, for the message's history."""
    return f"schema: {error if isinstance(error, PayloadError) else type(error).__name__}"
