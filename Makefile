# make demo    installs jaxpar into .venv and runs the main job on the bundled model
# make test    installs what the tests need and runs them
# make check   formatting, lint and types
# make clean   removes .venv and every cache

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
PIP_INSTALL := $(PIP) install --root-user-action=ignore

.PHONY: demo test check clean

demo: $(VENV)/installed
	$(BIN)/jaxpar demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# A stamp stands for a finished installation; a changed pyproject.toml starts a new environment.
$(VENV)/installed: pyproject.toml tools/find-python
	@rm -rf $(VENV)
	@python=$$(tools/find-python) && echo "Making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@echo "Installing jaxpar into $(VENV) (one to three minutes)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing what the tests and checks need into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist out
	find . -name __pycache__ -prune -exec rm -rf {} +
