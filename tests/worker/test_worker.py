"""A worker turns attempts into outcomes, whatever happens in them, and keeps jobs apart."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny_workload
import torch
from driver_cases import attempt, job, node
from pydantic import ValidationError

from orchestrator.core.job import Accelerator, Scalar, State
from orchestrator.core.outcome import Attempt, FailureClass, RankOutcome
from orchestrator.core.topology import Card
from orchestrator.util.host import usable_cores
from orchestrator.worker.cpu_slots import cpu_slot
from orchestrator.worker.orphans import VARIABLE
from orchestrator.worker.protocol import WorkerConfig
from orchestrator.worker.worker import CardWorker, request_of
from workloads.base import BadConfiguration, CardNotAcquired
from workloads.devices.cpu import CpuDevice
from workloads.devices.monitor.host import CardUse, Holder
from workloads.isolation import ProcessState
from workloads.models.products import ORIGIN

CARD = node().cards[0]
HOLDER = Holder(pid=7, name="python")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tiny workload is known; torch's settings are put back afterwards."""
    tiny_workload.register(monkeypatch)
    before = ProcessState.now()
    yield
    before.restore()


def config(**changes: object) -> WorkerConfig:
    """An emulated card of node hpu-1."""
    fields: dict[str, object] = {
        "worker_id": "w1",
        "card": CARD,
        "node_name": "hpu-1",
        "emulated": True,
    }
    return WorkerConfig(**(fields | changes))  # type: ignore[arg-type]


def started(**changes: object) -> CardWorker:
    """A worker that is ready."""
    worker = CardWorker(config(**changes))
    worker.start()
    return worker


def tiny(number: int = 1, precision: str = "fp32", **parameters: Scalar) -> Attempt:
    """An attempt at the tiny workload."""
    asked = job(
        2,
        workload="tiny",
        precision=precision,
        parameters=tuple(sorted(parameters.items())),
    )
    return attempt(asked, CARD, number)


def details(outcome: RankOutcome) -> dict[str, str]:
    """The workload's view of the process."""
    assert outcome.result is not None, outcome.failure
    return dict(outcome.result.details)


def test_a_started_worker_says_what_it_is() -> None:
    """Provenance comes from the process itself."""
    info = CardWorker(config(threads=1)).start()
    assert (info.worker_id, info.node_name, info.emulated) == ("w1", "hpu-1", True)
    assert info.threads == 1 and info.pid > 0
    assert info.versions["torch"].startswith(torch.__version__.split("+")[0])
    assert info.device_name and "HPU" not in info.device_name  # an emulated card is a CPU


