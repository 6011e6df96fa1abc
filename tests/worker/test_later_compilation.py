"""Functions that a library decorates with torch.compile while it is imported."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from orchestrator.worker.later_compilation import compiling_when_called  # noqa: E402


@pytest.fixture
def compiled(monkeypatch):
    """The functions that were handed to ``torch.compile``, with its options, in order."""
    found = []

    def compile_at_once(model, **options):
        found.append((model.__name__, options))
        return lambda number: model(number) + 100

    monkeypatch.setattr(torch, "compile", compile_at_once)
    return found


def test_a_decorated_function_is_compiled_once_at_its_first_call(compiled):
    """It keeps its name and options, and what is called is what torch has made of it."""
    with compiling_when_called():

        @torch.compile(dynamic=False)
        def double(number):
            return 2 * number

    assert compiled == [] and double.__name__ == "double"
    assert [double(1), double(2)] == [102, 104]
    assert compiled == [("double", {"dynamic": False})]


def test_a_function_is_compiled_without_parentheses_too(compiled):
    """The decorator takes the function itself where it has no options."""
    with compiling_when_called():

        @torch.compile
        def double(number):
            return 2 * number

    assert double(1) == 102


def test_a_module_is_compiled_at_once(compiled):
    """Only a function can wait: of a module more is used than its call."""

    class Model:
        __name__ = "Model"

    with compiling_when_called():
        torch.compile(Model())
    assert compiled == [("Model", {})]


def test_after_the_block_functions_are_compiled_at_once(compiled):
    """Also where the import failed."""
    with pytest.raises(ImportError), compiling_when_called():
        raise ImportError

    @torch.compile
    def double(number):
        return 2 * number

    assert [name for name, _ in compiled] == ["double"]


def printed(program):
    """The output of a program that runs in an interpreter of its own and ends well."""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.mark.slow
def test_a_decorator_does_not_import_the_compiler():
    """The compiler of torch is what the import of such a library took its time for."""
    program = (
        "import sys, torch\n"
        "from orchestrator.worker.later_compilation import compiling_when_called\n"
        "with compiling_when_called():\n"
        "    torch.compile(lambda number: number)\n"
        "print('torch._inductor.compile_fx' in sys.modules)\n"
    )
    assert printed(program) == "False\n"


@pytest.mark.slow
def test_whoever_compiles_a_caller_or_the_function_gets_one_graph():
    """As with what torch.compile returns: neither is broken at the wrapper."""
    program = (
        "import torch\n"
        "from orchestrator.worker.later_compilation import compiling_when_called\n"
        "with compiling_when_called():\n"
        "    @torch.compile(backend='eager')\n"
        "    def more(number): return number + 1\n"
        "whole = dict(backend='eager', fullgraph=True)\n"
        "called = torch.compile(lambda number: more(number) * 2, **whole)\n"
        "given = torch.compile(more, **whole)\n"
        "one = torch.ones(1)\n"
        "print(called(one).item(), given(one).item())\n"
    )
    assert printed(program) == "4.0 2.0\n"
