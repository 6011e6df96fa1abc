"""Deadlines and budgets as people write them, and the reserve."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from orchestrator.core.deadline import Deadline, parse_budget, parse_deadline

BERLIN = ZoneInfo("Europe/Berlin")
EVENING = datetime(2026, 11, 21, 22, 30, tzinfo=BERLIN)


def here(naive: datetime) -> datetime:
    return naive.replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("9h", 32400), ("90m", 5400), ("1h30m", 5400), ("1h 30m", 5400), ("1.5h", 5400)),
        *(("45s", 45), ("1d", 86400), ("400d", 400 * 86400), ("2H", 7200)),
    ],
)
def test_a_budget_is_a_length_of_time(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "9", "nine hours", "-9h", "30m1h", "1h1h", "0m", "1000d", "h"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"9h, 90m or 1h30m|no time at all|over a year"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "hours"),
    [("23:00", 0.5), ("08:00", 9.5), ("8:00", 9.5), ("22:30", 24), ("00:00", 1.5)],
)
def test_a_time_of_day_is_the_next_one(text: str, hours: float) -> None:
    moment = parse_deadline(text, EVENING, here)
    assert moment - EVENING == timedelta(hours=hours)


@pytest.mark.parametrize(
    ("evening", "hours"), [(datetime(2026, 10, 24, 22, 0), 11), (datetime(2026, 3, 28, 22, 0), 9)]
)
def test_a_night_in_which_clocks_change_is_as_long_as_it_is(
    evening: datetime, hours: float
) -> None:
    moment = parse_deadline("08:00", here(evening), here)
    assert moment.timestamp() - here(evening).timestamp() == hours * 3600


@pytest.mark.parametrize(
    "text", ["2026-11-22T08:00+01:00", "2026-11-22 08:00:00+01:00", "2026-11-22T07:00Z"]
)
def test_a_moment_with_its_zone_is_that_moment(text: str) -> None:
    utc = EVENING.astimezone(timezone.utc)
    assert parse_deadline(text, utc) == datetime(2026, 11, 22, 8, 0, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tomorrow", "write 08:00"),
        ("25:00", "write 08:00"),
        ("08:61", "write 08:00"),
        ("8", "write 08:00"),
        ("2026-11-22T08:00", "has no time zone"),
        ("2026-11-21T08:00+01:00", "is past: it is 2026-11-21T22:30"),
    ],
)
def test_what_is_no_deadline_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_deadline(text, EVENING, here)


def test_the_reserve_grows_with_the_report_and_never_eats_up_the_time() -> None:
    night = Deadline.of(36_000.0, now=0.0, jobs=1000)
    assert night.reserve_s == 80 and night.work_until == 36_000 - 80
    assert Deadline.of(36_000.0, now=0.0, jobs=10).reserve_s < night.reserve_s
    short = Deadline.of(60.0, now=0.0, jobs=1000)
    assert (short.work_until, short.stop_s) == (45, 7.5)
