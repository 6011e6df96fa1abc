"""Declarations of settings. Imports neither torch nor Ray.

    class ProductParameters(WorkloadParameters):
        size: int = setting(256, role="work", ge=1, description="Rows and columns of the matrix.")
        tiled: bool = setting(False, role="choice", description="Multiply in tiles.")

``setting`` is pydantic's ``Field`` (limits such as ``ge`` are passed on) with one required role:

    work     what is computed: rows with unequal values are never ranked against each other
    choice   how it is computed: rows are ranked together; labels and effects distinguish them
    neutral  does not affect what is measured

Optional:

    loads         jobs with unequal values cannot share a loaded model
    length        a size that only makes the same work longer
    produces      kind of product (``adapter``) that a job saves under this name
    consumes      kind of product named here: the job waits for the one that produces it
    renamed       old values and their new names; grids may use them, and job ids keep them
    also_called   others' names of values, for the message that refuses them
    always_in_id  in every job id (settings of 0.1.0). Others enter an id only where they differ
                  from their default, which therefore must never change.

Removed settings stay declared under ``removed``: old rows show them, and grids may set the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Role = Literal["work", "choice", "neutral"]
Value = str | int | float | bool | None

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Declaration of a setting, besides its type and limits."""

    role: Role
    description: str
    default: Any = ...  # ``...``: it has none
    loads: bool = False
    length: bool = False
    produces: str = ""
    consumes: str = ""
    always_in_id: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)  # old name of a value -> new one
    also_called: Mapping[str, str] = field(default_factory=dict)  # others' name -> the value
    instead: str = ""  # replacement for a removed setting

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise TypeError(f"role {self.role!r} of a setting is none of {', '.join(ROLES)}")

    def __call__(self, schema: dict[str, Any]) -> None:
        """Leave the JSON schema that pydantic passes here unchanged."""

    def current(self, value: Value) -> Value:
        """Return the value under its current name."""
        return self.renamed.get(value, value) if isinstance(value, str) else value

    def is_default(self, value: Value) -> bool:
        """Tell if this is the default; 1, 1.0 and True are three values."""
        return type(value) is type(self.default) and bool(value == self.default)

    def enters_id(self, value: Value) -> bool:
        """Tell if this value is part of a job's id."""
        return self.always_in_id or not self.is_default(value)

    def value_in_id(self, value: Value) -> Value:
        """The value as job ids spell it: under its first name."""
        return next((old for old, new in self.renamed.items() if new == value), value)


_TRAITS = frozenset(one.name for one in fields(Declaration))


def setting(default: Any = ..., **options: Any) -> Any:
    """Declare a field by a ``Declaration``'s fields and pydantic's limits (see the module
    docstring); TypeError without a description, for an unknown role or limit."""
    traits = {name: options.pop(name) for name in _TRAITS & options.keys()}
    made = Declaration(default=default, **traits)
    return Field(default, description=made.description, json_schema_extra=made, **options)


#: An amount of work: 1 or more.
amount = partial(setting, role="work", length=True, ge=1)

work: Callable[..., Any] = partial(setting, role="work")
choice: Callable[..., Any] = partial(setting, role="choice")
neutral: Callable[..., Any] = partial(setting, role="neutral")
#: A choice that a loaded model is made for, as those of engines are.
load_choice: Callable[..., Any] = partial(choice, loads=True)

#: The same in every job id, as the settings of 0.1.0 are.
work_in_id = partial(work, always_in_id=True)
choice_in_id = partial(choice, always_in_id=True)
neutral_in_id = partial(neutral, always_in_id=True)
amount_in_id = partial(amount, always_in_id=True)


class Settings(BaseModel):
    """Base of all models of settings: strict, immutable, validators built on first use."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    #: Settings of earlier versions; never also a current one.
    removed: ClassVar[Mapping[str, Declaration]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        super().__pydantic_init_subclass__(**arguments)
        for name, info in cls.model_fields.items():
            if not isinstance(info.json_schema_extra, Declaration):
                raise TypeError(
                    f"setting {name} of {cls.__module__}.{cls.__qualname__} has no role; write "
                    f'`{name}: … = setting(default, role="work", description="…")`, where the role '
                    f"is {', '.join(ROLES)} (workloads/settings.py says what each means)"
                )


@cache
def declarations(model: type[Settings]) -> Mapping[str, Declaration]:
    """The declaration of every setting of a model, by name, in its order."""
    return MappingProxyType(
        {
            name: info.json_schema_extra
            for name, info in model.model_fields.items()
            if isinstance(info.json_schema_extra, Declaration)
        }
    )


@cache
def removed_settings(model: type[Settings]) -> Mapping[str, Declaration]:
    """Removed settings of a model and its bases, by name."""
    classes = (base for base in reversed(model.__mro__) if issubclass(base, Settings))
    return MappingProxyType({n: d for base in classes for n, d in base.removed.items()})


#: ``software`` of a job that runs with the node's own packages.
DEFAULT_SOFTWARE = "default"
_PIN = r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*"


def _pinned(software: str) -> str:
    """Refuse what is not sealed: another day it could be other packages under the same id."""
    if re.fullmatch(rf"{DEFAULT_SOFTWARE}|{_PIN}( {_PIN})*", software) is None:
        raise ValueError("write default, or NAME==VERSION, several with one space between them")
    return software


class WorkloadParameters(Settings):
    """Base of the parameters of all workloads (``workloads/settings.py``)."""

    software: Annotated[str, AfterValidator(_pinned)] = setting(
        DEFAULT_SOFTWARE,
        role="choice",
        loads=True,
        description="Packages in other versions than the node's, NAME==VERSION, several with a "
        "space between them: each node installs them once, and what must change with them, in a "
        "layer over its own (docs/grids.md).",
    )

    threads: int | None = setting(
        None,
        role="choice",
        ge=1,
        le=4096,
        description="Threads that each of the job's processes computes with on its host's "
        "processor. Left out: an even share of the host's cores among its cards, on a CPU card of "
        "all cores but one.",
    )


#: Setting of text generation and of checks of its output.
ADAPTER = setting(
    None,
    role="work",
    loads=True,
    consumes="adapter",
    always_in_id=True,
    min_length=1,
    description="A trained adapter to put on the model, not merged: the name that a "
    "fine-tuning job gave it (save_adapter), or a directory in peft's layout.",
)
