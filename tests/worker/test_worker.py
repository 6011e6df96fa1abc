"""A worker turns attempts into outcomes, whatever happens in them, and keeps jobs apart."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_workload
import torch
from driver_cases import attempt, job, node

from orchestrator.core.job import Accelerator, Scalar, State
from orchestrator.core.outcome import Attempt, FailureClass, RankOutcome
from orchestrator.core.topology import Card
from orchestrator.util.host import usable_cores
from orchestrator.worker.cpu_slots import cpu_slot
from orchestrator.worker.orphans import VARIABLE
from orchestrator.worker.protocol import WorkerConfig
from orchestrator.worker.worker import CardWorker, request_of
from workloads.base import BadConfiguration, CardNotAcquired, JobContext, Request, Result
from workloads.devices.cpu import CpuDevice
from workloads.devices.monitor.host import CardUse, Holder
from workloads.isolation import ProcessState
from workloads.models.products import ORIGIN

CARD = node().cards[0]
HOLDER = Holder(pid=7, name="python")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tiny_workload.register(monkeypatch)
    before = ProcessState.now()
    yield
    before.restore()


def config(**changes: object) -> WorkerConfig:
    fields: dict[str, Any] = {"worker_id": "w1", "card": CARD, "node_name": "hpu-1"}
    return WorkerConfig(**fields | {"emulated": True} | changes)


def started(**changes: object) -> CardWorker:
    worker = CardWorker(config(**changes))
    worker.start()
    return worker


def tiny(number: int = 1, precision: str = "fp32", **parameters: Scalar) -> Attempt:
    settings = tuple(sorted(parameters.items()))
    asked = job(2, workload="tiny", precision=precision, parameters=settings)
    return attempt(asked, CARD, number)


def details(outcome: RankOutcome) -> dict[str, str]:
    assert outcome.result is not None, outcome.failure
    return dict(outcome.result.details)


def test_a_started_worker_says_what_it_is() -> None:
    info = CardWorker(config(threads=1)).start()
    assert (info.worker_id, info.node_name, info.emulated) == ("w1", "hpu-1", True)
    assert info.threads == 1 and info.pid > 0
    assert info.versions["torch"].startswith(torch.__version__.split("+")[0])
    assert info.device_name and "HPU" not in info.device_name  # an emulated card is a CPU


@pytest.mark.parametrize("looks", [0, 3])
def test_a_worker_waits_until_its_card_is_free(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    waited: list[float] = []
    monkeypatch.setattr("orchestrator.worker.worker.time.sleep", waited.append)
    held = iter([CardUse(holders=(HOLDER,))] * looks)
    monkeypatch.setattr(CpuDevice, "use", lambda self, card_index: next(held, None))
    assert started().config.card == CARD
    assert len(waited) == looks


def test_a_card_that_stays_held_is_not_acquired(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """What was imported or initialised since has changed which card is seen."""
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
    why = "it has the card with the bus id 0000:3b:00.0 and was given 0000:5e:00.0"
    monkeypatch.setattr(CpuDevice, "mismatch", lambda self, card_index: why)
    with pytest.raises(CardNotAcquired, match=r"has not got .*HPU0: it has the card with"):
        CardWorker(config()).start()


GANG = dataclasses.replace(tiny(size=333), cards=node().cards)


@pytest.mark.parametrize(
    ("tried", "state", "failure_class", "message"),
    [
        (tiny(size=333, trouble="python-oom"), State.OUT_OF_MEMORY, "out_of_memory", "MemoryError"),
        (tiny(size=333, trouble="unsupported"), State.UNSUPPORTED, "unsupported", "no such prec"),
        (tiny(size=333, trouble="exit"), State.FAILED, "crash", "3"),
        (tiny(colour="blue"), State.FAILED, "error", "colour"),
        (GANG, State.FAILED, "bad_configuration", "has 2 cards"),
        (attempt(job("max"), CARD), State.FAILED, "bad_configuration", "no batch size yet"),
    ],
)
def test_every_trouble_becomes_an_outcome_of_its_class(
    tried: Attempt, state: State, failure_class: str, message: str
) -> None:
    worker = started()
    outcome = worker.run(tried)
    assert outcome.state is state and outcome.failure is not None
    assert outcome.failure.failure_class == failure_class
    assert message in outcome.failure.message
    assert ("_get_into" in outcome.failure.tail) is bool(dict(tried.job.parameters).get("trouble"))
    gc.collect()
    kept = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == (333, 333)]
    assert kept == []
    assert worker.run(tiny(2)).state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameter_count": 6.2e9}, "column 'parameter_count' cannot hold its value: 6200000000"),
        ({"image": object()}, "column 'image' cannot hold its value: <object"),
        ({"samples": ({"wall_s": 1.0},)}, "column 'samples' holds dict, not Sample"),
        ({"stop_reason": 3}, "column 'stop_reason' cannot hold its value: 3"),
        ({"load_s": "long"}, "column 'load_s' cannot hold its value: 'long'"),
        ({"trace": {"traceEvents": []}}, "trace is dict, not bytes"),
    ],
)
def test_a_result_that_fits_no_row_fails_its_own_job_only(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """The driver, which makes the row, would end with it."""
    plain = tiny_workload.run

    def odd(request: Request, context: JobContext) -> Result:
        return dataclasses.replace(plain(request, context), **changes)

    worker = started()
    with monkeypatch.context() as patched:
        patched.setattr(tiny_workload, "run", odd)
        outcome = worker.run(tiny())
    assert outcome.state is State.FAILED and outcome.result is None
    assert outcome.failure is not None and message in outcome.failure.message
    assert outcome.failure.failure_class == "error" and "Traceback" in outcome.failure.tail
    assert worker.run(tiny(2)).state is State.SUCCEEDED


def test_the_memory_of_an_emulated_card_runs_out_and_comes_back() -> None:
    worker = started(memory_bytes=200_000_000)
    for number in (1, 2, 3):  # the third would fail at once if the first two left anything
        outcome = worker.run(tiny(number, trouble="oom"))
        assert outcome.state is State.OUT_OF_MEMORY
        assert outcome.failure is not None
        assert "emulated card's 200,000,000 bytes" in outcome.failure.message
        assert not outcome.model_was_resident
    outcome = worker.run(tiny(4, size=4096))  # 64 MB
    assert outcome.state is State.SUCCEEDED, outcome.failure


def test_an_equal_residency_key_finds_the_model_loaded_and_another_unloads_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []
    original = tiny_workload.Loaded.__init__

    def counting(self: tiny_workload.Loaded, size: int) -> None:
        gc.collect()
        alive.append(sum(isinstance(each, tiny_workload.Loaded) for each in gc.get_objects()))
        original(self, size)

    monkeypatch.setattr(tiny_workload.Loaded, "__init__", counting)
    worker = started()
    outcomes = [
        worker.run(tiny(number, precision))
        for number, precision in enumerate(["fp32", "fp32", "bf16", "fp32"], 1)
    ]
    assert alive == [1, 1, 1]  # itself
    assert [outcome.model_was_resident for outcome in outcomes] == [False, True, False, False]
    assert [outcome.jobs_before for outcome in outcomes] == [0, 1, 2, 3]


def test_one_job_does_not_change_the_next() -> None:
    worker = started()
    first = details(worker.run(tiny(1)))
    untidy = details(worker.run(tiny(2, trouble="untidy")))
    after = details(worker.run(tiny(3)))
    assert untidy["leak"] == "yes" and untidy["max_length"] == "99"  # the fault was really there
    assert untidy["dtype"] == "torch.float64" and untidy["grad"] == "False"
    assert after["random"] == first["random"]  # although the model was loaded only in the first
    del after["torch_random"], first["torch_random"]
    assert after == first


def test_a_job_computes_with_the_threads_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = partial(cpu_slot, path=tmp_path / "slots.lock")
    monkeypatch.setattr("orchestrator.worker.worker.cpu_slot", own)
    worker = started(threads=1, check_card=True)
    more = len(usable_cores()) + 1
    outcomes = [worker.run(tiny(1, threads=asked)) for asked in (more, None, 2)]
    assert [details(each)["threads"] for each in outcomes] == [str(more), "1", "2"]
    assert [each.worker.threads for each in outcomes if each.worker] == [more, 1, 2]
    assert [each.turn.oversubscribed for each in outcomes if each.turn] == [True, False, more < 3]
    assert [each.model_was_resident for each in outcomes] == [False, True, True]
    assert outcomes[0].card_check is not None and outcomes[0].card_check["threads"] == more


def test_secrets_of_the_environment_stay_out_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    outcome = started().run(tiny(trouble="secret"))
    assert outcome.failure is not None
    assert outcome.failure.message == "401 for <HF_TOKEN>"
    assert "hf_0123456789" not in repr(outcome)


@pytest.mark.parametrize("accelerator", [Accelerator.HPU, Accelerator.GPU])
def test_a_real_card_that_is_not_there_is_never_replaced_by_the_cpu(
    accelerator: Accelerator,
) -> None:
    if accelerator is Accelerator.GPU and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    card = Card(node_id="n", index=0, accelerator=accelerator)
    worker = CardWorker(config(card=card, emulated=False))
    with pytest.raises(CardNotAcquired) as caught:
        worker.start()
    assert worker.failure(caught.value).failure_class is FailureClass.ACQUIRE


def test_a_probe_makes_one_whole_pass_without_warm_up() -> None:
    measured = tiny()
    measure = request_of(dataclasses.replace(measured, purpose="probe")).measure
    assert (measure.warmup, measure.min_repeats, measure.max_repeats) == (0, 1, 1)
    assert request_of(measured).measure == measured.job.measure
    filled = {"size": 64, "trouble": "", "threads": None, "software": "default"}
    assert request_of(measured).parameters == filled


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


def test_a_model_that_was_saved_anew_is_not_the_one_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_other_data_is_read_by_the_model_that_is_there(tmp_path: Path) -> None:
    requests = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
        data = str(tmp_path / f"{name}.jsonl")
        requests.append(request_of(attempt(job(dataset=data), CARD)))
    first, second = requests
    assert first.residency_key == second.residency_key
    assert first.took.startswith("dataset files-") and first.took != second.took
