"""Checkpoints on disk: how long they stay, who may read them, and when an attempt goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from finetuning_cases import request, small_model, training_of
from generation_cases import Worker

from workloads import finetuning
from workloads.base import MeasureSettings
from workloads.compression.pruning import Pruned, Sparsity
from workloads.data.cache import try_lock
from workloads.devices.base import Compilations
from workloads.devices.cpu import CpuDevice
from workloads.training import checkpoints as on_disk
from workloads.training.checkpoints import KEPT_DAYS, Checkpoints, Saver, Saving, resume
from workloads.training.parallel.layout import Layout
from workloads.training.technique import Training

NAME = "run-job"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(on_disk.VARIABLE, str(tmp_path / "shared"))
    return tmp_path / "shared" / f"nightgrid-checkpoints-{os.geteuid()}"


@contextlib.contextmanager
def attempt(
    number: int, width: int = 3, saving: Saving | None = None, **changes: Any
) -> Iterator[Training]:
    """An attempt at a job of five steps that saves each, and ends with the block."""
    torch.manual_seed(number)
    training = training_of(torch.nn.Linear(width, 2))
    training.kept_as, training.attempt, training.steps = NAME, number, 5
    for name, value in changes.items():
        setattr(training, name, value)
    with training.job_ending, training.ending:
        (saving or Saving(save_every=1)).on_optimizer(training)
        yield training


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.pt"))


def killed_after(steps: int, mode: Any = None, **changes: Any) -> Training:
    """An attempt that failed after so many steps, and left its checkpoint."""
    saver = Saving(save_every=1, save_mode=mode)
    with pytest.raises(KeyboardInterrupt), attempt(1, saving=saver, **changes) as training:
        for step in range(steps):
            loss = training.model(torch.randn(4, 3)).square().sum()
            training.backward(loss)
            training.update()
            training.losses.append((loss.detach(),))
            saver.after_step(training, step)
        raise KeyboardInterrupt
    return training


@pytest.mark.parametrize("mode", [None, "async", "incremental"])
def test_an_attempt_goes_on_where_the_last_one_failed(mode: Any, root: Path) -> None:
    before = killed_after(2, mode)
    drawn = torch.rand(3)  # what the next step would have met
    assert "step-00000001.rank-0.pt" in saved(root / NAME)
    with attempt(2) as training:
        assert training.details["resumed"] == "from step 2 of 5"
        assert len(training.details["losses_before"].split()) == training.first_step == 2
        assert torch.equal(training.model.weight, before.model.weight)
        for one, other in zip(
            training.optimizer.state.values(), before.optimizer.state.values(), strict=True
        ):
            assert all(torch.equal(value, other[name]) for name, value in one.items())
        assert training.random_state is not None
        training.device.restore_random_state(training.random_state)
        assert torch.equal(torch.rand(3), drawn)
    assert not (root / NAME).exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 4}, "of another model"),
        ({"begins_anew": "errors are kept on each card"}, "errors are kept on each card"),
        ({"steps": 2}, "of step 2 of 2, and a row needs 1 more"),
        ({"least_steps": 4}, "of step 2 of 5, and a row needs 4 more, warm-up included"),
        ({"gather": lambda steps: [steps, set()] if isinstance(steps, set) else [steps]}, "no che"),
    ],
)
def test_an_attempt_that_cannot_go_on_begins_anew_and_says_why(changes, told) -> None:
    killed_after(2)
    with attempt(2, **changes) as training:
        assert training.details["resumed"].startswith("no, began with step 0: ")
        assert told in training.details["resumed"]
        assert training.first_step == 0 and training.losses == []


def test_an_attempt_that_began_anew_keeps_its_own_checkpoints(root: Path) -> None:
    killed_after(4)
    killed_after(1, least_steps=3)
    assert saved(root / NAME) == ["step-00000000.rank-0.pt"]
    with attempt(2, least_steps=3) as training:
        assert training.details["resumed"] == "from step 1 of 5"


def test_a_checkpoint_that_is_absent_damaged_or_open_to_others_is_not_gone_on_from(root) -> None:
    with attempt(1) as training:
        assert "resumed" not in training.details
    with attempt(2) as training:
        assert training.details["resumed"].endswith(f"no checkpoint in {root / NAME}")
    killed_after(2)
    (root / NAME / "step-00000001.rank-0.pt").write_bytes(b"not a checkpoint")
    with attempt(2) as training:
        assert "step 2 cannot be read" in training.details["resumed"]
    killed_after(1)
    (root / NAME).chmod(0o770)
    with pytest.raises(PermissionError, match="this user alone"), attempt(2):
        pass


def test_two_attempts_never_write_to_one_directory(root, monkeypatch) -> None:
    """On a shared directory the attempt of a node that was cut off may live on."""
    monkeypatch.setattr(on_disk, "DYING_S", 0.3)
    killed_after(2)
    with contextlib.ExitStack() as cut_off:
        cut_off.callback(try_lock(root / NAME / "held.rank-0").close)
        half = root / NAME / "step-00000002.rank-0.part"
        half.touch()
        with attempt(2) as training:
            told = training.details["resumed"]
        assert told.endswith(f"step 0: another attempt still writes to {root / NAME} as rank 0")
        assert half.exists() and saved(root / NAME) == ["step-00000001.rank-0.pt"]
    with attempt(3) as training:
        assert training.details["resumed"] == "from step 2 of 5" and not half.exists()


def test_a_gang_moves_aside_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "DYING_S", 0.1)
    met, parts = threading.Barrier(2), [None, None]
    because = f"no, began with step 0: another attempt still writes to {root / NAME} as rank 1"

    def trained(rank: int) -> tuple[str, bool]:
        def gather(value: Any) -> list[Any]:
            met.wait(60)
            parts[rank] = value
            met.wait(60)
            return list(parts)

        saver, layout = Saving(save_every=1), Layout(rank=rank, world_size=2)
        with attempt(1, saving=saver, layout=layout, cards=2, gather=gather) as training:
            saver.after_step(training, 0)
            with try_lock(root / NAME / f"held.rank-{rank}") or contextlib.nullcontext() as free:
                return training.details["resumed"], free is not None

    (root / NAME).mkdir(parents=True, mode=0o700)
    lock = try_lock(root / NAME / "held.rank-1")
    assert lock is not None
    with lock, ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(trained, range(2))) == [(because, True), (because, False)]
    assert saved(root / NAME) == []


def test_checkpoints_that_nobody_went_on_from_are_removed(root: Path) -> None:
    ours = ["step-00000003.rank-0.pt", "step-00000003.parts/weights", "frozen.rank-0.pt"]
    places: dict[Path, tuple[int, list[str]]] = {
        root / "old": (KEPT_DAYS + 1, ours),
        root / "young": (KEPT_DAYS - 1, ours),
        root / "mixed": (KEPT_DAYS + 1, [*ours, "thesis.txt"]),
        root / "foreign": (KEPT_DAYS + 1, ["data/photo.jpg"]),
        root / "empty": (KEPT_DAYS + 1, []),
        root / "held": (KEPT_DAYS + 1, [*ours, "held.rank-0"]),
        root / "left": (KEPT_DAYS + 1, [*ours, "held.rank-0"]),
        root.parent / "beside": (KEPT_DAYS + 1, ["step-00000003.rank-0.pt"]),
    }
    for place, (days, names) in places.items():
        place.mkdir(parents=True)
        for name in names:
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).touch()
        then = place.stat().st_mtime - days * 86_400
        os.utime(place, (then, then))
    lock = try_lock(root / "held" / "held.rank-0")  # by an attempt that has not saved for long
    assert lock is not None
    with lock, attempt(1):
        left = {place.name for place in places if place.exists()}
        assert left == {"young", "mixed", "foreign", "empty", "held", "beside"}
        assert sorted(each.name for each in (root / "mixed").iterdir())[-1] == "thesis.txt"


def test_two_ranks_may_remove_the_same_old_checkpoints(root, monkeypatch) -> None:
    old = root / "old"
    old.mkdir(parents=True)
    (old / "held.rank-0").touch()
    then = old.stat().st_mtime - (KEPT_DAYS + 1) * 86_400
    os.utime(old, (then, then))

    def beaten(path: Path, patience_s: float = 0.0) -> IO[str] | None:
        shutil.rmtree(old, ignore_errors=True)
        return try_lock(path, patience_s)

    monkeypatch.setattr(on_disk, "try_lock", beaten)
    with attempt(1) as training:
        assert training.kept_as == NAME and not old.exists()


def test_without_room_a_job_fails_before_its_first_step(monkeypatch, root) -> None:
    usage = on_disk.shutil.disk_usage("/")
    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with (
        pytest.raises(OSError, match=f"1e-07 GB are free.*{on_disk.VARIABLE}") as failed,
        attempt(1),
    ):
        pass
    assert failed.value.errno == errno.ENOSPC and failed.value.filename == str(root / NAME)


def test_a_second_pass_begins_anew_and_checkpoints_stay_until_it_has_succeeded(root, monkeypatch):
    compiled = itertools.count()
    monkeypatch.setattr(CpuDevice, "compilations", lambda _: Compilations(graphs=next(compiled)))
    seen: list[tuple[int, list[int]]] = []

    def observed(training: Training, checkpoints: Checkpoints) -> None:
        seen.append((training.least_steps, checkpoints.steps()))
        resume(training, checkpoints)

    monkeypatch.setattr(on_disk, "resume", observed)
    job = request(
        samples=4, max_length=32, steps=2, save_every=3, measure=MeasureSettings(min_repeats=1)
    )
    result = finetuning.run(dataclasses.replace(job, kept_as=NAME), Worker().context())
    assert seen == [(2, []), (2, [2])]
    assert result.timed_parts == 2 and len(result.samples) == 3
    assert result.details["resumed"] == "no, began with step 0: repeated after compilation"
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("mode", ["blocking", "async", "incremental"])
def test_what_is_frozen_is_written_once_and_tied_weights_by_each_of_their_names(
    mode: str, tmp_path: Path
) -> None:
    training, fresh = (training_of(tied()) for _ in range(2))
    saver = Saver(Checkpoints(directory=tmp_path, rank=0), mode)
    before: list[torch.Tensor] = []
    written: set[int] = set()
    for step in range(3):
        training.backward(training.model(torch.randn(4, 3)).square().sum())
        training.update()
        if step < 2:
            saver.save(training, step)
            before.append(training.model[0].weight.detach().clone())
            written |= {file.stat().st_mtime_ns for file in tmp_path.glob("frozen.*")}
    saver.wait()
    incremental = mode == "incremental"
    assert len(written) == incremental
    (newest,) = tmp_path.glob("step-*.pt")
    assert ("frozen" in on_disk.read_state(newest)) is not incremental
    assert saver.checked(training) == "step 1, 3 tensors"
    on_disk.restore(fresh, on_disk.read_newest(saver.checkpoints), {})
    assert torch.equal(fresh.model[0].weight, before[1]) and not torch.equal(*before)


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    return model


def test_training_with_shared_values_resumes_before_them_alone() -> None:
    """Resumed in its last steps, it would not train the values that weights share."""
    for steps, least in ((None, 1), (2, 3)):
        training = training_of(small_model())
        Sparsity(cluster_bits=2, cluster_steps=steps).on_model(training)
        assert training.least_steps == least and not training.begins_anew


def test_masks_of_gradual_pruning_are_taken_over() -> None:
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    mask = torch.tensor([[True, False], [False, True]])
    before = Pruned(layers={"a": layer, "b": other}, share=0.5)
    before.masks[layer.weight] = mask
    after = Pruned(layers={"a": torch.nn.Linear(2, 2), "b": other})
    after.load_state_dict(before.state_dict())
    assert after.share == 0.5 and list(after.masks) == [after.layers["a"].weight]
    after.mask_weights()
    assert torch.equal(after.layers["a"].weight != 0, mask)
