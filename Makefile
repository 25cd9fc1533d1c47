# One virtual environment in .venv; `make install` is done again only when what it depends on changes.
# Linux wheels of torch on PyPI carry CUDA. For the smaller CPU build:
#     make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
# That index is asked for torch alone, and PyPI for all else: where pip asks two at once, whoever has a
# name on one of them can publish a newer version on the other.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python $(INSTALL)
TORCH := $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
# Three processes: a test waits for Spark more than it computes. One that dies ends the run: its tests
# are lost, and the rest can wait for it without end. Compiled modules are kept whatever the environment
# says: else each of some 400 processes compiles all of BigDL that it imports, and each collection all tests.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LINTED := src python-tests examples benchmarks scripts docs/conf.py setup.py

.DEFAULT_GOAL := help
.PHONY: help install demo demo-serving lint style types size docs release sbom prepared test quick-tests test-all test-clusters test-spark test-zoo test-recommenders examples bench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create .venv and install BigDL in it with everything a developer needs

# torch first: it decides which build of it (CPU or CUDA) all others are resolved with.
$(VENV)/.torch: constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch setup.py pyproject.toml
	$(PIP) -e '.[orca,connect,java,ray,nano,tf,jax,automl,xgboost,inc,elasticsearch,encryption,kafka,delta,iceberg,mlflow,serving,dev,docs]'
	touch $@ $(VENV)/.installed-demo

# What the demo needs, which is a part of all that.
$(VENV)/.installed-demo: $(VENV)/.torch setup.py
	$(PIP) -e '.[orca]' scikit-learn
	touch $@

demo: $(VENV)/.installed-demo ## train, evaluate and predict on a Spark DataFrame in local mode
	$(BIN)/python examples/orca/digits.py

demo-serving: install ## from ratings of films to answered requests
	$(BIN)/python examples/friesian/serve_films.py

lint: style types ## ruff: rules and format; mypy: types

style: install
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: install
	$(BIN)/mypy

size: ## files and lines of code, by room
	$(PYTHON) scripts/count_code.py

# -E: a page that has not changed since a failed build must fail again.
docs: install ## HTML pages in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html

$(VENV)/.installed-release: $(VENV)/.installed
	$(PIP) build twine playwright
	touch $@

# Chromium for the look at the site: `.venv/bin/playwright install --with-deps --only-shell chromium`,
# or BIGDL_BROWSER names one. Installs every extra in an environment of its own, one after the other.
release: docs $(VENV)/.installed-release ## build and check wheel, source archive and site
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(MAKE) --no-print-directory sbom
	$(BIN)/python scripts/check_release.py dist/*.whl
	$(BIN)/python scripts/check_site.py docs/_build/html

# What a user gets with all extras and the versions that are tested together, as CycloneDX.
SBOM := .venv-sbom
sbom: ## the software bill of materials of the wheel in dist
	rm -rf $(SBOM)
	$(PYTHON) -m venv --without-pip $(SBOM)/bigdl
	$(PYTHON) -m venv $(SBOM)/tools
	$(SBOM)/tools/bin/python $(INSTALL) cyclonedx-bom
	$(SBOM)/tools/bin/python -m pip --python $(SBOM)/bigdl $(wordlist 3,9,$(INSTALL)) $(TORCH)
	$(SBOM)/tools/bin/python -m pip --python $(SBOM)/bigdl $(wordlist 3,9,$(INSTALL)) "$$(echo dist/bigdl-*.whl)[all]"
	$(SBOM)/tools/bin/python scripts/make_sbom.py $(SBOM)/bigdl dist
	rm -rf $(SBOM)

prepared: install
	-$(BIN)/bigdl-prepare

test: style ## lint, and every test that is not slow
	$(MAKE) --no-print-directory --jobs=2 types quick-tests

quick-tests: prepared
	$(PYTEST) -m "not slow"

test-all: install ## lint, documentation, and every test
	$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint docs prepared
	$(PYTEST)

test-clusters: install ## the tests on real clusters, one cluster after another
	$(BIN)/python -m pytest -m "yarn or kubernetes or hosts" python-tests/clusters

# An environment of its own with another Spark, and links to the other packages of .venv: a path in a .pth
# would come first in Spark's workers. Spark 3.5 wants NumPy 1 and pandas 2, and NumPy 1 an older pyarrow and
# no JAX, which TensorFlow would import.
SPARK ?= 3.5.7
SPARK_VENV := .venv-spark-$(SPARK)
NUMPY_1 := "numpy>=1.26,<2" "pandas>=2.2,<3" "pyarrow>=18,<19"
$(SPARK_VENV)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(SPARK_VENV)
	$(SPARK_VENV)/bin/python -m pip install --disable-pip-version-check pyspark==$(SPARK) \
	    $(if $(filter 3.%,$(SPARK)),$(NUMPY_1))
	-ln -s $(CURDIR)/$(VENV)/lib/python3.*/site-packages/* $(SPARK_VENV)/lib/python3.*/site-packages/ 2> /dev/null
	find $(SPARK_VENV)/lib -maxdepth 3 -type l \( -name 'pyspark-*' -o -name 'py4j-*' $(if $(filter 3.%,$(SPARK)), \
	    -o -name 'numpy-*' -o -name 'pandas-*' -o -name 'pyarrow-*' -o -name 'jax*') \) -delete
	touch $@

test-spark: $(SPARK_VENV)/.installed ## the tests of Orca on another Spark: make test-spark SPARK=3.5.7
	$(SPARK_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not slow" \
	    python-tests/orca/engines python-tests/orca/learn python-tests/orca/data python-tests/friesian

# An environment of its own that sees the packages of .venv. timm and segmentation_models_pytorch
# want a torchvision of the build of torch; the script needs its names only.
ZOO := .venv-zoo
$(ZOO)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(ZOO)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$($(ZOO)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/developer.pth
	$(ZOO)/bin/python -m pip install -c constraints.txt transformers torch-geometric
	$(ZOO)/bin/python -m pip install -c constraints.txt --no-deps timm segmentation-models-pytorch torchvision
	echo "$(CURDIR)/src" > $$($(ZOO)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/bigdl.pth
	touch $@

test-zoo: $(ZOO)/.installed ## accelerate models of timm, transformers, ... and compare them; replaces the table in the docs
	$(ZOO)/bin/python scripts/model_zoo.py --write docs/nano/zoo.md

# Environments of their own: RecTools wants an older NumPy, RePlay an older pandas.
PEERS := .venv-recommenders
$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)/rectools
	$(PEERS)/rectools/bin/python -m pip install rectools==0.19.0 pytrec-eval-terrier==0.5.11
	$(PYTHON) -m venv $(PEERS)/replay
	$(PEERS)/replay/bin/python -m pip install replay-rec==0.22.0
	touch $@

test-recommenders: install $(PEERS)/.installed ## compare ranking metrics with RecTools, RePlay and trec_eval
	BIGDL_RECOMMENDERS=$(PEERS) $(BIN)/python -m pytest python-tests/friesian/test_ranking_metrics_peers.py

examples: install ## run all examples and notebooks, and say how long each takes
	$(BIN)/python scripts/run_examples.py $(if $(BIGDL_DATA),--data-dir $(BIGDL_DATA))

bench: install ## measure the data path against its alternatives, side by side
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/ncf.py

clean: ## remove what builds and tests leave
	rm -rf build dist src/*.egg-info docs/_build docs/api/generated htmlcov .coverage .coverage.* \
    .mypy_cache \
	    .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find src python-tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	rm -rf $(VENV) $(ZOO) $(SBOM) $(PEERS) .venv-spark-*