@pytest.mark.parametrize("looks", [0, 3])
def test_a_worker_waits_until_its_card_is_free(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """The last process of a card may be gone for a moment before the card is free."""
    waited: list[float] = []
    monkeypatch.setattr("orchestrator.worker.worker.time.sleep", waited.append)
    held = iter([CardUse(holders=(HOLDER,))] * looks)
    monkeypatch.setattr(CpuDevice, "use", lambda self, card_index: next(held, None))
    assert started().config.card == CARD
    assert len(waited) == looks


def test_a_card_that_stays_held_is_not_acquired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds it is in the message, and nothing was put on the card."""
    clock = itertools.count(step=10.0)
    monkeypatch.setattr("orchestrator.worker.worker.time.sleep", lambda seconds: None)
    monkeypatch.setattr("orchestrator.worker.worker.time.monotonic", lambda: next(clock))
    use = CardUse(holders=(HOLDER,))
    monkeypatch.setattr(CpuDevice, "use", lambda self, card_index: use)
    with pytest.raises(CardNotAcquired, match=r"HPU0 is not free after \d+ s: card 0 is held by "):
        CardWorker(config()).start()


@pytest.mark.parametrize("accelerator", [Accelerator.GPU, Accelerator.HPU])
def test_an_environment_that_changes_during_the_start_is_a_failure_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator
) -> None:
    """It was right when the process began; what was imported or initialised since has changed which
    card is seen. No job may be measured there."""
    variable = accelerator.spec.visible_variable
    card = Card(node_id="n", index=3, accelerator=accelerator)
    monkeypatch.setenv(variable, "3")
    given = config(card=card, environment={variable: "3"})
    assert CardWorker(given).start().visible_cards == "3"

    def tampered(self: CpuDevice) -> None:
        monkeypatch.setenv(variable, "0")

    monkeypatch.setattr(CpuDevice, "synchronize", tampered)  # the first that touches a card
    with pytest.raises(BadConfiguration, match=f"{variable} is '0' and should be '3'"):
        CardWorker(given).start()


def test_a_card_that_is_not_the_given_one_is_a_failure_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its environment says."""
    why = "it has the card with the bus id 0000:3b:00.0 and was given 0000:5e:00.0"
    monkeypatch.setattr(CpuDevice, "mismatch", lambda self, card_index: why)
    with pytest.raises(
        CardNotAcquired, match=r"has not got .*HPU0: it has the card with the bus id"
    ):
        CardWorker(config()).start()


def test_an_attempt_becomes_samples() -> None:
    """The result of the workload comes back, with times around it."""
    began = time.time()
    outcome = started().run(tiny())
    assert outcome.state is State.SUCCEEDED and outcome.failure is None
    assert outcome.result is not None and len(outcome.result.samples) == 3
    assert began <= outcome.started_at <= outcome.ended_at
    assert details(outcome)["ranks"] == "[0]"


@pytest.mark.parametrize(
    ("trouble", "state", "failure_class", "message"),
    [
        ("python-oom", State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY, "MemoryError"),
        ("unsupported", State.UNSUPPORTED, FailureClass.UNSUPPORTED, "no such precision here"),
        ("missing", State.FAILED, FailureClass.DATA_MISSING, "no dataset 'nix'"),
        ("import", State.FAILED, FailureClass.IMPORT, "No module named 'flash_attn'"),
        ("exit", State.FAILED, FailureClass.CRASH, "3"),
        ("bug", State.FAILED, FailureClass.ERROR, "'hidden_size'"),
    ],
)
def test_every_trouble_becomes_an_outcome_of_its_class(
    trouble: str, state: State, failure_class: FailureClass, message: str
) -> None:
    """Nothing is raised; state, class, message and traceback are in the outcome, and the worker
    takes the next attempt."""
    worker = started()
    outcome = worker.run(tiny(trouble=trouble))
    assert outcome.state is state
    assert outcome.failure is not None
    assert outcome.failure.failure_class is failure_class
    assert message in outcome.failure.message
    assert "_get_into" in outcome.failure.tail
    assert worker.run(tiny(2)).state is State.SUCCEEDED


def test_settings_the_workload_does_not_know_are_a_failure_and_not_a_crash() -> None:
    """Even a job that no plan would let through leaves an outcome."""
    outcome = started().run(tiny(colour="blue"))
    assert outcome.state is State.FAILED
    assert outcome.failure is not None and "colour" in outcome.failure.message


def test_the_memory_of_an_emulated_card_runs_out_and_comes_back() -> None:
    """A job that takes too much is OUT_OF_MEMORY; its tensors and the model are gone after it."""
    worker = started(memory_bytes=200_000_000)
    for number in (1, 2, 3):  # the third would fail at once if the first two left anything
        outcome = worker.run(tiny(number, trouble="oom"))
        assert outcome.state is State.OUT_OF_MEMORY
        assert outcome.failure is not None
        assert "emulated card's 200,000,000 bytes" in outcome.failure.message
        assert not outcome.model_was_resident
    outcome = worker.run(tiny(4, size=4096))  # 64 MB
    assert outcome.state is State.SUCCEEDED, outcome.failure


def test_a_failed_job_leaves_no_tensor_behind() -> None:
    """The traceback's frames are let go of, and with them what they hold."""
    worker = started()
    outcome = worker.run(tiny(size=333, trouble="bug"))
    assert outcome.failure is not None
    gc.collect()
    kept = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == (333, 333)]
    assert kept == []


