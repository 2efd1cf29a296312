# The two commands of the README. Both make the environment in .venv first, once.

PYTHON ?= python3

.PHONY: demo test environment

demo: .venv/ready
	@bash examples/demo.sh

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m pytest

environment: .venv/ready

# Native code is built when the package is installed, so a change there installs it anew.
.venv/ready: pyproject.toml CMakeLists.txt $(wildcard native/*)
	@bash .ci/prerequisites $(PYTHON)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test,bench]"
	@touch $@
