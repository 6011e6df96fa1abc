"""Problems of a grid file, each with position and hint; collected without raising."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.core.errors import Problem
from orchestrator.core.job import Accelerator, Job, Parameters
from orchestrator.core.topology import Node, legal_card_sets
from orchestrator.grid.vocabulary import FIELD_NAMES, Vocabulary, explain, shown, suggestion
from orchestrator.grid.yaml import MAX_PROBLEMS, Document, Path_
from orchestrator.util.format import plural
from workloads.base import JobDescription
from workloads.devices import own_devices

if TYPE_CHECKING:
    from orchestrator.grid.parser import Grid

Answer = TypeVar("Answer")
Rule = Callable[[Any, JobDescription], Iterable[Answer]]

_FIELDS = frozenset(field.name for field in fields(JobDescription)) - {"device", "parameters"}


class Rules(Generic[Answer]):
    """Asks a rule about jobs of workloads, by name; no answers for a job of another workload.

    Jobs that share their parameters (one tuple serves thousands) and agree in all fields the rule
    has ever read share one answer: of ten thousand jobs a rule, of about 0.05 ms, sees a hundred.
    """

    def __init__(self, rule: Rule[Answer], workloads: Mapping[str, Any]) -> None:
        self._rule, self._workloads = rule, workloads
        #: By workload and device: the fields that were read, in order, and the answers.
        self._known: dict[
            tuple[str, str], tuple[dict[str, None], dict[Hashable, tuple[Answer, ...]]]
        ] = {}
        self._parameters: dict[int, Parameters] = {}  # by id, which no others get meanwhile

    def answers(self, job: Job, device: str) -> tuple[Answer, ...]:
        """Answers of the rule of the job's workload on a device."""
        spec = self._workloads.get(job.workload)
        if spec is None:
            return ()
        read, known = self._known.setdefault((job.workload, device), ({}, {}))
        number = id(job.parameters)
        key = (number, *[getattr(job, name) for name in read])
        answers = known.get(key)
        if answers is None:
            before = len(read)
            self._parameters[number] = job.parameters
            own = {name: getattr(job, name) for name in _FIELDS}
            description = _Description(device=device, parameters=dict(job.parameters), **own)
            object.__setattr__(description, "read", read)
            answers = tuple(self._rule(spec, description))
            if len(read) > before:
                known.clear()  # their keys lack what is read now
                key = (number, *[getattr(job, name) for name in read])
            known[key] = answers
        return answers


class _Description(JobDescription):
    """A job as rules see it, which notes the fields that they read."""

    __slots__ = ("read",)
    read: dict[str, None]

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            with contextlib.suppress(AttributeError):  # of a copy, for which all was read
                object.__getattribute__(self, "read")[name] = None
        return object.__getattribute__(self, name)


#: Notes of one kind that are written out; others are counted.
MAX_NOTES = 5

_HABITS = {  # what people write, and where it belongs
    "parameters": "write the workload's parameters as settings, beside `name:`",
    "matrix": "the axes of an experiment go under `axes:`",
    "grid": "the axes of an experiment go under `axes:`",
    "sweep": "the axes of an experiment go under `axes:`",
    "jobs": "a grid has `experiments:`",
    "device": f"write `accelerator: {own_devices()[0].accelerator}`, or another kind of card",
    "epochs": "a job trains for `steps:`, each of `batch_size:` samples a card",
    "repeats": "write `measure: {max_repeats: 5}`",
    "deadline": "it is an option of a run: nightgrid run GRID --deadline 08:00",
    "budget": "it is an option of a run: nightgrid run GRID --budget 10h",
    "priority": "it is an option of a run: nightgrid run GRID --priority 5",
    "nodes": "a run takes what its cluster has; on this machine: nightgrid run GRID --emulate 2x8",
}
#: Words of other programs, and the keys that mean the same here.
MEANT = {
    "output_tokens": ("max_new_tokens", "max_tokens"),
    "input_tokens": ("prompt_tokens", "prompt_length", "input_length"),
    "prompts": ("num_prompts",),
    "batch_size": ("bs", "per_device_train_batch_size", "per_device_batch_size"),
    "cards": ("gpus", "num_gpus", "n_gpus", "hpus", "devices", "world_size"),
    "precision": ("dtype", "torch_dtype", "quantization"),
    "dataset": ("data", "data_path", "train_file"),
    "attention": ("attn_implementation",),
    "tensor_parallel": ("tp", "tensor_parallel_size"),
    "steps": ("max_steps", "num_steps", "iterations"),
    "max_length": ("max_seq_length", "max_seq_len", "seq_len", "cutoff_len"),
    "rank": ("r", "lora_r", "lora_rank"),
    "alpha": ("lora_alpha",),
    "targets": ("target_modules", "lora_target"),
    "learning_rate": ("lr",),
    "learning_rate_schedule": ("lr_scheduler_type",),
    "gradient_accumulation": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "max_gradient_norm": ("max_grad_norm",),
    "optimizer": ("optim",),
}


