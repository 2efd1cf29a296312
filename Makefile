# The two commands of the README. Both make the environment in .venv first, once.

PYTHON ?= python3
# The demo and the tests train for real. Where pip is told of a CPU build (PIP_FIND_LINKS,
# PIP_EXTRA_INDEX_URL), it takes that one; else it brings the CUDA libraries along.
TORCH ?= torch==2.13.0

# Versions of all else, for the Python that made them; without any: LOCK= make environment.
LOCK ?= requirements.lock

# Tests with real jobs wait half of their time, for other processes. A few measure, and run alone.
SLOW = tests/lab tests/torch tests/transport tests/ray
WORKERS = $(shell expr $$(nproc) + 1)

# Where Python may not write what it compiled, each worker of the tests would compile all of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick sanitize docs wheel environment lock

demo: .venv/ready
	@SHORT=$(SHORT) bash examples/demo.sh

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -n auto --dist worksteal tests/unit tests/cli
	.venv/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone" $(SLOW)
	.venv/bin/python -m pytest -m alone $(SLOW)

# What needs no lab, no torch and no Ray: the tests to run after each change. Tests of generated
# cases make a fifth of those that `make test` makes.
quick: .venv/ready
	FULLWIRE_FUZZ=0.2 .venv/bin/python -m pytest -n auto --dist worksteal tests/unit

# The native transport under ThreadSanitizer and AddressSanitizer.
sanitize: .venv/ready
	.venv/bin/python -m pytest tests/transport/test_transport_races.py

# The site, in build/site. Reference pages are made from the code; a broken link is an error.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict

# The source distribution, and the wheel for this Python, in dist; tried without a compiler.
wheel:
	@bash .ci/prerequisites $(PYTHON)
	@bash .ci/wheel $(PYTHON)

environment: .venv/ready

# Makes the lock anew, of the newest versions that go together.
lock: .venv/ready
	.venv/bin/python .ci/lock "$(TORCH)" > build/requirements.lock
	mv build/requirements.lock requirements.lock

# Native code is built when the package is installed, so a change there installs it anew. Python is
# compiled at once, since where it may not write that itself, each start would compile it anew.
.venv/ready: Makefile pyproject.toml CMakeLists.txt $(LOCK) $(wildcard native/*.cpp native/*/*)
	@bash .ci/prerequisites $(PYTHON)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(if $(LOCK),--constraint $(LOCK)) \
		"$(TORCH)" --editable ".[pictures,watch,test,bench,docs]"
	.venv/bin/python -m compileall -q src
	@touch $@