def test_an_equal_residency_key_finds_the_model_loaded() -> None:
    """The second job says that its model was resident; another precision loads anew, and then the
    first is not there any more."""
    worker = started()
    outcomes = [
        worker.run(tiny(number, precision))
        for number, precision in enumerate(["fp32", "fp32", "bf16", "fp32"], 1)
    ]
    assert [outcome.model_was_resident for outcome in outcomes] == [False, True, False, False]
    assert [outcome.jobs_before for outcome in outcomes] == [0, 1, 2, 3]


def test_the_old_model_is_gone_before_the_new_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two models never are in memory together."""
    alive: list[int] = []
    original = tiny_workload.Loaded.__init__

    def counting(self: tiny_workload.Loaded, size: int) -> None:
        gc.collect()
        alive.append(sum(isinstance(each, tiny_workload.Loaded) for each in gc.get_objects()))
        original(self, size)

    monkeypatch.setattr(tiny_workload.Loaded, "__init__", counting)
    worker = started()
    for number, precision in enumerate(["fp32", "bf16", "fp16"], 1):
        worker.run(tiny(number, precision))
    assert alive == [1, 1, 1]  # itself


def test_one_job_does_not_change_the_next() -> None:
    """Seeds, dtype, gradient mode, threads, environment and generation config start over."""
    worker = started()
    first = details(worker.run(tiny(1)))
    untidy = details(worker.run(tiny(2, trouble="untidy")))
    after = details(worker.run(tiny(3)))
    assert untidy["leak"] == "yes" and untidy["max_length"] == "99"  # the fault was really there
    assert untidy["dtype"] == "torch.float64" and untidy["grad"] == "False"
    assert {**after, "random": "", "torch_random": ""} == {
        **first,
        "random": "",
        "torch_random": "",
    }
    assert after["random"] == first["random"]  # although the model was loaded only in the first


def test_a_job_computes_with_the_threads_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its CPU slot, its row and its passport know; the model stays; the next job has the worker's
    share again."""
    own = partial(cpu_slot, path=tmp_path / "slots.lock")
    monkeypatch.setattr("orchestrator.worker.worker.cpu_slot", own)
    worker = started(threads=1, passport=True)
    more = len(usable_cores()) + 1
    outcomes = [worker.run(tiny(1, threads=asked)) for asked in (more, None, 2)]
    assert [details(each)["threads"] for each in outcomes] == [str(more), "1", "2"]
    assert [each.worker.threads for each in outcomes if each.worker] == [more, 1, 2]
    assert [each.turn.oversubscribed for each in outcomes if each.turn] == [True, False, more < 3]
    assert [each.model_was_resident for each in outcomes] == [False, True, True]
    assert outcomes[0].passport is not None and outcomes[0].passport["threads"] == more