class Findings:
    """Problems and notes of one document."""

    def __init__(self, document: Document, vocabulary: Vocabulary) -> None:
        self.document, self.vocabulary = document, vocabulary
        self.problems: list[Problem] = []
        self.more = 0  # problems beyond those
        self.unread = 0  # values that were not checked after those
        self.old_names: dict[str, None] = {}  # notes, each once
        self._removed = vocabulary.removed_settings()

    @property
    def count(self) -> int:
        """Number of problems, and of values that may have some."""
        return len(self.problems) + self.more + self.unread

    @property
    def full(self) -> bool:
        """Return whether there are more problems than anybody reads."""
        return len(self.problems) >= MAX_PROBLEMS

    def note_old_name(self, path: Path_, note: str) -> None:
        """Note what an earlier version called otherwise, or had."""
        line, _ = self.document.position(path)
        self.old_names[f"line {line}: {note}"] = None

    def without_removed(self, part: Any, path: Path_ = ()) -> Any:
        """Drop settings of earlier versions: a default value is noted, others are problems."""
        if isinstance(part, list):
            return [self.without_removed(value, (*path, i)) for i, value in enumerate(part)]
        if not isinstance(part, Mapping):
            return part
        left = {}
        for name, value in part.items():
            place: Path_ = (*path, name)
            declared = self._removed.get(name) if path else None
            if declared is None:
                left[name] = self.without_removed(value, place)
            elif all(map(declared.is_default, value if isinstance(value, list) else [value])):
                self.note_old_name(place, f"`{name}` was removed; leave it out")
            else:
                self.complain(place, f"`{name}` was removed", declared.instead, key=True)
        return left

    def complain(self, path: Path_, message: str, hint: str = "", *, key: bool = False) -> None:
        """Note a problem at ``path``."""
        self.add([self.document.problem(path, message, hint, key=key)])

    def add(self, problems: Iterable[Problem]) -> None:
        """Note problems, and count those beyond ``MAX_PROBLEMS``."""
        for problem in problems:
            if self.full:
                self.more += 1
            else:
                self.problems.append(problem)

    def structure(
        self, model: type[BaseModel], raw: Mapping[str, Any], path: Path_
    ) -> dict[str, Any]:
        """Keys of ``raw`` that the model accepts; others become problems. Refused list entries
        become None, so that the others keep their places."""
        try:
            model.model_validate(dict(raw))
        except ValidationError as error:
            by_key: dict[Path_, list[Any]] = {}
            for detail in error.errors(include_url=False):
                by_key.setdefault(_keys_of(detail, raw), []).append(detail)
            outer = {key[:length] for key in by_key for length in range(len(key))}
            for where, details in by_key.items():
                if where not in outer:  # a mapping with a wrong value is not its union's other type
                    self._complain_of(model, path + where, details)
            return _pruned(raw, by_key)
        return dict(raw)

    def _complain_of(self, model: type[BaseModel], path: Path_, details: list[Any]) -> None:
        first = details[0]
        name = str(path[-1])
        if first["type"] == "missing":
            hint = {"name": "give it a name", "experiments": "a list of experiments"}.get(name, "")
            self.complain(path[:-1], f"no `{name}:` here", hint)
        elif first["type"] == "extra_forbidden":
            names = (field.alias or name for name, field in model.model_fields.items())
            self.unknown_key(path, names)
        elif first["type"] == "too_short":
            self.complain(path, "is empty", "give it at least one entry")
        elif first["type"] == "string_pattern_mismatch":
            hint = "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 64"
            self.complain(path, f"{shown(first['input'])} is not a name for a run", hint)
        else:
            fault = explain(details, first["input"])
            hint = fault.hint
            if first["type"] == "list_type" and isinstance(first["input"], Mapping):
                name = next(iter(first["input"]), "first")
                named = path[-1] == "experiments"
                entry = f"`- name: {name}`, its keys below" if named else f"`- {name}: …`"
                hint = f"an entry of a list begins with a dash: {entry}"
            self.complain(path, fault.message, hint)

    def unknown_key(self, path: Path_, names: Any) -> None:
        """Note that the last key of ``path`` is none of ``names``."""
        if self.full:
            self.more += 1
            return
        name = str(path[-1])
        names = list(names)
        own = next((key for key, words in MEANT.items() if name in words), "")
        hint = _HABITS.get(name) or self._elsewhere(name)
        field = own or name
        at_top = len(path) == 1 and name not in _HABITS
        if at_top and (field in FIELD_NAMES or self._elsewhere(field)):
            hint = f"write `{field}:` under `defaults:`, or in each experiment"
        if own and not hint:
            hint = f"write `{own}:`" if own in names else self._elsewhere(own, f"`{own}:`")
        hint = hint or suggestion(name, names)
        self.complain((*path[:-1], name), f"unknown key {shown(name)}", hint, key=True)

    def _elsewhere(self, name: str, called: str = "it") -> str:
        """The workloads that have a setting of this name; empty when none has."""
        having = [
            workload
            for workload in self.vocabulary.workloads
            if name in self.vocabulary.parameter_names(workload)
        ]
        return f"{called} is a setting of `workload: {'` or `'.join(having)}`" if having else ""

    def in_file_order(self) -> list[Problem]:
        """Each problem once, and a last one that counts what is left out."""
        ordered = sorted(dict.fromkeys(self.problems), key=lambda p: (p.line or 0, p.column or 0))
        left_out = [f"{self.more:,} more problems"] if self.more else []
        left_out += [f"{self.unread:,} values that were not checked"] if self.unread else []
        if left_out:
            message = f"and {' and '.join(left_out)}"
            ordered.append(Problem(file=self.document.file, message=message))
        return ordered


