# One virtual environment in .venv; `make install` runs again only if its dependencies change.
# Linux wheels of torch on PyPI carry CUDA. For the smaller CPU build:
#     make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Only torch is installed from that index, all else from PyPI: if pip searches two indexes, anyone can
# publish a newer version of a package of one index on the other.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python $(INSTALL)
TORCH := $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
# Three processes, since tests mostly wait for Spark. The run ends if a process dies: its tests are lost,
# and others may wait for them forever. PYTHONDONTWRITEBYTECODE is unset: else each of about 400 processes
# compiles all modules that it imports, and each collection compiles all tests.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LINTED := src python-tests examples benchmarks scripts docs/conf.py setup.py

.DEFAULT_GOAL := help
.PHONY: help install demo demo-serving lint style types platform-types size docs release sbom prepared test quick-tests test-all test-portable test-clusters test-spark test-zoo test-recommenders examples bench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create .venv and install BigDL in it with everything a developer needs

# torch first: the other packages are resolved with its build (CPU or CUDA).
$(VENV)/.torch: constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch setup.py pyproject.toml
	$(PIP) -e '.[orca,connect,java,ray,nano,tf,jax,automl,xgboost,lightgbm,inc,elasticsearch,encryption,langchain,kafka,delta,iceberg,mlflow,serving,dev,docs]'
	touch $@ $(VENV)/.installed-demo

# The packages that the demo needs.
$(VENV)/.installed-demo: $(VENV)/.torch setup.py
	$(PIP) -e '.[orca]' scikit-learn
	-$(BIN)/bigdl-prepare
	touch $@

demo: $(VENV)/.installed-demo ## train, evaluate and predict on a Spark DataFrame in local mode
	$(BIN)/python examples/orca/digits.py

demo-serving: install ## train a recommender on film ratings, serve it and send requests
	$(BIN)/python examples/friesian/serve_films.py

lint: style types ## ruff: rules and format; mypy: types

style: install
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: install
	$(BIN)/mypy

platform-types: install ## mypy for macOS and Windows: calls that these lack
	$(BIN)/python scripts/check_platforms.py

size: ## files and lines of code, by package
	$(PYTHON) scripts/count_code.py

# -E: a page that has not changed since a failed build must fail again.
docs: install ## HTML pages in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html

$(VENV)/.installed-release: $(VENV)/.installed
	$(PIP) build twine playwright
	touch $@

# Chromium for the check of the site: `.venv/bin/playwright install --with-deps --only-shell chromium`,
# or set BIGDL_BROWSER to one. Installs each extra in a separate environment, sequentially.
release: docs $(VENV)/.installed-release ## build and check wheel, source archive and site
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(MAKE) --no-print-directory sbom
	$(BIN)/python scripts/check_release.py dist/*.whl
	$(BIN)/python scripts/check_site.py docs/_build/html
	$(BIN)/python scripts/publish_site.py docs/_build/html docs/_build/site

# The packages of an installation with all extras and the tested versions, as CycloneDX.
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

# Processes that imitate macOS, or Windows with PLATFORM=win32, run the tests that need no cluster.
PLATFORM ?= darwin
test-portable: install ## the local tests without what only Linux has
	$(PYTEST) --portable=$(PLATFORM) -m "not slow and not benchmark" @python-tests/portable.txt

test-clusters: install ## the tests on real clusters, one cluster after another
	$(BIN)/python -m pytest -m "yarn or kubernetes or hosts" python-tests/clusters

# A separate environment with another Spark, and links to the other packages of .venv: a path in a .pth
# file would take precedence in Spark's workers. Spark 3.5 needs NumPy 1 and pandas 2, and NumPy 1 needs an
# older pyarrow and no JAX, which TensorFlow would import.
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

# A separate environment with access to the packages of .venv. timm and segmentation_models_pytorch
# need a torchvision that matches torch; the script only needs its names.
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

# Separate environments: RecTools needs an older NumPy, RePlay an older pandas.
PEERS := .venv-recommenders
$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)/rectools
	$(PEERS)/rectools/bin/python -m pip install rectools==0.19.0 pytrec-eval-terrier==0.5.11
	$(PYTHON) -m venv $(PEERS)/replay
	$(PEERS)/replay/bin/python -m pip install replay-rec==0.22.0
	touch $@

test-recommenders: install $(PEERS)/.installed ## compare ranking metrics with RecTools, RePlay and trec_eval
	BIGDL_RECOMMENDERS=$(PEERS) $(BIN)/python -m pytest python-tests/friesian/test_ranking_metrics_peers.py

examples: install ## run all examples and notebooks, and print the time of each
	$(BIN)/python scripts/run_examples.py $(if $(BIGDL_DATA),--data-dir $(BIGDL_DATA))

bench: install ## compare the data path with its alternatives
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/ncf.py

clean: ## remove files of builds and tests
	rm -rf build dist src/*.egg-info docs/_build docs/api/generated htmlcov .coverage .coverage.* \
    .mypy_cache \
	    .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find src python-tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	rm -rf $(VENV) $(ZOO) $(SBOM) $(PEERS) .venv-spark-*