def test_secrets_of_the_environment_stay_out_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Message and traceback name the variable instead of its value."""
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    outcome = started().run(tiny(trouble="secret"))
    assert outcome.failure is not None
    assert outcome.failure.message == "401 for <HF_TOKEN>"
    assert "hf_0123456789" not in repr(outcome)


def test_a_worker_without_its_environment_refuses_to_start() -> None:
    """What had to be set before torch was imported cannot be mended later."""
    worker = CardWorker(config(environment={"HABANA_VISIBLE_MODULES": "3"}))
    with pytest.raises(BadConfiguration, match="HABANA_VISIBLE_MODULES is None and should be '3'"):
        worker.start()


@pytest.mark.parametrize("accelerator", [Accelerator.HPU, Accelerator.GPU])
def test_a_real_card_that_is_not_there_is_never_replaced_by_the_cpu(
    accelerator: Accelerator,
) -> None:
    """Start fails as CardNotAcquired, and its record has the class by which cards are
    quarantined."""
    if accelerator is Accelerator.GPU and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    card = Card(node_id="n", index=0, accelerator=accelerator)
    worker = CardWorker(config(card=card, emulated=False))
    with pytest.raises(CardNotAcquired) as caught:
        worker.start()
    assert worker.failure(caught.value).failure_class is FailureClass.ACQUIRE


def test_a_worker_that_was_not_started_says_so() -> None:
    """Running without starting is an outcome too."""
    outcome = CardWorker(config()).run(tiny())
    assert outcome.state is State.FAILED
    assert outcome.failure is not None and "was not started" in outcome.failure.message


def test_progress_is_seen_from_another_thread() -> None:
    """While a job runs its phase can be read; before and after there is none."""
    worker = started()
    assert worker.progress() is None
    asked = tiny(size=3000)
    seen: set[tuple[str, str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            progress = worker.progress()
            if progress is not None:
                seen.add((progress.worker_id, progress.attempt_id, progress.phase))

    watcher = threading.Thread(target=watch)
    watcher.start()
    worker.run(asked)
    done.set()
    watcher.join()
    assert {("w1", asked.attempt_id, phase) for phase in ("load", "measure")} <= seen
    assert worker.progress() is None


def test_a_gang_needs_a_rendezvous_and_the_workers_it_was_made_for() -> None:
    """An attempt of two cards on a worker for one is a bad configuration, not a hang."""
    gang = tiny()
    two = Attempt(
        attempt_id=gang.attempt_id, job_id=gang.job_id, number=1, job=gang.job, cards=node().cards
    )
    outcome = started().run(two)
    assert outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.BAD_CONFIGURATION
    assert "has 2 cards" in outcome.failure.message


def test_a_probe_makes_one_whole_pass_without_warm_up() -> None:
    """It asks only whether the batch fits."""
    measured = tiny()
    probe = Attempt(
        attempt_id="p-1", job_id="p", number=1, job=measured.job, cards=(CARD,), purpose="probe"
    )
    measure = request_of(probe).measure
    assert (measure.warmup, measure.min_repeats, measure.max_repeats) == (0, 1, 1)
    assert request_of(measured).measure == measured.job.measure
    filled = {"size": 64, "trouble": "", "threads": None}
    assert request_of(measured).parameters == filled


def test_settings_that_were_found_valid_vouch_for_no_others() -> None:
    """1 and True are equal, and other settings; what a workload does to its own stays there."""
    one = tiny(size=1)
    request = request_of(one)
    assert isinstance(request.parameters, dict)
    request.parameters["size"] = 7
    assert request_of(one).parameters["size"] == 1
    with pytest.raises(ValidationError):
        request_of(tiny(size=True))


def test_what_outlives_an_attempt_has_the_name_of_run_and_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All attempts of a run at a job share it; a probe, or a worker of no run, has none."""
    first = tiny()
    assert request_of(first).kept_as == ""
    monkeypatch.setenv(VARIABLE, "run.invocation")
    assert request_of(first).kept_as == f"run-{first.job.job_id}"
    second = dataclasses.replace(first, attempt_id="t-2", number=2)
    monkeypatch.setenv(VARIABLE, "run.later")
    assert request_of(second).kept_as == request_of(first).kept_as
    assert (request_of(first).attempt, request_of(second).attempt) == (1, 2)
    assert request_of(dataclasses.replace(first, purpose="probe")).kept_as == ""


def test_a_batch_size_that_is_not_decided_yet_is_refused() -> None:
    """``max`` is a question for the schedule, not for a worker."""
    with pytest.raises(BadConfiguration, match="no batch size yet"):
        request_of(attempt(job("max"), CARD))  # type: ignore[arg-type]


def test_a_model_that_was_saved_anew_is_not_the_one_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is the same; a name that nobody saved stands for one model."""
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path))
    (tmp_path / "tuned").mkdir()
    keys = []
    for number in (1, 2):
        origin = {"saved_by": "run/job", "attempt": number}
        (tmp_path / "tuned" / ORIGIN).write_text(json.dumps(origin))
        keys += [
            request_of(attempt(job(model=name), CARD)).residency_key for name in ("tuned", "x")
        ]
    assert keys[0] != keys[2] and keys[1] == keys[3]
