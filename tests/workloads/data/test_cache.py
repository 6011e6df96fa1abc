"""The cache: built once, whole or not at all, whoever asks and whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
from patience import patience

from workloads.base import DataMissing
from workloads.data.cache import build_aside, cached_directory, remove_abandoned, try_lock


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _ask(log, barrier):
    def build(directory):
        with open(log, "a") as handle:
            handle.write("built\n")
        (directory / "part").write_text("half")
        time.sleep(0.2)
        (directory / "rest").write_text("whole")

    barrier.wait()
    found = cached_directory("thing-v1", build)
    assert (found / "rest").read_text() == "whole"


def test_processes_at_once_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [
        context.Process(target=_ask, args=(str(tmp_path / "log"), barrier)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(patience(30))
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def _start_and_hang(started):
    def build(directory):
        (directory / "part").write_text("half")
        started.set()
        time.sleep(60)

    cached_directory("thing-v1", build)


def test_a_killed_builder_leaves_nothing_in_the_way(cache):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    worker = context.Process(target=_start_and_hang, args=(started,))
    worker.start()
    assert started.wait(patience(30))
    assert not (cache / "thing-v1").exists()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(patience(30))
    found = cached_directory("thing-v1", lambda d: (d / "rest").write_text("whole"))
    assert [p.name for p in found.iterdir()] == ["rest"]
    assert not list(cache.glob(".*building*"))


def test_a_live_builder_is_left_alone(tmp_path):

    def build(directory):
        (directory / "x").touch()
        remove_abandoned(tmp_path / "final")
        assert (directory / "x").exists()

    build_aside(tmp_path / "final", build)
    assert (tmp_path / "final" / "x").exists()


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".hidden"])
def test_keys_stay_inside(key):
    with pytest.raises(ValueError, match="key"):
        cached_directory(key, lambda d: None)


def test_an_unusable_root_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataMissing, match="NIGHTGRID_CACHE"):
        cached_directory("thing-v1", lambda d: None)


def _load(loads, loader):
    loader.value = os.getpid()
    loads.set()
    time.sleep(60)


def _train(path, loads, loader):
    held = try_lock(path)
    context = multiprocessing.get_context("fork")
    done = context.Process(target=os.getpid)
    done.start()
    done.join()
    process = context.Process(target=_load, args=(loads, loader))
    process.start()
    process.join()
    assert held is not None


def test_a_lock_goes_with_its_process_and_not_with_what_that_forked(tmp_path):
    """Loaders of batches live on for a while after a training process was killed; the next attempt
    has its checkpoints at once. While the process lives, the end of a loader frees nothing."""
    context = multiprocessing.get_context("fork")
    loads, loader = context.Event(), context.Value("i", 0)
    trainer = context.Process(target=_train, args=(tmp_path / "held", loads, loader))
    trainer.start()
    try:
        assert loads.wait(patience(30))
        assert try_lock(tmp_path / "held") is None
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join()  # with a limit it would wait for the loader, which has its pipe too
        lock = try_lock(tmp_path / "held")
        assert lock is not None
        lock.close()
    finally:
        os.kill(loader.value or trainer.pid, signal.SIGKILL)  # it lives