def _keys_of(detail: Any, raw: Any) -> Path_:
    """Keys of a refused value: pydantic's place, without the names of types of a union."""
    keys: list[Any] = []
    for key in detail["loc"]:
        if (isinstance(raw, Mapping) and key in raw) or (
            isinstance(raw, list) and isinstance(key, int)
        ):
            raw = raw[key]
            keys.append(key)
    return (*keys, detail["loc"][-1]) if detail["type"] == "missing" else tuple(keys)


def _pruned(raw: Mapping[str, Any], refused: Iterable[Path_]) -> dict[str, Any]:
    """``raw`` without the keys and list entries at the paths that were refused."""
    places = {where[:2] for where in refused}
    good = {key: value for key, value in raw.items() if (key,) not in places}
    for key in {str(place[0]) for place in places if len(place) > 1} & good.keys():
        if isinstance(good[key], list):
            entries = enumerate(good[key])
            good[key] = [None if (key, index) in places else entry for index, entry in entries]
    return good


def summed_up(notes: Iterable[str]) -> Iterator[str]:
    """The first notes of each kind, and after them how many others there are. Notes of one kind
    have the same words, but for names and numbers."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for note in notes:
        kinds.setdefault(tuple(filter(str.isalpha, note.split())), []).append(note)
    for alike in kinds.values():
        yield from alike[:MAX_NOTES]
        if len(alike) > MAX_NOTES:
            yield f"and {len(alike) - MAX_NOTES:,} more like this"


def refusal_problems(grid: Grid, workloads: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each setting that the rules of ``workloads`` call wrong, wherever it runs."""
    from workloads.rules import refusals

    known: set[tuple[str, str, str]] = set()
    rules = Rules(refusals, workloads)
    for job in grid.jobs():
        for refusal in rules.answers(job, job.accelerator.device):
            problem = (job.experiment, refusal.setting, refusal.reason)
            if refusal.unsupported or problem in known:
                continue
            known.add(problem)
            value = {**job.identity(), **dict(job.parameters)}[refusal.setting]
            written = (job.experiment, refusal.setting, value) in grid.origins
            named = "" if written else f"{refusal.setting} "  # else the problem's path names it
            if not refusal.reason.startswith(str(value)):
                named += f"{value}: "
            message = f"{named}{refusal.reason}"
            hint = refusal.hint
            yield grid.problem(job, refusal.setting, value, message, hint)  # type: ignore[arg-type]


def card_problems(grid: Grid, nodes: Sequence[Node]) -> list[Problem]:
    """A problem for each card count that these nodes can never give; jobs of kinds that no node
    has become UNSUPPORTED rows instead."""
    by_kind: dict[Accelerator, list[Node]] = {}
    for node in nodes:
        by_kind.setdefault(node.accelerator, []).append(node)
    counts = {(job.experiment, job.accelerator, job.cards): job for job in reversed(grid.jobs())}
    problems = []
    for (_, kind, count), job in counts.items():
        of_kind = by_kind.get(kind, [])
        if of_kind and not legal_card_sets(of_kind, kind, count):
            cards = sum(len(node.card_indices) for node in of_kind)
            there = f"{cards} on {plural(len(of_kind), 'node')}"
            message = f"no job can have {count} {kind} cards: there are {there}"
            legal = (str(n) for n in range(1, cards + 1) if legal_card_sets(of_kind, kind, n))
            hint = f"a job can have {', '.join(legal)} of them"
            problems.append(grid.problem(job, "cards", count, message, hint))
    return sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
