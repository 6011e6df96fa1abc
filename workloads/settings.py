"""Settings: each is declared in one place, and everything else asks its declaration.

    class ProductParameters(WorkloadParameters):
        size: int = setting(256, role="work", ge=1, description="Rows and columns of the matrix.")
        tiled: bool = setting(False, role="choice", description="Multiply in tiles.")

``setting`` is pydantic's ``Field`` with roles; limits (``ge``, ``pattern``, …) go to ``Field`` as
they are. Every setting has exactly one role (``work`` and ``choice`` are settings of theirs):

    work     what is computed. Rows with unequal values are never ranked against each other.
    choice   how the same work is done. Rows with unequal values are ranked together; the label of a
             row and the effects of a report tell them apart.
    neutral  changes nothing that is measured.

What else a declaration may say:

    loads         jobs with unequal values cannot share a loaded model
    loads_with    another setting: where this one is not its default, jobs with unequal values of
                  that one cannot share a loaded model either
    length        a size: more of it takes longer, and is the same work but for that
    produces      the kind of thing (``adapter``) that a job saves under the name it is set to
    consumes      the kind of thing whose name it takes: the job waits for the one that produces it
    renamed       values of earlier versions and what they are called now; grids may still say
                  them, and job ids keep them
    also_called   what others call a value, and the value: for the message that refuses the former
    always_in_id  part of every job id. Without it a setting enters a job's id only where it
                  differs from its default, so that a new setting changes no id of older rows; its
                  default may not change later. Settings of version 0.1.0 have it.

A setting that was removed stays declared, under ``removed`` of the model that had it: rows of
earlier versions show it, and a grid that says it at its default is read as before.

A setting without a role does not import. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

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
    loads_with: str = ""
    length: bool = False
    produces: str = ""
    consumes: str = ""
    always_in_id: bool = False
    renamed: tuple[tuple[str, str], ...] = ()  # values: the old name, the new one
    also_called: tuple[tuple[str, str], ...] = ()  # others' name of a value, the value
    instead: str = ""  # of a setting that was removed: what a grid writes in its place

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise TypeError(f"role {self.role!r} of a setting is none of {', '.join(ROLES)}")

    def __call__(self, schema: dict[str, Any]) -> None:
        """Add nothing: pydantic calls this with the JSON schema that it has made of a field."""

    def current(self, value: Value) -> Value:
        """The value under the name it has now."""
        if not self.renamed:
            return value
        return next((new for old, new in self.renamed if old == value), value)

    def is_default(self, value: Value) -> bool:
        """Tell if this is the default; 1, 1.0 and True are three values."""
        return type(value) is type(self.default) and bool(value == self.default)

    def enters_id(self, value: Value) -> bool:
        """Tell if a job's id says that the setting has this value."""
        return self.always_in_id or not self.is_default(value)

    def value_in_id(self, value: Value) -> Value:
        """The value as job ids spell it: under its first name."""
        return next((old for old, new in self.renamed if new == value), value)


def setting(
    default: Any = ...,
    *,
    role: Role,
    description: str,
    loads: bool = False,
    loads_with: str = "",
    length: bool = False,
    produces: str = "",
    consumes: str = "",
    always_in_id: bool = False,
    renamed: Mapping[str, str] | None = None,
    also_called: Mapping[str, str] | None = None,
    **limits: Any,
) -> Any:
    """A field of a ``Settings`` model; the module's docstring says what the arguments mean.

    Raises:
        TypeError: no such role, or a limit that pydantic's ``Field`` does not have.
    """
    declaration = Declaration(
        role=role,
        description=description,
        default=default,
        loads=loads,
        loads_with=loads_with,
        length=length,
        produces=produces,
        consumes=consumes,
        always_in_id=always_in_id,
        renamed=tuple((renamed or {}).items()),
        also_called=tuple((also_called or {}).items()),
    )
    return Field(default, description=description, json_schema_extra=declaration, **limits)


#: A setting of role work that says how much of it there is: 1 or more.
amount = partial(setting, role="work", length=True, ge=1)

work: Callable[..., Any] = partial(setting, role="work")
choice: Callable[..., Any] = partial(setting, role="choice")


class Settings(BaseModel):
    """Base of all models of settings: no unknown names, no guessing of types, immutable.

    The validator of a model is built when it is first needed: a grid uses few of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    #: Settings that an earlier version had here. None of them is also a setting of today.
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
    """The settings that earlier versions had in a model or in those it is made of, by name."""
    classes = (base for base in reversed(model.__mro__) if issubclass(base, Settings))
    return MappingProxyType({n: d for base in classes for n, d in base.removed.items()})


class WorkloadParameters(Settings):
    """Base of the parameters of all workloads (``workloads/settings.py``)."""

    threads: int | None = setting(
        None,
        role="choice",
        ge=1,
        le=4096,
        description="Threads that each of the job's processes computes with on its host's "
        "processor. Left out: an even share of the host's cores among its cards, on a CPU card of "
        "all cores but one.",
    )


#: Of text generation, and of checks of what an engine writes.
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
