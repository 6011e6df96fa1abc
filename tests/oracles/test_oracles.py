"""A sample of `python -m tools.oracles`: values that must not change while the house is rebuilt.

The command looks at all cases of all oracles; run it before a change lands.
"""

from __future__ import annotations

from itertools import islice

import pytest

from tools.oracles.__main__ import ENVIRONMENT
from tools.oracles.cases import ORACLES
from tools.oracles.golden import differences, load

#: One case in so many; of all others, every case. The report of a run takes longer than a night.
SAMPLED = {"nights": 20, "reports": 6, "comparisons": 4}


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the command."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.usefixtures("settled")
def test_what_must_not_change_is_as_it_was(oracle: str) -> None:
    golden, cases = load(oracle), ORACLES[oracle]()
    assert golden.keys() == cases.keys()
    found = []
    for case in islice(cases, 0, None, SAMPLED.get(oracle, 1)):
        if case != "gaudi-atlas":  # its models are looked for on the network
            found += list(islice(differences(golden[case], cases[case](), case), 5))
    assert not found, "python -m tools.oracles says more:\n" + "\n".join(found)


def test_words_may_change_and_figures_may_not() -> None:
    """Of prose the numbers are compared, of all else every character; numbers to 1e-9."""
    assert not list(differences("took 3.5 s of 4", "4 s, of which 3.5 were taken"))
    assert list(differences("took 3.5 s", "took 3.6 s")) == [
        ': -3.5 (1 times), as in "took 3.5 s"',
        ': +3.6 (1 times), as in "took 3.6 s"',
    ]
    assert list(differences({"id": "ab1"}, {"id": "ab2"})) == ['id: "ab1" is now "ab2"']
    assert not list(differences([1.0, 2], [1.0 + 1e-10, 2.0]))
    assert list(differences([1.0], [1.0 + 1e-8])) == ["[0]: 1.0 is now 1.00000001"]
    assert list(differences({"a": 1}, {"b": 1})) == ["a: gone, was 1", "b: new, 1"]
