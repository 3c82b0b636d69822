# make demo    installs jaxpar into .venv and runs the main job on the bundled model
# make test    installs what the tests need and runs them
# make check   formatting, lint and types
# make test-compile   installs the compilers of accelerators into .venv-compile and runs the tests that need them
# make clean   removes .venv, .venv-compile and every cache

VENV := .venv
VENV_COMPILE := .venv-compile
BIN := $(VENV)/bin
PIP_INSTALL := -m pip -qq --disable-pip-version-check --no-input install --root-user-action=ignore

.PHONY: demo test test-compile check clean

demo: $(VENV)/installed
	$(BIN)/jaxpar demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto

test-compile: $(VENV_COMPILE)/installed
	$(VENV_COMPILE)/bin/python -m pytest -n auto -m compile tests/compile

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# A stamp stands for a finished installation; a changed pyproject.toml starts a new environment.
$(VENV)/installed: pyproject.toml tools/find-python
	@rm -rf $(VENV)
	@python=$$(tools/find-python) && echo "Making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@echo "Installing jaxpar into $(VENV) (one to three minutes)"
	@$(BIN)/python $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing what the tests and checks need into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# Compilers are pinned to JAX's version, so that they have an environment of their own.
$(VENV_COMPILE)/installed: pyproject.toml tools/find-python
	@rm -rf $(VENV_COMPILE)
	@python=$$(tools/find-python) && echo "Making $(VENV_COMPILE) with $$python" && "$$python" -m venv $(VENV_COMPILE)
	@echo "Installing the compilers of TPUs and GPUs into $(VENV_COMPILE) (400 MB)"
	@$(VENV_COMPILE)/bin/python $(PIP_INSTALL) --editable '.[dev,tpu,gpu-compile]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_COMPILE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist out
	find . -name __pycache__ -prune -exec rm -rf {} +
