# Two commands do everything on a fresh machine with Python >= 3.10:
#   make demo    install, run a grid on two emulated 8-card Gaudi nodes, show the report
#   make test    install, run every test
PYTHON ?= python3
VENV ?= .venv
NIGHTGRID = $(VENV)/bin/nightgrid
GAUDI_VENV ?= .venv-gaudi
# Of the suite, on two cores: two start clusters and wait half of their time, in which the third computes.
PROCESSES ?= 3
# Hardly a test of these waits, and each process imports torch and transformers for itself.
QUICK_PROCESSES ?= 2
PINS = pyproject.toml constraints.txt constraints-hpu.txt tools/install.py

.PHONY: help demo real test suite test-gaudi gaudi-night gaudi-rest quick lint docs clean
.PHONY: defects rehearsal rehearsal-night rehearsal-inputs rehearsal-events

help:
	@sed -n '1,3p' Makefile | sed 's/^# //'
	@echo "  make real    the same with a pretrained model (SmolLM2-135M-Instruct) on the CPU"
	@echo "  make quick   the tests that take no Ray and no more than a second each"
	@echo "  make test-gaudi  the real optimum-habana on the CPU, in an environment of its own"
	@echo "  make rehearsal  a night in an hour: hundreds of jobs on 3x8 emulated cards, a fault every 19 s;"
	@echo "                  before it 10,000 hostile inputs and a million simulated events"
	@echo "  make defects  plant sixty defects in the product and list those that no test catches"
	@echo "  make lint    ruff and mypy"
	@echo "  make docs    the documentation as a site: site/index.html"
	@echo "  make bench   compare with other programs, side by side; writes docs/benchmarks.md"
	@echo "  make clean   remove the environment and caches (never results)"

# One stamp per set of extras; each is made anew when a pin changes.
$(VENV)/.installed-demo: $(PINS)
	$(PYTHON) tools/install.py --venv $(VENV) --extras quant
	@touch $@

$(VENV)/.installed-real: $(PINS)
	$(PYTHON) tools/install.py --venv $(VENV) --extras quant,real --with-real-model
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-test: $(PINS)
	$(PYTHON) tools/install.py --venv $(VENV) --extras quant,onnx,real,report,deepspeed,dev --with-real-model
	@touch $@ $(VENV)/.installed-demo $(VENV)/.installed-real

demo: $(VENV)/.installed-demo
	$(NIGHTGRID) run grids/smoke.yaml --emulate 2x8

real: $(VENV)/.installed-real
	$(NIGHTGRID) run grids/real.yaml --emulate 1x1:CPU

test: $(VENV)/.installed-test
	$(MAKE) --jobs=2 lint suite

suite: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $(PROCESSES)

# optimum-habana needs older libraries than all else, and a stand-in for the Habana bridge, which
# only the tests put on the path.
$(GAUDI_VENV)/.installed: $(PINS)
	$(PYTHON) tools/install.py --venv $(GAUDI_VENV) --extras hpu,gaudi-test --pins constraints-hpu.txt
	@touch $@

# A night starts one process after another, which leaves a processor to the other tests.
test-gaudi: $(GAUDI_VENV)/.installed
	$(MAKE) --jobs=2 --output-sync=target gaudi-night gaudi-rest

gaudi-night gaudi-rest: export PYTHONPATH = $(CURDIR)/tests/gaudi/standin

gaudi-night:
	$(GAUDI_VENV)/bin/python -m pytest tests/gaudi/test_whole_path.py

gaudi-rest:
	$(GAUDI_VENV)/bin/python -m pytest tests/gaudi --ignore=tests/gaudi/test_whole_path.py

quick: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $(QUICK_PROCESSES) --hypothesis-profile=quick --durations=20 --durations-min=1 -m "not ray and not slow and not real"

# One after the other, since each takes the whole machine; `make -k rehearsal` does all in any case.
rehearsal:
	$(MAKE) rehearsal-events
	$(MAKE) rehearsal-inputs
	$(MAKE) rehearsal-night

rehearsal-night: $(VENV)/.installed-test
	$(VENV)/bin/python tests/chaos/rehearsal.py --output rehearsal
	NIGHTGRID_REHEARSAL=1 $(VENV)/bin/python -m pytest tests/ray/test_ray_submission.py \
		-k "next_submission or busy_cluster or found_again or paths"
	NIGHTGRID_REHEARSAL=1 $(VENV)/bin/python -m pytest tests/workloads/engines \
		tests/workloads/inspection tests/workloads/data \
		tests/workloads/training/test_techniques_in_effect.py

rehearsal-inputs: $(VENV)/.installed-test
	$(VENV)/bin/python tests/hostile/hostile.py --inputs 10000 --output rehearsal/inputs

rehearsal-events: $(VENV)/.installed-test
	$(VENV)/bin/python tests/night/million.py --events 1000000 --output rehearsal/events

# Hours of one core. It goes on where it was stopped; a second `make defects` only reports.
defects: $(VENV)/.installed-test
	PYTHONPATH=tools $(VENV)/bin/python -m defects record
	PYTHONPATH=tools $(VENV)/bin/python -m defects plant
	PYTHONPATH=tools $(VENV)/bin/python -m defects report

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

docs: $(VENV)/.installed-demo
	$(VENV)/bin/python tools/make_site.py

# One benchmark alone: make bench BENCH=generation; a first look at all: make bench QUICK=1.
bench: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.install_peers .venv-bench
	$(VENV)/bin/python -m benchmarks $(BENCH) $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) $(GAUDI_VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
